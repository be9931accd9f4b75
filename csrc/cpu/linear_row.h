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

// Two vectors as elements of T.
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

// Columns n .. n + columns - 1 of rows m .. m + rows - 1 of y. Rows of sums are `ld` apart and read in whole vectors.
template <class T, Activation activation>
void finish_linear_rows(const LinearParams& p, int64_t m, int64_t rows, int64_t n, int64_t columns,
                        const Accumulate<T>* sums, int64_t ld) {
  using A = Accumulate<T>;
  const auto strip = [&](int64_t c, auto vectors) {  // of columns: one vector, of which some lanes may count, or two
    constexpr int V = decltype(vectors)::value;
    const int64_t lanes = V == 2 ? W<A> : columns - c;
    const auto at = [&](const void* base, int64_t stride) {
      return base ? static_cast<const T*>(base) + m * stride + n + c : nullptr;
    };
    const T *bias = at(p.bias, 0), *factor = at(p.multiply, p.multiply_stride);
    const T* residual = at(p.residual, p.residual_stride);
    T* y = static_cast<T*>(p.y) + m * p.y_stride + n + c;
    Vec<A> shift[V];
    for (int i = 0; i < V; ++i) shift[i] = bias ? load_lanes(bias + i * W<A>, lanes) : splat(A(0));
    for (int64_t r = 0; r < rows; ++r, y += p.y_stride) {
      Vec<A> v[V];
      for (int i = 0; i < V; ++i) {
        v[i] = load(sums + r * ld + c + i * W<A>);
        if (bias) v[i] += shift[i];
        v[i] = activate<A>(activation, v[i]);
        if (factor) v[i] *= load_lanes(factor + r * p.multiply_stride + i * W<A>, lanes);
        if (residual) v[i] += load_lanes(residual + r * p.residual_stride + i * W<A>, lanes);
      }
      if constexpr (V == 2)
        store_two(y, v[0], v[1]);
      else if (lanes >= W<A>)
        store(y, v[0]);
      else
        store_first(y, v[0], lanes);
    }
  };
  int64_t c = 0;
  for (; c + 2 * W<A> <= columns; c += 2 * W<A>) strip(c, Constant<2>{});
  for (; c < columns; c += W<A>) strip(c, Constant<1>{});
}

template <class T>
void finish_linear_rows(const LinearParams& p, int64_t m, int64_t rows, int64_t n, int64_t columns,
                        const Accumulate<T>* sums, int64_t ld) {
  const auto run = [&](auto activation) {
    finish_linear_rows<T, Activation(decltype(activation)::value)>(p, m, rows, n, columns, sums, ld);
  };
  switch (p.activation) {
    case Activation::none: return run(Constant<int(Activation::none)>{});
    case Activation::gelu: return run(Constant<int(Activation::gelu)>{});
    case Activation::gelu_tanh: return run(Constant<int(Activation::gelu_tanh)>{});
    case Activation::silu: return run(Constant<int(Activation::silu)>{});
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
