// decoder_layer and decoder_layers: layers of a decoder over the paged cache, in one call of the other ops.
//
// A step of decode is a few microseconds of work per op, and its weights leave nothing else in the caches: Python and
// the dispatcher between eight ops would cost as much as a product, and between two layers as much as an attention.
#include "ops/ops.h"

namespace attn_ext::ops {
namespace {

// What is a layer's own.
struct Layer {
  Tensor norm_1;
  OptionalTensor norm_1_bias;
  Tensor qkv;
  OptionalTensor qkv_bias;
  Tensor out;
  OptionalTensor out_bias;
  Tensor norm_2;
  OptionalTensor norm_2_bias, gate, gate_bias;
  Tensor up;
  OptionalTensor up_bias;
  Tensor down;
  OptionalTensor down_bias;
  Tensor key_cache, value_cache;
};

// What all layers share.
struct Step {
  Tensor slot_mapping, block_table, seq_lens, cu_seqlens_q;
  std::optional<int64_t> max_seqlen_q;
  int64_t n_heads, n_kv_heads;
  std::string norm;
  double eps;
  std::string activation;
  int64_t window_left;
  OptionalTensor rope_cos, rope_sin, positions;

  bool rms() const { return norm == "rms_norm"; }
};

void check_step(const Checker& c, const Tensor& x, const Step& s) {
  ATTN_EXT_CHECK(c, s.rms() || s.norm == "layer_norm", "norm", "be 'rms_norm' or 'layer_norm'", "'" + s.norm + "'");
  c.floating(x, "x");
  c.finite(s.eps, "eps", x.scalar_type());
  ATTN_EXT_CHECK(c, s.eps >= 0, "eps", "be at least 0", number(s.eps));
  activation_of(c, s.activation);
  c.rank(x, "x", 2, "(total, C)");
  c.heads(s.n_heads, s.n_kv_heads);
}

void check_norm(const Checker& c, const Tensor& x, const char* name, const Tensor& weight, const OptionalTensor& bias) {
  const std::string bias_name = std::string(name) + "'s bias";
  const int64_t C = x.size(1);
  c.shape(weight, name, {C}, "(C,)");
  if (bias) c.shape(*bias, bias_name.c_str(), {C}, "(C,)");
  c.same_device(x, "x", {{name, &weight}, {bias_name.c_str(), given(bias)}});
  c.same_dtype({{"x", &x}, {name, &weight}, {bias_name.c_str(), given(bias)}});
}

void check_layer(const Checker& c, const Tensor& x, const Layer& l, const Step& s) {
  ATTN_EXT_CHECK(c, !s.rms() || (!l.norm_1_bias && !l.norm_2_bias), "norm_1 and norm_2", "have no bias with 'rms_norm'",
                 "one");
  ATTN_EXT_CHECK(c, l.gate || !l.gate_bias, "gate", "have a weight where it has a bias", "none");
  c.caches(l.key_cache, l.value_cache, Checker::Caches::written);
  c.same_device(x, "x", {{"key_cache", &l.key_cache}, {"value_cache", &l.value_cache}});
  c.same_dtype({{"x", &x}, {"key_cache", &l.key_cache}, {"value_cache", &l.value_cache}});
  const int64_t C = x.size(1), D = l.key_cache.size(3);
  check_norm(c, x, "norm_1", l.norm_1, l.norm_1_bias);
  check_norm(c, x, "norm_2", l.norm_2, l.norm_2_bias);
  check_product(c, x, C, "qkv", l.qkv, l.qkv_bias, (s.n_heads + 2 * s.n_kv_heads) * D);
  check_product(c, x, s.n_heads * D, "out", l.out, l.out_bias, C);
  const int64_t inner = check_product(c, x, C, "up", l.up, l.up_bias, std::nullopt);
  if (l.gate) check_product(c, x, C, "gate", *l.gate, l.gate_bias, inner);
  check_product(c, x, inner, "down", l.down, l.down_bias, C);
}

// Checks the step's own arguments before it writes; the layer's are checked.
Tensor run_layer(const Checker& c, const Tensor& x_in, const Layer& l, const Step& s) {
  const auto normed = [&](const Tensor& t, const Tensor& weight, const OptionalTensor& bias) {
    return s.rms() ? rms_norm(t, weight, s.eps) : layer_norm(t, weight, bias, s.eps);
  };
  const int64_t total = x_in.size(0), D = l.key_cache.size(3);
  const Tensor q = new_tensor(x_in, {total, s.n_heads, D});
  Tensor seen = paged_attention_after(
      c, q, l.key_cache, l.value_cache, s.block_table, s.seq_lens, s.cu_seqlens_q, s.max_seqlen_q, s.window_left, [&] {
        project_to_cache(c, normed(x_in, l.norm_1, l.norm_1_bias), l.qkv, l.qkv_bias, l.key_cache, l.value_cache,
                         s.slot_mapping, s.n_heads, s.n_kv_heads, s.rope_cos, s.rope_sin, s.positions, q);
      });
  seen = torch::stable::view(seen, {total, s.n_heads * D});
  const Tensor x = linear(seen, l.out, l.out_bias, std::nullopt, x_in, std::nullopt);
  const Tensor y = normed(x, l.norm_2, l.norm_2_bias);
  OptionalTensor factor;
  if (l.gate) factor = linear(y, *l.gate, l.gate_bias, s.activation, std::nullopt, std::nullopt);
  const Tensor h = l.gate ? linear(y, l.up, l.up_bias, std::nullopt, std::nullopt, factor)
                          : linear(y, l.up, l.up_bias, s.activation, std::nullopt, std::nullopt);
  return linear(h, l.down, l.down_bias, std::nullopt, x, std::nullopt);
}

constexpr size_t kWeights = 14;  // of a layer: weight and bias of two norms and five products

// The weights in the order of decoder_layer's arguments.
Layer layer_of(const Checker& c, const OptionalTensor* weights, const Tensor& key_cache, const Tensor& value_cache) {
  const auto weight = [&](size_t i, const char* name) {
    ATTN_EXT_CHECK(c, weights[i].has_value(), name, "have a weight", "none");
    return *weights[i];
  };
  return {weight(0, "norm_1"), weights[1],  weight(2, "qkv"), weights[3], weight(4, "out"), weights[5],
          weight(6, "norm_2"), weights[7],  weights[8],       weights[9], weight(10, "up"), weights[11],
          weight(12, "down"),  weights[13], key_cache,        value_cache};
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
  const Step step{slot_mapping, block_table, seq_lens,   cu_seqlens_q, max_seqlen_q, n_heads,  n_kv_heads,
                  norm,         eps,         activation, window_left,  rope_cos,     rope_sin, positions};
  const Layer layer{norm_1, norm_1_bias, qkv, qkv_bias, out,  out_bias,  norm_2,    norm_2_bias,
                    gate,   gate_bias,   up,  up_bias,  down, down_bias, key_cache, value_cache};
  check_step(c, x, step);
  check_layer(c, x, layer, step);
  x = run_layer(c, x, layer, step);
  mark_written(key_cache, value_cache);
  return x;
}

Tensor decoder_layers(Tensor x, std::vector<OptionalTensor> weights, std::vector<Tensor> key_caches,
                      std::vector<Tensor> value_caches, Tensor slot_mapping, Tensor block_table, Tensor seq_lens,
                      Tensor cu_seqlens_q, std::optional<int64_t> max_seqlen_q, int64_t n_heads, int64_t n_kv_heads,
                      std::string norm, double eps, std::string activation, int64_t window_left,
                      OptionalTensor rope_cos, OptionalTensor rope_sin, OptionalTensor positions) {
  const Checker c{"decoder_layers"};
  const size_t n = key_caches.size();
  ATTN_EXT_CHECK(c, n > 0, "key_caches", "hold a cache for each layer, and there be one", "no layer");
  ATTN_EXT_CHECK(c, value_caches.size() == n, "value_caches", "be as many as key_caches (" + std::to_string(n) + ")",
                 std::to_string(value_caches.size()));
  ATTN_EXT_CHECK(c, weights.size() == kWeights * n, "weights",
                 "be " + std::to_string(kWeights) + " for each of key_caches (" + std::to_string(kWeights * n) + ")",
                 std::to_string(weights.size()));
  const Step step{slot_mapping, block_table, seq_lens,   cu_seqlens_q, max_seqlen_q, n_heads,  n_kv_heads,
                  norm,         eps,         activation, window_left,  rope_cos,     rope_sin, positions};
  check_step(c, x, step);
  std::vector<Layer> layers;
  layers.reserve(n);
  for (size_t i = 0; i < n; ++i) {
    const Checker of_layer{c.op, int64_t(i)};
    layers.push_back(layer_of(of_layer, &weights[i * kWeights], key_caches[i], value_caches[i]));
    check_layer(of_layer, x, layers[i], step);
    // So what the first layer finds right in the step's arguments, which name slots and blocks, is right for all.
    ATTN_EXT_CHECK(of_layer, same_shape(key_caches[i], key_caches[0]), "key_cache",
                   "have the shape of that of layer 0 " + to_string(shape_of(key_caches[0])),
                   to_string(shape_of(key_caches[i])));
  }
  for (const Layer& layer : layers) x = run_layer(c, x, layer, step);
  for (const Layer& layer : layers) mark_written(layer.key_cache, layer.value_cache);
  return x;
}

}  // namespace attn_ext::ops
