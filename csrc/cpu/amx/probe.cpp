// The peak that AMX kernels are compared with: products of full tiles in registers, nothing else.
#include "cpu/amx/tile.h"
#include "cpu/kernels.h"

namespace attn_ext::ATTN_EXT_ISA {

// 4 * iterations products of 16 x 16 x 32, by the calling thread.
void peak(int64_t iterations) {
  const tmm::Config config(tmm::Shapes::full());
  for (int64_t i = 0; i < iterations; ++i) {
    tmm::dot<0, 4, 6>();
    tmm::dot<1, 4, 7>();
    tmm::dot<2, 5, 6>();
    tmm::dot<3, 5, 7>();
  }
}

}  // namespace attn_ext::ATTN_EXT_ISA
