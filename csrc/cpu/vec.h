// Vectors for the portable kernels, on the compiler's vector extension: one text for every instruction set.
//
// A file that includes this is compiled once per instruction set with -DATTN_EXT_ISA=<name> and that set's
// flags. Everything here has internal linkage in the namespace of that set, and no std template is used: a
// weak symbol built with AVX-512 could replace the baseline's copy and crash older CPUs.
//
// Vec<A> holds W lanes of the accumulation type A (float, or double for float64 tensors). Every operation is
// lane by lane and the same in a loop's body and tail, so that a row's bits never depend on its neighbours.
//
// Subnormal floats count as 0 in arithmetic, as operand and as result: kernels run within run_parallel, which sets the
// mode. Doubles count as what they are.
#pragma once

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "params.h"

#ifndef ATTN_EXT_ISA
#define ATTN_EXT_ISA scalar
#endif

namespace attn_ext::ATTN_EXT_ISA {
namespace {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

// ------------------------------------------------------------------------------------------ element types

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

// Scores, sums and outputs of tensors of T are held in Accumulate<T>.
template <class T>
struct AccumulateOf {
  using type = float;
};
template <>
struct AccumulateOf<double> {
  using type = double;
};
template <class T>
using Accumulate = typename AccumulateOf<T>::type;

template <class A>
struct VecTypes;
template <>
struct VecTypes<float> {
  typedef float V __attribute__((vector_size(kVectorBytes)));
  typedef int32_t I __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t U __attribute__((vector_size(kVectorBytes)));
};
template <>
struct VecTypes<double> {
  typedef double V __attribute__((vector_size(kVectorBytes)));
  typedef int64_t I __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t U __attribute__((vector_size(kVectorBytes)));
};
template <class A>
using Vec = typename VecTypes<A>::V;
template <class A>
using IVec = typename VecTypes<A>::I;
template <class A>
inline constexpr int W = kVectorBytes / int(sizeof(A));

// 16-bit halves of one float vector.
typedef uint16_t HalfBits __attribute__((vector_size(kVectorBytes / 2)));

#define ATTN_INLINE inline __attribute__((always_inline))

constexpr float kInf = __builtin_inff();

template <class T>
ATTN_INLINE T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
ATTN_INLINE T max_of(T a, T b) {
  return a > b ? a : b;
}
template <int N>
struct Constant {
  static constexpr int value = N;
};
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// -------------------------------------------------------------------------------------- lane arithmetic

template <class A>
ATTN_INLINE Vec<A> splat(A x) {
  return x - Vec<A>{};  // not 0 + x, which is an addition: it turns -0 into 0
}

// a * b + c, fused where the instruction set has it (one rounding), two roundings on the baseline.
ATTN_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
ATTN_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return a * b + c; }

// The larger; b where either is NaN. A running maximum may therefore lose a NaN: what carries a NaN score into the
// result is exp(NaN - max), not the maximum.
template <class V>
ATTN_INLINE V vmax(V a, V b) {
  return a > b ? a : b;
}

// All lanes combined in a fixed tree: lane i with lane i ^ W/2, then ^ W/4, ... 1. The distance is a template argument
// because gcc makes a shuffle of constants only where it knows them at once.
template <class A, int distance, class Op>
ATTN_INLINE A combine_lanes(Vec<A> v, Op op) {
  if constexpr (distance == 0) {
    return v[0];
  } else {
    IVec<A> partner;
    for (int l = 0; l < W<A>; ++l) partner[l] = l ^ distance;
    return combine_lanes<A, distance / 2>(op(v, __builtin_shuffle(v, partner)), op);
  }
}
template <class A>
ATTN_INLINE A sum_lanes(Vec<A> v) {
  return combine_lanes<A, W<A> / 2>(v, [](Vec<A> a, Vec<A> b) { return a + b; });
}
template <class A>
ATTN_INLINE A max_lanes(Vec<A> v) {
  return combine_lanes<A, W<A> / 2>(v, [](Vec<A> a, Vec<A> b) { return vmax(a, b); });
}

// Is any lane of a above that of b? NaN is not.
ATTN_INLINE bool any_above(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_GT_OQ)) != 0;
#else
  bool any = false;
  for (int i = 0; i < W<float>; ++i) any |= a[i] > b[i];
  return any;
