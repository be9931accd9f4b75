// Factors of products in the form in which tiles take them.
#pragma once

#include "cpu/amx/tile.h"
#include "cpu/gemm.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

// A right factor, given by its columns: tiles of 32 k x 16 columns, one behind the other in k. Column n is row(n), k
// elements; k is padded with zeros to whole tiles, columns are repeated where there are less than 16.
template <class Row>
void pack_right(int64_t columns, int64_t k, const Row& row, char* to) {
  const int64_t used = ceil_div(k, 2) * tmm::kRowBytes;
  pack_transposed<bf16>(columns, k, row, reinterpret_cast<float*>(to), tmm::kPairs);
  memset(to + used, 0, size_t(round_up(used, tmm::kBytes) - used));
}

// One row of a left factor: 32 k in each tile, the tiles of consecutive k `stride` bytes apart; padded with zeros.
ATTN_INLINE void pack_left_row(const bf16* row, int64_t k, char* to, int64_t stride) {
  int64_t i = 0;
  for (; i + tmm::kDepth <= k; i += tmm::kDepth, to += stride) memcpy(to, row + i, tmm::kRowBytes);
  if (i < k) {
    memset(to, 0, tmm::kRowBytes);
    memcpy(to, row + i, size_t(k - i) * sizeof(bf16));
  }
}

// Runs f(Constant<0>) .. f(Constant<n - 1>).
template <int n, class F>
ATTN_INLINE void each(const F& f) {
  if constexpr (n > 1) each<n - 1>(f);
  f(Constant<n - 1>{});
}

}  // namespace
}  // namespace attn_ext::ATTN_EXT_ISA
