// Fused GEMM: y = act(x W^T + bias) * multiply + residual, and the QKV projection whose k and v go straight to the
// cache.
//
// x (M, K), W (N, K), row-major or packed in panels of 16 columns (gemm_packed.h). A task is a block of rows times a
// range of column groups; it widens its rows of x once. Each output is a sum over k in blocks of 256, added in
// ascending order: the same for every M, N and task, packed or not.
#include "cpu/gemm_packed.h"
#include "cpu/kernels.h"
#include "cpu/linear_row.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

constexpr int64_t kDepthBlock = 256;              // k summed in registers before it joins the total
constexpr int64_t kChunk = kMostPanels * kPanel;  // columns of a group of linear
constexpr int64_t kFewColumns = kPanel;  // ... of a plain weight and few rows: its rows are read from end to end
constexpr int64_t kTaskRows = 384;       // rows of a task: preparing W costs 1/384 of a multiplication each
constexpr int64_t kTaskElements = kTaskRows * 4096;  // of x, at most where that leaves kFewTaskRows rows
constexpr int64_t kRowsAhead = 12;                   // rows of y are asked for before they are summed
constexpr int64_t kFewTaskRows = 48;                 // ... where that leaves workers without a task, but no fewer

// Columns n .. n + columns - 1 of the product. With a packed weight sums begin at the panel that holds n.
struct Group {
  int64_t n, columns;
  int64_t offset;  // of column n in the sums
  int64_t padded;  // whole panels that are summed, in columns
  Group(const LinearParams& p, int64_t n, int64_t columns)
      : n(n), columns(columns), offset(p.packed ? n % kPanel : 0), padded(round_up(offset + columns, kPanel)) {}
};

// How the product is cut: into blocks of rows, and ranges of groups of columns.
struct Plan {
  int64_t rows, row_blocks;
  int64_t group_columns, groups, groups_per_task, ranges;
  int64_t tasks;
  bool tiny;             // one worker does it all: waking another costs some microseconds
  int64_t total_stride;  // of the sums of a group

  Plan(const LinearParams& p, int64_t group_columns, int workers) : group_columns(group_columns) {
    groups = ceil_div(p.N, group_columns);
    const int64_t enough = min_of(ceil_div(8 * workers, groups), ceil_div(p.M, kFewTaskRows));
    const int64_t most = max_of(kFewTaskRows, min_of(kTaskRows, kTaskElements / max_of<int64_t>(p.K, 1)));
    const int64_t blocks = max_of(ceil_div(p.M, most), enough);
    rows = min_of(p.M, round_up(ceil_div(p.M, blocks), 12));  // 12: whole register blocks
    row_blocks = ceil_div(p.M, rows);
    tiny = p.M * p.N < 256 || p.M * p.N * p.K < 65536;
    groups_per_task = max_of<int64_t>(1, groups * row_blocks / (16 * workers));
    ranges = ceil_div(groups, groups_per_task);
    tasks = row_blocks * ranges;
    total_stride = round_up(group_columns + (p.packed ? kPanel - 1 : 0), kChunk);
  }
};

// Rows of x as the product takes them. A few: row-major. More: (depth blocks, slices, kSlice), see gemm_packed.h; a
// slice is written in whole vectors, which end up to kGap elements behind it.
template <class T>
struct Rows {
  static constexpr int64_t kSlice = kDepthBlock * kBlockRows<T>;
  static constexpr int64_t kGap = W<Accumulate<T>> * Product<T>::kPerStep;
  static_assert(kBlockRows<T> <= W<Accumulate<T>>);

  int64_t first = -1, count;  // rows of x that are here
  const Element<T>* x;
  int64_t stride;  // of a row, or of a depth block

  bool few() const { return count <= kFewRows; }
  const Element<T>* from(int64_t k0) const { return few() ? x + k0 : x + k0 / kDepthBlock * stride; }

