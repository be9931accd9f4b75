// The ops as functions on tensors; csrc/ops/schemas.cpp gives them their names in torch.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

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

Tensor decoder_layer(Tensor x, Tensor norm_1, OptionalTensor norm_1_bias, Tensor qkv, OptionalTensor qkv_bias,
                     Tensor out, OptionalTensor out_bias, Tensor norm_2, OptionalTensor norm_2_bias,
                     OptionalTensor gate, OptionalTensor gate_bias, Tensor up, OptionalTensor up_bias, Tensor down,
                     OptionalTensor down_bias, Tensor key_cache, Tensor value_cache, Tensor slot_mapping,
                     Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, std::optional<int64_t> max_seqlen_q,
                     int64_t n_heads, int64_t n_kv_heads, std::string norm, double eps, std::string activation,
                     int64_t window_left, OptionalTensor rope_cos, OptionalTensor rope_sin, OptionalTensor positions);

Tensor decoder_layers(Tensor x, std::vector<OptionalTensor> weights, std::vector<Tensor> key_caches,
                      std::vector<Tensor> value_caches, Tensor slot_mapping, Tensor block_table, Tensor seq_lens,
                      Tensor cu_seqlens_q, std::optional<int64_t> max_seqlen_q, int64_t n_heads, int64_t n_kv_heads,
                      std::string norm, double eps, std::string activation, int64_t window_left,
                      OptionalTensor rope_cos, OptionalTensor rope_sin, OptionalTensor positions);

// ------------------------------------------------------------------ what decoder_layer needs of the other ops

// Throws unless rows (..., K) of the device and dtype of x can be multiplied by this weight, packed or not -> its N,
// which must be as given. `name` is the weight's in errors.
int64_t check_product(const Checker& c, const Tensor& x, int64_t K, const char* name, const Tensor& weight,
                      const OptionalTensor& bias, std::optional<int64_t> N);
Activation activation_of(const Checker& c, const std::optional<std::string>& name);

// qkv_projection_to_cache but for mark_written. With `into` (..., n_heads, D), contiguous, the queries are written
// there, and the caches are already checked (Checker::caches).
Tensor project_to_cache(const Checker& c, Tensor x, Tensor weight, OptionalTensor bias, Tensor key_cache,
                        Tensor value_cache, Tensor slot_mapping, int64_t n_heads, int64_t n_kv_heads,
                        OptionalTensor rope_cos, OptionalTensor rope_sin, OptionalTensor positions,
                        OptionalTensor into);

// paged_attention, causal. `before`, which writes q and what is new in the cache, is called once all arguments are
// checked.
Tensor paged_attention_after(const Checker& c, Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table,
                             Tensor seq_lens, Tensor cu_seqlens_q, std::optional<int64_t> max_seqlen_q,
                             int64_t window_left, const std::function<void()>& before);

// Slots of a cache with these blocks: -1 or a slot of it, none twice.
Indices<int64_t> checked_slots(const Checker& c, const Tensor& slot_mapping, int64_t tokens, const Tensor& key_cache);

}  // namespace attn_ext::ops
