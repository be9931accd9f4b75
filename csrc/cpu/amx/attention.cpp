// Exact attention in bfloat16 on AMX tiles; the other types run on the avx512 kernel. attention_tiles.h says how a
// problem is cut.
//
// Scores are computed transposed, 64 keys x a pair of blocks of 16 query rows at a time:
//
//   S^T (keys, rows)  = K (keys, D) . Q^T (D, rows)
//   P^T (keys, rows)  = 2^(c (S^T - max))                   in vectors whose lanes are the query rows
//   O^T (D, rows)    += V^T (D, keys) . P^T (keys, rows)
//
// So the maximum and the sum of a row are lanes of vectors that run down the keys, and no lane meets another. The keys
// of a split are copied and its values transposed once for all rows of a tile, up to 1024; then one pair of blocks
// after the other walks them: scores of a step beside the weights of the step before, and after 256 keys the products
// with the values. Up to 16 rows (decode) have a way of their own, which transposes no values.
//
// tile registers   S^T: 0 .. 3 sums, 4 5 K, 6 7 Q^T       O^T: 0 .. 3 sums, 4 5 V^T, 6 7 P^T
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
constexpr int64_t kChunk = 4;                      // steps whose weights meet the values in one go: what stays in L1
constexpr int64_t kGathered = 2;                   // rows, at most, whose scores are gathered

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
  char* finite;        // the same without NaN and inf, of steps that have them; O of few rows
  char* weights;       // (kChunk, 2, kHalves) tiles of P^T of a pair of blocks; P of few rows
  float* scores;       // (2, 2, kStep, kLanes) S^T of a pair of blocks in two steps
  bf16* value_rows;    // (kStep, D in whole tiles of K) values of a step
  BlockState* blocks;  // (2) of a pair
  LeftOut* left_out;   // (kSteps) what `finite` lacks

  float* out;               // (kBlocks, D, kLanes) O^T of the current split
  float* total;             // (kBlocks, D, kLanes) of all splits before
  BlockTotal* split_state;  // (kBlocks)
  BlockTotal* total_state;  // (kBlocks)
  int64_t ld;               // D in whole tiles of sums: rows of a block in out and total
  int64_t depth_tiles;      // D in whole tiles of Q^T and K

  Factor<float> scale;
  float exponent;  // a weight is 2^(exponent (score - max))
  bool prescale;   // scores are scaled before they are compared: they are transformed, or the scale is not plainly
                   // positive

  static int64_t states(int64_t rows) { return rows <= kLanes ? 1 : 2 * ceil_div(rows, 2 * kLanes); }
  static int64_t elements(int64_t rows, int64_t ld) { return states(rows) * kLanes * ld; }
  static int64_t stride(int64_t D) { return round_up(D, kLanes); }
  static int64_t bytes(int64_t D) { return int64_t(Scratch(nullptr, D).end); }
  Scratch(char* memory, int64_t D) : ld(stride(D)), depth_tiles(ceil_div(D, tmm::kDepth)) {
    end = reinterpret_cast<uintptr_t>(memory);  // as a number: there may be no memory yet
    const auto take = [&](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<decltype(pointer + 0)>(end);
      end += uintptr_t(round_up(count * int64_t(sizeof *pointer), 64));
    };
    take(blocks, 2);
    take(scores, 4 * kScores);
    take(weights, kChunk * 2 * kHalves * tmm::kBytes);
    take(keys, kSteps * key_bytes());
    take(values, kSteps * value_bytes());
    take(finite, kSteps * value_bytes());
    take(q, kBlocks * depth_tiles * tmm::kBytes);
    take(out, kRows * ld);
    take(total, kRows * ld);
    take(value_rows, kStep * depth_tiles * tmm::kDepth);
    take(left_out, kSteps);
    take(split_state, kBlocks);
    take(total_state, kBlocks);
  }
  uintptr_t end;

  void load_queries(const AttentionParams& p, const Tile& t);

  int64_t key_bytes() const { return kKeyTiles * depth_tiles * tmm::kBytes; }  // of a step's tiles
  int64_t value_bytes() const { return ld / kLanes * kHalves * tmm::kBytes; }
};

int64_t blocks_of(const Tile& t) { return ceil_div(t.rows, kLanes); }
int64_t pairs_of(const Tile& t) { return ceil_div(t.rows, 2 * kLanes); }

// The rows of a tile in order, without a division for each.
struct RowCursor {
  const Tile& t;
  int64_t row, token, head;

  explicit RowCursor(const Tile& tile, int64_t first = 0)
      : t(tile), row(min_of(first, tile.rows - 1)), token(tile.token(row)), head(tile.head(row)) {}
  ATTN_INLINE void next() {  // stays at the last
    if (++row >= t.rows) return;
    if (++head < t.first_head + t.heads) return;
    head = t.first_head;
    ++token;
  }
};

// Asks for a row of the next block while this one is worked on: rows lie far apart.
ATTN_INLINE void prefetch_row(const bf16* row, int64_t D) {
  for (int64_t d = 0; d < D; d += tmm::kDepth) __builtin_prefetch(row + d, 0, 2);
}

void Scratch::load_queries(const AttentionParams& p, const Tile& t) {
  const bf16* from = static_cast<const bf16*>(p.q) + t.seq.q_offset;
  RowCursor cursor(t);
  for (int64_t b = 0; b < states(t.rows); ++b) {  // what a pair lacks are copies of the last row
    const bf16* rows[kLanes];
    for (int64_t lane = 0; lane < kLanes; ++lane, cursor.next()) {
      rows[lane] = from + cursor.token * p.q_row_stride + cursor.head * p.q_head_stride;
      prefetch_row(rows[lane] + ceil_div(kLanes, t.heads) * p.q_row_stride, p.D);
    }
    const auto row = [&](int64_t lane) { return rows[lane]; };
    pack_right(kLanes, p.D, row, q + b * depth_tiles * tmm::kBytes);
  }
  constexpr double log2_e = 1.4426950408889634;
  scale = Factor<float>(p.scale);
  exponent = float(p.scale * log2_e);
  prescale = p.softcap > 0 || p.alibi_slopes || p.bias || !(exponent > 0x1p-64f && exponent < 0x1p64f);
  if (prescale) exponent = float(log2_e);
}

// --------------------------------------------------------------------------------------------- keys and values

