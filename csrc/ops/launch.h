// Runs an op's kernel where its tensors are.
#pragma once

#include "ops/check.h"
#include "params.h"

namespace attn_ext::ops {

// On a CPU: on torch's threads, with scratch memory. On a GPU: on its current stream, with scratch memory of torch's
// allocator. `on` is a tensor of the op; an error names the op.
void run(const char* op, const Tensor& on, const LinearParams&);
void run(const char* op, const Tensor& on, const QkvToCacheParams&);
void run(const char* op, const Tensor& on, const NormParams&);
void run(const char* op, const Tensor& on, const MaskedSoftmaxParams&);
void run(const char* op, const Tensor& on, const AttentionParams&);
void run(const char* op, const Tensor& on, const MergeAttentionParams&);
void run(const char* op, const Tensor& on, const AppendKvParams&);
void run(const char* op, const Tensor& on, const CopyBlocksParams&);

}  // namespace attn_ext::ops
