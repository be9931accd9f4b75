// Fused GEMM in bfloat16 on AMX tiles: y = act(x W^T + bias) * multiply + residual, and the QKV projection whose k and
// v go straight to the cache. The other types run on the avx512 kernels.
//
// x (M, K) is the left factor, 16 rows x 32 k a tile; W^T the right one, 32 k x 16 outputs. A task is a block of rows
// times a range of column groups. Each output is one sum over k, 32 at a time in ascending order, the same for every M,
// N and task, for plain and packed weights.
//
//   rows of a task   tiles of sums   of x   of W^T
//   1 .. 16          1 x 4           1      3 in turns     decode: bound by the memory that W comes from
//   17 and more      2 x 2           2      2              4 loads feed 4 products
#include "cpu/amx/pack.h"
#include "cpu/kernels.h"
#include "cpu/linear_row.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

constexpr int64_t kDepthBlock = 512;           // k between two visits of the sums: 32 KB of W^T, which stay in L1
constexpr int64_t kPairRows = 2 * tmm::kRows;  // rows of x that are multiplied at a time
constexpr int64_t kColumns = 16;               // of a tile of sums
constexpr int64_t kLinearColumns = 64;         // of a group of linear
constexpr int64_t kMinTaskColumns = 256;       // where x is packed, that costs up to 1/16 of the products

static_assert(kDepthBlock % tmm::kDepth == 0);

// Rows of a task, a multiple of kPairRows. A plain weight has its tiles made by each task, at the cost of 6 products.
int64_t task_rows(const LinearParams& p) { return p.packed ? 128 : 512; }

// ------------------------------------------------------------------------------------------------ the products

// Tiles of x: r-th of 16 rows, i-th of 32 k. All strides in bytes.
struct Left {
  const char* base;
  int64_t row_stride, step_stride, tile_stride;
  const char* at(int64_t r, int64_t i) const { return base + r * tile_stride + i * step_stride; }
};

// Tiles of W^T: i-th of 32 k, c-th of 16 outputs. Those of one c follow each other.
struct Right {
  const char* base;
  int64_t tile_stride;
  const char* at(int64_t i, int64_t c) const { return base + c * tile_stride + i * tmm::kBytes; }
};

// sums (R tiles, C tiles) = or += R tiles of x times C tiles of W^T, over `steps` times 32 k.
template <int R, int C>
ATTN_INLINE void multiply_tiles(int64_t steps, const Left& left, const Right& right, float* sums, int64_t ld,
                                bool accumulate) {
  static_assert(R * C <= 4);
  constexpr int kRowSums = 4 / R;  // registers: 0 .. 3 sums, then x, then W^T
  constexpr int kLeft = 4, kRight = kLeft + R, kRights = 8 - kRight;
  const int64_t stride = ld * int64_t(sizeof(float));
  const auto each_sum = [&](const auto& f) {
    each<R>([&](auto r) { each<C>([&](auto c) { f(r, c, sums + r.value * tmm::kRows * ld + c.value * kColumns); }); });
  };

  each_sum([&](auto r, auto c, float* at) {
    constexpr int sum = decltype(r)::value * kRowSums + decltype(c)::value;
    if (accumulate)
      tmm::load<sum>(at, stride);
    else
      tmm::zero<sum>();
  });
  for (int64_t i = 0; i < steps; ++i) {
    each<R>([&](auto r) { tmm::load<kLeft + decltype(r)::value>(left.at(r.value, i), left.row_stride); });
    each<C>([&](auto c) {
      constexpr int column = decltype(c)::value, b = kRight + column % kRights;
      tmm::load<b>(right.at(i, column));
      each<R>([&](auto r) {
        constexpr int row = decltype(r)::value;
        tmm::dot<row * kRowSums + column, kLeft + row, b>();
      });
    });
  }
  each_sum(
      [&](auto r, auto c, float* at) { tmm::store<decltype(r)::value * kRowSums + decltype(c)::value>(at, stride); });
}

