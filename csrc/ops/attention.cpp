// attention, attention_varlen, paged_attention and merge_attention: checks and outputs.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "ops/launch.h"
#include "ops/ops.h"

namespace attn_ext::ops {
namespace {

// The arguments the three attention ops share: score transform and visibility.
struct Options {
  bool causal;
  std::optional<double> scale;
  int64_t window_left, window_right;
  double softcap;
  OptionalTensor alibi_slopes, sinks, mask, bias;

  // Is there a mask or bias for fewer rows or keys than these? Then the lengths of ragged sequences must be known.
  bool covers_less(int64_t Tq, int64_t Tk) const {
    const auto less = [&](const OptionalTensor& t) {
      const auto shorter = [&](int64_t from_end, int64_t length) {
        if (t->dim() < from_end) return false;
        const int64_t size = t->size(t->dim() - from_end);
        return size != 1 && size < length;
      };
      return t.has_value() && (shorter(2, Tq) || shorter(1, Tk));
    };
    return less(mask) || less(bias);
  }

  // Fills the transform fields of p. Broadcast targets are (B, H, Tq, Tk); with ragged lengths these are maxima, and a
  // mask or bias may be longer.
  void apply(const Checker& c, const Tensor& q, bool ragged, AttentionParams& p) {
    const ScalarType dtype = q.scalar_type(), accumulate = accumulate_dtype(dtype);
    p.causal = causal;
    p.scale = scale.value_or(1.0 / std::sqrt(double(p.D)));
    c.finite(p.scale, "scale", dtype);
    c.finite(softcap, "softcap", dtype);
    ATTN_EXT_CHECK(c, softcap >= 0, "softcap", "be at least 0 (0 = none)", number(softcap));
    // Scores are divided by it: the reciprocal of a smaller number is infinite.
    ATTN_EXT_CHECK(c, softcap == 0 || softcap >= std::numeric_limits<float>::min() || dtype == ScalarType::Double,
                   "softcap", "be 0 or a normal number of float32 (at least 1.17549e-38)", number(softcap));
    p.softcap = softcap;
    ATTN_EXT_CHECK(c, window_left >= -1 && window_right >= -1, "window", "have entries of at least -1 (-1 = unlimited)",
                   to_string({window_left, window_right}));
    constexpr int64_t unlimited = int64_t(1) << 48;  // longer than any sequence, and position + window cannot overflow
    p.window_left = std::min(window_left, unlimited);
    p.window_right = std::min(window_right, unlimited);
    if (alibi_slopes) {
      c.same_device(q, "q", {{"alibi_slopes", &*alibi_slopes}});
      c.dtype(*alibi_slopes, "alibi_slopes", accumulate);
      const Shape shape = shape_of(*alibi_slopes);
      ATTN_EXT_CHECK(c, (shape == Shape{p.H} || shape == Shape{p.B, p.H}), "alibi_slopes",
                     "have shape (H,) = " + to_string({p.H}) + " or (B, H) = " + to_string({p.B, p.H}),
                     to_string(shape));
      alibi_slopes = unit_last_stride(*alibi_slopes);
      p.alibi_slopes = alibi_slopes->const_data_ptr();
      p.alibi_batch_stride = shape.size() == 2 ? alibi_slopes->stride(0) : 0;
    }
    if (sinks) {
      c.same_device(q, "q", {{"sinks", &*sinks}});
      c.dtype(*sinks, "sinks", accumulate);
      c.shape(*sinks, "sinks", {p.H}, "(H,)");
      sinks = unit_last_stride(*sinks);
      p.sinks = sinks->const_data_ptr();
    }
    const std::array<int64_t, 4> target = {p.B, p.H, p.Tq, p.Tk};
    const char* layout = ragged ? "(B, H, longest Tq, longest Tk)" : "(B, H, Tq, Tk)";
    if (mask) {
      c.same_device(q, "q", {{"mask", &*mask}});
      c.dtype(*mask, "mask", ScalarType::Bool);
      const auto strides = broadcast_strides(c, *mask, "mask", target, layout, ragged);
      std::copy(strides.begin(), strides.end(), p.mask_strides);
      p.mask = mask->const_data_ptr();
    }
    if (bias) {
      c.same_device(q, "q", {{"bias", &*bias}});
      const ScalarType given = bias->scalar_type();
      ATTN_EXT_CHECK(c, given == ScalarType::Float || given == dtype, "bias",
                     "be float32 or of the dtype of q (" + to_string(dtype) + ")", to_string(given));
      const auto strides = broadcast_strides(c, *bias, "bias", target, layout, ragged);
      std::copy(strides.begin(), strides.end(), p.bias_strides);
      p.bias = bias->const_data_ptr();
      p.bias_dtype = dtype_of(given);
    }
  }
};

int64_t stride_of(const Tensor& t, int64_t i) { return t.size(i) == 1 ? 0 : t.stride(i); }

void check_head_dim(const Checker& c, const Tensor& q, const Tensor& k, const char* name) {
  const int64_t D = q.size(q.dim() - 1);
  ATTN_EXT_CHECK(c, D >= 1, "q", "have a head_dim of at least 1", to_string(shape_of(q)));
  ATTN_EXT_CHECK(c, k.size(k.dim() - 1) == D, name, "have the head_dim of q (" + std::to_string(D) + ")",
                 std::to_string(k.size(k.dim() - 1)));
}

// Boundaries of ragged sequences: 0, ascending, ending at `total`. On a device, where they are not known, the longest
// is taken to be what is given or, without that, all rows.
Indices<int32_t> checked_cu_seqlens(const Checker& c, const Tensor& t, const char* name, int64_t total,
                                    const std::optional<int64_t>& given, bool fetch, int64_t& longest) {
  auto cu = c.indices<int32_t>(t, name);
  if (!given && fetch && !cu.known()) cu.fetch();
  ATTN_EXT_CHECK(c, cu.size > 0, name, "start with 0", "no entry");
  if (!cu.known()) {
    longest = std::clamp<int64_t>(given.value_or(total), 0, total);
    return cu;
  }
  ATTN_EXT_CHECK(c, cu[0] == 0, name, "start with 0", std::to_string(cu[0]));
  longest = 0;
  for (int64_t i = 1; i < cu.size; ++i) {
    ATTN_EXT_CHECK(c, cu[i] >= cu[i - 1], name, "never decrease",
                   std::to_string(cu[i - 1]) + " then " + std::to_string(cu[i]) + " at " + std::to_string(i));
    longest = std::max<int64_t>(longest, cu[i] - cu[i - 1]);
  }
  ATTN_EXT_CHECK(c, cu[cu.size - 1] == total, name, "end with the number of rows (" + std::to_string(total) + ")",
                 std::to_string(cu[cu.size - 1]));
  return cu;
}

void check_longest(const Checker& c, const std::optional<int64_t>& given, const char* name, int64_t longest) {
  if (given)
    ATTN_EXT_CHECK(c, *given >= longest, name, "be at least the longest sequence (" + std::to_string(longest) + ")",
                   std::to_string(*given));
}

// Output and lse for q (B, Tq, H, D) or (total, H, D), and their strides.
OutAndLse make_outputs(const Tensor& q, AttentionParams& p) {
  const Shape shape = shape_of(q);
  Tensor out = new_tensor(q, shape);
  const bool ragged = shape.size() == 3;
  const Shape lse_shape = ragged ? Shape{p.H, shape[0]} : Shape{p.B, p.H, shape[1]};
  Tensor lse = new_tensor(q, lse_shape, accumulate_dtype(q.scalar_type()));
  p.out = out.mutable_data_ptr();
  p.out_head_stride = p.D;
  p.out_row_stride = p.H * p.D;
  p.out_batch_stride = ragged ? 0 : shape[1] * p.H * p.D;
  p.lse = lse.mutable_data_ptr();
  p.lse_head_stride = ragged ? shape[0] : shape[1];
  p.lse_batch_stride = ragged ? 0 : p.H * shape[1];
  return {out, lse};
}

void set_queries(const Tensor& q, AttentionParams& p) {
  p.q = q.const_data_ptr();
  const bool ragged = q.dim() == 3;
  p.q_batch_stride = ragged ? 0 : stride_of(q, 0);
  p.q_row_stride = stride_of(q, ragged ? 0 : 1);
  p.q_head_stride = stride_of(q, ragged ? 1 : 2);
}

// k and v (B, Tk, Hkv, D), (total_k, Hkv, D) or caches (num_blocks, block_size, Hkv, D)
void set_keys_and_values(const Tensor& k, const Tensor& v, AttentionParams& p) {
  p.k = k.const_data_ptr();
  p.v = v.const_data_ptr();
  const int64_t row = k.dim() == 3 ? 0 : 1;
  p.k_batch_stride = row == 0 ? 0 : stride_of(k, 0);
  p.k_row_stride = stride_of(k, row);
  p.k_head_stride = stride_of(k, row + 1);
  p.v_batch_stride = row == 0 ? 0 : stride_of(v, 0);
  p.v_row_stride = stride_of(v, row);
  p.v_head_stride = stride_of(v, row + 1);
}

}  // namespace

OutAndLse attention(Tensor q, Tensor k, Tensor v, bool causal, std::optional<double> scale, int64_t window_left,
                    int64_t window_right, double softcap, OptionalTensor alibi_slopes, OptionalTensor sinks,
                    OptionalTensor mask, OptionalTensor bias) {
  const Checker c{"attention"};
  c.rank(q, "q", 4, "(B, Tq, H, D)");
  c.rank(k, "k", 4, "(B, Tk, Hkv, D)");
  c.same_device(q, "q", {{"k", &k}, {"v", &v}});
  c.same_dtype({{"q", &q}, {"k", &k}, {"v", &v}});
  ATTN_EXT_CHECK(c, same_shape(k, v), "v", "have the shape of k " + to_string(shape_of(k)), to_string(shape_of(v)));
  ATTN_EXT_CHECK(c, k.size(0) == q.size(0), "k", "have the batch size of q (" + std::to_string(q.size(0)) + ")",
                 std::to_string(k.size(0)));
  check_head_dim(c, q, k, "k");
  c.heads(q.size(2), k.size(2));

  AttentionParams p{};
  p.dtype = dtype_of(q.scalar_type());
  p.B = q.size(0);
  p.H = q.size(2);
  p.Hkv = k.size(2);
  p.D = q.size(3);
  p.Tq = q.size(1);
  p.Tk = k.size(1);
  Options options{causal, scale, window_left, window_right, softcap, alibi_slopes, sinks, mask, bias};
  options.apply(c, q, false, p);
  q = unit_last_stride(q);
  k = unit_last_stride(k);
  v = unit_last_stride(v);
  set_queries(q, p);
  set_keys_and_values(k, v, p);
  const auto result = make_outputs(q, p);
  if (q.numel() > 0) run(c.op, q, p);
  return result;
}

OutAndLse attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                           std::optional<int64_t> max_seqlen_q, std::optional<int64_t> max_seqlen_k, bool causal,
                           std::optional<double> scale, int64_t window_left, int64_t window_right, double softcap,
                           OptionalTensor alibi_slopes, OptionalTensor sinks, OptionalTensor mask,
                           OptionalTensor bias) {
  const Checker c{"attention_varlen"};
  c.rank(q, "q", 3, "(total_q, H, D)");
  c.rank(k, "k", 3, "(total_k, Hkv, D)");
  c.same_device(q, "q", {{"k", &k}, {"v", &v}, {"cu_seqlens_q", &cu_seqlens_q}, {"cu_seqlens_k", &cu_seqlens_k}});
  c.same_dtype({{"q", &q}, {"k", &k}, {"v", &v}});
  ATTN_EXT_CHECK(c, same_shape(k, v), "v", "have the shape of k " + to_string(shape_of(k)), to_string(shape_of(v)));
  check_head_dim(c, q, k, "k");
  c.heads(q.size(1), k.size(1));

  AttentionParams p{};
  p.dtype = dtype_of(q.scalar_type());
  p.H = q.size(1);
  p.Hkv = k.size(1);
  p.D = q.size(2);
  p.total_q = q.size(0);
  p.total_k = k.size(0);
  Options options{causal, scale, window_left, window_right, softcap, alibi_slopes, sinks, mask, bias};
  const bool fetch = options.covers_less(p.total_q, p.total_k);
  const auto cu_q = checked_cu_seqlens(c, cu_seqlens_q, "cu_seqlens_q", p.total_q, max_seqlen_q, fetch, p.Tq);
  const auto cu_k = checked_cu_seqlens(c, cu_seqlens_k, "cu_seqlens_k", p.total_k, max_seqlen_k, fetch, p.Tk);
  ATTN_EXT_CHECK(c, cu_k.size == cu_q.size, "cu_seqlens_k",
                 "have as many entries as cu_seqlens_q (" + std::to_string(cu_q.size) + ")", std::to_string(cu_k.size));
  check_longest(c, max_seqlen_q, "max_seqlen_q", p.Tq);
  check_longest(c, max_seqlen_k, "max_seqlen_k", p.Tk);
  p.B = cu_q.size - 1;
  p.cu_seqlens_q = cu_q.data;
  p.cu_seqlens_k = cu_k.data;
  options.apply(c, q, true, p);
  q = unit_last_stride(q);
  k = unit_last_stride(k);
  v = unit_last_stride(v);
  set_queries(q, p);
  set_keys_and_values(k, v, p);
  const auto result = make_outputs(q, p);
  if (q.numel() > 0) run(c.op, q, p);
  return result;
}

