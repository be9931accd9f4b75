// What the attention kernels share: how a problem falls into tiles of query rows, steps of keys and splits; which
// keys a row sees; how states of splits become an output. A kernel adds its products: see Scratch below.
//
// A tile is query rows of one KV head, as many as a kernel likes: some tokens times the query heads that share the
// head. It walks the keys in steps of 64 and keeps a softmax state per row. Keys are cut in splits of 512; every split
// starts a new state, and the states are merged in ascending order, whether one worker walks all splits or many share
// them. Steps and splits begin at absolute multiples, and an unseen key changes nothing, so a row's bits depend on its
// own keys only: not on the tile, the batch, the pages, the chunk of a prefill, or the number of workers.
#pragma once

#include "cpu/softmax_state.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

constexpr int64_t kStep = 64;    // keys
constexpr int64_t kSplit = 512;  // keys
constexpr int64_t kFewest = 64;  // query rows that tiles are cut down to where there are few tiles

static_assert(kSplit % kStep == 0);

// ---------------------------------------------------------------------------------------- the problem, cut up

// Keys and queries of one sequence.
struct Sequence {
  int64_t Tq, Tk;
  int64_t q_offset, out_offset;  // elements to its first row
  int64_t lse_offset;
  int64_t k_offset, v_offset;  // dense only
  const int32_t* blocks;       // paged only
};

Sequence sequence(const AttentionParams& p, int64_t b) {
  Sequence s{};
  if (p.cu_seqlens_q) {
    const int64_t first = p.cu_seqlens_q[b];
    s.Tq = p.cu_seqlens_q[b + 1] - first;
    s.q_offset = first * p.q_row_stride;
    s.out_offset = first * p.out_row_stride;
    s.lse_offset = first;
  } else {
    s.Tq = p.Tq;
    s.q_offset = b * p.q_batch_stride;
    s.out_offset = b * p.out_batch_stride;
    s.lse_offset = b * p.lse_batch_stride;
  }
  if (p.block_table) {
    s.Tk = p.seq_lens[b];
    s.blocks = p.block_table + b * p.block_table_stride;
  } else if (p.cu_seqlens_k) {
    s.Tk = p.cu_seqlens_k[b + 1] - p.cu_seqlens_k[b];
    s.k_offset = p.cu_seqlens_k[b] * p.k_row_stride;
    s.v_offset = p.cu_seqlens_k[b] * p.v_row_stride;
  } else {
    s.Tk = p.Tk;
    s.k_offset = b * p.k_batch_stride;
    s.v_offset = b * p.v_batch_stride;
  }
  return s;
}

// How the query rows of one sequence and KV head fall into tiles.
struct Tiling {
  int64_t group;        // query heads per KV head
  int64_t heads;        // of them in one tile
  int64_t tokens;       // in one tile
  int64_t head_chunks;  // tiles needed for the group

  Tiling(const AttentionParams& p, int64_t rows) {
    group = p.H / p.Hkv;
    heads = min_of(group, rows);
    tokens = max_of<int64_t>(1, rows / heads);
    head_chunks = ceil_div(group, heads);
  }
  int64_t tiles(const AttentionParams& p, int64_t Tq) const { return ceil_div(Tq, tokens) * head_chunks * p.Hkv; }
};

// One tile: rows r = (token, head) with head fastest.
struct Tile {
  Sequence seq;
  int64_t b, kv_head, first_head, heads, first_token, tokens, rows;
  int64_t key_begin, key_end;  // keys some row can see by causality and window, a superset of the visible ones

  int64_t token(int64_t r) const { return first_token + (heads == 1 ? r : r / heads); }
  int64_t head(int64_t r) const { return first_head + (heads == 1 ? 0 : r % heads); }
  int64_t position(int64_t r) const { return token(r) + seq.Tk - seq.Tq; }
};

// Keys [first, last] that a query at `position` can see by causality and window.
struct KeyRange {
  int64_t first, last;
};
KeyRange visible_keys(const AttentionParams& p, int64_t position, int64_t Tk) {
  KeyRange range{0, Tk - 1};
  if (p.causal) range.last = min_of(range.last, position);
  if (p.window_right >= 0) range.last = min_of(range.last, position + p.window_right);
  if (p.window_left >= 0) range.first = max_of(range.first, position - p.window_left);
  return range;
}

