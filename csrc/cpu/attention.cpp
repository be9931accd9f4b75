// Exact attention over dense, varlen and paged keys: prefill, chunked prefill and decode are one kernel. The tiles,
// steps and splits it walks are those of attention_tiles.h; here is what it does with a step of 64 keys.
#include "cpu/attention_tiles.h"
#include "cpu/gemm.h"
#include "cpu/kernels.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

constexpr int64_t kDepthBlock = 256;  // head_dim summed at a time
constexpr int64_t kGroupRows = 24;    // query rows whose scores are in L1 at a time
constexpr int64_t kChunk = 16;        // keys that few query rows take at a time
constexpr int64_t kAhead = 32;        // keys and values are asked for so many keys before few query rows need them

static_assert(kStep % kChunk == 0 && kAhead % kChunk == 0 && kAhead < kStep && kChunk % W<float> == 0 &&
              kGroupRows % kGemmRows == 0 && kGroupRows >= kFewRows);

// ---------------------------------------------------------------------------------------- scratch of a worker

template <class T>
struct Scratch {
  using A = Accumulate<T>;
  using State = SoftmaxState<A>;
  static constexpr int64_t kRows = 256;                  // of a tile, at most
  static constexpr int kPerStep = Product<T>::kPerStep;  // keys or elements of a head that one product takes

  Element<T>* q;                 // (rows, D)
  A* keys;                       // (D / kPerStep, kStep) keys of a step, transposed
  A* values;                     // (kStep / kPerStep, D)
  A* scores;                     // (kGroupRows, kStep)
  Element<T>* weights;           // (kGroupRows, kStep): the scores themselves unless products take another type
  A* partial;                    // (kGemmRows or kFewRows, kStep) a depth block's share of the scores
  Element<T>* filtered;          // (kPerStep, D) values without NaN and inf
  A* left_out_kinds;             // (kStep, D) which of the values were left out: kPlusInf ... as lanes of integers
  A* out;                        // (rows, D) weighted values of the current split
  A* total;                      // (rows, D) of all splits before
  StepSoftmax<T>* state;         // (rows) of the current split
  SoftmaxState<A>* split_state;  // (rows) the same when the split ends
  SoftmaxState<A>* total_state;  // (rows) of all splits before
  int64_t ld;                    // D rounded up to whole vectors: row stride of q, values, out and total

  StepRows<T> step_rows[2];  // of this step and the next
  int64_t step_first[2];     // their first key, -1: none

  Factor<A> scale;
  A exponent;     // a weight is 2^(exponent (score - max))
  bool prescale;  // scores are scaled before they are compared: they are transformed, or the scale is not plainly
                  // positive

  static int64_t states(int64_t rows) { return rows; }
  static int64_t elements(int64_t rows, int64_t ld) { return rows * ld; }
  static int64_t stride(int64_t D) { return round_up(D, W<A>); }
  static int64_t bytes(int64_t D) {
    const int64_t ld = stride(D);
    const int64_t elements =
        (3 * kRows + 3 * kStep + kPerStep) * ld + (2 * kGroupRows + max_of<int64_t>(kGemmRows, kFewRows)) * kStep;
    const int64_t states = kRows * int64_t(sizeof(StepSoftmax<T>) + 2 * sizeof(SoftmaxState<A>));
    return round_up(states + elements * int64_t(sizeof(A)), 64);
  }
  Scratch(char* memory, int64_t D) : ld(stride(D)) {
    const auto take = [&](auto*& pointer, int64_t count) {
      pointer = reinterpret_cast<decltype(pointer + 0)>(memory);
      memory += count * int64_t(sizeof *pointer);
    };
    take(state, kRows);
    take(split_state, kRows);
    take(total_state, kRows);
    take(out, kRows * ld);
    take(total, kRows * ld);
    take(keys, kStep * ld);
    take(values, kStep * ld);
    take(scores, kGroupRows * kStep);
    take(partial, max_of<int64_t>(kGemmRows, kFewRows) * kStep);
    take(left_out_kinds, kStep * ld);
    take(q, kRows * ld);
    take(filtered, kPerStep * ld);
    if constexpr (sizeof(Element<T>) == sizeof(A))
      weights = scores;
    else
      take(weights, kGroupRows * kStep);
  }

