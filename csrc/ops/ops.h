// The ops as functions on tensors; csrc/ops/schemas.cpp gives them their names in torch.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "ops/check.h"

namespace attn_ext::ops {

Tensor linear(Tensor x, Tensor weight, OptionalTensor bias, std::optional<std::string> activation,
              OptionalTensor residual, OptionalTensor multiply);
Tensor qkv_projection(Tensor x, Tensor weight, OptionalTensor bias, int64_t n_heads, int64_t n_kv_heads);
Tensor qkv_projection_to_cache(Tensor x, Tensor weight, OptionalTensor bias, Tensor key_cache, Tensor value_cache,
                               Tensor slot_mapping, int64_t n_heads, int64_t n_kv_heads, OptionalTensor rope_cos,
                               OptionalTensor rope_sin, OptionalTensor positions);
Tensor rms_norm(Tensor x, Tensor weight, double eps);
Tensor layer_norm(Tensor x, Tensor weight, OptionalTensor bias, double eps);
Tensor masked_softmax(Tensor scores, OptionalTensor mask, bool causal, double scale);

using OutAndLse = std::tuple<Tensor, Tensor>;
OutAndLse attention(Tensor q, Tensor k, Tensor v, bool causal, std::optional<double> scale, int64_t window_left,
                    int64_t window_right, double softcap, OptionalTensor alibi_slopes, OptionalTensor sinks,
                    OptionalTensor mask, OptionalTensor bias);
OutAndLse attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                           std::optional<int64_t> max_seqlen_q, std::optional<int64_t> max_seqlen_k, bool causal,
                           std::optional<double> scale, int64_t window_left, int64_t window_right, double softcap,
                           OptionalTensor alibi_slopes, OptionalTensor sinks, OptionalTensor mask, OptionalTensor bias);
OutAndLse paged_attention(Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens,
                          OptionalTensor cu_seqlens_q, std::optional<int64_t> max_seqlen_q, bool causal,
                          std::optional<double> scale, int64_t window_left, int64_t window_right, double softcap,
                          OptionalTensor alibi_slopes, OptionalTensor sinks, OptionalTensor mask, OptionalTensor bias);
OutAndLse merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b);

void append_kv(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, Tensor slot_mapping);
void copy_blocks(Tensor key_cache, Tensor value_cache, Tensor block_pairs);

// Slots of a cache with these blocks: -1 or a slot of it, none twice.
Indices<int64_t> checked_slots(const Checker& c, const Tensor& slot_mapping, int64_t tokens, const Tensor& key_cache);

}  // namespace attn_ext::ops
