// Softmax over the last dimension of scale * scores + mask: one read and one write of the tensor.
//
// A row is widened to a scratch row, turned into exp(s - max) in place, and multiplied by 1 / sum on the way out.
// Sums run lane by lane over absolute columns, so a row's bits do not depend on what is masked behind it.
#include "cpu/kernels.h"
#include "cpu/softmax_state.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

template <class A>
int64_t row_bytes(const MaskedSoftmaxParams& p) {
  return round_up(round_up(p.Tk, W<A>) * int64_t(sizeof(A)), 64);
}

// Adds an additive mask of type M, or puts -inf where a bool mask is false.
template <class M, class A>
void apply_mask(const M* mask, int64_t stride, int64_t n, A* row) {
  for (int64_t j = 0; j < n; ++j) {
    if constexpr (sizeof(M) == 1)
      row[j] = mask[j * stride] ? row[j] : A(-kInf);
    else
      row[j] += A(to_accumulate(mask[j * stride]));
  }
}

template <class A>
void apply_mask(const MaskedSoftmaxParams& p, int64_t offset, int64_t n, A* row) {
  const int64_t stride = p.mask_strides[3];
  switch (p.mask_dtype) {
    case DType::boolean: return apply_mask(static_cast<const bool*>(p.mask) + offset, stride, n, row);
    case DType::f32: return apply_mask(static_cast<const float*>(p.mask) + offset, stride, n, row);
    case DType::bf16: return apply_mask(static_cast<const bf16*>(p.mask) + offset, stride, n, row);
    case DType::f16: return apply_mask(static_cast<const f16*>(p.mask) + offset, stride, n, row);
    case DType::f64: return apply_mask(static_cast<const double*>(p.mask) + offset, stride, n, row);
  }
}

// One row of the problem.
template <class T>
struct Row {
  const T* scores;
  T* out;
  int64_t mask_offset;
  int64_t n;  // columns that causality leaves

  Row(const MaskedSoftmaxParams& p, int64_t row) {
    const int64_t b0 = row / p.Tq / p.B1, b1 = row / p.Tq % p.B1, i = row % p.Tq;
    const int64_t* s = p.scores_strides;
    scores = static_cast<const T*>(p.scores) + b0 * s[0] + b1 * s[1] + i * s[2];
    out = static_cast<T*>(p.out) + ((b0 * p.B1 + b1) * p.Tq + i) * p.Tk;
    mask_offset = b0 * p.mask_strides[0] + b1 * p.mask_strides[1] + i * p.mask_strides[2];
    n = p.causal ? min_of(p.Tk, max_of<int64_t>(0, i + p.Tk - p.Tq + 1)) : p.Tk;
  }
};

// Scaled and masked scores, -inf up to a whole number of vectors. Returns the lane-wise maximum.
template <class T>
Vec<Accumulate<T>> load_scores(const MaskedSoftmaxParams& p, const Row<T>& r, Accumulate<T>* row) {
  using A = Accumulate<T>;
  constexpr int64_t w = W<A>;
  const Factor<A> scale(p.scale);
  Vec<A> max = splat(A(-kInf));
  const auto take = [&](int64_t j, Vec<A> scores) {
    const Vec<A> scaled = scale.times(scores);
    store(row + j, scaled);
    max = vmax(max, scaled);
  };
  int64_t j = 0;
  for (; j + w <= r.n; j += w) take(j, load(r.scores + j));
  if (j < r.n) {
    const Vec<A> last = scale.times(load_first(r.scores + j, r.n - j));
    const Vec<A> scaled = lane_index<A>() < splat_index<A>(r.n - j) ? last : splat(A(-kInf));
    store(row + j, scaled);
    max = vmax(max, scaled);
  }
  if (!p.mask) return max;

  apply_mask(p, r.mask_offset, r.n, row);
  max = splat(A(-kInf));
  for (j = 0; j < r.n; j += w) max = vmax(max, load(row + j));
  return max;
}

// `next` comes to the first cache, its result's lines too, while this row's exponentials are computed.
template <class T>
void softmax_row(const MaskedSoftmaxParams& p, const Row<T>& r, const Row<T>& next, Accumulate<T>* row) {
  using A = Accumulate<T>;
  constexpr int64_t w = W<A>;
  const int64_t padded = round_up(r.n, w);
  const A max = max_lanes<A>(load_scores(p, r, row));
  const Vec<A> base = splat(max == A(-kInf) ? A(0) : max), log2_e = splat(A(1.4426950408889634));
  Vec<A> sums{};
  for (int64_t begin = 0; begin < padded;
       begin += kSumBlock) {  // sums of sums: a long chain would gather its roundings
    Vec<A> block_sum{};
    for (int64_t j = begin; j < min_of(padded, begin + kSumBlock); j += w) {
      __builtin_prefetch(next.scores + j);
      __builtin_prefetch(next.out + j, 1);
      const Vec<A> weight = exp2_scaled(load(row + j) - base, log2_e);
      store(row + j, weight);
      block_sum += weight;
    }
    sums += block_sum;
  }
  const A sum = sum_lanes<A>(sums);
  const Vec<A> factor = splat(sum == A(0) ? A(0) : A(1) / sum);
  if (sum != sum) {  // a NaN spreads to the keys that are seen, and no further
    load_scores(p, r, row);
    for (int64_t j = 0; j < r.n; ++j) row[j] = row[j] == A(-kInf) ? A(0) : sum;
    store_row(r.out, row, r.n);
  } else {
    int64_t j = 0;
    for (; j + w <= r.n; j += w) store(r.out + j, load(row + j) * factor);
    if (j < r.n) store_first(r.out + j, load(row + j) * factor, r.n - j);
  }
  memset(static_cast<void*>(r.out + r.n), 0, size_t(p.Tk - r.n) * sizeof(T));
}

template <class T>
void softmax_of(const MaskedSoftmaxParams& p, const Launch& launch) {
  using A = Accumulate<T>;
  constexpr int64_t rows_per_task = 16;
  const int64_t rows = p.B0 * p.B1 * p.Tq, bytes = row_bytes<A>(p);
  Queue queue{0, ceil_div(rows, rows_per_task)};
  run_parallel<A>(launch, rows * p.Tk < 16384 ? 1 : queue.total, [&](int worker) {
    A* row = reinterpret_cast<A*>(launch.workspace + worker * bytes);
    for (int64_t task; queue.take(task);)
      for (int64_t r = task * rows_per_task; r < min_of(rows, (task + 1) * rows_per_task); ++r)
        softmax_row(p, Row<T>(p, r), Row<T>(p, min_of(r + 1, rows - 1)), row);
  });
}

}  // namespace

// ---------------------------------------------------------------------------------------------- launchers

int64_t masked_softmax_workspace(const MaskedSoftmaxParams& p, int workers) {
  return workers * (p.dtype == DType::f64 ? row_bytes<double>(p) : row_bytes<float>(p));
}

void masked_softmax(const MaskedSoftmaxParams& p, const Launch& launch) {
  dispatch(p.dtype, [&](auto t) { softmax_of<decltype(t)>(p, launch); });
}

}  // namespace attn_ext::ATTN_EXT_ISA
