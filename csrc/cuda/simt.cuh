// Everything CUDA-specific that the kernels use, each function with two bodies: one for nvcc, one for the host
// executor (simt/host.h), which runs the same kernel sources on a CPU. No other file contains asm or CUDA builtins.
//
// Kernels read and write global memory with ld/ldg/st and shared memory with lds/sts, so that the executor can check
// and count every access. All warp functions act on the full warp of 32 lanes. In fragments, lane l has g = l / 4 and
// t = l % 4.
//
// SIMT_WHERE ends the parameter list of a function that can report a fault: on the host it is the caller's file and
// line, on the device nothing. A helper that takes SIMT_WHERE and hands it on with SIMT_AT is reported at its
// caller's line. SIMT_HERE is for a function without other parameters, SIMT_WHERE_AGAIN for a specialization.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#define ATTN_DEVICE __device__ __forceinline__
#define ATTN_HOST_DEVICE __host__ __device__ __forceinline__
// ATTN_KERNEL(128, 2) name(args): at most 128 threads, at least 2 blocks per multiprocessor.
#define ATTN_KERNEL(max_threads, min_blocks) __global__ void __launch_bounds__(max_threads, min_blocks)
#define ATTN_CONSTANT_PARAM const __grid_constant__  // kernel parameter that is only read
#define ATTN_UNROLL _Pragma("unroll")
#define ATTN_NO_UNROLL _Pragma("unroll 1")
#define SIMT_WHERE
#define SIMT_AT
#define SIMT_HERE
#define SIMT_WHERE_AGAIN
#else
#include <source_location>

#define ATTN_DEVICE inline
#define ATTN_HOST_DEVICE inline
#define ATTN_KERNEL(max_threads, min_blocks) inline __attribute__((noinline)) void
#define ATTN_CONSTANT_PARAM const
#define ATTN_UNROLL
#define ATTN_NO_UNROLL
#define SIMT_WHERE , const std::source_location& where = std::source_location::current()
#define SIMT_WHERE_AGAIN , const std::source_location& where
#define SIMT_AT , where
#define SIMT_HERE const std::source_location& where = std::source_location::current()
#endif

namespace simt {

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};
struct Index {
  u32 x, y, z;
};
struct Dim {
  u32 x = 1, y = 1, z = 1;
};
// The grid of a launch; on the host it also knows where the launch is written.
struct Grid : Dim {
#ifdef __CUDACC__
  Grid(Dim dim) : Dim(dim) {}
#else
  std::source_location where;
  Grid(Dim dim SIMT_WHERE) : Dim(dim), where(where) {}
#endif
};
struct alignas(8) Float2 {
  float x, y;
};
struct alignas(8) U32x2 {
  u32 x, y;
};
struct alignas(16) U32x4 {
  u32 x, y, z, w;
};
struct alignas(16) Float4 {
  float x, y, z, w;
};

// What a launcher may ask about the device it launches on.
struct Device {
  int sms;         // multiprocessors
  int max_shared;  // bytes of shared memory a block may have
  int cc;          // compute capability, 80 for 8.0
};

#ifdef __CUDACC__
using Stream = cudaStream_t;
#else
using Stream = void*;
#endif

}  // namespace simt

#ifndef __CUDACC__
#include "simt/host.h"
#endif

