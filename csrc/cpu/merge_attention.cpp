// The attention over two disjoint sets of keys, from output and log-sum-exp over each (flash decoding, cascade).
//
//   lse = log(exp(lse_a) + exp(lse_b)),   out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)
//
// A side with lse -inf saw no key: it adds nothing, whatever its output holds.
#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

template <class T>
void merge_row(const MergeAttentionParams& p, int64_t b, int64_t i, int64_t h) {
  using A = Accumulate<T>;
  constexpr int64_t w = W<A>;
  const auto row = [&](const void* out, const int64_t* s) {
    return static_cast<const T*>(out) + b * s[0] + i * s[1] + h * s[2];
  };
  const auto lse = [&](const void* lse, const int64_t* s) {
    return static_cast<const A*>(lse)[b * s[0] + h * s[1] + i * s[2]];
  };
  const T* a = row(p.out_a, p.a_strides);
  const T* c = row(p.out_b, p.b_strides);
  const A lse_a = lse(p.lse_a, p.lse_a_strides), lse_b = lse(p.lse_b, p.lse_b_strides);
  const A top = max_of(lse_a, lse_b), base = top == A(-kInf) ? A(0) : top;
  const A part_a = exp_scalar(lse_a - base), part_b = exp_scalar(lse_b - base), total = part_a + part_b;
  const bool none = total == A(0);
  const A weight_a = none ? A(0) : part_a / total, weight_b = none ? A(0) : part_b / total;

  T* out = static_cast<T*>(p.out) + ((b * p.T + i) * p.H + h) * p.D;
  for (int64_t d = 0; d < p.D; d += w) {
    const int64_t lanes = min_of(w, p.D - d);
    Vec<A> sum{};
    if (weight_a != A(0)) sum += splat(weight_a) * (lanes == w ? load(a + d) : load_first(a + d, lanes));
    if (weight_b != A(0)) sum += splat(weight_b) * (lanes == w ? load(c + d) : load_first(c + d, lanes));
    if (lanes == w)
      store(out + d, sum);
    else
      store_first(out + d, sum, lanes);
  }
  static_cast<A*>(p.lse)[(b * p.H + h) * p.T + i] = none ? A(-kInf) : base + log_scalar(total);
}

template <class T>
void merge_of(const MergeAttentionParams& p, const Launch& launch) {
  constexpr int64_t rows_per_task = 64;
  const int64_t rows = p.B * p.T * p.H;
  Queue queue{0, ceil_div(rows, rows_per_task)};
  run_parallel<Accumulate<T>>(launch, rows * p.D < 16384 ? 1 : queue.total, [&](int) {
    for (int64_t task; queue.take(task);)
      for (int64_t r = task * rows_per_task; r < min_of(rows, (task + 1) * rows_per_task); ++r)
        merge_row<T>(p, r / p.H / p.T, r / p.H % p.T, r % p.H);
  });
}

}  // namespace

void merge_attention(const MergeAttentionParams& p, const Launch& launch) {
  dispatch(p.dtype, [&](auto t) { merge_of<decltype(t)>(p, launch); });
}

}  // namespace attn_ext::ATTN_EXT_ISA
