// Attention and merge_attention for the tests.
#include "cuda/kernels.h"
#include "cuda/simt.cuh"

#define ENTRY extern "C" __attribute__((visibility("default")))

using namespace attn_ext;

ENTRY int64_t attention_workspace(const AttentionParams* p) { return cuda::attention_workspace(*p); }

ENTRY const char* attention(const AttentionParams* p, char* workspace) {
  return simt::guarded([&] { cuda::attention(*p, {nullptr, workspace}); });
}

ENTRY const char* merge_attention(const MergeAttentionParams* p) {
  return simt::guarded([&] { cuda::merge_attention(*p, {}); });
}
