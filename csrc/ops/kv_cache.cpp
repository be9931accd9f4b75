// append_kv and copy_blocks: checks.
#include <algorithm>

#include "ops/launch.h"
#include "ops/ops.h"

namespace attn_ext::ops {

Indices<int64_t> checked_slots(const Checker& c, const Tensor& slot_mapping, int64_t tokens, const Tensor& key_cache) {
  const auto slots = c.indices<int64_t>(slot_mapping, "slot_mapping");
  ATTN_EXT_CHECK(c, slots.size == tokens, "slot_mapping", "have one entry a token (" + std::to_string(tokens) + ")",
                 std::to_string(slots.size));
  const int64_t last = key_cache.size(0) * key_cache.size(1) - 1;
  bool ascending = true;
  int64_t before = -1;
  for (int64_t i = 0; i < slots.size; ++i) {
    ATTN_EXT_CHECK(c, slots[i] >= -1 && slots[i] <= last, "slot_mapping[" + std::to_string(i) + "]",
                   "be -1 (skip) or a slot of the cache (0 to " + std::to_string(last) + ")", std::to_string(slots[i]));
    if (slots[i] < 0) continue;
    ascending &= slots[i] > before;
    before = slots[i];
  }
  if (!ascending) {
    std::vector<int64_t> sorted(slots.data, slots.data + slots.size);
    std::sort(sorted.begin(), sorted.end());
    for (size_t i = 1; i < sorted.size(); ++i)
      ATTN_EXT_CHECK(c, sorted[i] < 0 || sorted[i] != sorted[i - 1], "slot_mapping", "name each slot once",
                     "slot " + std::to_string(sorted[i]) + " twice");
  }
  return slots;
}

void append_kv(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping) {
  const Checker c{"append_kv"};
  c.rank(key, "key", 3, "(tokens, Hkv, D)");
  ATTN_EXT_CHECK(c, same_shape(key, value), "value", "have the shape of key " + to_string(shape_of(key)),
                 to_string(shape_of(value)));
  c.caches(key_cache, value_cache, Checker::Caches::written);
  c.same_device(
      key, "key",
      {{"value", &value}, {"key_cache", &key_cache}, {"value_cache", &value_cache}, {"slot_mapping", &slot_mapping}});
  c.same_dtype({{"key", &key}, {"value", &value}, {"key_cache", &key_cache}, {"value_cache", &value_cache}});
  ATTN_EXT_CHECK(c, key.size(1) == key_cache.size(2) && key.size(2) == key_cache.size(3), "key",
                 "have the key/value heads and head_dim of key_cache (" + std::to_string(key_cache.size(2)) + ", " +
                     std::to_string(key_cache.size(3)) + ")",
                 to_string(shape_of(key)));
  const auto slots = checked_slots(c, slot_mapping, key.size(0), key_cache);

  key = unit_last_stride(key);
  value = unit_last_stride(value);
  AppendKvParams p{};
  p.element_size = int64_t(key.element_size());
  p.tokens = key.size(0);
  p.Hkv = key.size(1);
  p.D = key.size(2);
  p.block_size = key_cache.size(1);
  p.key = key.const_data_ptr();
  p.value = value.const_data_ptr();
  p.key_cache = key_cache.mutable_data_ptr();
  p.value_cache = value_cache.mutable_data_ptr();
  for (int i = 0; i < 2; ++i) {
    p.key_in_strides[i] = key.stride(i);
    p.value_in_strides[i] = value.stride(i);
  }
  for (int i = 0; i < 3; ++i) {
    p.key_strides[i] = key_cache.stride(i);
    p.value_strides[i] = value_cache.stride(i);
  }
  p.slot_mapping = slots.data;
  p.num_blocks = key_cache.size(0);
  if (p.tokens * p.Hkv * p.D > 0) run(c.op, key_cache, p);
  mark_written(key_cache, value_cache);
}

namespace {

// Pairs (source, destination) of a cache with these blocks: no destination twice.
void check_pairs(const Checker& c, const int64_t* pairs, int64_t n, int64_t blocks) {
  std::vector<int64_t> destinations;
  for (int64_t i = 0; i < 2 * n; ++i) {
    ATTN_EXT_CHECK(c, pairs[i] >= 0 && pairs[i] < blocks,
                   "block_pairs[" + std::to_string(i / 2) + "][" + std::to_string(i % 2) + "]",
                   "be a block of the cache (0 to " + std::to_string(blocks - 1) + ")", std::to_string(pairs[i]));
    if (i % 2) destinations.push_back(pairs[i]);
  }
  std::sort(destinations.begin(), destinations.end());
  const auto twice = std::adjacent_find(destinations.begin(), destinations.end());
  if (twice != destinations.end())
    c.fail("block_pairs", "name each destination once", "destination " + std::to_string(*twice) + " twice");
}

}  // namespace

void copy_blocks(Tensor key_cache, Tensor value_cache, Tensor block_pairs) {
  const Checker c{"copy_blocks"};
  c.caches(key_cache, value_cache, Checker::Caches::written);
  c.same_device(key_cache, "key_cache", {{"value_cache", &value_cache}, {"block_pairs", &block_pairs}});
  c.same_dtype({{"key_cache", &key_cache}, {"value_cache", &value_cache}});
  c.dtype(block_pairs, "block_pairs", ScalarType::Long);
  ATTN_EXT_CHECK(c, block_pairs.dim() == 2 && block_pairs.size(1) == 2, "block_pairs", "have shape (pairs, 2)",
                 to_string(shape_of(block_pairs)));
  block_pairs = torch::stable::contiguous(block_pairs);
  const int64_t* pairs = static_cast<const int64_t*>(block_pairs.const_data_ptr());
  if (block_pairs.is_cpu()) check_pairs(c, pairs, block_pairs.size(0), key_cache.size(0));

  for (Tensor& cache : {std::ref(key_cache), std::ref(value_cache)}) {
    CopyBlocksParams p{};
    p.element_size = int64_t(cache.element_size());
    p.pairs = block_pairs.size(0);
    p.block_size = cache.size(1);
    p.Hkv = cache.size(2);
    p.D = cache.size(3);
    p.cache = cache.mutable_data_ptr();
    for (int i = 0; i < 3; ++i) p.strides[i] = cache.stride(i);
    p.block_pairs = pairs;
    p.num_blocks = cache.size(0);
    if (p.pairs * p.Hkv * p.D > 0) run(c.op, cache, p);
  }
  mark_written(key_cache, value_cache);
}

}  // namespace attn_ext::ops
