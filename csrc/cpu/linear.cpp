// Fused GEMM: y = act(x W^T + bias) + residual, and the QKV projection whose k and v go straight to the cache.
//
// x (M, K), W (N, K), both row-major. A task is a block of rows times a group of columns; it widens its part of x
// and packs W^T in 64-deep pieces that stay in the L1 cache while every row of the block uses them.
// Each output is a sum over k in blocks of 256, added in ascending order: the same for every M, N and task.
#include "cpu/gemm.h"
#include "cpu/kernels.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

constexpr int64_t kDepthBlock = 256;  // k summed in registers and tile before it joins the total
constexpr int64_t kDepthStep = 64;    // k packed at a time
constexpr int64_t kPanel = 64;        // columns packed at a time
constexpr int64_t kMaxRows = 192;     // rows of a task: packing costs 1/192 of a multiplication each

static_assert(kDepthBlock % kDepthStep == 0);

// Scratch of one worker.
template <class T>
struct Tile {
  using A = Accumulate<T>;
  Element<T>* x;  // (rows, kDepthBlock) part of x, unless x can be used in place
  A* panel;       // (kDepthStep, kPanel) part of W^T
  A* block;       // (rows, kPanel) sum over one depth block
  A* total;       // (rows, columns) result
  int64_t rows, columns;

  static int64_t bytes(int64_t rows, int64_t columns) {
    const int64_t elements =
        rows * kDepthBlock + kDepthStep * kPanel + rows * kPanel + rows * round_up(columns, kPanel);
    return round_up(elements * int64_t(sizeof(A)), 64);
  }
  Tile(char* memory, int64_t rows, int64_t columns) : rows(rows), columns(round_up(columns, kPanel)) {
    panel = reinterpret_cast<A*>(memory);
    block = panel + kDepthStep * kPanel;
    total = block + rows * kPanel;
    x = reinterpret_cast<Element<T>*>(total + rows * this->columns);
  }
};

int64_t task_rows(int64_t M, int64_t columns) {
  return min_of<int64_t>(M, columns <= kPanel ? kMaxRows : kMaxRows / 3);
}

