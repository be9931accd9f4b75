// Fused GEMM: y = act(x W^T + bias) * multiply + residual; and the QKV projection that writes k and v to the cache.
//
// x (M, K), W (N, K), both row-major. A block computes one tile of the product: slices of x and W stream through a ring
// of stages in shared memory, the sums end there too, and leave with everything the epilogue adds to them.
//
// bfloat16 and float16 run on tensor cores whatever their alignment: cp.async where rows are aligned to 16 bytes, else
// element loads into the same stages. float32 runs on fused multiply-adds. Every output is one chain of sums over
// k = 0, 16, 32, ... (float32: 0, 1, 2, ...) in each tile shape, so its bits do not depend on M, N or the tile chosen.
// There is no split over k: with few rows, narrow tiles give enough blocks, and a chain of K / 16 matrix instructions
// is shorter than the time the weights take to arrive.
#pragma once

#include "cuda/common.cuh"
#include "cuda/kernels.h"

namespace attn_ext::cuda {

struct ProductArgs {
  QkvToCacheParams p;  // of linear: only p.gemm
  bool to_cache;
  bool vector_x, vector_weight;  // rows are aligned to 16 bytes and whole 16-byte chunks long
  bool vector_out;               // all that the epilogue touches is aligned, 4 columns at a time
  int m_tiles, n_tiles;
};

constexpr int kTileGroup = 8;  // tiles below each other that run at the same time, so that they share W in the L2 cache

// Which column of the product each column of a tile is. Plain: neighbours. Paired, for rotation: the left half of the
// tile holds neighbouring first halves d of heads, the right half their partners d + D / 2.
template <int kN>
struct Columns {
  int64_t first;
  int64_t N;
  int64_t half;  // D / 2 if paired, else 0

  ATTN_DEVICE int64_t of(int column) const {  // -1 past the end
    if (half == 0) return first + column < N ? first + column : -1;
    const int64_t pair = first / 2 + column % (kN / 2);
    if (pair >= N / 2) return -1;
    const auto [head, d] = divide(pair, half);
    return (2 * head + (column >= kN / 2 ? 1 : 0)) * half + d;
  }
};

// ---- 16-bit products on tensor cores
// ---------------------------------------------------------------------------------

// A slice of kRows rows in shared memory: 16-byte chunks, chunk c of row r at c ^ swizzle(r), so that the same chunk of
// 8 rows below each other, which is what ldmatrix reads, lies in 8 different groups of banks.
template <int kDepth>
ATTN_DEVICE int swizzle(int row) {
  constexpr int chunks = kDepth / 8;
  return chunks == 4 ? (row / 2) % 4 : row % 8;
}

// The rows of x or W that one thread copies to the stages.
template <class T, int kRows, int kDepth, int kThreads>
struct Operand {
  static constexpr int kChunks = kDepth / 8;
  static constexpr int kRowStep = kThreads / kChunks;
  static constexpr int kCopies = kRows / kRowStep;
  static constexpr int kBytes = kRows * kDepth * 2;
  static_assert(kThreads % kChunks == 0 && kRows % kRowStep == 0);

  const T* base;          // an address for copies that read nothing
  const T* row[kCopies];  // null past the end
  bool vector;

  // row_of(r): pointer to row r of the slice, or null.
  template <class RowOf>
  ATTN_DEVICE Operand(const void* base, bool vector, const RowOf& row_of)
      : base(static_cast<const T*>(base)), vector(vector) {
    ATTN_UNROLL
    for (int i = 0; i < kCopies; ++i) row[i] = row_of(int(simt::thread_idx().x) / kChunks + i * kRowStep);
  }

