// Fused GEMM in bfloat16 on AMX tiles: y = act(x W^T + bias) * multiply + residual, and the QKV projection whose k and
// v go straight to the cache. The other types run on the avx512 kernels.
//
// Each output is one sum over k, 32 at a time in ascending order, the same for every M, N and task, for plain and
// packed weights. A worker takes a block of rows, copies it to tiles, and multiplies it by groups of columns; the sums
// of a group stay in tile registers over all of k.
//
//   rows of x   left tiles   right tiles   sums    loads a product
//   17 and more x            W^T           2 x 2   1      W^T from L1, as much as stays there; x from L2
//   1 .. 16     x            W^T           1 x 1   2      packed weight: one stream of the memory that W comes from
//   1 .. 16     W in place   x^T           1 x 1   2      plain weight: no transposition; the sums are turned instead
#include "cpu/amx/pack.h"
#include "cpu/kernels.h"
#include "cpu/linear_row.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

constexpr int64_t kColumns = 16;               // of a tile of sums
constexpr int64_t kPairRows = 2 * tmm::kRows;  // rows of x that are multiplied at a time
constexpr int64_t kLinearColumns = 32;         // of a group of linear, many rows
constexpr int64_t kFewColumns = 32;            // the same, up to 16 rows
constexpr int64_t kBlockBytes = 3 << 18;       // tiles of a block of rows of x: less than half of the L2 cache
constexpr int64_t kLeastRows = 64;             // of a block: each panel of W^T comes from beyond L2 once a block
constexpr int64_t kL1Bytes = 48 << 10;         // of the first cache
constexpr int64_t kChunkColumns = 256;         // at least, of what a worker takes at a time, many rows
constexpr int64_t kAhead = 8 * tmm::kBytes;    // up to 16 rows, W is asked for this far ahead, into L2

int64_t padded_k(const LinearParams& p) { return round_up(p.K, tmm::kDepth); }
// Bytes from one output's part of the weight to the next.
int64_t weight_stride(const LinearParams& p) { return (p.packed ? p.K : p.weight_stride) * int64_t(sizeof(bf16)); }
// Asks for the line that holds *to, to be written.
ATTN_INLINE void prefetch_to_write(const void* to) {
  asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(to)));
}
int64_t steps_of(const LinearParams& p) { return ceil_div(p.K, tmm::kDepth); }

// ------------------------------------------------------------------------------------------------ the products

// sums (R tiles, C tiles) = R tiles of x times C tiles of W^T, over `steps` times 32 k. Tiles of x are `x_tile` bytes
// apart, those of a step follow each other. After each step: between(step).
template <int R, int C, class Between>
ATTN_INLINE void multiply_tiles(int64_t steps, const char* x, int64_t x_tile, const char* right, int64_t right_stride,
                                float* sums, int64_t ld, const Between& between) {
  static_assert(R <= 2 && C <= 2);
  constexpr int kLeft = 4, kRight = 6;  // registers: 0 .. 3 sums, then x, then W^T
  each<R>([&](auto r) { each<C>([&](auto c) { tmm::zero<2 * decltype(r)::value + decltype(c)::value>(); }); });
  for (int64_t i = 0; i < steps; ++i) {
    const char* a = x + i * 2 * x_tile;
    const char* b = right + i * tmm::kBytes;
    each<C>([&](auto c) {
      constexpr int column = decltype(c)::value;
      if constexpr (column == 0) tmm::load<kLeft>(a);
      tmm::load<kRight + column>(b + column * right_stride);
      if constexpr (column == 0 && R == 2) tmm::load<kLeft + 1>(a + x_tile);
      each<R>([&](auto r) {
        constexpr int row = decltype(r)::value;
        tmm::dot<2 * row + column, kLeft + row, kRight + column>();
      });
    });
    between(i);
  }
  each<R>([&](auto r) {
    each<C>([&](auto c) {
      constexpr int row = decltype(r)::value, column = decltype(c)::value;
      tmm::store<2 * row + column>(sums + row * tmm::kRows * ld + column * kColumns, ld * int64_t(sizeof(float)));
    });
  });
}

// ------------------------------------------------------------------------------------------------------ the work

