// The peak that AMX kernels are compared with: products of full tiles in registers, nothing else.
#include "cpu/amx/tile.h"
#include "cpu/kernels.h"

namespace attn_ext::ATTN_EXT_ISA {

// 4 * iterations products of 16 x 16 x 32, by the calling thread.
void peak(int64_t iterations) {
  const tile::Config config(tile::Shapes::full());
  for (int64_t i = 0; i < iterations; ++i) {
    tile::dot<0, 4, 6>();
    tile::dot<1, 4, 7>();
    tile::dot<2, 5, 6>();
    tile::dot<3, 5, 7>();
  }
}

}  // namespace attn_ext::ATTN_EXT_ISA
