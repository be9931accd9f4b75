#include "cuda/attention.cuh"

namespace attn_ext::cuda {

template int64_t attention_workspace_of<simt::bf16>(const AttentionParams&);
template void launch_attention<simt::bf16>(const AttentionParams&, const Launch&);

}  // namespace attn_ext::cuda