#endif
}
ATTN_INLINE bool any_above(Vec<double> a, Vec<double> b) {
  bool any = false;
  for (int i = 0; i < W<double>; ++i) any |= a[i] > b[i];
  return any;
}

// A number in every lane, and the lanes' own numbers.
template <class A>
ATTN_INLINE IVec<A> splat_index(int64_t i) {
  if constexpr (sizeof(A) == 4)
    return IVec<A>{} + int32_t(i);
  else
    return IVec<A>{} + i;
}
template <class A>
ATTN_INLINE IVec<A> lane_index() {
  IVec<A> v{};
  for (int l = 0; l < W<A>; ++l) v[l] = l;
  return v;
}

// The factor x, which counts as what it is: one that is subnormal as a float is kept as two that are not.
template <class A>
struct Factor {
  A first = 1, second = 1;

  Factor() = default;
  explicit Factor(double x) {
    const bool split = sizeof(A) == sizeof(float) && x > -0x1p-126 && x < 0x1p-126;
    first = A(split ? x * 0x1p64 : x);
    if (split) second = A(0x1p-64);
  }
  ATTN_INLINE Vec<A> times(Vec<A> v) const { return v * splat(first) * splat(second); }
};

// ------------------------------------------------------------------------------------------------ products

// How tensors of T are multiplied. A step of a product takes kPerStep elements of the k dimension: one, widened to
// the accumulation type, or with AVX512-BF16 a pair of bfloat16 in one 32-bit lane, two products and two sums at once.
// Element is what the left factor is kept as; a right factor is vectors with one step of W columns.
template <class T>
struct Product {
  using A = Accumulate<T>;
  using Element = A;
  static constexpr int kPerStep = 1;
  static ATTN_INLINE Vec<A> broadcast(const Element* a) { return splat(*a); }
  static ATTN_INLINE Vec<A> add(Vec<A> a, Vec<A> b, Vec<A> c) { return fma(a, b, c); }
  static ATTN_INLINE void store_left(Element* to, Vec<A> v) { memcpy(to, &v, sizeof v); }  // v as part of a left factor
};
#if defined(__AVX512BF16__)
template <>
struct Product<bf16> {
  using A = float;
  using Element = bf16;
  static constexpr int kPerStep = 2;
  static ATTN_INLINE Vec<A> broadcast(const Element* a) {
    uint32_t pair;
    memcpy(&pair, a, sizeof pair);
    return (Vec<A>)(VecTypes<A>::U{} + pair);
  }
  static ATTN_INLINE Vec<A> add(Vec<A> a, Vec<A> b, Vec<A> c) {
    return (Vec<A>)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
  }
  static ATTN_INLINE void store_left(Element* to, Vec<A> v) {  // subnormal numbers become 0: as a factor they are
    const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
    memcpy(to, &h, sizeof h);
  }
};
#endif
template <class T>
using Element = typename Product<T>::Element;

// ------------------------------------------------------------------------------------- loads and stores

// Each half in the low 16 bits of a 32-bit lane.
ATTN_INLINE VecTypes<float>::U zero_extend(HalfBits h) {
#if defined(__AVX512F__)
  return (VecTypes<float>::U)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (VecTypes<float>::U)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, VecTypes<float>::U);
#endif
}

ATTN_INLINE Vec<float> widen(bf16, HalfBits h) { return (Vec<float>)(zero_extend(h) << 16); }

ATTN_INLINE Vec<float> widen(f16, HalfBits h) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_maskz_cvtph_ps(__mmask16(-1), (__m256i)h);
#elif defined(__F16C__)
  return (Vec<float>)_mm256_cvtph_ps((__m128i)h);
