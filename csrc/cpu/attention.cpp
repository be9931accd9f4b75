// Exact attention over dense, varlen and paged keys: prefill, chunked prefill and decode are one kernel. The tiles,
// steps and splits it walks are those of attention_tiles.h; here is what it does with a step of 64 keys.
#include "cpu/attention_tiles.h"
#include "cpu/gemm.h"
#include "cpu/kernels.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

constexpr int64_t kDepthBlock = 256;  // head_dim summed at a time

// ---------------------------------------------------------------------------------------- scratch of a worker

template <class T>
struct Scratch {
  using A = Accumulate<T>;
  static constexpr int kPerStep = Product<T>::kPerStep;  // keys or elements of a head that one product takes
  Element<T>* q;                                         // (rows, D)
  A* keys;                                               // (D / kPerStep, kStep) keys of a step, transposed
  A* values;                                             // (kStep / kPerStep, D)
  A* scores;                                             // (rows, kStep), then weights
  Element<T>* weights;           // (rows, kStep): the scores themselves unless products take another type
  Element<T>* filtered;          // (kPerStep, D) values without NaN and inf
  A* partial;                    // (rows, kStep) a depth block's share of the scores
  A* out;                        // (rows, D) weighted values of the current split
  A* total;                      // (rows, D) of all splits before
  SoftmaxState<A>* split_state;  // (rows)
  SoftmaxState<A>* total_state;  // (rows)
  int64_t ld;                    // D rounded up to whole vectors: row stride of q, values, out and total

  static int64_t stride(int64_t D) { return round_up(D, W<A>); }
  static int64_t bytes(int64_t D) {
    const int64_t ld = stride(D);
    const int64_t elements = 3 * kTileRows * ld + 2 * kStep * ld + 3 * kTileRows * kStep + kPerStep * ld;
    return round_up(2 * kTileRows * int64_t(sizeof(SoftmaxState<A>)) + elements * int64_t(sizeof(A)), 64);
  }
  Scratch(char* memory, int64_t D) : ld(stride(D)) {
    split_state = reinterpret_cast<SoftmaxState<A>*>(memory);
    total_state = split_state + kTileRows;
    out = reinterpret_cast<A*>(total_state + kTileRows);
    total = out + kTileRows * ld;
    keys = total + kTileRows * ld;
    values = keys + kStep * ld;
    scores = values + kStep * ld;
    partial = scores + kTileRows * kStep;
    q = reinterpret_cast<Element<T>*>(partial + kTileRows * kStep);
    filtered = q + kTileRows * ld;
    weights = filtered + kPerStep * ld;
    if constexpr (sizeof(Element<T>) == sizeof(A)) weights = scores;
  }
  void load_queries(const AttentionParams& p, const Tile& t);
  void add_step(const AttentionParams& p, const Tile& t, int64_t first);
};

template <class T>
void Scratch<T>::load_queries(const AttentionParams& p, const Tile& t) {
  const T* from = static_cast<const T*>(p.q) + t.seq.q_offset;
  for (int64_t r = 0; r < t.rows; ++r)
    convert_row(from + t.token(r) * p.q_row_stride + t.head(r) * p.q_head_stride, p.D, q + r * ld);
}

// ------------------------------------------------------------------------------------------------ one step

// scores (rows, kStep) = q k^T, not yet scaled
template <class T>
void multiply_keys(const Tile& t, int64_t D, const StepRows<T>& rows, Scratch<T>& s) {
  const bool few = t.rows <= kFewRows;
  if (!few) pack_transposed<T>(rows.count, D, [&](int64_t j) { return rows.k[j]; }, s.keys, kStep);
  for (int64_t d = 0; d < D; d += kDepthBlock) {
    auto* to = d == 0 ? s.scores : s.partial;
    const int64_t depth = min_of(kDepthBlock, D - d), per_step = Product<T>::kPerStep;
    if (few)
      gemm_transposed<T>(t.rows, rows.count, depth, s.q + d, s.ld, [&](int64_t j) { return rows.k[j] + d; }, to, kStep);
    else
      gemm<T>(t.rows, round_up(rows.count, W<Accumulate<T>>), ceil_div(depth, per_step), s.q + d, s.ld,
              s.keys + d / per_step * kStep, kStep, to, kStep, false);
    if (d > 0)
      for (int64_t i = 0; i < t.rows * kStep; ++i) s.scores[i] += s.partial[i];
  }
}

// Copies row v to `to` without its NaN and inf, which a weight of 0 would turn into NaN; returns whether it has any.
template <class T>
bool filter_row(const T* v, int64_t D, Element<T>* to) {
  using A = Accumulate<T>;
  convert_row(v, D, to);
  Vec<A> poison{};
  for (int64_t d = 0; d < D; d += W<A>) poison += load(to + d) * splat(A(0));  // 0, or NaN
  if (sum_lanes<A>(poison) == A(0)) return false;
  for (int64_t d = 0; d < D; ++d) {
    const A value = to_accumulate(to[d]);
    if (!(value - value == A(0))) to[d] = Element<T>{};
  }
  return true;
}