// The same with C = columns, at most 4 / R.
template <int R>
void multiply_columns(int64_t columns, int64_t steps, const Left& left, const Right& right, float* sums, int64_t ld,
                      bool accumulate) {
  const auto run = [&](auto c) { multiply_tiles<R, decltype(c)::value>(steps, left, right, sums, ld, accumulate); };
  if constexpr (R == 1) {
    if (columns == 4) return run(Constant<4>{});
    if (columns == 3) return run(Constant<3>{});
  }
  if (columns == 2) return run(Constant<2>{});
  return run(Constant<1>{});
}

// ------------------------------------------------------------------------------------------------------- tasks

// Columns n .. n + columns - 1 of the product. With a packed weight sums begin at the tile that holds n.
struct Group {
  int64_t n, columns;
  int64_t offset;  // of column n in the sums
  int64_t tiles;
  Group(const LinearParams& p, int64_t n, int64_t columns)
      : n(n), columns(columns), offset(p.packed ? n % kColumns : 0), tiles(ceil_div(offset + columns, kColumns)) {}
};

// Rows of a task: whole pairs of tiles, or what remains behind them. All tiles of a task have one shape.
struct RowBlock {
  int64_t first, count;
  RowBlock(const LinearParams& p, int64_t index) {
    const int64_t in_pairs = p.M / kPairRows * kPairRows;
    first = min_of(index * task_rows(p), in_pairs);
    count = first < in_pairs ? min_of(task_rows(p), in_pairs - first) : p.M - in_pairs;
  }
  static int64_t blocks(const LinearParams& p) {
    return ceil_div(p.M / kPairRows * kPairRows, task_rows(p)) + (p.M % kPairRows > 0);
  }
  tmm::Shapes shapes() const {
    tmm::Shapes shapes = tmm::Shapes::full();
    const int64_t upper = min_of(count, tmm::kRows), lower = min_of(count - upper, tmm::kRows);
    if (lower == 0) {  // 1 x 4
      for (int i = 0; i < 5; ++i) shapes.set(i, upper);
    } else {                                             // 2 x 2
      for (int i = 2; i < 4; ++i) shapes.set(i, lower);  // sums
      shapes.set(5, lower);                              // x
    }
    return shapes;
  }
};

// How the product is cut: into blocks of rows, and ranges of groups of columns.
struct Plan {
  int64_t row_blocks;
  int64_t group_columns, groups, groups_per_task;
  int64_t tasks;
  int64_t ld;  // of the sums of a group: an odd number of cache lines

  Plan(const LinearParams& p, int64_t group_columns, int workers) : group_columns(group_columns) {
    row_blocks = RowBlock::blocks(p);
    groups = ceil_div(p.N, group_columns);
    const bool tiny = p.M * p.N < 256 || p.M * p.N * p.K < 65536;
    const bool few = p.M <= kPairRows;
    const int64_t tasks_wanted = tiny ? 1 : few ? workers : 4 * workers;
    const int64_t least = few ? 1 : ceil_div(kMinTaskColumns, group_columns);
    groups_per_task = min_of(groups, max_of(least, ceil_div(groups * row_blocks, tasks_wanted)));
    tasks = ceil_div(groups, groups_per_task) * row_blocks;
    ld = (ceil_div(group_columns + (p.packed ? kColumns - 1 : 0), kColumns) | 1) * kColumns;
  }
};

int64_t padded_k(const LinearParams& p) { return round_up(p.K, tmm::kDepth); }

// Whether tiles of x are loaded from x itself. A row of a tile that crosses a cache line makes its load 7 times slower;
// rows a multiple of 1 KB apart share too few sets of L1 to stay there until the next column.
bool x_in_place(const LinearParams& p) {
  const int64_t bytes = p.x_stride * int64_t(sizeof(bf16));
  return p.K % tmm::kDepth == 0 && reinterpret_cast<uintptr_t>(p.x) % 64 == 0 && bytes % 64 == 0 &&
         (bytes % 1024 != 0 || p.M <= kPairRows);
}