// Columns n .. n + columns - 1 of the product. With a packed weight sums begin at the tile that holds n.
struct Group {
  int64_t n, columns;
  int64_t offset;  // of column n in the sums
  int64_t tiles;
  Group(const LinearParams& p, int64_t n, int64_t columns)
      : n(n), columns(columns), offset(p.packed ? n % kColumns : 0), tiles(ceil_div(offset + columns, kColumns)) {}
};

// Parts: blocks of rows times ranges of groups. A worker begins at a part of its own, takes chunks of it, and then
// helps with the others.
//
// Where W^T of two tiles of columns just fits the first cache, tiles of x have four colours: those of one colour lie 4
// KB apart, between those of the others, so that they share a quarter of the cache's sets (64 of 64 bytes). Rows of one
// colour follow each other, and three quarters of W^T stay in the cache while x streams through the rest of it. With
// tiles one behind the other x would drive out all of W^T.
struct Plan {
  bool few;     // rows: one tile
  bool x_left;  // else x^T is the right factor, and rows of a plain weight are the left one where they are
  int64_t rows, row_blocks;
  int64_t colours, colour_pairs;  // pairs of tiles of rows of one colour
  int64_t x_tile;                 // bytes from a tile of x to the next of its colour
  int64_t group_columns, groups;
  int64_t column_parts, part_groups, chunk_groups;
  int64_t ld;       // of the sums of a group
  int64_t buffers;  // of sums of a pair of rows, many rows: all pairs of a block, unless a group is two tiles wide

  Plan(const LinearParams& p, int64_t group_columns, int workers)
      : few(p.M <= tmm::kRows), group_columns(group_columns) {
    groups = ceil_div(p.N, group_columns);
    x_left = !few || p.packed || p.K % tmm::kDepth != 0 || p.N % kColumns != 0 || group_columns % kColumns != 0;
    const bool tiny = p.M * p.N < 256 || p.M * p.N * p.K < 65536;
    if (tiny) workers = 1;
    const int64_t fit = kBlockBytes / max_of<int64_t>(1, padded_k(p) * int64_t(sizeof(bf16)));
    const int64_t share = max_of<int64_t>(ceil_div(p.M, workers), 4 * kPairRows);  // enough rows for all workers
    rows = max_of(kLeastRows, min_of(fit / kPairRows * kPairRows, round_up(share, kPairRows)));
    row_blocks = ceil_div(p.M, rows);
    rows = round_up(ceil_div(p.M, row_blocks), kPairRows);
    row_blocks = ceil_div(p.M, rows);
    part_groups = ceil_div(groups, ceil_div(workers, row_blocks));
    column_parts = ceil_div(groups, part_groups);
    chunk_groups = few ? 1 : ceil_div(kChunkColumns, group_columns);
    ld = round_up(group_columns + (p.packed && group_columns % kColumns != 0 ? kColumns - 1 : 0), 2 * kColumns);
    buffers = few || ld <= 2 * kColumns ? 2 : max_of<int64_t>(2, rows / kPairRows);
    const int64_t cache = buffers > 2 ? kL1Bytes * 3 / 4 : kL1Bytes;  // the sums of a block need some of it
    colours = 2 * kColumns * padded_k(p) * int64_t(sizeof(bf16)) <= cache ? 4 : 1;
    colour_pairs = ceil_div(rows / kPairRows, colours);
    x_tile = colours * tmm::kBytes;
  }
  int64_t parts() const { return row_blocks * column_parts; }
  int64_t chunks() const { return parts() * ceil_div(part_groups, chunk_groups); }
};

// The next chunk of each part, a cache line each.
struct alignas(64) Taken {
  int64_t groups;
};

// Scratch of one worker.
struct Scratch {
  char* x;      // tiles of the rows of a block
  char* right;  // (column tiles, K / 32) tiles of W^T, where they are not those of the weight
  float* sums;  // buffers of (rows of a pair, ld)

