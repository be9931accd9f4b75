// Softmax over the last dimension of scale * scores + mask: one read and one write of every element.
//
// Rows of up to 1024 columns: one warp a row, the row in registers. Longer rows: one block a row, the row in shared
// memory as float32; what does not fit there (from 24 000 columns on the smallest GPU, 58 000 on an H200) is read twice
// more.
//
// A warp works on chunks of 512 bytes. Where rows are aligned, a lane takes neighbouring columns, one 16-byte access;
// where they are not, neighbouring lanes take neighbouring columns. Sums go column by column over chunks, then over a
// tree of the bits of the column within the chunk, lowest first: the same additions both ways, so a row's bits depend
// on neither its place in the batch nor its alignment.
#pragma once

#include "cuda/common.cuh"
#include "cuda/kernels.h"

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

struct SoftmaxArgs {
  MaskedSoftmaxParams p;
  bool mask_vectors;  // with vectors: rows of the mask are aligned likewise, and have unit stride
  int mask_size;      // bytes of an element
  int kept;           // block kernel: chunks a warp may keep in shared memory
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

// Columns of the chunk from `first` that lie before `end`.
template <class L>
ATTN_DEVICE int columns_left(int64_t end, int64_t first) {
  return int(max_of<int64_t>(0, min_of<int64_t>(end - first, L::kColumns)));
}

// x = scores of a chunk, of which the first `left` columns are visible.
template <class L>
ATTN_DEVICE void load_scores(const typename L::T* scores, int left, float (&x)[L::kElements]) {
  if constexpr (L::kVectors) {
    if (L::column(0) < left) load_vector(scores + L::column(0), x);
  } else {
    ATTN_UNROLL
    for (int e = 0; e < L::kElements; ++e)
      if (L::column(e) < left) x[e] = to_float(simt::ldg(scores + L::column(e)));
  }
}

// What a mask element of type M makes of a score.
template <class M>
ATTN_DEVICE float masked(float score, float mask) {
  if constexpr (sizeof(M) == 1)
    return mask != 0.0f ? score : -INFINITY;
  else
    return score + mask;
}

// f(M{}) with the element type of the mask.
template <class T, class F>
ATTN_DEVICE void for_mask_type(DType dtype, const F& f) {
  if (dtype == DType::boolean)
    f(bool{});
  else if (dtype == DType::f32)
    f(float{});
  else if constexpr (sizeof(T) == 2)
    f(T{});
}

// Applies the mask to a chunk from column `first`.
template <class L>
ATTN_DEVICE void apply_mask(const SoftmaxArgs& a, const Row<typename L::T>& row, int64_t first, int left,
                            float (&x)[L::kElements]) {
  // One address for all types, so that there are few of them to keep in registers.
  const int64_t stride = a.p.mask_strides[3] * a.mask_size, step = L::kVectors ? stride : 32 * stride;
  const char* at = static_cast<const char*>(a.p.mask) + row.mask * a.mask_size + (first + L::column(0)) * stride;
  if (L::kVectors && a.mask_vectors) {
    if (L::column(0) >= left) return;
    for_mask_type<typename L::T>(a.p.mask_dtype, [&](auto type) {
      using M = decltype(type);
      float values[L::kElements];
      load_vector(reinterpret_cast<const M*>(at), values);
      ATTN_UNROLL
      for (int e = 0; e < L::kElements; ++e) x[e] = masked<M>(x[e], values[e]);
    });
  } else {
    ATTN_UNROLL
    for (int e = 0; e < L::kElements; ++e, at += step) {
      if (L::column(e) >= left) continue;
      for_mask_type<typename L::T>(a.p.mask_dtype, [&](auto type) {
        using M = decltype(type);
        x[e] = masked<M>(x[e], to_float(simt::ldg(reinterpret_cast<const M*>(at))));
      });
    }
  }
}

// x = the scores of a chunk from column `first`, as loaded, to logits; -inf where not visible.
template <class L>
ATTN_DEVICE void transform(const SoftmaxArgs& a, const Row<typename L::T>& row, int64_t first,
                           float (&x)[L::kElements]) {
  const int left = columns_left<L>(row.visible, first);
  const float scale = float(a.p.scale);
  ATTN_UNROLL
  for (int e = 0; e < L::kElements; ++e) x[e] = scale * x[e];
  if (a.p.mask) apply_mask<L>(a, row, first, left, x);
  ATTN_UNROLL
  for (int e = 0; e < L::kElements; ++e)
    if (L::column(e) >= left) x[e] = -INFINITY;
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

// Stores a chunk of exponentials times `factor`.
template <class L>
ATTN_DEVICE void store_weights(const SoftmaxArgs& a, const Row<typename L::T>& row, int64_t first, float factor,
                               float (&x)[L::kElements]) {
  ATTN_UNROLL
  for (int e = 0; e < L::kElements; ++e) x[e] *= factor;
  const int left = columns_left<L>(a.p.Tk, first);
  typename L::T* out = row.out + first;
  if constexpr (L::kVectors) {
    if (L::column(0) < left) store_vector(out + L::column(0), x);
  } else {
    ATTN_UNROLL
    for (int e = 0; e < L::kElements; ++e)
      if (L::column(e) < left) simt::st(out + L::column(e), simt::from_float<typename L::T>(x[e]));
  }
}

// A row with a NaN or +inf score, chunks from `first` on, `step` apart: NaN where a column is seen, 0 where not.
template <class L>
ATTN_DEVICE void store_nan_row(const SoftmaxArgs& a, const Row<typename L::T>& row, int64_t first, int64_t step) {
  ATTN_NO_UNROLL
  for (; first < a.p.Tk; first += step) {
    float x[L::kElements] = {};
    load_scores<L>(row.scores + first, columns_left<L>(row.visible, first), x);
    transform<L>(a, row, first, x);
    ATTN_UNROLL
    for (int e = 0; e < L::kElements; ++e) x[e] = x[e] == -INFINITY ? 0.0f : NAN;
    store_weights<L>(a, row, first, 1.0f, x);
  }
}

// ---- a warp a row --------------------------------------------------------------------------------------------------

template <class L>
ATTN_KERNEL(32 * kRowWarps, 5)
softmax_warp_kernel(ATTN_CONSTANT_PARAM SoftmaxArgs a) {
  constexpr int chunks = kRegisterColumns / L::kColumns;
  const int64_t rows = a.p.B0 * a.p.B1 * a.p.Tq;
  for (int64_t r = int64_t(simt::block_idx().x) * kRowWarps + simt::warp(); r < rows;
       r += int64_t(simt::grid_dim().x) * kRowWarps) {
    const Row<typename L::T> row(a.p, r);
    float x[chunks][L::kElements] = {};
    ATTN_UNROLL
    for (int i = 0; i < chunks; ++i)
      load_scores<L>(row.scores + i * L::kColumns, columns_left<L>(row.visible, i * L::kColumns), x[i]);
    float max = -INFINITY;
    ATTN_UNROLL
    for (int i = 0; i < chunks; ++i) {
      transform<L>(a, row, i * L::kColumns, x[i]);
      max = max_of_all(x[i], max);
    }
    max = finite_max(warp_max(max));
    float sums[L::kElements] = {};
    ATTN_UNROLL
    for (int i = 0; i < chunks; ++i) {
      exponentiate(x[i], max);
      ATTN_UNROLL
      for (int e = 0; e < L::kElements; ++e) sums[e] += x[i][e];
    }
    const float factor = reciprocal(tree_sum<L>(sums));
    if (factor != factor) {
      store_nan_row<L>(a, row, 0, L::kColumns);
      continue;
    }
    ATTN_UNROLL
    for (int i = 0; i < chunks; ++i)
      if (i * L::kColumns < a.p.Tk) store_weights<L>(a, row, i * L::kColumns, factor, x[i]);
  }
}

// ---- a block a row -------------------------------------------------------------------------------------------------

// A lane's elements of chunk i of its warp, in shared memory: 16 bytes a lane, lanes side by side.
template <class L>
ATTN_DEVICE simt::Float4* kept_chunk(int i, int quarter) {
  auto* base = reinterpret_cast<simt::Float4*>(ATTN_SHARED + 2 * kBlockWarps * sizeof(float));
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

template <class L>
ATTN_KERNEL(kBlockThreads, 3)
softmax_block_kernel(ATTN_CONSTANT_PARAM SoftmaxArgs a) {
  constexpr int step = kBlockWarps * L::kColumns;  // columns between a warp's chunks
  float* maxima = reinterpret_cast<float*>(ATTN_SHARED);
  float* warp_sums = maxima + kBlockWarps;
  const int64_t start = simt::warp() * L::kColumns, rows = a.p.B0 * a.p.B1 * a.p.Tq;
  for (int64_t r = simt::block_idx().x; r < rows; r += simt::grid_dim().x) {
    const Row<typename L::T> row(a.p, r);
    const auto logits = [&](int64_t first, float (&x)[L::kElements]) {
      load_scores<L>(row.scores + first, columns_left<L>(row.visible, first), x);
      transform<L>(a, row, first, x);
    };
    float max = -INFINITY;
    int i = 0;
    for (int64_t first = start; first < row.visible; first += step, ++i) {
      float x[L::kElements] = {};
      logits(first, x);
      max = max_of_all(x, max);
      if (i < a.kept) keep<L>(i, x);
    }
    max = finite_max(over_warps(maxima, warp_max(max), [](float u, float v) { return simt::max(u, v); }));

    float sums[L::kElements] = {};
    i = 0;
    for (int64_t first = start; first < row.visible; first += step, ++i) {
      float x[L::kElements] = {};
      if (i < a.kept)
        recall<L>(i, x);
      else
        logits(first, x);
      exponentiate(x, max);
      ATTN_UNROLL
      for (int e = 0; e < L::kElements; ++e) sums[e] += x[e];
      if (i < a.kept) keep<L>(i, x);
    }
    const float sum = over_warps(warp_sums, tree_sum<L>(sums), [](float u, float v) { return u + v; });
    const float factor = reciprocal(sum);
    if (factor != factor) {
      store_nan_row<L>(a, row, start, step);
      continue;
    }

    i = 0;
    for (int64_t first = start; first < a.p.Tk; first += step, ++i) {
      float x[L::kElements] = {};
      if (first < row.visible) {
        if (i < a.kept) {
          recall<L>(i, x);
        } else {
          logits(first, x);
          exponentiate(x, max);
        }
      }
      store_weights<L>(a, row, first, factor, x);
    }
  }
}

// ---- launcher ------------------------------------------------------------------------------------------------------

template <class L>
void launch_softmax_as(SoftmaxArgs& a, simt::Stream stream) {
  const MaskedSoftmaxParams& p = a.p;
  const int64_t rows = p.B0 * p.B1 * p.Tq;
  if (p.Tk <= kRegisterColumns) {
    const int64_t blocks = min_of(ceil_div<int64_t>(rows, kRowWarps), kMaxGrid);
    void (*kernel)(SoftmaxArgs) = softmax_warp_kernel<L>;
    simt::launch(kernel, simt::Dim{uint32_t(blocks)}, {32 * kRowWarps}, 0, stream, a);
  } else {
    constexpr int64_t chunk_bytes = kBlockThreads * L::kElements * int64_t(sizeof(float));  // of all warps
    constexpr int64_t reduction_bytes = 2 * kBlockWarps * int64_t(sizeof(float));
    const int64_t needed = ceil_div<int64_t>(p.Tk, kBlockWarps * L::kColumns);
    a.kept = int(min_of(needed, (simt::device().max_shared - reduction_bytes) / chunk_bytes));
    void (*kernel)(SoftmaxArgs) = softmax_block_kernel<L>;
    simt::launch(kernel, simt::Dim{uint32_t(min_of(rows, kMaxGrid))}, {kBlockThreads},
                 size_t(reduction_bytes + a.kept * chunk_bytes), stream, a);
  }
}

template <class T>
void launch_softmax(SoftmaxArgs& a, simt::Stream stream) {
  const MaskedSoftmaxParams& p = a.p;
  constexpr int64_t elements = Layout<T, true>::kElements;
  const auto aligned = [&](const void* base, int64_t element_size, const int64_t* strides) {
    const int64_t bytes = min_of<int64_t>(16, elements * element_size);
    return all_multiples(bytes, base, strides[0] * element_size, strides[1] * element_size, strides[2] * element_size);
  };
  a.mask_size = p.mask_dtype == DType::boolean ? 1 : p.mask_dtype == DType::f32 ? 4 : 2;
  const bool vectors =
      p.Tk % elements == 0 && aligned(p.scores, sizeof(T), p.scores_strides) && all_multiples(16, p.out);
  a.mask_vectors = vectors && p.mask && p.mask_strides[3] == 1 && aligned(p.mask, a.mask_size, p.mask_strides);
  if (vectors)
    launch_softmax_as<Layout<T, true>>(a, stream);
  else
    launch_softmax_as<Layout<T, false>>(a, stream);
}

void masked_softmax(const MaskedSoftmaxParams& p, const Launch& launch) {
  if (p.B0 * p.B1 * p.Tq * p.Tk == 0) return;
  SoftmaxArgs a{p, false, 0, 0};
  dispatch(p.dtype, [&](auto t) { launch_softmax<decltype(t)>(a, simt::Stream(launch.stream)); });
}

}  // namespace attn_ext::cuda
