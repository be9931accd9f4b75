#include "block_allocator.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace attn_ext {
namespace {

std::string prefixed(const char* method, const std::string& what) {
  return std::string("BlockAllocator") + (*method ? "." : "") + method + ": " + what;
}

[[noreturn]] void reject(const char* method, const std::string& what) {
  throw std::invalid_argument(prefixed(method, what));
}

std::string number(int64_t n) { return std::to_string(n); }

// Finaliser of SplitMix64: every input bit reaches every output bit.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

BlockAllocator::BlockAllocator(int64_t num_blocks, int64_t block_size) : block_size_(block_size) {
  // Block tables are int32.
  if (num_blocks < 1 || num_blocks > std::numeric_limits<int32_t>::max())
    reject("", "num_blocks must be between 1 and 2147483647, got " + number(num_blocks));
  if (block_size < 1) reject("", "block_size must be at least 1, got " + number(block_size));
  if (block_size > std::numeric_limits<int64_t>::max() / 16 / num_blocks)
    reject("", "num_blocks * block_size is too large: " + number(num_blocks) + " * " + number(block_size));
  const auto n = static_cast<size_t>(num_blocks);
  states_.resize(n);
  tokens_.resize(n * static_cast<size_t>(block_size));
  buckets_.assign(std::bit_ceil(n), kNone);
  free_.resize(n);
  for (size_t i = 0; i < n; ++i) free_[i] = num_blocks - 1 - static_cast<Block>(i);  // hand out 0 first
}

// --------------------------------------------------------------------------------------- arguments

void BlockAllocator::check_id(const char* method, Block block) const {
  if (block < 0 || block >= num_blocks())
    reject(method, "block must be between 0 and " + number(num_blocks() - 1) + ", got " + number(block));
}

void BlockAllocator::check_held(const char* method, Block block) const {
  check_id(method, block);
  if (state(block).refs == 0) reject(method, "block " + number(block) + " is not allocated");
}

void BlockAllocator::check_available(const char* method, int64_t count) const {
  if (count > num_available())
    throw OutOfBlocks(prefixed(method, number(count) + " blocks asked for, " + number(num_available()) + " of " +
                                           number(num_blocks()) + " are free or cached"));
}

// -------------------------------------------------------------------------------------- references

// NOTE: callers have checked that a block is available.
BlockAllocator::Block BlockAllocator::take_available() {
  Block block;
  if (!free_.empty()) {
    block = free_.back();
    free_.pop_back();
  } else {
    block = oldest_;
    remove_from_eviction_order(block);
    unpublish(block);
  }
  state(block).refs = 1;
  ++num_used_;
  return block;
}

void BlockAllocator::add_reference(Block block) {
  const int64_t refs = ++state(block).refs;
  if (refs == 1) {
    remove_from_eviction_order(block);
    ++num_used_;
  } else if (refs == 2) {
    ++num_shared_;
  }
}

void BlockAllocator::drop_reference(Block block) {
  const int64_t refs = --state(block).refs;
  if (refs == 1) {
    --num_shared_;
  } else if (refs == 0) {
    --num_used_;
    if (is_published(block))
      append_to_eviction_order(block);
    else
      free_.push_back(block);  // never reallocates: the stack began with every block in it
  }
}

BlockAllocator::Blocks BlockAllocator::allocate(int64_t count) {
  if (count < 0) reject("allocate", "count must be at least 0, got " + number(count));
  check_available("allocate", count);
  Blocks blocks(static_cast<size_t>(count));
  for (Block& block : blocks) block = take_available();
  return blocks;
}

void BlockAllocator::free(const Blocks& blocks) {
  Blocks sorted = blocks;
  std::ranges::sort(sorted);
  for (size_t i = 0, repeats = 0; i < sorted.size(); ++i) {
    check_held("free", sorted[i]);
    repeats = i > 0 && sorted[i] == sorted[i - 1] ? repeats + 1 : 1;
    if (static_cast<int64_t>(repeats) > state(sorted[i]).refs)
      reject("free", "block " + number(sorted[i]) + " is listed more often than its " + number(state(sorted[i]).refs) +
                         " reference(s)");
  }
  for (size_t i = blocks.size(); i-- > 0;) drop_reference(blocks[i]);
}

void BlockAllocator::fork(const Blocks& blocks) {
  for (Block block : blocks) check_held("fork", block);
  for (Block block : blocks) add_reference(block);
}

std::pair<BlockAllocator::Blocks, BlockAllocator::Blocks> BlockAllocator::make_writable(const Blocks& blocks,
                                                                                        int64_t count) {
  if (count < 0) reject("make_writable", "count must be at least 0, got " + number(count));
  check_available("make_writable", count);
  // Of r holders of a block, all of whom want to write, r - 1 need a copy and the last one keeps
  // the original.
  int64_t copies = 0;
  Blocks sorted = blocks;
  std::ranges::sort(sorted);
  for (size_t i = 0; i < sorted.size();) {
    const Block block = sorted[i];
    check_held("make_writable", block);
    int64_t holders = 0;
    for (; i < sorted.size() && sorted[i] == block; ++i) ++holders;
    const int64_t refs = state(block).refs;
    if (holders > refs)
      reject("make_writable",
             "block " + number(block) + " is listed more often than its " + number(refs) + " reference(s)");
    copies += is_published(block) ? holders : std::min(holders, refs - 1);
  }
  check_available("make_writable", copies + count);

  // All new blocks are taken before any old one is given up: an old one must not come back as
  // somebody's new one while its contents have yet to be copied.
  Blocks fresh = allocate(copies + count);
  Blocks writable = blocks;
  for (Block& block : writable) {
    if (state(block).refs == 1 && !is_published(block)) continue;
    drop_reference(block);
    block = fresh.back();
    fresh.pop_back();
  }
  return {std::move(writable), std::move(fresh)};
}

// ---------------------------------------------------------------------------------------- prefixes

BlockAllocator::Block& BlockAllocator::bucket_of(Entry parent, const Token* tokens) {
  uint64_t hash = mix(parent + 0x9e3779b97f4a7c15u);
  for (int64_t i = 0; i < block_size_; ++i) hash = mix(hash + static_cast<uint64_t>(tokens[i]) + 0x9e3779b97f4a7c15u);
  return buckets_[hash & (buckets_.size() - 1)];
}

BlockAllocator::Block BlockAllocator::find(Entry parent, const Token* tokens) {
  Block block = bucket_of(parent, tokens);
  while (block != kNone &&
         (state(block).parent != parent || !std::equal(tokens, tokens + block_size_, tokens_of(block))))
    block = state(block).next_in_bucket;
  return block;
}

void BlockAllocator::unpublish(Block block) {
  State& s = state(block);
  Block* link = &bucket_of(s.parent, tokens_of(block));
  while (*link != block) link = &state(*link).next_in_bucket;
  *link = s.next_in_bucket;
  s.next_in_bucket = kNone;
  s.entry = s.parent = kRoot;
  --num_published_;
}

BlockAllocator::Blocks BlockAllocator::match(const Tokens& tokens) {
  Blocks blocks;
  blocks.reserve(tokens.size() / static_cast<size_t>(block_size_));
  Entry parent = kRoot;
  for (int64_t begin = 0; begin + block_size_ <= std::ssize(tokens); begin += block_size_) {
    const Block block = find(parent, tokens.data() + begin);
    if (block == kNone) break;
    add_reference(block);
    blocks.push_back(block);
    parent = state(block).entry;
  }
  return blocks;
}

BlockAllocator::Block BlockAllocator::publish(Block block, const Tokens& tokens, std::optional<Block> parent) {
  check_held("publish", block);
  if (std::ssize(tokens) != block_size_)
    reject("publish", "tokens must fill the block (" + number(block_size_) + "), got " + number(std::ssize(tokens)));
  Entry parent_entry = kRoot;
  if (parent) {
    check_id("publish", *parent);
    if (!is_published(*parent)) reject("publish", "parent " + number(*parent) + " is not published");
    parent_entry = state(*parent).entry;
  }
  const Block known = find(parent_entry, tokens.data());
  if (known == block) return block;
  if (is_published(block)) reject("publish", "block " + number(block) + " is already published under other tokens");
  if (known != kNone) {
    add_reference(known);
    drop_reference(block);
    return known;
  }
  Block& bucket = bucket_of(parent_entry, tokens.data());
  State& s = state(block);
  s.entry = ++last_entry_;
  s.parent = parent_entry;
  s.next_in_bucket = bucket;
  bucket = block;
  std::ranges::copy(tokens, tokens_of(block));
  ++num_published_;
  return block;
}

void BlockAllocator::clear_prefixes() {
  while (oldest_ != kNone) {
    const Block block = oldest_;
    remove_from_eviction_order(block);
    unpublish(block);
    free_.push_back(block);
  }
  for (Block block = 0; block < num_blocks(); ++block)
    if (is_published(block)) unpublish(block);
}

// ---------------------------------------------------------------------------------- eviction order

void BlockAllocator::append_to_eviction_order(Block block) {
  State& s = state(block);
  s.older = newest_;
  s.newer = kNone;
  (newest_ == kNone ? oldest_ : state(newest_).newer) = block;
  newest_ = block;
}

void BlockAllocator::remove_from_eviction_order(Block block) {
  State& s = state(block);
  (s.older == kNone ? oldest_ : state(s.older).newer) = s.newer;
  (s.newer == kNone ? newest_ : state(s.newer).older) = s.older;
  s.older = s.newer = kNone;
}

// -------------------------------------------------------------------------------------- inspection

int64_t BlockAllocator::ref_count(Block block) const {
  check_id("ref_count", block);
  return state(block).refs;
}

bool BlockAllocator::is_published(Block block) const {
  check_id("is_published", block);
  return state(block).entry != kRoot;
}

void BlockAllocator::check_invariants() const {
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(std::string("BlockAllocator.check_invariants: ") + what);
  };
  int64_t used = 0, shared = 0, published = 0, evictable = 0, chained = 0;
  for (const State& s : states_) {
    require(s.refs >= 0, "negative reference count");
    used += s.refs > 0;
    shared += s.refs > 1;
    published += s.entry != kRoot;
  }
  require(used == num_used_, "num_used is wrong");
  require(shared == num_shared_, "num_shared is wrong");
  require(published == num_published_, "num_published is wrong");

  std::vector<bool> seen(states_.size());
  const auto visit = [&](Block block) {
    require(!seen[static_cast<size_t>(block)], "a block is in two places");
    seen[static_cast<size_t>(block)] = true;
  };
  for (Block block : free_) {
    visit(block);
    require(state(block).refs == 0 && state(block).entry == kRoot, "a free block is referenced or published");
  }
  Block before = kNone;
  for (Block block = oldest_; block != kNone; before = block, block = state(block).newer, ++evictable) {
    visit(block);
    require(state(block).refs == 0 && state(block).entry != kRoot, "an evictable block is referenced or unpublished");
    require(state(block).older == before, "the eviction order is broken");
  }
  require(newest_ == before, "the eviction order does not end at the newest block");
  require(num_free() + evictable + used == num_blocks(), "a block is lost");

  seen.assign(seen.size(), false);
  for (Block head : buckets_)
    for (Block block = head; block != kNone; block = state(block).next_in_bucket, ++chained) {
      visit(block);
      require(state(block).entry != kRoot, "an unpublished block can still be found");
    }
  require(chained == published, "a published block cannot be found");
}

}  // namespace attn_ext
