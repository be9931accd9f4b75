// RMSNorm and LayerNorm over the last dimension: statistics in float32, one rounding at the end.
//
//   RMSNorm    y = x / sqrt(mean(x^2) + eps) * weight
//   LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
//
// A row is read from memory once and from the cache after that. The mean that LayerNorm subtracts is the rounded one of
// a first pass; the second pass sums d = x - mean and d^2. Near a large mean x - mean is exact, so that the sum of d is
// what rounding took from the mean, and variance and result are corrected by it (Chan, Golub and LeVeque 1983).
//
// Column j is always added up in lane j % (4 W), and the lanes meet in a fixed tree: a row's bits are its own.
//
// Subnormal floats count as 0, squares and eps too, and where nothing else is left that would show: such rows are
// raised.
#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

constexpr int64_t kTaskElements = 8192;       // of the rows that one task has, or one row
constexpr int64_t kParallelElements = 32768;  // fewer are faster on one thread

// Mean squares, with eps, below 2^-100 are computed anew from x - mean times 2^80. Above it, what counts as 0 is less
// than 2^-126 of each square, a rounding of the mean; below, squares of normal numbers and a normal result stay in
// range.
constexpr float kLargeFactor = 0x1p50f;
constexpr double kRaise = 0x1p80;

template <class A>
struct Statistics {
  A mean = 0, correction = 0;  // raise (x - mean) - correction is centered; both 0 in RMSNorm
  A factor;                    // one over the standard deviation of that, or over the root mean square
};

template <bool kRaised, class A>
ATTN_INLINE Vec<A> difference(Vec<A> v, Vec<A> mean) {
  return kRaised ? (v - mean) * splat(A(kRaise)) : v - mean;
}

// f(v, j, lanes, i) for the vectors v of a row: `lanes` columns from j on, which belong to the i-th of four sums.
template <class T, class F>
ATTN_INLINE void for_each_vector(const T* x, int64_t n, const F& f) {
  constexpr int64_t w = W<Accumulate<T>>;
  int64_t j = 0;
  for (; j + 4 * w <= n; j += 4 * w) {
    for (int i = 0; i < 4; ++i) f(load(x + j + i * w), j + i * w, w, i);
  }
  for (int i = 0; i < 4; ++i, j += w) {
    if (j + w <= n)
      f(load(x + j), j, w, i);
    else if (j < n)
      f(load_first(x + j, n - j), j, n - j, i);
  }
}

template <class A>
ATTN_INLINE A sum_of(const Vec<A> (&s)[4]) {
  return sum_lanes<A>((s[0] + s[1]) + (s[2] + s[3]));
}

// v in the first `lanes` lanes, 0 in the others.
template <class A>
ATTN_INLINE Vec<A> first_lanes(Vec<A> v, int64_t lanes) {
  if (lanes == W<A>) return v;
  for (int l = 0; l < W<A>; ++l) v[l] = l < lanes ? v[l] : A(0);
  return v;
}

ATTN_INLINE float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }
ATTN_INLINE double inverse_root(double x) { return 1.0 / __builtin_sqrt(x); }

template <bool kRaised, class T>
ATTN_INLINE Statistics<Accumulate<T>> statistics(const T* x, int64_t n, bool centered, double plain_eps) {
  using A = Accumulate<T>;
  const A eps = A(kRaised ? plain_eps * kRaise * kRaise : plain_eps);
  Statistics<A> s;
  Vec<A> squares[4] = {};
  if (!centered) {
    for_each_vector(x, n, [&](Vec<A> v, int64_t, int64_t, int i) {
      const Vec<A> d = difference<kRaised, A>(v, Vec<A>{});
      squares[i] = fma(d, d, squares[i]);
    });
    s.factor = inverse_root(sum_of<A>(squares) / A(n) + eps);
    return s;
  }
  Vec<A> sums[4] = {}, rest[4] = {};
  for_each_vector(x, n, [&](Vec<A> v, int64_t, int64_t, int i) { sums[i] += v; });
  s.mean = sum_of<A>(sums) / A(n);
  const Vec<A> mean = splat(s.mean);
  for_each_vector(x, n, [&](Vec<A> v, int64_t, int64_t lanes, int i) {
    const Vec<A> d = first_lanes<A>(difference<kRaised, A>(v, mean), lanes);
    rest[i] += d;
    squares[i] = fma(d, d, squares[i]);
  });
  s.correction = sum_of<A>(rest) / A(n);
  const A variance = sum_of<A>(squares) / A(n) - s.correction * s.correction;
  s.factor = inverse_root((variance < A(0) ? A(0) : variance) + eps);  // below 0 by rounding; NaN stays
  return s;
}

// False, and nothing is written, where the row must be raised and is not.
template <class T, bool kRaised>
ATTN_INLINE bool norm_row(const NormParams& p, int64_t row) {
  using A = Accumulate<T>;
  constexpr int64_t w = W<A>;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  const T* weight = static_cast<const T*>(p.weight);
  const T* bias = static_cast<const T*>(p.bias);
  T* y = static_cast<T*>(p.y) + row * p.C;
  const Statistics<A> s = statistics<kRaised>(x, p.C, p.centered, p.eps);
  if (!kRaised && sizeof(A) == sizeof(float) && s.factor > A(kLargeFactor)) return false;
  const Vec<A> mean = splat(s.mean), factor = splat(s.factor), shift = splat(-s.correction * s.factor);
  for_each_vector(x, p.C, [&](Vec<A> v, int64_t j, int64_t lanes, int) {
    const auto at = [&](const T* t) { return lanes == w ? load(t + j) : load_first(t + j, lanes); };
    const Vec<A> normed = fma(difference<kRaised, A>(v, mean), factor, shift);
    const Vec<A> result = bias ? fma(normed, at(weight), at(bias)) : normed * at(weight);
    if (lanes == w)
      store(y + j, result);
    else
      store_first(y + j, result, lanes);
  });
  return true;
}

template <class T>
ATTN_INLINE void norm_row(const NormParams& p, int64_t row) {
  if (!norm_row<T, false>(p, row)) norm_row<T, true>(p, row);
}

template <class T>
void norm_of(const NormParams& p, const Launch& launch) {
  const int64_t rows_per_task = max_of<int64_t>(1, kTaskElements / p.C);
  Queue queue{0, ceil_div(p.rows, rows_per_task)};
  run_parallel<Accumulate<T>>(launch, p.rows * p.C < kParallelElements ? 1 : queue.total, [&](int) {
    for (int64_t task; queue.take(task);)
      for (int64_t r = task * rows_per_task; r < min_of(p.rows, (task + 1) * rows_per_task); ++r) norm_row<T>(p, r);
  });
}

}  // namespace

void norm(const NormParams& p, const Launch& launch) {
  dispatch(p.dtype, [&](auto t) { norm_of<decltype(t)>(p, launch); });
}

}  // namespace attn_ext::ATTN_EXT_ISA
