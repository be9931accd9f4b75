// The host executor, as the bodies of the wrappers in simt.cuh see it.
//
// A kernel runs block by block; within a block every CUDA thread is a fiber. A fiber runs until it waits: for the
// other lanes of its warp at a collective, or for the block at a barrier. Everything is checked on the way, and the
// first fault ends the launch with a Fault. One launch at a time.
#pragma once

#include <bit>
#include <cstring>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.h"
#include "warp_ops.h"

namespace simt {

// What a kernel did wrong: "file:line: what (kernel, block, thread)".
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace host {

using Where = std::source_location;

enum class Op : uint8_t {
  shfl,
  shfl_xor,
  shfl_down,
  shfl_up,
  ballot,
  sync_warp,
  ldmatrix_x2,
  ldmatrix_x4,
  ldmatrix_x2_trans,
  ldmatrix_x4_trans,
  mma_bf16,
  mma_f16,
};

// Per-lane operands and results of the collective at which a warp's lanes meet.
struct Warp {
  u32 arrived = 0;  // lanes that wait at the collective
  u32 ready = 0;    // lanes that can run
  Op op{};
  Where where;
  u32 since = 0;  // time of the last barrier that this warp passed
  u64 value[32];  // shuffle and vote
  u64 result[32];
  int source[32];  // shuffle: lane, mask or delta
  const char* row[32];
  u32 a[4][32];  // mma operands, or what ldmatrix loaded
  u32 b[2][32];
  float c[4][32];
};

struct AsyncCopy {
  char* dst;
  const char* src;
  int bytes, src_bytes;
  u32 group;
  Where where;
};

struct Thread {
  Index index;
  int lane, warp_id;
  int id;  // linear
  Warp* warp;
  fiber::Context context;
  enum State : uint8_t { running, at_barrier, exited } state;
  u32 groups;  // of cp.async, committed
  std::vector<AsyncCopy> copies;
  Where where;  // of the barrier it waits at
};

extern Thread* current;
extern Index block_index, block_size, grid_size;
extern char* shared_base;
extern Device device;
extern u64 exp_count;

// Runs body(context) as every thread of the grid.
void launch(const void* kernel, Dim grid, Dim block, size_t shared_bytes, const Where& where, void (*body)(void*),
            void* context);

void sync_threads(const Where& where);
bool sync_threads_or(bool predicate, const Where& where);

// The lane's operands lie in the warp; its results do when this returns.
void collective(Op op, const Where& where);

// Checks and counts one access; `constant`: nothing may write there during the kernel.
void global_read(const void* p, int bytes, bool constant, const Where& where);
void global_write(void* p, int bytes, const Where& where);
void global_atomic(void* p, int bytes, const Where& where);
void shared_read(const void* p, int bytes, const Where& where);
void shared_write(void* p, int bytes, const Where& where);
void cp_async(void* shared_ptr, const void* global_ptr, int bytes, int src_bytes, const Where& where);
void cp_async_commit();
void cp_async_wait(int pending);

inline void sync_warp(const Where& where) { collective(Op::sync_warp, where); }

inline u32 ballot(bool predicate, const Where& where) {
  Warp& w = *current->warp;
  w.value[current->lane] = predicate;
  collective(Op::ballot, where);
  return u32(w.result[current->lane]);
}

template <class T>
T shuffle(Op op, T value, int source, const Where& where) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  Warp& w = *current->warp;
  int lane = current->lane;
  std::memcpy(&w.value[lane], &value, sizeof(T));
  w.source[lane] = source;
  collective(op, where);
  std::memcpy(&value, &w.result[lane], sizeof(T));
  return value;
}

template <int N>
void ldmatrix(u32 (&r)[N], int matrices, const void* row, bool transposed, const Where& where) {
  Warp& w = *current->warp;
  int lane = current->lane;
  w.row[lane] = static_cast<const char*>(row);
  collective(matrices == 4 ? (transposed ? Op::ldmatrix_x4_trans : Op::ldmatrix_x4)
                           : (transposed ? Op::ldmatrix_x2_trans : Op::ldmatrix_x2),
             where);
  for (int i = 0; i < N; ++i) r[i] = w.a[i][lane];
}

inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, bool is_bf16, const Where& where) {
  Warp& w = *current->warp;
  int lane = current->lane;
  for (int i = 0; i < 4; ++i) {
    w.a[i][lane] = a[i];
    w.c[i][lane] = c[i];
  }
  w.b[0][lane] = b0;
  w.b[1][lane] = b1;
  collective(is_bf16 ? Op::mma_bf16 : Op::mma_f16, where);
  for (int i = 0; i < 4; ++i) c[i] = w.c[i][lane];
}

template <class T>
T global_load(const void* p, bool constant, const Where& where) {
  global_read(p, sizeof(T), constant, where);
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

template <class T>
void global_store(T* p, T value, const Where& where) {
  global_write(p, sizeof(T), where);
  std::memcpy(static_cast<void*>(p), &value, sizeof(T));
}

template <class T>
T atomic_add(T* p, T value, const Where& where) {
  global_atomic(p, sizeof(T), where);
  T before = *p;
  *p = before + value;
  return before;
}

template <class T>
T shared_load(const void* p, const Where& where) {
  shared_read(p, sizeof(T), where);
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}

template <class T>
void shared_store(T* p, T value, const Where& where) {
  shared_write(p, sizeof(T), where);
  std::memcpy(static_cast<void*>(p), &value, sizeof(T));
}

// Subnormals are zero, as for the approximate instructions.
inline float flush(float x) { return ::fabsf(x) < 0x1p-126f ? ::copysignf(0.0f, x) : x; }

inline float ex2(float x) {
  ++exp_count;
  return flush(::exp2f(x));
}

}  // namespace host

// Runs body(context); null, or the message of what it threw (valid until the next call).
const char* guarded(void (*body)(void*), void* context);

// The same for a callable: what a C entry point of a test library returns.
template <class F>
const char* guarded(F body) {
  return guarded([](void* context) { (*static_cast<F*>(context))(); }, &body);
}

}  // namespace simt
