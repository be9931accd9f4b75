// Exact attention in bfloat16 on AMX tiles; the other types run on the avx512 kernel. attention_tiles.h says how a
// problem is cut.
//
// Scores are computed transposed, 64 keys x 16 query rows at a time:
//
//   S^T (keys, rows)  = K (keys, D) . Q^T (D, rows)         K as it lies in memory, where its rows allow that
//   P^T (keys, rows)  = 2^(c (S^T - max))                   in vectors whose lanes are the query rows
//   O^T (D, rows)    += V^T (D, keys) . P^T (keys, rows)    V is transposed once a step
//
// So the maximum and the sum of a row are lanes of vectors that run down the keys, and no lane meets another. The
// products of the next 16 rows are issued before the softmax of these: tiles and vectors work at the same time.
//
// tile registers   S^T: 0 .. 3 sums, 4 Q^T, 5 6 7 K       O^T: 0 .. 3 sums, 4 5 P^T, 6 7 V^T
#include "cpu/amx/pack.h"
#include "cpu/attention_tiles.h"
#include "cpu/kernels.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

constexpr int64_t kLanes = 16;                     // query rows of a block
constexpr int64_t kBlocks = kTileRows / kLanes;    // of a tile
constexpr int64_t kKeyTiles = kStep / tmm::kRows;  // of S^T in a block
constexpr int64_t kHalves = kStep / tmm::kDepth;   // of P^T in a block, and of the keys of V^T

static_assert(kKeyTiles == 4 && kHalves == 2 && W<float> == kLanes);

// ---------------------------------------------------------------------------------------- scratch of a worker

// The softmax of a block over the keys of a split. Lanes are rows.
struct BlockState {
  Vec<float> max;    // of the scores when it moved last, -inf before any was seen
  Vec<float> limit;  // a score above it moves max: its weight would be over 2^8
  Vec<float> sum;    // of the weights
};

// The keys of a step whose values hold NaN or inf, where some row of the tile may not see them.
struct LeftOut {
  int64_t keys[kStep];
  int64_t count = 0;
};

struct Scratch {
  using A = float;
  char* q;             // (kBlocks, D / 32) tiles of Q^T
  char* keys;          // (kKeyTiles, D / 32) tiles of K that cannot be used in place
  char* values;        // (D / 16, kHalves) tiles of V^T
  char* weights;       // (kHalves) tiles of P^T of one block
  float* scores;       // (2, kStep, kLanes) S^T of two blocks
  float* sums;         // (kBlocks, D, kLanes) O^T of the current split
  bf16* value_rows;    // (kStep + 1, D) values that cannot be transposed in place, and a row of zeros
  BlockState* blocks;  // (kBlocks) of the current split

  float* out;                        // (rows, D) weighted values of the current split when it ends
  float* total;                      // (rows, D) of all splits before
  SoftmaxState<float>* split_state;  // (rows)
  SoftmaxState<float>* total_state;  // (rows)
  int64_t ld;                        // D in whole tiles of sums: row stride of value_rows, out and total
  int64_t depth_tiles;               // D in whole tiles of Q^T and K

  float exponent;  // a weight is 2^(exponent (score - max))
  bool prescale;   // scores are scaled before they are compared: they are transformed, or the scale is not plainly
                   // positive

