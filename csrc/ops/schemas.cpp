// Every op of attn_ext on one page: names, arguments, what is written in place, and what runs where.
//
// Shapes, dtypes and meaning are in the docstrings of attn_ext/ops.py; reference.py defines the results. The checks
// and the allocation in csrc/ops/<op>.cpp are the same for every device.
#include <torch/csrc/stable/library.h>

#include "ops/ops.h"

STABLE_TORCH_LIBRARY(attn_ext, m) {
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias=None, *, str? activation=None, Tensor? residual=None, "
      "Tensor? multiply=None) -> Tensor");
  m.def("qkv_projection(Tensor x, Tensor weight, Tensor? bias=None, *, int n_heads, int n_kv_heads) -> Tensor");
  m.def(
      "qkv_projection_to_cache(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, *, int n_heads, int n_kv_heads, Tensor? rope_cos=None, Tensor? rope_sin=None, "
      "Tensor? positions=None) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps=1e-5) -> Tensor");
  m.def("layer_norm(Tensor x, Tensor weight, Tensor? bias=None, float eps=1e-5) -> Tensor");
  m.def("masked_softmax(Tensor scores, Tensor? mask=None, *, bool causal=False, float scale=1.0) -> Tensor");
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, *, bool causal=False, float? scale=None, int window_left=-1, "
      "int window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? mask=None, "
      "Tensor? bias=None) -> (Tensor out, Tensor lse)");
  m.def(
      "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, *, "
      "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, bool causal=False, float? scale=None, int window_left=-1, "
      "int window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? mask=None, "
      "Tensor? bias=None) -> (Tensor out, Tensor lse)");
  m.def(
      "paged_attention(Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, *, "
      "Tensor? cu_seqlens_q=None, SymInt? max_seqlen_q=None, bool causal=True, float? scale=None, int window_left=-1, "
      "int window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? mask=None, "
      "Tensor? bias=None) -> (Tensor out, Tensor lse)");
  m.def(
      "decoder_layer(Tensor x, Tensor norm_1, Tensor? norm_1_bias, Tensor qkv, Tensor? qkv_bias, Tensor out, "
      "Tensor? out_bias, Tensor norm_2, Tensor? norm_2_bias, Tensor? gate, Tensor? gate_bias, Tensor up, "
      "Tensor? up_bias, Tensor down, Tensor? down_bias, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, SymInt? max_seqlen_q, *, "
      "int n_heads, int n_kv_heads, str norm, float eps, str activation, int window_left=-1, "
      "Tensor? rope_cos=None, Tensor? rope_sin=None, Tensor? positions=None) -> Tensor");
  m.def(
      "decoder_layers(Tensor x, Tensor?[] weights, Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, "
      "Tensor slot_mapping, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, SymInt? max_seqlen_q, *, "
      "int n_heads, int n_kv_heads, str norm, float eps, str activation, int window_left=-1, "
      "Tensor? rope_cos=None, Tensor? rope_sin=None, Tensor? positions=None) -> Tensor");
  m.def("merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)");
  m.def("append_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping) -> ()");
  m.def("copy_blocks(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor block_pairs) -> ()");
}

// The same function for every device: what it runs is chosen by where its tensors are (launch.h).
template <class Library>
static void implement(Library& m) {
  using namespace attn_ext;
  m.impl("linear", TORCH_BOX(&ops::linear));
  m.impl("qkv_projection", TORCH_BOX(&ops::qkv_projection));
  m.impl("qkv_projection_to_cache", TORCH_BOX(&ops::qkv_projection_to_cache));
  m.impl("rms_norm", TORCH_BOX(&ops::rms_norm));
  m.impl("layer_norm", TORCH_BOX(&ops::layer_norm));
  m.impl("masked_softmax", TORCH_BOX(&ops::masked_softmax));
  m.impl("attention", TORCH_BOX(&ops::attention));
  m.impl("attention_varlen", TORCH_BOX(&ops::attention_varlen));
  m.impl("paged_attention", TORCH_BOX(&ops::paged_attention));
  m.impl("decoder_layer", TORCH_BOX(&ops::decoder_layer));
  m.impl("decoder_layers", TORCH_BOX(&ops::decoder_layers));
  m.impl("merge_attention", TORCH_BOX(&ops::merge_attention));
  m.impl("append_kv", TORCH_BOX(&ops::append_kv));
  m.impl("copy_blocks", TORCH_BOX(&ops::copy_blocks));
}

STABLE_TORCH_LIBRARY_IMPL(attn_ext, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(attn_ext, CUDA, m) { implement(m); }
