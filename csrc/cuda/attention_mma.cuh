// Attention on tensor cores: bf16 or f16, head_dim a multiple of 16.
//
// A block of warps owns a tile of query rows, 16 or 32 of them a warp, and walks the keys in steps:
//
//   wait for K           barrier: K is there, nobody reads V any more     start copying V
//   S = Q K^T            tensor cores, S in registers
//   wait for V           barrier: V is there, nobody reads K any more     start copying the next K
//   S -> P               mask where needed, softmax in base 2
//   O += P V             P goes from accumulators to operands without leaving registers
//
// Q, K and V lie in shared memory as they come from global memory, the 16-byte chunks of a row permuted (TileRows) so
// that ldmatrix finds the same chunk of 8 consecutive rows in distinct banks.
//
// Decode is the same kernel with blocks of one warp and 16 rows: the instructions that make a row's bits are the same.
#pragma once

#include "cuda/attention_problem.cuh"
#include "cuda/decode.cuh"

namespace attn_ext::cuda {

// Geometry of one instantiation. kRowWarps x kColumnWarps warps: those with the same rows all compute the scores, and
// share the columns of the output, whose accumulators would not fit the registers of one.
template <class T_, int D_, int kRowWarps_, int kColumnWarps_, int kMTiles_, int kStep_>
struct MmaShape {
  using T = T_;
  static constexpr int D = D_;
  static constexpr int kRowWarps = kRowWarps_, kColumnWarps = kColumnWarps_;
  static constexpr int kMTiles = kMTiles_;  // m16 tiles of a warp
  static constexpr int kStep = kStep_;      // keys
  static constexpr int kThreads = 32 * kRowWarps * kColumnWarps;
  static constexpr int kMinBlocks = 256 / kThreads;  // per multiprocessor: 255 registers a thread
  static constexpr int kWarpRows = 16 * kMTiles;
  static constexpr int kRows = kWarpRows * kRowWarps;
  static constexpr int kColumns = D / kColumnWarps;  // of the output, of a warp
  static constexpr int kNBlocks = kStep / 8;         // n8 blocks of S
  static constexpr int kDBlocks = kColumns / 8;      // n8 blocks of O
  static_assert(kColumns % 16 == 0 && kStep % 16 == 0 && kStep <= 64 && kSplit % kStep == 0);

  using Scores = float[kMTiles][kNBlocks][4];  // accumulator fragments
  using Out = float[kMTiles][kDBlocks][4];
  using States = SoftmaxState[kMTiles][2];  // of rows g and g + 8; the sum over this lane's columns

  // Shared memory, in this order. Q's space is the output's at the end.
  static constexpr int kQBytes = kRows * D * 2, kKBytes = kStep * D * 2, kVBytes = kKBytes;
  // Values and states over the splits so far, where a block walks several. Then the pages.
  static constexpr int kTotalValues = kRows * D * 4,
                       kTotalBytes = kTotalValues + kColumnWarps * kRows * int(sizeof(SoftmaxState));
};

// ---- tiles in shared memory ---------------------------------------------------------------------------------------

// Rows of D 16-bit elements.
template <int D>
struct TileRows {
  static constexpr int kChunks = D / 8;
  static constexpr int kSpread = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;
  static_assert(kChunks % 2 == 0);