// The work of both forms of paged_attention. `before` is called once all arguments are checked.
static OutAndLse paged_attention(const Checker& c, Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table,
                                 Tensor seq_lens, OptionalTensor cu_seqlens_q, std::optional<int64_t> max_seqlen_q,
                                 Options options, const std::function<void()>& before) {
  const bool ragged = cu_seqlens_q.has_value();
  c.rank(q, "q", ragged ? 3 : 4, ragged ? "(total, H, D) with cu_seqlens_q" : "(B, Tq, H, D) without cu_seqlens_q");
  c.caches(key_cache, value_cache, Checker::Caches::read);
  c.same_device(q, "q",
                {{"key_cache", &key_cache},
                 {"value_cache", &value_cache},
                 {"block_table", &block_table},
                 {"seq_lens", &seq_lens},
                 {"cu_seqlens_q", given(cu_seqlens_q)}});
  c.same_dtype({{"q", &q}, {"key_cache", &key_cache}, {"value_cache", &value_cache}});
  check_head_dim(c, q, key_cache, "key_cache");
  const int64_t H = q.size(q.dim() - 2);
  c.heads(H, key_cache.size(2));
  c.rank(block_table, "block_table", 2, "(B, max_blocks)");
  c.dtype(block_table, "block_table", ScalarType::Int);
  auto lens = c.indices<int32_t>(seq_lens, "seq_lens");

  AttentionParams p{};
  p.dtype = dtype_of(q.scalar_type());
  p.H = H;
  p.Hkv = key_cache.size(2);
  p.D = key_cache.size(3);
  p.block_size = key_cache.size(1);
  std::optional<Indices<int32_t>> cu_q;
  if (ragged) {
    p.total_q = q.size(0);
    const bool fetch = options.covers_less(p.total_q, 0);
    cu_q = checked_cu_seqlens(c, *cu_seqlens_q, "cu_seqlens_q", p.total_q, max_seqlen_q, fetch, p.Tq);
    p.B = cu_q->size - 1;
    p.cu_seqlens_q = cu_q->data;
  } else {
    p.B = q.size(0);
    p.Tq = q.size(1);
  }
  check_longest(c, max_seqlen_q, "max_seqlen_q", p.Tq);
  ATTN_EXT_CHECK(c, lens.size == p.B, "seq_lens", "have one entry a sequence (" + std::to_string(p.B) + ")",
                 std::to_string(lens.size));
  ATTN_EXT_CHECK(c, block_table.size(0) == p.B, "block_table", "have one row a sequence (" + std::to_string(p.B) + ")",
                 to_string(shape_of(block_table)));

  // Only the entries a sequence needs are looked at.
  block_table = unit_last_stride(block_table);
  p.block_table = static_cast<const int32_t*>(block_table.const_data_ptr());
  p.block_table_stride = block_table.stride(0);
  p.seq_lens = lens.data;
  p.num_blocks = key_cache.size(0);
  const int64_t capacity = block_table.size(1) * p.block_size;
  if (!lens.known() && options.covers_less(0, capacity)) lens.fetch();
  if (!lens.known()) p.Tk = capacity;
  const bool check_blocks = block_table.is_cpu();
  for (int64_t b = 0; lens.known() && b < p.B; ++b) {
    ATTN_EXT_CHECK(c, lens[b] >= 0 && lens[b] <= capacity, "seq_lens[" + std::to_string(b) + "]",
                   "be between 0 and max_blocks * block_size (" + std::to_string(capacity) + ")",
                   std::to_string(lens[b]));
    p.Tk = std::max<int64_t>(p.Tk, lens[b]);
    for (int64_t i = 0; check_blocks && i * p.block_size < lens[b]; ++i) {
      const int32_t block = p.block_table[b * p.block_table_stride + i];
      if (block < 0 || block >= p.num_blocks)
        c.fail("block_table[" + std::to_string(b) + "][" + std::to_string(i) + "]",
               "be a block of the cache (0 to " + std::to_string(p.num_blocks - 1) + ")", std::to_string(block));
    }
  }
  static const int32_t no_blocks = 0;
  if (!p.block_table) p.block_table = &no_blocks;  // an empty table has no storage, and null means dense keys
  options.apply(c, q, true, p);
  q = unit_last_stride(q);
  set_queries(q, p);
  set_keys_and_values(key_cache, value_cache, p);
  const auto result = make_outputs(q, p);
  if (before) before();
  if (q.numel() > 0) run(c.op, q, p);
  return result;
}