// The keys of a step whose values hold NaN or inf, left out where some row of the tile may not see them.
struct LeftOut {
  int64_t keys[kStep];
  int64_t count = 0;
  bool seen[kTileRows * kStep];  // (rows, count)
};

// values (kStep / kPerStep, D) from the step's rows.
template <class T>
void stage_values(const StepRows<T>& rows, int64_t D, bool plain, Scratch<T>& s, LeftOut& left_out) {
  using A = Accumulate<T>;
  constexpr int64_t per_step = Product<T>::kPerStep;
  const auto filter = [&](int64_t j, Element<T>* to) {
    if (filter_row(rows.v[j], D, to)) left_out.keys[left_out.count++] = j;
  };
  for (int64_t j = 0; j < rows.count; j += per_step) {
    A* to = s.values + j / per_step * s.ld;
    if constexpr (per_step == 1) {
      if (plain)
        convert_row(rows.v[j], D, to);
      else
        filter(j, to);
    } else {
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
}

// The NaN and inf that stage_values left out, for the rows that do see them. The staged values are used up by now.
template <class T>
void add_left_out_values(const Tile& t, const StepRows<T>& rows, int64_t D, const LeftOut& left_out, Scratch<T>& s) {
  using A = Accumulate<T>;
  for (int64_t i = 0; i < left_out.count; ++i) {
    const int64_t j = left_out.keys[i];
    A* value = s.values;
    for (int64_t d = 0; d < D; d += W<A>) {
      const int64_t lanes = min_of<int64_t>(W<A>, D - d);
      const Vec<A> v = lanes == W<A> ? load(rows.v[j] + d) : load_first(rows.v[j] + d, lanes);
      store(value + d, (v - v == Vec<A>{}) ? Vec<A>{} : v);
    }
    for (int64_t r = 0; r < t.rows; ++r) {
      if (!left_out.seen[r * kStep + i]) continue;
      A* out = s.out + r * s.ld;
      const Vec<A> weight = splat(s.scores[r * kStep + j]);
      for (int64_t d = 0; d < D; d += W<A>) {
        const Vec<A> v = load(value + d), sum = load(out + d);
        store(out + d, (v == Vec<A>{}) ? sum : sum + weight * v);
      }
    }
  }
}

// Adds the keys first .. first + kStep - 1 to the split's state.
template <class T>
void Scratch<T>::add_step(const AttentionParams& p, const Tile& t, int64_t first) {
  Scratch& s = *this;
  const StepRows<T> rows(p, t, first);
  if (t.rows <= kFewRows) StepRows<T>(p, t, first + kStep).prefetch(p.D);
  const bool plain = step_is_plain(p, t, first);
  multiply_keys(t, p.D, rows, s);
  const bool in_place = plain && t.rows <= kFewRows && p.D == s.ld;  // few rows: widening on the way is cheaper
  LeftOut left_out;
  if (!in_place) stage_values(rows, p.D, plain, s, left_out);

  for (int64_t r = 0; r < t.rows; ++r) {
    A* scores = s.scores + r * kStep;
    Vec<A> max = splat(A(-kInf));
    for (int64_t j = 0; j < kStep; j += W<A>) {
      const Vec<A> scaled = load(scores + j) * splat(A(p.scale));
      store(scores + j, scaled);
      max = vmax(max, scaled);
    }
    if (!plain) max = transform_row(p, t, r, first, rows.count, scores);
    for (int64_t i = 0; i < left_out.count; ++i) left_out.seen[r * kStep + i] = scores[left_out.keys[i]] != A(-kInf);
    const A factor = s.split_state[r].update(scores, kStep, max);
    if constexpr (sizeof(Element<T>) != sizeof(A)) store_row(s.weights + r * kStep, scores, kStep);
    if (factor != A(1))
      for (int64_t d = 0; d < s.ld; d += W<A>) store(s.out + r * s.ld + d, load(s.out + r * s.ld + d) * splat(factor));
  }
  if (in_place)
    gemm_from_rows<T>(t.rows, p.D, kStep, s.weights, kStep, [&](int64_t j) { return rows.v[j]; }, s.out, s.ld, true);
  else
    gemm<T>(t.rows, s.ld, ceil_div(rows.count, int64_t(Product<T>::kPerStep)), s.weights, kStep, s.values, s.ld, s.out,
            s.ld, true);
  if (left_out.count > 0) add_left_out_values(t, rows, p.D, left_out, s);
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