  static int64_t stride(int64_t D) { return round_up(D, kLanes); }
  static int64_t bytes(int64_t D) {
    const int64_t depth_tiles = ceil_div(D, tmm::kDepth), ld = stride(D);
    const int64_t tiles = (kBlocks + kKeyTiles) * depth_tiles + ld / kLanes * kHalves + kHalves;
    const int64_t floats = 2 * kStep * kLanes + 3 * kTileRows * ld;
    return tiles * tmm::kBytes + floats * int64_t(sizeof(float)) + round_up((kStep + 1) * ld * 2, 64) +
           kBlocks * int64_t(sizeof(BlockState)) + 2 * kTileRows * int64_t(sizeof(SoftmaxState<float>));
  }
  Scratch(char* memory, int64_t D) : ld(stride(D)), depth_tiles(ceil_div(D, tmm::kDepth)) {
    const auto take = [&](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<decltype(pointer + 0)>(memory);
      memory += round_up(count * int64_t(sizeof *pointer), 64);
    };
    take(q, kBlocks * depth_tiles * tmm::kBytes);
    take(keys, kKeyTiles * depth_tiles * tmm::kBytes);
    take(values, ld / kLanes * kHalves * tmm::kBytes);
    take(weights, kHalves * tmm::kBytes);
    take(scores, 2 * kStep * kLanes);
    take(sums, kTileRows * ld);
    take(out, kTileRows * ld);
    take(total, kTileRows * ld);
    take(value_rows, (kStep + 1) * ld);
    take(blocks, kBlocks);
    take(split_state, kTileRows);
    take(total_state, kTileRows);
    memset(value_rows + kStep * ld, 0, size_t(ld) * sizeof(bf16));
  }

  void load_queries(const AttentionParams& p, const Tile& t);
  void begin_split(const Tile& t);
  void add_step(const AttentionParams& p, const Tile& t, int64_t first);
  void end_split(const AttentionParams& p, const Tile& t);

  float* sums_of(int64_t block) const { return sums + block * ld * kLanes; }
};

int64_t blocks_of(const Tile& t) { return ceil_div(t.rows, kLanes); }

void Scratch::load_queries(const AttentionParams& p, const Tile& t) {
  const bf16* from = static_cast<const bf16*>(p.q) + t.seq.q_offset;
  for (int64_t b = 0; b < blocks_of(t); ++b) {
    const auto row = [&](int64_t lane) {
      const int64_t r = b * kLanes + lane;
      return from + t.token(r) * p.q_row_stride + t.head(r) * p.q_head_stride;
    };
    pack_right(min_of(kLanes, t.rows - b * kLanes), p.D, row, q + b * depth_tiles * tmm::kBytes);
  }
  constexpr double log2_e = 1.4426950408889634;
  exponent = float(p.scale * log2_e);
  prescale = p.softcap > 0 || p.alibi_slopes || p.bias || !(exponent > 0x1p-64f && exponent < 0x1p64f);
  if (prescale) exponent = float(log2_e);
}

// ------------------------------------------------------------------------------------------------ keys

// K as tiles of 16 keys x 32 of D: where the first of each 16 keys lies, strides in bytes.
struct KeyTiles {
  const char* base[kKeyTiles];
  int64_t row_stride[kKeyTiles], step_stride[kKeyTiles];

  // In place if 16 keys follow each other in whole cache lines: a tile's row that crosses a line makes its load 7 times
  // slower. Keys a multiple of 1 KB apart share too few sets of L1 to stay there for the next block.
  KeyTiles(const AttentionParams& p, const Tile& t, const StepRows<bf16>& step, const Scratch& s) {
    const int64_t stride = p.k_row_stride * int64_t(sizeof(bf16));
    const bool in_order = !t.seq.blocks || p.block_size % tmm::kRows == 0;
    const bool lines = p.D % tmm::kDepth == 0 && stride % 64 == 0 && (stride % 1024 != 0 || t.rows <= kLanes);
    for (int64_t i = 0; i < kKeyTiles; ++i) {
      const int64_t first = i * tmm::kRows;
      const bool whole = first + tmm::kRows <= step.count;
      if (in_order && lines && whole && reinterpret_cast<uintptr_t>(step.k[first]) % 64 == 0) {
        base[i] = reinterpret_cast<const char*>(step.k[first]);
        row_stride[i] = stride;
        step_stride[i] = tmm::kRowBytes;
        continue;
      }
      char* to = s.keys + i * s.depth_tiles * tmm::kBytes;
      if (!whole) memset(to, 0, size_t(s.depth_tiles * tmm::kBytes));
      for (int64_t j = first; j < min_of(step.count, first + tmm::kRows); ++j)
        pack_left_row(step.k[j], p.D, to + (j - first) * tmm::kRowBytes, tmm::kBytes);
      base[i] = to;
      row_stride[i] = tmm::kRowBytes;
      step_stride[i] = tmm::kBytes;
    }
  }
};

