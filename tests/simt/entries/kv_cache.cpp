// append_kv and copy_blocks for the tests.
#include "cuda/kernels.h"
#include "cuda/simt.cuh"

#define ENTRY extern "C" __attribute__((visibility("default"))) const char*

using namespace attn_ext;

ENTRY append_kv(const AppendKvParams* p) {
  return simt::guarded([&] { cuda::append_kv(*p, {}); });
}

ENTRY copy_blocks(const CopyBlocksParams* p, char* workspace) {
  return simt::guarded([&] { cuda::copy_blocks(*p, {nullptr, workspace}); });
}