// The rows of a step that come next, asked for bit by bit: they lie far apart, where no hardware prefetcher looks, and
// a burst of requests would only wait for itself.
struct Ahead {
  StepRows<bf16> step;
  int64_t next = 0, count, bytes;

  void begin(const AttentionParams& p, const Tile& t, int64_t first) {
    step.locate(p, t, first);
    next = 0;
    count = 2 * step.count;
    bytes = p.D * int64_t(sizeof(bf16));
  }
  ATTN_INLINE void ask(int64_t rows) {
    for (const int64_t stop = min_of(count, next + rows); next < stop; ++next) {
      const char* row = reinterpret_cast<const char*>(next < step.count ? step.k[next] : step.v[next - step.count]);
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
    }
  }
};

void stage_keys(const StepRows<bf16>& step, int64_t D, int64_t depth_tiles, Ahead& ahead, char* to) {
  for (int64_t j = 0; j < kStep; j += tmm::kRows, to += depth_tiles * tmm::kBytes) {
    if (j + tmm::kRows > step.count) memset(to, 0, size_t(depth_tiles * tmm::kBytes));
    for (int64_t i = 0; i < min_of(tmm::kRows, step.count - j); ++i)
      pack_left_row(step.k[j + i], D, to + i * tmm::kRowBytes, tmm::kBytes);
    ahead.ask(8);
  }
}

// Copies the values of a step, keys past the end as zeros. False if some are NaN or inf.
bool copy_values(const StepRows<bf16>& step, int64_t D, int64_t stride, bf16* to) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __m512i top = _mm512_setzero_si512();
  for (int64_t j = 0; j < step.count; ++j, to += stride) {
    const bf16* v = step.v[j];
    for (int64_t d = 0; d < D; d += tmm::kDepth) {
      const __mmask32 mask = D - d >= tmm::kDepth ? __mmask32(-1) : (__mmask32(1) << (D - d)) - 1;
      const __m512i x = _mm512_maskz_loadu_epi16(mask, v + d);
      top = _mm512_max_epu16(top, _mm512_and_si512(x, exponent));
      _mm512_store_si512(to + d, x);
    }
  }
  memset(to, 0, size_t((kStep - step.count) * stride) * sizeof(bf16));
  return _mm512_cmpeq_epi16_mask(top, exponent) == 0;
}

// NaN and inf become 0: a weight of 0 would make NaN of them. Their keys are noted.
void leave_out(int64_t stride, bf16* rows, LeftOut& left_out) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  left_out.count = 0;
  for (int64_t j = 0; j < kStep; ++j) {
    bool any = false;
    for (int64_t d = 0; d < stride; d += tmm::kDepth) {
      bf16* x = rows + j * stride + d;
      const __mmask32 found = _mm512_cmpeq_epi16_mask(_mm512_and_si512(_mm512_load_si512(x), exponent), exponent);
      if (!found) continue;
      any = true;
      _mm512_mask_storeu_epi16(x, found, _mm512_setzero_si512());
    }
    if (any) left_out.keys[left_out.count++] = j;
  }
}

bool values_finite(const StepRows<bf16>& step, int64_t D) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  __m512i top = _mm512_setzero_si512();
  for (int64_t j = 0; j < kStep; ++j)
    for (int64_t d = 0; d < D; d += tmm::kDepth)
      top = _mm512_max_epu16(top, _mm512_and_si512(_mm512_loadu_si512(step.v[j] + d), exponent));
  return _mm512_cmpeq_epi16_mask(top, exponent) == 0;
}

// to (D / 16, kHalves) tiles of V^T from the rows of a step. Two keys make pairs for 32 of D in two vectors: in a
// quarter of the first 4 of D, in that of the second the next 4.
void transpose_values(const bf16* const* rows, int64_t D, Ahead& ahead, char* to) {
  for (int64_t half = 0; half < kHalves; ++half) {
    for (int64_t d = 0; d < D; d += tmm::kDepth) {
      ahead.ask(12);
      Vec<float> low[kLanes], high[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const bf16* const* row = rows + half * tmm::kDepth + 2 * i;
        const __m512i even = _mm512_loadu_si512(row[0] + d), odd = _mm512_loadu_si512(row[1] + d);
        low[i] = (Vec<float>)_mm512_unpacklo_epi16(even, odd);
        high[i] = (Vec<float>)_mm512_unpackhi_epi16(even, odd);
      }
      transpose<float>(low);
      transpose<float>(high);
      char* tile = to + (d / tmm::kRows * kHalves + half) * tmm::kBytes;
      for (int64_t quarter = 0; quarter < 4; ++quarter) {
        if (d + quarter / 2 * tmm::kRows >= D) break;
        char* row = tile + quarter / 2 * kHalves * tmm::kBytes + quarter % 2 * 8 * tmm::kRowBytes;
        memcpy(row, low + 4 * quarter, 4 * tmm::kRowBytes);
        memcpy(row + 4 * tmm::kRowBytes, high + 4 * quarter, 4 * tmm::kRowBytes);
      }
    }
  }
}

// The values of step `number` of a split, plain: every row of the tile sees them. True if what those in s.values give
// needs no care: without NaN and inf, or plain; else s.finite has them without, too.
bool stage_values(const AttentionParams& p, const StepRows<bf16>& step, bool plain, Ahead& ahead, int64_t number,
                  Scratch& s) {
  const int64_t stride = s.depth_tiles * tmm::kDepth;
  const bf16* copies[kStep];
  for (int64_t j = 0; j < kStep; ++j) copies[j] = s.value_rows + j * stride;
  const bool in_place = p.D % tmm::kDepth == 0 && step.count == kStep;
  bool finite = plain;
  if (!in_place)
    finite |= copy_values(step, p.D, stride, s.value_rows);
  else if (!plain)
    finite = values_finite(step, p.D);
  transpose_values(in_place ? step.v : copies, s.ld, ahead, s.values + number * s.value_bytes());
  if (finite) return true;
  if (in_place) copy_values(step, p.D, stride, s.value_rows);
  leave_out(stride, s.value_rows, s.left_out[number]);
  transpose_values(copies, s.ld, ahead, s.finite + number * s.value_bytes());
  return false;
}

