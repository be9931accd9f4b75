// What every kernel receives: plain structs of pointers, sizes and strides, filled and checked by csrc/ops.
//
// All strides are in elements. A stride of 0 broadcasts. Sizes and offsets are 64-bit. The last dimension of
// every tensor has unit stride unless a stride is given for it. No torch here: these headers are shared by
// the CPU kernels and the CUDA kernels.
#pragma once

#include <stdint.h>

namespace attn_ext {

enum class DType : int32_t { f32, bf16, f16, f64, boolean };
enum class Activation : int32_t { none, gelu, gelu_tanh, silu };

// y (M, N) = act(x (M, K) @ weight (N, K)^T + bias (N)) * multiply (M, N) + residual (M, N)
//
// A packed weight is (N / 16, K / P, 16, P), contiguous: panels of 16 outputs, in which P neighbours of k of each
// output lie together, P = 2 for the 16-bit types and 1 for float32 and float64. It gives the bits of a plain one.
struct LinearParams {
  DType dtype;  // of every tensor
  int64_t M, N, K;
  const void* x;
  int64_t x_stride;
  const void* weight;
  bool packed;            // CPU only
  int64_t weight_stride;  // of an output; unused when packed
  const void* bias;       // or null
  const void* residual;   // or null
  int64_t residual_stride;
  const void* multiply;  // or null
  int64_t multiply_stride;
  void* y;
  int64_t y_stride;
  Activation activation;
};

// Where the rows of a QKV projection go: q to a buffer, k and v straight into their cache slots.
struct QkvToCacheParams {
  LinearParams gemm;  // y is unused; N = (H + 2 Hkv) D
  int64_t H, Hkv, D;
  void* q;  // (M, H, D) contiguous
  void* key_cache;
  void* value_cache;                         // (num_blocks, block_size, Hkv, D)
  int64_t key_strides[3], value_strides[3];  // of (block, token in block, head)
  int64_t block_size;                        // tokens
  const int64_t* slot_mapping;               // (M), block * block_size + offset, -1 = skip
  const float* rope_cos;                     // (max_pos, D / 2), or null
  const float* rope_sin;                     // (max_pos, D / 2), or null
  int64_t rope_cos_stride, rope_sin_stride;
  const int64_t* positions;     // (M), row of the rope tables
  int64_t num_blocks, max_pos;  // what slots and positions stay below; a device checks them where it uses them
};

// y = (x - mean) / sqrt(mean of squares + eps) * weight + bias over the last dimension
struct NormParams {
  DType dtype;  // of every tensor
  int64_t rows, C;
  const void* x;  // (rows, C)
  int64_t x_stride;
  const void* weight;  // (C)
  const void* bias;    // (C), or null
  void* y;             // (rows, C) contiguous
  double eps;
  bool centered;  // LayerNorm: mean is that of the row, squares are of x - mean; else (RMSNorm) mean is 0
};

// out = softmax(scale * scores + mask) over the last dimension, scores (B0, B1, Tq, Tk)
struct MaskedSoftmaxParams {
  DType dtype;
  int64_t B0, B1, Tq, Tk;
  const void* scores;
  int64_t scores_strides[3];
  void* out;    // contiguous
  bool causal;  // bottom-right: row i sees columns j <= i + Tk - Tq
  double scale;
  const void* mask;  // bool (true = may attend) or additive, broadcast to the scores; or null
  DType mask_dtype;
  int64_t mask_strides[4];
};

// One attention problem: dense, varlen and paged, prefill and decode.
//
// Sequence b has Tq queries and Tk keys; query i stands at position i + Tk - Tq among the keys. Score of (i, j):
// scale * q.k, then softcap, ALiBi, bias; a key that is not visible, or scores -inf, is not seen.
struct AttentionParams {
  DType dtype;  // of q, k, v and out
  int64_t B, H, Hkv, D;