// tile.total = rows m.. of x times columns n.. of W^T
template <class T>
void multiply(const LinearParams& p, int64_t m, int64_t rows, int64_t n, int64_t columns, const Tile<T>& tile) {
  using A = Accumulate<T>;
  const T* x = static_cast<const T*>(p.x) + m * p.x_stride;
  const T* weight = static_cast<const T*>(p.weight) + n * p.weight_stride;
  for (int64_t r = 0; r < rows; ++r) memset(tile.total + r * tile.columns, 0, size_t(tile.columns) * sizeof(A));

  for (int64_t k0 = 0; k0 < p.K; k0 += kDepthBlock) {
    const int64_t depth = min_of(kDepthBlock, p.K - k0);
    const Element<T>* a = tile.x;
    int64_t lda = kDepthBlock;
    bool in_place = false;
    if constexpr (sizeof(T) == sizeof(Element<T>)) {
      in_place = depth % Product<T>::kPerStep == 0;  // else the last step needs a zero behind the row
      if (in_place) {
        a = x + k0;
        lda = p.x_stride;
      }
    }
    if (!in_place)
      for (int64_t r = 0; r < rows; ++r) convert_row(x + r * p.x_stride + k0, depth, tile.x + r * kDepthBlock);
    for (int64_t c0 = 0; c0 < columns; c0 += kPanel) {
      const int64_t valid = min_of(kPanel, columns - c0), padded = round_up(valid, W<A>);
      const auto row = [&](int64_t i) { return weight + (c0 + i) * p.weight_stride + k0; };
      if (rows <= kFewRows) {
        gemm_transposed<T>(rows, valid, depth, a, lda, row, tile.block, kPanel);
      } else {
        for (int64_t k1 = 0; k1 < depth; k1 += kDepthStep) {
          const int64_t piece = min_of(kDepthStep, depth - k1), steps = ceil_div(piece, Product<T>::kPerStep);
          pack_transposed<T>(valid, piece, [&](int64_t i) { return row(i) + k1; }, tile.panel, kPanel);
          gemm<T>(rows, padded, steps, a + k1, lda, tile.panel, kPanel, tile.block, kPanel, k1 > 0);
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        A* total = tile.total + r * tile.columns + c0;
        const A* block = tile.block + r * kPanel;
        for (int64_t c = 0; c < padded; c += W<A>) store(total + c, load(total + c) + load(block + c));
      }
    }
  }
}

// Runs finish(tile, row, rows, group) on every (block of rows) x (group of columns) of the product.
template <class T, class Finish>
void for_each_tile(const LinearParams& p, int64_t group_columns, const Launch& launch, const Finish& finish) {
  const int64_t block = task_rows(p.M, group_columns);
  const int64_t blocks = ceil_div(p.M, block), groups = ceil_div(p.N, group_columns);
  const int64_t bytes = Tile<T>::bytes(block, group_columns);
  const bool tiny = p.M * p.N < 256 || p.M * p.N * p.K < 65536;
  Queue queue{0, blocks * groups};
  run_parallel(launch, tiny ? 1 : queue.total, [&](int worker) {
    Tile<T> tile(launch.workspace + worker * bytes, block, group_columns);
    for (int64_t task; queue.take(task);) {
      const int64_t group = task / blocks, m = (task % blocks) * block, n = group * group_columns;
      const int64_t rows = min_of(block, p.M - m), columns = min_of(group_columns, p.N - n);
      multiply<T>(p, m, rows, n, columns, tile);
      finish(tile, m, rows, group);
    }
  });
}

int64_t tiles_workspace(const LinearParams& p, int64_t group_columns, int workers) {
  const int64_t rows = task_rows(p.M, group_columns);
  int64_t bytes = 0;
  dispatch(p.dtype, [&](auto t) { bytes = Tile<decltype(t)>::bytes(rows, group_columns); });
  return workers * bytes;
}

// total += bias, for one row
template <class T>
void add_bias(const LinearParams& p, int64_t n, int64_t columns, Accumulate<T>* total) {
  if (!p.bias) return;
  const T* bias = static_cast<const T*>(p.bias) + n;
  constexpr int w = W<Accumulate<T>>;
  for (int64_t c = 0; c < columns; c += w) {
    const auto b = c + w <= columns ? load(bias + c) : load_first(bias + c, columns - c);
    store(total + c, load(total + c) + b);
  }
}

// ------------------------------------------------------------------------------------------------ linear

template <class T>
void linear_of(const LinearParams& p, const Launch& launch) {
  using A = Accumulate<T>;
  for_each_tile<T>(p, kPanel, launch, [&](const Tile<T>& tile, int64_t m, int64_t rows, int64_t group) {
    const int64_t n = group * kPanel, columns = min_of(kPanel, p.N - n);
    for (int64_t r = 0; r < rows; ++r) {
      A* total = tile.total + r * tile.columns;
      add_bias<T>(p, n, columns, total);
      T* y = static_cast<T*>(p.y) + (m + r) * p.y_stride + n;
      const T* residual = p.residual ? static_cast<const T*>(p.residual) + (m + r) * p.residual_stride + n : nullptr;
      for (int64_t c = 0; c < columns; c += W<A>) {
        const int64_t lanes = min_of<int64_t>(W<A>, columns - c);
        Vec<A> v = activate<A>(p.activation, load(total + c));
        if (residual) v += lanes == W<A> ? load(residual + c) : load_first(residual + c, lanes);
        if (lanes == W<A>)
          store(y + c, v);
        else
          store_first(y + c, v, lanes);
      }
    }
  });
}

// ---------------------------------------------------------------------------------------- QKV to the cache

// Rotates one head in place: pairs (d, d + D/2), half-split as in Llama.
template <class A>
void rotate(A* head, int64_t D, const float* cos, const float* sin) {
  const int64_t half = D / 2;
  for (int64_t d = 0; d < half; ++d) {
    const A a = head[d], b = head[d + half];
    head[d] = a * A(cos[d]) - b * A(sin[d]);
    head[d + half] = b * A(cos[d]) + a * A(sin[d]);
  }
}

template <class T>
void qkv_to_cache_of(const QkvToCacheParams& p, const Launch& launch) {
  using A = Accumulate<T>;
  // A group of columns is one head, so that rotation pairs meet in one tile.
  for_each_tile<T>(p.gemm, p.D, launch, [&](const Tile<T>& tile, int64_t m, int64_t rows, int64_t head) {
    const bool is_q = head < p.H, is_v = head >= p.H + p.Hkv;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = m + r, slot = p.slot_mapping[token];
      if (!is_q && slot < 0) continue;
      A* values = tile.total + r * tile.columns;
      add_bias<T>(p.gemm, head * p.D, p.D, values);
      if (p.rope_cos && !is_v) {
        const int64_t position = p.positions[token];
        rotate(values, p.D, p.rope_cos + position * p.rope_cos_stride, p.rope_sin + position * p.rope_sin_stride);
      }
      T* to;
      if (is_q) {
        to = static_cast<T*>(p.q) + (token * p.H + head) * p.D;
      } else {
        const int64_t* s = is_v ? p.value_strides : p.key_strides;
        const int64_t kv_head = head - p.H - (is_v ? p.Hkv : 0);
        to = static_cast<T*>(is_v ? p.value_cache : p.key_cache) + slot / p.block_size * s[0] +
             slot % p.block_size * s[1] + kv_head * s[2];
      }
      store_row(to, values, p.D);
    }
  });
}

}  // namespace

// ---------------------------------------------------------------------------------------------- launchers

int64_t linear_workspace(const LinearParams& p, int workers) { return tiles_workspace(p, kPanel, workers); }

void linear(const LinearParams& p, const Launch& launch) {
  dispatch(p.dtype, [&](auto t) { linear_of<decltype(t)>(p, launch); });
}

int64_t qkv_to_cache_workspace(const QkvToCacheParams& p, int workers) { return tiles_workspace(p.gemm, p.D, workers); }

void qkv_to_cache(const QkvToCacheParams& p, const Launch& launch) {
  dispatch(p.gemm.dtype, [&](auto t) { qkv_to_cache_of<decltype(t)>(p, launch); });
}

}  // namespace attn_ext::ATTN_EXT_ISA
