// Which block of the paged KV cache belongs to whom.
//
// The allocator hands out block numbers and never touches the cache's memory. A block is in exactly
// one state:
//
//   free     holds nothing                                        -> next to be handed out
//   used     has one or more references (tables that name it)     -> never handed out
//   cached   has no reference, but its tokens are published       -> handed out when nothing is
//   free, oldest first
//
// A full block is published under its tokens and everything before them, so that a later prompt
// with the same beginning finds it. Published blocks form a tree: an entry is named by its parent's
// entry and its own tokens. A lookup compares the tokens, not a hash of them, and entry numbers are
// never used twice, so an entry that is found holds exactly the prefix that was asked for. The hash
// only chooses the bucket.
//
// Every operation checks its arguments first and changes nothing when it throws. All storage is
// sized by the constructor. There is no lock: Python's GIL, which no method releases, is what makes
// calls from threads safe.
#pragma once

#include <cstdint>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace attn_ext {

// Fewer blocks are free or cached than were asked for.
class OutOfBlocks : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class BlockAllocator {
 public:
  using Block = int64_t;  // block number, 0 <= block < num_blocks
  using Token = int64_t;
  using Blocks = std::vector<Block>;
  using Tokens = std::vector<Token>;

  BlockAllocator(int64_t num_blocks, int64_t block_size);  // block_size in tokens

  // `count` blocks with one reference each; throws OutOfBlocks when fewer are free or cached.
  Blocks allocate(int64_t count);

  // Drops one reference per entry. The last blocks of the list become evictable first, because a
  // prefix is of no use without its beginning.
  void free(const Blocks& blocks);

  // Adds one reference per entry: another sequence now names the same blocks.
  void fork(const Blocks& blocks);

  // Copy-on-write. The caller is about to write to `blocks`, one held reference per entry, and
  // needs `count` new ones. An entry that is neither shared nor published stays; any other one
  // gives up its reference for a new block, into which the caller copies the old contents. -> (the
  // blocks to write to, the `count` new ones). Throws OutOfBlocks.
  std::pair<Blocks, Blocks> make_writable(const Blocks& blocks, int64_t count);

  // The longest run of published blocks that holds the beginning of `tokens`, with one reference
  // added to each.
  Blocks match(const Tokens& tokens);

  // Publishes the full block `block`, whose contents are final, as the continuation of `parent`
  // (none: the beginning). Returns the block to use from now on: `block`, or one that already holds
  // the same prefix. In the second case the caller's reference has moved to it.
  Block publish(Block block, const Tokens& tokens, std::optional<Block> parent);

  // Forgets every published prefix; cached blocks become free. Needed when the model's weights
  // change.
  void clear_prefixes();

  int64_t ref_count(Block block) const;
  bool is_published(Block block) const;

  int64_t num_blocks() const { return std::ssize(states_); }
  int64_t block_size() const { return block_size_; }
  int64_t num_free() const { return std::ssize(free_); }
  int64_t num_used() const { return num_used_; }
  int64_t num_shared() const { return num_shared_; }  // used blocks with two references or more
  int64_t num_cached() const { return num_blocks() - num_free() - num_used(); }
  int64_t num_available() const { return num_blocks() - num_used(); }  // free or cached
  int64_t num_published() const { return num_published_; }

  // Recounts everything and throws std::logic_error on the first contradiction. For tests; linear
  // in num_blocks.
  void check_invariants() const;

 private:
  using Entry = uint64_t;  // a published prefix; numbers are never used twice
  static constexpr Block kNone = -1;
  static constexpr Entry kRoot = 0;  // the empty prefix, and the entry of a block that is not published

  struct State {
    int64_t refs = 0;
    Entry entry = kRoot;
    Entry parent = kRoot;
    Block next_in_bucket = kNone;
    Block older = kNone;  // neighbours in the eviction order, while cached
    Block newer = kNone;
  };

  State& state(Block block) { return states_[static_cast<size_t>(block)]; }
  const State& state(Block block) const { return states_[static_cast<size_t>(block)]; }
  Token* tokens_of(Block block) { return tokens_.data() + block * block_size_; }
  const Token* tokens_of(Block block) const { return tokens_.data() + block * block_size_; }

  void check_id(const char* method, Block block) const;
  void check_held(const char* method, Block block) const;
  void check_available(const char* method, int64_t count) const;

  Block take_available();
  void add_reference(Block block);
  void drop_reference(Block block);

  Block& bucket_of(Entry parent, const Token* tokens);
  Block find(Entry parent, const Token* tokens);
  void unpublish(Block block);

  void append_to_eviction_order(Block block);
  void remove_from_eviction_order(Block block);

  int64_t block_size_;
  int64_t num_used_ = 0;
  int64_t num_shared_ = 0;
  int64_t num_published_ = 0;
  Entry last_entry_ = kRoot;
  Block oldest_ = kNone;  // ends of the eviction order
  Block newest_ = kNone;
  std::vector<State> states_;   // per block
  std::vector<Token> tokens_;   // per block, block_size tokens, valid while it is published
  std::vector<Block> buckets_;  // heads of the chains of published blocks, a power of two of them
  std::vector<Block> free_;     // stack
};

}  // namespace attn_ext
