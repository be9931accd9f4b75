// Launchers of attention: dense, varlen and paged, prefill and decode.
#pragma once

#include "cuda/attention_mma.cuh"
#include "cuda/attention_plain.cuh"

namespace attn_ext::cuda {

// What runs a problem.
struct AttentionKernel {
  void (*kernel)(const AttentionWork);
  int threads, rows;
  int64_t columns;        // blocks for the columns of a row
  int64_t shared, total;  // bytes of shared memory; and for the total over splits, if one block walks several
  int page_step;          // keys in a step, the pages of two of which lie in shared memory; 0: of none
  int blocks_per_sm;      // that registers allow
};

template <class C>
AttentionKernel mma_kernel() {
  return {.kernel = attention_mma_kernel<C>,
          .threads = C::kThreads,
          .rows = C::kRows,
          .columns = 1,
          .shared = C::kQBytes + C::kKBytes + C::kVBytes,
          .total = C::kTotalBytes,
          .page_step = C::kStep,
          .blocks_per_sm = C::kMinBlocks};
}

// A decode step has few rows; where it has at most 16, they fit the smallest tile. Otherwise 32 rows a warp use every
// fragment of K and V twice, as far as registers allow.
template <class T, int D>
AttentionKernel mma_kernel_of(int64_t rows) {
  constexpr int step = D <= 128 ? 64 : 32, column_warps = D <= 128 ? 1 : 2;
  if (rows <= 16) return mma_kernel<MmaShape<T, D, 1, column_warps, 1, step>>();
  if constexpr (D <= 64)
    return mma_kernel<MmaShape<T, D, 4, 1, 2, step>>();
  else if constexpr (D <= 128)
    return mma_kernel<MmaShape<T, D, 4, 1, 1, step>>();
  else
    return mma_kernel<MmaShape<T, D, 2, column_warps, 1, step>>();
}

template <class T>
AttentionKernel attention_kernel_of(const AttentionParams& p) {
  if constexpr (sizeof(T) == 2) {
    const int64_t rows = p.Tq * (p.H / p.Hkv);
    switch (p.D) {
      case 64: return mma_kernel_of<T, 64>(rows);
      case 80: return mma_kernel_of<T, 80>(rows);
      case 96: return mma_kernel_of<T, 96>(rows);
      case 128: return mma_kernel_of<T, 128>(rows);
      case 256: return mma_kernel_of<T, 256>(rows);
      default: break;
    }
  }
  using C = PlainShape;
  return {.kernel = attention_plain_kernel<T>,
          .threads = C::kThreads,
          .rows = C::kRows,
          .columns = ceil_div<int64_t>(p.D, C::kColumns),
          .shared = PlainShared::bytes(p.D),
          .total = 0,
          .page_step = 0,
          .blocks_per_sm = 2};
}

constexpr int64_t kMaxWorkspace = 256 << 20;  // bytes of results over single splits

// How a problem is run.
struct AttentionPlan {
  AttentionKernel kernel;
  int64_t tiles, splits, shared, step_pages;
  int64_t max_rows;

