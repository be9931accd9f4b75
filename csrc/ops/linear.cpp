// linear, qkv_projection and qkv_projection_to_cache: checks and outputs.
#include "ops/launch.h"
#include "ops/ops.h"

namespace attn_ext::ops {
namespace {

// The sizes of a weight: (N, K), or (N / 16, K / P, 16, P) as pack_weight lays it out (params.h).
struct WeightSizes {
  bool packed;
  int64_t N, K;

  WeightSizes(const Checker& c, const Tensor& weight, const char* layout, const char* name = "weight")
      : packed(weight.dim() == 4) {
    if (!packed) {
      ATTN_EXT_CHECK(c, weight.dim() == 2, name, std::string("have shape ") + layout + " or be packed by pack_weight",
                     to_string(shape_of(weight)));
      N = weight.size(0);
      K = weight.size(1);
      return;
    }
    ATTN_EXT_CHECK(c, !weight.is_cuda(), name, std::string("have shape ") + layout + " on a CUDA device",
                   "one packed for the CPU, " + to_string(shape_of(weight)));
    const ScalarType dtype = weight.scalar_type();
    const int64_t P = dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ? 2 : 1;
    ATTN_EXT_CHECK(c, weight.size(2) == 16 && weight.size(3) == P, name,
                   "be packed in its present dtype (" + to_string(dtype) + ": shape (N / 16, K" +
                       (P == 2 ? " / 2" : "") + ", 16, " + std::to_string(P) + "))",
                   to_string(shape_of(weight)));
    ATTN_EXT_CHECK(c, weight.is_contiguous(), name, "be contiguous when it is packed", "another layout");
    N = weight.size(0) * 16;
    K = weight.size(1) * P;
  }
};

// What every product has: x (..., K) seen as (M, K), weight (N, K) or packed, bias (N).
struct Product {
  LinearParams params{};
  Tensor x, weight;
  OptionalTensor bias;
  Shape leading;  // x without its last dimension

