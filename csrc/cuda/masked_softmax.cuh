// Softmax over the last dimension of scale * scores + mask: one read and one write of every element.
//
// Rows of up to 1024 columns: one warp a row, the row in registers. Longer rows: one block a row, the row in shared
// memory as float32; what does not fit there (from 24 000 columns on the smallest GPU, 58 000 on an H200) is read
// again.
//
// A warp works on chunks of 32 * kVec columns. Where rows are aligned, a lane takes kVec neighbouring columns, one
// 16-byte access; where they are not, neighbouring lanes take neighbouring columns. Sums go column by column over
// chunks, then over a tree of the bits of the column within the chunk, lowest first: the same additions both ways, so
// a row's bits depend on neither its place in the batch nor its alignment.
#pragma once

#include "cuda/common.cuh"
#include "cuda/kernels.h"

namespace attn_ext::cuda {

template <class T>
constexpr int kVec = 16 / int(sizeof(T));  // elements of one access
template <class T>
constexpr int kChunk = 32 * kVec<T>;  // columns of a warp's step

constexpr int kRegisterColumns = 1024;  // longest row of the warp kernel
constexpr int kRowWarps = 4;            // rows of a block of the warp kernel
constexpr int kBlockThreads = 256;      // of the block kernel
constexpr int kBlockWarps = kBlockThreads / 32;

struct SoftmaxArgs {
  MaskedSoftmaxParams p;
  bool vector;       // rows of scores and out are aligned to 16 bytes and whole vectors long
  bool mask_vector;  // rows of the mask are aligned likewise, with unit stride
  int kept;          // block kernel: chunks a warp may keep in shared memory
};

// One row: where it is, and how many of its columns are visible to it under `causal`.
template <class T>
struct Row {
  const T* scores;
  T* out;
  int64_t mask;  // offset of its first column
  int64_t visible;

