// append_kv and copy_blocks: cache rows are moved, not computed.
//
// A row is the D elements of one head of one token. A warp moves one row at a time, in units of 16, 4 or 2 bytes: the
// widest that every address is a multiple of.
#pragma once

#include "cuda/common.cuh"
#include "cuda/kernels.h"

namespace attn_ext::cuda {

constexpr int kMoveThreads = 256;
constexpr int kMoveWarps = kMoveThreads / 32;

template <int kUnit>
ATTN_DEVICE void move_unit(char* to, const char* from) {
  if constexpr (kUnit == 16)
    simt::st128(to, simt::ld128(from));
  else if constexpr (kUnit == 4)
    simt::st(reinterpret_cast<uint32_t*>(to), simt::ld(reinterpret_cast<const uint32_t*>(from)));
  else
    simt::st(reinterpret_cast<uint16_t*>(to), simt::ld(reinterpret_cast<const uint16_t*>(from)));
}

// ---- append_kv -----------------------------------------------------------------------------------------------------

template <int kUnit>
ATTN_KERNEL(kMoveThreads, 4)
append_kv_kernel(ATTN_CONSTANT_PARAM AppendKvParams p) {
  const int64_t rows = p.tokens * p.Hkv, bytes = p.D * p.element_size;
  for (int64_t row = int64_t(simt::block_idx().x) * kMoveWarps + simt::warp(); row < rows;
       row += int64_t(simt::grid_dim().x) * kMoveWarps) {
    const auto [token, head] = divide(row, p.Hkv);
    const int64_t slot = simt::ldg(p.slot_mapping + token);
    if (slot < 0 || slot >= p.num_blocks * p.block_size) continue;
    const auto [block, offset] = divide(slot, p.block_size);
    const auto move = [&](void* cache, const int64_t* to, const void* in, const int64_t* from) {
      char* target = static_cast<char*>(cache) + (block * to[0] + offset * to[1] + head * to[2]) * p.element_size;
      const char* source = static_cast<const char*>(in) + (token * from[0] + head * from[1]) * p.element_size;
      for (int64_t byte = simt::lane() * kUnit; byte < bytes; byte += 32 * kUnit)
        move_unit<kUnit>(target + byte, source + byte);
    };
    move(p.key_cache, p.key_strides, p.key, p.key_in_strides);
    move(p.value_cache, p.value_strides, p.value, p.value_in_strides);
  }
}

// ---- copy_blocks ---------------------------------------------------------------------------------------------------

// Held: the rows of all pairs one after another, (pairs, block_size, Hkv) of them. Moves the source blocks to `held`,
// or `held` to the destination blocks: between the two launches every source has been read and none written.
template <int kUnit>
ATTN_KERNEL(kMoveThreads, 4)
copy_blocks_kernel(ATTN_CONSTANT_PARAM CopyBlocksParams p, char* held, bool to_held) {
  const int64_t rows = p.pairs * p.block_size * p.Hkv, bytes = p.D * p.element_size;
  for (int64_t row = int64_t(simt::block_idx().x) * kMoveWarps + simt::warp(); row < rows;
       row += int64_t(simt::grid_dim().x) * kMoveWarps) {
    const auto [token, head] = divide(row, p.Hkv);
    const auto [pair, offset] = divide(token, p.block_size);
    const int64_t source = simt::ldg(p.block_pairs + 2 * pair), destination = simt::ldg(p.block_pairs + 2 * pair + 1);
    if (source < 0 || source >= p.num_blocks || destination < 0 || destination >= p.num_blocks) continue;
    const int64_t block = to_held ? source : destination;
    char* in_cache = static_cast<char*>(p.cache) +
                     (block * p.strides[0] + offset * p.strides[1] + head * p.strides[2]) * p.element_size;
    char* in_held = held + row * bytes;
    for (int64_t byte = simt::lane() * kUnit; byte < bytes; byte += 32 * kUnit)
      move_unit<kUnit>((to_held ? in_held : in_cache) + byte, (to_held ? in_cache : in_held) + byte);
  }
}

// ---- launchers -----------------------------------------------------------------------------------------------------

inline simt::Dim move_grid(int64_t rows) {
  return {uint32_t(min_of<int64_t>(ceil_div<int64_t>(rows, kMoveWarps), kMaxGrid))};
}

void append_kv(const AppendKvParams& p, const Launch& launch) {
  if (p.tokens * p.Hkv * p.D == 0) return;
  const auto fits = [&](int64_t unit) {
    const auto strides = [&](auto... stride) { return all_multiples(unit, stride * p.element_size...); };
    return all_multiples(unit, p.key, p.value, p.key_cache, p.value_cache) &&
           strides(p.D, p.key_in_strides[0], p.key_in_strides[1], p.value_in_strides[0], p.value_in_strides[1]) &&
           strides(p.key_strides[0], p.key_strides[1], p.key_strides[2]) &&
           strides(p.value_strides[0], p.value_strides[1], p.value_strides[2]);
  };
  const auto kernel = fits(16) ? append_kv_kernel<16> : fits(4) ? append_kv_kernel<4> : append_kv_kernel<2>;
  simt::launch(kernel, move_grid(p.tokens * p.Hkv), {kMoveThreads}, 0, simt::Stream(launch.stream), p);
}

int64_t copy_blocks_workspace(const CopyBlocksParams& p) {
  return p.pairs * p.block_size * p.Hkv * p.D * p.element_size;
}

void copy_blocks(const CopyBlocksParams& p, const Launch& launch) {
  if (copy_blocks_workspace(p) == 0) return;
  const auto fits = [&](int64_t unit) {
    return all_multiples(unit, p.cache, launch.workspace, p.D * p.element_size, p.strides[0] * p.element_size,
                         p.strides[1] * p.element_size, p.strides[2] * p.element_size);
  };
  const auto kernel = fits(16) ? copy_blocks_kernel<16> : fits(4) ? copy_blocks_kernel<4> : copy_blocks_kernel<2>;
  for (const bool to_held : {true, false})
    simt::launch(kernel, move_grid(p.pairs * p.block_size * p.Hkv), {kMoveThreads}, 0, simt::Stream(launch.stream), p,
                 launch.workspace, to_held);
}

}  // namespace attn_ext::cuda