// scores (kStep, kLanes) = K Q^T of one block, not yet scaled
void multiply_keys(const KeyTiles& keys, const char* q, int64_t depth_tiles, float* scores) {
  each<kKeyTiles>([](auto i) { tmm::zero<decltype(i)::value>(); });
  for (int64_t d = 0; d < depth_tiles; ++d) {
    tmm::load<4>(q + d * tmm::kBytes);
    each<kKeyTiles>([&](auto i) {
      constexpr int tile = decltype(i)::value, k = 5 + tile % 3;
      tmm::load<k>(keys.base[tile] + d * keys.step_stride[tile], keys.row_stride[tile]);
      tmm::dot<tile, k, 4>();
    });
  }
  each<kKeyTiles>([&](auto i) { tmm::store<decltype(i)::value>(scores + decltype(i)::value * tmm::kFloats); });
}

// ------------------------------------------------------------------------------------------------ values

// Copies a row without its NaN and inf, which a weight of 0 would turn into NaN; returns whether it has any.
bool copy_finite(const bf16* v, int64_t D, bf16* to) {
  typedef Vec<float> V;
  V poison{};
  for (int64_t d = 0; d < D; d += kLanes) {
    const V x = D - d >= kLanes ? load(v + d) : load_first(v + d, D - d);
    const V zero = x * splat(0.0f);  // or NaN
    poison += zero;
    store(to + d, zero == zero ? x : V{});
  }
  return !(sum_lanes<float>(poison) == 0.0f);
}

// s.values = V^T of a step. Keys past the end are zeros.
void stage_values(const StepRows<bf16>& step, int64_t D, bool plain, const Scratch& s, LeftOut& left_out) {
  const bf16* rows[kStep];
  const bool in_place = plain && D % kLanes == 0;
  for (int64_t j = 0; j < kStep; ++j) {
    bf16* copy = s.value_rows + j * s.ld;
    rows[j] = j >= step.count ? s.value_rows + kStep * s.ld : in_place ? step.v[j] : copy;
    if (in_place || j >= step.count) continue;
    if (plain)
      convert_row(step.v[j], D, copy);
    else if (copy_finite(step.v[j], D, copy))
      left_out.keys[left_out.count++] = j;
  }
  const auto row = [&](int64_t j) { return rows[j]; };
  for (int64_t half = 0; half < kHalves; ++half) {
    for (int64_t d = 0; d < s.ld; d += tmm::kRows) {
      Vec<float> pairs[kLanes];  // of keys, lanes are d; transposed: rows of d, lanes are pairs of keys
      for (int64_t i = 0; i < kLanes; ++i) pairs[i] = step_of_rows<bf16>(row, half * tmm::kPairs + i, d);
      transpose<float>(pairs);
      memcpy(s.values + (d / tmm::kRows * kHalves + half) * tmm::kBytes, pairs, sizeof pairs);
    }
  }
}

// sums of C times 16 of D += V^T P^T, P^T in registers 4 and 5
template <int C>
ATTN_INLINE void add_value_tiles(const char* values, float* sums) {
  each<C>([&](auto c) { tmm::load<decltype(c)::value>(sums + decltype(c)::value * tmm::kFloats); });
  each<kHalves>([&](auto h) {
    each<C>([&](auto c) {
      constexpr int tile = decltype(c)::value, half = decltype(h)::value, v = 6 + tile % 2;
      tmm::load<v>(values + (tile * kHalves + half) * tmm::kBytes);
      tmm::dot<tile, v, 4 + half>();
    });
  });
  each<C>([&](auto c) { tmm::store<decltype(c)::value>(sums + decltype(c)::value * tmm::kFloats); });
}

