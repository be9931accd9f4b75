// decoder_layer: one layer of a decoder over the paged cache, in one call of the other ops.
//
// A step of decode is a few microseconds of work per op, and its weights leave nothing else in the caches: Python and
// the dispatcher between eight ops would cost as much as a product.
#include "ops/ops.h"

namespace attn_ext::ops {
namespace {

void check_norm(const Checker& c, const Tensor& x, const char* name, const Tensor& weight, const OptionalTensor& bias) {
  const std::string bias_name = std::string(name) + "'s bias";
  const int64_t C = x.size(1);
  c.shape(weight, name, {C}, "(C,)");
  if (bias) c.shape(*bias, bias_name.c_str(), {C}, "(C,)");
  c.same_device(x, "x", {{name, &weight}, {bias_name.c_str(), given(bias)}});
  c.same_dtype({{"x", &x}, {name, &weight}, {bias_name.c_str(), given(bias)}});
}

}  // namespace

Tensor decoder_layer(Tensor x, Tensor norm_1, OptionalTensor norm_1_bias, Tensor qkv, OptionalTensor qkv_bias,
                     Tensor out, OptionalTensor out_bias, Tensor norm_2, OptionalTensor norm_2_bias,
                     OptionalTensor gate, OptionalTensor gate_bias, Tensor up, OptionalTensor up_bias, Tensor down,
                     OptionalTensor down_bias, Tensor key_cache, Tensor value_cache, Tensor slot_mapping,
                     Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, std::optional<int64_t> max_seqlen_q,
                     int64_t n_heads, int64_t n_kv_heads, std::string norm, double eps, std::string activation,
                     int64_t window_left, OptionalTensor rope_cos, OptionalTensor rope_sin, OptionalTensor positions) {
  const Checker c{"decoder_layer"};
  const bool rms = norm == "rms_norm";
  ATTN_EXT_CHECK(c, rms || norm == "layer_norm", "norm", "be 'rms_norm' or 'layer_norm'", "'" + norm + "'");
  ATTN_EXT_CHECK(c, !rms || (!norm_1_bias && !norm_2_bias), "norm_1 and norm_2", "have no bias with 'rms_norm'", "one");
  ATTN_EXT_CHECK(c, gate || !gate_bias, "gate", "have a weight where it has a bias", "none");
  c.finite(eps, "eps", x.scalar_type());
  ATTN_EXT_CHECK(c, eps >= 0, "eps", "be at least 0", number(eps));
  activation_of(c, activation);
  c.rank(x, "x", 2, "(total, C)");
  c.heads(n_heads, n_kv_heads);
  c.caches(key_cache, value_cache, Checker::Caches::read);
  const int64_t total = x.size(0), C = x.size(1), D = key_cache.size(3);
  check_norm(c, x, "norm_1", norm_1, norm_1_bias);
  check_norm(c, x, "norm_2", norm_2, norm_2_bias);
  check_product(c, x, C, "qkv", qkv, qkv_bias, (n_heads + 2 * n_kv_heads) * D);
  check_product(c, x, n_heads * D, "out", out, out_bias, C);
  const int64_t inner = check_product(c, x, C, "up", up, up_bias, std::nullopt);
  if (gate) check_product(c, x, C, "gate", *gate, gate_bias, inner);
  check_product(c, x, inner, "down", down, down_bias, C);

  const auto normed = [&](const Tensor& t, const Tensor& weight, const OptionalTensor& bias) {
    return rms ? rms_norm(t, weight, eps) : layer_norm(t, weight, bias, eps);
  };
  const Tensor q = new_tensor(x, {total, n_heads, D});
  Tensor seen = paged_attention_after(
      c, q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, window_left, [&] {
        project_to_cache(c, normed(x, norm_1, norm_1_bias), qkv, qkv_bias, key_cache, value_cache, slot_mapping,
                         n_heads, n_kv_heads, rope_cos, rope_sin, positions, q);
      });
  seen = torch::stable::view(seen, {total, n_heads * D});
  x = linear(seen, out, out_bias, std::nullopt, x, std::nullopt);
  const Tensor y = normed(x, norm_2, norm_2_bias);
  OptionalTensor factor;
  if (gate) factor = linear(y, *gate, gate_bias, activation, std::nullopt, std::nullopt);
  const Tensor h = gate ? linear(y, up, up_bias, std::nullopt, std::nullopt, factor)
                        : linear(y, up, up_bias, activation, std::nullopt, std::nullopt);
  return linear(h, down, down_bias, std::nullopt, x, std::nullopt);
}

}  // namespace attn_ext::ops