  ATTN_DEVICE Row(const MaskedSoftmaxParams& p, int64_t row) {
    const auto [batch, i] = divide(row, p.Tq);
    const auto [b0, b1] = divide(batch, p.B1);
    scores =
        static_cast<const T*>(p.scores) + b0 * p.scores_strides[0] + b1 * p.scores_strides[1] + i * p.scores_strides[2];
    out = static_cast<T*>(p.out) + row * p.Tk;
    mask = b0 * p.mask_strides[0] + b1 * p.mask_strides[1] + i * p.mask_strides[2];
    visible = p.causal ? min_of(p.Tk, max_of<int64_t>(0, i + p.Tk - p.Tq + 1)) : p.Tk;
  }
};

// Column within the chunk of a lane's element e.
template <class T>
ATTN_DEVICE int column_of(bool vector, int e) {
  return vector ? simt::lane() * kVec<T> + e : e * 32 + simt::lane();
}

// x = scores of a chunk, of which the first `left` columns are visible.
template <class T>
ATTN_DEVICE void load_scores(const T* scores, int64_t left, bool vector, float (&x)[kVec<T>]) {
  if (vector) {
    if (column_of<T>(true, 0) < left) load_vector(scores + column_of<T>(true, 0), x);
  } else {
    ATTN_UNROLL
    for (int e = 0; e < kVec<T>; ++e)
      if (column_of<T>(false, e) < left) x[e] = to_float(simt::ldg(scores + column_of<T>(false, e)));
  }
}

// x = scale * x + mask, for a mask of type M whose chunk starts at `mask`; -inf where not visible.
template <class T, class M>
ATTN_DEVICE void apply_mask(const SoftmaxArgs& a, const M* mask, int64_t left, float (&x)[kVec<T>]) {
  const auto apply = [](float value, float& score) {
    if constexpr (sizeof(M) == 1)
      score = value != 0.0f ? score : -INFINITY;
    else
      score += value;
  };
  if (a.mask_vector) {
    float values[kVec<T>];
    if (column_of<T>(true, 0) < left) {
      load_vector(mask + column_of<T>(true, 0), values);
      ATTN_UNROLL
      for (int e = 0; e < kVec<T>; ++e) apply(values[e], x[e]);
    }
  } else {
    ATTN_UNROLL
    for (int e = 0; e < kVec<T>; ++e) {
      const int column = column_of<T>(a.vector, e);
      if (column < left) apply(to_float(simt::ldg(mask + column * a.p.mask_strides[3])), x[e]);
    }
  }
}

// x = the scores of a chunk from column `first`, as loaded, to logits.
template <class T>
ATTN_DEVICE void transform(const SoftmaxArgs& a, const Row<T>& row, int64_t first, float (&x)[kVec<T>]) {
  const int64_t left = row.visible - first;
  const float scale = float(a.p.scale);
  ATTN_UNROLL
  for (int e = 0; e < kVec<T>; ++e) x[e] = scale * x[e];
  if (a.p.mask) {
    const int64_t offset = row.mask + first * a.p.mask_strides[3];
    if (a.p.mask_dtype == DType::boolean)
      apply_mask<T>(a, static_cast<const bool*>(a.p.mask) + offset, left, x);
    else if (a.p.mask_dtype == DType::f32)
      apply_mask<T>(a, static_cast<const float*>(a.p.mask) + offset, left, x);
    else if constexpr (sizeof(T) == 2)
      apply_mask<T>(a, static_cast<const T*>(a.p.mask) + offset, left, x);
  }
  ATTN_UNROLL
  for (int e = 0; e < kVec<T>; ++e)
    if (column_of<T>(a.vector, e) >= left) x[e] = -INFINITY;
}

template <int n>
ATTN_DEVICE float max_of_all(const float (&x)[n], float max) {
  ATTN_UNROLL
  for (int e = 0; e < n; ++e) max = simt::max(max, x[e]);
  return max;
}

// x = e^(x - max). The difference comes first: scores may be so large that their products with log2(e) are not exact
// enough, or not finite.
template <int n>
ATTN_DEVICE void exponentiate(float (&x)[n], float max) {
  ATTN_UNROLL
  for (int e = 0; e < n; ++e) x[e] = simt::ex2((x[e] - max) * kLog2e);
}

// What to subtract: 0 where no column is seen.
ATTN_DEVICE float finite_max(float max) { return max == -INFINITY ? 0.0f : max; }
ATTN_DEVICE float reciprocal(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

// Sum of a warp's chunk of sums.
template <class T>
ATTN_DEVICE float tree_sum(bool vector, float (&sums)[kVec<T>]) {
  if (!vector) {  // the low bits of a column are the lane's
    ATTN_UNROLL
    for (int e = 0; e < kVec<T>; ++e) sums[e] = warp_sum(sums[e]);
  }
  ATTN_UNROLL
  for (int step = 1; step < kVec<T>; step *= 2) {
    ATTN_UNROLL
    for (int e = 0; e < kVec<T>; e += 2 * step) sums[e] += sums[e + step];
  }
  return vector ? warp_sum(sums[0]) : sums[0];
}

// In a row with a NaN or +inf score every seen weight is NaN, and what is not seen is 0: x becomes 1 or 0.
template <class T>
ATTN_DEVICE void mark_seen(const SoftmaxArgs& a, const Row<T>& row, int64_t first, float (&x)[kVec<T>]) {
  load_scores(row.scores + first, row.visible - first, a.vector, x);
  transform(a, row, first, x);
  ATTN_UNROLL
  for (int e = 0; e < kVec<T>; ++e) x[e] = x[e] == -INFINITY ? 0.0f : 1.0f;
}

// Stores a chunk of exponentials times `factor`; a 0 stays 0 even if that is NaN.
template <class T>
ATTN_DEVICE void store_weights(const SoftmaxArgs& a, const Row<T>& row, int64_t first, float factor,
                               float (&x)[kVec<T>]) {
  ATTN_UNROLL
  for (int e = 0; e < kVec<T>; ++e) x[e] = x[e] == 0.0f ? 0.0f : x[e] * factor;
  if (a.vector) {
    const int64_t column = first + column_of<T>(true, 0);
    if (column < a.p.Tk) store_vector(row.out + column, x);
  } else {
    ATTN_UNROLL
    for (int e = 0; e < kVec<T>; ++e) {
      const int64_t column = first + column_of<T>(false, e);
      if (column < a.p.Tk) simt::st(row.out + column, simt::from_float<T>(x[e]));
    }
  }
}

// ---- a warp a row --------------------------------------------------------------------------------------------------

template <class T>
ATTN_KERNEL(32 * kRowWarps, 5)
softmax_warp_kernel(ATTN_CONSTANT_PARAM SoftmaxArgs a) {
  constexpr int chunks = kRegisterColumns / kChunk<T>;
  const int64_t rows = a.p.B0 * a.p.B1 * a.p.Tq;
  for (int64_t r = int64_t(simt::block_idx().x) * kRowWarps + simt::warp(); r < rows;
       r += int64_t(simt::grid_dim().x) * kRowWarps) {
    const Row<T> row(a.p, r);
    float x[chunks][kVec<T>] = {};
    ATTN_UNROLL
    for (int i = 0; i < chunks; ++i)
      load_scores(row.scores + i * kChunk<T>, row.visible - i * kChunk<T>, a.vector, x[i]);
    float max = -INFINITY;
    ATTN_UNROLL
    for (int i = 0; i < chunks; ++i) {
      transform(a, row, i * kChunk<T>, x[i]);
      max = max_of_all(x[i], max);
    }
    max = finite_max(warp_max(max));
    float sums[kVec<T>] = {};
    ATTN_UNROLL
    for (int i = 0; i < chunks; ++i) {
      exponentiate(x[i], max);
      ATTN_UNROLL
      for (int e = 0; e < kVec<T>; ++e) sums[e] += x[i][e];
    }
    const float factor = reciprocal(tree_sum<T>(a.vector, sums));
    ATTN_UNROLL
    for (int i = 0; i < chunks; ++i) {
      if (factor != factor) mark_seen(a, row, i * kChunk<T>, x[i]);
      if (i * kChunk<T> < a.p.Tk) store_weights(a, row, i * kChunk<T>, factor, x[i]);
    }
  }
}

// ---- a block a row -------------------------------------------------------------------------------------------------

// A lane's elements of chunk i of its warp, in shared memory: 16 bytes a lane, lanes side by side.
template <class T>
ATTN_DEVICE simt::Float4* kept_chunk(int i, int quarter) {
  auto* base = reinterpret_cast<simt::Float4*>(ATTN_SHARED + 2 * kBlockWarps * sizeof(float));
  return base + (i * (kVec<T> / 4) + quarter) * kBlockThreads + int(simt::thread_idx().x);
}

template <class T>
ATTN_DEVICE void keep(int i, const float (&x)[kVec<T>]) {
  ATTN_UNROLL
  for (int q = 0; q < kVec<T> / 4; ++q)
    simt::sts(kept_chunk<T>(i, q), simt::Float4{x[4 * q], x[4 * q + 1], x[4 * q + 2], x[4 * q + 3]});
}

template <class T>
ATTN_DEVICE void recall(int i, float (&x)[kVec<T>]) {
  ATTN_UNROLL
  for (int q = 0; q < kVec<T> / 4; ++q) {
    const simt::Float4 v = simt::lds(kept_chunk<T>(i, q));
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

template <class T>
ATTN_KERNEL(kBlockThreads, 4)
softmax_block_kernel(ATTN_CONSTANT_PARAM SoftmaxArgs a) {
  constexpr int step = kBlockWarps * kChunk<T>;  // columns between a warp's chunks
  float* maxima = reinterpret_cast<float*>(ATTN_SHARED);
  float* warp_sums = maxima + kBlockWarps;
  const int64_t start = simt::warp() * kChunk<T>, rows = a.p.B0 * a.p.B1 * a.p.Tq;
  for (int64_t r = simt::block_idx().x; r < rows; r += simt::grid_dim().x) {
    const Row<T> row(a.p, r);
    const auto logits = [&](int64_t first, float (&x)[kVec<T>]) {
      load_scores(row.scores + first, row.visible - first, a.vector, x);
      transform(a, row, first, x);
    };
    float max = -INFINITY;
    int i = 0;
    for (int64_t first = start; first < row.visible; first += step, ++i) {
      float x[kVec<T>] = {};
      logits(first, x);
      max = max_of_all(x, max);
      if (i < a.kept) keep<T>(i, x);
    }
    max = finite_max(over_warps(maxima, warp_max(max), [](float u, float v) { return simt::max(u, v); }));

    float sums[kVec<T>] = {};
    i = 0;
    for (int64_t first = start; first < row.visible; first += step, ++i) {
      float x[kVec<T>] = {};
      if (i < a.kept)
        recall<T>(i, x);
      else
        logits(first, x);
      exponentiate(x, max);
      ATTN_UNROLL
      for (int e = 0; e < kVec<T>; ++e) sums[e] += x[e];
      if (i < a.kept) keep<T>(i, x);
    }
    const float sum = over_warps(warp_sums, tree_sum<T>(a.vector, sums), [](float u, float v) { return u + v; });
    const float factor = reciprocal(sum);

    i = 0;
    for (int64_t first = start; first < a.p.Tk; first += step, ++i) {
      float x[kVec<T>] = {};
      if (first < row.visible) {
        if (factor != factor) {
          mark_seen(a, row, first, x);
        } else if (i < a.kept) {
          recall<T>(i, x);
        } else {
          logits(first, x);
          exponentiate(x, max);
        }
      }
      store_weights(a, row, first, factor, x);
    }
  }
}

// ---- launcher ------------------------------------------------------------------------------------------------------

template <class T>
void launch_softmax(SoftmaxArgs& a, simt::Stream stream) {
  const MaskedSoftmaxParams& p = a.p;
  const auto aligned = [&](const void* base, int64_t element_size, const int64_t* strides) {
    const int64_t bytes = min_of<int64_t>(16, kVec<T> * element_size);
    return all_multiples(bytes, base, strides[0] * element_size, strides[1] * element_size, strides[2] * element_size);
  };
  const int64_t mask_size = p.mask_dtype == DType::boolean ? 1 : p.mask_dtype == DType::f32 ? 4 : 2;
  a.vector = p.Tk % kVec<T> == 0 && aligned(p.scores, sizeof(T), p.scores_strides) && all_multiples(16, p.out);
  a.mask_vector = a.vector && p.mask && p.mask_strides[3] == 1 && aligned(p.mask, mask_size, p.mask_strides);

  const int64_t rows = p.B0 * p.B1 * p.Tq;
  if (p.Tk <= kRegisterColumns) {
    const int64_t blocks = min_of(ceil_div<int64_t>(rows, kRowWarps), kMaxGrid);
    void (*kernel)(SoftmaxArgs) = softmax_warp_kernel<T>;
    simt::launch(kernel, simt::Dim{uint32_t(blocks)}, {32 * kRowWarps}, 0, stream, a);
  } else {
    constexpr int64_t chunk_bytes = kBlockThreads * kVec<T> * int64_t(sizeof(float));  // of all warps
    constexpr int64_t reduction_bytes = 2 * kBlockWarps * int64_t(sizeof(float));
    const int64_t needed = ceil_div<int64_t>(p.Tk, kBlockWarps * kChunk<T>);
    a.kept = int(min_of(needed, (simt::device().max_shared - reduction_bytes) / chunk_bytes));
    void (*kernel)(SoftmaxArgs) = softmax_block_kernel<T>;
    simt::launch(kernel, simt::Dim{uint32_t(min_of(rows, kMaxGrid))}, {kBlockThreads},
                 size_t(reduction_bytes + a.kept * chunk_bytes), stream, a);
  }
}

void masked_softmax(const MaskedSoftmaxParams& p, const Launch& launch) {
  if (p.B0 * p.B1 * p.Tq * p.Tk == 0) return;
  SoftmaxArgs a{p, false, false, 0};
  dispatch(p.dtype, [&](auto t) { launch_softmax<decltype(t)>(a, simt::Stream(launch.stream)); });
}

}  // namespace attn_ext::cuda
