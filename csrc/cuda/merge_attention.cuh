// The attention over two disjoint sets of keys, from output and log-sum-exp over each (flash decoding, cascade).
//
//   lse = log(exp(lse_a) + exp(lse_b)),   out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)
//
// A side with lse -inf saw no key: it adds nothing, whatever its output holds. One warp per row, memory bound.
#pragma once

#include "cuda/kernels.h"
#include "cuda/softmax_state.cuh"

namespace attn_ext::cuda {

constexpr int kMergeThreads = 128;
constexpr int kMergeWarps = kMergeThreads / 32;

template <class T>
ATTN_KERNEL(kMergeThreads, 1)
merge_attention_kernel(ATTN_CONSTANT_PARAM MergeAttentionParams p, bool vectors) {
  constexpr int n = 16 / int(sizeof(T));  // elements of a 16-byte vector
  const int64_t rows = p.B * p.T * p.H, first = int64_t(simt::block_idx().x) * kMergeWarps + simt::warp();
  for (int64_t row = first; row < rows; row += int64_t(simt::grid_dim().x) * kMergeWarps) {
    const Quotient token = divide(row, p.H), sequence = divide(token.quotient, p.T);
    const int64_t h = token.remainder, b = sequence.quotient, i = sequence.remainder;
    const float lse_a = simt::ldg(static_cast<const float*>(p.lse_a) + b * p.lse_a_strides[0] + h * p.lse_a_strides[1] +
                                  i * p.lse_a_strides[2]);
    const float lse_b = simt::ldg(static_cast<const float*>(p.lse_b) + b * p.lse_b_strides[0] + h * p.lse_b_strides[1] +
                                  i * p.lse_b_strides[2]);
    const float top = simt::max(lse_a, lse_b), base = top == -kInf ? 0.0f : top;
    const float part_a = ::expf(lse_a - base), part_b = ::expf(lse_b - base), total = part_a + part_b;
    const bool none = total == 0.0f;
    const float weight_a = none ? 0.0f : part_a / total, weight_b = none ? 0.0f : part_b / total;

    const T* a = static_cast<const T*>(p.out_a) + b * p.a_strides[0] + i * p.a_strides[1] + h * p.a_strides[2];
    const T* c = static_cast<const T*>(p.out_b) + b * p.b_strides[0] + i * p.b_strides[1] + h * p.b_strides[2];
    T* out = static_cast<T*>(p.out) + row * p.D;
    const auto mix = [&](float x, float y) {
      const float sum = weight_a == 0.0f ? 0.0f : weight_a * x;
      return weight_b == 0.0f ? sum : simt::fma(weight_b, y, sum);
    };
    if (vectors) {
      for (int64_t d = simt::lane() * n; d < p.D; d += 32 * n) {
        float x[n], y[n];
        load_vector(a + d, x);
        load_vector(c + d, y);
        ATTN_UNROLL
        for (int j = 0; j < n; ++j) x[j] = mix(x[j], y[j]);
        store_vector(out + d, x);
      }
    } else {
      for (int64_t d = simt::lane(); d < p.D; d += 32)
        simt::st(out + d, simt::from_float<T>(mix(simt::to_float(simt::ldg(a + d)), simt::to_float(simt::ldg(c + d)))));
    }
    if (simt::lane() == 0)
      simt::st(static_cast<float*>(p.lse) + (b * p.H + h) * p.T + i, none ? -kInf : base + ::logf(total));
  }
}

template <class T>
void launch_merge_attention(const MergeAttentionParams& p, const Launch& launch) {
  const int64_t rows = p.B * p.T * p.H;
  if (rows == 0) return;
  const int64_t size = int64_t(sizeof(T));
  const bool vectors =
      all_multiples(16, p.out_a, p.out_b, p.out, p.D * size, p.a_strides[0] * size, p.a_strides[1] * size,
                    p.a_strides[2] * size, p.b_strides[0] * size, p.b_strides[1] * size, p.b_strides[2] * size);
  const int64_t blocks = min_of(ceil_div<int64_t>(rows, kMergeWarps), kMaxGrid);
  simt::launch(merge_attention_kernel<T>, simt::Dim{uint32_t(blocks)}, {kMergeThreads}, 0, simt::Stream(launch.stream),
               p, vectors);
}

}  // namespace attn_ext::cuda
