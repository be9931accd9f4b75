// The running softmax of one query row: maximum, sum and weighted values over the keys seen so far.
//
//   init            nothing seen: max -inf, sum 0, out 0
//   update          one step of keys: scores become weights exp(s - max), older parts are rescaled
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

  // scores (n, a multiple of W) become exp(score - max). Returns the factor for what was accumulated before.
  ATTN_INLINE A update(A* scores, int64_t n, Vec<A> step_max) {
    const A new_max = max_of(max, max_lanes<A>(step_max));
    const A base = new_max == A(-kInf) ? A(0) : new_max;
    const A factor = new_max == max ? A(1) : exp_scalar(max - base);
    Vec<A> step_sum{};
    for (int64_t begin = 0; begin < n; begin += kSumBlock) {  // sums of sums: a long chain would gather its roundings
      Vec<A> block_sum{};
      for (int64_t i = begin; i < min_of(n, begin + kSumBlock); i += W<A>) {
        const Vec<A> weight = exp(load(scores + i) - splat(base));
        store(scores + i, weight);
        block_sum += weight;
      }
      step_sum += block_sum;
    }
    sum = sum * splat(factor) + step_sum;
    max = new_max;
    return factor;
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
    const A rescale = exp_scalar(max - base);
    A total = sum_lanes<A>(sum);
    if (sink) total = total * rescale + exp_scalar(*sink - base);
    if (total == A(0)) return {A(0), A(-kInf)};
    return {(sink ? rescale : A(1)) / total, base + log_scalar(total)};
  }
};

}  // namespace
}  // namespace attn_ext::ATTN_EXT_ISA