Tile tile(const AttentionParams& p, const Tiling& tiling, const int64_t* first_tile, int64_t index) {
  int64_t low = 0, high = p.B;  // the last b with first_tile[b] <= index
  while (high - low > 1) {
    const int64_t mid = (low + high) / 2;
    (first_tile[mid] <= index ? low : high) = mid;
  }
  Tile t{};
  t.b = low;
  t.seq = sequence(p, low);
  // Tiles of one KV head follow each other: its keys and values stay in cache.
  const int64_t i = index - first_tile[low], token_blocks = ceil_div(t.seq.Tq, tiling.tokens);
  t.kv_head = i / (token_blocks * tiling.head_chunks);
  t.first_token = i / tiling.head_chunks % token_blocks * tiling.tokens;
  t.tokens = min_of(tiling.tokens, t.seq.Tq - t.first_token);
  const int64_t chunk = i % tiling.head_chunks;
  t.heads = min_of(tiling.heads, tiling.group - chunk * tiling.heads);
  t.first_head = t.kv_head * tiling.group + chunk * tiling.heads;
  t.rows = t.tokens * t.heads;
  t.key_begin = visible_keys(p, t.position(0), t.seq.Tk).first;
  t.key_end = max_of(t.key_begin, visible_keys(p, t.position(t.rows - 1), t.seq.Tk).last + 1);
  return t;
}

// ------------------------------------------------------------------------------------------- a step of keys

// Rows lie far apart, where no hardware prefetcher looks for them. Always inline: to gcc a function that only
// prefetches has no effect, and a call of it is dropped.
template <int kWrite, class T>
ATTN_INLINE void prefetch_row(const T* row, int64_t D) {
  for (int64_t d = 0; d < D; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + d, kWrite, 2);
}
constexpr int64_t kRowsAhead = 12;  // queries and outputs are asked for so many rows before their turn

// Addresses of a step's key and value rows, wherever they live.
template <class T>
struct StepRows {
  const T* k[kStep];
  const T* v[kStep];
  int64_t count;

  void locate(const AttentionParams& p, const Tile& t, int64_t first) {
    count = max_of<int64_t>(0, min_of(kStep, t.seq.Tk - first));
    const T* keys = static_cast<const T*>(p.k) + t.kv_head * p.k_head_stride;
    const T* values = static_cast<const T*>(p.v) + t.kv_head * p.v_head_stride;
    if (!t.seq.blocks) {
      run(p, keys + t.seq.k_offset + first * p.k_row_stride, values + t.seq.v_offset + first * p.v_row_stride, 0,
          count);
      return;
    }
    int64_t page = first / p.block_size, token = first % p.block_size;
    for (int64_t j = 0; j < count; ++page, token = 0) {
      const int64_t end = min_of(count, j + p.block_size - token), block = t.seq.blocks[page];
      run(p, keys + block * p.k_batch_stride + token * p.k_row_stride,
          values + block * p.v_batch_stride + token * p.v_row_stride, j, end);
      j = end;
    }
  }
  // Keys begin .. end - 1 of the step lie in order.
  ATTN_INLINE void run(const AttentionParams& p, const T* key, const T* value, int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      k[j] = key + (j - begin) * p.k_row_stride;
      v[j] = value + (j - begin) * p.v_row_stride;
    }
  }

  static ATTN_INLINE void prefetch(const T* const (&rows)[kStep], int64_t begin, int64_t end, int64_t D) {
    for (int64_t j = begin; j < end; ++j) prefetch_row<0>(rows[j], D);
  }
  ATTN_INLINE void prefetch_keys(int64_t begin, int64_t end, int64_t D) const {
    prefetch(k, begin, min_of(end, count), D);
  }
  ATTN_INLINE void prefetch_values(int64_t begin, int64_t end, int64_t D) const {
    prefetch(v, begin, min_of(end, count), D);
  }
};

template <class A>
A bias_at(const AttentionParams& p, int64_t offset) {
  switch (p.bias_dtype) {
    case DType::bf16: return A(to_accumulate(static_cast<const bf16*>(p.bias)[offset]));
    case DType::f16: return A(to_accumulate(static_cast<const f16*>(p.bias)[offset]));
    case DType::f64: return A(static_cast<const double*>(p.bias)[offset]);
    default: return A(static_cast<const float*>(p.bias)[offset]);
  }
}