#else
  typedef VecTypes<float>::U U;
  const U u = zero_extend(h);
  const U moved = (u & 0x7fffu) << 13, exponent = u & 0x7c00u;  // to where float has exponent and mantissa
  // A subnormal half is m 2^-24. The mantissa of 2^-14 (1 + m 2^-10) is m, too: no float on the way is subnormal.
  const U subnormal = (U)((Vec<float>)(moved + 0x38800000u) - splat(0x1p-14f));
  const U normal = moved + (112u << 23), special = moved | 0x7f800000u;
  const U magnitude = exponent == 0u ? subnormal : exponent == 0x7c00u ? special : normal;
  return (Vec<float>)(magnitude | ((u & 0x8000u) << 16));
#endif
}

// The low (0) or high (1) 16 bits of every 32-bit lane, widened.
ATTN_INLINE Vec<float> widen_half(bf16, Vec<float> pairs, int half) {
  typedef VecTypes<float>::U U;
  return (Vec<float>)(half ? ((U)pairs & 0xffff0000u) : ((U)pairs << 16));
}
ATTN_INLINE Vec<float> widen_half(f16 type, Vec<float> pairs, int half) {
  typedef VecTypes<float>::U U;
  const U bits = half ? ((U)pairs >> 16) : ((U)pairs & 0xffffu);
#if defined(__AVX512F__)
  return widen(type, (HalfBits)_mm512_cvtepi32_epi16((__m512i)bits));
#else
  return widen(type, __builtin_convertvector(bits, HalfBits));
#endif
}

// Round to nearest even; NaN stays NaN.
ATTN_INLINE HalfBits narrow(bf16, Vec<float> v) {
  typedef VecTypes<float>::U U;
  const U u = (U)v;
  const U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const U quiet = (u >> 16) | 0x40u;
  const U r = (v == v) ? rounded : quiet;
#if defined(__AVX512F__)
  return (HalfBits)_mm512_cvtepi32_epi16((__m512i)r);
#else
  return __builtin_convertvector(r, HalfBits);
#endif
}

