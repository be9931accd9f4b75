#include "cuda/merge_attention.cuh"

namespace attn_ext::cuda {

void merge_attention(const MergeAttentionParams& p, const Launch& launch) {
  dispatch(p.dtype, [&](auto t) { launch_merge_attention<decltype(t)>(p, launch); });
}

}  // namespace attn_ext::cuda