// sums (D, kLanes) += V^T P^T of one block
void add_values(const Scratch& s, float* sums) {
  tmm::load<4>(s.weights);
  tmm::load<5>(s.weights + tmm::kBytes);
  const int64_t tiles = s.ld / tmm::kRows;
  int64_t n = 0;
  const auto add = [&](auto c) {
    add_value_tiles<decltype(c)::value>(s.values + n * kHalves * tmm::kBytes, sums + n * tmm::kFloats);
  };
  for (; n + 4 <= tiles; n += 4) add(Constant<4>{});
  switch (tiles - n) {
    case 3: return add(Constant<3>{});
    case 2: return add(Constant<2>{});
    case 1: return add(Constant<1>{});
  }
}

// The NaN and inf that stage_values left out, for the rows of a block that do see them. scores is what weigh has left.
void add_left_out_values(const StepRows<bf16>& step, int64_t D, const LeftOut& left_out, const float* scores,
                         const Scratch& s, float* sums) {
  for (int64_t i = 0; i < left_out.count; ++i) {
    const int64_t j = left_out.keys[i];
    const IVec<float> seen = load(scores + j * kLanes) != splat(-kInf);
    if (!_mm512_test_epi32_mask((__m512i)seen, (__m512i)seen)) continue;
    Vec<float> pairs;
    memcpy(&pairs, s.weights + j / 2 * tmm::kRowBytes, sizeof pairs);
    const Vec<float> weight = widen_half(bf16{}, pairs, j % 2);
    for (int64_t d = 0; d < D; ++d) {
      const float value = to_accumulate(step.v[j][d]);
      if (value - value == 0.0f) continue;
      float* sum = sums + d * kLanes;
      store(sum, seen ? load(sum) + weight * splat(value) : load(sum));
    }
  }
}

// ------------------------------------------------------------------------------------------------ softmax

// Score transform and visibility, as transform_row does it, with query rows in the lanes; an unseen key becomes -inf.
void transform_scores(const AttentionParams& p, const Tile& t, int64_t block, int64_t first, int64_t count, float* s) {
  IVec<float> begin, end;  // keys of the step that a row sees by causality and window
  IVec<float> position;    // from the step's first key on
  Vec<float> slope{};
  int64_t bias_row[kLanes] = {}, mask_row[kLanes] = {};
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t r = min_of(block * kLanes + lane, t.rows - 1), head = t.head(r);
    const KeyRange range = visible_keys(p, t.position(r), t.seq.Tk);
    const int64_t low = min_of(kStep, max_of<int64_t>(0, range.first - first));
    begin[lane] = int32_t(low);
    end[lane] = int32_t(max_of(low, min_of(count, range.last + 1 - first)));
    position[lane] = int32_t(t.position(r) - first);
    if (p.alibi_slopes) slope[lane] = static_cast<const float*>(p.alibi_slopes)[t.b * p.alibi_batch_stride + head];
    const auto row = [&](const int64_t* st) { return t.b * st[0] + head * st[1] + t.token(r) * st[2] + first * st[3]; };
    if (p.bias) bias_row[lane] = row(p.bias_strides);
    if (p.mask) mask_row[lane] = row(p.mask_strides);
  }
  const Vec<float> cap = splat(float(p.softcap));
  for (int64_t j = 0; j < kStep; ++j) {
    Vec<float> v = load(s + j * kLanes);
    if (p.softcap > 0) v = cap * tanh(v / cap);
    if (p.alibi_slopes) v -= slope * absolute(__builtin_convertvector(position - int32_t(j), Vec<float>));
    IVec<float> seen = (begin <= int32_t(j)) & (end > int32_t(j));
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      if (!(p.bias || p.mask)) break;
      if (!seen[lane]) continue;
      if (p.bias) v[lane] += bias_at<float>(p, bias_row[lane] + j * p.bias_strides[3]);
      if (p.mask && !static_cast<const bool*>(p.mask)[mask_row[lane] + j * p.mask_strides[3]]) seen[lane] = 0;
    }
    store(s + j * kLanes, seen ? v : splat(-kInf));
  }
}