  // Used as they are where products take elements of x, and a row has a whole number of steps.
  static bool in_place(const LinearParams& p) {
    return sizeof(T) == sizeof(Element<T>) && p.K % Product<T>::kPerStep == 0;
  }
  static int64_t padded_k(const LinearParams& p) { return round_up(p.K, 64 / int64_t(sizeof(Element<T>))); }
  static int64_t block_stride(int64_t rows) { return ceil_div(rows, kBlockRows<T>) * kSlice + kGap; }
  static int64_t elements(const LinearParams& p, int64_t rows) {
    const int64_t row_major = in_place(p) ? 0 : min_of<int64_t>(rows, kFewRows) * padded_k(p);
    return max_of(row_major, rows > kFewRows ? ceil_div(p.K, kDepthBlock) * block_stride(rows) : 0);
  }

  // Rows m .. m + rows - 1, with `memory` for them.
  void take(const LinearParams& p, int64_t m, int64_t rows, Element<T>* memory) {
    if (first == m) return;
    first = m;
    count = rows;
    x = memory;
    const T* from = static_cast<const T*>(p.x) + m * p.x_stride;
    if (!few()) {
      stride = block_stride(count);
      for (int64_t r = 0; r < count; r += kBlockRows<T>) {
        for (int64_t k0 = 0; k0 < p.K; k0 += kDepthBlock) {
          Element<T>* slice = memory + k0 / kDepthBlock * stride + r / kBlockRows<T> * kSlice;
          pack_transposed<T>(
              min_of<int64_t>(kBlockRows<T>, count - r), min_of(kDepthBlock, p.K - k0),
              [&](int64_t i) { return from + (r + i) * p.x_stride + k0; }, reinterpret_cast<Accumulate<T>*>(slice),
              kBlockRows<T>);
        }
      }
      return;
    }
    if constexpr (sizeof(T) == sizeof(Element<T>)) {
      if (in_place(p)) {
        x = from;
        stride = p.x_stride;
        return;
      }
    }
    stride = padded_k(p);
    for (int64_t r = 0; r < count; ++r) convert_row(from + r * p.x_stride, p.K, memory + r * stride);
  }
};

// Scratch of one worker.
template <class T>
struct Scratch {
  using A = Accumulate<T>;
  A* panels;      // (kDepthBlock, kChunk): a part of W in the form in which it is multiplied
  A* few;         // (kFewRows, kChunk): sums of one depth block
  A* total;       // (rows, total_stride): sums of a group
  Element<T>* x;  // the rows of x, unless they are few and can be used in place: see Rows

  static int64_t bytes(const LinearParams& p, const Plan& plan) {
    const int64_t sums = kDepthBlock * kChunk + kFewRows * kChunk + plan.rows * plan.total_stride;
    return round_up(sums * int64_t(sizeof(A)) + Rows<T>::elements(p, plan.rows) * int64_t(sizeof(Element<T>)), 64);
  }
  Scratch(char* memory, const Plan& plan) {
    panels = reinterpret_cast<A*>(memory);
    few = panels + kDepthBlock * kChunk;
    total = few + kFewRows * kChunk;
    x = reinterpret_cast<Element<T>*>(total + plan.rows * plan.total_stride);
  }
};