// Which rows of a block see the keys whose NaN and inf were left out; scores as finish_scores leaves them.
void find_who_sees(const LeftOut& left_out, const float* scores, __mmask16* seen) {
  for (int64_t i = 0; i < left_out.count; ++i)
    seen[i] = _mm512_cmp_ps_mask((__m512)load(scores + left_out.keys[i] * kLanes), _mm512_set1_ps(-kInf), _CMP_NEQ_UQ);
}

// The NaN and inf of elements d .. d + kCount - 1 that were left out, for the rows of a block that do see them.
template <int kCount>
ATTN_INLINE void add_left_out(const StepRows<bf16>& step, int64_t d, const LeftOut& left_out, const __mmask16* seen,
                              const Vec<float>* weights, float* sums) {
  typedef Vec<float> V;
  V sum[kCount];
  for (int e = 0; e < kCount; ++e) sum[e] = load(sums + (d + e) * kLanes);
  for (int64_t i = 0; i < left_out.count; ++i) {
    const bf16* v = step.v[left_out.keys[i]] + d;
    for (int e = 0; e < kCount; ++e) {
      const __mmask16 rows = (v[e].bits & 0x7f80) == 0x7f80 ? seen[i] : __mmask16(0);
      const V value = (V)(IVec<float>{} + int32_t(uint32_t(v[e].bits) << 16));
      sum[e] = (V)_mm512_mask_add_ps((__m512)sum[e], rows, (__m512)sum[e], (__m512)(weights[i] * value));
    }
  }
  for (int e = 0; e < kCount; ++e) store(sums + (d + e) * kLanes, sum[e]);
}