namespace simt {

// ---- threads ----

ATTN_DEVICE Index thread_idx() {
#ifdef __CUDACC__
  return {threadIdx.x, threadIdx.y, threadIdx.z};
#else
  return host::current->index;
#endif
}

ATTN_DEVICE Index block_idx() {
#ifdef __CUDACC__
  return {blockIdx.x, blockIdx.y, blockIdx.z};
#else
  return host::block_index;
#endif
}

ATTN_DEVICE Index block_dim() {
#ifdef __CUDACC__
  return {blockDim.x, blockDim.y, blockDim.z};
#else
  return host::block_size;
#endif
}

ATTN_DEVICE Index grid_dim() {
#ifdef __CUDACC__
  return {gridDim.x, gridDim.y, gridDim.z};
#else
  return host::grid_size;
#endif
}

// Lane and warp of a block whose threads are laid out along x.
ATTN_DEVICE int lane() {
#ifdef __CUDACC__
  return int(threadIdx.x & 31);
#else
  return host::current->lane;
#endif
}

ATTN_DEVICE int warp() {
#ifdef __CUDACC__
  return int(threadIdx.x >> 5);
#else
  return host::current->warp_id;
#endif
}

// ---- barriers ----

ATTN_DEVICE void sync_threads(SIMT_HERE) {
#ifdef __CUDACC__
  __syncthreads();
#else
  host::sync_threads(where);
#endif
}

// Barrier of the block; true where any thread's predicate is.
ATTN_DEVICE bool sync_threads_or(bool predicate SIMT_WHERE) {
#ifdef __CUDACC__
  return __syncthreads_or(predicate);
#else
  return host::sync_threads_or(predicate, where);
#endif
}

// Barrier of the warp; orders its lanes' memory accesses.
ATTN_DEVICE void sync_warp(SIMT_HERE) {
#ifdef __CUDACC__
  __syncwarp();
#else
  host::sync_warp(where);
#endif
}

// ---- warp votes and shuffles (4-byte or 8-byte values) ----

ATTN_DEVICE u32 ballot(bool predicate SIMT_WHERE) {
#ifdef __CUDACC__
  return __ballot_sync(0xffffffffu, predicate);
#else
  return host::ballot(predicate, where);
#endif
}

ATTN_DEVICE bool any(bool predicate SIMT_WHERE) {
#ifdef __CUDACC__
  return __any_sync(0xffffffffu, predicate);
#else
  return host::ballot(predicate, where) != 0;
#endif
}

ATTN_DEVICE bool all(bool predicate SIMT_WHERE) {
#ifdef __CUDACC__
  return __all_sync(0xffffffffu, predicate);
#else
  return host::ballot(predicate, where) == 0xffffffffu;
#endif
}

// The value of lane `source` (modulo 32).
template <class T>
ATTN_DEVICE T shfl(T value, int source SIMT_WHERE) {
#ifdef __CUDACC__
  return __shfl_sync(0xffffffffu, value, source);
#else
  return host::shuffle(host::Op::shfl, value, source, where);
#endif
}

template <class T>
ATTN_DEVICE T shfl_xor(T value, int mask SIMT_WHERE) {
#ifdef __CUDACC__
  return __shfl_xor_sync(0xffffffffu, value, mask);
#else
  return host::shuffle(host::Op::shfl_xor, value, mask, where);
#endif
}

// The value of lane + delta; lanes whose source is past the warp keep their own.
template <class T>
ATTN_DEVICE T shfl_down(T value, int delta SIMT_WHERE) {
#ifdef __CUDACC__
  return __shfl_down_sync(0xffffffffu, value, delta);
#else
  return host::shuffle(host::Op::shfl_down, value, delta, where);
#endif
}

template <class T>
ATTN_DEVICE T shfl_up(T value, int delta SIMT_WHERE) {
#ifdef __CUDACC__
  return __shfl_up_sync(0xffffffffu, value, delta);
#else
  return host::shuffle(host::Op::shfl_up, value, delta, where);
#endif
}

// ---- global memory ----

template <class T>
ATTN_DEVICE T ld(const T* p SIMT_WHERE) {
#ifdef __CUDACC__
  return *p;
#else
  return host::global_load<T>(p, false, where);
#endif
}

// Load of memory that nothing writes while the kernel runs.
template <class T>
ATTN_DEVICE T ldg(const T* p SIMT_WHERE) {
#ifdef __CUDACC__
  if constexpr (sizeof(T) == 16) {
    uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
    return reinterpret_cast<const T&>(v);
  } else if constexpr (sizeof(T) == 8) {
    uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
    return reinterpret_cast<const T&>(v);
  } else if constexpr (sizeof(T) == 4) {
    u32 v = __ldg(reinterpret_cast<const u32*>(p));
    return reinterpret_cast<const T&>(v);
  } else if constexpr (sizeof(T) == 2) {
    u16 v = __ldg(reinterpret_cast<const u16*>(p));
    return reinterpret_cast<const T&>(v);
  } else {
    static_assert(sizeof(T) == 1, "ldg of 1, 2, 4, 8 or 16 bytes");
    uint8_t v = __ldg(reinterpret_cast<const uint8_t*>(p));
    return reinterpret_cast<const T&>(v);
  }
#else
  return host::global_load<T>(p, true, where);
#endif
}

template <class T>
ATTN_DEVICE void st(T* p, T value SIMT_WHERE) {
#ifdef __CUDACC__
  *p = value;
#else
  host::global_store(p, value, where);
#endif
}

// 16 bytes at a 16-byte boundary.
ATTN_DEVICE U32x4 ld128(const void* p SIMT_WHERE) {
#ifdef __CUDACC__
  uint4 v = *static_cast<const uint4*>(p);
  return {v.x, v.y, v.z, v.w};
#else
  return host::global_load<U32x4>(p, false, where);
#endif
}

ATTN_DEVICE U32x4 ldg128(const void* p SIMT_WHERE) {
#ifdef __CUDACC__
  uint4 v = __ldg(static_cast<const uint4*>(p));
  return {v.x, v.y, v.z, v.w};
#else
  return host::global_load<U32x4>(p, true, where);
#endif
}

ATTN_DEVICE void st128(void* p, U32x4 value SIMT_WHERE) {
#ifdef __CUDACC__
  *static_cast<uint4*>(p) = make_uint4(value.x, value.y, value.z, value.w);
#else
  host::global_store(static_cast<U32x4*>(p), value, where);
#endif
}

// Returns the value before; T is int, u32 or float.
template <class T>
ATTN_DEVICE T atomic_add(T* p, T value SIMT_WHERE) {
#ifdef __CUDACC__
  return atomicAdd(p, value);
#else
  return host::atomic_add(p, value, where);
#endif
}

// Writes before it are visible to other blocks before writes after it.
ATTN_DEVICE void thread_fence() {
#ifdef __CUDACC__
  __threadfence();
#endif
}

// ---- shared memory ----

// Base of the block's dynamic shared memory, aligned to 1024 bytes.
ATTN_DEVICE char* shared() {
#ifdef __CUDACC__
  extern __shared__ __align__(1024) char simt_shared_memory[];
  return simt_shared_memory;
#else
  return host::shared_base;
#endif
}
#define ATTN_SHARED (::simt::shared())

template <class T>
ATTN_DEVICE T lds(const T* p SIMT_WHERE) {
#ifdef __CUDACC__
  return *p;
#else
  return host::shared_load<T>(p, where);
#endif
}

template <class T>
ATTN_DEVICE void sts(T* p, T value SIMT_WHERE) {
#ifdef __CUDACC__
  *p = value;
#else
  host::shared_store(p, value, where);
#endif
}

ATTN_DEVICE U32x4 lds128(const void* p SIMT_WHERE) {
#ifdef __CUDACC__
  uint4 v = *static_cast<const uint4*>(p);
  return {v.x, v.y, v.z, v.w};
#else
  return host::shared_load<U32x4>(p, where);
#endif
}

ATTN_DEVICE void sts128(void* p, U32x4 value SIMT_WHERE) {
#ifdef __CUDACC__
  *static_cast<uint4*>(p) = make_uint4(value.x, value.y, value.z, value.w);
#else
  host::shared_store(static_cast<U32x4*>(p), value, where);
#endif
}

// ---- asynchronous copies, global to shared ----

// Bytes (4, 8 or 16) from global memory to shared memory, both aligned to that. Of the source only the first
// src_bytes are read, the rest becomes zero. The data are there after cp_async_wait, and for other threads after a
// barrier that follows it.
template <int Bytes>
ATTN_DEVICE void cp_async(void* shared_ptr, const void* global_ptr, int src_bytes = Bytes SIMT_WHERE) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
#ifdef __CUDACC__
  u32 dst = u32(__cvta_generic_to_shared(shared_ptr));
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(global_ptr), "r"(src_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(global_ptr), "n"(Bytes), "r"(src_bytes)
                 : "memory");
  }
