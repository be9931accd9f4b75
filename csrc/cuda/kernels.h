// What csrc/ops calls to run on a GPU: one launcher per op, the same names and params as the CPU kernels.
//
// Launchers enqueue on the given stream of the current device, never wait for it, and throw std::runtime_error if that
// fails. What index tensors hold (slots, tables, lengths) is on the device: kernels guard what they read from it, they
// cannot report it.
#pragma once

#include "params.h"

namespace attn_ext::cuda {

// Where a kernel runs, and its scratch memory.
struct Launch {
  void* stream;     // cudaStream_t
  char* workspace;  // 256-byte aligned, as many bytes as the kernel's *_workspace function asked for
};

// Dtypes: float32, bfloat16 and float16 everywhere; append_kv and copy_blocks move elements of any size.
void linear(const LinearParams&, const Launch&);
void qkv_to_cache(const QkvToCacheParams&, const Launch&);
void norm(const NormParams&, const Launch&);
void masked_softmax(const MaskedSoftmaxParams&, const Launch&);
int64_t attention_workspace(const AttentionParams&);
void attention(const AttentionParams&, const Launch&);
void merge_attention(const MergeAttentionParams&, const Launch&);
void append_kv(const AppendKvParams&, const Launch&);
int64_t copy_blocks_workspace(const CopyBlocksParams&);
void copy_blocks(const CopyBlocksParams&, const Launch&);

// Makes a device current for this thread while it lives (runtime.cu).
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;

 private:
  void* before_;  // context of the driver
};

}  // namespace attn_ext::cuda