OutAndLse paged_attention(Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens,
                          OptionalTensor cu_seqlens_q, std::optional<int64_t> max_seqlen_q, bool causal,
                          std::optional<double> scale, int64_t window_left, int64_t window_right, double softcap,
                          OptionalTensor alibi_slopes, OptionalTensor sinks, OptionalTensor mask, OptionalTensor bias) {
  return paged_attention({"paged_attention"}, q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q,
                         max_seqlen_q,
                         {causal, scale, window_left, window_right, softcap, alibi_slopes, sinks, mask, bias}, nullptr);
}

Tensor paged_attention_after(const Checker& c, Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table,
                             Tensor seq_lens, Tensor cu_seqlens_q, std::optional<int64_t> max_seqlen_q,
                             int64_t window_left, const std::function<void()>& before) {
  Options options{};
  options.causal = true;
  options.window_left = window_left;
  options.window_right = -1;
  return std::get<0>(paged_attention(c, q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, max_seqlen_q,
                                     options, before));
}

OutAndLse merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) {
  const Checker c{"merge_attention"};
  const bool ragged = out_a.dim() == 3;
  ATTN_EXT_CHECK(c, ragged || out_a.dim() == 4, "out_a", "have shape (B, T, H, D) or (total, H, D)",
                 to_string(shape_of(out_a)));
  c.same_device(out_a, "out_a", {{"lse_a", &lse_a}, {"out_b", &out_b}, {"lse_b", &lse_b}});
  c.same_dtype({{"out_a", &out_a}, {"out_b", &out_b}});
  const Shape shape = shape_of(out_a);
  ATTN_EXT_CHECK(c, shape_of(out_b) == shape, "out_b", "have the shape of out_a " + to_string(shape),
                 to_string(shape_of(out_b)));
  const Shape lse_shape = ragged ? Shape{shape[1], shape[0]} : Shape{shape[0], shape[2], shape[1]};
  const ScalarType accumulate = accumulate_dtype(out_a.scalar_type());
  for (const auto& [name, lse] : {std::pair{"lse_a", &lse_a}, std::pair{"lse_b", &lse_b}}) {
    c.shape(*lse, name, lse_shape, ragged ? "(H, total)" : "(B, H, T)");
    c.dtype(*lse, name, accumulate);
  }

  MergeAttentionParams p{};
  p.dtype = dtype_of(out_a.scalar_type());
  p.B = ragged ? 1 : shape[0];
  p.T = shape[ragged ? 0 : 1];
  p.H = shape[ragged ? 1 : 2];
  p.D = shape[ragged ? 2 : 3];
  out_a = unit_last_stride(out_a);
  out_b = unit_last_stride(out_b);
  const int first = ragged ? 1 : 0;  // the batch stride of ragged tensors is 0
  for (int i = first; i < 3; ++i) {
    p.a_strides[i] = out_a.stride(i - first);
    p.b_strides[i] = out_b.stride(i - first);
    p.lse_a_strides[i] = lse_a.stride(i - first);
    p.lse_b_strides[i] = lse_b.stride(i - first);
  }
  p.out_a = out_a.const_data_ptr();
  p.out_b = out_b.const_data_ptr();
  p.lse_a = lse_a.const_data_ptr();
  p.lse_b = lse_b.const_data_ptr();
  Tensor out = new_tensor(out_a, shape);
  Tensor lse = new_tensor(out_a, lse_shape, accumulate);
  p.out = out.mutable_data_ptr();
  p.lse = lse.mutable_data_ptr();
  if (p.B * p.T * p.H > 0) run(c.op, out_a, p);
  return {out, lse};
}

}  // namespace attn_ext::ops
