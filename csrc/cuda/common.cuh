// What several kernels share, on top of simt.cuh: index arithmetic, vectors of elements, warp reductions, dtype
// dispatch.
#pragma once

#include <stdexcept>

#include "cuda/simt.cuh"
#include "params.h"

namespace attn_ext::cuda {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class T>
ATTN_HOST_DEVICE constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

template <class T>
ATTN_HOST_DEVICE constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}

template <class T>
ATTN_HOST_DEVICE constexpr T max_of(T a, T b) {
  return a < b ? b : a;
}

struct Quotient {
  int64_t quotient, remainder;
};

// a / b and a % b of numbers >= 0; most fit 32 bits, whose division is several times faster on a GPU.
ATTN_DEVICE Quotient divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) {
    const uint32_t q = uint32_t(a) / uint32_t(b);
    return {q, uint32_t(a) - q * uint32_t(b)};
  }
  const int64_t q = a / b;
  return {q, a - q * b};
}

// ---- vectors of elements: bool, float, bf16 or f16, in registers as float -----------------------------------------

template <class T>
ATTN_DEVICE float to_float(T x) {
  if constexpr (sizeof(T) == 1)
    return x ? 1.0f : 0.0f;
  else
    return simt::to_float(x);
}

// x = n elements at p, which is aligned to their size together (or to 16 bytes if that is more).
template <class T, int n>
ATTN_DEVICE void load_vector(const T* p, float (&x)[n]) {
  constexpr int bytes = n * int(sizeof(T));
  if constexpr (bytes > 16) {
    constexpr int half = n / 2;
    float low[half], high[half];
    load_vector(p, low);
    load_vector(p + half, high);
    ATTN_UNROLL
    for (int i = 0; i < half; ++i) {
      x[i] = low[i];
      x[half + i] = high[i];
    }
  } else {
    static_assert(bytes == 4 || bytes == 8 || bytes == 16, "a vector of 4, 8 or 16 bytes");
    uint32_t words[bytes / 4];
    if constexpr (bytes == 16) {
      const simt::U32x4 v = simt::ldg128(p);
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    } else if constexpr (bytes == 8) {
      const simt::U32x2 v = simt::ldg(reinterpret_cast<const simt::U32x2*>(p));
      words[0] = v.x, words[1] = v.y;
    } else {
      words[0] = simt::ldg(reinterpret_cast<const uint32_t*>(p));
    }
    ATTN_UNROLL
    for (int i = 0; i < n; ++i) {
      if constexpr (sizeof(T) == 4)
        x[i] = simt::float_from_bits(words[i]);
      else if constexpr (sizeof(T) == 2)
        x[i] = simt::to_float(T{uint16_t(words[i / 2] >> (16 * (i % 2)))});
      else
        x[i] = (words[i / 4] >> (8 * (i % 4))) & 0xff ? 1.0f : 0.0f;
    }
  }
}

// Stores x rounded to T at p, aligned to 8 or 16 bytes, the size of all of it.
template <class T, int n>
ATTN_DEVICE void store_vector(T* p, const float (&x)[n]) {
  constexpr int words = n * int(sizeof(T)) / 4;
  static_assert(words == 2 || words == 4, "a vector of 8 or 16 bytes");
  uint32_t w[words];
  ATTN_UNROLL
  for (int i = 0; i < words; ++i) {
    if constexpr (sizeof(T) == 4)
      w[i] = simt::float_bits(x[i]);
    else
      w[i] = simt::pack2<T>(x[2 * i], x[2 * i + 1]);
  }
  if constexpr (words == 4)
    simt::st128(p, {w[0], w[1], w[2], w[3]});
  else
    simt::st(reinterpret_cast<simt::U32x2*>(p), simt::U32x2{w[0], w[1]});
}

// ---- the warp ------------------------------------------------------------------------------------------------------

ATTN_DEVICE float warp_max(float x) {
  ATTN_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) x = simt::max(x, simt::shfl_xor(x, mask));
  return x;
}

// Sum over lanes, neighbours first: the same bits in every lane.
ATTN_DEVICE float warp_sum(float x) {
  ATTN_UNROLL
  for (int mask = 1; mask < 32; mask *= 2) x += simt::shfl_xor(x, mask);
  return x;
}

// ---- host ----------------------------------------------------------------------------------------------------------

constexpr int64_t kMaxGrid = 0x7fffffff;  // blocks along x

// f(T{}) with the element type of a dtype that CUDA kernels have.
template <class F>
void dispatch(DType dtype, const F& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(simt::bf16{});
    case DType::f16: return f(simt::f16{});
    default: throw std::logic_error("no CUDA kernel for this dtype");
  }
}

// Are all of these multiples of `bytes`? Pointers count as their address.
template <class... Values>
bool all_multiples(int64_t bytes, Values... values) {
  return (((int64_t)(values) % bytes == 0) && ...);
}

}  // namespace attn_ext::cuda