// One row of P^T: weights of two keys, rounded, side by side.
ATTN_INLINE void store_pair(char* to, Vec<float> even, Vec<float> odd) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), both));
}

// The scores of a block become weights in s.weights; what the block has accumulated is rescaled.
void weigh(const AttentionParams& p, const Tile& t, int64_t block, int64_t first, int64_t count, bool plain,
           float* scores, Scratch& s) {
  typedef Vec<float> V;
  if (s.prescale)
    for (int64_t j = 0; j < kStep; ++j) store(scores + j * kLanes, load(scores + j * kLanes) * splat(float(p.scale)));
  if (!plain) transform_scores(p, t, block, first, count, scores);

  BlockState& state = s.blocks[block];
  const V c = splat(s.exponent);
  V top = load(scores), top2 = load(scores + kLanes);
  for (int64_t j = 2; j < kStep; j += 2) {
    top = vmax(top, load(scores + j * kLanes));
    top2 = vmax(top2, load(scores + (j + 1) * kLanes));
  }
  top = vmax(top, top2);
  const __mmask16 moves = _mm512_cmp_ps_mask((__m512)top, (__m512)state.limit, _CMP_GT_OQ);
  if (moves) {
    const V max = (V)_mm512_mask_mov_ps((__m512)state.max, moves, (__m512)top);
    const V factor = (V)_mm512_mask_mov_ps((__m512)splat(1.0f), moves, (__m512)exp2_scaled(state.max - max, c));
    state.max = max;
    state.limit = max + splat(8.0f / s.exponent);
    state.sum *= factor;
    float* sums = s.sums_of(block);
    for (int64_t d = 0; d < s.ld; ++d) store(sums + d * kLanes, load(sums + d * kLanes) * factor);
  }

  const V base = (state.max == splat(-kInf)) ? V{} : state.max;
  V sum{}, sum2{};
  for (int64_t j = 0; j < kStep; j += 2) {
    const V even = exp2_scaled(load(scores + j * kLanes) - base, c);
    const V odd = exp2_scaled(load(scores + (j + 1) * kLanes) - base, c);
    sum += even;
    sum2 += odd;
    store_pair(s.weights + j / 2 * tmm::kRowBytes, even, odd);
  }
  state.sum += sum + sum2;
}

// ------------------------------------------------------------------------------------------- splits and steps

void Scratch::begin_split(const Tile& t) {
  for (int64_t b = 0; b < blocks_of(t); ++b) blocks[b] = BlockState{splat(-kInf), splat(-kInf), Vec<float>{}};
  memset(sums, 0, size_t(blocks_of(t) * kLanes * ld) * sizeof(float));
}

