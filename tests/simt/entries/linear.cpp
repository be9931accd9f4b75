// linear and qkv_projection_to_cache for the tests.
#include "cuda/kernels.h"
#include "cuda/simt.cuh"

#define ENTRY extern "C" __attribute__((visibility("default"))) const char*

using namespace attn_ext;

ENTRY linear(const LinearParams* p) {
  return simt::guarded([&] { cuda::linear(*p, {}); });
}

ENTRY qkv_to_cache(const QkvToCacheParams* p) {
  return simt::guarded([&] { cuda::qkv_to_cache(*p, {}); });
}
