// The attention problem as the kernels see it: how it is cut into blocks, where rows lie, and which keys they see.
//
// The query rows of one sequence and KV head are numbered token by token with the group's heads fastest; a tile is some
// consecutive ones, so that K and V are read once for all heads that share them. A tile walks the keys in steps. Keys
// are cut in splits of kSplit; every split starts a new softmax state, and the states are merged in ascending order,
// whether one block walks all splits or every split has a block of its own. Steps and splits begin at absolute
// multiples, and an unseen key changes nothing, so a row's bits depend on its own keys only: not on the tile, the
// batch, the pages, the chunk of a prefill, or how splits are scheduled.
#pragma once

#include "cuda/kernels.h"
#include "cuda/softmax_state.cuh"

namespace attn_ext::cuda {

constexpr int kSplit = 512;              // keys
constexpr int64_t kMaxTokens = 1 << 30;  // per sequence, so that positions and distances fit int

// n / d and n % d for 0 <= n < 2^31 by multiplication.
struct Divisor {
  uint32_t d, multiplier;
  int shift;

  Divisor() = default;
  explicit Divisor(int64_t divisor) : d(uint32_t(divisor)), shift(0) {
    while ((int64_t(1) << shift) < divisor) ++shift;  // 2^(31 + shift) / d, rounded up, is exact enough for 31 bits
    multiplier = uint32_t(((uint64_t(1) << (31 + shift)) + d - 1) / d);
    shift += 31;
  }
  ATTN_DEVICE int quotient(int n) const { return int((uint64_t(uint32_t(n)) * multiplier) >> shift); }
  // n becomes the quotient; returns the remainder.
  ATTN_DEVICE int take(int& n) const {
    const int q = quotient(n), r = n - q * int(d);
    n = q;
    return r;
  }
};

// What a kernel gets: the problem and everything the host derives from it.
struct AttentionWork {
  AttentionParams p;
  ScoreUnit score;                          // of the scores that the softmax sees
  float scale, softcap, inverse_softcap;    // a division in a kernel is a function call, which costs registers
  bool transformed;                         // scores are more than scale q.k with a positive scale
  bool q_vectors, kv_vectors, out_vectors;  // rows can be read and written 16 bytes at a time
  int group, window_left, window_right;
  Divisor by_group, by_block_size;
  int step_pages;  // that a step of keys may touch, if the kernel holds them in shared memory

  // Blocks of a launch are numbered (sequence, KV head, columns, split, tile), tile fastest.
  int first_sequence;
  Divisor by_tiles;    // of a sequence and KV head
  Divisor by_splits;   // blocks that share a tile's keys; 1: one walks them all
  Divisor by_columns;  // blocks that share the columns of an output row
  Divisor by_kv_heads;
  int splits;
  // Results over each split, when blocks share the keys.
  int64_t max_rows;             // per sequence and KV head
  SoftmaxState* partial_state;  // (B, Hkv, max_rows, splits)
  float* partial_out;           // (B, Hkv, max_rows, splits, D), not yet divided by the sum
};

struct KeyRange {
  int first, end;  // keys first .. end - 1
};

// The part of the work that this block does.
struct Tile {
  int64_t b, kv_head;
  int column, split;
  int Tq, Tk;
  int rows, first_row;                                           // of the sequence and KV head; of the tile
  int64_t q_offset, out_offset, lse_offset, k_offset, v_offset;  // elements, to the sequence's first row
  const int32_t* blocks;                                         // of the sequence, paged only
  KeyRange keys;  // that some row of the tile sees by causality and window, within this block's splits