  // Columns k .. k + kDepth of the rows to `stage`; zeros past the end.
  ATTN_DEVICE void load(char* stage, int64_t k, int64_t K) const {
    const int chunk = int(simt::thread_idx().x) % kChunks, first = int(simt::thread_idx().x) / kChunks;
    k += chunk * 8;
    ATTN_UNROLL
    for (int i = 0; i < kCopies; ++i) {
      const int r = first + i * kRowStep;
      char* to = stage + (r * kChunks + (chunk ^ swizzle<kDepth>(r))) * 16;
      const bool inside = row[i] && k < K;
      if (vector) {
        simt::cp_async16(to, inside ? row[i] + k : base, inside ? 16 : 0);
      } else {
        uint32_t words[4] = {};
        if (inside) {
          ATTN_UNROLL
          for (int e = 0; e < 8; ++e)
            if (k + e < K) words[e / 2] |= uint32_t(simt::ldg(row[i] + k + e).bits) << (16 * (e % 2));
        }
        simt::sts128(to, {words[0], words[1], words[2], words[3]});
      }
    }
  }
};

// A tile of kM x kN with slices kDepth deep; each warp computes kWarpM x kWarpN of it.
template <class T, int kM_, int kN_, int kDepth_, int kWarpM, int kWarpN, int kStages_, int kMinBlocks_>
struct TensorTile {
  using Element = T;
  static constexpr int kM = kM_, kN = kN_, kDepth = kDepth_, kStages = kStages_, kMinBlocks = kMinBlocks_;
  static constexpr int kWarpsN = kN / kWarpN;
  static constexpr int kThreads = kM / kWarpM * kWarpsN * 32;
  static constexpr int kBlocksM = kWarpM / 16, kBlocksN = kWarpN / 8;
  using X = Operand<T, kM, kDepth, kThreads>;
  using W = Operand<T, kN, kDepth, kThreads>;
  static constexpr int kStageBytes = X::kBytes + W::kBytes;
  static_assert(kBlocksN % 2 == 0, "B fragments are read two blocks at a time");

  X x;
  W weight;
  int64_t K;
  int row, column;  // of this warp in the tile
  float sums[kBlocksM][kBlocksN][4];

  ATTN_DEVICE TensorTile(const ProductArgs& a, int64_t m, const Columns<kN>& columns)
      : x(a.p.gemm.x, a.vector_x,
          [&](int r) { return m + r < a.p.gemm.M ? x.base + (m + r) * a.p.gemm.x_stride : nullptr; }),
        weight(a.p.gemm.weight, a.vector_weight,
               [&](int r) {
                 const int64_t n = columns.of(r);
                 return n >= 0 ? weight.base + n * a.p.gemm.weight_stride : nullptr;
               }),
        K(a.p.gemm.K),
        row(simt::warp() / kWarpsN * kWarpM),
        column(simt::warp() % kWarpsN * kWarpN),
        sums{} {}

  ATTN_DEVICE void load(char* stage, int64_t k) const {
    x.load(stage, k, K);
    weight.load(stage + X::kBytes, k, K);
  }