#if !defined(__F16C__)
ATTN_INLINE uint16_t f16_from_float(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  if (a >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds to 2^16 or more
  if (a < 0x38800000u) {                                  // subnormal: let float addition round
    float magnitude;
    memcpy(&magnitude, &a, 4);
    magnitude += 0.5f;  // one unit in the last place of 0.5 is 2^-24; a subnormal float counts as 0, as which it ends
    uint32_t m;
    memcpy(&m, &magnitude, 4);
    return uint16_t(sign | (m - 0x3f000000u));
  }
  return uint16_t(sign | ((a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u) >> 13));
}
#endif

ATTN_INLINE HalfBits narrow(f16, Vec<float> v) {
#if defined(__AVX512F__)
  return (HalfBits)_mm512_maskz_cvtps_ph(__mmask16(-1), (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  return (HalfBits)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  HalfBits h;
  for (int i = 0; i < W<float>; ++i) h[i] = f16_from_float(v[i]);
  return h;
#endif
}

template <class T>
ATTN_INLINE Vec<Accumulate<T>> load(const T* p) {
  if constexpr (sizeof(T) == 2) {
    HalfBits h;
    memcpy(&h, p, sizeof h);
    return widen(T{}, h);
  } else {
    Vec<T> v;
    memcpy(&v, p, sizeof v);
    return v;
  }
}

// The first n < W elements; the other lanes are 0. Nothing past them is read.
template <class T>
ATTN_INLINE Vec<Accumulate<T>> load_first(const T* p, int64_t n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __mmask16 first = __mmask16((1u << n) - 1);
  if constexpr (sizeof(T) == 4) return (Vec<float>)_mm512_maskz_loadu_ps(first, p);
  if constexpr (sizeof(T) == 2) return widen(T{}, (HalfBits)_mm256_maskz_loadu_epi16(first, p));
#endif
  T lanes[W<Accumulate<T>>] = {};
  memcpy(lanes, p, size_t(n) * sizeof(T));
  return load(lanes);
}

template <class T>
ATTN_INLINE void store(T* p, Vec<Accumulate<T>> v) {
  if constexpr (sizeof(T) == 2) {
    const HalfBits h = narrow(T{}, v);
    memcpy(p, &h, sizeof h);
  } else {
    memcpy(p, &v, sizeof v);
  }
}

template <class T>
ATTN_INLINE void store_first(T* p, Vec<Accumulate<T>> v, int64_t n) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __mmask16 first = __mmask16((1u << n) - 1);
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, first, (__m512)v);
  if constexpr (sizeof(T) == 2) return _mm256_mask_storeu_epi16(p, first, (__m256i)narrow(T{}, v));
#endif
  T lanes[W<Accumulate<T>>];
  store(lanes, v);
  memcpy(p, lanes, size_t(n) * sizeof(T));
}

template <class T>
ATTN_INLINE Accumulate<T> to_accumulate(T x) {
  if constexpr (sizeof(T) == 2) {
    return load_first(&x, 1)[0];
  } else {
    return x;
  }
}

// n elements of src, widened or as they are, zero padded to a whole number of vectors of the accumulation type.
template <class T, class E>
ATTN_INLINE void convert_row(const T* src, int64_t n, E* dst) {
  constexpr int w = W<Accumulate<T>>;
  if constexpr (sizeof(T) == sizeof(E)) {
    memcpy(dst, src, size_t(n) * sizeof(T));
    memset(static_cast<void*>(dst + n), 0, size_t(round_up(n, w) - n) * sizeof(T));
  } else {
    int64_t i = 0;
    for (; i + w <= n; i += w) store(dst + i, load(src + i));
    if (i < n) store(dst + i, load_first(src + i, n - i));
  }
}

template <class T>
ATTN_INLINE void store_row(T* dst, const Accumulate<T>* src, int64_t n) {
  constexpr int w = W<Accumulate<T>>;
  int64_t i = 0;
  for (; i + w <= n; i += w) store(dst + i, load(src + i));
  if (i < n) store_first(dst + i, load_first(src + i, n - i), n - i);
}

// ---------------------------------------------------------------------------------------------- transpose

// Swaps the off-diagonal S x S blocks of every 2S x 2S block of a W x W square held in W vectors.
template <class A, int S>
ATTN_INLINE void swap_blocks(Vec<A> (&r)[W<A>]) {
  IVec<A> low, high;
  for (int l = 0; l < W<A>; ++l) {
    low[l] = (l & S) ? l - S + W<A> : l;
    high[l] = (l & S) ? l + W<A> : l + S;
  }
  for (int i = 0; i < W<A>; ++i) {
    if (i & S) continue;
    const Vec<A> a = r[i], b = r[i + S];
    r[i] = __builtin_shuffle(a, b, low);
    r[i + S] = __builtin_shuffle(a, b, high);
  }
}

// Blocks of S and all smaller ones are swapped: from S = W / 2 on, that is the transposition.
template <class A, int S = W<A> / 2>
ATTN_INLINE void transpose(Vec<A> (&r)[W<A>]) {
  swap_blocks<A, S>(r);
  if constexpr (S > 1) transpose<A, S / 2>(r);
}

// Half a vector from each of two places.
template <class A>
ATTN_INLINE Vec<A> load_halves(const void* low, const void* high) {
#if defined(__AVX512F__)
  const __m512d first = _mm512_castpd256_pd512(_mm256_loadu_pd(static_cast<const double*>(low)));
  return (Vec<A>)_mm512_insertf64x4(first, _mm256_loadu_pd(static_cast<const double*>(high)), 1);
#else
  Vec<A> v;
  memcpy(&v, low, sizeof v / 2);
  memcpy(reinterpret_cast<char*>(&v) + sizeof v / 2, high, sizeof v / 2);
  return v;
#endif
}

// r = the transpose of W x W lanes in W rows. Its largest blocks are swapped as they are loaded, which takes a port of
// the loads instead of the only one that shuffles.
template <class A, class T>
ATTN_INLINE void load_transposed(const T* const (&rows)[W<A>], int64_t offset, Vec<A> (&r)[W<A>]) {
  constexpr int half = W<A> / 2;
  constexpr int64_t elements = kVectorBytes / 2 / int64_t(sizeof(T));
  for (int i = 0; i < half; ++i) {
    const T *first = rows[i] + offset, *second = rows[i + half] + offset;
    r[i] = load_halves<A>(first, second);
    r[i + half] = load_halves<A>(first + elements, second + elements);
  }
  if constexpr (half > 1) transpose<A, half / 2>(r);
}

// ---------------------------------------------------------------------------------------------- functions

// exp(f) - 1 for |f| <= ln(2) / 2, relative error of 1 + result 1e-8 (minimax).
ATTN_INLINE Vec<float> expm1_reduced(Vec<float> f) {
  Vec<float> q = splat(0.00139262508315f);
  q = fma(q, f, splat(0.00836323288368f));
  q = fma(q, f, splat(0.041666554213f));
  q = fma(q, f, splat(0.166665766661f));
  q = fma(q, f, splat(0.5f));
  return fma(q * f, f, f);
}

struct Reduced {
  Vec<float> f, power;  // x = n ln(2) + f, power = 2^n
};
ATTN_INLINE Reduced reduce(Vec<float> x) {
  const Vec<float> magic = splat(0x1.8p23f);  // adding it rounds to an integer
  const Vec<float> t = fma(x, splat(1.44269504f), magic);
  const Vec<float> n = t - magic;
  Vec<float> f = fma(n, splat(-0x1.62e4p-1f), x);  // ln(2) in two parts, the first with few bits: n * it is exact
  f = fma(n, splat(-1.42860682e-6f), f);
  const Vec<float> power = (Vec<float>)((((IVec<float>)t - (int32_t)0x4b400000) + 127) << 23);
  return {f, power};
}

// exp(x); 0 below -87.3 (where the result would be subnormal), NaN for NaN. x <= 88.
ATTN_INLINE Vec<float> exp(Vec<float> x) {
  const Vec<float> low = splat(-87.3f);
  const Reduced r = reduce(vmax(low, x));
  const Vec<float> y = (expm1_reduced(r.f) + splat(1.0f)) * r.power;
  return x < low ? splat(0.0f) : y;
}

// 2^(c d) for c d <= 100, with a relative error of 1e-7 (minimax, 2^0 = 1); 0 where the result would be subnormal, NaN
// for NaN.
ATTN_INLINE Vec<float> exp2_scaled(Vec<float> d, Vec<float> c) {
  const Vec<float> magic = splat(0x1.8p23f);  // adding it rounds to an integer
  const Vec<float> t = fma(d, c, magic);
  const Vec<float> n = t - magic;
#if defined(__FMA__)
  const Vec<float> f = fma(d, c, -n);
#else  // the product must not be rounded before n is taken off
  typedef double Wide __attribute__((vector_size(2 * kVectorBytes)));
  const Wide product = __builtin_convertvector(d, Wide) * __builtin_convertvector(c, Wide);
  const Vec<float> f = __builtin_convertvector(product - __builtin_convertvector(n, Wide), Vec<float>);
#endif
  Vec<float> q = fma(splat(0.00132647272f), f, splat(0.00967151269f));
  q = fma(q, f, splat(0.0555073374f));
  q = fma(q, f, splat(0.240222421f));
  q = fma(q, f, splat(0.693146978f));
  q = fma(q, f, splat(1.0f));
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)n, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return (Vec<float>)_mm512_maskz_scalef_ps(normal, (__m512)q, (__m512)n);
#else
  const Vec<float> power = (Vec<float>)((((IVec<float>)t - (int32_t)0x4b400000) + 127) << 23);
  return n < splat(-126.0f) ? splat(0.0f) : q * power;
#endif
}