// Scratch of one worker.
struct Scratch {
  char* x;      // (row tiles, K / 32) tiles of x, unless x can be used in place
  char* right;  // (column tiles, kDepthBlock / 32) tiles of W^T, unless it can be used in place
  float* sums;  // (rows, ld)

  static int64_t x_bytes(const LinearParams& p) {
    if (x_in_place(p)) return 0;
    return round_up(min_of(task_rows(p), p.M), tmm::kRows) * padded_k(p) * int64_t(sizeof(bf16));
  }
  static constexpr int64_t kRightBytes = 4 * kColumns * kDepthBlock * int64_t(sizeof(bf16));
  static int64_t bytes(const LinearParams& p, const Plan& plan) {  // a vector more: the last row is read beyond its end
    const int64_t sums = min_of(task_rows(p), p.M) * plan.ld * int64_t(sizeof(float)) + 64;
    return x_bytes(p) + kRightBytes + sums;
  }
  Scratch(char* memory, const LinearParams& p) {
    x = memory;
    right = x + x_bytes(p);
    sums = reinterpret_cast<float*>(right + kRightBytes);
  }
};

// Tiles of the rows of x.
Left left_of(const LinearParams& p, const RowBlock& rows, const Scratch& s) {
  const bf16* x = static_cast<const bf16*>(p.x) + rows.first * p.x_stride;
  if (x_in_place(p)) {
    const int64_t stride = p.x_stride * int64_t(sizeof(bf16));
    return {reinterpret_cast<const char*>(x), stride, tmm::kRowBytes, tmm::kRows * stride};
  }
  const int64_t tile_stride = padded_k(p) / tmm::kDepth * tmm::kBytes;
  for (int64_t r = 0; r < rows.count; ++r) {
    const bf16* from = x + r * p.x_stride;
    char* to = s.x + r / tmm::kRows * tile_stride + r % tmm::kRows * tmm::kRowBytes;
    pack_left_row(from, p.K, to, tmm::kBytes);
  }
  return {s.x, tmm::kRowBytes, tmm::kBytes, tile_stride};
}

// Tiles of W^T: k0 .. k0 + depth - 1 of `tiles` times 16 outputs from column tile `first` of the group on.
Right right_of(const LinearParams& p, const Group& group, int64_t first, int64_t tiles, int64_t k0, int64_t depth,
               const Scratch& s) {
  const bf16* weight = static_cast<const bf16*>(p.weight);
  constexpr int64_t staged_stride = kDepthBlock / tmm::kDepth * tmm::kBytes;
  const int64_t used = ceil_div(depth, 2) * tmm::kRowBytes, padded = round_up(used, tmm::kBytes);
  if (p.packed) {
    const bf16* packed = weight + ((group.n / kColumns + first) * p.K + k0) * kColumns;
    const int64_t stride = p.K * kColumns;
    if (used == padded) return {reinterpret_cast<const char*>(packed), stride * int64_t(sizeof(bf16))};
    for (int64_t c = 0; c < tiles; ++c) {
      memcpy(s.right + c * staged_stride, packed + c * stride, size_t(used));
      memset(s.right + c * staged_stride + used, 0, size_t(padded - used));
    }
    return {s.right, staged_stride};
  }
  for (int64_t c = 0; c < tiles; ++c) {
    const int64_t column = (first + c) * kColumns;
    const bf16* rows = weight + (group.n + column) * p.weight_stride + k0;
    pack_right(
        min_of(kColumns, group.columns - column), depth, [&](int64_t i) { return rows + i * p.weight_stride; },
        s.right + c * staged_stride);
  }
  return {s.right, staged_stride};
}