  static bool stages_right(const LinearParams& p, const Plan& plan) {
    return plan.x_left && (!p.packed || p.K % tmm::kDepth != 0);
  }
  static int64_t x_bytes(const LinearParams& p, const Plan& plan) {
    if (plan.few) return tmm::kRows * padded_k(p) * int64_t(sizeof(bf16));
    return plan.colour_pairs * 2 * steps_of(p) * plan.x_tile;
  }
  static int64_t right_bytes(const LinearParams& p, const Plan& plan) {
    return stages_right(p, plan) ? plan.ld / kColumns * steps_of(p) * tmm::kBytes : 0;
  }
  static int64_t sums_bytes(const Plan& plan) { return plan.buffers * kPairRows * plan.ld * int64_t(sizeof(float)); }
  static int64_t bytes(const LinearParams& p, const Plan& plan) {  // a vector more: the last row is read beyond its end
    return x_bytes(p, plan) + right_bytes(p, plan) + sums_bytes(plan) + 64;
  }
  // The first tile of pair number `pair` of the rows, where they are many.
  char* x_pair(const LinearParams& p, const Plan& plan, int64_t pair) const {
    return x + pair % plan.colour_pairs * 2 * steps_of(p) * plan.x_tile + pair / plan.colour_pairs * tmm::kBytes;
  }
  Scratch(char* memory, const LinearParams& p, const Plan& plan) {
    x = memory;
    right = x + x_bytes(p, plan);
    sums = reinterpret_cast<float*>(right + right_bytes(p, plan));
  }
};

// Tiles of rows first .. first + count - 1 of x: pairs of tiles (2 x 16 rows) of a step follow each other, then the
// steps. Rows up to the next multiple of 16 are zeros. Tile by tile: a row's parts of all tiles would share one set of
// the first cache.
void pack_rows(const LinearParams& p, const Plan& plan, int64_t first, int64_t count, const Scratch& s) {
  const int64_t row_bytes = p.x_stride * int64_t(sizeof(bf16)), used = p.K * int64_t(sizeof(bf16));
  for (int64_t r = 0; r < count; r += tmm::kRows) {
    const char* x = static_cast<const char*>(p.x) + (first + r) * row_bytes;
    char* tile = s.x_pair(p, plan, r / kPairRows) + r % kPairRows / tmm::kRows * plan.x_tile;
    const int64_t rows = min_of(tmm::kRows, count - r);
    for (int64_t k = 0; k < used; k += tmm::kRowBytes, tile += 2 * plan.x_tile) {
      const int64_t bytes = min_of(tmm::kRowBytes, used - k);
      if (bytes < tmm::kRowBytes || rows < tmm::kRows) memset(tile, 0, tmm::kBytes);
      for (int64_t i = 0; i < rows; ++i) {
        const char* from = x + i * row_bytes + k;
        if (bytes == tmm::kRowBytes)
          memcpy(tile + i * tmm::kRowBytes, from, tmm::kRowBytes);
        else
          memcpy(tile + i * tmm::kRowBytes, from, size_t(bytes));
      }
    }
  }
}

// Tiles of up to 16 rows of x, the left factor, or of x^T.
void pack_row(const LinearParams& p, const Plan& plan, char* to) {
  const auto row = [&](int64_t r) { return static_cast<const bf16*>(p.x) + r * p.x_stride; };
  if (plan.x_left) {
    for (int64_t r = 0; r < p.M; ++r) pack_left_row(row(r), p.K, to + r * tmm::kRowBytes, p.M * tmm::kRowBytes);
  } else {
    pack_right(p.M, p.K, row, to);
  }
}

// Tiles of W^T: step i of column tile c at base + c * stride + i KB.
struct Right {
  const char* base;
  int64_t stride;
};

Right right_of(const LinearParams& p, const Group& group, const Scratch& s) {
  const bf16* weight = static_cast<const bf16*>(p.weight);
  const int64_t used = ceil_div(p.K, 2) * tmm::kRowBytes, padded = steps_of(p) * tmm::kBytes;
  if (p.packed) {
    const bf16* packed = weight + group.n / kColumns * p.K * kColumns;
    if (used == padded) return {reinterpret_cast<const char*>(packed), padded};
    for (int64_t c = 0; c < group.tiles; ++c) {
      memcpy(s.right + c * padded, packed + c * p.K * kColumns, size_t(used));
      memset(s.right + c * padded + used, 0, size_t(padded - used));
    }
    return {s.right, padded};
  }
  for (int64_t c = 0; c < group.tiles; ++c) {
    const bf16* rows = weight + (group.n + c * kColumns) * p.weight_stride;
    pack_right(
        min_of(kColumns, group.columns - c * kColumns), p.K, [&](int64_t i) { return rows + i * p.weight_stride; },
        s.right + c * padded);
  }
  return {s.right, padded};
}