// exp(x) - 1 for 0 <= x <= 40, without cancellation near 0.
ATTN_INLINE Vec<float> expm1(Vec<float> x) {
  const Reduced r = reduce(x);
  return fma(expm1_reduced(r.f), r.power, r.power - splat(1.0f));
}

ATTN_INLINE Vec<float> absolute(Vec<float> x) { return (Vec<float>)((IVec<float>)x & 0x7fffffff); }
ATTN_INLINE Vec<float> copy_sign(Vec<float> magnitude, Vec<float> sign) {
  const IVec<float> top = ((IVec<float>)sign) & (int32_t)0x80000000;
  return (Vec<float>)((IVec<float>)magnitude | top);
}

// tanh(|x|) = e / (e + 2) with e = exp(2|x|) - 1
ATTN_INLINE Vec<float> tanh(Vec<float> x) {
  const Vec<float> limit = splat(10.0f);
  Vec<float> a = absolute(x);
  a = a > limit ? limit : a;  // tanh(10) rounds to 1; NaN stays
  const Vec<float> e = expm1(a + a);
  return copy_sign(e / (e + splat(2.0f)), x);
}

// |x| <= 1: odd polynomial; above: 1 - exp(-p(|x|)), p fitted to -log(erfc). Absolute error below 1e-8 + rounding.
ATTN_INLINE Vec<float> erf(Vec<float> x) {
  const Vec<float> a0 = absolute(x);
  const Vec<float> limit = splat(4.1f);
  const Vec<float> a = a0 > limit ? limit : a0;
  const Vec<float> t = a * a;
  Vec<float> p = splat(7.87587506269e-5f);
  p = fma(p, t, splat(-0.000801686428717f));
  p = fma(p, t, splat(0.00518908742343f));
  p = fma(p, t, splat(-0.0268542120106f));
  p = fma(p, t, splat(0.112835947152f));
  p = fma(p, t, splat(-0.376126266667f));
  p = fma(p, t, splat(0.128379165848f));
  const Vec<float> small = fma(a, p, a);
  Vec<float> g = splat(-1.60690900143e-6f);
  g = fma(g, a, splat(4.54858396374e-5f));
  g = fma(g, a, splat(-0.000592192484634f));
  g = fma(g, a, splat(0.00473891666527f));
  g = fma(g, a, splat(-0.0263647864166f));
  g = fma(g, a, splat(0.109984506522f));
  g = fma(g, a, splat(0.631924647605f));
  g = fma(g, a, splat(1.13017682561f));
  g = fma(g, a, splat(-0.000306275848643f));
  const Vec<float> large = splat(1.0f) - exp(-g);
  return copy_sign(a > splat(1.0f) ? large : small, x);
}

