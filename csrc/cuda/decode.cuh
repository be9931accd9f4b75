// Split-KV: blocks that share the keys of a row, one split each, and the kernel that combines their results.
//
// Used where there are too few tiles to fill the device, which is decode: one query per sequence, long keys. The number
// of splits comes from the host's bound on the keys alone, so a captured graph stays right while sequences grow; blocks
// whose split lies past the end of their sequence write an empty state and leave.
#pragma once

#include "cuda/attention_problem.cuh"

namespace attn_ext::cuda {

constexpr int kCombineThreads = 128;
constexpr int kCombineWarps = kCombineThreads / 32;

// A warp per row: merges the row's splits in ascending order, as a block that walks them all does.
template <class T>
ATTN_KERNEL(kCombineThreads, 1)
combine_splits_kernel(ATTN_CONSTANT_PARAM AttentionWork w) {
  constexpr int kColumns = 4;  // of a lane at a time
  const int64_t all_rows = w.p.B * w.p.Hkv * w.max_rows, stride = int64_t(simt::grid_dim().x) * kCombineWarps;
  for (int64_t i = int64_t(simt::block_idx().x) * kCombineWarps + simt::warp(); i < all_rows; i += stride) {
    const Quotient head = divide(i, w.max_rows), sequence = divide(head.quotient, w.p.Hkv);
    Tile t;
    t.b = sequence.quotient;
    t.kv_head = sequence.remainder;
    find_sequence(w.p, t);
    t.rows = t.Tq * w.group;
    const int row = int(head.remainder);
    if (row >= t.rows) continue;
    const QueryRow q = query_row(w, t, row);
    T* out = output_row<T>(w.p, t, q);
    const int splits = min_of(int(w.splits), ceil_div(t.Tk, kSplit));

    for (int64_t first = simt::lane(); first < w.p.D; first += 32 * kColumns) {
      SoftmaxState state{-kInf, 0.0f};
      float total[kColumns] = {};
      for (int split = 0; split < splits; ++split) {
        const SoftmaxState part = simt::ldg(w.partial_state + i * w.splits + split);
        if (part.sum == 0.0f) continue;  // sees no key of this split
        const SoftmaxFactors f = merge(state, part, w.score.c);
        const float* values = w.partial_out + (i * w.splits + split) * w.p.D;
        ATTN_UNROLL
        for (int c = 0; c < kColumns; ++c)
          if (first + 32 * c < w.p.D) total[c] = merge_values(total[c], simt::ldg(values + first + 32 * c), f);
      }
      const SoftmaxResult result = finish(state, sink_of(w.p, q.head), w.score);
      ATTN_UNROLL
      for (int c = 0; c < kColumns; ++c)
        if (first + 32 * c < w.p.D) simt::st(out + first + 32 * c, simt::from_float<T>(total[c] * result.factor));
      if (first == 0) store_lse(w.p, t, q, result.lse);
    }
  }
}

template <class T>
void launch_combine(const AttentionWork& w, simt::Stream stream) {
  const int64_t rows = w.p.B * w.p.Hkv * w.max_rows;
  const int64_t blocks = min_of(ceil_div<int64_t>(rows, kCombineWarps), kMaxGrid);
  simt::launch(combine_splits_kernel<T>, simt::Dim{uint32_t(blocks)}, {kCombineThreads}, 0, stream, w);
}

}  // namespace attn_ext::cuda