// cap tanh(s / cap), which is s where s / cap counts as 0.
template <class A>
ATTN_INLINE Vec<A> cap_score(Vec<A> s, Vec<A> cap) {
  const Vec<A> x = s / cap;
  return x == Vec<A>{} ? s : cap * tanh(x);
}

// Score transform and visibility of row r, as far as `columns`; an unseen key becomes -inf.
template <class A>
void transform_row(const AttentionParams& p, const Tile& t, int64_t r, int64_t first, int64_t count, int64_t columns,
                   A* s) {
  const int64_t head = t.head(r), position = t.position(r);
  if (p.softcap > 0) {
    const Vec<A> cap = splat(A(p.softcap));
    for (int64_t j = 0; j < kStep; j += W<A>) store(s + j, cap_score<A>(load(s + j), cap));
  }
  if (p.alibi_slopes) {
    const A slope = static_cast<const A*>(p.alibi_slopes)[t.b * p.alibi_batch_stride + head];
    for (int64_t j = 0; j < kStep; ++j) {
      const int64_t distance = position - first - j;
      s[j] -= slope * A(distance < 0 ? -distance : distance);
    }
  }
  const KeyRange range = visible_keys(p, position, t.seq.Tk);
  const int64_t begin = min_of(kStep, max_of<int64_t>(0, range.first - first));
  const int64_t end = max_of(begin, min_of(count, range.last + 1 - first));
  if (p.bias) {
    const int64_t* st = p.bias_strides;
    const int64_t row = t.b * st[0] + head * st[1] + t.token(r) * st[2] + first * st[3];
    for (int64_t j = begin; j < end; ++j) s[j] += bias_at<A>(p, row + j * st[3]);
  }
  if (p.mask) {
    const int64_t* st = p.mask_strides;
    const bool* row =
        static_cast<const bool*>(p.mask) + t.b * st[0] + head * st[1] + t.token(r) * st[2] + first * st[3];
    for (int64_t j = begin; j < end; ++j) s[j] = row[j * st[3]] ? s[j] : A(-kInf);
  }
  for (int64_t j = 0; j < columns; j += W<A>) {
    if (begin <= j && j + W<A> <= end) continue;
    const IVec<A> seen = (lane_index<A>() >= splat_index<A>(begin - j)) & (lane_index<A>() < splat_index<A>(end - j));
    store(s + j, seen ? load(s + j) : splat(A(-kInf)));
  }
}

// True when every row of the tile sees every key of the step and the score needs no transform.
bool step_is_plain(const AttentionParams& p, const Tile& t, int64_t first) {
  if (p.softcap > 0 || p.alibi_slopes || p.bias || p.mask || first + kStep > t.seq.Tk) return false;
  const KeyRange low = visible_keys(p, t.position(0), t.seq.Tk);
  const KeyRange high = visible_keys(p, t.position(t.rows - 1), t.seq.Tk);
  return high.first <= first && first + kStep - 1 <= low.last;
}

// ------------------------------------------------------------------------------------------- splits and tiles

// A kernel is a Scratch, the memory of one worker, with
//
//   A, State                     accumulation type, and that of softmax states
//   kRows                        query rows of a tile, at most
//   stride(D), bytes(D)          row stride of out and total; bytes of a scratch
//   states(rows)                 how many of State `rows` rows have
//   elements(rows, ld)           how many of A their weighted values have
//   Scratch(memory, D)           on `bytes(D)` bytes, 64-byte aligned
//   out, total                   (rows, D) weighted values of the current split, and of all splits before
//   split_state, total_state     (states) their softmax states
//   ld                           stride(D)
//   load_queries(p, t)           begins tile t
//   begin_split(t)               nothing seen of the split, out is 0
//   add_step(p, t, first)        adds the keys first .. first + kStep - 1
//   end_split(p, t)              leaves the split's state in split_state and out

// State and weighted values over the keys of split number `split`.
template <class Scratch>
void attend_split(const AttentionParams& p, const Tile& t, int64_t split, Scratch& s) {
  s.begin_split(t);
  const int64_t begin = max_of(split * kSplit, t.key_begin / kStep * kStep);
  const int64_t end = min_of((split + 1) * kSplit, t.key_end);
  for (int64_t first = begin; first < end; first += kStep) s.add_step(p, t, first);
  s.end_split(p, t);
}

