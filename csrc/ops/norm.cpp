// rms_norm and layer_norm: checks and output.
#include "ops/launch.h"
#include "ops/ops.h"

namespace attn_ext::ops {
namespace {

Tensor norm(const Checker& c, const Tensor& x, Tensor weight, OptionalTensor bias, double eps, bool centered) {
  ATTN_EXT_CHECK(c, x.dim() >= 1, "x", "have shape (..., C)", to_string(shape_of(x)));
  const int64_t C = x.size(x.dim() - 1);
  c.shape(weight, "weight", {C}, "(C,)");
  if (bias) c.shape(*bias, "bias", {C}, "(C,)");
  c.same_device(x, "x", {{"weight", &weight}, {"bias", given(bias)}});
  c.same_dtype({{"x", &x}, {"weight", &weight}, {"bias", given(bias)}});
  c.finite(eps, "eps", x.scalar_type());
  ATTN_EXT_CHECK(c, eps >= 0, "eps", "be at least 0", number(eps));

  const Shape shape = shape_of(x);
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  weight = unit_last_stride(weight);
  if (bias) bias = unit_last_stride(*bias);
  NormParams p{};
  p.dtype = dtype_of(x.scalar_type());
  p.rows = rows;
  p.C = C;
  const Tensor x_rows = as_rows(x, rows, C, p.x_stride);
  p.x = x_rows.const_data_ptr();
  p.weight = weight.const_data_ptr();
  p.bias = bias ? bias->const_data_ptr() : nullptr;
  p.eps = eps;
  p.centered = centered;
  Tensor y = new_tensor(x, shape);
  p.y = y.mutable_data_ptr();
  if (rows * C > 0) run(c.op, x, p);
  return y;
}

}  // namespace

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  return norm(Checker{"rms_norm"}, x, weight, std::nullopt, eps, false);
}

Tensor layer_norm(Tensor x, Tensor weight, OptionalTensor bias, double eps) {
  return norm(Checker{"layer_norm"}, x, weight, bias, eps, true);
}

}  // namespace attn_ext::ops
