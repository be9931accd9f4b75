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
constexpr int64_t kKeyTiles = kStep / tmm::kRows;  // of S^T in a block
constexpr int64_t kHalves = kStep / tmm::kDepth;   // of P^T in a block, and of the keys of V^T
constexpr int64_t kSteps = kSplit / kStep;         // of a split
constexpr int64_t kScores = kStep * kLanes;        // floats in S^T of a block
constexpr int64_t kWeights = kHalves * tmm::kBytes;  // bytes of P^T of a block

static_assert(kKeyTiles == 4 && kHalves == 2 && W<float> == kLanes);

// ---------------------------------------------------------------------------------------- scratch of a worker

// The softmax of a block over the keys of a split. Lanes are rows.
struct BlockState {
  Vec<float> max;    // of the scores when it moved last, -inf before any was seen
  Vec<float> limit;  // a score above it moves max: its weight would be over 2^8
  Vec<float> sum;    // of the weights
};

// That of a block over all keys of splits, of scaled scores. Lanes are rows.
struct BlockTotal {
  Vec<float> max, sum;
};

// The keys of a step whose values hold NaN or inf.
struct LeftOut {
  int64_t keys[kStep];
  int64_t count = 0;
};

struct Scratch {
  using A = float;
  using State = BlockTotal;
  static constexpr int64_t kRows = 1024;  // of a tile, at most: what one staging of keys and values is good for
  static constexpr int64_t kBlocks = kRows / kLanes;

  char* q;             // (kBlocks, D / 32) tiles of Q^T
  char* keys;          // (kSteps, kKeyTiles, D / 32) tiles of K
  char* values;        // (kSteps, D / 16, kHalves) tiles of V^T
  char* finite;        // the same without NaN and inf, of steps that have them
  char* weights;       // (2, 2, kHalves) tiles of P^T of two pairs of blocks
  float* scores;       // (2, 2, kStep, kLanes) S^T of two pairs of blocks
  bf16* value_rows;    // (kStep + 1, D) values that cannot be transposed in place, and a row of zeros
  BlockState* blocks;  // (2) of a pair
  LeftOut* left_out;   // (kSteps) what `finite` lacks

  float* out;               // (kBlocks, D, kLanes) O^T of the current split
  float* total;             // (kBlocks, D, kLanes) of all splits before
  BlockTotal* split_state;  // (kBlocks)
  BlockTotal* total_state;  // (kBlocks)
  int64_t ld;                        // D in whole tiles of sums: row stride of value_rows, out and total
  int64_t depth_tiles;               // D in whole tiles of Q^T and K

  float exponent;  // a weight is 2^(exponent (score - max))
  bool prescale;   // scores are scaled before they are compared: they are transformed, or the scale is not plainly
                   // positive

  static int64_t states(int64_t rows) { return 2 * ceil_div(rows, 2 * kLanes); }
  static int64_t elements(int64_t rows, int64_t ld) { return states(rows) * kLanes * ld; }
  static int64_t stride(int64_t D) { return round_up(D, kLanes); }
  static int64_t bytes(int64_t D) {
    Scratch s(nullptr, D, false);
    return s.end - static_cast<char*>(nullptr);
  }
  Scratch(char* memory, int64_t D, bool use = true) : ld(stride(D)), depth_tiles(ceil_div(D, tmm::kDepth)) {
    const auto take = [&](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<decltype(pointer + 0)>(memory);
      memory += round_up(count * int64_t(sizeof *pointer), 64);
    };
    take(blocks, 2);
    take(scores, 4 * kScores);
    take(weights, 4 * kWeights);
    take(keys, kSteps * key_bytes());
    take(values, kSteps * value_bytes());
    take(finite, kSteps * value_bytes());
    take(q, kBlocks * depth_tiles * tmm::kBytes);
    take(out, kRows * ld);
    take(total, kRows * ld);
    take(value_rows, (kStep + 1) * ld);
    take(left_out, kSteps);
    take(split_state, kBlocks);
    take(total_state, kBlocks);
    end = memory;
    if (use) memset(value_rows + kStep * ld, 0, size_t(ld) * sizeof(bf16));
  }
  char* end;