// s.sums = the rows times the columns of the group
void multiply(const LinearParams& p, const Plan& plan, const RowBlock& rows, const Left& left, const Group& group,
              const Scratch& s) {
  const bool pairs = rows.count > tmm::kRows;
  const int64_t most = pairs ? 2 : 4;
  for (int64_t c = 0; c < group.tiles; c += most) {
    const int64_t tiles = min_of(most, group.tiles - c);
    for (int64_t k0 = 0; k0 < p.K; k0 += kDepthBlock) {
      const int64_t depth = min_of(kDepthBlock, p.K - k0), steps = ceil_div(depth, tmm::kDepth);
      const Right right = right_of(p, group, c, tiles, k0, depth, s);
      for (int64_t r = 0; r < rows.count; r += kPairRows) {
        Left from = left;
        from.base = left.at(r / tmm::kRows, k0 / tmm::kDepth);
        float* sums = s.sums + r * plan.ld + c * kColumns;
        if (pairs)
          multiply_columns<2>(tiles, steps, from, right, sums, plan.ld, k0 > 0);
        else
          multiply_columns<1>(tiles, steps, from, right, sums, plan.ld, k0 > 0);
      }
    }
  }
  if (p.K == 0) memset(s.sums, 0, size_t(rows.count * plan.ld) * sizeof(float));
}

// Runs finish(sums, row, group) on every row of every group.
template <class Finish>
void for_each_row(const LinearParams& p, int64_t group_columns, const Launch& launch, const Finish& finish) {
  const Plan plan(p, group_columns, launch.workers);
  const int64_t bytes = Scratch::bytes(p, plan);
  Queue queue{0, plan.tasks};
  run_parallel(launch, plan.tasks, [&](int worker) {
    const Scratch s(launch.workspace + worker * bytes, p);
    for (int64_t task; queue.take(task);) {
      const RowBlock rows(p, task % plan.row_blocks);
      const tmm::Config config(rows.shapes());
      const Left left = left_of(p, rows, s);
      const int64_t begin = task / plan.row_blocks * plan.groups_per_task;
      for (int64_t g = begin; g < min_of(plan.groups, begin + plan.groups_per_task); ++g) {
        const Group group(p, g * group_columns, min_of(group_columns, p.N - g * group_columns));
        multiply(p, plan, rows, left, group, s);
        for (int64_t r = 0; r < rows.count; ++r) finish(s.sums + r * plan.ld + group.offset, rows.first + r, group);
      }
    }
  });
}

int64_t scratch_bytes(const LinearParams& p, int64_t group_columns, int workers) {
  return workers * Scratch::bytes(p, Plan(p, group_columns, workers));
}

}  // namespace

// ---------------------------------------------------------------------------------------------- launchers

int64_t linear_workspace(const LinearParams& p, int workers) {
  return p.dtype == DType::bf16 ? scratch_bytes(p, kLinearColumns, workers) : avx512::linear_workspace(p, workers);
}

void linear(const LinearParams& p, const Launch& launch) {
  if (p.dtype != DType::bf16) return avx512::linear(p, launch);
  for_each_row(p, kLinearColumns, launch, [&](float* sums, int64_t m, const Group& group) {
    finish_linear_row<bf16>(p, m, group.n, group.columns, sums);
  });
}

int64_t qkv_to_cache_workspace(const QkvToCacheParams& p, int workers) {
  return p.gemm.dtype == DType::bf16 ? scratch_bytes(p.gemm, p.D, workers) : avx512::qkv_to_cache_workspace(p, workers);
}

void qkv_to_cache(const QkvToCacheParams& p, const Launch& launch) {
  if (p.gemm.dtype != DType::bf16) return avx512::qkv_to_cache(p, launch);
  // A group of columns is one head, so that rotation pairs meet in one row of sums.
  for_each_row(p.gemm, p.D, launch, [&](float* sums, int64_t token, const Group& group) {
    finish_qkv_row<bf16>(p, token, group.n / p.D, sums);
  });
}

}  // namespace attn_ext::ATTN_EXT_ISA
