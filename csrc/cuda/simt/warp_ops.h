// What the warp instructions compute, as plain functions of the 32 lanes' registers ([register][lane]), and the
// rounding of 16-bit floats. The executor calls them, and the conformance test compares a GPU with them.
#pragma once

#include <stdint.h>
#include <string.h>

namespace simt {
namespace warp_ops {

inline uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}

inline float float_of_bits(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

inline float float_of_bf16(uint16_t h) { return float_of_bits(uint32_t(h) << 16); }

inline uint16_t bf16_of_float(float x) {
  uint32_t u = bits_of(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

inline float float_of_f16(uint16_t h) {
  uint32_t u = uint32_t(h & 0x7fff) << 13;
  float magnitude = (h & 0x7c00) == 0x7c00 ? float_of_bits(u | 0x7f800000u) : float_of_bits(u) * 0x1p112f;
  return float_of_bits(bits_of(magnitude) | uint32_t(h & 0x8000) << 16);
}

inline uint16_t f16_of_float(float x) {
  uint32_t u = bits_of(x), sign = u >> 16 & 0x8000;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return 0x7fff;
  if (u >= 0x477ff000u) return uint16_t(sign | 0x7c00);  // 65520 and more round to infinity
  if (u < 0x38800000u) {  // below 2^-14 one unit is 2^-24, which is also one unit of floats in [0.5, 1)
    return uint16_t(sign | (bits_of(float_of_bits(u) + 0.5f) - bits_of(0.5f)));
  }
  return uint16_t(sign | (u + 0xfffu + ((u >> 13) & 1) - 0x38000000u) >> 13);
}

// The row addresses lie in rows[lane]; matrices is 2 or 4.
inline void ldmatrix(uint32_t (*r)[32], const char* const* rows, int matrices, bool transposed) {
  for (int m = 0; m < matrices; ++m) {
    uint16_t tile[8][8];
    for (int i = 0; i < 8; ++i) memcpy(tile[i], rows[8 * m + i], 16);
    for (int lane = 0; lane < 32; ++lane) {
      int g = lane / 4, t = lane % 4;
      uint32_t lo = transposed ? tile[2 * t][g] : tile[g][2 * t];
      uint32_t hi = transposed ? tile[2 * t + 1][g] : tile[g][2 * t + 1];
      r[m][lane] = lo | hi << 16;
    }
  }
}

// c += a b in float32, k in ascending order. Read along the lanes, a register of a or b is an 8x8 matrix of 16-bit
// elements in row order, so no lane arithmetic is needed.
inline void mma_m16n8k16(float (*c)[32], const uint32_t (*a)[32], const uint32_t (*b)[32], bool is_bf16) {
  typedef float Row __attribute__((vector_size(32)));  // 8 columns
  float A[16][16], B[16][8];
  uint16_t tile[64];
  for (int i = 0; i < 4; ++i) {
    memcpy(tile, a[i], sizeof tile);
    for (int r = 0; r < 8; ++r) {
      float* out = &A[8 * (i & 1) + r][8 * (i >> 1)];
      if (is_bf16) {
        for (int k = 0; k < 8; ++k) out[k] = float_of_bf16(tile[8 * r + k]);
      } else {
        for (int k = 0; k < 8; ++k) out[k] = float_of_f16(tile[8 * r + k]);
      }
    }
  }
  for (int i = 0; i < 2; ++i) {
    memcpy(tile, b[i], sizeof tile);
    for (int n = 0; n < 8; ++n) {
      for (int k = 0; k < 8; ++k) {
        uint16_t element = tile[8 * n + k];
        B[8 * i + k][n] = is_bf16 ? float_of_bf16(element) : float_of_f16(element);
      }
    }
  }
  Row columns[16];
  memcpy(columns, B, sizeof columns);
  for (int row = 0; row < 16; ++row) {
    float* lo = c[row < 8 ? 0 : 2] + row % 8 * 4;
    float* hi = c[row < 8 ? 1 : 3] + row % 8 * 4;
    Row acc = {lo[0], hi[0], lo[1], hi[1], lo[2], hi[2], lo[3], hi[3]};
    for (int k = 0; k < 16; ++k) acc += A[row][k] * columns[k];
    for (int t = 0; t < 4; ++t) {
      lo[t] = acc[2 * t];
      hi[t] = acc[2 * t + 1];
    }
  }
}

}  // namespace warp_ops
}  // namespace simt