void add_left_out_values(const StepRows<bf16>& step, int64_t D, const LeftOut& left_out, const __mmask16* seen,
                         const char* weights, float* sums) {
  Vec<float> weight[kStep];
  for (int64_t i = 0; i < left_out.count; ++i) {
    const int64_t j = left_out.keys[i];
    Vec<float> pairs;
    memcpy(&pairs, weights + j / 2 * tmm::kRowBytes, sizeof pairs);
    weight[i] = widen_half(bf16{}, pairs, j % 2);
  }
  int64_t d = 0;
  for (; d + 4 <= D; d += 4) add_left_out<4>(step, d, left_out, seen, weight, sums);
  for (; d < D; ++d) add_left_out<1>(step, d, left_out, seen, weight, sums);
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
    if (p.softcap > 0) v = cap_score<float>(v, cap);
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

// Rounded to bfloat16, side by side.
ATTN_INLINE Vec<float> pair_up(Vec<float> even, Vec<float> odd) {
  alignas(64) static constexpr uint16_t kInterleave[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                           21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  return (Vec<float>)_mm512_permutexvar_epi16(_mm512_load_si512(kInterleave), both);
}

// What a row of a block sees of a split by causality and window: keys begin .. end - 1, counted from the split's first.
struct Seen {
  IVec<float> begin, end;
  int64_t all_begin, all_end;  // what every row sees
  bool known = false;
};

void find_seen(const AttentionParams& p, const Tile& t, int64_t block, int64_t split, Seen& seen) {
  typedef IVec<float> I;
  const int64_t first = split * kSplit;
  int32_t positions[kLanes];  // ascending, from the split's first key on
  RowCursor cursor(t, block * kLanes);
  for (int64_t lane = 0; lane < kLanes; ++lane, cursor.next())
    positions[lane] = int32_t(cursor.token + t.seq.Tk - t.seq.Tq - first);
  I position;
  memcpy(&position, positions, sizeof position);
  const auto least = [](I a, I b) { return a < b ? a : b; };
  const auto most = [](I a, I b) { return a > b ? a : b; };
  const auto all = [](int64_t x) { return I{} + int32_t(min_of<int64_t>(x, 1 << 30)); };
  I begin{}, last = all(min_of(kSplit, t.seq.Tk - first) - 1);
  if (p.causal) last = least(last, position);
  if (p.window_right >= 0) last = least(last, position + all(p.window_right));
  if (p.window_left >= 0) begin = least(most(begin, position - all(p.window_left)), all(kSplit));
  const I end = most(begin, last + 1);
  seen = {begin, end, begin[kLanes - 1], end[0], true};
}

// Unseen scores become -inf.
void hide_unseen(const Seen& seen, int64_t first, float* scores) {
  const __m512i begin = (__m512i)seen.begin, length = (__m512i)(seen.end - seen.begin);
  for (int64_t j = 0; j < kStep; ++j) {
    if (seen.all_begin <= first + j && first + j < seen.all_end) continue;
    const __m512i from_begin = _mm512_sub_epi32(_mm512_set1_epi32(int32_t(first + j)), begin);
    const __mmask16 unseen = _mm512_cmpge_epu32_mask(from_begin, length);
    const __m512 score = (__m512)load(scores + j * kLanes);
    store(scores + j * kLanes, (Vec<float>)_mm512_mask_mov_ps(score, unseen, _mm512_set1_ps(-kInf)));
  }
}

// Products of a block at a step of a split become scores; plain: every row sees every key, and nothing transforms them.
void finish_scores(const AttentionParams& p, const Tile& t, const Scratch& s, int64_t block, int64_t split,
                   int64_t step, bool plain, Seen& seen, float* scores) {
  if (s.prescale)
    for (int64_t j = 0; j < kStep; ++j) store(scores + j * kLanes, s.scale.times(load(scores + j * kLanes)));
  if (plain) return;
  if (p.softcap > 0 || p.alibi_slopes || p.bias || p.mask) {
    const int64_t first = split * kSplit + step * kStep;
    return transform_scores(p, t, block, first, min_of(kStep, t.seq.Tk - first), scores);
  }
  if (!seen.known) find_seen(p, t, block, split, seen);
  hide_unseen(seen, step * kStep, scores);
}

Vec<float> max_of_keys(const float* scores) {
  typedef Vec<float> V;
  V top = load(scores), top2 = load(scores + kLanes);
  V top3 = load(scores + 2 * kLanes), top4 = load(scores + 3 * kLanes);
  for (int64_t j = 4; j < kStep; j += 4) {
    top = vmax(top, load(scores + j * kLanes));
    top2 = vmax(top2, load(scores + (j + 1) * kLanes));
    top3 = vmax(top3, load(scores + (j + 2) * kLanes));
    top4 = vmax(top4, load(scores + (j + 3) * kLanes));
  }
  return vmax(vmax(top, top2), vmax(top3, top4));
}

// Where a block's state moves, given the maximum of the scores of a step: the factor for what it has accumulated.
// False: nowhere.
bool move_max(Vec<float> top, float exponent, BlockState& state, Vec<float>& factor) {
  typedef Vec<float> V;
  const __mmask16 moves = _mm512_cmp_ps_mask((__m512)top, (__m512)state.limit, _CMP_GT_OQ);
  if (!moves) return false;
  const V max = (V)_mm512_mask_mov_ps((__m512)state.max, moves, (__m512)top);
  factor = (V)_mm512_mask_mov_ps((__m512)splat(1.0f), moves, (__m512)exp2_scaled(state.max - max, splat(exponent)));
  state.max = max;
  state.limit = max + splat(8.0f / exponent);
  state.sum *= factor;
  return true;
}

// What is to be taken off exponent * score for a block's weights. Where that is so much that the difference would be
// inexact (far), the maximum is to be taken off the scores themselves, and nothing is left to take off.
ATTN_INLINE Vec<float> shift_of(const BlockState& state, float exponent, __mmask16& far) {
  typedef Vec<float> V;
  const V shift = state.max == splat(-kInf) ? V{} : state.max * splat(exponent);
  far = _mm512_cmp_ps_mask((__m512)absolute(shift), _mm512_set1_ps(0x1p10f), _CMP_NLE_UQ);
  return (V)_mm512_maskz_mov_ps(__mmask16(~far), (__m512)shift);
}

Vec<float> take_off_max(const BlockState& state, float exponent, float* scores) {
  __mmask16 far;
  const Vec<float> shift = shift_of(state, exponent, far);
  if (!far) return shift;
  for (int64_t j = 0; j < kStep; ++j) {
    const __m512 score = (__m512)load(scores + j * kLanes);
    store(scores + j * kLanes, (Vec<float>)_mm512_mask_sub_ps(score, far, score, (__m512)state.max));
  }
  return shift;
}

// 2^(exponent score - shift), with a relative error of 2e-7 (minimax, exact at both ends of the fraction: the maximum's
// own power may lie below 0 by a rounding, and its weight is 1 all the same); 0 for a score of -inf, NaN for NaN. The
// power is split by instructions that know infinity and make 0 of what underflows.
ATTN_INLINE Vec<float> weight_of(Vec<float> score, Vec<float> exponent, Vec<float> shift) {
  const Vec<float> x = fma(score, exponent, -shift);
  const Vec<float> f = (Vec<float>)_mm512_maskz_reduce_ps(__mmask16(-1), (__m512)x, _MM_FROUND_TO_NEG_INF);
  Vec<float> q = fma(splat(0.00187931827f), f, splat(0.00899099279f));
  q = fma(q, f, splat(0.0558186695f));
  q = fma(q, f, splat(0.240159318f));
  q = fma(q, f, splat(0.693151712f));
  q = fma(q, f, splat(1.0f));
  return (Vec<float>)_mm512_maskz_scalef_ps(__mmask16(-1), (__m512)q, (__m512)x);
}

BlockTotal total_of(const BlockState& state, const Scratch& s) {
  const Vec<float> scaled = s.prescale ? state.max : state.max * splat(s.scale.first);
  return {state.max == splat(-kInf) ? state.max : scaled, state.sum};
}

// ------------------------------------------------------------------------------------------ a split, few rows

// Keys that a tile can be loaded from where they are: 16 in order, in whole lines.
bool keys_in_place(const AttentionParams& p, const Tile& t, const StepRows<bf16>& step, int64_t first) {
  return first + tmm::kRows <= step.count && p.D % tmm::kDepth == 0 && p.k_row_stride % tmm::kDepth == 0 &&
         (!t.seq.blocks || p.block_size % tmm::kRows == 0) && reinterpret_cast<uintptr_t>(step.k[first]) % 64 == 0;
}

// The state moved: what was accumulated, tiles of O, follows.
void scale_sums(int64_t rows, int64_t tiles, Vec<float> factor, float* sums) {
  for (int64_t n = 0; n < tiles; ++n) {
    for (int64_t r = 0; r < rows; ++r) {
      float* row = sums + n * tmm::kFloats + r * kLanes;
      store(row, load(row) * splat(factor[r]));
    }
  }
}

// Weights P of a step from its scores, lanes being rows, transposed.
ATTN_INLINE void weigh(int64_t rows, Scratch& s, float* sums, Ahead& ahead) {
  typedef Vec<float> V;
  BlockState& state = s.blocks[0];
  V factor;
  if (move_max(max_of_keys(s.scores), s.exponent, state, factor)) scale_sums(rows, 2 * s.depth_tiles, factor, sums);
  const V c = splat(s.exponent), shift = take_off_max(state, s.exponent, s.scores);
  V sum{}, sum2{}, pairs[kHalves][kLanes];
  for (int64_t j = 0; j < kStep; j += 2) {
    const V even = weight_of(load(s.scores + j * kLanes), c, shift);
    const V odd = weight_of(load(s.scores + (j + 1) * kLanes), c, shift);
    sum += even;
    sum2 += odd;
    pairs[j / tmm::kDepth][j % tmm::kDepth / 2] = pair_up(even, odd);
    ahead.ask(1);
  }
  state.sum += sum + sum2;
  for (int64_t half = 0; half < kHalves; ++half) {
    transpose<float>(pairs[half]);
    memcpy(s.weights + half * tmm::kBytes, pairs[half], size_t(rows * tmm::kRowBytes));
  }
}

// The same for up to kGathered rows, where most lanes would be idle: the scores of a row are gathered, so that lanes
// are keys. Weights are added up in the order in which those lanes add them.
ATTN_INLINE void weigh_gathered(int64_t rows, Scratch& s, float* sums) {
  typedef Vec<float> V;
  constexpr int64_t kParts = kStep / kLanes;
  BlockState& state = s.blocks[0];
  const __m512i of_row = (__m512i)(lane_index<float>() * int32_t(kLanes));
  V scores[kGathered][kParts], top = state.max;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < kParts; ++i)
      scores[r][i] = (V)_mm512_i32gather_ps(of_row, s.scores + i * kLanes * kLanes + r, sizeof(float));
    const V both = vmax(vmax(scores[r][0], scores[r][1]), vmax(scores[r][2], scores[r][3]));
    top[r] = combine_lanes<float, kLanes / 2>(both, [](V a, V b) { return vmax(a, b); });
  }
  V factor;
  if (move_max(top, s.exponent, state, factor)) scale_sums(rows, 2 * s.depth_tiles, factor, sums);
  __mmask16 far;
  const V c = splat(s.exponent), shifts = shift_of(state, s.exponent, far);
  for (int64_t r = 0; r < rows; ++r) {
    const V shift = splat(shifts[r]);
    if (far >> r & 1)
      for (V& part : scores[r]) part -= splat(state.max[r]);
    alignas(64) float weights[kStep];
    for (int64_t half = 0; half < kHalves; ++half) {
      const V low = weight_of(scores[r][2 * half], c, shift), high = weight_of(scores[r][2 * half + 1], c, shift);
      store(weights + half * tmm::kDepth, low);
      store(weights + half * tmm::kDepth + kLanes, high);
      const __m512i row = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      _mm512_store_si512(s.weights + half * tmm::kBytes + r * tmm::kRowBytes, row);
    }
    float sum = 0, sum2 = 0;
    for (int64_t j = 0; j < kStep; j += 2) {
      sum += weights[j];
      sum2 += weights[j + 1];
    }
    state.sum[r] += sum + sum2;
  }
}