// ----------------------------------------------------------------------------------------------------- many rows

// Rows first .. first + count - 1 times groups begin .. end - 1. A pair's rows are finished between the products of the
// next: the vector units are free then. What they will be written to is asked for during their own products: a store
// that misses the caches would hold up all stores behind it, those of tiles too.
template <class Finish>
void multiply_rows(const LinearParams& p, const Plan& plan, const Scratch& s, int64_t first, int64_t count,
                   int64_t begin, int64_t end, const Finish& finish) {
  const int64_t steps = steps_of(p), pairs = ceil_div(count, kPairRows);
  const int64_t asked_per_step = ceil_div(kPairRows, max_of<int64_t>(steps, 1));
  const int64_t finished_per_step = max_of(finish.rows_per_step(), asked_per_step);
  const int64_t buffer = kPairRows * plan.ld;
  float* finished = nullptr;
  int64_t row = 0, left = 0;  // of `finished`
  Group finished_group(p, 0, 0);
  // The next group's part of the weight, which follows this one's, comes to L2 meanwhile.
  const int64_t weight_lines = plan.group_columns * weight_stride(p) / 64;
  const int64_t visits = pairs * ceil_div(plan.ld, 2 * kColumns) * max_of<int64_t>(steps, 1);
  const int64_t lines_per_step = ceil_div(weight_lines, visits);
  const char* ahead = nullptr;
  const char* ahead_end = nullptr;
  const auto finish_some = [&](int64_t rows) {
    rows = min_of(rows, left);
    if (rows == 0) return;
    finish(finished + finished_group.offset, plan.ld, row, rows, finished_group);
    finished += rows * plan.ld;
    row += rows;
    left -= rows;
  };
  for (int64_t g = begin; g < end; ++g) {
    const Group group(p, g * plan.group_columns, min_of(plan.group_columns, p.N - g * plan.group_columns));
    const Right right = right_of(p, group, s);
    if (g + 1 < plan.groups) {
      ahead = static_cast<const char*>(p.weight) + (group.n + group.columns) * weight_stride(p);
      ahead_end = ahead + min_of(plan.group_columns, p.N - group.n - group.columns) * weight_stride(p);
    }
    for (int64_t c = 0; c < group.tiles; c += 2) {
      const bool last = c + 2 >= group.tiles;
      for (int64_t pair = 0; pair < pairs; ++pair) {
        const char* x = s.x_pair(p, plan, pair);
        float* sums = s.sums + (g * pairs + pair) % plan.buffers * buffer;
        const int64_t r = pair * kPairRows, rows = min_of(kPairRows, count - r);
        int64_t asked = first + r;
        const int64_t asked_end = last ? asked + rows : asked;
        const auto run = [&](auto row_tiles, auto column_tiles) {
          multiply_tiles<decltype(row_tiles)::value, decltype(column_tiles)::value>(
              steps, x, plan.x_tile, right.base + c * right.stride, right.stride, sums + c * kColumns, plan.ld,
              [&](int64_t) {
                for (int64_t i = 0; i < lines_per_step && ahead < ahead_end; ++i, ahead += 64)
                  __builtin_prefetch(ahead, 0, 2);
                for (int64_t i = 0; i < asked_per_step && asked < asked_end; ++i) finish.prefetch(asked++, group);
                finish_some(finished_per_step);
              });
        };
        if (group.tiles - c > 1)
          rows > tmm::kRows ? run(Constant<2>{}, Constant<2>{}) : run(Constant<1>{}, Constant<2>{});
        else
          rows > tmm::kRows ? run(Constant<2>{}, Constant<1>{}) : run(Constant<1>{}, Constant<1>{});
        finish_some(left);
        if (!last) continue;
        finished = sums;
        row = first + r;
        left = rows;
        finished_group = group;
      }
    }
  }
  finish_some(left);
}

// ------------------------------------------------------------------------------------------------ up to 16 rows

