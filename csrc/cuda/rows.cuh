// Rows as the kernels over a last dimension see them: in chunks, of a warp or of a block, summed in a fixed order.
//
// A warp works on chunks of 512 bytes. Where rows are aligned, a lane takes neighbouring columns, one 16-byte access;
// where they are not, neighbouring lanes take neighbouring columns. Sums go column by column over chunks, then over a
// tree of the bits of the column within the chunk, lowest first: the same additions both ways, so a row's bits depend
// on neither its place in the batch nor its alignment.
#pragma once

#include "cuda/common.cuh"

namespace attn_ext::cuda {

// How the elements of a chunk lie in a warp.
template <class T_, bool kVectors_>
struct Layout {
  using T = T_;
  static constexpr bool kVectors = kVectors_;            // neighbouring columns in a lane, else in neighbouring lanes
  static constexpr int kElements = 16 / int(sizeof(T));  // of a lane
  static constexpr int kColumns = 32 * kElements;        // of the chunk

  // Column of a lane's element e within the chunk.
  ATTN_DEVICE static int column(int e) { return kVectors ? simt::lane() * kElements + e : e * 32 + simt::lane(); }
};

constexpr int kRegisterColumns = 1024;  // longest row of the warp kernel
constexpr int kRowWarps = 4;            // rows of a block of the warp kernel
constexpr int kBlockThreads = 256;      // of the block kernel
constexpr int kBlockWarps = kBlockThreads / 32;
constexpr int kReductionBytes = 2 * kBlockWarps * int(sizeof(float));  // begin the block kernel's shared memory

// Columns of the chunk from `first` that lie before `end`.
template <class L>
ATTN_DEVICE int columns_left(int64_t end, int64_t first) {
  return int(max_of<int64_t>(0, min_of<int64_t>(end - first, L::kColumns)));
}

// x = the first `left` columns of the chunk at `from`; the others keep what x holds.
template <class L>
ATTN_DEVICE void load_chunk(const typename L::T* from, int left, float (&x)[L::kElements]) {
  if constexpr (L::kVectors) {
    if (L::column(0) < left) load_vector(from + L::column(0), x);
  } else {
    ATTN_UNROLL
    for (int e = 0; e < L::kElements; ++e)
      if (L::column(e) < left) x[e] = to_float(simt::ldg(from + L::column(e)));
  }
}

// Stores the chunk from column `first` of a row of so many columns.
template <class L>
ATTN_DEVICE void store_chunk(typename L::T* row, int64_t first, int64_t columns, const float (&x)[L::kElements]) {
  const int left = columns_left<L>(columns, first);
  typename L::T* to = row + first;
  if constexpr (L::kVectors) {
    if (L::column(0) < left) store_vector(to + L::column(0), x);
  } else {
    ATTN_UNROLL
    for (int e = 0; e < L::kElements; ++e)
      if (L::column(e) < left) simt::st(to + L::column(e), simt::from_float<typename L::T>(x[e]));
  }
}

// Sum of a warp's chunk of sums.
template <class L>
ATTN_DEVICE float tree_sum(float (&sums)[L::kElements]) {
  if constexpr (!L::kVectors) {  // the low bits of a column are the lane's
    ATTN_UNROLL
    for (int e = 0; e < L::kElements; ++e) sums[e] = warp_sum(sums[e]);
  }
  ATTN_UNROLL
  for (int step = 1; step < L::kElements; step *= 2) {
    ATTN_UNROLL
    for (int e = 0; e < L::kElements; e += 2 * step) sums[e] += sums[e + step];
  }
  return L::kVectors ? warp_sum(sums[0]) : sums[0];
}

// ---- a block a row -------------------------------------------------------------------------------------------------

// A lane's elements of chunk i of its warp, in shared memory: 16 bytes a lane, lanes side by side.
template <class L>
ATTN_DEVICE simt::Float4* kept_chunk(int i, int quarter) {
  auto* base = reinterpret_cast<simt::Float4*>(ATTN_SHARED + kReductionBytes);
  return base + (i * (L::kElements / 4) + quarter) * kBlockThreads + int(simt::thread_idx().x);
}

template <class L>
ATTN_DEVICE void keep(int i, const float (&x)[L::kElements]) {
  ATTN_UNROLL
  for (int q = 0; q < L::kElements / 4; ++q)
    simt::sts(kept_chunk<L>(i, q), simt::Float4{x[4 * q], x[4 * q + 1], x[4 * q + 2], x[4 * q + 3]});
}

template <class L>
ATTN_DEVICE void recall(int i, float (&x)[L::kElements]) {
  ATTN_UNROLL
  for (int q = 0; q < L::kElements / 4; ++q) {
    const simt::Float4 v = simt::lds(kept_chunk<L>(i, q));
    x[4 * q] = v.x, x[4 * q + 1] = v.y, x[4 * q + 2] = v.z, x[4 * q + 3] = v.w;
  }
}

// All warps' values at `values`, folded in order by f.
template <class F>
ATTN_DEVICE float over_warps(float* values, float mine, const F& f) {
  if (simt::lane() == 0) simt::sts(values + simt::warp(), mine);
  simt::sync_threads();
  float result = simt::lds(values);
  ATTN_UNROLL
  for (int w = 1; w < kBlockWarps; ++w) result = f(result, simt::lds(values + w));
  return result;
}

// Chunks a warp keeps of a row of so many columns, and the shared memory of a block that keeps so many.
template <class L>
constexpr int64_t kept_bytes = kBlockThreads * L::kElements * int64_t(sizeof(float));  // one chunk of all warps

template <class L>
int chunks_to_keep(int64_t columns) {
  const int64_t needed = ceil_div<int64_t>(columns, kBlockWarps * L::kColumns);
  return int(min_of(needed, (simt::device().max_shared - kReductionBytes) / kept_bytes<L>));
}
template <class L>
size_t shared_bytes(int kept) {
  return size_t(kReductionBytes + kept * kept_bytes<L>);
}

}  // namespace attn_ext::cuda