// For up to 16 rows there is nothing to gain from V^T:
//
//   S^T (keys, rows)  = K Q^T                           as for many rows
//   O (rows, D)      += P (rows, keys) . V (keys, D)    V only has its keys paired, 32 of D in two tiles: the first has
//                                                       the first 4 of every 8, the second the others
//
// The sums are those of many rows, to the bit. tile registers: 0 S^T, 2 Q^T and V, 3 K and V, 4 O, 6 7 P
void attend_few(const AttentionParams& p, const Tile& t, int64_t number, Scratch& s) {
  typedef Vec<float> V;
  tmm::Shapes shapes = tmm::Shapes::full();
  for (int i = 4; i < 8; ++i) shapes.set(i, t.rows);
  const tmm::Config config(shapes);
  const int64_t first_key = number * kSplit, depth = s.depth_tiles, stride = depth * tmm::kDepth;
  const int64_t begin = max_of(first_key, t.key_begin / kStep * kStep);
  const int64_t end = min_of(first_key + kSplit, t.key_end);
  float* sums = reinterpret_cast<float*>(s.finite);
  memset(sums, 0, size_t(2 * depth * tmm::kBytes));
  BlockState& state = s.blocks[0];
  state = BlockState{splat(-kInf), splat(-kInf), V{}};
  Seen seen;
  StepRows<bf16> step;
  Ahead ahead;
  ahead.begin(p, t, begin);
  for (int64_t first = begin; first < end; first += kStep) {
    step = ahead.step;
    ahead.begin(p, t, first + kStep);
    for (int64_t j = 0; j < kStep; j += tmm::kRows) {
      const char* k = s.keys;
      int64_t row_bytes = tmm::kRowBytes, tile_bytes = tmm::kBytes;
      if (keys_in_place(p, t, step, j)) {
        k = reinterpret_cast<const char*>(step.k[j]);
        row_bytes = p.k_row_stride * int64_t(sizeof(bf16));
        tile_bytes = tmm::kRowBytes;
      } else {
        for (int64_t i = j; i < j + tmm::kRows; ++i) {
          char* to = s.keys + (i - j) * tmm::kRowBytes;
          if (i < step.count)
            pack_left_row(step.k[i], p.D, to, tmm::kBytes);
          else
            for (int64_t d = 0; d < depth; ++d) memset(to + d * tmm::kBytes, 0, tmm::kRowBytes);
        }
      }
      tmm::zero<0>();
      for (int64_t d = 0; d < depth; ++d) {
        tmm::load<2>(s.q + d * tmm::kBytes);
        tmm::load<3>(k + d * tile_bytes, row_bytes);
        tmm::dot<0, 3, 2>();
        ahead.ask(ceil_div(kStep / 8, depth));
      }
      tmm::store<0>(s.scores + j * kLanes);
    }

    const bool plain = step_is_plain(p, t, first), in_place = plain && p.D % tmm::kDepth == 0;
    LeftOut& left_out = s.left_out[0];
    left_out.count = 0;
    if (!in_place && !copy_values(step, p.D, stride, s.value_rows) && !plain) leave_out(stride, s.value_rows, left_out);
    for (int64_t j = 0; j < kStep; j += 2) {
      const bf16* even = in_place ? step.v[j] : s.value_rows + j * stride;
      const bf16* odd = in_place ? step.v[j + 1] : even + stride;
      char* to = s.values + j / tmm::kDepth * tmm::kBytes + j % tmm::kDepth / 2 * tmm::kRowBytes;
      for (int64_t d = 0; d < depth; ++d, to += 2 * kHalves * tmm::kBytes) {
        const __m512i a = _mm512_loadu_si512(even + d * tmm::kDepth), b = _mm512_loadu_si512(odd + d * tmm::kDepth);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + kHalves * tmm::kBytes, _mm512_unpackhi_epi16(a, b));
      }
      ahead.ask(2);
    }

    finish_scores(p, t, s, 0, number, (first - first_key) / kStep, plain, seen, s.scores);
    __mmask16 who_sees[kStep];  // before scores are changed for the weights
    find_who_sees(left_out, s.scores, who_sees);
    if (t.rows <= kGathered)
      weigh_gathered(t.rows, s, sums);
    else
      weigh(t.rows, s, sums, ahead);

    tmm::load<6>(s.weights);
    tmm::load<7>(s.weights + tmm::kBytes);
    for (int64_t n = 0; n < 2 * depth; ++n) {
      const char* v = s.values + n * kHalves * tmm::kBytes;
      tmm::load<4>(sums + n * tmm::kFloats);
      tmm::load<2>(v);
      tmm::dot<4, 6, 2>();
      tmm::load<3>(v + tmm::kBytes);
      tmm::dot<4, 7, 3>();
      tmm::store<4>(sums + n * tmm::kFloats);
      ahead.ask(ceil_div(kStep / 2, 2 * depth));
    }
    for (int64_t i = 0; i < left_out.count; ++i) {
      const int64_t j = left_out.keys[i];
      for (int64_t r = 0; r < t.rows; ++r) {
        if (!(who_sees[i] >> r & 1)) continue;
        bf16 weight;
        memcpy(&weight, s.weights + j / tmm::kDepth * tmm::kBytes + r * tmm::kRowBytes + j % tmm::kDepth * 2, 2);
        for (int64_t d = 0; d < p.D; ++d) {
          const float value = to_accumulate(step.v[j][d]);
          if (value - value == 0.0f) continue;
          const int64_t n = d / tmm::kDepth * 2 + d / 4 % 2, column = d % tmm::kDepth / 8 * 4 + d % 4;
          sums[n * tmm::kFloats + r * kLanes + column] += to_accumulate(weight) * value;
        }
      }
    }
  }

  for (int64_t n = 0; n < 2 * depth; ++n) {
    V square[kLanes];
    memcpy(square, sums + n * tmm::kFloats, sizeof square);
    transpose<float>(square);
    for (int64_t i = 0; i < kLanes; ++i) {
      const int64_t d = n / 2 * tmm::kDepth + i / 4 * 8 + n % 2 * 4 + i % 4;
      if (d < s.ld) store(s.out + d * kLanes, square[i]);
    }
  }
  s.split_state[0] = total_of(state, s);
}