  ATTN_DEVICE int64_t partial(const AttentionWork& w, int row) const {
    return ((b * w.p.Hkv + kv_head) * w.max_rows + row) * w.splits + split;
  }
};

// One query row: token of its sequence, head, and position among the keys.
struct QueryRow {
  int token, position;
  int64_t head;
};

// Rows past the last count as the last: they are computed and not stored.
ATTN_DEVICE QueryRow query_row(const AttentionWork& w, const Tile& t, int row) {
  const int r = row < t.rows ? row : t.rows - 1, token = w.by_group.quotient(r);
  return {token, token + t.Tk - t.Tq, t.kv_head * w.group + r - token * w.group};
}

// What the query at `position` can see by causality and window.
ATTN_DEVICE KeyRange visible_keys(const AttentionWork& w, int position, int Tk) {
  KeyRange range{0, Tk};
  if (w.p.causal) range.end = min_of(range.end, position + 1);
  if (w.window_right >= 0) range.end = min_of(range.end, position + w.window_right + 1);
  if (w.window_left >= 0) range.first = max_of(range.first, position - w.window_left);
  return range;
}

ATTN_DEVICE int clamp_index(int64_t i, int64_t end) { return int(max_of<int64_t>(0, min_of(i, end))); }

// Lengths and boundaries come from device memory: whatever they hold, no row outside the tensors is touched.
ATTN_DEVICE void find_sequence(const AttentionParams& p, Tile& t) {
  if (p.cu_seqlens_q) {
    const int first = clamp_index(simt::ldg(p.cu_seqlens_q + t.b), p.total_q);
    t.Tq = clamp_index(clamp_index(simt::ldg(p.cu_seqlens_q + t.b + 1), p.total_q) - first, p.Tq);
    t.q_offset = first * p.q_row_stride;
    t.out_offset = first * p.out_row_stride;
    t.lse_offset = first;
  } else {
    t.Tq = int(p.Tq);
    t.q_offset = t.b * p.q_batch_stride;
    t.out_offset = t.b * p.out_batch_stride;
    t.lse_offset = t.b * p.lse_batch_stride;
  }
  t.blocks = nullptr;
  t.k_offset = t.v_offset = 0;
  if (p.block_table) {
    t.Tk = clamp_index(simt::ldg(p.seq_lens + t.b), p.num_blocks > 0 ? p.Tk : 0);
    t.blocks = p.block_table + t.b * p.block_table_stride;
  } else if (p.cu_seqlens_k) {
    const int first = clamp_index(simt::ldg(p.cu_seqlens_k + t.b), p.total_k);
    t.Tk = clamp_index(clamp_index(simt::ldg(p.cu_seqlens_k + t.b + 1), p.total_k) - first, p.Tk);
    t.k_offset = first * p.k_row_stride;
    t.v_offset = first * p.v_row_stride;
  } else {
    t.Tk = int(p.Tk);
    t.k_offset = t.b * p.k_batch_stride;
    t.v_offset = t.b * p.v_batch_stride;
  }
}

// The tile of block `block` of the grid; false if there are no rows for it. The last rows of a sequence come first:
// with a causal mask they take longest.
ATTN_DEVICE bool find_tile(const AttentionWork& w, int block, int tile_rows, Tile& t) {
  const int tile = w.by_tiles.take(block);
  t.split = w.by_splits.take(block);
  t.column = w.by_columns.take(block);
  t.kv_head = w.by_kv_heads.take(block);
  t.b = w.first_sequence + block;
  find_sequence(w.p, t);
  t.rows = t.Tq * w.group;
  t.first_row = (int(w.by_tiles.d) - 1 - tile) * tile_rows;
  if (t.first_row >= t.rows) return false;

  t.keys.first = visible_keys(w, query_row(w, t, t.first_row).position, t.Tk).first;
  t.keys.end = visible_keys(w, query_row(w, t, t.first_row + tile_rows - 1).position, t.Tk).end;
  if (w.splits > 1) {
    t.keys.first = max_of(t.keys.first, t.split * kSplit);
    t.keys.end = min_of(t.keys.end, t.split * kSplit + kSplit);
  }
  return true;
}

// The keys that every row of the tile sees, if their scores are plain products; else none.
ATTN_DEVICE KeyRange plain_keys(const AttentionWork& w, const Tile& t, int tile_rows) {
  if (w.transformed || w.p.mask) return {0, 0};
  return {visible_keys(w, query_row(w, t, t.first_row + tile_rows - 1).position, t.Tk).first,
          visible_keys(w, query_row(w, t, t.first_row).position, t.Tk).end};
}

// Where the rows of K or of V lie. Paged: `pages` are the cache blocks of a range of keys, in shared memory, the first
// of them being number first_page of the sequence.
template <class T>
struct KeyRows {
  const T* base;
  int64_t row_stride, page_stride;