// to (rows, 16 panels) = or += the rows times `panels` panels of a packed weight from panel p0 on, over one depth
// block.
template <class T, class Done>
void add_packed(const LinearParams& p, const Rows<T>& rows, int64_t k0, int64_t depth, int64_t p0, int64_t panels,
                const Scratch<T>& scratch, Accumulate<T>* to, int64_t stride, const Done& done) {
  using A = Accumulate<T>;
  const int64_t lines = depth / kPerLane<T>, panel_stride = p.K / kPerLane<T> * kPanel;
  const Panels<T> packed{static_cast<const A*>(p.weight) + p0 * panel_stride + k0 / kPerLane<T> * kPanel, panel_stride,
                         (p.K - k0) / kPerLane<T>};
  if (rows.few()) {
    gemm_few<T>(rows.count, panels, lines, rows.from(k0), rows.stride, packed, to, stride, k0 > 0);
    return done(0, rows.count);
  }
  const auto multiply = [&](int64_t steps, const Panels<T>& b) {
    gemm_many<T>(rows.count, panels, steps, rows.from(k0), Rows<T>::kSlice, b, to, stride, k0 > 0, done);
  };
  if constexpr (kStepsPerLine<T, false> == 1) {
    multiply(lines, packed);
  } else {
    const Panels<T> widened{scratch.panels, kDepthBlock * kPanel, 0};
    for (int64_t i = 0; i < panels; ++i)
      widen_panel<T>(lines, packed.base + i * packed.stride, scratch.panels + i * widened.stride);
    multiply(depth, widened);
  }
}

// The same for columns n .. n + valid - 1 of a row-major weight.
template <class T, class Done>
void add_plain(const LinearParams& p, const Rows<T>& rows, int64_t k0, int64_t depth, int64_t n, int64_t valid,
               const Scratch<T>& scratch, Accumulate<T>* to, int64_t stride, const Done& done) {
  using A = Accumulate<T>;
  const T* weight = static_cast<const T*>(p.weight) + n * p.weight_stride + k0;
  const auto row = [&](int64_t i) { return weight + i * p.weight_stride; };
  if (rows.few()) {
    const int64_t ahead = kFewColumns * p.weight_stride;  // the next columns, at the same k
    gemm_transposed<T>(rows.count, valid, depth, rows.from(k0), rows.stride, row, ahead, scratch.few, kChunk);
    for (int64_t r = 0; r < rows.count; ++r) {
      A* total = to + r * stride;
      const A* few = scratch.few + r * kChunk;
      for (int64_t c = 0; c < round_up(valid, W<A>); c += W<A>)
        store(total + c, k0 > 0 ? load(total + c) + load(few + c) : load(few + c));
    }
    return done(0, rows.count);
  }
  const Panels<T> panels{scratch.panels, kDepthBlock * kPanel, 0};
  for (int64_t c = 0; c < valid; c += kPanel)
    pack_transposed<T>(
        min_of<int64_t>(kPanel, valid - c), depth, [&](int64_t i) { return row(c + i); },
        scratch.panels + c / kPanel * panels.stride, kPanel);
  gemm_many<T>(rows.count, ceil_div(valid, kPanel), ceil_div(depth, Product<T>::kPerStep), rows.from(k0),
               Rows<T>::kSlice, panels, to, stride, k0 > 0, done);
}

// scratch.total = the rows times the columns of the group. done(row, rows) follows the last sum of these rows, while
// they are in the L1 cache and so that what it writes overlaps with the next sums.
template <class T, class Done>
void multiply(const LinearParams& p, const Plan& plan, const Rows<T>& rows, const Group& group,
              const Scratch<T>& scratch, const Done& done) {
  if (p.K == 0) {
    for (int64_t r = 0; r < rows.count; ++r)
      memset(scratch.total + r * plan.total_stride, 0, size_t(group.padded) * sizeof(Accumulate<T>));
    return done(0, rows.count);
  }
  // Few rows wait for memory: panels, or rows of W, that are multiplied beside each other are read from end to end.
  const int64_t few_chunk = p.packed ? panels_of_rows<T>(rows.count) * kPanel : kFewColumns;
  const int64_t chunk = rows.few() ? few_chunk : panels_of_rows<T>(kBlockRows<T>) * kPanel;
  for (int64_t c = 0; c < group.padded; c += chunk) {
    for (int64_t k0 = 0; k0 < p.K; k0 += kDepthBlock) {
      const int64_t depth = min_of(kDepthBlock, p.K - k0);
      const bool last = c + chunk >= group.padded && k0 + kDepthBlock >= p.K;
      const auto then = [&](int64_t row, int64_t count) {
        if (last) done(row, count);
      };
      if (p.packed)
        add_packed(p, rows, k0, depth, (group.n + c) / kPanel, min_of(chunk, group.padded - c) / kPanel, scratch,
                   scratch.total + c, plan.total_stride, then);
      else
        add_plain(p, rows, k0, depth, group.n + c, min_of(chunk, group.columns - c), scratch, scratch.total + c,
                  plan.total_stride, then);
    }
  }
}