// total = total merged with (state, out)
template <class Scratch>
void merge_split(const Tile& t, const typename Scratch::State* state, const typename Scratch::A* out, Scratch& s) {
  using A = typename Scratch::A;
  for (int64_t r = 0; r < t.rows; ++r) {
    const auto f = s.total_state[r].merge(state[r]);
    A* total = s.total + r * s.ld;
    for (int64_t d = 0; d < s.ld; d += W<A>)
      store(total + d, load(total + d) * splat(f.mine) + load(out + r * s.ld + d) * splat(f.other));
  }
}

template <class Scratch>
void copy_state(const Tile& t, const typename Scratch::State* from_state, const typename Scratch::A* from,
                const Scratch& s, typename Scratch::State* to_state, typename Scratch::A* to) {
  memcpy(to_state, from_state, size_t(Scratch::states(t.rows)) * sizeof *to_state);
  memcpy(to, from, size_t(Scratch::elements(t.rows, s.ld)) * sizeof *to);
}

template <class T>
void swap(T& a, T& b) {
  const T old = a;
  a = b;
  b = old;
}

template <class T, class Scratch>
void write_tile(const AttentionParams& p, const Tile& t, Scratch& s) {
  using A = Accumulate<T>;
  T* out = static_cast<T*>(p.out) + t.seq.out_offset;
  A* lse = static_cast<A*>(p.lse) + t.seq.lse_offset;
  const auto row = [&](int64_t r) { return out + t.token(r) * p.out_row_stride + t.head(r) * p.out_head_stride; };
  for (int64_t r = 0; r < t.rows; ++r) {
    if (r + kRowsAhead < t.rows) prefetch_row<1>(row(r + kRowsAhead), p.D);
    const int64_t head = t.head(r), token = t.token(r);
    const A* sink = p.sinks ? static_cast<const A*>(p.sinks) + head : nullptr;
    const auto result = s.total_state[r].finish(sink);
    const A* total = s.total + r * s.ld;
    T* to = row(r);
    int64_t d = 0;
    for (; d + W<A> <= p.D; d += W<A>) store(to + d, load(total + d) * splat(result.factor));
    if (d < p.D) store_first(to + d, load(total + d) * splat(result.factor), p.D - d);
    lse[head * p.lse_head_stride + token] = result.lse;
  }
}

// What a kernel call needs beside the scratch of its workers.
struct Plan {
  int64_t rows;  // of a tile, at most
  Tiling tiling;
  int64_t tiles = 0;
  int64_t max_splits = 0;  // of any tile
  bool share_splits;       // too few tiles to keep the workers busy: splits become tasks of their own

  Plan(const AttentionParams& p, int workers, int64_t max_rows) : rows(max_rows), tiling(p, rows) {
    const auto count = [&] {
      int64_t sum = 0;
      for (int64_t b = 0; b < p.B; ++b) sum += tiling.tiles(p, sequence(p, b).Tq);
      return sum;
    };
    // Shared evenly rather than packed once for more.
    while (workers > 1 && rows > kFewest && count() < 8 * workers) tiling = Tiling(p, rows /= 2);
    for (int64_t b = 0; b < p.B; ++b) {
      const Sequence s = sequence(p, b);
      tiles += tiling.tiles(p, s.Tq);
      if (s.Tq > 0) max_splits = max_of(max_splits, ceil_div(s.Tk, kSplit));
    }
    // Fewer where the window leaves fewer: partial states are numbered from a tile's first split.
    if (p.window_left >= 0 && (p.causal || p.window_right >= 0)) {
      const int64_t span = p.window_left + tiling.tokens + (p.window_right >= 0 ? p.window_right : 0);
      max_splits = min_of(max_splits, span / kSplit + 2);
    }
    share_splits = workers > 1 && max_splits > 1 && tiles < 2 * workers;
  }
  int64_t index_bytes(const AttentionParams& p) const { return round_up((p.B + 1) * int64_t(sizeof(int64_t)), 64); }
  template <class Scratch>
  int64_t partial_bytes(int64_t D) const {  // state and values of one split of one tile
    return round_up(Scratch::states(rows) * int64_t(sizeof(typename Scratch::State)), 64) +
           Scratch::elements(rows, Scratch::stride(D)) * int64_t(sizeof(typename Scratch::A));
  }
};