  void load_queries(const AttentionParams& p, const Tile& t);

  int64_t key_bytes() const { return kKeyTiles * depth_tiles * tmm::kBytes; }         // of a step's tiles
  int64_t value_bytes() const { return ld / kLanes * kHalves * tmm::kBytes; }
};

int64_t blocks_of(const Tile& t) { return ceil_div(t.rows, kLanes); }
int64_t pairs_of(const Tile& t) { return ceil_div(t.rows, 2 * kLanes); }

void Scratch::load_queries(const AttentionParams& p, const Tile& t) {
  const bf16* from = static_cast<const bf16*>(p.q) + t.seq.q_offset;
  for (int64_t b = 0; b < 2 * pairs_of(t); ++b) {  // what a pair lacks are copies of the last row
    const auto row = [&](int64_t lane) {
      const int64_t r = min_of(b * kLanes + lane, t.rows - 1);
      return from + t.token(r) * p.q_row_stride + t.head(r) * p.q_head_stride;
    };
    pack_right(kLanes, p.D, row, q + b * depth_tiles * tmm::kBytes);
  }
  constexpr double log2_e = 1.4426950408889634;
  exponent = float(p.scale * log2_e);
  prescale = p.softcap > 0 || p.alibi_slopes || p.bias || !(exponent > 0x1p-64f && exponent < 0x1p64f);
  if (prescale) exponent = float(log2_e);
}

// --------------------------------------------------------------------------------------------- keys and values

void stage_keys(const StepRows<bf16>& step, int64_t D, int64_t depth_tiles, char* to) {
  for (int64_t j = 0; j < kStep; j += tmm::kRows, to += depth_tiles * tmm::kBytes) {
    if (j + tmm::kRows > step.count) memset(to, 0, size_t(depth_tiles * tmm::kBytes));
    for (int64_t i = 0; i < min_of(tmm::kRows, step.count - j); ++i)
      pack_left_row(step.k[j + i], D, to + i * tmm::kRowBytes, tmm::kBytes);
  }
}

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

// Is any element NaN or inf?
bool any_not_finite(const StepRows<bf16>& step, int64_t D) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __m512i top = _mm512_setzero_si512();
  for (int64_t j = 0; j < step.count; ++j) {
    int64_t d = 0;
    for (; d + 32 <= D; d += 32)
      top = _mm512_max_epu16(top, _mm512_and_si512(exponent, _mm512_loadu_si512(step.v[j] + d)));
    if (d < D) {
      const __mmask32 rest = (1u << (D - d)) - 1;
      top = _mm512_max_epu16(top, _mm512_and_si512(exponent, _mm512_maskz_loadu_epi16(rest, step.v[j] + d)));
    }
  }
  return _mm512_cmpeq_epi16_mask(top, exponent) != 0;
}

// to = V^T of a step, of all elements or without the NaN and inf, whose keys are counted. Keys past the end are zeros.
void stage_values(const StepRows<bf16>& step, int64_t D, bool all, const Scratch& s, LeftOut& left_out, char* to) {
  const bf16* rows[kStep];
  const bool in_place = all && D % kLanes == 0;
  left_out.count = 0;
  for (int64_t j = 0; j < kStep; ++j) {
    bf16* copy = s.value_rows + j * s.ld;
    rows[j] = j >= step.count ? s.value_rows + kStep * s.ld : in_place ? step.v[j] : copy;
    if (in_place || j >= step.count) continue;
    if (all)
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
      memcpy(to + (d / tmm::kRows * kHalves + half) * tmm::kBytes, pairs, sizeof pairs);
    }
  }
}