// ----------------------------------------------------------------------------------------- a split, many rows

// A pair of blocks over the keys of a split, step by step.
struct Pair {
  const AttentionParams& p;
  const Tile& t;
  Scratch& s;
  int64_t split, number;
  float* out;  // (2, ld, kLanes)

  Pair(const AttentionParams& params, const Tile& tile, Scratch& scratch, int64_t split, int64_t number)
      : p(params), t(tile), s(scratch), split(split), number(number), out(s.out + 2 * number * kLanes * s.ld) {}

  int64_t first_row() const { return 2 * number * kLanes; }
  int64_t last_row() const { return min_of(t.rows, 2 * (number + 1) * kLanes) - 1; }

  // Steps of the split that rows of the pair see something of: none if begin >= end.
  int64_t begin() const {
    const int64_t first = visible_keys(p, t.position(first_row()), t.seq.Tk).first;
    return max_of<int64_t>(0, first - split * kSplit) / kStep;
  }
  int64_t end() const {
    const int64_t last = visible_keys(p, t.position(last_row()), t.seq.Tk).last - split * kSplit;
    return last < 0 ? 0 : min_of(kSteps, last / kStep + 1);
  }
  // Steps low .. high - 1 are plain: every row of the pair sees every key, and the score needs no transform.
  void find_plain(int64_t& low, int64_t& high) const {
    low = high = 0;
    if (p.softcap > 0 || p.alibi_slopes || p.bias || p.mask) return;
    const int64_t first = visible_keys(p, t.position(last_row()), t.seq.Tk).first - split * kSplit;
    const int64_t last = visible_keys(p, t.position(first_row()), t.seq.Tk).last - split * kSplit;
    low = ceil_div(max_of<int64_t>(0, first), kStep);
    high = last < 0 ? 0 : (last + 1) / kStep;
  }
  float* scores(int64_t step) const { return s.scores + step % 2 * 2 * kScores; }
  char* weights(int64_t step) const { return s.weights + step % kChunk * 2 * kHalves * tmm::kBytes; }
};

// S^T of a step; after every four products between() is called. kDepth: tiles of D in Q^T and K if known, else 0. A
// finished tile of sums is stored just before its register is used again, so that products follow each other.
template <int kDepth, class Between>
ATTN_INLINE void score(const Pair& pair, int64_t step, const Between& between) {
  const Scratch& s = pair.s;
  const int64_t depth = kDepth > 0 ? kDepth : s.depth_tiles;
  const char* k = s.keys + step * s.key_bytes();
  const char* q = s.q + 2 * pair.number * depth * tmm::kBytes;
  float* to = pair.scores(step);
  if constexpr (kDepth == 2) {  // Q^T stays in registers: 0 1 sums, 2 3 K, 4 .. 7 Q^T
    each<4>([&](auto i) { tmm::load<4 + decltype(i)::value>(q + decltype(i)::value * tmm::kBytes); });
    for (int64_t i = 0; i < kKeyTiles; ++i, k += 2 * tmm::kBytes, to += tmm::kFloats) {
      tmm::load<2>(k);
      if (i > 0) tmm::store<0>(to - tmm::kFloats);
      tmm::zero<0>();
      tmm::dot<0, 2, 4>();
      if (i > 0) tmm::store<1>(to - tmm::kFloats + kScores);
      tmm::zero<1>();
      tmm::dot<1, 2, 6>();
      tmm::load<3>(k + tmm::kBytes);
      tmm::dot<0, 3, 5>();
      tmm::dot<1, 3, 7>();
      between();
    }
    tmm::store<0>(to - tmm::kFloats);
    tmm::store<1>(to - tmm::kFloats + kScores);
    return;
  }
  const auto finish = [&](auto tile) __attribute__((always_inline)) {
    constexpr int c = decltype(tile)::value;
    tmm::store<c>(to + c / 2 * tmm::kFloats + c % 2 * kScores);
  };
  for (int64_t i = 0; i < kKeyTiles; i += 2, k += 2 * depth * tmm::kBytes) {
    const auto begin = [&](auto tile) __attribute__((always_inline)) {
      if (i > 0) finish(tile);
      tmm::zero<decltype(tile)::value>();
    };
    for (int64_t d = 0; d < depth; ++d) {
      tmm::load<6>(q + d * tmm::kBytes);
      tmm::load<4>(k + d * tmm::kBytes);
      if (d == 0) begin(Constant<0>{});
      tmm::dot<0, 4, 6>();
      tmm::load<7>(q + (depth + d) * tmm::kBytes);
      if (d == 0) begin(Constant<1>{});
      tmm::dot<1, 4, 7>();
      tmm::load<5>(k + (depth + d) * tmm::kBytes);
      if (d == 0) begin(Constant<2>{});
      tmm::dot<2, 5, 6>();
      if (d == 0) begin(Constant<3>{});
      tmm::dot<3, 5, 7>();
      between();
    }
    if (i > 0) to += 2 * tmm::kFloats;
  }
  each<4>(finish);
}