#else
  host::cp_async(shared_ptr, global_ptr, Bytes, src_bytes, where);
#endif
}

ATTN_DEVICE void cp_async16(void* shared_ptr, const void* global_ptr, int src_bytes = 16 SIMT_WHERE) {
  cp_async<16>(shared_ptr, global_ptr, src_bytes SIMT_AT);
}

// Closes the group of this thread's copies since the last commit; a group may be empty.
ATTN_DEVICE void cp_async_commit() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  host::cp_async_commit();
#endif
}

// Waits until at most Pending of this thread's groups are in flight.
template <int Pending>
ATTN_DEVICE void cp_async_wait() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
#else
  host::cp_async_wait(Pending);
#endif
}

// ---- matrix fragments ----

// 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned to 16)
// and receives, of each matrix, elements (g, 2t) and (g, 2t + 1); transposed: (2t, g) and (2t + 1, g).
ATTN_DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row SIMT_WHERE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(u32(__cvta_generic_to_shared(row)))
               : "memory");
#else
  host::ldmatrix(r, 4, row, false, where);
#endif
}

ATTN_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row SIMT_WHERE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(u32(__cvta_generic_to_shared(row)))
               : "memory");
#else
  host::ldmatrix(r, 4, row, true, where);
#endif
}

ATTN_DEVICE void ldmatrix_x2(u32 (&r)[2], const void* row SIMT_WHERE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(u32(__cvta_generic_to_shared(row)))
               : "memory");
