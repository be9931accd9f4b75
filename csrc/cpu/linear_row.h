// What becomes of the sums of one row of a product: y = act(sums + bias) * multiply + residual, or the q, k and v of
// one token.
#pragma once

#include "cpu/vec.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

// Elements 0 .. lanes - 1 of p, as far as they fill a vector; the other lanes are 0.
template <class T>
ATTN_INLINE Vec<Accumulate<T>> load_lanes(const T* p, int64_t lanes) {
  return lanes >= W<Accumulate<T>> ? load(p) : load_first(p, lanes);
}

// Two vectors as elements of T. On AMX subnormal results become 0, as those of its products do.
template <class T>
ATTN_INLINE void store_two(T* p, Vec<Accumulate<T>> a, Vec<Accumulate<T>> b) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(T) == 2) {
    const __m512bh h = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    memcpy(p, &h, sizeof h);
    return;
  }
#endif
  store(p, a);
  store(p + W<Accumulate<T>>, b);
}

// Columns n .. n + columns - 1 of row m of y. Sums are read in whole vectors.
template <class T>
void finish_linear_row(const LinearParams& p, int64_t m, int64_t n, int64_t columns, const Accumulate<T>* sums) {
  using A = Accumulate<T>;
  const auto row = [&](const void* base, int64_t stride) {
    return base ? static_cast<const T*>(base) + m * stride + n : nullptr;
  };
  const T *bias = row(p.bias, 0), *factor = row(p.multiply, p.multiply_stride);
  const T* residual = row(p.residual, p.residual_stride);
  T* y = static_cast<T*>(p.y) + m * p.y_stride + n;
  const auto finished = [&](int64_t c, int64_t lanes) {
    Vec<A> v = load(sums + c);
    if (bias) v += load_lanes(bias + c, lanes);
    v = activate<A>(p.activation, v);
    if (factor) v *= load_lanes(factor + c, lanes);
    if (residual) v += load_lanes(residual + c, lanes);
    return v;
  };
  int64_t c = 0;
  for (; c + 2 * W<A> <= columns; c += 2 * W<A>) store_two(y + c, finished(c, W<A>), finished(c + W<A>, W<A>));
  for (; c < columns; c += W<A>) {
    const int64_t lanes = columns - c;
    const Vec<A> v = finished(c, lanes);
    if (lanes >= W<A>)
      store(y + c, v);
    else
      store_first(y + c, v, lanes);
  }
}

// Rotates one head in place: pairs (d, d + D/2), half-split as in Llama.
template <class A>
void rotate(A* head, int64_t D, const float* cos, const float* sin) {
  const int64_t half = D / 2;
  const auto pairs = [](auto& a, auto& b, auto c, auto s) {
    const auto turned = a * c - b * s;
    b = b * c + a * s;
    a = turned;
  };
  int64_t d = 0;
  if constexpr (sizeof(A) == sizeof(float)) {
    for (; d + W<A> <= half; d += W<A>) {
      Vec<A> a = load(head + d), b = load(head + half + d);
      pairs(a, b, load(cos + d), load(sin + d));
      store(head + d, a);
      store(head + half + d, b);
    }
  }
  for (; d < half; ++d) pairs(head[d], head[half + d], A(cos[d]), A(sin[d]));
}

// Head number `head` of the fused projection of a token: to q, or to the token's slot of the cache. Sums are read and
// written in whole vectors.
template <class T>
void finish_qkv_row(const QkvToCacheParams& p, int64_t token, int64_t head, Accumulate<T>* sums) {
  using A = Accumulate<T>;
  const int64_t slot = p.slot_mapping[token];
  const bool is_q = head < p.H, is_v = head >= p.H + p.Hkv;
  if (!is_q && slot < 0) return;
  if (p.gemm.bias) {
    const T* bias = static_cast<const T*>(p.gemm.bias) + head * p.D;
    for (int64_t d = 0; d < p.D; d += W<A>) store(sums + d, load(sums + d) + load_lanes(bias + d, p.D - d));
  }
  if (p.rope_cos && !is_v) {
    const int64_t position = p.positions[token];
    rotate(sums, p.D, p.rope_cos + position * p.rope_cos_stride, p.rope_sin + position * p.rope_sin_stride);
  }
  T* to;
  if (is_q) {
    to = static_cast<T*>(p.q) + (token * p.H + head) * p.D;
  } else {
    const int64_t* s = is_v ? p.value_strides : p.key_strides;
    const int64_t kv_head = head - p.H - (is_v ? p.Hkv : 0);
    to = static_cast<T*>(is_v ? p.value_cache : p.key_cache) + slot / p.block_size * s[0] + slot % p.block_size * s[1] +
         kv_head * s[2];
  }
  store_row(to, sums, p.D);
}

}  // namespace
}  // namespace attn_ext::ATTN_EXT_ISA
