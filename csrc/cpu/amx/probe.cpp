// The highest rate of products that tiles have: what a kernel's time is judged by.
//
// The block of 2 x 2 tiles that the kernels use, with factors loaded from the L1 cache. Four loads take half the time
// of four products and hide behind them, so that this is as fast as products alone. Where other users of the core slow
// tiles down, it is loads that suffer most, and this probe, which also guards measurements, must see it.
#include "cpu/amx/tile.h"
#include "cpu/kernels.h"

namespace attn_ext::ATTN_EXT_ISA {

// `iterations` rounds of products of full tiles, by the calling thread -> operations done.
int64_t peak_bf16(int64_t iterations) {
  alignas(64) static const char factors[4][4][tmm::kBytes] = {};  // 4 steps of 2 tiles of x and 2 of W^T: 16 KB
  const tmm::Config config(tmm::Shapes::full());
  for (int64_t i = 0; i < iterations; ++i) {
    const auto& step = factors[i % 4];
    tmm::load<4>(step[0]);
    tmm::load<5>(step[1]);
    tmm::load<6>(step[2]);
    tmm::dot<0, 4, 6>();
    tmm::dot<2, 5, 6>();
    tmm::load<7>(step[3]);
    tmm::dot<1, 4, 7>();
    tmm::dot<3, 5, 7>();
  }
  return iterations * 4 * 2 * tmm::kRows * tmm::kPairs * tmm::kDepth;
}

}  // namespace attn_ext::ATTN_EXT_ISA
