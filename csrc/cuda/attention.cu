// Attention, instantiated per dtype in attention_<dtype>.cu, which compile at the same time.
#include "cuda/attention.cuh"

namespace attn_ext::cuda {

extern template int64_t attention_workspace_of<float>(const AttentionParams&);
extern template int64_t attention_workspace_of<simt::bf16>(const AttentionParams&);
extern template int64_t attention_workspace_of<simt::f16>(const AttentionParams&);
extern template void launch_attention<float>(const AttentionParams&, const Launch&);
extern template void launch_attention<simt::bf16>(const AttentionParams&, const Launch&);
extern template void launch_attention<simt::f16>(const AttentionParams&, const Launch&);

int64_t attention_workspace(const AttentionParams& p) {
  int64_t bytes = 0;
  dispatch(p.dtype, [&](auto t) { bytes = attention_workspace_of<decltype(t)>(p); });
  return bytes;
}

void attention(const AttentionParams& p, const Launch& launch) {
  dispatch(p.dtype, [&](auto t) { launch_attention<decltype(t)>(p, launch); });
}

}  // namespace attn_ext::cuda