#else
  host::ldmatrix(r, 2, row, false, where);
#endif
}

ATTN_DEVICE void ldmatrix_x2_trans(u32 (&r)[2], const void* row SIMT_WHERE) {
#ifdef __CUDACC__
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(u32(__cvta_generic_to_shared(row)))
               : "memory");
#else
  host::ldmatrix(r, 2, row, true, where);
#endif
}

// c (16x8, float32) += a (16x16) b (16x8), T is bf16 or f16. Fragments, low half first:
//   a: rows g, g + 8, g, g + 8; columns 2t.. in a[0], a[1], 2t + 8.. in a[2], a[3]
//   b: rows (k) 2t.. in b0, 2t + 8.. in b1; column g
//   c: row g in c[0], c[1], row g + 8 in c[2], c[3]; columns 2t, 2t + 1
template <class T>
ATTN_DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1 SIMT_WHERE);

template <>
ATTN_DEVICE void mma_m16n8k16<bf16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1 SIMT_WHERE_AGAIN) {
#ifdef __CUDACC__
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  host::mma(c, a, b0, b1, true, where);
#endif
}

template <>
ATTN_DEVICE void mma_m16n8k16<f16>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1 SIMT_WHERE_AGAIN) {
#ifdef __CUDACC__
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  host::mma(c, a, b0, b1, false, where);
#endif
}

template <class T>
ATTN_DEVICE void mma_m16n8k16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2] SIMT_WHERE) {
  mma_m16n8k16<T>(c, a, b[0], b[1] SIMT_AT);
}

// ---- arithmetic ----

// 2^x, about 2 ulp; 0 for -inf, subnormals are 0.
ATTN_DEVICE float ex2(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return host::ex2(x);
#endif
}

// log2(x), about 2^-22 absolute near 1; -inf for 0.
ATTN_DEVICE float lg2(float x) {
#ifdef __CUDACC__
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return ::log2f(host::flush(x));
#endif
}

// 1 / x, about 1 ulp.
ATTN_DEVICE float rcp(float x) {
#ifdef __CUDACC__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return host::flush(1.0f / host::flush(x));
#endif
}