  // Where 16-byte chunk `chunk` of `row` lies.
  ATTN_DEVICE static int offset(int row, int chunk) {
    return row * (2 * D) + 16 * (chunk ^ (row / (8 / kSpread) % kSpread));
  }
  // The address of row first_row + lane_row, chunk 2 pair + side, of a tile; first_row is a multiple of 8. The lane's
  // part is the same for many first_row and pair, which the compiler knows.
  ATTN_DEVICE static const char* at(const char* tile, int first_row, int lane_row, int pair, int side) {
    const int chunk = 2 * pair, swizzle = lane_row / (8 / kSpread) % kSpread;
    const char* lane_part = tile + (lane_row * (2 * D) + 16 * ((chunk % kSpread + side) ^ swizzle));
    return lane_part + (first_row * (2 * D) + 16 * (chunk / kSpread * kSpread));
  }
};

// f(row, chunk) for the chunks of a tile that this thread copies, at most kBatch of them unrolled: more would not hide
// more latency, and take code and registers.
template <int D, int kRows, int kThreads, int kBatch, class F>
ATTN_DEVICE void for_own_chunks(const F& f) {
  constexpr int chunks = TileRows<D>::kChunks, count = kRows * chunks / kThreads;
  static_assert(kRows * chunks % kThreads == 0);
  constexpr int batch = [] {
    int n = kBatch;
    while (count % n != 0) --n;
    return n;
  }();
  const int thread = int(simt::thread_idx().x);
  ATTN_NO_UNROLL
  for (int first = 0; first < count; first += batch) {
    ATTN_UNROLL
    for (int i = 0; i < batch; ++i) {
      if constexpr (kThreads % chunks == 0) {  // always the same chunk
        f(thread / chunks + (first + i) * (kThreads / chunks), thread % chunks);
      } else {
        const int index = thread + (first + i) * kThreads;
        f(index / chunks, index % chunks);
      }
    }
  }
}

// Rows of global memory into a tile: row(r), or zeros where not valid(r); then row(r) need not exist. By 16-byte
// vectors, asynchronously,
template <class T, int D, int kRows, int kThreads, class Row, class Valid>
ATTN_DEVICE void copy_vectors(char* tile, const Row& row, const Valid& valid SIMT_WHERE) {
  for_own_chunks<D, kRows, kThreads, 8>([&](int r, int chunk) {
    simt::cp_async16(tile + TileRows<D>::offset(r, chunk), row(r) + 8 * chunk, valid(r) ? 16 : 0 SIMT_AT);
  });
}

// or element by element, for rows that are not aligned to vectors.
template <class T, int D, int kRows, int kThreads, class Row, class Valid>
ATTN_DEVICE void copy_elements(char* tile, const Row& row, const Valid& valid SIMT_WHERE) {
  for_own_chunks<D, kRows, kThreads, 1>([&](int r, int chunk) {
    T* const to = reinterpret_cast<T*>(tile + TileRows<D>::offset(r, chunk));
    const T* const from = row(r) + 8 * chunk;
    ATTN_NO_UNROLL
    for (int i = 0; i < 8; ++i) simt::sts(to + i, valid(r) ? simt::ldg(from + i SIMT_AT) : T{0} SIMT_AT);
  });
}

template <class T>
inline constexpr uint32_t kExponentBits = 0;
template <>
inline constexpr uint32_t kExponentBits<simt::bf16> = 0x7f80;
template <>
inline constexpr uint32_t kExponentBits<simt::f16> = 0x7c00;

// Inf or NaN?
template <class T>
ATTN_DEVICE bool is_special(uint32_t bits) {
  return (bits & kExponentBits<T>) == kExponentBits<T>;
}

// Zeros for the inf and NaN among the values that this thread has copied, which would turn a weight of 0 into NaN;
// returns whether there were any.
template <class C>
ATTN_DEVICE bool leave_out_specials(char* values) {
  using T = typename C::T;
  bool found = false;
  for_own_chunks<C::D, C::kStep, C::kThreads, 2>([&](int r, int chunk) {
    char* at = values + TileRows<C::D>::offset(r, chunk);
    const simt::U32x4 v = simt::lds128(at);
    uint32_t words[4] = {v.x, v.y, v.z, v.w};
    bool special = false;
    ATTN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const bool low = is_special<T>(words[i]), high = is_special<T>(words[i] >> 16);
      special |= low || high;
      words[i] &= (low ? 0xffff0000u : 0xffffffffu) & (high ? 0x0000ffffu : 0xffffffffu);
    }
    if (special) simt::sts128(at, {words[0], words[1], words[2], words[3]});
    found |= special;
  });
  return found;
}

// ---- fragments ----------------------------------------------------------------------------------------------------

ATTN_DEVICE float quad_max(float x) {
  x = simt::max(x, simt::shfl_xor(x, 1));
  return simt::max(x, simt::shfl_xor(x, 2));
}