// Runs finish(sums, row, group) on every row of every group: the sums of its columns, without the bias.
template <class T, class Finish>
void for_each_row(const LinearParams& p, int64_t group_columns, const Launch& launch, const Finish& finish) {
  const Plan plan(p, group_columns, launch.workers);
  const int64_t bytes = Scratch<T>::bytes(p, plan);
  Queue queue{0, plan.tasks};
  run_parallel<Accumulate<T>>(launch, plan.tiny ? 1 : plan.tasks, [&](int worker) {
    const Scratch<T> scratch(launch.workspace + worker * bytes, plan);
    Rows<T> rows;
    for (int64_t task; queue.take(task);) {
      const int64_t m = task / plan.ranges * plan.rows, first = task % plan.ranges * plan.groups_per_task;
      rows.take(p, m, min_of(plan.rows, p.M - m), scratch.x);
      for (int64_t g = first; g < min_of(plan.groups, first + plan.groups_per_task); ++g) {
        const int64_t n = g * group_columns;
        const Group group(p, n, min_of(group_columns, p.N - n));
        multiply(p, plan, rows, group, scratch, [&](int64_t row, int64_t count) {
          for (int64_t r = row; r < row + count; ++r)
            finish(scratch.total + r * plan.total_stride + group.offset, m + r, group);
        });
      }
    }
  });
}

int64_t scratch_bytes(const LinearParams& p, int64_t group_columns, int workers) {
  int64_t bytes = 0;
  dispatch(p.dtype, [&](auto t) { bytes = Scratch<decltype(t)>::bytes(p, Plan(p, group_columns, workers)); });
  return workers * bytes;
}

template <class T>
void linear_of(const LinearParams& p, const Launch& launch) {
  for_each_row<T>(p, kChunk, launch, [&](Accumulate<T>* sums, int64_t m, const Group& group) {
    // Rows of y lie pages apart: those of the next register block are fetched while it is summed.
    if (m + kRowsAhead < p.M) {
      const T* later = static_cast<const T*>(p.y) + (m + kRowsAhead) * p.y_stride + group.n;
      for (int64_t c = 0; c < group.columns; c += 64 / int64_t(sizeof(T))) __builtin_prefetch(later + c, 1, 3);
    }
    finish_linear_rows<T>(p, m, 1, group.n, group.columns, sums, 0);
  });
}

template <class T>
void qkv_to_cache_of(const QkvToCacheParams& p, const Launch& launch) {
  // A group of columns is one head, so that rotation pairs meet in one tile.
  for_each_row<T>(p.gemm, p.D, launch, [&](Accumulate<T>* sums, int64_t token, const Group& group) {
    finish_qkv_row<T>(p, token, group.n / p.D, sums);
  });
}

}  // namespace

// ---------------------------------------------------------------------------------------------- launchers

int64_t linear_workspace(const LinearParams& p, int workers) { return scratch_bytes(p, kChunk, workers); }

void linear(const LinearParams& p, const Launch& launch) {
  dispatch(p.dtype, [&](auto t) { linear_of<decltype(t)>(p, launch); });
}

int64_t qkv_to_cache_workspace(const QkvToCacheParams& p, int workers) { return scratch_bytes(p.gemm, p.D, workers); }

void qkv_to_cache(const QkvToCacheParams& p, const Launch& launch) {
  dispatch(p.gemm.dtype, [&](auto t) { qkv_to_cache_of<decltype(t)>(p, launch); });
}

}  // namespace attn_ext::ATTN_EXT_ISA