// float64 is for checking, not for speed: the C library, lane by lane.
#define ATTN_EXT_LANEWISE(name, builtin)                      \
  ATTN_INLINE Vec<double> name(Vec<double> x) {               \
    for (int i = 0; i < W<double>; ++i) x[i] = builtin(x[i]); \
    return x;                                                 \
  }
ATTN_EXT_LANEWISE(exp, __builtin_exp)
ATTN_EXT_LANEWISE(exp2, __builtin_exp2)
ATTN_EXT_LANEWISE(tanh, __builtin_tanh)
ATTN_EXT_LANEWISE(erf, __builtin_erf)
#undef ATTN_EXT_LANEWISE

ATTN_INLINE Vec<double> exp2_scaled(Vec<double> d, Vec<double> c) { return exp2(d * c); }

ATTN_INLINE float exp_scalar(float x) { return exp(splat(x))[0]; }
ATTN_INLINE double exp_scalar(double x) { return __builtin_exp(x); }
ATTN_INLINE float log_scalar(float x) { return __builtin_logf(x); }
ATTN_INLINE double log_scalar(double x) { return __builtin_log(x); }

template <class A>
ATTN_INLINE Vec<A> activate(Activation activation, Vec<A> x) {
  const Vec<A> one = splat(A(1)), half = splat(A(0.5));
  switch (activation) {
    case Activation::none: return x;
    case Activation::gelu: return half * x * (one + erf(x * splat(A(0.70710678118654752440))));
    case Activation::gelu_tanh: {
      const Vec<A> inner = splat(A(0.79788456080286535588)) * (x + splat(A(0.044715)) * x * x * x);
      return half * x * (one + tanh(inner));
    }
    case Activation::silu: {  // x * sigmoid(x), by exp of a negative number only
      const Vec<A> a = x < splat(A(0)) ? -x : x;
      const Vec<A> e = exp(-a);
      return x * (x < splat(A(0)) ? e : one) / (one + e);
    }
  }
  return x;
}

