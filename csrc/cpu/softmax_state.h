// The running softmax of one query row: maximum, sum and weighted values over the keys seen so far.
//
//   init            nothing seen: max -inf, sum 0, out 0
//   update          one step of keys: scores become weights, older parts are rescaled (StepSoftmax, within a split)
//   merge           the state over the union of two disjoint ranges of keys
//   finish          the output's factor 1 / sum and the log-sum-exp; sinks join here
//
// A row that has seen no key keeps max -inf, and finishes with factor 0 and lse -inf.
#pragma once

#include "cpu/vec.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

constexpr int64_t kSumBlock = 512;  // scores summed in one chain

template <class A>
struct SoftmaxState {
  A max;
  Vec<A> sum;  // lane by lane; the lanes are added in finish

  void init() {
    max = A(-kInf);
    sum = Vec<A>{};
  }

  struct Factors {
    A mine, other;
  };
  // The state over both; out = out * mine + other's out * other.
  ATTN_INLINE Factors merge(const SoftmaxState& other) {
    const A new_max = max_of(max, other.max);
    const A base = new_max == A(-kInf) ? A(0) : new_max;
    const Factors f{exp_scalar(max - base), exp_scalar(other.max - base)};
    sum = sum * splat(f.mine) + other.sum * splat(f.other);
    max = new_max;
    return f;
  }

  struct Result {
    A factor;  // of out
    A lse;     // natural log
  };
  ATTN_INLINE Result finish(const A* sink) const {
    const A top = sink ? max_of(max, *sink) : max;
    const A base = top == A(-kInf) ? A(0) : top;
    const A rescale = sink ? exp_scalar(max - base) : A(1);
    A total = sum_lanes<A>(sum);
    if (sink) total = total * rescale + exp_scalar(*sink - base);
    if (total == A(0)) return {A(0), A(-kInf)};
    return {rescale / total, base + log_scalar(total)};
  }
};

// The same over the steps of one split, with as few operations as a step can do with:
//
//   * Weights are 2^(c (score - max)) of scores not yet scaled: c holds scale and log2(e).
//   * The maximum moves only when a score exceeds it by so much that its weight would be above 2^8; until then it need
//     not be known, and no lane is compared with another. That is decided by the row's own scores.
template <class T>
struct StepSoftmax {
  using A = Accumulate<T>;
  A max;       // of the scores when it moved last, -inf before any was seen
  A limit;     // a score above it moves max
  Vec<A> sum;  // of the weights, lane by lane

  ATTN_INLINE void init() {
    max = limit = A(-kInf);
    sum = Vec<A>{};
  }

  // scores (n, a multiple of W) become weights. Returns the factor for what was accumulated before.
  ATTN_INLINE A update(const A* scores, int64_t n, A c, Element<T>* weights) {
    Vec<A> top = load(scores);
    for (int64_t j = W<A>; j < n; j += W<A>) top = vmax(top, load(scores + j));
    A factor = A(1);
    if (any_above(top, splat(limit))) {
      const A new_max = max_lanes<A>(top);
      if (max > A(-kInf)) {  // else nothing was accumulated
        factor = exp2_scaled(splat(max - new_max), splat(c))[0];
        sum = sum * splat(factor);
      }
      max = new_max;
      limit = new_max + A(8) / c;
    }
    const Vec<A> base = splat(max == A(-kInf) ? A(0) : max);
    Vec<A> step_sum{};
    for (int64_t j = 0; j < n; j += W<A>) {
      const Vec<A> weight = exp2_scaled(load(scores + j) - base, splat(c));
      step_sum += weight;
      Product<T>::store_left(weights + j, weight);
    }
    sum += step_sum;
    return factor;
  }

  // As a state of scaled scores.
  ATTN_INLINE SoftmaxState<A> scaled(A scale) const {
    SoftmaxState<A> state;
    state.max = max == A(-kInf) ? max : max * scale;
    state.sum = sum;
    return state;
  }
};

}  // namespace
}  // namespace attn_ext::ATTN_EXT_ISA
