// RMSNorm and LayerNorm over the last dimension: one read and one write of every element, statistics in float32.
//
//   RMSNorm    y = x / sqrt(mean(x^2) + eps) * weight
//   LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
//
// Rows of up to 1024 columns: one warp a row, the row in registers. Longer rows: one block a row, the row in shared
// memory as float32; what does not fit there is read again. The mean that LayerNorm subtracts is a rounded one; the sum
// of x - mean is what rounding took from it, and corrects variance and result (Chan, Golub and LeVeque 1983).
#pragma once

#include "cuda/kernels.h"
#include "cuda/rows.cuh"

namespace attn_ext::cuda {

struct NormArgs {
  NormParams p;
  int kept;  // block kernel: chunks a warp may keep in shared memory
};

// Of one row; the same in every lane.
struct NormStatistics {
  float mean = 0.0f, correction = 0.0f;  // x - mean - correction is centered; both 0 in RMSNorm
  float factor;                          // one over the standard deviation, or over the root mean square

  // From the sums of d = x - mean and of d^2.
  ATTN_DEVICE void finish(const NormParams& p, float rest, float squares) {
    correction = p.centered ? rest / float(p.C) : 0.0f;
    const float variance = squares / float(p.C) - correction * correction;
    factor = 1.0f / ::sqrtf((variance < 0.0f ? 0.0f : variance) + float(p.eps));  // below 0 by rounding; NaN stays
  }
};

// Adds d = x - mean and d^2 of a chunk to a lane's sums of them.
template <class L>
ATTN_DEVICE void add_deviations(const float (&x)[L::kElements], int left, float mean, float (&rest)[L::kElements],
                                float (&squares)[L::kElements]) {
  ATTN_UNROLL
  for (int e = 0; e < L::kElements; ++e) {
    const float d = L::column(e) < left ? x[e] - mean : 0.0f;
    rest[e] += d;
    squares[e] = simt::fma(d, d, squares[e]);
  }
}

// Stores what becomes of a row's chunk from column `first`.
template <class L>
ATTN_DEVICE void store_normed(const NormParams& p, int64_t row, int64_t first, const NormStatistics& s,
                              float (&x)[L::kElements]) {
  using T = typename L::T;
  const int left = columns_left<L>(p.C, first);
  float weight[L::kElements] = {}, bias[L::kElements] = {};
  load_chunk<L>(static_cast<const T*>(p.weight) + first, left, weight);
  if (p.bias) load_chunk<L>(static_cast<const T*>(p.bias) + first, left, bias);
  ATTN_UNROLL
  for (int e = 0; e < L::kElements; ++e) {
    x[e] = (x[e] - s.mean - s.correction) * s.factor * weight[e];
    if (p.bias) x[e] += bias[e];
  }
  store_chunk<L>(static_cast<T*>(p.y) + row * p.C, first, p.C, x);
}

// ---- a warp a row --------------------------------------------------------------------------------------------------

template <class L>
ATTN_KERNEL(32 * kRowWarps, 5)
norm_warp_kernel(ATTN_CONSTANT_PARAM NormArgs a) {
  constexpr int chunks = kRegisterColumns / L::kColumns;
  const NormParams& p = a.p;
  for (int64_t row = int64_t(simt::block_idx().x) * kRowWarps + simt::warp(); row < p.rows;
       row += int64_t(simt::grid_dim().x) * kRowWarps) {
    const typename L::T* from = static_cast<const typename L::T*>(p.x) + row * p.x_stride;
    float x[chunks][L::kElements] = {};
    ATTN_UNROLL
    for (int i = 0; i < chunks; ++i) load_chunk<L>(from + i * L::kColumns, columns_left<L>(p.C, i * L::kColumns), x[i]);

    NormStatistics s;
    if (p.centered) {
      float sums[L::kElements] = {};
      ATTN_UNROLL
      for (int i = 0; i < chunks; ++i) {
        ATTN_UNROLL
        for (int e = 0; e < L::kElements; ++e) sums[e] += x[i][e];
      }
      s.mean = tree_sum<L>(sums) / float(p.C);
    }
    float rest[L::kElements] = {}, squares[L::kElements] = {};
    ATTN_UNROLL
    for (int i = 0; i < chunks; ++i)
      add_deviations<L>(x[i], columns_left<L>(p.C, i * L::kColumns), s.mean, rest, squares);
    s.finish(p, tree_sum<L>(rest), tree_sum<L>(squares));

    ATTN_UNROLL
    for (int i = 0; i < chunks; ++i)
      if (i * L::kColumns < p.C) store_normed<L>(p, row, i * L::kColumns, s, x[i]);
  }
}

// ---- a block a row -------------------------------------------------------------------------------------------------

template <class L>
ATTN_KERNEL(kBlockThreads, 3)
norm_block_kernel(ATTN_CONSTANT_PARAM NormArgs a) {
  constexpr int step = kBlockWarps * L::kColumns;  // columns between a warp's chunks
  const NormParams& p = a.p;
  const int64_t start = simt::warp() * L::kColumns;

  // Sums of all warps, in two places by turns: a place is written again after the barrier of the other one, when every
  // warp has read it.
  float* place = reinterpret_cast<float*>(ATTN_SHARED);
  float* other = place + kBlockWarps;
  const auto sum = [&](float (&sums)[L::kElements]) {
    const float total = over_warps(place, tree_sum<L>(sums), [](float u, float v) { return u + v; });
    float* const used = place;
    place = other;
    other = used;
    return total;
  };

  for (int64_t row = simt::block_idx().x; row < p.rows; row += simt::grid_dim().x) {
    const typename L::T* from = static_cast<const typename L::T*>(p.x) + row * p.x_stride;
    // f(x, first) for each of the warp's chunks; the first visit of a row reads it from global memory.
    const auto for_each_chunk = [&](bool visited, const auto& f) {
      int i = 0;
      for (int64_t first = start; first < p.C; first += step, ++i) {
        float x[L::kElements] = {};
        if (visited && i < a.kept) {
          recall<L>(i, x);
        } else {
          load_chunk<L>(from + first, columns_left<L>(p.C, first), x);
          if (i < a.kept) keep<L>(i, x);
        }
        f(x, first);
      }
    };

    NormStatistics s;
    if (p.centered) {
      float sums[L::kElements] = {};
      for_each_chunk(false, [&](float (&x)[L::kElements], int64_t) {
        ATTN_UNROLL
        for (int e = 0; e < L::kElements; ++e) sums[e] += x[e];
      });
      s.mean = sum(sums) / float(p.C);
    }
    float rest[L::kElements] = {}, squares[L::kElements] = {};
    for_each_chunk(p.centered, [&](float (&x)[L::kElements], int64_t first) {
      add_deviations<L>(x, columns_left<L>(p.C, first), s.mean, rest, squares);
    });
    const float rest_sum = p.centered ? sum(rest) : 0.0f;
    s.finish(p, rest_sum, sum(squares));
    for_each_chunk(true, [&](float (&x)[L::kElements], int64_t first) { store_normed<L>(p, row, first, s, x); });
  }
}

// ---- launcher ------------------------------------------------------------------------------------------------------

template <class L>
void launch_norm_as(NormArgs& a, simt::Stream stream) {
  const NormParams& p = a.p;
  if (p.C <= kRegisterColumns) {
    const int64_t blocks = min_of(ceil_div<int64_t>(p.rows, kRowWarps), kMaxGrid);
    void (*kernel)(NormArgs) = norm_warp_kernel<L>;
    simt::launch(kernel, simt::Dim{uint32_t(blocks)}, {32 * kRowWarps}, 0, stream, a);
  } else {
    a.kept = chunks_to_keep<L>(p.C);
    void (*kernel)(NormArgs) = norm_block_kernel<L>;
    simt::launch(kernel, simt::Dim{uint32_t(min_of(p.rows, kMaxGrid))}, {kBlockThreads}, shared_bytes<L>(a.kept),
                 stream, a);
  }
}

template <class T>
void launch_norm(NormArgs& a, simt::Stream stream) {
  const NormParams& p = a.p;
  const int64_t size = int64_t(sizeof(T));
  if (all_multiples(16, p.x, p.x_stride * size, p.C * size, p.weight, p.bias, p.y))
    launch_norm_as<Layout<T, true>>(a, stream);
  else
    launch_norm_as<Layout<T, false>>(a, stream);
}

void norm(const NormParams& p, const Launch& launch) {
  if (p.rows * p.C == 0) return;
  NormArgs a{p, 0};
  dispatch(p.dtype, [&](auto t) { launch_norm<decltype(t)>(a, simt::Stream(launch.stream)); });
}

}  // namespace attn_ext::cuda
