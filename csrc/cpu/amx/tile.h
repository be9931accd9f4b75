// The AMX tile registers: eight matrices of up to 16 rows x 64 bytes per thread, and the instructions on them.
//
//   tmm::Config config(shapes);        gives the tiles their shapes; they go back to the system when it ends
//   tmm::zero<c>()                     tile c = 0
//   tmm::load<a>(memory, stride)       rows from memory, `stride` bytes apart
//   tmm::dot<c, a, b>()                c (m, n) float32 += a (m, 2k) bfloat16 . b (k, n pairs) bfloat16
//   tmm::store<c>(memory, stride)
//
// b holds two consecutive k of a column side by side: b[i][n] = {B[2i][n], B[2i+1][n]}. Per element of c, dot adds the
// products of even k in one chain and those of odd k in another, adds the two, and adds that to c. Subnormal numbers
// count as 0, results too; rounding is to nearest even whatever MXCSR says.
//
// Own inline assembly, because GCC 12's intrinsics do not tell the compiler what memory they read: stores to a
// configuration or to a matrix may be moved behind the instruction that loads it, or dropped.
#pragma once

#include <stdint.h>

#include "cpu/vec.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {
namespace tmm {

constexpr int64_t kRows = 16;
constexpr int64_t kRowBytes = 64;
constexpr int64_t kBytes = kRows * kRowBytes;
constexpr int64_t kFloats = kBytes / 4;  // of a full tile
constexpr int64_t kPairs = 16;           // of bfloat16 in a row
constexpr int64_t kDepth = 32;           // k that one dot takes

// The operand of LDTILECFG.
struct alignas(64) Shapes {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // Every tile 16 rows x 64 bytes.
  static Shapes full() {
    Shapes shapes;
    for (int i = 0; i < 8; ++i) shapes.set(i, kRows);
    return shapes;
  }
  void set(int i, int64_t tile_rows, int64_t bytes = kRowBytes) {
    row_bytes[i] = uint16_t(bytes);
    rows[i] = uint8_t(tile_rows);
  }
};
static_assert(sizeof(Shapes) == 64);

// Shapes are state of the thread, and torch's own kernels set theirs: nothing relies on them beyond this object's life.
class Config {
 public:
  explicit Config(const Shapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory"); }
  ~Config() { asm volatile("tilerelease" : : : "memory"); }
  Config(const Config&) = delete;
  Config& operator=(const Config&) = delete;
};

template <int t>
ATTN_INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(t));
}
template <int t>
ATTN_INLINE void load(const void* memory, int64_t stride = kRowBytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(memory), "r"(stride), "i"(t) : "memory");
}
template <int t>
ATTN_INLINE void store(void* memory, int64_t stride = kRowBytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(memory), "r"(stride), "i"(t) : "memory");
}
template <int c, int a, int b>
ATTN_INLINE void dot() {
  static_assert(c != a && c != b && a != b);  // else an invalid instruction
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(c), "i"(a), "i"(b));
}

}  // namespace tmm
}  // namespace
}  // namespace attn_ext::ATTN_EXT_ISA