// Adds the keys first .. first + kStep - 1.
void Scratch::add_step(const AttentionParams& p, const Tile& t, int64_t first) {
  StepRows<bf16> step;
  if (t.rows <= kLanes) {
    step.locate(p, t, first + kStep);
    step.prefetch_keys(0, kStep, p.D);
    step.prefetch_values(0, kStep, p.D);
  }
  step.locate(p, t, first);
  const bool plain = step_is_plain(p, t, first);
  const KeyTiles key_tiles(p, t, step, *this);
  LeftOut left_out;
  stage_values(step, p.D, plain, *this, left_out);

  const auto last_seen = [&](int64_t block) {  // by some row of the block, and all blocks before
    return visible_keys(p, t.position(min_of(t.rows, (block + 1) * kLanes) - 1), t.seq.Tk).last;
  };
  const auto multiply = [&](int64_t block) {
    multiply_keys(key_tiles, q + block * depth_tiles * tmm::kBytes, depth_tiles, scores + block % 2 * kStep * kLanes);
  };
  const int64_t end = blocks_of(t);
  int64_t b = 0;
  while (b < end && last_seen(b) < first) ++b;
  if (b < end) multiply(b);
  for (; b < end; ++b) {
    if (b + 1 < end) multiply(b + 1);
    float* own = scores + b % 2 * kStep * kLanes;
    weigh(p, t, b, first, step.count, plain, own, *this);
    add_values(*this, sums_of(b));
    if (left_out.count > 0) add_left_out_values(step, p.D, left_out, own, *this, sums_of(b));
  }
}

// Leaves the split's state in split_state and out, by rows.
void Scratch::end_split(const AttentionParams& p, const Tile& t) {
  for (int64_t b = 0; b < blocks_of(t); ++b) {
    const int64_t rows = min_of(kLanes, t.rows - b * kLanes);
    for (int64_t d = 0; d < ld; d += kLanes) {
      Vec<float> square[kLanes];
      memcpy(square, sums_of(b) + d * kLanes, sizeof square);
      transpose<float>(square);
      for (int64_t r = 0; r < rows; ++r) store(out + (b * kLanes + r) * ld + d, square[r]);
    }
    const BlockState& state = blocks[b];
    for (int64_t r = 0; r < rows; ++r) {
      const float max = state.max[r];
      SoftmaxState<float>& row = split_state[b * kLanes + r];
      row.max = max == -kInf || prescale ? max : max * float(p.scale);
      row.sum = Vec<float>{state.sum[r]};
    }
  }
}

// In place of the one in attention_tiles.h: tiles have their shapes while a split is worked on.
void attend_split(const AttentionParams& p, const Tile& t, int64_t split, Scratch& s) {
  const tmm::Config config(tmm::Shapes::full());
  s.begin_split(t);
  const int64_t begin = max_of(split * kSplit, t.key_begin / kStep * kStep);
  const int64_t end = min_of((split + 1) * kSplit, t.key_end);
  for (int64_t first = begin; first < end; first += kStep) s.add_step(p, t, first);
  s.end_split(p, t);
}

// In place of the one in attention_tiles.h: the factors of 16 rows at a time.
void merge_split(const Tile& t, const SoftmaxState<float>* state, const float* out, Scratch& s) {
  typedef Vec<float> V;
  for (int64_t begin = 0; begin < t.rows; begin += kLanes) {
    const int64_t rows = min_of(kLanes, t.rows - begin);
    V mine{}, other{};
    for (int64_t i = 0; i < rows; ++i) {
      mine[i] = s.total_state[begin + i].max;
      other[i] = state[begin + i].max;
    }
    const V max = vmax(mine, other), base = (max == splat(-kInf)) ? V{} : max;
    mine = exp(mine - base);
    other = exp(other - base);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t r = begin + i;
      const V f = splat(mine[i]), g = splat(other[i]);
      s.total_state[r].sum = s.total_state[r].sum * f + state[r].sum * g;
      s.total_state[r].max = max[i];
      float* total = s.total + r * s.ld;
      for (int64_t d = 0; d < s.ld; d += kLanes) store(total + d, load(total + d) * f + load(out + r * s.ld + d) * g);
    }
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------- launchers

int64_t attention_workspace(const AttentionParams& p, int workers) {
  return p.dtype == DType::bf16 ? workspace<Scratch>(p, workers) : avx512::attention_workspace(p, workers);
}

void attention(const AttentionParams& p, const Launch& launch) {
  if (p.dtype != DType::bf16) return avx512::attention(p, launch);
  attend<bf16, Scratch>(p, launch);
}

}  // namespace attn_ext::ATTN_EXT_ISA