// ----------------------------------------------------------------------------------------------- dispatch

// Calls f(T{}) with the element type of `dtype`. float64 exists on the baseline only; the caller sends it there.
template <class F>
ATTN_INLINE void dispatch(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(bf16{});
    case DType::f16: return f(f16{});
    case DType::f64:
#if !defined(__AVX2__)
      return f(double{});
#endif
    case DType::boolean: return;
  }
}

// ------------------------------------------------------------------------------------------------ workers

// Hands out 0..total-1 to the workers, in order, each number once. Which worker gets which never shows in a result.
struct Queue {
  int64_t next = 0, total;
  bool take(int64_t& i) {
    i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    return i < total;
  }
};

// While it lives, subnormal numbers count as 0 in this thread's arithmetic, as operands and as results; or, if not
// `flush`, as what they are. Intel's CPUs take a hundred times as long for each of them otherwise. Elsewhere than on
// x86 they are as fast as others, and count.
class Subnormals {
 public:
#if defined(__x86_64__)
  explicit Subnormals(bool flush) {
    constexpr uint32_t kFlushResults = 0x8000, kOperandsAreZero = 0x0040;
    asm volatile("stmxcsr %0" : "=m"(saved_) : : "memory");
    set(flush ? saved_ | kFlushResults | kOperandsAreZero : saved_ & ~(kFlushResults | kOperandsAreZero));
  }
  ~Subnormals() { set(saved_); }

 private:
  static void set(uint32_t mode) { asm volatile("ldmxcsr %0" : : "m"(mode) : "memory"); }
  uint32_t saved_;
#else
  explicit Subnormals(bool) {}
#endif
  Subnormals(const Subnormals&) = delete;
  Subnormals& operator=(const Subnormals&) = delete;
};

// gcc does not know that arithmetic depends on the mode, and may move an operation past the instruction that sets it,
// but no call: that instruction clobbers memory. So the mode is set in a function without arithmetic, and all
// arithmetic is in one of its own.
template <class Body>
__attribute__((noinline)) void run_body(const Body& body, int worker) {
  body(worker);
}
template <class A, class Body>
__attribute__((noinline)) void run_worker(void* body, int worker) {
  const Subnormals subnormals(sizeof(A) == sizeof(float));
  run_body(*static_cast<const Body*>(body), worker);
}

// Runs body(worker) on as many workers as there is work for; its sums are of type A. All arithmetic of a kernel belongs
// here: outside, the caller's mode of subnormal numbers is in force.
template <class A, class Body>
ATTN_INLINE void run_parallel(const Launch& launch, int64_t items, const Body& body) {
  const int workers = int(min_of<int64_t>(items, launch.workers));
  void* context = const_cast<void*>(static_cast<const void*>(&body));
  if (workers <= 1)
    run_worker<A, Body>(context, 0);
  else
    launch.parallel(workers, run_worker<A, Body>, context);
}

}  // namespace
}  // namespace attn_ext::ATTN_EXT_ISA
