// Kernels whose traffic and instruction counts are known in advance.
#include "simt.cuh"

#define ENTRY extern "C" const char*

using simt::u32;
using simt::U32x4;

namespace counters {

ATTN_DEVICE int tid() { return int(simt::thread_idx().x); }

// Thread i copies element i * stride + offset.
template <class T>
ATTN_KERNEL(1024, 1)
strided_copy(const T* in, T* out, int stride, int offset) {
  int i = int(simt::block_idx().x * simt::block_dim().x) + tid();
  simt::st(out + i, simt::ldg(in + i * stride + offset));
}

// A warp writes shared memory in order, and reads element lane * stride.
template <class T>
ATTN_KERNEL(32, 1)
shared_stride(T* out, int stride) {
  T* tile = reinterpret_cast<T*>(simt::shared());
  for (int i = 0; i < 32; ++i) simt::sts(tile + 32 * i + tid(), T{});
  simt::sync_warp();
  simt::st(out + tid(), simt::lds(tile + tid() * stride));
}

// Rows of row_bytes at a pitch, their 16-byte chunks permuted by xor with row / divide modulo `modulo`; every thread
// writes chunks in order, the warp reads every column of chunks of 32 rows by ldmatrix_x4.
ATTN_KERNEL(32, 1) matrix_rows(int row_bytes, int pitch, int divide, int modulo) {
  int chunks = row_bytes / 16;
  for (int i = tid(); i < 32 * chunks; i += 32) {
    int row = i / chunks, chunk = i % chunks ^ row / divide % modulo;
    simt::sts128(simt::shared() + row * pitch + chunk * 16, U32x4{});
  }
  simt::sync_warp();
  u32 r[4];
  for (int c = 0; c < chunks; ++c) {
    int row = simt::lane(), chunk = c ^ row / divide % modulo;
    simt::ldmatrix_x4(r, simt::shared() + row * pitch + chunk * 16);
  }
}

// Per block of 2 warps: 3 barriers, 1 cp.async of 16 bytes per thread, and per warp 5 mma, 2 shuffles, 1 vote,
// 1 barrier of the warp and 1 ex2 per thread.
ATTN_KERNEL(64, 1) instructions(const float* in) {
  simt::cp_async16(simt::shared() + 16 * tid(), in);
  simt::cp_async_commit();
  simt::cp_async_wait<0>();
  for (int i = 0; i < 3; ++i) simt::sync_threads();
  float c[4] = {};
  u32 a[4] = {};
  for (int i = 0; i < 5; ++i) simt::mma_m16n8k16<simt::bf16>(c, a, 0, 0);
  c[0] = simt::shfl_xor(simt::shfl(c[0], 0), 1);
  if (simt::any(c[0] > 0)) c[1] = 1;
  simt::sync_warp();
  c[2] = simt::ex2(c[1]);
}

// Every block adds its threads' ones to out[0].
ATTN_KERNEL(64, 1) add_ones(u32* out) { simt::atomic_add(out, 1u); }

}  // namespace counters

using namespace counters;

ENTRY copy_words(const u32* in, u32* out, int blocks, int threads, int stride, int offset) {
  return simt::guarded([&] {
    simt::launch(strided_copy<u32>, simt::Dim{u32(blocks)}, simt::Dim{u32(threads)}, 0, nullptr, in, out, stride,
                 offset);
  });
}

ENTRY copy_vectors(const U32x4* in, U32x4* out, int blocks, int threads, int stride, int offset) {
  return simt::guarded([&] {
    simt::launch(strided_copy<U32x4>, simt::Dim{u32(blocks)}, simt::Dim{u32(threads)}, 0, nullptr, in, out, stride,
                 offset);
  });
}

ENTRY shared_words(u32* out, int stride) {
  return simt::guarded(
      [&] { simt::launch(shared_stride<u32>, simt::Dim{}, simt::Dim{32}, 32 * 32 * 4, nullptr, out, stride); });
}

ENTRY shared_vectors(U32x4* out, int stride) {
  return simt::guarded(
      [&] { simt::launch(shared_stride<U32x4>, simt::Dim{}, simt::Dim{32}, 32 * 32 * 16, nullptr, out, stride); });
}

ENTRY rows(int row_bytes, int pitch, int divide, int modulo) {
  return simt::guarded([&] {
    simt::launch(matrix_rows, simt::Dim{}, simt::Dim{32}, 32 * pitch, nullptr, row_bytes, pitch, divide, modulo);
  });
}

ENTRY instruction_counts(const float* in, int blocks) {
  return simt::guarded([&] { simt::launch(instructions, simt::Dim{u32(blocks)}, simt::Dim{64}, 1024, nullptr, in); });
}

ENTRY ones(u32* out, int blocks) {
  return simt::guarded([&] { simt::launch(add_ones, simt::Dim{u32(blocks)}, simt::Dim{64}, 0, nullptr, out); });
}

ENTRY bad_launch(int which) {
  return simt::guarded([&] {
    if (which == 0) simt::launch(matrix_rows, simt::Dim{0}, simt::Dim{32}, 0, nullptr, 16, 16, 1, 1);
    if (which == 1) simt::launch(matrix_rows, simt::Dim{1, 70000}, simt::Dim{32}, 0, nullptr, 16, 16, 1, 1);
    if (which == 2) simt::launch(matrix_rows, simt::Dim{}, simt::Dim{48}, 0, nullptr, 16, 16, 1, 1);
    if (which == 3) simt::launch(matrix_rows, simt::Dim{}, simt::Dim{32}, 228 * 1024, nullptr, 16, 16, 1, 1);
  });
}