  AttentionPlan(const AttentionParams& p, const AttentionKernel& k) : kernel(k) {
    max_rows = p.Tq * (p.H / p.Hkv);
    tiles = ceil_div<int64_t>(max_rows, k.rows);
    // Blocks share the keys where there are not enough tiles for half of the device. That many rows and keys that the
    // results over single splits take much memory are work enough without.
    const simt::Device device = simt::device();
    const int64_t all_splits = max_of<int64_t>(1, ceil_div<int64_t>(p.Tk, kSplit));
    const int64_t blocks = p.B * p.Hkv * tiles * k.columns;
    splits = all_splits;
    if (2 * blocks > int64_t(device.sms) * k.blocks_per_sm || workspace(p) > kMaxWorkspace) splits = 1;
    shared = k.shared + (splits == 1 && all_splits > 1 ? k.total : 0);
    step_pages = p.block_table && k.page_step ? (k.page_step + p.block_size - 2) / p.block_size + 1 : 0;
    shared += 2 * step_pages * int64_t(sizeof(int));
  }
  int64_t blocks_per_sequence(const AttentionParams& p) const { return p.Hkv * kernel.columns * splits * tiles; }
  int64_t partials(const AttentionParams& p) const { return splits > 1 ? p.B * p.Hkv * max_rows * splits : 0; }
  int64_t state_bytes(const AttentionParams& p) const {
    return ceil_div<int64_t>(partials(p) * int64_t(sizeof(SoftmaxState)), 256) * 256;
  }
  int64_t workspace(const AttentionParams& p) const {
    return state_bytes(p) + partials(p) * p.D * int64_t(sizeof(float));
  }
};

inline bool is_empty(const AttentionParams& p) { return p.B == 0 || p.H == 0 || p.Tq == 0 || p.D == 0; }

template <class T>
AttentionWork attention_work(const AttentionParams& p, const AttentionPlan& plan, char* workspace) {
  if (p.Tq >= kMaxTokens || p.Tk >= kMaxTokens || plan.max_rows >= 2 * kMaxTokens - plan.kernel.rows ||
      p.B >= kMaxGrid || plan.blocks_per_sequence(p) > kMaxGrid)
    throw std::runtime_error("attention: more than 2^30 tokens in a sequence, or rows for more than 2^31 blocks");
  AttentionWork w{};
  w.p = p;
  w.transformed = p.softcap > 0 || p.alibi_slopes || p.bias || !(p.scale > 0);
  w.scale = float(p.scale);
  w.softcap = float(p.softcap);
  w.inverse_softcap = p.softcap > 0 ? float(1.0 / p.softcap) : 0.0f;
  w.score.unit = w.transformed ? 1.0f : w.scale;
  w.score.c = w.score.unit * kLog2e;
  const int64_t size = sizeof(T);
  w.q_vectors = all_multiples(16, p.q, p.q_batch_stride * size, p.q_row_stride * size, p.q_head_stride * size);
  w.kv_vectors = all_multiples(16, p.k, p.k_batch_stride * size, p.k_row_stride * size, p.k_head_stride * size, p.v,
                               p.v_batch_stride * size, p.v_row_stride * size, p.v_head_stride * size);
  w.out_vectors =
      all_multiples(16, p.out, p.out_batch_stride * size, p.out_row_stride * size, p.out_head_stride * size);
  w.group = int(p.H / p.Hkv);
  w.window_left = int(min_of(p.window_left, kMaxTokens));
  w.window_right = int(min_of(p.window_right, kMaxTokens));
  w.by_group = Divisor(w.group);
  w.by_block_size = Divisor(p.block_table ? min_of(p.block_size, kMaxTokens) : 1);
  w.step_pages = int(plan.step_pages);
  w.by_tiles = Divisor(plan.tiles);
  w.by_splits = Divisor(plan.splits);
  w.by_columns = Divisor(plan.kernel.columns);
  w.by_kv_heads = Divisor(p.Hkv);
  w.splits = int(plan.splits);
  w.max_rows = plan.max_rows;
  w.partial_state = reinterpret_cast<SoftmaxState*>(workspace);
  w.partial_out = reinterpret_cast<float*>(workspace + plan.state_bytes(p));
  return w;
}

template <class T>
int64_t attention_workspace_of(const AttentionParams& p) {
  return is_empty(p) ? 0 : AttentionPlan(p, attention_kernel_of<T>(p)).workspace(p);
}

template <class T>
void launch_attention(const AttentionParams& p, const Launch& launch) {
  if (is_empty(p)) return;
  const AttentionPlan plan(p, attention_kernel_of<T>(p));
  const AttentionKernel& k = plan.kernel;
  AttentionWork w = attention_work<T>(p, plan, launch.workspace);
  const simt::Stream stream = simt::Stream(launch.stream);
  const int64_t blocks = plan.blocks_per_sequence(p), at_once = min_of(p.B, kMaxGrid / blocks);  // sequences
  for (int64_t b = 0; b < p.B; b += at_once) {
    w.first_sequence = int(b);
    simt::launch(k.kernel, simt::Dim{uint32_t(blocks * min_of(at_once, p.B - b))}, {uint32_t(k.threads)},
                 size_t(plan.shared), stream, w);
  }
  if (plan.splits > 1) launch_combine<T>(w, stream);
}

}  // namespace attn_ext::cuda