ATTN_DEVICE float quad_sum(float x) {
  x += simt::shfl_xor(x, 1);
  return x + simt::shfl_xor(x, 2);
}

// The first row of the tile, and the first column of the output, that is this warp's.
template <class C>
ATTN_DEVICE int first_warp_row() {
  return simt::warp() / C::kColumnWarps * C::kWarpRows;
}
template <class C>
ATTN_DEVICE int first_warp_column() {
  return simt::warp() % C::kColumnWarps * C::kColumns;
}

// The row of the tile that fragment row (m, half) of this lane is.
template <class C>
ATTN_DEVICE int tile_row(int m, int half) {
  return first_warp_row<C>() + 16 * m + 8 * half + simt::lane() / 4;
}

template <int m, int n>
ATTN_DEVICE void clear(float (&x)[m][n][4]) {
  ATTN_UNROLL
  for (int i = 0; i < m; ++i) {
    ATTN_UNROLL
    for (int j = 0; j < n; ++j) {
      ATTN_UNROLL
      for (int e = 0; e < 4; ++e) x[i][j][e] = 0.0f;
    }
  }
}

// Nothing seen.
template <class C>
ATTN_DEVICE void reset(typename C::States& state, typename C::Out& out) {
  clear(out);
  ATTN_UNROLL
  for (int m = 0; m < C::kMTiles; ++m) state[m][0] = state[m][1] = SoftmaxState{-kInf, 0.0f};
}