// Workspace: first_tile (B + 1), the workers' scratch, then with shared splits the partial states (tiles, splits).
template <class Scratch>
int64_t workspace(const AttentionParams& p, int workers) {
  const Plan plan(p, workers, Scratch::kRows);
  const int64_t partials = plan.share_splits ? plan.tiles * plan.max_splits * plan.partial_bytes<Scratch>(p.D) : 0;
  return plan.index_bytes(p) + workers * Scratch::bytes(p.D) + partials;
}

template <class T, class Scratch>
void attend(const AttentionParams& p, const Launch& launch) {
  using A = typename Scratch::A;
  using State = typename Scratch::State;
  const Plan plan(p, launch.workers, Scratch::kRows);
  int64_t* first_tile = reinterpret_cast<int64_t*>(launch.workspace);
  first_tile[0] = 0;
  int64_t work = 0;  // multiplications
  for (int64_t b = 0; b < p.B; ++b) {
    const Sequence s = sequence(p, b);
    first_tile[b + 1] = first_tile[b] + plan.tiling.tiles(p, s.Tq);
    work += s.Tq * s.Tk * p.H * p.D;
  }
  char* scratch = launch.workspace + plan.index_bytes(p);
  char* partials = scratch + launch.workers * Scratch::bytes(p.D);
  const int64_t parallelism = work < 65536 ? 1 : 1 << 30;

  if (!plan.share_splits) {
    Queue queue{0, plan.tiles};
    run_parallel<A>(launch, min_of(parallelism, queue.total), [&](int worker) {
      Scratch s(scratch + worker * Scratch::bytes(p.D), p.D);
      for (int64_t i; queue.take(i);) {
        const Tile t = tile(p, plan.tiling, first_tile, plan.tiles - 1 - i);  // causal: the longest first
        s.load_queries(p, t);
        const int64_t begin = t.key_begin / kSplit;
        attend_split(p, t, begin, s);
        swap(s.total, s.out);
        swap(s.total_state, s.split_state);
        for (int64_t split = begin + 1; split * kSplit < t.key_end; ++split) {
          attend_split(p, t, split, s);
          merge_split(t, s.split_state, s.out, s);
        }
        write_tile<T>(p, t, s);
      }
    });
    return;
  }

  struct Partial {
    State* state;
    A* out;
  };
  const auto partial = [&](int64_t tile_index, int64_t number) {
    char* memory = partials + (tile_index * plan.max_splits + number) * plan.partial_bytes<Scratch>(p.D);
    const int64_t state_bytes = round_up(Scratch::states(plan.rows) * int64_t(sizeof(State)), 64);
    return Partial{reinterpret_cast<State*>(memory), reinterpret_cast<A*>(memory + state_bytes)};
  };
  Queue splits{0, plan.tiles * plan.max_splits};
  run_parallel<A>(launch, min_of(parallelism, splits.total), [&](int worker) {
    Scratch s(scratch + worker * Scratch::bytes(p.D), p.D);
    for (int64_t i; splits.take(i);) {
      const int64_t index = i / plan.max_splits, number = i % plan.max_splits;
      const Tile t = tile(p, plan.tiling, first_tile, index);
      const int64_t split = t.key_begin / kSplit + number;
      if (number > 0 && split * kSplit >= t.key_end) continue;
      s.load_queries(p, t);
      attend_split(p, t, split, s);
      const Partial to = partial(index, number);
      copy_state(t, s.split_state, s.out, s, to.state, to.out);
    }
  });
  run_parallel<A>(launch, 1, [&](int) {
    Scratch s(scratch, p.D);
    for (int64_t index = 0; index < plan.tiles; ++index) {
      const Tile t = tile(p, plan.tiling, first_tile, index);
      const Partial first = partial(index, 0);
      copy_state(t, first.state, first.out, s, s.total_state, s.total);
      for (int64_t split = t.key_begin / kSplit + 1; split * kSplit < t.key_end; ++split) {
        const Partial from = partial(index, split - t.key_begin / kSplit);
        merge_split(t, from.state, from.out, s);
      }
      write_tile<T>(p, t, s);
    }
  });
}

}  // namespace
}  // namespace attn_ext::ATTN_EXT_ISA