  void load_queries(const AttentionParams& p, const Tile& t);
  void begin_split(const Tile& t);
  void add_step(const AttentionParams& p, const Tile& t, int64_t first);
  void end_split(const AttentionParams& p, const Tile& t);
};

template <class T>
void Scratch<T>::load_queries(const AttentionParams& p, const Tile& t) {
  const T* from = static_cast<const T*>(p.q) + t.seq.q_offset;
  const auto row = [&](int64_t r) { return from + t.token(r) * p.q_row_stride + t.head(r) * p.q_head_stride; };
  for (int64_t r = 0; r < t.rows; ++r) {
    if (r + kRowsAhead < t.rows) prefetch_row<0>(row(r + kRowsAhead), p.D);
    convert_row(row(r), p.D, q + r * ld);
  }
  step_first[0] = step_first[1] = -1;
  constexpr double log2_e = 1.4426950408889634;
  scale = Factor<A>(p.scale);
  exponent = A(p.scale * log2_e);
  prescale = p.softcap > 0 || p.alibi_slopes || p.bias || !(exponent > A(0x1p-64f) && exponent < A(0x1p64f));
  if (prescale) exponent = A(log2_e);
}

template <class T>
void Scratch<T>::begin_split(const Tile& t) {
  for (int64_t r = 0; r < t.rows; ++r) state[r].init();
  memset(out, 0, size_t(t.rows * ld) * sizeof(A));
}

template <class T>
void Scratch<T>::end_split(const AttentionParams& p, const Tile& t) {
  for (int64_t r = 0; r < t.rows; ++r) split_state[r] = state[r].scaled(prescale ? A(1) : A(p.scale));
}

// ------------------------------------------------------------------------------------------------ values

// Copies row v to `to` without its NaN and inf, which a weight of 0 would turn into NaN; returns whether it has any.
template <class T>
bool filter_row(const T* v, int64_t D, Element<T>* to) {
  using A = Accumulate<T>;
  convert_row(v, D, to);
  Vec<A> poison{};
  for (int64_t d = 0; d < D; d += W<A>) poison += load(to + d) * splat(A(0));  // 0, or NaN
  if (sum_lanes<A>(poison) == A(0)) return false;
  for (int64_t d = 0; d < D; d += W<A>) {
    const Vec<A> value = load(to + d);
    store(to + d, (value - value == Vec<A>{}) ? value : Vec<A>{});
  }
  return true;
}

// The keys of a step whose values hold NaN or inf, left out where some row of the tile may not see them.
struct LeftOut {
  int64_t keys[kStep];
  int64_t count = 0;
};

// values (kStep / kPerStep, D) from the step's rows.
template <class T>
void stage_values(const StepRows<T>& rows, int64_t D, bool plain, Scratch<T>& s, LeftOut& left_out) {
  using A = Accumulate<T>;
  constexpr int64_t per_step = Product<T>::kPerStep;
  const auto filter = [&](int64_t j, Element<T>* to) {
    if (filter_row(rows.v[j], D, to)) left_out.keys[left_out.count++] = j;
  };
  if constexpr (per_step == 1) {
    Vec<A> poison{};
    for (int64_t j = 0; j < rows.count; ++j) {
      A* to = s.values + j * s.ld;
      convert_row(rows.v[j], D, to);
      if (!plain)
        for (int64_t d = 0; d < D; d += W<A>) poison = fma(load(to + d), Vec<A>{}, poison);  // 0, or NaN
    }
    if (sum_lanes<A>(poison) == A(0)) return;
    for (int64_t j = 0; j < rows.count; ++j) filter(j, s.values + j * s.ld);
    return;
  }
  for (int64_t j = 0; j < rows.count; j += per_step) {
    A* to = s.values + j / per_step * s.ld;
    if (plain && j + 1 < rows.count && D == s.ld) {
      const auto row = [&](int64_t i) { return rows.v[j + i]; };
      for (int64_t d = 0; d < D; d += W<A>) store(to + d, step_of_rows<T>(row, 0, d));
      continue;
    }
    const auto row = [&](int64_t i) { return s.filtered + i * s.ld; };
    for (int64_t i = 0; i < per_step; ++i) {
      if (j + i >= rows.count)
        memset(static_cast<void*>(row(i)), 0, size_t(s.ld) * sizeof(T));
      else if (plain)
        convert_row(rows.v[j + i], D, row(i));
      else
        filter(j + i, row(i));
    }
    for (int64_t d = 0; d < s.ld; d += W<A>) store(to + d, step_of_rows<T>(row, 0, d));
  }
}