// s = the warp's rows of Q times K^T
template <class C>
ATTN_DEVICE void multiply_keys(const char* queries, const char* keys, typename C::Scores& s) {
  const int lane = simt::lane();
  queries += first_warp_row<C>() * 2 * C::D;
  clear(s);
  ATTN_UNROLL
  for (int k = 0; k < C::D / 16; ++k) {
    uint32_t a[C::kMTiles][4];
    ATTN_UNROLL
    for (int m = 0; m < C::kMTiles; ++m)
      simt::ldmatrix_x4(a[m], TileRows<C::D>::at(queries, 16 * m, lane % 16, k, lane / 16));
    ATTN_UNROLL
    for (int n = 0; n < C::kNBlocks; n += 2) {
      uint32_t b[4];
      simt::ldmatrix_x4(b, TileRows<C::D>::at(keys, 8 * n, lane % 8 + lane / 16 * 8, k, lane / 8 % 2));
      ATTN_UNROLL
      for (int m = 0; m < C::kMTiles; ++m) {
        simt::mma_m16n8k16<typename C::T>(s[m][n], a[m], b[0], b[1]);
        simt::mma_m16n8k16<typename C::T>(s[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// out += the weights, rounded to T, times V
template <class C>
ATTN_DEVICE void multiply_values(const typename C::Scores& p, const char* values, typename C::Out& out) {
  using T = typename C::T;
  const int lane = simt::lane();
  values += 2 * first_warp_column<C>();
  ATTN_UNROLL
  for (int k = 0; k < C::kStep / 16; ++k) {
    uint32_t a[C::kMTiles][4];
    ATTN_UNROLL
    for (int m = 0; m < C::kMTiles; ++m) {
      ATTN_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* from = p[m][2 * k + i / 2] + 2 * (i % 2);
        a[m][i] = simt::pack2<T>(from[0], from[1]);
      }
    }
    ATTN_UNROLL
    for (int n = 0; n < C::kDBlocks; n += 2) {
      uint32_t b[4];
      simt::ldmatrix_x4_trans(b, TileRows<C::D>::at(values, 16 * k, lane % 16, n / 2, lane / 16));
      ATTN_UNROLL
      for (int m = 0; m < C::kMTiles; ++m) {
        simt::mma_m16n8k16<T>(out[m][n], a[m], b[0], b[1]);
        simt::mma_m16n8k16<T>(out[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Masks and transforms the scores of keys first ... Bit 16 half + 2 n + e of seen[m] tells that the row of (m, half)
// sees the key in column e of this lane's n-block n.
template <class C>
ATTN_DEVICE void transform_tile(const AttentionWork& w, const Tile& t, int first, typename C::Scores& s,
                                uint32_t (&seen)[C::kMTiles]) {
  const int column = first + simt::lane() % 4 * 2;
  // This lane's first row, as a value that the compiler does not know: it would look up all rows ahead of the loop over
  // the keys, and lack the registers there.
  const int first_row = simt::shfl(t.first_row + tile_row<C>(0, 0), simt::lane());
  ATTN_UNROLL
  for (int m = 0; m < C::kMTiles; ++m) {
    seen[m] = 0;
    ATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      float x[2 * C::kNBlocks];
      ATTN_UNROLL
      for (int i = 0; i < 2 * C::kNBlocks; ++i) x[i] = s[m][i / 2][2 * half + i % 2];
      transform_scores<typename C::T>(
          w, t, query_row(w, t, first_row + 16 * m + 8 * half), [&](int i) { return column + i / 2 * 8 + i % 2; }, x);
      ATTN_UNROLL
      for (int i = 0; i < 2 * C::kNBlocks; ++i) {
        s[m][i / 2][2 * half + i % 2] = x[i];
        if (x[i] != -kInf) seen[m] |= 1u << (16 * half + i);
      }
    }
  }
}

// Scores become weights, and what was accumulated before is rescaled to them.
template <class C>
ATTN_DEVICE void weigh(float c, typename C::Scores& s, typename C::States& state, typename C::Out& out) {
  ATTN_UNROLL
  for (int m = 0; m < C::kMTiles; ++m) {
    float factor[2];
    ATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      float max = -kInf;
      ATTN_UNROLL
      for (int n = 0; n < C::kNBlocks; ++n) max = simt::max(max, simt::max(s[m][n][2 * half], s[m][n][2 * half + 1]));
      factor[half] = raise(state[m][half], quad_max(max), c);
      max = state[m][half].max;
      float scale = c, base = softmax_base(max, c);
      if (is_huge(base)) {
        ATTN_UNROLL
        for (int i = 0; i < 2 * C::kNBlocks; ++i) {
          float& x = s[m][i / 2][2 * half + i % 2];
          x = (x - max) * c;
        }
        scale = 1.0f;
        base = 0.0f;
      }
      ATTN_UNROLL
      for (int i = 0; i < 2 * C::kNBlocks; ++i) {
        float& x = s[m][i / 2][2 * half + i % 2];
        x = softmax_weight(x, scale, base);
      }
      float sum = 0.0f;
      ATTN_UNROLL
      for (int n = 0; n < C::kNBlocks; ++n) sum += s[m][n][2 * half] + s[m][n][2 * half + 1];
      state[m][half].sum = simt::fma(state[m][half].sum, factor[half], sum);
    }
    if (simt::any(factor[0] != 1.0f || factor[1] != 1.0f)) {
      ATTN_UNROLL
      for (int n = 0; n < C::kDBlocks; ++n) {
        ATTN_UNROLL
        for (int e = 0; e < 4; ++e) out[m][n][e] *= factor[e / 2];
      }
    }
  }
}

// The inf and NaN that leave_out_specials took away, for the rows that do see them. row(j): where the values of key j
// of the step lie. Rare, so it may be slow.
template <class C, class Row>
ATTN_DEVICE void add_specials(const Row& row, const uint32_t (&seen)[C::kMTiles], typename C::Out& out) {
  const int lane = simt::lane();
  ATTN_NO_UNROLL
  for (int j = 0; j < C::kStep; ++j) {
    uint32_t sees[C::kMTiles], any = 0;  // bit 0: row g, bit 16: row g + 8
    ATTN_UNROLL
    for (int m = 0; m < C::kMTiles; ++m) {
      sees[m] = simt::shfl(seen[m], (lane & ~3) + j % 8 / 2) >> (j / 8 * 2 + j % 2) & 0x10001u;
      any |= sees[m];
    }
    if (!any) continue;
    const typename C::T* values = row(j) + first_warp_column<C>() + lane % 4 * 2;
    ATTN_UNROLL
    for (int n = 0; n < C::kDBlocks; ++n) {
      ATTN_UNROLL
      for (int e = 0; e < 2; ++e) {
        const typename C::T v = simt::ldg(values + 8 * n + e);
        if (!is_special<typename C::T>(v.bits)) continue;
        ATTN_UNROLL
        for (int m = 0; m < C::kMTiles; ++m) {
          if (sees[m] & 1) out[m][n][e] += simt::to_float(v);
          if (sees[m] >> 16) out[m][n][2 + e] += simt::to_float(v);
        }
      }
    }
  }
}

// ---- results ------------------------------------------------------------------------------------------------------

// Adds what merge_total's `total` holds, the splits before, to state and out. Every thread keeps its own part of the
// values, a quad the state of its rows.
template <class C>
ATTN_DEVICE void merge_total(const char* total, float c, typename C::States& state, typename C::Out& out) {
  const simt::Float4* const values = reinterpret_cast<const simt::Float4*>(total) + simt::thread_idx().x;
  const SoftmaxState* const states =
      reinterpret_cast<const SoftmaxState*>(total + C::kTotalValues) + simt::warp() % C::kColumnWarps * C::kRows;
  ATTN_UNROLL
  for (int m = 0; m < C::kMTiles; ++m) {
    SoftmaxFactors f[2];
    ATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      SoftmaxState before = simt::lds(states + tile_row<C>(m, half));
      f[half] = merge(before, state[m][half], c);
      state[m][half] = before;
    }
    ATTN_UNROLL
    for (int n = 0; n < C::kDBlocks; ++n) {
      const simt::Float4 before = simt::lds(values + (m * C::kDBlocks + n) * C::kThreads);
      float* o = out[m][n];
      o[0] = merge_values(before.x, o[0], f[0]);
      o[1] = merge_values(before.y, o[1], f[0]);
      o[2] = merge_values(before.z, o[2], f[1]);
      o[3] = merge_values(before.w, o[3], f[1]);
    }
  }
  simt::sync_warp();
}

template <class C>
ATTN_DEVICE void store_total(char* total, const typename C::States& state, const typename C::Out& out) {
  simt::Float4* const values = reinterpret_cast<simt::Float4*>(total) + simt::thread_idx().x;
  SoftmaxState* const states =
      reinterpret_cast<SoftmaxState*>(total + C::kTotalValues) + simt::warp() % C::kColumnWarps * C::kRows;
  ATTN_UNROLL
  for (int m = 0; m < C::kMTiles; ++m) {
    ATTN_UNROLL
    for (int half = 0; half < 2; ++half)
      if (simt::lane() % 4 == 0) simt::sts(states + tile_row<C>(m, half), state[m][half]);
    ATTN_UNROLL
    for (int n = 0; n < C::kDBlocks; ++n) {
      const float* o = out[m][n];
      simt::sts(values + (m * C::kDBlocks + n) * C::kThreads, simt::Float4{o[0], o[1], o[2], o[3]});
    }
  }
}

// One split's result, for the combine kernel.
template <class C>
ATTN_DEVICE void store_partial(const AttentionWork& w, const Tile& t, const typename C::States& state,
                               const typename C::Out& out) {
  const int column = first_warp_column<C>() + simt::lane() % 4 * 2;
  ATTN_UNROLL
  for (int m = 0; m < C::kMTiles; ++m) {
    ATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = t.first_row + tile_row<C>(m, half);
      if (row >= t.rows) continue;
      const int64_t index = t.partial(w, row);
      if (column == 0) simt::st(w.partial_state + index, state[m][half]);
      if (state[m][half].sum == 0.0f) continue;
      float* to = w.partial_out + index * C::D + column;
      ATTN_UNROLL
      for (int n = 0; n < C::kDBlocks; ++n)
        simt::st(reinterpret_cast<simt::Float2*>(to + 8 * n),
                 simt::Float2{out[m][n][2 * half], out[m][n][2 * half + 1]});
    }
  }
}

// Divides by the sum, and writes the warp's part of the output by way of `tile`, for whole 16-byte vectors.
template <class C>
ATTN_DEVICE void store_out(const AttentionWork& w, const Tile& t, char* tile, const typename C::States& state,
                           const typename C::Out& out) {
  using T = typename C::T;
  const int lane = simt::lane(), column = first_warp_column<C>();
  if constexpr (C::kColumnWarps > 1) simt::sync_threads();  // others may still read these rows of Q
  ATTN_UNROLL
  for (int m = 0; m < C::kMTiles; ++m) {
    ATTN_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = tile_row<C>(m, half);
      const QueryRow q = query_row(w, t, t.first_row + row);
      const SoftmaxResult result = finish(state[m][half], sink_of(w.p, q.head), w.score);
      if (column == 0 && lane % 4 == 0 && t.first_row + row < t.rows) store_lse(w.p, t, q, result.lse);
      ATTN_UNROLL
      for (int n = 0; n < C::kDBlocks; ++n) {
        const float* o = out[m][n] + 2 * half;
        char* to = tile + TileRows<C::D>::offset(row, column / 8 + n) + lane % 4 * 4;
        simt::sts(reinterpret_cast<uint32_t*>(to), simt::pack2<T>(o[0] * result.factor, o[1] * result.factor));
      }
    }
  }
  simt::sync_warp();
  ATTN_NO_UNROLL
  for (int i = lane; i < C::kWarpRows * C::kDBlocks; i += 32) {
    const int row = first_warp_row<C>() + i / C::kDBlocks, chunk = column / 8 + i % C::kDBlocks;
    if (t.first_row + row >= t.rows) continue;
    T* to = output_row<T>(w.p, t, query_row(w, t, t.first_row + row)) + 8 * chunk;
    const simt::U32x4 v = simt::lds128(tile + TileRows<C::D>::offset(row, chunk));
    if (w.out_vectors) {
      simt::st128(to, v);
    } else {
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
      ATTN_UNROLL
      for (int e = 0; e < 8; ++e) simt::st(to + e, T{uint16_t(words[e / 2] >> (16 * (e % 2)))});
    }
  }
}

// ---- the kernel ---------------------------------------------------------------------------------------------------

template <class C>
ATTN_KERNEL(C::kThreads, C::kMinBlocks)
attention_mma_kernel(ATTN_CONSTANT_PARAM AttentionWork w) {
  using T = typename C::T;
  constexpr int kStep = C::kStep;
  constexpr int kOwnPages = (kStep + C::kThreads) / C::kThreads;  // of the at most kStep + 1 pages of a step

  Tile t;
  if (!find_tile(w, int(simt::block_idx().x), C::kRows, t)) return;
  const KeyRange plain = plain_keys(w, t, C::kRows);
  const int begin = t.keys.first / kStep * kStep, end = t.keys.end, thread = int(simt::thread_idx().x);
  const bool several_splits = w.splits == 1 && w.p.Tk > kSplit;  // may be walked

  char* const queries = ATTN_SHARED;
  char* const keys = queries + C::kQBytes;
  char* const values = keys + C::kKBytes;
  char* const total = values + C::kVBytes;
  int* const pages = reinterpret_cast<int*>(total + (several_splits ? C::kTotalBytes : 0));

  typename C::Out out;
  typename C::States state;
  reset<C>(state, out);

  // The pages of a step are looked up one step ahead, into alternating halves of `pages`.
  int own_pages[kOwnPages];
  const auto fetch_pages = [&](int first) {
    ATTN_UNROLL
    for (int i = 0; i < kOwnPages; ++i)
      if (thread + i * C::kThreads < w.step_pages)
        own_pages[i] = cache_block(w, t, w.by_block_size.quotient(first) + thread + i * C::kThreads);
  };
  const auto pages_of = [&](int first) { return pages + first / kStep % 2 * w.step_pages; };
  const auto put_pages = [&](int first) {
    ATTN_UNROLL
    for (int i = 0; i < kOwnPages; ++i)
      if (thread + i * C::kThreads < w.step_pages) simt::sts(pages_of(first) + thread + i * C::kThreads, own_pages[i]);
  };
  const auto row_of_step = [&](const KeyRows<T>& rows, int first, int r SIMT_WHERE) {
    return t.blocks ? rows.paged(w, first + r, pages_of(first), w.by_block_size.quotient(first) SIMT_AT)
                    : rows.dense(first + r);
  };
  const auto copy_step = [&](char* tile, const KeyRows<T>& rows, int first SIMT_WHERE) {
    const auto valid = [&](int r) { return first + r >= t.keys.first && first + r < t.keys.end; };
    if (!w.kv_vectors) {
      copy_elements<T, C::D, kStep, C::kThreads>(
          tile, [&](int r) { return row_of_step(rows, first, r SIMT_AT); }, valid SIMT_AT);
    } else if (t.blocks) {
      const int* const step_pages = pages_of(first);
      const int first_page = w.by_block_size.quotient(first);
      copy_vectors<T, C::D, kStep, C::kThreads>(
          tile, [&](int r) { return rows.paged(w, first + r, step_pages, first_page SIMT_AT); }, valid SIMT_AT);
    } else {
      copy_vectors<T, C::D, kStep, C::kThreads>(tile, [&](int r) { return rows.dense(first + r); }, valid SIMT_AT);
    }
    simt::cp_async_commit();
  };

  if (begin < end) {
    const auto query = [&](int r) {
      const QueryRow q = query_row(w, t, t.first_row + r);
      return static_cast<const T*>(w.p.q) + t.q_offset + q.token * w.p.q_row_stride + q.head * w.p.q_head_stride;
    };
    const auto valid = [&](int r) { return t.first_row + r < t.rows; };
    if (w.q_vectors)
      copy_vectors<T, C::D, C::kRows, C::kThreads>(queries, query, valid);
    else
      copy_elements<T, C::D, C::kRows, C::kThreads>(queries, query, valid);
    if (t.blocks) {
      fetch_pages(begin);
      put_pages(begin);
      simt::sync_threads();
    }
    copy_step(keys, key_rows<T>(w.p, t), begin);
  }

  ATTN_NO_UNROLL
  for (int first = begin; first < end; first += kStep) {
    const int next = first + kStep;
    const bool more = next < end;
    simt::cp_async_wait<0>();
    simt::sync_threads();
    copy_step(values, value_rows<T>(w.p, t), first);
    if (more && t.blocks) fetch_pages(next);

    typename C::Scores s;
    multiply_keys<C>(queries, keys, s);

    if (more && t.blocks) put_pages(next);
    simt::cp_async_wait<0>();
    const bool masked = first < plain.first || next > plain.end;
    bool left_out = false;
    if (masked)
      left_out = simt::sync_threads_or(leave_out_specials<C>(values));
    else
      simt::sync_threads();
    uint32_t seen[C::kMTiles];
    if (masked) transform_tile<C>(w, t, first, s, seen);
    if (more) copy_step(keys, key_rows<T>(w.p, t), next);
    weigh<C>(w.score.c, s, state, out);
    multiply_values<C>(s, values, out);
    if (left_out) add_specials<C>([&](int j) { return row_of_step(value_rows<T>(w.p, t), first, j); }, seen, out);

    if (more && next % kSplit != 0) continue;
    // The split ends here.
    ATTN_UNROLL
    for (int m = 0; m < C::kMTiles; ++m) {
      ATTN_UNROLL
      for (int half = 0; half < 2; ++half) state[m][half].sum = quad_sum(state[m][half].sum);
    }
    if (!several_splits) continue;
    if (first / kSplit > t.keys.first / kSplit) merge_total<C>(total, w.score.c, state, out);
    if (!more) continue;
    store_total<C>(total, state, out);
    reset<C>(state, out);
  }

  if (w.splits > 1)
    store_partial<C>(w, t, state, out);
  else
    store_out<C>(w, t, queries, state, out);
}

}  // namespace attn_ext::cuda