  Product(const Checker& c, const Tensor& x_in, const Tensor& weight_in, const OptionalTensor& bias_in)
      : x(x_in), weight(weight_in), bias(bias_in) {
    ATTN_EXT_CHECK(c, x.dim() >= 1, "x", "have shape (..., K)", to_string(shape_of(x)));
    const auto [packed, N, K] = WeightSizes(c, weight, "(N, K)");
    ATTN_EXT_CHECK(c, x.size(x.dim() - 1) == K, "x",
                   "have as last dimension the K of weight (" + std::to_string(K) + ")", to_string(shape_of(x)));
    if (bias) c.shape(*bias, "bias", {N}, "(N,)");
    c.same_device(x, "x", {{"weight", &weight}, {"bias", given(bias)}});
    c.same_dtype({{"x", &x}, {"weight", &weight}, {"bias", given(bias)}});

    leading = shape_of(x);
    leading.pop_back();
    int64_t M = 1;
    for (const int64_t n : leading) M *= n;
    if (!packed) weight = unit_last_stride(weight);
    if (bias) bias = unit_last_stride(*bias);
    params.dtype = dtype_of(x.scalar_type());
    params.M = M;
    params.N = N;
    params.K = K;
    x = as_rows(x, M, K, params.x_stride);
    params.x = x.const_data_ptr();
    params.weight = weight.const_data_ptr();
    params.packed = packed;
    params.weight_stride = weight.stride(0);
    params.bias = bias ? bias->const_data_ptr() : nullptr;
  }
};

}  // namespace

Activation activation_of(const Checker& c, const std::optional<std::string>& name) {
  if (!name) return Activation::none;
  if (*name == "gelu") return Activation::gelu;
  if (*name == "gelu_tanh") return Activation::gelu_tanh;
  if (*name == "silu") return Activation::silu;
  c.fail("activation", "be None, 'gelu', 'gelu_tanh' or 'silu'", "'" + *name + "'");
}

int64_t check_product(const Checker& c, const Tensor& x, int64_t K, const char* name, const Tensor& weight,
                      const OptionalTensor& bias, std::optional<int64_t> N) {
  const WeightSizes sizes(c, weight, "(N, K)", name);
  ATTN_EXT_CHECK(c, sizes.K == K && sizes.N == N.value_or(sizes.N), name,
                 "be a weight (" + (N ? std::to_string(*N) : "N") + ", " + std::to_string(K) + "), plain or packed",
                 to_string(shape_of(weight)));
  const std::string bias_name = std::string(name) + "'s bias";
  if (bias) c.shape(*bias, bias_name.c_str(), {sizes.N}, "(N,)");
  c.same_device(x, "x", {{name, &weight}, {bias_name.c_str(), given(bias)}});
  c.same_dtype({{"x", &x}, {name, &weight}, {bias_name.c_str(), given(bias)}});
  return sizes.N;
}

namespace {

// (H + 2 Hkv) D rows of the fused weight -> D
int64_t head_dim(const Checker& c, const Tensor& weight, int64_t n_heads, int64_t n_kv_heads) {
  c.heads(n_heads, n_kv_heads);
  const int64_t rows = WeightSizes(c, weight, "((n_heads + 2 n_kv_heads) D, C)").N, heads = n_heads + 2 * n_kv_heads;
  ATTN_EXT_CHECK(c, rows > 0 && rows % heads == 0, "weight",
                 "have a positive multiple of n_heads + 2 n_kv_heads (" + std::to_string(heads) + ") rows",
                 to_string(shape_of(weight)));
  return rows / heads;
}

}  // namespace

Tensor linear(Tensor x, Tensor weight, OptionalTensor bias, std::optional<std::string> activation,
              OptionalTensor residual, OptionalTensor multiply) {
  const Checker c{"linear"};
  Product product(c, x, weight, bias);
  LinearParams& p = product.params;
  p.activation = activation_of(c, activation);
  Shape shape = product.leading;
  shape.push_back(p.N);
  // One element for each of the result, as rows (..., N); `held` keeps them alive.
  const auto rows_of = [&](const OptionalTensor& t, const char* name, Tensor& held, int64_t& stride) -> const void* {
    if (!t) return nullptr;
    c.shape(*t, name, shape, "(..., N)");
    c.same_device(x, "x", {{name, &*t}});
    c.same_dtype({{"x", &x}, {name, &*t}});
    held = as_rows(*t, p.M, p.N, stride);
    return held.const_data_ptr();
  };
  Tensor residual_rows = x, multiply_rows = x;
  p.residual = rows_of(residual, "residual", residual_rows, p.residual_stride);
  p.multiply = rows_of(multiply, "multiply", multiply_rows, p.multiply_stride);
  Tensor y = new_tensor(x, shape);
  p.y = y.mutable_data_ptr();
  p.y_stride = p.N;
  if (p.M * p.N > 0) run(c.op, x, p);
  return y;
}

Tensor qkv_projection(Tensor x, Tensor weight, OptionalTensor bias, int64_t n_heads, int64_t n_kv_heads) {
  const Checker c{"qkv_projection"};
  head_dim(c, weight, n_heads, n_kv_heads);
  Product product(c, x, weight, bias);
  LinearParams& p = product.params;
  Shape shape = product.leading;
  shape.push_back(p.N);
  Tensor y = new_tensor(x, shape);
  p.y = y.mutable_data_ptr();
  p.y_stride = p.N;
  if (p.M * p.N > 0) run(c.op, x, p);
  return y;
}

Tensor qkv_projection_to_cache(Tensor x, Tensor weight, OptionalTensor bias, Tensor key_cache, Tensor value_cache,
                               Tensor slot_mapping, int64_t n_heads, int64_t n_kv_heads, OptionalTensor rope_cos,
                               OptionalTensor rope_sin, OptionalTensor positions) {
  const Tensor q = project_to_cache({"qkv_projection_to_cache"}, x, weight, bias, key_cache, value_cache, slot_mapping,
                                    n_heads, n_kv_heads, rope_cos, rope_sin, positions, std::nullopt);
  mark_written(key_cache, value_cache);
  return q;
}

Tensor project_to_cache(const Checker& c, Tensor x, Tensor weight, OptionalTensor bias, Tensor key_cache,
                        Tensor value_cache, Tensor slot_mapping, int64_t n_heads, int64_t n_kv_heads,
                        OptionalTensor rope_cos, OptionalTensor rope_sin, OptionalTensor positions,
                        OptionalTensor into) {
  const int64_t D = head_dim(c, weight, n_heads, n_kv_heads);
  c.same_device(x, "x",
                {{"key_cache", &key_cache},
                 {"value_cache", &value_cache},
                 {"slot_mapping", &slot_mapping},
                 {"rope_cos", given(rope_cos)},
                 {"rope_sin", given(rope_sin)},
                 {"positions", given(positions)}});
  Product product(c, x, weight, bias);
  if (!into) c.caches(key_cache, value_cache, Checker::Caches::written);
  c.same_dtype({{"x", &x}, {"key_cache", &key_cache}, {"value_cache", &value_cache}});
  ATTN_EXT_CHECK(c, key_cache.size(2) == n_kv_heads && key_cache.size(3) == D, "key_cache",
                 "have n_kv_heads " + std::to_string(n_kv_heads) + " and head_dim " + std::to_string(D),
                 to_string(shape_of(key_cache)));

  QkvToCacheParams p{};
  p.gemm = product.params;
  p.H = n_heads;
  p.Hkv = n_kv_heads;
  p.D = D;
  const auto slots = checked_slots(c, slot_mapping, p.gemm.M, key_cache);
  p.slot_mapping = slots.data;

  const int n_given = rope_cos.has_value() + rope_sin.has_value() + positions.has_value();
  ATTN_EXT_CHECK(c, n_given == 0 || n_given == 3, "rope", "be None or (cos, sin, positions)",
                 std::to_string(n_given) + " of the three");
  std::optional<Indices<int64_t>> position;
  if (n_given) {
    ATTN_EXT_CHECK(c, D % 2 == 0, "rope", "rotate an even head_dim", std::to_string(D));
    c.rank(*rope_cos, "cos", 2, "(max_pos, D / 2)");
    ATTN_EXT_CHECK(c, rope_cos->size(1) == D / 2, "cos", "have shape (max_pos, " + std::to_string(D / 2) + ")",
                   to_string(shape_of(*rope_cos)));
    c.shape(*rope_sin, "sin", shape_of(*rope_cos), "(max_pos, D / 2)");
    c.dtype(*rope_cos, "cos", ScalarType::Float);
    c.dtype(*rope_sin, "sin", ScalarType::Float);
    position = c.indices<int64_t>(*positions, "positions");
    ATTN_EXT_CHECK(c, position->size == p.gemm.M, "positions",
                   "have one entry a token (" + std::to_string(p.gemm.M) + ")", std::to_string(position->size));
    for (int64_t i = 0; position->known() && i < position->size; ++i)
      ATTN_EXT_CHECK(c, (*position)[i] >= 0 && (*position)[i] < rope_cos->size(0),
                     "positions[" + std::to_string(i) + "]",
                     "be a row of the rope tables (0 to " + std::to_string(rope_cos->size(0) - 1) + ")",
                     std::to_string((*position)[i]));
    rope_cos = unit_last_stride(*rope_cos);
    rope_sin = unit_last_stride(*rope_sin);
    p.rope_cos = static_cast<const float*>(rope_cos->const_data_ptr());
    p.rope_sin = static_cast<const float*>(rope_sin->const_data_ptr());
    p.rope_cos_stride = rope_cos->stride(0);
    p.rope_sin_stride = rope_sin->stride(0);
    p.positions = position->data;
    p.max_pos = rope_cos->size(0);
  }

  Shape shape = product.leading;
  shape.push_back(n_heads);
  shape.push_back(D);
  Tensor q = into ? *into : new_tensor(x, shape);
  p.q = q.mutable_data_ptr();
  p.key_cache = key_cache.mutable_data_ptr();
  p.value_cache = value_cache.mutable_data_ptr();
  p.block_size = key_cache.size(1);
  for (int i = 0; i < 3; ++i) {
    p.key_strides[i] = key_cache.stride(i);
    p.value_strides[i] = value_cache.stride(i);
  }
  p.num_blocks = key_cache.size(0);
  if (p.gemm.M > 0) run(c.op, x, p);
  return q;
}

}  // namespace attn_ext::ops