ATTN_DEVICE float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
ATTN_DEVICE float max(float a, float b) { return ::fmaxf(a, b); }
ATTN_DEVICE float min(float a, float b) { return ::fminf(a, b); }

ATTN_DEVICE u32 float_bits(float x) {
#ifdef __CUDACC__
  return __float_as_uint(x);
#else
  return std::bit_cast<u32>(x);
#endif
}

ATTN_DEVICE float float_from_bits(u32 x) {
#ifdef __CUDACC__
  return __uint_as_float(x);
#else
  return std::bit_cast<float>(x);
#endif
}

// ---- 16-bit floats: round to nearest even ----

ATTN_DEVICE float to_float(float x) { return x; }
ATTN_DEVICE float to_float(bf16 x) { return float_from_bits(u32(x.bits) << 16); }
ATTN_DEVICE float to_float(f16 x) {
#ifdef __CUDACC__
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  return warp_ops::float_of_f16(x.bits);
#endif
}

template <class T>
ATTN_DEVICE T from_float(float x);
template <>
ATTN_DEVICE float from_float<float>(float x) {
  return x;
}
template <>
ATTN_DEVICE bf16 from_float<bf16>(float x) {
#ifdef __CUDACC__
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  return {warp_ops::bf16_of_float(x)};
#endif
}
template <>
ATTN_DEVICE f16 from_float<f16>(float x) {
#ifdef __CUDACC__
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  return {warp_ops::f16_of_float(x)};
#endif
}

// Two floats in one register; lo in the low half, which is the lower address.
template <class T>
ATTN_DEVICE u32 pack2(float lo, float hi);
template <>
ATTN_DEVICE u32 pack2<bf16>(float lo, float hi) {
#ifdef __CUDACC__
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
#else
  return warp_ops::bf16_of_float(lo) | u32(warp_ops::bf16_of_float(hi)) << 16;
#endif
}
template <>
ATTN_DEVICE u32 pack2<f16>(float lo, float hi) {
#ifdef __CUDACC__
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
#else
  return warp_ops::f16_of_float(lo) | u32(warp_ops::f16_of_float(hi)) << 16;
#endif
}

template <class T>
ATTN_DEVICE Float2 unpack2(u32 x) {
  return {to_float(T{u16(x)}), to_float(T{u16(x >> 16)})};
}

// ---- host side: devices and launches ----

#ifdef __CUDACC__
inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Shared memory above 48 KB must be asked for, once per kernel and device.
inline void allow_shared(const void* kernel, size_t bytes) {
  if (bytes <= 48 * 1024) return;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  std::lock_guard<std::mutex> lock(mutex);
  size_t& have = allowed[{kernel, device}];
  if (have >= bytes) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)), "shared memory size");
  have = bytes;
}
#endif

// The current device.
inline Device device() {
#ifdef __CUDACC__
  int id, sms, shared, major, minor;
  check(cudaGetDevice(&id), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, id), "multiprocessors");
  check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, id), "shared memory per block");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, id), "compute capability");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, id), "compute capability");
  return {sms, shared, 10 * major + minor};
#else
  return host::device;
#endif
}

// Starts kernel(args...) on grid x block threads with shared_bytes of dynamic shared memory. Throws
// std::runtime_error; under the executor the kernel has ended when launch returns, and a fault is thrown.
template <class... Parameters, class... Args>
void launch(void (*kernel)(Parameters...), Grid grid, Dim block, size_t shared_bytes, Stream stream, Args... args) {
#ifdef __CUDACC__
  allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
  kernel<<<dim3(grid.x, grid.y, grid.z), dim3(block.x, block.y, block.z), shared_bytes, stream>>>(Parameters(args)...);
  check(cudaGetLastError(), "kernel launch");
#else
  (void)stream;
  auto body = [&] { kernel(Parameters(args)...); };
  host::launch(
      reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, grid.where,
      [](void* context) { (*static_cast<decltype(body)*>(context))(); }, &body);
#endif
}

}  // namespace simt
