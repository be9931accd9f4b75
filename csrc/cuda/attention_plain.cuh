// Attention without tensor cores: float32, and any head_dim. Made to be right for every size, not to be fast.
//
// A block of 128 threads owns 16 query rows and up to 128 columns of the output; wider heads take several blocks, each
// of which computes the scores anew. A step of 64 keys:
//
//   scores    thread = key and half of the rows, over pieces of head_dim that lie in shared memory as float
//   softmax   warp w has rows 4 w .. 4 w + 3, a lane two keys
//   values    thread = column, all 16 rows in registers; a value is read once, straight from global memory
#pragma once

#include "cuda/attention_problem.cuh"
#include "cuda/decode.cuh"

namespace attn_ext::cuda {

struct PlainShape {
  static constexpr int kThreads = 128;
  static constexpr int kRows = 16;
  static constexpr int kWarpRows = kRows / (kThreads / 32);
  static constexpr int kStep = 64;       // keys
  static constexpr int kDepth = 32;      // of head_dim in a piece
  static constexpr int kColumns = 128;   // of the output, one a thread
  static constexpr int kMaxPieces = 32;  // of Q that stay in shared memory; longer rows are read in every step

  ATTN_HOST_DEVICE static int pieces(int64_t D) { return int(ceil_div<int64_t>(D, kDepth)); }
  ATTN_HOST_DEVICE static bool q_stays(int64_t D) { return pieces(D) <= kMaxPieces; }
};

// Shared memory of a block. Pieces of Q follow it, (depth, row).
struct PlainShared {
  int64_t key_row[PlainShape::kStep], value_row[PlainShape::kStep];  // offsets, elements
  float weights[PlainShape::kStep][PlainShape::kRows + 4];           // scores, then weights; -0 where a key is not seen
  float keys[PlainShape::kStep][PlainShape::kDepth + 1];             // a piece; the padding avoids bank conflicts
  float mine[PlainShape::kRows], other[PlainShape::kRows];           // factors of rows

