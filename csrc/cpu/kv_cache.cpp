// Cache rows are moved, not computed: append_kv and copy_blocks copy bytes, the same on every CPU.
#include <string.h>

#include "cpu/kernels.h"

namespace attn_ext {

void append_kv(const AppendKvParams& p, const Launch&) {
  const int64_t size = p.element_size;
  const auto append = [&](const void* rows, const int64_t* in, void* cache, const int64_t* to) {
    for (int64_t token = 0; token < p.tokens; ++token) {
      const int64_t slot = p.slot_mapping[token];
      if (slot < 0) continue;
      const int64_t first = slot / p.block_size * to[0] + slot % p.block_size * to[1];
      for (int64_t head = 0; head < p.Hkv; ++head)
        memcpy(static_cast<char*>(cache) + (first + head * to[2]) * size,
               static_cast<const char*>(rows) + (token * in[0] + head * in[1]) * size, size_t(p.D * size));
    }
  };
  append(p.key, p.key_in_strides, p.key_cache, p.key_strides);
  append(p.value, p.value_in_strides, p.value_cache, p.value_strides);
}

int64_t copy_blocks_workspace(const CopyBlocksParams& p) {
  return p.pairs * p.block_size * p.Hkv * p.D * p.element_size;
}

// Every source is read before any destination is written.
void copy_blocks(const CopyBlocksParams& p, const Launch& launch) {
  const int64_t row = p.D * p.element_size;
  char* held = launch.workspace;
  const auto for_each_row = [&](int64_t which, const auto& move) {
    char* next = held;
    for (int64_t i = 0; i < p.pairs; ++i)
      for (int64_t token = 0; token < p.block_size; ++token)
        for (int64_t head = 0; head < p.Hkv; ++head, next += row) {
          const int64_t block = p.block_pairs[2 * i + which];
          move(static_cast<char*>(p.cache) +
                   (block * p.strides[0] + token * p.strides[1] + head * p.strides[2]) * p.element_size,
               next);
        }
  };
  for_each_row(0, [&](char* cache, char* copy) { memcpy(copy, cache, size_t(row)); });
  for_each_row(1, [&](char* cache, char* copy) { memcpy(cache, copy, size_t(row)); });
}

}  // namespace attn_ext