// Scores of step `next` and their maxima beside the weights of step `now`; either may be -1. While tiles work, vector
// instructions get one of two ports: about 16 of them beside a product are free, more are better off behind.
template <int kDepth>
void score_and_weigh(const Pair& pair, int64_t next, int64_t now, Vec<float> (&top)[2]) {
  typedef Vec<float> V;
  const Scratch& s = pair.s;
  const V c = splat(s.exponent);
  V shift[2] = {}, sum[2] = {}, sum2[2] = {};
  const float* from = pair.scores(max_of<int64_t>(0, now));
  char* weights = pair.weights(max_of<int64_t>(0, now));
  int64_t j = now >= 0 ? 0 : kStep;  // keys before have weights
  if (now >= 0)
    for (int i = 0; i < 2; ++i) shift[i] = take_off_max(s.blocks[i], s.exponent, pair.scores(now) + i * kScores);
  const auto weigh = [&] __attribute__((always_inline)) {
    for (int i = 0; i < 2; ++i) {
      const float* x = from + i * kScores + j * kLanes;
      const V even = weight_of(load(x), c, shift[i]), odd = weight_of(load(x + kLanes), c, shift[i]);
      sum[i] += even;
      sum2[i] += odd;
      store(reinterpret_cast<float*>(weights + i * kHalves * tmm::kBytes + j / 2 * tmm::kRowBytes), pair_up(even, odd));
    }
    j += 2;
  };
  const float* scores = pair.scores(max_of<int64_t>(0, next));
  int64_t m = next >= 0 ? 0 : kStep;  // keys before are in top
  top[0] = top[1] = splat(-kInf);
  V top2[2] = {top[0], top[0]};
  const auto find_max = [&] __attribute__((always_inline)) {
    for (int64_t stop = m + 8; m < stop; m += 2)
      for (int i = 0; i < 2; ++i) {
        top[i] = vmax(top[i], load(scores + i * kScores + m * kLanes));
        top2[i] = vmax(top2[i], load(scores + i * kScores + (m + 1) * kLanes));
      }
  };

  if (next >= 0)
    score<kDepth>(pair, next, [&] __attribute__((always_inline)) {
      for (int n = 0; n < 2; ++n)
        if (j < kStep) weigh();
    });
  while (j < kStep) {
    weigh();
    if (j > kStep - 16 && m < kStep) find_max();
  }
  while (m < kStep) find_max();
  for (int i = 0; i < 2; ++i) top[i] = vmax(top[i], top2[i]);
  if (now >= 0)
    for (int i = 0; i < 2; ++i) s.blocks[i].sum += sum[i] + sum2[i];
}

void score_and_weigh(const Pair& pair, int64_t next, int64_t now, Vec<float> (&top)[2]) {
  if (pair.p.D == 64) return score_and_weigh<2>(pair, next, now, top);
  if (pair.p.D == 128) return score_and_weigh<4>(pair, next, now, top);
  score_and_weigh<0>(pair, next, now, top);
}

// out += V^T P^T of steps begin .. end - 1; the first adds to nothing. Sums stay in tiles over all the steps.
template <int kTiles>  // of D
void add_values(const Pair& pair, int64_t begin, int64_t end, const char* const* values, bool first, int64_t d) {
  const Scratch& s = pair.s;
  float* to = pair.out + d * tmm::kFloats;
  float* to2 = to + kLanes * s.ld;
  if (first) {
    each<2 * kTiles>([](auto c) { tmm::zero<decltype(c)::value>(); });
  } else {
    tmm::load<0>(to);
    tmm::load<1>(to2);
    if constexpr (kTiles > 1) {
      tmm::load<2>(to + tmm::kFloats);
      tmm::load<3>(to2 + tmm::kFloats);
    }
  }
  for (int64_t step = begin; step < end; ++step) {
    const char* v = values[step] + d * kHalves * tmm::kBytes;
    const char* w = pair.weights(step);
    for (int64_t half = 0; half < kHalves; ++half, v += tmm::kBytes, w += tmm::kBytes) {
      tmm::load<4>(v);
      tmm::load<6>(w);
      tmm::dot<0, 4, 6>();
      tmm::load<7>(w + kHalves * tmm::kBytes);
      tmm::dot<1, 4, 7>();
      if constexpr (kTiles > 1) {
        tmm::load<5>(v + kHalves * tmm::kBytes);
        tmm::dot<2, 5, 6>();
        tmm::dot<3, 5, 7>();
      }
    }
  }
  tmm::store<0>(to);
  tmm::store<1>(to2);
  if constexpr (kTiles > 1) {
    tmm::store<2>(to + tmm::kFloats);
    tmm::store<3>(to2 + tmm::kFloats);
  }
}

void add_values(const Pair& pair, int64_t begin, int64_t end, const char* const* values, bool first) {
  const int64_t tiles = pair.s.ld / tmm::kRows;
  int64_t d = 0;
  for (; d + 2 <= tiles; d += 2) add_values<2>(pair, begin, end, values, first, d);
  if (d < tiles) add_values<1>(pair, begin, end, values, first, d);
}

// Weights of all steps, then their products with the values: these come in one go but where the maximum moves or NaN
// and inf were left out.
void attend_pair(Pair& pair, const bool* finite) {
  const AttentionParams& p = pair.p;
  Scratch& s = pair.s;
  const Tile& t = pair.t;
  const int64_t begin = pair.begin(), end = pair.end();
  BlockTotal* state = s.split_state + 2 * pair.number;
  if (begin >= end) {
    memset(pair.out, 0, size_t(2 * kLanes * s.ld) * sizeof(float));
    for (int i = 0; i < 2; ++i) state[i] = {splat(-kInf), Vec<float>{}};
    return;
  }
  for (int i = 0; i < 2; ++i) s.blocks[i] = BlockState{splat(-kInf), splat(-kInf), Vec<float>{}};
  int64_t plain_begin, plain_end;
  pair.find_plain(plain_begin, plain_end);
  Seen seen[2];
  const char* values[kSteps];
  int64_t added = begin;  // steps before are in out
  const auto add = [&](int64_t stop) {
    if (added < stop) add_values(pair, added, stop, values, added == begin);
    added = stop;
  };
  Vec<float> top[2];
  score_and_weigh(pair, begin, -1, top);
  for (int64_t step = begin; step < end; ++step) {
    const bool plain = plain_begin <= step && step < plain_end, filtered = !plain && !finite[step];
    values[step] = (filtered ? s.finite : s.values) + step * s.value_bytes();
    float* scores = pair.scores(step);
    __mmask16 who_sees[2][kStep];
    for (int i = 0; i < 2; ++i) {
      finish_scores(p, t, s, 2 * pair.number + i, pair.split, step, plain, seen[i], scores + i * kScores);
      if (filtered) find_who_sees(s.left_out[step], scores + i * kScores, who_sees[i]);
      if (!plain || s.prescale) top[i] = max_of_keys(scores + i * kScores);
      Vec<float> factor;
      if (!move_max(top[i], s.exponent, s.blocks[i], factor) || step == begin) continue;
      add(step);
      float* sums = pair.out + i * kLanes * s.ld;
      for (int64_t d = 0; d < s.ld; ++d) store(sums + d * kLanes, load(sums + d * kLanes) * factor);
    }
    score_and_weigh(pair, step + 1 < end ? step + 1 : -1, step, top);
    const bool lacks = filtered && s.left_out[step].count > 0;
    if (lacks || step + 1 == added + kChunk) add(step + 1);
    if (!lacks) continue;
    StepRows<bf16> rows;
    rows.locate(p, t, pair.split * kSplit + step * kStep);
    for (int i = 0; i < 2; ++i)
      add_left_out_values(rows, p.D, s.left_out[step], who_sees[i], pair.weights(step) + i * kHalves * tmm::kBytes,
                          pair.out + i * kLanes * s.ld);
  }
  add(end);
  for (int i = 0; i < 2; ++i) state[i] = total_of(s.blocks[i], s);
}

