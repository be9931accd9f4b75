// The running softmax of one query row: the largest score and the sum of the weights of the keys seen so far.
//
//   raise      a step of keys has this maximum: factor for what was accumulated before
//   merge      the state over the union of two disjoint ranges of keys: factors for the two accumulators
//   finish     the output's factor 1 / sum and the log-sum-exp; sinks join here
//
// Weights are powers of two: a score x weighs 2^(x c - max c) with c = log2(e) times the unit of x. A row that has seen
// no key keeps max -inf and sum 0, and finishes with factor 0 and lse -inf.
//
// max c is rounded. That is a common factor of all weights and cancels, unless max c is so large that the rounding
// alone moves weights by powers of two: then (x - max) c takes its place.
//
// All kernels that hold such a state round alike (products that are added are an explicit fma, and nvcc is told to fuse
// no others), so that one of them can finish what another began.
#pragma once

#include "cuda/common.cuh"

namespace attn_ext::cuda {

constexpr float kInf = __builtin_huge_valf();

// What scores are measured in. x unit is in nats, x c in bits.
struct ScoreUnit {
  float unit, c;
};

struct alignas(8) SoftmaxState {
  float max, sum;
};

struct SoftmaxFactors {
  float mine, other;
};

constexpr float kHugeExponent = 1 << 20;

// max c, the exponent that every weight is relative to; 0 while nothing is seen.
ATTN_DEVICE float softmax_base(float max, float c) { return max == -kInf ? 0.0f : max * c; }

ATTN_DEVICE bool is_huge(float base) { return !(base > -kHugeExponent && base < kHugeExponent); }

// The weight of x where the maximum is max, which is not -inf, and max c is (not) huge.
ATTN_DEVICE float softmax_weight(float x, float c, float base) { return simt::ex2(simt::fma(x, c, -base)); }
ATTN_DEVICE float softmax_weight_huge(float x, float c, float max) { return simt::ex2((x - max) * c); }

// What weights relative to `before` are to be multiplied by when the maximum becomes `max`.
ATTN_DEVICE float rescale_factor(float before, float max, float c) {
  if (before == max) return 1.0f;
  const float from = softmax_base(before, c), to = softmax_base(max, c);
  return before == -kInf || is_huge(from) || is_huge(to) ? softmax_weight_huge(before, c, max) : simt::ex2(from - to);
}

ATTN_DEVICE float raise(SoftmaxState& state, float step_max, float c) {
  const float before = state.max;
  state.max = simt::max(before, step_max);
  return rescale_factor(before, state.max, c);
}

ATTN_DEVICE SoftmaxFactors merge(SoftmaxState& state, const SoftmaxState& other, float c) {
  const float max = simt::max(state.max, other.max);
  const SoftmaxFactors f{rescale_factor(state.max, max, c), rescale_factor(other.max, max, c)};
  state = {max, simt::fma(state.sum, f.mine, other.sum * f.other)};
  return f;
}

ATTN_DEVICE float merge_values(float mine, float other, const SoftmaxFactors& f) {
  return simt::fma(mine, f.mine, other * f.other);
}

struct SoftmaxResult {
  float factor;  // of the weighted values
  float lse;     // natural log
};

// sink: the row's extra logit in nats, which has no value, or -inf.
ATTN_DEVICE SoftmaxResult finish(const SoftmaxState& state, float sink, const ScoreUnit& u) {
  if (sink == -kInf) {
    if (state.sum == 0.0f) return {0.0f, -kInf};
    return {simt::rcp(state.sum), simt::fma(state.max, u.unit, ::logf(state.sum))};
  }
  const float max = state.max == -kInf ? -kInf : state.max * u.unit, top = simt::max(max, sink);
  const float rescale = simt::ex2((max - top) * kLog2e);
  const float total = simt::fma(state.sum, rescale, simt::ex2((sink - top) * kLog2e));
  return {rescale * simt::rcp(total), top + ::logf(total)};
}

}  // namespace attn_ext::cuda