  ATTN_DEVICE const T* dense(int key) const { return base + key * row_stride; }
  ATTN_DEVICE const T* paged(const AttentionWork& w, int key, const int* pages, int first_page SIMT_WHERE) const {
    const int page = w.by_block_size.quotient(key), token = key - page * int(w.p.block_size);
    return base + simt::lds(pages + page - first_page SIMT_AT) * page_stride + token * row_stride;
  }
};

template <class T>
ATTN_DEVICE KeyRows<T> key_rows(const AttentionParams& p, const Tile& t) {
  return {static_cast<const T*>(p.k) + t.k_offset + t.kv_head * p.k_head_stride, p.k_row_stride, p.k_batch_stride};
}

template <class T>
ATTN_DEVICE KeyRows<T> value_rows(const AttentionParams& p, const Tile& t) {
  return {static_cast<const T*>(p.v) + t.v_offset + t.kv_head * p.v_head_stride, p.v_row_stride, p.v_batch_stride};
}

// The cache block of page number `page` of the sequence. Only entries of keys in the tile's range are read.
ATTN_DEVICE int cache_block(const AttentionWork& w, const Tile& t, int page) {
  const bool needed =
      page >= w.by_block_size.quotient(t.keys.first) && page <= w.by_block_size.quotient(t.keys.end - 1);
  return needed ? clamp_index(simt::ldg(t.blocks + page), w.p.num_blocks - 1) : 0;
}

// ---- scores -------------------------------------------------------------------------------------------------------

template <class T>
ATTN_DEVICE float load_bias(const AttentionParams& p, int64_t offset) {
  if (p.bias_dtype == DType::f32) return simt::ldg(static_cast<const float*>(p.bias) + offset);
  return simt::to_float(simt::ldg(static_cast<const T*>(p.bias) + offset));
}

// What the softmax sees of one row's products q.k with the keys key(0) .. key(n - 1): scaled, capped and biased if the
// problem asks for it, -inf where a key is not visible.
template <class T, int n, class Key>
ATTN_DEVICE void transform_scores(const AttentionWork& w, const Tile& t, const QueryRow& row, const Key& key,
                                  float (&x)[n]) {
  const AttentionParams& p = w.p;
  const KeyRange range = visible_keys(w, row.position, t.Tk);
  if (w.transformed) {
    ATTN_UNROLL
    for (int i = 0; i < n; ++i) x[i] *= w.scale;
    if (w.softcap > 0.0f) {
      ATTN_UNROLL
      for (int i = 0; i < n; ++i) x[i] = w.softcap * ::tanhf(x[i] * w.inverse_softcap);
    }
    if (p.alibi_slopes) {
      const float slope = simt::ldg(static_cast<const float*>(p.alibi_slopes) + t.b * p.alibi_batch_stride + row.head);
      ATTN_UNROLL
      for (int i = 0; i < n; ++i) {
        const int distance = row.position - key(i);
        x[i] = simt::fma(-slope, float(distance < 0 ? -distance : distance), x[i]);
      }
    }
    if (p.bias) {
      const int64_t* s = p.bias_strides;
      const int64_t offset = t.b * s[0] + row.head * s[1] + row.token * s[2];
      ATTN_UNROLL
      for (int i = 0; i < n; ++i)
        if (key(i) >= range.first && key(i) < range.end) x[i] += load_bias<T>(p, offset + key(i) * s[3]);
    }
  }
  if (p.mask) {
    const int64_t* s = p.mask_strides;
    const uint8_t* mask = static_cast<const uint8_t*>(p.mask) + t.b * s[0] + row.head * s[1] + row.token * s[2];
    ATTN_UNROLL
    for (int i = 0; i < n; ++i)
      if (key(i) >= range.first && key(i) < range.end && !simt::ldg(mask + key(i) * s[3])) x[i] = -kInf;
  }
  ATTN_UNROLL
  for (int i = 0; i < n; ++i)
    if (key(i) < range.first || key(i) >= range.end) x[i] = -kInf;
}

// ---- results ------------------------------------------------------------------------------------------------------

ATTN_DEVICE float sink_of(const AttentionParams& p, int64_t head) {
  return p.sinks ? simt::ldg(static_cast<const float*>(p.sinks) + head) : -kInf;
}

ATTN_DEVICE void store_lse(const AttentionParams& p, const Tile& t, const QueryRow& row, float lse) {
  simt::st(static_cast<float*>(p.lse) + t.lse_offset + row.head * p.lse_head_stride + row.token, lse);
}

template <class T>
ATTN_DEVICE T* output_row(const AttentionParams& p, const Tile& t, const QueryRow& row) {
  return static_cast<T*>(p.out) + t.out_offset + row.token * p.out_row_stride + row.head * p.out_head_stride;
}

}  // namespace attn_ext::cuda