// The tiles' shapes for `rows` of x: as left factor, or as right one beside rows of a plain weight.
tmm::Shapes few_shapes(int64_t rows, bool x_left) {
  tmm::Shapes shapes = tmm::Shapes::full();
  for (int i = 0; i < 5; ++i) {  // sums, x
    if (x_left)
      shapes.set(i, rows);
    else
      shapes.set(i, tmm::kRows, rows * int64_t(sizeof(float)));
  }
  return shapes;
}

// A weight is read from end to end, each worker its part of it, and its lines are asked for kAhead bytes before they
// are used. One tile of sums at a time: columns beside each other would be streams of their own, which all begin anew.
ATTN_INLINE void ask(const char* memory, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(memory + line, 0, 2);
}

// sums (rows, 16) = x times a column of tiles of W^T. Tiles of x are `x_tile` bytes.
ATTN_INLINE void multiply_few(int64_t steps, const char* x, int64_t x_tile, const char* right, float* sums,
                              int64_t ld) {
  tmm::zero<0>();
  for (int64_t i = 0; i < steps; ++i, x += x_tile, right += tmm::kBytes) {
    ask(right + kAhead, tmm::kBytes);
    tmm::load<4>(x);
    tmm::load<5>(right);
    tmm::dot<0, 4, 5>();
  }
  tmm::store<0>(sums, ld * int64_t(sizeof(float)));
}

// The same by a plain weight, 16 outputs where they are; xt: tiles of x^T.
ATTN_INLINE void multiply_few_plain(int64_t steps, const char* weight, int64_t stride, const char* xt, int64_t rows,
                                    float* sums, int64_t ld) {
  const char* ahead = weight + tmm::kRows * stride;  // in the weight's own order: a tile's lines lie far apart
  tmm::zero<0>();
  for (int64_t i = 0; i < steps; ++i) {
    ask(ahead + i * tmm::kBytes, tmm::kBytes);
    tmm::load<4>(xt + i * tmm::kBytes);
    tmm::load<5>(weight + i * tmm::kRowBytes, stride);
    tmm::dot<0, 5, 4>();
  }
  alignas(64) float turned[tmm::kFloats];
  tmm::store<0>(turned);
  Vec<float> v[W<float>];
  for (int i = 0; i < W<float>; ++i) v[i] = load(turned + i * kColumns);
  transpose<float>(v);
  for (int64_t r = 0; r < rows; ++r) store(sums + r * ld, v[r]);
}

template <class Finish>
void multiply_row(const LinearParams& p, const Plan& plan, const Scratch& s, int64_t begin, int64_t end,
                  const Finish& finish) {
  const int64_t steps = steps_of(p);
  for (int64_t g = begin; g < end; ++g) {
    const Group group(p, g * plan.group_columns, min_of(plan.group_columns, p.N - g * plan.group_columns));
    const Right right = plan.x_left ? right_of(p, group, s) : Right{};
    const char* weight = static_cast<const char*>(p.weight) + group.n * weight_stride(p);
    for (int64_t c = 0; c < group.tiles; ++c) {
      float* sums = s.sums + c * kColumns;
      if (plan.x_left)
        multiply_few(steps, s.x, p.M * tmm::kRowBytes, right.base + c * right.stride, sums, plan.ld);
      else
        multiply_few_plain(steps, weight + c * tmm::kRows * weight_stride(p), weight_stride(p), s.x, p.M, sums,
                           plan.ld);
    }
    finish(s.sums + group.offset, plan.ld, 0, p.M, group);
  }
}

// ------------------------------------------------------------------------------------------------------- workers

