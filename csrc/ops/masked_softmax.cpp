// masked_softmax: checks and output.
#include "ops/launch.h"
#include "ops/ops.h"

namespace attn_ext::ops {

Tensor masked_softmax(Tensor scores, OptionalTensor mask, bool causal, double scale) {
  const Checker c{"masked_softmax"};
  ATTN_EXT_CHECK(c, scores.dim() >= 2, "scores", "have shape (..., Tq, Tk)", to_string(shape_of(scores)));
  c.floating(scores, "scores");
  c.finite(scale, "scale", scores.scalar_type());
  const Shape shape = shape_of(scores);
  Tensor out = new_tensor(scores, shape);

  // Four dimensions are enough: of more, the leading ones are folded into one.
  const int64_t Tq = shape[shape.size() - 2], Tk = shape[shape.size() - 1];
  Shape folded = {1, 1, Tq, Tk};
  if (shape.size() == 3) folded[1] = shape[0];
  if (shape.size() >= 4) {
    folded[1] = shape[shape.size() - 3];
    for (size_t i = 0; i + 3 < shape.size(); ++i) folded[0] *= shape[i];
  }
  Tensor s = unit_last_stride(shape.size() == 4 ? scores : torch::stable::reshape(scores, folded));

  MaskedSoftmaxParams p{};
  p.dtype = dtype_of(scores.scalar_type());
  p.B0 = folded[0];
  p.B1 = folded[1];
  p.Tq = Tq;
  p.Tk = Tk;
  p.causal = causal;
  p.scale = scale;
  Tensor m = s;
  if (mask) {
    c.same_device(scores, "scores", {{"mask", &*mask}});
    const auto dtype = mask->scalar_type();
    ATTN_EXT_CHECK(c, dtype == ScalarType::Bool || dtype == ScalarType::Float || dtype == scores.scalar_type(), "mask",
                   "be bool, float32 or of the dtype of scores (" + to_string(scores.scalar_type()) + ")",
                   to_string(dtype));
    m = *mask;
    if (mask->dim() > 4) {  // only the same leading dimensions can be folded
      const Shape got = shape_of(m);
      bool same = got.size() == shape.size();
      for (size_t i = 0; same && i + 3 < got.size(); ++i) same = got[i] == shape[i];
      ATTN_EXT_CHECK(c, same, "mask",
                     "have at most 4 dimensions, or the leading dimensions of scores " + to_string(shape),
                     to_string(got));
      m = torch::stable::reshape(m, {folded[0], got[got.size() - 3], got[got.size() - 2], got[got.size() - 1]});
    }
    ATTN_EXT_CHECK(c, shape.size() <= 4 || m.dim() < 4 || mask->dim() > 4 || m.size(0) == 1, "mask",
                   "have as many dimensions as scores, or no leading dimension of its own", to_string(shape_of(*mask)));
    const auto strides = broadcast_strides(c, m, "mask", {p.B0, p.B1, p.Tq, p.Tk}, "the shape of scores", false);
    std::copy(strides.begin(), strides.end(), p.mask_strides);
    p.mask = m.const_data_ptr();
    p.mask_dtype = dtype_of(dtype);
  }
  for (int i = 0; i < 3; ++i) p.scores_strides[i] = s.size(i) == 1 ? 0 : s.stride(i);
  p.scores = s.const_data_ptr();
  p.out = out.mutable_data_ptr();
  if (p.B0 * p.B1 * p.Tq * p.Tk > 0) run(c.op, scores, p);
  return out;
}

}  // namespace attn_ext::ops
