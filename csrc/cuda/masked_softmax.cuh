// Softmax over the last dimension of scale * scores + mask: one read and one write of every element.
//
// Rows of up to 1024 columns: one warp a row, the row in registers. Longer rows: one block a row, the row in shared
// memory as float32; what does not fit there (from 24 000 columns on the smallest GPU, 58 000 on an H200) is read twice
// more.
#pragma once

#include "cuda/kernels.h"
#include "cuda/rows.cuh"

namespace attn_ext::cuda {

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

// Stores a chunk of exponentials times `factor`.
template <class L>
ATTN_DEVICE void store_weights(const SoftmaxArgs& a, const Row<typename L::T>& row, int64_t first, float factor,
                               float (&x)[L::kElements]) {
  ATTN_UNROLL
  for (int e = 0; e < L::kElements; ++e) x[e] *= factor;
  store_chunk<L>(row.out, first, a.p.Tk, x);
}

// A row with a NaN or +inf score, chunks from `first` on, `step` apart: NaN where a column is seen, 0 where not.
template <class L>
ATTN_DEVICE void store_nan_row(const SoftmaxArgs& a, const Row<typename L::T>& row, int64_t first, int64_t step) {
  ATTN_NO_UNROLL
  for (; first < a.p.Tk; first += step) {
    float x[L::kElements] = {};
    load_chunk<L>(row.scores + first, columns_left<L>(row.visible, first), x);
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
      load_chunk<L>(row.scores + i * L::kColumns, columns_left<L>(row.visible, i * L::kColumns), x[i]);
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
      load_chunk<L>(row.scores + first, columns_left<L>(row.visible, first), x);
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
    a.kept = chunks_to_keep<L>(p.Tk);
    void (*kernel)(SoftmaxArgs) = softmax_block_kernel<L>;
    simt::launch(kernel, simt::Dim{uint32_t(min_of(rows, kMaxGrid))}, {kBlockThreads}, shared_bytes<L>(a.kept), stream,
                 a);
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