// In place of the one in attention_tiles.h: tiles have their shapes while a split is worked on.
void attend_split(const AttentionParams& p, const Tile& t, int64_t number, Scratch& s) {
  if (t.rows <= kLanes) return attend_few(p, t, number, s);
  const tmm::Config config(tmm::Shapes::full());
  const int64_t first_key = number * kSplit;
  const int64_t begin = max_of<int64_t>(0, t.key_begin - first_key) / kStep;
  const int64_t end = ceil_div(min_of(kSplit, t.key_end - first_key), kStep);
  bool finite[kSteps];
  Ahead ahead;
  ahead.begin(p, t, first_key + begin * kStep);
  for (int64_t i = begin; i < end; ++i) {
    const StepRows<bf16> rows = ahead.step;
    ahead.begin(p, t, first_key + (i + 1) * kStep);
    stage_keys(rows, p.D, s.depth_tiles, ahead, s.keys + i * s.key_bytes());
    finite[i] = stage_values(p, rows, step_is_plain(p, t, first_key + i * kStep), ahead, i, s);
  }
  for (int64_t i = 0; i < pairs_of(t); ++i) {
    Pair pair(p, t, s, number, i);
    attend_pair(pair, finite);
  }
}

// In place of the one in attention_tiles.h: lanes are rows. Rows that saw nothing of the split stay as they are.
void merge_split(const Tile& t, const BlockTotal* state, const float* out, Scratch& s) {
  typedef Vec<float> V;
  for (int64_t b = 0; b < blocks_of(t); ++b) {
    // Scores that are all NaN leave no maximum, but a sum of NaN.
    const __mmask16 saw = _mm512_cmp_ps_mask((__m512)state[b].max, _mm512_set1_ps(-kInf), _CMP_NEQ_UQ) |
                          _mm512_cmp_ps_mask((__m512)state[b].sum, _mm512_setzero_ps(), _CMP_NEQ_UQ);
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

// ln(x) of numbers >= 0, with a relative error of 1e-7.
ATTN_INLINE Vec<float> log(Vec<float> x) {
  typedef Vec<float> V;
  const V m = (V)_mm512_getmant_ps((__m512)x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  V e = (V)_mm512_getexp_ps((__m512)x);
  e = m < splat(1.0f) ? e + splat(1.0f) : e;                     // 0.75 <= m < 1.5
  const V s = (m - splat(1.0f)) / (m + splat(1.0f)), t = s * s;  // ln(m) = 2 artanh(s)
  V q = fma(splat(2.0f / 11), t, splat(2.0f / 9));
  q = fma(q, t, splat(2.0f / 7));
  q = fma(q, t, splat(2.0f / 5));
  q = fma(q, t, splat(2.0f / 3));
  q = fma(q * t, s, s + s);
  return fma(e, splat(0x1.62e4p-1f), fma(e, splat(1.42860682e-6f), q));  // ln(2) in two parts
}

// In place of the one in attention_tiles.h: lanes are rows.
template <class T>
void write_tile(const AttentionParams& p, const Tile& t, Scratch& s) {
  typedef Vec<float> V;
  RowCursor cursor(t);
  for (int64_t b = 0; b < blocks_of(t); ++b) {
    const int64_t rows = min_of(kLanes, t.rows - b * kLanes);
    T* to[kLanes];
    float* lse[kLanes];
    V sink = splat(-kInf);
    for (int64_t i = 0; i < rows; ++i, cursor.next()) {
      const int64_t token = cursor.token, head = cursor.head;
      to[i] = static_cast<T*>(p.out) + t.seq.out_offset + token * p.out_row_stride + head * p.out_head_stride;
      lse[i] = static_cast<float*>(p.lse) + t.seq.lse_offset + head * p.lse_head_stride + token;
      if (p.sinks) sink[i] = static_cast<const float*>(p.sinks)[head];
      prefetch_row(to[i] + ceil_div(kLanes, t.heads) * p.out_row_stride, p.D);
    }
    const BlockTotal& state = s.total_state[b];
    const V top = p.sinks ? vmax(state.max, sink) : state.max, base = top == splat(-kInf) ? V{} : top;
    V sum = state.sum, factor = splat(1.0f);
    if (p.sinks) {
      factor = exp(state.max - base);
      sum = sum * factor + exp(sink - base);
    }
    const IVec<float> none = sum == V{};
    factor = none ? V{} : factor / sum;
    const V result = none ? splat(-kInf) : base + log(sum);
    for (int64_t i = 0; i < rows; ++i) *lse[i] = result[i];

    const float* from = s.total + b * kLanes * s.ld;
    for (int64_t d = 0; d < p.D; d += tmm::kDepth) {
      V pairs[kLanes] = {};  // of d, lanes are rows; transposed: rows
      const int64_t count = min_of(kLanes, (s.ld - d) / 2);
      for (int64_t i = 0; i < count; ++i)
        pairs[i] = pair_up(load(from + (d + 2 * i) * kLanes) * factor, load(from + (d + 2 * i + 1) * kLanes) * factor);
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