// Runs finish(sums, row, group) on every row of every group.
template <class Finish>
void for_each_row(const LinearParams& p, int64_t group_columns, const Launch& launch, const Finish& finish) {
  const Plan plan(p, group_columns, launch.workers);
  Taken* taken = reinterpret_cast<Taken*>(launch.workspace);
  memset(taken, 0, size_t(plan.parts()) * sizeof(Taken));
  char* memory = launch.workspace + plan.parts() * int64_t(sizeof(Taken));
  const int64_t bytes = round_up(Scratch::bytes(p, plan), 64);
  run_parallel<float>(launch, plan.chunks(), [&](int worker) {
    const Scratch s(memory + worker * bytes, p, plan);
    const tmm::Config config(plan.few ? few_shapes(p.M, plan.x_left) : tmm::Shapes::full());
    int64_t packed_block = -1;  // whose tiles are in s.x
    const int64_t own = plan.parts() * worker / launch.workers;
    for (int64_t i = 0; i < plan.parts(); ++i) {
      const int64_t part = (own + i) % plan.parts(), block = part / plan.column_parts;
      const int64_t first = block * plan.rows, count = min_of(plan.rows, p.M - first);
      const int64_t from = part % plan.column_parts * plan.part_groups;
      const int64_t to = min_of(plan.groups, from + plan.part_groups);
      for (;;) {
        const int64_t begin = from + __atomic_fetch_add(&taken[part].groups, plan.chunk_groups, __ATOMIC_RELAXED);
        if (begin >= to) break;
        const int64_t end = min_of(to, begin + plan.chunk_groups);
        if (packed_block != block) {
          if (plan.few) {
            ask(static_cast<const char*>(p.weight) + begin * plan.group_columns * weight_stride(p), kAhead);
            pack_row(p, plan, s.x);
          } else {
            pack_rows(p, plan, first, count, s);
          }
          packed_block = block;
        }
        if (p.K == 0) memset(s.sums, 0, size_t(Scratch::sums_bytes(plan)));
        if (plan.few)
          multiply_row(p, plan, s, begin, end, finish);
        else
          multiply_rows(p, plan, s, first, count, begin, end, finish);
      }
    }
  });
}

int64_t scratch_bytes(const LinearParams& p, int64_t group_columns, int workers) {
  const Plan plan(p, group_columns, workers);
  return plan.parts() * int64_t(sizeof(Taken)) + workers * round_up(Scratch::bytes(p, plan), 64);
}

// What becomes of a row of sums.
struct LinearRows {
  const LinearParams& p;
  // Sums are still in the first cache soon after their products; more work spreads over all of the next ones.
  int64_t rows_per_step() const { return p.activation == Activation::none ? 8 : 1; }
  void prefetch(int64_t m, const Group& group) const {
    const auto at = [&](const void* base, int64_t stride) {
      return static_cast<const bf16*>(base) + m * stride + group.n;
    };
    prefetch_to_write(at(p.y, p.y_stride));
    if (p.multiply) __builtin_prefetch(at(p.multiply, p.multiply_stride), 0, 2);
    if (p.residual) __builtin_prefetch(at(p.residual, p.residual_stride), 0, 2);
  }
  void operator()(const float* sums, int64_t ld, int64_t m, int64_t rows, const Group& group) const {
    finish_linear_rows<bf16>(p, m, rows, group.n, group.columns, sums, ld);
  }
};

struct QkvRows {  // a group of columns is one head, so that rotation pairs meet in one row of sums
  const QkvToCacheParams& p;
  int64_t rows_per_step() const { return 1; }
  void prefetch(int64_t, const Group&) const {}  // finding the slot costs more than it gains
  void operator()(float* sums, int64_t ld, int64_t token, int64_t rows, const Group& group) const {
    for (int64_t r = 0; r < rows; ++r) finish_qkv_row<bf16>(p, token + r, group.n / p.D, sums + r * ld);
  }
};

int64_t linear_group(const LinearParams& p) { return p.M <= tmm::kRows ? kFewColumns : kLinearColumns; }

}  // namespace

// ---------------------------------------------------------------------------------------------- launchers

int64_t linear_workspace(const LinearParams& p, int workers) {
  return p.dtype == DType::bf16 ? scratch_bytes(p, linear_group(p), workers) : avx512::linear_workspace(p, workers);
}

void linear(const LinearParams& p, const Launch& launch) {
  if (p.dtype != DType::bf16) return avx512::linear(p, launch);
  for_each_row(p, linear_group(p), launch, LinearRows{p});
}

int64_t qkv_to_cache_workspace(const QkvToCacheParams& p, int workers) {
  return p.gemm.dtype == DType::bf16 ? scratch_bytes(p.gemm, p.D, workers) : avx512::qkv_to_cache_workspace(p, workers);
}

void qkv_to_cache(const QkvToCacheParams& p, const Launch& launch) {
  if (p.gemm.dtype != DType::bf16) return avx512::qkv_to_cache(p, launch);
  for_each_row(p.gemm, p.D, launch, QkvRows{p});
}

}  // namespace attn_ext::ATTN_EXT_ISA