  // Queries. Rows of sequence b start at row cu_seqlens_q[b], or at b * Tq when that is null.
  const void* q;
  int64_t q_batch_stride, q_row_stride, q_head_stride;  // batch stride only without cu_seqlens_q
  void* out;
  int64_t out_batch_stride, out_row_stride, out_head_stride;
  void* lse;  // natural log, accumulation type (float; double for f64)
  int64_t lse_batch_stride, lse_head_stride;
  const int32_t* cu_seqlens_q;  // (B + 1) or null
  int64_t Tq;                   // queries per sequence without cu_seqlens_q; else their maximum

  // Keys and values. Dense (block_table null): rows of sequence b start at cu_seqlens_k[b] or at b * batch_stride.
  // Paged: token t of sequence b lives in block block_table[b * block_table_stride + t / block_size]; entries past a
  // sequence's need are never read.
  const void* k;
  const void* v;
  int64_t k_batch_stride, k_row_stride, k_head_stride;  // paged: batch stride = block stride
  int64_t v_batch_stride, v_row_stride, v_head_stride;
  const int32_t* cu_seqlens_k;  // (B + 1) or null
  const int32_t* seq_lens;      // (B) keys per sequence, paged only
  const int32_t* block_table;   // (B, max_blocks), or null
  int64_t block_table_stride;
  int64_t block_size;  // tokens
  int64_t Tk;          // keys per sequence (dense), else their maximum

  // Score transform and visibility.
  double scale;
  double softcap;            // 0 = none
  bool causal;               // j <= position
  int64_t window_left;       // j >= position - left; -1 = unlimited
  int64_t window_right;      // j <= position + right; -1 = unlimited
  const void* alibi_slopes;  // accumulation type, (B, H) by strides {batch, 1}, or null
  int64_t alibi_batch_stride;
  const void* sinks;  // accumulation type, (H), or null
  const void* mask;   // bool, broadcast to (B, H, Tq, Tk), or null
  int64_t mask_strides[4];
  const void* bias;  // broadcast to (B, H, Tq, Tk), or null
  DType bias_dtype;
  int64_t bias_strides[4];

  // What index tensors may name. The CPU path has checked them; a device, whose tables the host cannot read without
  // waiting for it, clamps to these where it uses them.
  int64_t total_q, total_k;  // rows of q and of k with cu_seqlens
  int64_t num_blocks;        // paged
};

// out, lse = the union of two partial attentions over disjoint keys
struct MergeAttentionParams {
  DType dtype;
  int64_t B, T, H, D;  // varlen: B = 1
  const void* out_a;
  const void* out_b;
  int64_t a_strides[3], b_strides[3];  // of (batch, row, head)
  const void* lse_a;
  const void* lse_b;                           // accumulation type
  int64_t lse_a_strides[3], lse_b_strides[3];  // of (batch, head, row)
  void* out;                                   // (B, T, H, D) contiguous
  void* lse;                                   // (B, H, T) contiguous
};

// key, value (tokens, Hkv, D) into the slots of a cache (num_blocks, block_size, Hkv, D)
struct AppendKvParams {
  int64_t element_size;  // bytes
  int64_t tokens, Hkv, D, block_size;
  const void* key;
  const void* value;
  int64_t key_in_strides[2], value_in_strides[2];  // of (token, head)
  void* key_cache;
  void* value_cache;
  int64_t key_strides[3], value_strides[3];  // of (block, token in block, head)
  const int64_t* slot_mapping;               // (tokens), -1 = skip
  int64_t num_blocks;
};

// Blocks of one cache copied as if all at once.
struct CopyBlocksParams {
  int64_t element_size;  // bytes
  int64_t pairs, block_size, Hkv, D;
  void* cache;
  int64_t strides[3];          // of (block, token in block, head)
  const int64_t* block_pairs;  // (pairs, 2): source, destination; destinations are distinct
  int64_t num_blocks;
};

// How a kernel runs: worker threads and their scratch memory.
struct Launch {
  int workers;      // at most; chosen by the caller, never changes a result
  char* workspace;  // 64-byte aligned, as many bytes as the kernel's *_workspace function asked for
  // Runs body(context, w) for w in 0..workers-1, at the same time where threads are available.
  void (*parallel)(int workers, void (*body)(void* context, int worker), void* context);
};

}  // namespace attn_ext