  ATTN_DEVICE void multiply(const char* stage) {
    constexpr int chunks = kDepth / 8;
    const int lane = simt::lane();
    // Rows of a fragment are 16 apart, which swizzle does not see.
    const int x_row = row + lane % 16, x_chunk = lane / 16;
    const int w_row = column + lane % 8 + lane / 16 * 8, w_chunk = lane / 8 % 2;
    const char* x_rows = stage + x_row * kDepth * 2;
    const char* w_rows = stage + X::kBytes + w_row * kDepth * 2;
    ATTN_UNROLL
    for (int c = 0; c < chunks; c += 2) {
      uint32_t b[kBlocksN / 2][4];
      ATTN_UNROLL
      for (int j = 0; j < kBlocksN / 2; ++j)
        simt::ldmatrix_x4(b[j], w_rows + j * 16 * kDepth * 2 + ((c + w_chunk) ^ swizzle<kDepth>(w_row)) * 16);
      ATTN_UNROLL
      for (int i = 0; i < kBlocksM; ++i) {
        uint32_t f[4];
        simt::ldmatrix_x4(f, x_rows + i * 16 * kDepth * 2 + ((c + x_chunk) ^ swizzle<kDepth>(x_row)) * 16);
        ATTN_UNROLL
        for (int j = 0; j < kBlocksN; ++j)
          simt::mma_m16n8k16<T>(sums[i][j], f, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }

  // put(row, column, Float2): two neighbouring sums.
  template <class Put>
  ATTN_DEVICE void for_each_pair(const Put& put) const {
    const int g = simt::lane() / 4, t = simt::lane() % 4;
    ATTN_UNROLL
    for (int i = 0; i < kBlocksM; ++i) {
      ATTN_UNROLL
      for (int j = 0; j < kBlocksN; ++j) {
        const float (&s)[4] = sums[i][j];
        put(row + 16 * i + g, column + 8 * j + 2 * t, simt::Float2{s[0], s[1]});
        put(row + 16 * i + g + 8, column + 8 * j + 2 * t, simt::Float2{s[2], s[3]});
      }
    }
  }
};

// ---- float32 products
// ------------------------------------------------------------------------------------------------

// A tile of 64 x 64, four rows and four columns a thread; slices lie transposed, (k, row).
struct FloatTile {
  using Element = float;
  static constexpr int kM = 64, kN = 64, kDepth = 16, kStages = 3, kMinBlocks = 2, kThreads = 256;
  static constexpr int kPitch = 64 + 4;
  static constexpr int kStageBytes = 2 * kDepth * kPitch * 4;

  const float* x[4];  // rows this thread copies; null past the end
  const float* weight[4];
  const float* base;
  int64_t K;
  float sums[4][4];

  ATTN_DEVICE FloatTile(const ProductArgs& a, int64_t m, const Columns<kN>& columns)
      : base(static_cast<const float*>(a.p.gemm.x)), K(a.p.gemm.K), sums{} {
    ATTN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int r = int(simt::thread_idx().x) / kDepth + i * (kThreads / kDepth);
      const int64_t n = columns.of(r);
      x[i] = m + r < a.p.gemm.M ? base + (m + r) * a.p.gemm.x_stride : nullptr;
      weight[i] = n >= 0 ? static_cast<const float*>(a.p.gemm.weight) + n * a.p.gemm.weight_stride : nullptr;
    }
  }

  ATTN_DEVICE void load(char* stage, int64_t k) const {
    const int column = int(simt::thread_idx().x) % kDepth, first = int(simt::thread_idx().x) / kDepth;
    float* to = reinterpret_cast<float*>(stage) + column * kPitch + first;
    k += column;
    const auto copy = [&](float* to, const float* row) {
      const bool inside = row && k < K;
      simt::cp_async<4>(to, inside ? row + k : base, inside ? 4 : 0);
    };
    ATTN_UNROLL
    for (int i = 0; i < 4; ++i) {
      copy(to + i * (kThreads / kDepth), x[i]);
      copy(to + kDepth * kPitch + i * (kThreads / kDepth), weight[i]);
    }
  }

  ATTN_DEVICE int row() const { return int(simt::thread_idx().x) / 16 * 4; }
  ATTN_DEVICE int column() const { return int(simt::thread_idx().x) % 16 * 4; }

  ATTN_DEVICE void multiply(const char* stage) {
    const float* rows = reinterpret_cast<const float*>(stage);
    ATTN_UNROLL
    for (int k = 0; k < kDepth; ++k) {
      const auto u = simt::lds(reinterpret_cast<const simt::Float4*>(rows + k * kPitch + row()));
      const auto v = simt::lds(reinterpret_cast<const simt::Float4*>(rows + (kDepth + k) * kPitch + column()));
      const float us[4] = {u.x, u.y, u.z, u.w}, vs[4] = {v.x, v.y, v.z, v.w};
      ATTN_UNROLL
      for (int i = 0; i < 4; ++i) {
        ATTN_UNROLL
        for (int j = 0; j < 4; ++j) sums[i][j] = simt::fma(us[i], vs[j], sums[i][j]);
      }
    }
  }

  template <class Put>
  ATTN_DEVICE void for_each_pair(const Put& put) const {
    ATTN_UNROLL
    for (int i = 0; i < 4; ++i) {
      put(row() + i, column(), simt::Float2{sums[i][0], sums[i][1]});
      put(row() + i, column() + 2, simt::Float2{sums[i][2], sums[i][3]});
    }
  }
};

// ---- epilogue
// --------------------------------------------------------------------------------------------------------

// Place of a sum in shared memory: rows of a tile spread over the banks in groups of 8 columns.
template <int kN>
ATTN_DEVICE int staged(int row, int column) {
  return row * kN + (column ^ ((row & 1) * 16 | (row & 2) * 4));
}

template <class T, int n>
ATTN_DEVICE void load_group(const T* p, float (&x)[n]) {
  if constexpr (n == 1)
    x[0] = to_float(simt::ldg(p));
  else
    load_vector(p, x);
}

template <class T, int n>
ATTN_DEVICE void store_group(T* p, const float (&x)[n]) {
  if constexpr (n == 1)
    simt::st(p, simt::from_float<T>(x[0]));
  else
    store_vector(p, x);
}

ATTN_DEVICE float activate(Activation activation, float x) {
  switch (activation) {
    case Activation::gelu: return 0.5f * x * (1.0f + ::erff(x * 0.70710678118654752f));
    case Activation::gelu_tanh:
      return 0.5f * x * (1.0f + ::tanhf(0.79788456080286536f * simt::fma(0.044715f * x * x, x, x)));
    case Activation::silu: return x / (1.0f + ::expf(-x));
    case Activation::none: break;
  }
  return x;
}

// Where column n of the product goes.
template <class T>
struct Target {
  T* base;
  int64_t row_stride;                  // of y or q
  int64_t block_stride, token_stride;  // of a cache
  bool cached, rotated;

  ATTN_DEVICE Target(const ProductArgs& a, int64_t n) : Target{} {
    if (n < 0) return;
    if (!a.to_cache) {
      base = static_cast<T*>(a.p.gemm.y) + n;
      row_stride = a.p.gemm.y_stride;
      return;
    }
    const auto [head, d] = divide(n, a.p.D);
    const bool is_value = head >= a.p.H + a.p.Hkv;
    rotated = a.p.rope_cos && !is_value;
    if (head < a.p.H) {
      base = static_cast<T*>(a.p.q) + n;
      row_stride = a.p.H * a.p.D;
      return;
    }
    cached = true;
    const int64_t* strides = is_value ? a.p.value_strides : a.p.key_strides;
    base = static_cast<T*>(is_value ? a.p.value_cache : a.p.key_cache) +
           (head - a.p.H - (is_value ? a.p.Hkv : 0)) * strides[2] + d;
    block_stride = strides[0];
    token_stride = strides[1];
  }

 private:
  Target() = default;
};

// The tile from shared memory to where it goes. A thread keeps to kGroup columns in the left half of the tile and those
// kN / 2 to their right: a pair that is rotated together.
template <class T, int kGroup, int kM, int kN, int kThreads>
ATTN_DEVICE void finish_tile(const ProductArgs& a, const float* sums, int64_t m, const Columns<kN>& columns) {
  constexpr int groups = kN / 2 / kGroup;
  static_assert(kThreads % groups == 0);
  const LinearParams& p = a.p.gemm;
  const int column = int(simt::thread_idx().x) % groups * kGroup;
  const int64_t n[2] = {columns.of(column), columns.of(column + kN / 2)};
  const Target<T> targets[2] = {{a, n[0]}, {a, n[1]}};
  float bias[2][kGroup] = {};
  ATTN_UNROLL
  for (int h = 0; h < 2; ++h)
    if (p.bias && n[h] >= 0) load_group(static_cast<const T*>(p.bias) + n[h], bias[h]);

  ATTN_NO_UNROLL
  for (int r = int(simt::thread_idx().x) / groups; r < kM && m + r < p.M; r += kThreads / groups) {
    float x[2][kGroup];
    ATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      const float* from = sums + staged<kN>(r, column + h * (kN / 2));
      if constexpr (kGroup == 4) {
        const auto v = simt::lds(reinterpret_cast<const simt::Float4*>(from));
        x[h][0] = v.x, x[h][1] = v.y, x[h][2] = v.z, x[h][3] = v.w;
      } else {
        x[h][0] = simt::lds(from);
      }
      ATTN_UNROLL
      for (int e = 0; e < kGroup; ++e) x[h][e] += bias[h][e];
    }
    if (n[0] >= 0 && targets[0].rotated) {
      const int64_t position = max_of<int64_t>(0, min_of(simt::ldg(a.p.positions + m + r), a.p.max_pos - 1));
      const int64_t d = divide(n[0], a.p.D).remainder;
      float cos[kGroup], sin[kGroup];
      load_group(a.p.rope_cos + position * a.p.rope_cos_stride + d, cos);
      load_group(a.p.rope_sin + position * a.p.rope_sin_stride + d, sin);
      ATTN_UNROLL
      for (int e = 0; e < kGroup; ++e) {
        const float u = x[0][e], v = x[1][e];
        x[0][e] = simt::fma(u, cos[e], -(v * sin[e]));
        x[1][e] = simt::fma(v, cos[e], u * sin[e]);
      }
    }
    const int64_t slot = targets[0].cached || targets[1].cached ? simt::ldg(a.p.slot_mapping + m + r) : 0;
    const bool skip = a.to_cache && (slot < 0 || slot >= a.p.num_blocks * a.p.block_size);
    ATTN_UNROLL
    for (int h = 0; h < 2; ++h) {
      const Target<T>& target = targets[h];
      if (n[h] < 0 || (target.cached && skip)) continue;
      T* to = target.base + (m + r) * target.row_stride;
      if (target.cached) {
        const auto [block, token] = divide(slot, a.p.block_size);
        to += block * target.block_stride + token * target.token_stride;
      }
      ATTN_UNROLL
      for (int e = 0; e < kGroup; ++e) x[h][e] = activate(p.activation, x[h][e]);
      if (p.multiply) {
        float multiply[kGroup];
        load_group(static_cast<const T*>(p.multiply) + (m + r) * p.multiply_stride + n[h], multiply);
        ATTN_UNROLL
        for (int e = 0; e < kGroup; ++e) x[h][e] *= multiply[e];
      }
      if (p.residual) {
        float residual[kGroup];
        load_group(static_cast<const T*>(p.residual) + (m + r) * p.residual_stride + n[h], residual);
        ATTN_UNROLL
        for (int e = 0; e < kGroup; ++e) x[h][e] += residual[e];
      }
      store_group(to, x[h]);
    }
  }
}

// ---- kernel
// ----------------------------------------------------------------------------------------------------------

template <class Tile>
ATTN_KERNEL(Tile::kThreads, Tile::kMinBlocks)
product_kernel(ATTN_CONSTANT_PARAM ProductArgs a) {
  using T = typename Tile::Element;
  // Blocks run in groups of kTileGroup tiles below each other.
  const int index = int(simt::block_idx().x), group_size = kTileGroup * a.n_tiles;
  const int group = index / group_size, first = group * kTileGroup, rows = min_of(kTileGroup, a.m_tiles - first);
  const int64_t m = int64_t(first + index % group_size % rows) * Tile::kM;
  const Columns<Tile::kN> columns{int64_t(index % group_size / rows) * Tile::kN, a.p.gemm.N,
                                  a.p.rope_cos ? a.p.D / 2 : 0};

  char* stages = ATTN_SHARED;
  Tile tile(a, m, columns);
  const int64_t steps = ceil_div<int64_t>(a.p.gemm.K, Tile::kDepth);
  ATTN_UNROLL
  for (int s = 0; s < Tile::kStages - 1; ++s) {
    if (s < steps) tile.load(stages + s * Tile::kStageBytes, s * Tile::kDepth);
    simt::cp_async_commit();
  }
  int current = 0, next = Tile::kStages - 1;
  for (int64_t step = 0; step < steps; ++step) {
    simt::cp_async_wait<Tile::kStages - 2>();
    simt::sync_threads();  // the slice is there for everyone, and nobody reads the stage that is loaded next
    if (step + Tile::kStages - 1 < steps)
      tile.load(stages + next * Tile::kStageBytes, (step + Tile::kStages - 1) * Tile::kDepth);
    simt::cp_async_commit();
    tile.multiply(stages + current * Tile::kStageBytes);
    current = current + 1 == Tile::kStages ? 0 : current + 1;
    next = next + 1 == Tile::kStages ? 0 : next + 1;
  }
  simt::sync_threads();

  float* sums = reinterpret_cast<float*>(stages);
  tile.for_each_pair([&](int row, int column, simt::Float2 pair) {
    simt::sts(reinterpret_cast<simt::Float2*>(sums + staged<Tile::kN>(row, column)), pair);
  });
  simt::sync_threads();
  if (a.vector_out)
    finish_tile<T, 4, Tile::kM, Tile::kN, Tile::kThreads>(a, sums, m, columns);
  else
    finish_tile<T, 1, Tile::kM, Tile::kN, Tile::kThreads>(a, sums, m, columns);
}

// ---- launchers
// -------------------------------------------------------------------------------------------------------

template <class T>
using LargeTile = TensorTile<T, 128, 128, 32, 64, 64, 4, 2>;
template <class T>
using MediumTile = TensorTile<T, 64, 64, 64, 32, 32, 4, 2>;
template <class T>
using SmallTile = TensorTile<T, 16, 32, 128, 16, 16, 4, 4>;  // memory-bound: deep slices, many blocks

template <class Tile>
int64_t tiles(const LinearParams& p) {
  return ceil_div<int64_t>(p.M, Tile::kM) * ceil_div<int64_t>(p.N, Tile::kN);
}

template <class Tile>
void launch_product(ProductArgs a, simt::Stream stream) {
  const LinearParams& p = a.p.gemm;
  if (tiles<Tile>(p) > kMaxGrid) throw std::runtime_error("more than 2^31 tiles");
  a.m_tiles = int(ceil_div<int64_t>(p.M, Tile::kM));
  a.n_tiles = int(ceil_div<int64_t>(p.N, Tile::kN));
  constexpr size_t shared = size_t(max_of(Tile::kStages * Tile::kStageBytes, Tile::kM * Tile::kN * 4));
  void (*kernel)(ProductArgs) = product_kernel<Tile>;
  simt::launch(kernel, simt::Dim{uint32_t(a.m_tiles) * uint32_t(a.n_tiles)}, {Tile::kThreads}, shared, stream, a);
}

template <class T>
void launch_product_of(ProductArgs& a, simt::Stream stream) {
  const QkvToCacheParams& c = a.p;
  const LinearParams& p = c.gemm;
  const int64_t size = sizeof(T);
  const auto rows_fit = [&](int64_t bytes, const void* base, int64_t stride, int64_t length) {
    return !base || all_multiples(bytes, base, stride * size, length * size);
  };
  a.vector_x = rows_fit(16, p.x, p.x_stride, p.K);
  a.vector_weight = rows_fit(16, p.weight, p.weight_stride, p.K);
  a.vector_out = rows_fit(4 * size, p.bias, 0, p.N) && rows_fit(4 * size, p.residual, p.residual_stride, p.N) &&
                 rows_fit(4 * size, p.multiply, p.multiply_stride, p.N);
  if (!a.to_cache) {
    a.vector_out = a.vector_out && rows_fit(4 * size, p.y, p.y_stride, p.N);
  } else {
    const auto cache_fits = [&](const void* cache, const int64_t* s) {
      return all_multiples(4 * size, cache, s[0] * size, s[1] * size, s[2] * size);
    };
    a.vector_out = a.vector_out && all_multiples(4 * size, c.q, c.D * size) && cache_fits(c.key_cache, c.key_strides) &&
                   cache_fits(c.value_cache, c.value_strides);
    if (c.rope_cos)
      a.vector_out = a.vector_out && all_multiples(4, c.D / 2, c.rope_cos_stride, c.rope_sin_stride) &&
                     all_multiples(16, c.rope_cos, c.rope_sin);
  }
  if constexpr (size_t(sizeof(T)) == 4) {
    launch_product<FloatTile>(a, stream);
  } else if (p.M <= SmallTile<T>::kM) {
    launch_product<SmallTile<T>>(a, stream);
  } else if (p.M <= MediumTile<T>::kM || tiles<LargeTile<T>>(p) < simt::device().sms) {
    launch_product<MediumTile<T>>(a, stream);
  } else {
    launch_product<LargeTile<T>>(a, stream);
  }
}

void linear(const LinearParams& p, const Launch& launch) {
  if (p.M == 0 || p.N == 0) return;
  ProductArgs a{};
  a.p.gemm = p;
  dispatch(p.dtype, [&](auto t) { launch_product_of<decltype(t)>(a, simt::Stream(launch.stream)); });
}

void qkv_to_cache(const QkvToCacheParams& p, const Launch& launch) {
  if (p.gemm.M == 0 || p.gemm.N == 0) return;
  ProductArgs a{};
  a.p = p;
  a.to_cache = true;
  dispatch(p.gemm.dtype, [&](auto t) { launch_product_of<decltype(t)>(a, simt::Stream(launch.stream)); });
}

}  // namespace attn_ext::cuda