// What a left-out value times a weight does to a sum: bits, and the order does not matter.
constexpr int32_t kPlusInf = 1, kMinusInf = 2, kNaN = 4, kZeroTimesInf = 8;

// Adds the NaN and inf that stage_values left out to the `rows` rows of out that see them.
template <class T>
void add_left_out_values(const LeftOut& left_out, const bool* seen, const StepRows<T>& step, int64_t D, int64_t rows,
                         Scratch<T>& s, Accumulate<T>* out) {
  using A = Accumulate<T>;
  typedef IVec<A> I;
  const I none{};
  const Element<T> no_weight{};
  const Vec<A> inf = splat(A(kInf)), nan = splat(A(__builtin_nanf("")));
  for (int64_t i = 0; i < left_out.count; ++i) {
    const T* v = step.v[left_out.keys[i]];
    for (int64_t d = 0; d < D; d += W<A>) {
      const Vec<A> x = D - d >= W<A> ? load(v + d) : load_first(v + d, D - d);
      const I kinds = ((x == inf) & kPlusInf) | ((x == -inf) & kMinusInf) | ((x != x) & kNaN);
      store(s.left_out_kinds + i * s.ld + d, (Vec<A>)kinds);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    A* sums = out + r * s.ld;
    bool settled = true;  // NaN in every element, and so it stays
    for (int64_t d = 0; d < D && settled; d += W<A>) {
      const Vec<A> sum = load(sums + d);
      settled = !any_above(sum, -inf) && !any_above(inf, sum);
    }
    if (settled) continue;
    const A *weighted[kStep], *zero[kStep];  // kinds of the keys that the row sees, by their weight
    int64_t weighted_count = 0, zero_count = 0;
    for (int64_t i = 0; i < left_out.count; ++i) {
      const bool is_zero = memcmp(s.weights + r * kStep + left_out.keys[i], &no_weight, sizeof no_weight) == 0;
      weighted[weighted_count] = zero[zero_count] = s.left_out_kinds + i * s.ld;
      weighted_count += seen[r * kStep + i] && !is_zero;
      zero_count += seen[r * kStep + i] && is_zero;
    }
    const auto add = [&](int64_t d, auto count) {
      constexpr int N = decltype(count)::value;
      I kinds[N] = {};
      for (int64_t i = 0; i < zero_count; ++i)
        for (int n = 0; n < N; ++n) kinds[n] |= (I)load(zero[i] + d + n * W<A>);
      for (I& k : kinds) k = (k & kNaN) | (((k & (kPlusInf | kMinusInf)) != none) & kZeroTimesInf);
      for (int64_t i = 0; i < weighted_count; ++i)
        for (int n = 0; n < N; ++n) kinds[n] |= (I)load(weighted[i] + d + n * W<A>);
      for (int n = 0; n < N; ++n) {
        const I k = kinds[n];
        Vec<A> sum = load(sums + d + n * W<A>);
        sum = (k & kPlusInf) != none ? sum + inf : sum;
        sum = (k & kMinusInf) != none ? sum - inf : sum;
        sum = (k & kZeroTimesInf) != none ? sum + inf * Vec<A>{} : sum;
        sum = (k & kNaN) != none ? sum + nan : sum;
        store(sums + d + n * W<A>, sum);
      }
    };
    int64_t d = 0;
    for (; d + 4 * W<A> <= s.ld; d += 4 * W<A>) add(d, Constant<4>{});
    for (; d < D; d += W<A>) add(d, Constant<1>{});
  }
}

// ------------------------------------------------------------------------------------------------ one step

// Sums over head_dim in blocks: product(d, depth, to) is the block from d on, `rows` rows of kStep scores.
template <class T, class F>
ATTN_INLINE void sum_depth_blocks(int64_t D, int64_t rows, Accumulate<T>* scores, Accumulate<T>* partial,
                                  const F& product) {
  product(0, min_of(kDepthBlock, D), scores);
  for (int64_t d = kDepthBlock; d < D; d += kDepthBlock) {
    product(d, min_of(kDepthBlock, D - d), partial);
    for (int64_t i = 0; i < rows * kStep; ++i) scores[i] += partial[i];
  }
}

// Few query rows wait for memory, and the core has room for 16 lines under way. So the rows kAhead keys later are asked
// for evenly, as many bytes as the products have read, and each row at once: its lines are neighbours in memory. Keys
// come to L2 that way, and from there to L1 a chunk before they are transposed, which reads 16 rows at a time.
template <class T>
struct AskForRows : NothingBetween {
  const T* const* rows;  // to ask for
  int64_t left;          // of them
  int64_t D, row_bytes;
  int64_t bytes = 0;                    // read, and not asked for yet
  const T* const* soon_rows = nullptr;  // of the next chunk, as many as a vector has lanes
  int64_t offset = 0;                   // of the elements that are read

  // The rows kAhead behind chunk j of a step.
  AskForRows(const T* const (&step)[kStep], int64_t count, const T* const (&next)[kStep], int64_t next_count, int64_t j,
             int64_t head_dim)
      : D(head_dim), row_bytes(round_up(head_dim * int64_t(sizeof(T)), 64)) {
    const bool this_step = j + kAhead < kStep;
    const int64_t first = this_step ? j + kAhead : j + kAhead - kStep;
    rows = (this_step ? step : next) + first;
    left = min_of(kChunk, (this_step ? count : next_count) - first);
  }
  ATTN_INLINE void operator()(int64_t read) {
    bytes += read;
    while (bytes >= row_bytes && left > 0) {
      bytes -= row_bytes;
      ask();
    }
  }
  ATTN_INLINE void line(int64_t i, int row) const {
    if constexpr (kVectorBytes == 64) __builtin_prefetch(soon_rows[row] + offset + i, 0, 3);
  }
  ATTN_INLINE void ask() {
    prefetch_row<0>(*rows++, D);
    --left;
  }
  ATTN_INLINE void finish() {
    while (left > 0) ask();
  }
};

// The scores of row r of the tile, (columns), become weights; what the row has accumulated is rescaled.
template <class T>
ATTN_INLINE void weigh_row(const AttentionParams& p, const Tile& t, int64_t r, int64_t first, int64_t count, bool plain,
                           int64_t columns, const LeftOut& left_out, bool* seen, Accumulate<T>* scores,
                           Element<T>* weights, Scratch<T>& s) {
  using A = Accumulate<T>;
  if (columns == 0) {
    memset(seen, 0, size_t(left_out.count));
    return;
  }
  if (s.prescale)
    for (int64_t j = 0; j < columns; j += W<A>) store(scores + j, s.scale.times(load(scores + j)));
  if (!plain) transform_row(p, t, r, first, count, columns, scores);
  for (int64_t i = 0; i < left_out.count; ++i)
    seen[i] = left_out.keys[i] < columns && scores[left_out.keys[i]] != A(-kInf);
  auto& state = s.state[r];
  const A factor = columns == kStep ? state.update(scores, kStep, s.exponent, weights)  // a constant unrolls the loops
                                    : state.update(scores, columns, s.exponent, weights);
  if (factor == A(1)) return;
  A* out = s.out + r * s.ld;
  for (int64_t d = 0; d < s.ld; d += W<A>) store(out + d, load(out + d) * splat(factor));
}

// Adds the keys first .. first + kStep - 1 to the split's state.
template <class T>
void Scratch<T>::add_step(const AttentionParams& p, const Tile& t, int64_t first) {
  Scratch& s = *this;
  const bool few = t.rows <= kFewRows;
  const int now = step_first[1] == first;
  const bool fresh = step_first[now] != first;
  if (fresh) step_rows[now].locate(p, t, first);
  const StepRows<T>&step = step_rows[now], &next = step_rows[!now];
  step_first[!now] = first + kStep;
  step_rows[!now].locate(p, t, first + kStep);
  const T* none[W<A>];
  if (few)
    for (const T*& row : none) row = step.k[0];
  if (few && fresh) {
    step.prefetch_keys(0, kAhead, p.D);
    step.prefetch_values(0, kAhead, p.D);
  }
  const bool plain = step_is_plain(p, t, first);
  const bool in_place = few && plain && p.D == ld;  // few rows: widening on the way is cheaper
  const auto key = [&](int64_t j) { return step.k[j]; };
  LeftOut left_out;
  bool seen[kGroupRows * kStep];
  if (!few) pack_transposed<T>(step.count, p.D, key, keys, kStep);
  if (!in_place) stage_values(step, p.D, plain, s, left_out);

  for (int64_t begin = 0; begin < t.rows; begin += kGroupRows) {
    const int64_t end = min_of(t.rows, begin + kGroupRows);
    int64_t columns[kGroupRows];  // of the scores, that some row of the register block sees
    for (int64_t r = begin; r < end; r += kGemmRows) {
      const int64_t rows = few ? end - r : min_of<int64_t>(kGemmRows, end - r);
      const KeyRange last = visible_keys(p, t.position(r + rows - 1), t.seq.Tk);
      const int64_t seen_keys = plain ? kStep : min_of(step.count, max_of<int64_t>(0, last.last + 1 - first));
      A* to = scores + (r - begin) * kStep;
      for (int64_t i = 0; i < rows; ++i) columns[r - begin + i] = round_up(seen_keys, W<A>);
      if (few) {
        sum_depth_blocks<T>(p.D, rows, to, partial, [&](int64_t d, int64_t depth, A* c) {
          for (int64_t j = 0; j < step.count; j += kChunk) {
            const auto row = [&](int64_t i) { return step.k[j + i] + d; };
            AskForRows<T> ahead(step.k, step.count, next.k, next.count, j, p.D);
            if (d > 0) ahead.left = 0;
            if (j + 2 * kChunk <= step.count)
              ahead.soon_rows = step.k + j + kChunk;
            else if (j + kChunk == kStep && next.count >= kChunk)
              ahead.soon_rows = next.k;
            else
              ahead.soon_rows = none;
            ahead.offset = d;
            gemm_transposed_between<T>(rows, min_of(kChunk, step.count - j), depth, q + d, ld, row, ahead, c + j,
                                       kStep);
            ahead.finish();
          }
        });
        break;
      }
      next.prefetch_keys(r * kStep / t.rows, (r + rows) * kStep / t.rows, p.D);
      if (seen_keys == 0) continue;
      sum_depth_blocks<T>(p.D, rows, to, partial, [&](int64_t d, int64_t depth, A* c) {
        gemm<T, false>(rows, columns[r - begin], ceil_div(depth, int64_t(kPerStep)), q + r * ld + d, ld,
                       keys + d / kPerStep * kStep, kStep, c, kStep);
      });
    }
    for (int64_t r = begin; r < end; ++r)
      weigh_row<T>(p, t, r, first, step.count, plain, columns[r - begin], left_out, seen + (r - begin) * kStep,
                   scores + (r - begin) * kStep, weights + (r - begin) * kStep, s);
    for (int64_t r = begin; r < end; r += kGemmRows) {
      const int64_t rows = min_of<int64_t>(kGemmRows, end - r);
      const Element<T>* w = weights + (r - begin) * kStep;
      if (in_place) {
        for (int64_t j = 0; j < kStep; j += kChunk) {
          AskForRows<T> ahead(step.v, step.count, next.v, next.count, j, p.D);
          const auto row = [&](int64_t i) { return step.v[j + i]; };
          gemm_from_rows<T, true>(end - begin, p.D, kChunk, w + j, kStep, row, ahead, out, ld);
          ahead.finish();
        }
        break;
      }
      next.prefetch_values(r * kStep / t.rows, (r + rows) * kStep / t.rows, p.D);
      gemm<T, true>(rows, ld, ceil_div(min_of(columns[r - begin], step.count), int64_t(kPerStep)), w, kStep, values, ld,
                    out + r * ld, ld);
    }
    if (left_out.count > 0) add_left_out_values(left_out, seen, step, p.D, end - begin, s, out + begin * ld);
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------- launchers

int64_t attention_workspace(const AttentionParams& p, int workers) {
  int64_t bytes = 0;
  dispatch(p.dtype, [&](auto t) { bytes = workspace<Scratch<decltype(t)>>(p, workers); });
  return bytes;
}

void attention(const AttentionParams& p, const Launch& launch) {
  dispatch(p.dtype, [&](auto t) { attend<decltype(t), Scratch<decltype(t)>>(p, launch); });
}

}  // namespace attn_ext::ATTN_EXT_ISA
