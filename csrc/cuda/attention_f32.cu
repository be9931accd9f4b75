#include "cuda/attention.cuh"

namespace attn_ext::cuda {

template int64_t attention_workspace_of<float>(const AttentionParams&);
template void launch_attention<float>(const AttentionParams&, const Launch&);

}  // namespace attn_ext::cuda