// The NaN and inf that stage_values left out, for the rows of a block that do see them. scores is what weigh has left.
void add_left_out_values(const StepRows<bf16>& step, int64_t D, const LeftOut& left_out, const float* scores,
                         const char* weights, float* sums) {
  for (int64_t i = 0; i < left_out.count; ++i) {
    const int64_t j = left_out.keys[i];
    const IVec<float> seen = load(scores + j * kLanes) != splat(-kInf);
    if (!_mm512_test_epi32_mask((__m512i)seen, (__m512i)seen)) continue;
    Vec<float> pairs;
    memcpy(&pairs, weights + j / 2 * tmm::kRowBytes, sizeof pairs);
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

// What a row of a block sees of a split by causality and window: keys begin .. end - 1, counted from the split's first.
struct Seen {
  IVec<float> begin, end;
};

Seen seen_keys(const AttentionParams& p, const Tile& t, int64_t block, int64_t split) {
  Seen seen;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const int64_t r = min_of(block * kLanes + lane, t.rows - 1), first = split * kSplit;
    const KeyRange range = visible_keys(p, t.position(r), t.seq.Tk);
    seen.begin[lane] = int32_t(min_of(kSplit, max_of<int64_t>(0, range.first - first)));
    seen.end[lane] = int32_t(min_of(kSplit, max_of<int64_t>(0, range.last + 1 - first)));
  }
  return seen;
}

// Unseen scores become -inf.
void hide_unseen(const Seen& seen, int64_t first, float* scores) {
  const __m512i begin = (__m512i)seen.begin, length = (__m512i)(seen.end - seen.begin);
  for (int64_t j = 0; j < kStep; ++j) {
    const __m512i from_begin = _mm512_sub_epi32(_mm512_set1_epi32(int32_t(first + j)), begin);
    const __mmask16 unseen = _mm512_cmpge_epu32_mask(from_begin, length);
    _mm512_mask_storeu_ps(scores + j * kLanes, unseen, _mm512_set1_ps(-kInf));
  }
}

// Where a block's state moves: the factor for what it has accumulated. False: nowhere.
bool move_max(const float* scores, float exponent, BlockState& state, Vec<float>& factor) {
  typedef Vec<float> V;
  V top = load(scores), top2 = load(scores + kLanes);
  V top3 = load(scores + 2 * kLanes), top4 = load(scores + 3 * kLanes);
  for (int64_t j = 4; j < kStep; j += 4) {
    top = vmax(top, load(scores + j * kLanes));
    top2 = vmax(top2, load(scores + (j + 1) * kLanes));
    top3 = vmax(top3, load(scores + (j + 2) * kLanes));
    top4 = vmax(top4, load(scores + (j + 3) * kLanes));
  }
  top = vmax(vmax(top, top2), vmax(top3, top4));
  const __mmask16 moves = _mm512_cmp_ps_mask((__m512)top, (__m512)state.limit, _CMP_GT_OQ);
  if (!moves) return false;
  const V max = (V)_mm512_mask_mov_ps((__m512)state.max, moves, (__m512)top);
  factor = (V)_mm512_mask_mov_ps((__m512)splat(1.0f), moves, (__m512)exp2_scaled(state.max - max, splat(exponent)));
  state.max = max;
  state.limit = max + splat(8.0f / exponent);
  state.sum *= factor;
  return true;
}

// --------------------------------------------------------------------------------------------------- a split

// A pair of blocks at a step: what passes through the pipeline. Two of them are under way, in turn in either half of
// scores and weights.
struct Unit {
  int64_t pair = -1;  // -1: none
  int64_t step;       // of the split
  bool first;         // of the pair in this split
  char* weights;
  float* scores;
};

struct Split {
  const AttentionParams& p;
  const Tile& t;
  Scratch& s;
  int64_t number;
  const char* step_values[kSteps];
  StepRows<bf16> rows;

  // Steps of the split that rows of a pair see something of.
  void steps(int64_t pair, int64_t& begin, int64_t& end) const {
    const int64_t low = pair * 2 * kLanes, high = min_of(t.rows, low + 2 * kLanes) - 1;
    const int64_t first = visible_keys(p, t.position(low), t.seq.Tk).first - number * kSplit;
    const int64_t last = visible_keys(p, t.position(high), t.seq.Tk).last - number * kSplit;
    begin = max_of<int64_t>(0, first) / kStep;
    end = last < 0 ? 0 : min_of(kSteps, last / kStep + 1);
    if (begin > end) begin = end;
  }
  // Every row of the pair sees every key, and the score needs no transform.
  bool plain(int64_t pair, int64_t step) const {
    if (p.softcap > 0 || p.alibi_slopes || p.bias || p.mask) return false;
    const int64_t low = pair * 2 * kLanes, high = min_of(t.rows, low + 2 * kLanes) - 1;
    const int64_t first = number * kSplit + step * kStep;
    return visible_keys(p, t.position(high), t.seq.Tk).first <= first &&
           first + kStep - 1 <= visible_keys(p, t.position(low), t.seq.Tk).last;
  }
};

// Softmax of one unit while tiles work for the units before and after:
//
//   scores of `next` = K Q^T
//   weights of `now` from its scores
//   sums += V^T P^T of `before`
//
// kDepth: tiles of D in Q^T and K if known, else 0.
template <int kDepth>
void work(const Split& split, const Unit& before, const Unit& now, const Unit& next) {
  typedef Vec<float> V;
  const Scratch& s = split.s;
  const int64_t depth = kDepth > 0 ? kDepth : s.depth_tiles, tiles = kDepth > 0 ? 2 * kDepth : s.ld / tmm::kRows;
  const int64_t share = ceil_div(kStep / 2, 2 * depth + tiles);  // of the softmax beside four products
  const V c = splat(s.exponent);
  V base[2], sum[2] = {}, sum2[2] = {};
  for (int i = 0; i < 2; ++i) base[i] = s.blocks[i].max == splat(-kInf) ? V{} : s.blocks[i].max;
  int64_t j = now.pair >= 0 ? 0 : kStep;
  const auto weigh = [&](int64_t pairs) __attribute__((always_inline)) {
    for (const int64_t stop = min_of(kStep, j + 2 * pairs); j < stop; j += 2) {
      for (int i = 0; i < 2; ++i) {
        const float* from = now.scores + i * kScores + j * kLanes;
        const V even = exp2_scaled(load(from) - base[i], c), odd = exp2_scaled(load(from + kLanes) - base[i], c);
        sum[i] += even;
        sum2[i] += odd;
        store_pair(now.weights + i * kWeights + j / 2 * tmm::kRowBytes, even, odd);
      }
    }
  };

  if (next.pair >= 0) {
    const char* k = s.keys + next.step * s.key_bytes();
    const char* q = s.q + 2 * next.pair * depth * tmm::kBytes;
    for (int64_t i = 0; i < kKeyTiles; i += 2, k += 2 * depth * tmm::kBytes) {
      each<4>([](auto c) { tmm::zero<decltype(c)::value>(); });
      for (int64_t d = 0; d < depth; ++d) {
        tmm::load<6>(q + d * tmm::kBytes);
        tmm::load<4>(k + d * tmm::kBytes);
        tmm::dot<0, 4, 6>();
        tmm::load<7>(q + (depth + d) * tmm::kBytes);
        tmm::dot<1, 4, 7>();
        tmm::load<5>(k + (depth + d) * tmm::kBytes);
        tmm::dot<2, 5, 6>();
        tmm::dot<3, 5, 7>();
        weigh(share);
      }
      float* to = next.scores + i * tmm::kFloats;
      tmm::store<0>(to);
      tmm::store<1>(to + kScores);
      tmm::store<2>(to + tmm::kFloats);
      tmm::store<3>(to + tmm::kFloats + kScores);
    }
  }
  if (before.pair >= 0) {
    const char* v = split.step_values[before.step];
    float* to = s.out + 2 * before.pair * kLanes * s.ld;
    each<4>([&](auto i) { tmm::load<4 + decltype(i)::value>(before.weights + decltype(i)::value * tmm::kBytes); });
    for (int64_t d = 0; d < tiles; ++d, v += kHalves * tmm::kBytes, to += tmm::kFloats) {
      if (before.first) {
        tmm::zero<0>();
        tmm::zero<1>();
      } else {
        tmm::load<0>(to);
        tmm::load<1>(to + kLanes * s.ld);
      }
      tmm::load<2>(v);
      tmm::dot<0, 2, 4>();
      tmm::dot<1, 2, 6>();
      tmm::load<3>(v + tmm::kBytes);
      tmm::dot<0, 3, 5>();
      tmm::dot<1, 3, 7>();
      tmm::store<0>(to);
      tmm::store<1>(to + kLanes * s.ld);
      weigh(share);
    }
  }
  weigh(kStep / 2);
  if (now.pair >= 0)
    for (int i = 0; i < 2; ++i) s.blocks[i].sum += sum[i] + sum2[i];
}

void work(const Split& split, const Unit& before, const Unit& now, const Unit& next) {
  if (split.p.D == 64) return work<2>(split, before, now, next);
  if (split.p.D == 128) return work<4>(split, before, now, next);
  work<0>(split, before, now, next);
}

// In place of the one in attention_tiles.h: tiles have their shapes while a split is worked on.
void attend_split(const AttentionParams& p, const Tile& t, int64_t number, Scratch& s) {
  const tmm::Config config(tmm::Shapes::full());
  Split split{p, t, s, number};
  const int64_t first_key = number * kSplit;
  const int64_t begin = max_of<int64_t>(0, t.key_begin - first_key) / kStep;
  const int64_t end = ceil_div(min_of(kSplit, t.key_end - first_key), kStep);
  bool finite[kSteps];
  for (int64_t i = begin; i < end; ++i) {
    split.rows.locate(p, t, first_key + i * kStep);
    stage_keys(split.rows, p.D, s.depth_tiles, s.keys + i * s.key_bytes());
    stage_values(split.rows, p.D, true, s, s.left_out[i], s.values + i * s.value_bytes());
    finite[i] = step_is_plain(p, t, first_key + i * kStep) || !any_not_finite(split.rows, p.D);
    if (!finite[i]) stage_values(split.rows, p.D, false, s, s.left_out[i], s.finite + i * s.value_bytes());
  }

  Unit before, now;
  for (int64_t pair = 0; pair < pairs_of(t); ++pair) {
    int64_t from, to;
    split.steps(pair, from, to);
    for (int i = 0; i < 2; ++i) s.blocks[i] = BlockState{splat(-kInf), splat(-kInf), Vec<float>{}};
    float* out = s.out + 2 * pair * kLanes * s.ld;
    if (from == to) memset(out, 0, size_t(2 * kLanes * s.ld) * sizeof(float));
    Seen seen[2];
    bool know_seen = false;
    Unit before, now, next;
    for (int64_t step = from; step <= to; ++step) {
      if (step < to) next = Unit{pair, step, step == from, s.weights + step % 2 * 2 * kWeights, s.scores + step % 2 * 2 * kScores};
      else next.pair = -1;
      if (step == from) { work(split, before, now, next); now = next; continue; }
      const bool plain = split.plain(pair, now.step), filtered = !plain && !finite[now.step];
      Vec<float> factor[2];
      bool moves[2];
      for (int i = 0; i < 2; ++i) {
        float* scores = now.scores + i * kScores;
        if (s.prescale)
          for (int64_t j = 0; j < kStep; ++j) store(scores + j * kLanes, load(scores + j * kLanes) * splat(float(p.scale)));
        if (!plain) {
          if (p.softcap > 0 || p.alibi_slopes || p.bias || p.mask) {
            const int64_t key = first_key + now.step * kStep;
            transform_scores(p, t, 2 * pair + i, key, min_of(kStep, t.seq.Tk - key), scores);
          } else {
            if (!know_seen)
              for (int b = 0; b < 2; ++b) seen[b] = seen_keys(p, t, 2 * pair + b, number);
            know_seen = true;
            hide_unseen(seen[i], now.step * kStep, scores);
          }
        }
        moves[i] = move_max(scores, s.exponent, s.blocks[i], factor[i]);
      }
      split.step_values[now.step] = (filtered ? s.finite : s.values) + now.step * s.value_bytes();
      work(split, before, now, next);
      for (int i = 0; i < 2; ++i)
        if (moves[i] && !now.first) {
          float* sums = out + i * kLanes * s.ld;
          for (int64_t d = 0; d < s.ld; ++d) store(sums + d * kLanes, load(sums + d * kLanes) * factor[i]);
        }
      before = now;
      now = next;
      if (filtered && s.left_out[before.step].count > 0) {
        Unit none;
        work(split, before, none, none);
        split.rows.locate(p, t, first_key + before.step * kStep);
        for (int i = 0; i < 2; ++i)
          add_left_out_values(split.rows, p.D, s.left_out[before.step], before.scores + i * kScores, before.weights + i * kWeights, out + i * kLanes * s.ld);
        before = none;
      }
    }
    Unit none;
    if (before.pair >= 0) work(split, before, none, none);
    for (int i = 0; i < 2; ++i) {
      const Vec<float> max = s.blocks[i].max, scaled = s.prescale ? max : max * splat(float(p.scale));
      s.split_state[2 * pair + i] = {max == splat(-kInf) ? max : scaled, s.blocks[i].sum};
    }
  }
}

// In place of the one in attention_tiles.h: lanes are rows. Rows that saw nothing of the split stay as they are.
void merge_split(const Tile& t, const BlockTotal* state, const float* out, Scratch& s) {
  typedef Vec<float> V;
  for (int64_t b = 0; b < blocks_of(t); ++b) {
    const __mmask16 saw = _mm512_cmp_ps_mask((__m512)state[b].max, _mm512_set1_ps(-kInf), _CMP_NEQ_UQ);
    if (!saw) continue;
    BlockTotal& mine = s.total_state[b];
    const V max = vmax(mine.max, state[b].max), base = (max == splat(-kInf)) ? V{} : max;
    const V f = exp(mine.max - base), g = exp(state[b].max - base);
    mine.sum = mine.sum * f + state[b].sum * g;
    mine.max = max;
    float* to = s.total + b * kLanes * s.ld;
    const float* from = out + b * kLanes * s.ld;
    for (int64_t d = 0; d < s.ld; ++d, to += kLanes, from += kLanes)
      _mm512_mask_storeu_ps(to, saw, (__m512)(load(to) * f + load(from) * g));
  }
}

// In place of the one in attention_tiles.h.
template <class T>
void write_tile(const AttentionParams& p, const Tile& t, Scratch& s) {
  typedef Vec<float> V;
  for (int64_t b = 0; b < blocks_of(t); ++b) {
    const int64_t rows = min_of(kLanes, t.rows - b * kLanes);
    V factor{};
    T* to[kLanes];
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t r = b * kLanes + i, head = t.head(r), token = t.token(r);
      const float* sink = p.sinks ? static_cast<const float*>(p.sinks) + head : nullptr;
      const auto result = SoftmaxState<float>{s.total_state[b].max[i], V{s.total_state[b].sum[i]}}.finish(sink);
      factor[i] = result.factor;
      static_cast<float*>(p.lse)[t.seq.lse_offset + head * p.lse_head_stride + token] = result.lse;
      to[i] = static_cast<T*>(p.out) + t.seq.out_offset + token * p.out_row_stride + head * p.out_head_stride;
    }
    const float* from = s.total + b * kLanes * s.ld;
    for (int64_t d = 0; d < p.D; d += tmm::kDepth) {
      V pairs[kLanes] = {};  // of d, lanes are rows; transposed: rows
      for (int64_t i = 0; i < min_of(kLanes, (s.ld - d) / 2); ++i)
        store_pair(reinterpret_cast<char*>(&pairs[i]), load(from + (d + 2 * i) * kLanes) * factor,
                   load(from + (d + 2 * i + 1) * kLanes) * factor);
      transpose<float>(pairs);
      const __mmask32 mask = p.D - d >= tmm::kDepth ? __mmask32(-1) : (__mmask32(1) << (p.D - d)) - 1;
      for (int64_t i = 0; i < rows; ++i) _mm512_mask_storeu_epi16(to[i] + d, mask, (__m512i)pairs[i]);
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
