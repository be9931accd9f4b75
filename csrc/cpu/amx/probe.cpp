// The highest rate of products that tiles have: what a kernel's time is judged by.
#include "cpu/amx/tile.h"
#include "cpu/kernels.h"

namespace attn_ext::ATTN_EXT_ISA {

// `iterations` rounds of products of full tiles in registers, by the calling thread -> operations done.
int64_t peak_bf16(int64_t iterations) {
  const tmm::Config config(tmm::Shapes::full());
  for (int64_t i = 0; i < iterations; ++i) {
    tmm::dot<0, 4, 6>();
    tmm::dot<1, 4, 7>();
    tmm::dot<2, 5, 6>();
    tmm::dot<3, 5, 7>();
  }
  return iterations * 4 * 2 * tmm::kRows * tmm::kPairs * tmm::kDepth;
}

}  // namespace attn_ext::ATTN_EXT_ISA