  ATTN_DEVICE float* queries() { return reinterpret_cast<float*>(this + 1); }
  static int64_t bytes(int64_t D) {
    const int pieces = PlainShape::q_stays(D) ? PlainShape::pieces(D) : 1;
    return int64_t(sizeof(PlainShared)) + pieces * PlainShape::kDepth * PlainShape::kRows * int64_t(sizeof(float));
  }
};
static_assert(sizeof(PlainShared) % 16 == 0);

template <class T>
ATTN_DEVICE void locate_keys(const AttentionWork& w, const Tile& t, int first, PlainShared& shared) {
  const int r = int(simt::thread_idx().x), key = first + r;
  if (r >= PlainShape::kStep || key < t.keys.first || key >= t.keys.end) return;
  int64_t k = t.k_offset + t.kv_head * w.p.k_head_stride, v = t.v_offset + t.kv_head * w.p.v_head_stride;
  int row = key;
  if (t.blocks) {
    const int page = w.by_block_size.quotient(key);
    const int64_t block = cache_block(w, t, page);
    row = key - page * int(w.p.block_size);
    k += block * w.p.k_batch_stride;
    v += block * w.p.v_batch_stride;
  }
  simt::sts(&shared.key_row[r], k + row * w.p.k_row_stride);
  simt::sts(&shared.value_row[r], v + row * w.p.v_row_stride);
}

// score[i] = product of query row 8 half + i and key thread % 64 of the step, half = thread / 64.
template <class T>
ATTN_DEVICE void multiply_keys(const AttentionWork& w, const Tile& t, PlainShared& shared, int first, bool first_step,
                               float (&score)[8]) {
  using C = PlainShape;
  const int thread = int(simt::thread_idx().x), column = thread % C::kDepth;
  constexpr int kRowsAtOnce = C::kThreads / C::kDepth;
  ATTN_UNROLL
  for (int i = 0; i < 8; ++i) score[i] = 0.0f;

  ATTN_NO_UNROLL
  for (int piece = 0; piece < C::pieces(w.p.D); ++piece) {
    const int d = piece * C::kDepth + column;
    float* const q = shared.queries() + (C::q_stays(w.p.D) ? piece * C::kDepth * C::kRows : 0);
    simt::sync_threads();  // nobody reads the last piece any more, and the keys are located
    ATTN_UNROLL
    for (int r = thread / C::kDepth; r < C::kStep; r += kRowsAtOnce) {
      const bool valid = d < w.p.D && first + r >= t.keys.first && first + r < t.keys.end;
      float x = 0.0f;
      if (valid) x = simt::to_float(simt::ldg(static_cast<const T*>(w.p.k) + simt::lds(&shared.key_row[r]) + d));
      simt::sts(&shared.keys[r][column], x);
    }
    if (first_step || !C::q_stays(w.p.D)) {
      ATTN_NO_UNROLL
      for (int r = thread / C::kDepth; r < C::kRows; r += kRowsAtOnce) {
        float x = 0.0f;
        if (d < w.p.D && t.first_row + r < t.rows) {
          const QueryRow row = query_row(w, t, t.first_row + r);
          x = simt::to_float(simt::ldg(static_cast<const T*>(w.p.q) + t.q_offset + row.token * w.p.q_row_stride +
                                       row.head * w.p.q_head_stride + d));
        }
        simt::sts(q + column * C::kRows + r, x);
      }
    }
    simt::sync_threads();
    const float* const key = shared.keys[thread % C::kStep];
    const simt::Float4* const rows = reinterpret_cast<const simt::Float4*>(q + thread / C::kStep * 8);
    ATTN_NO_UNROLL
    for (int j = 0; j < C::kDepth; ++j) {
      const float k = simt::lds(key + j);
      const simt::Float4 a = simt::lds(rows + j * C::kRows / 4), b = simt::lds(rows + j * C::kRows / 4 + 1);
      const float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      ATTN_UNROLL
      for (int i = 0; i < 8; ++i) score[i] = simt::fma(x[i], k, score[i]);
    }
  }
}

// Scores in shared memory become weights, of this warp's rows; shared.mine the factors for what was accumulated before.
ATTN_DEVICE void weigh(float c, PlainShared& shared, SoftmaxState (&state)[PlainShape::kWarpRows]) {
  using C = PlainShape;
  static_assert(C::kWarpRows == 4 && C::kStep == 64);
  const int lane = simt::lane(), row = simt::warp() * C::kWarpRows;
  simt::Float4* const at[2] = {reinterpret_cast<simt::Float4*>(&shared.weights[lane][row]),
                               reinterpret_cast<simt::Float4*>(&shared.weights[lane + 32][row])};
  const simt::Float4 low = simt::lds(at[0]), high = simt::lds(at[1]);
  float x[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
  ATTN_UNROLL
  for (int r = 0; r < C::kWarpRows; ++r) {
    const float factor = raise(state[r], warp_max(simt::max(x[0][r], x[1][r])), c);
    const float base = softmax_base(state[r].max, c);
    const bool huge = is_huge(base);
    ATTN_UNROLL
    for (int i = 0; i < 2; ++i)
      x[i][r] = x[i][r] == -kInf ? -0.0f
                : huge           ? softmax_weight_huge(x[i][r], c, state[r].max)
                                 : softmax_weight(x[i][r], c, base);
    state[r].sum = simt::fma(state[r].sum, factor, warp_sum(x[0][r] + x[1][r]));
    if (lane == 0) simt::sts(&shared.mine[row + r], factor);
  }
  ATTN_UNROLL
  for (int i = 0; i < 2; ++i) simt::sts(at[i], simt::Float4{x[i][0], x[i][1], x[i][2], x[i][3]});
}

// out = out mine + the weights times this thread's column of V; keys j .. end - 1 of the step.
template <class T>
ATTN_DEVICE void multiply_values(const T* values, PlainShared& shared, int j, int end,
                                 float (&out)[PlainShape::kRows]) {
  ATTN_UNROLL
  for (int r = 0; r < PlainShape::kRows; ++r) out[r] *= simt::lds(&shared.mine[r]);
  ATTN_NO_UNROLL
  for (; j < end; ++j) {
    const float v = simt::to_float(simt::ldg(values + simt::lds(&shared.value_row[j])));
    const bool special = (simt::float_bits(v) & 0x7f800000u) == 0x7f800000u;  // inf or NaN
    ATTN_UNROLL
    for (int r = 0; r < PlainShape::kRows; r += 4) {
      const simt::Float4 p = simt::lds(reinterpret_cast<const simt::Float4*>(&shared.weights[j][r]));
      const float weight[4] = {p.x, p.y, p.z, p.w};
      ATTN_UNROLL
      for (int i = 0; i < 4; ++i)
        if (!special || simt::float_bits(weight[i]) != 0x80000000u) out[r + i] = simt::fma(weight[i], v, out[r + i]);
    }
  }
}

template <class T>
ATTN_KERNEL(PlainShape::kThreads, 2)
attention_plain_kernel(ATTN_CONSTANT_PARAM AttentionWork w) {
  using C = PlainShape;
  Tile t;
  if (!find_tile(w, int(simt::block_idx().x), C::kRows, t)) return;
  const KeyRange plain = plain_keys(w, t, C::kRows);
  const int thread = int(simt::thread_idx().x), lane = simt::lane(), warp_row = simt::warp() * C::kWarpRows;
  const int begin = t.keys.first / C::kStep * C::kStep, end = t.keys.end;
  const int64_t d = int64_t(t.column) * C::kColumns + thread;  // this thread's column
  PlainShared& shared = *reinterpret_cast<PlainShared*>(ATTN_SHARED);

  float out[C::kRows], total[C::kRows];
  SoftmaxState state[C::kWarpRows], total_state[C::kWarpRows];
  ATTN_UNROLL
  for (int r = 0; r < C::kRows; ++r) out[r] = total[r] = 0.0f;
  ATTN_UNROLL
  for (int r = 0; r < C::kWarpRows; ++r) state[r] = total_state[r] = SoftmaxState{-kInf, 0.0f};

  ATTN_NO_UNROLL
  for (int first = begin; first < end; first += C::kStep) {
    const int next = first + C::kStep;
    simt::sync_threads();  // nobody uses the last step's rows and weights any more
    locate_keys<T>(w, t, first, shared);
    float score[8];
    multiply_keys<T>(w, t, shared, first, first == begin, score);
    const int key = thread % C::kStep, half = thread / C::kStep;
    if (first < plain.first || next > plain.end) {
      ATTN_UNROLL
      for (int i = 0; i < 8; ++i) {
        float x[1] = {score[i]};
        transform_scores<T>(w, t, query_row(w, t, t.first_row + 8 * half + i), [&](int) { return first + key; }, x);
        score[i] = x[0];
      }
    }
    simt::Float4* const to = reinterpret_cast<simt::Float4*>(&shared.weights[key][8 * half]);
    simt::sts(to, simt::Float4{score[0], score[1], score[2], score[3]});
    simt::sts(to + 1, simt::Float4{score[4], score[5], score[6], score[7]});
    simt::sync_threads();
    weigh(w.score.c, shared, state);
    simt::sync_threads();
    if (d < w.p.D)
      multiply_values(static_cast<const T*>(w.p.v) + d, shared, max_of(0, t.keys.first - first),
                      min_of(C::kStep, end - first), out);

    if (w.splits > 1 || (next < end && next % kSplit != 0)) continue;
    // The split ends here; add it to the total.
    simt::sync_threads();
    ATTN_UNROLL
    for (int r = 0; r < C::kWarpRows; ++r) {
      const SoftmaxFactors f = merge(total_state[r], state[r], w.score.c);
      state[r] = {-kInf, 0.0f};
      if (lane == 0) {
        simt::sts(&shared.mine[warp_row + r], f.mine);
        simt::sts(&shared.other[warp_row + r], f.other);
      }
    }
    simt::sync_threads();
    ATTN_UNROLL
    for (int r = 0; r < C::kRows; ++r) {
      total[r] = merge_values(total[r], out[r], {simt::lds(&shared.mine[r]), simt::lds(&shared.other[r])});
      out[r] = 0.0f;
    }
  }

  if (w.splits > 1) {
    ATTN_UNROLL
    for (int r = 0; r < C::kWarpRows; ++r) {
      const int row = t.first_row + warp_row + r;
      if (t.column == 0 && lane == 0 && row < t.rows) simt::st(w.partial_state + t.partial(w, row), state[r]);
    }
    ATTN_UNROLL
    for (int r = 0; r < C::kRows; ++r)
      if (begin < end && d < w.p.D && t.first_row + r < t.rows)
        simt::st(w.partial_out + t.partial(w, t.first_row + r) * w.p.D + d, out[r]);
    return;
  }
  simt::sync_threads();
  ATTN_UNROLL
  for (int r = 0; r < C::kWarpRows; ++r) {
    const int row = t.first_row + warp_row + r;
    const QueryRow q = query_row(w, t, row);
    const SoftmaxResult result = finish(total_state[r], sink_of(w.p, q.head), w.score);
    if (lane == 0) simt::sts(&shared.mine[warp_row + r], result.factor);
    if (t.column == 0 && lane == 0 && row < t.rows) store_lse(w.p, t, q, result.lse);
  }
  simt::sync_threads();
  ATTN_UNROLL
  for (int r = 0; r < C::kRows; ++r)
    if (d < w.p.D && t.first_row + r < t.rows)
      simt::st(output_row<T>(w.p, t, query_row(w, t, t.first_row + r)) + d,
               simt::from_float<T>(total[r] * simt::lds(&shared.mine[r])));
}

}  // namespace attn_ext::cuda
