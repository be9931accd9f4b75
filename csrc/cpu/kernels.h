// The kernels every CPU backend has: one set of functions per instruction set, same names, same meaning.
#pragma once

#include "params.h"

namespace attn_ext {

// *_workspace: bytes of scratch memory the kernel needs in Launch::workspace when run by that many workers.
struct Kernels {
  int64_t (*linear_workspace)(const LinearParams&, int workers);
  void (*linear)(const LinearParams&, const Launch&);
  int64_t (*qkv_to_cache_workspace)(const QkvToCacheParams&, int workers);
  void (*qkv_to_cache)(const QkvToCacheParams&, const Launch&);
  void (*norm)(const NormParams&, const Launch&);
  int64_t (*masked_softmax_workspace)(const MaskedSoftmaxParams&, int workers);
  void (*masked_softmax)(const MaskedSoftmaxParams&, const Launch&);
  int64_t (*attention_workspace)(const AttentionParams&, int workers);
  void (*attention)(const AttentionParams&, const Launch&);
  void (*merge_attention)(const MergeAttentionParams&, const Launch&);
};

#define ATTN_EXT_DECLARE_KERNELS(isa)                                \
  namespace isa {                                                    \
  int64_t linear_workspace(const LinearParams&, int);                \
  void linear(const LinearParams&, const Launch&);                   \
  int64_t qkv_to_cache_workspace(const QkvToCacheParams&, int);      \
  void qkv_to_cache(const QkvToCacheParams&, const Launch&);         \
  void norm(const NormParams&, const Launch&);                       \
  int64_t masked_softmax_workspace(const MaskedSoftmaxParams&, int); \
  void masked_softmax(const MaskedSoftmaxParams&, const Launch&);    \
  int64_t attention_workspace(const AttentionParams&, int);          \
  void attention(const AttentionParams&, const Launch&);             \
  void merge_attention(const MergeAttentionParams&, const Launch&);  \
  }

ATTN_EXT_DECLARE_KERNELS(scalar)
ATTN_EXT_DECLARE_KERNELS(avx2)
ATTN_EXT_DECLARE_KERNELS(avx512)
ATTN_EXT_DECLARE_KERNELS(avx512_bf16)

// Products and attention of bfloat16 on AMX tiles; other types are passed on to avx512.
namespace amx {
int64_t linear_workspace(const LinearParams&, int);
void linear(const LinearParams&, const Launch&);
int64_t qkv_to_cache_workspace(const QkvToCacheParams&, int);
void qkv_to_cache(const QkvToCacheParams&, const Launch&);
int64_t attention_workspace(const AttentionParams&, int);
void attention(const AttentionParams&, const Launch&);
int64_t peak_bf16(int64_t iterations);  // probe.cpp
}  // namespace amx

// Moving cache rows is copying bytes: the same on every CPU (kv_cache.cpp).
void append_kv(const AppendKvParams&, const Launch&);
int64_t copy_blocks_workspace(const CopyBlocksParams&);
void copy_blocks(const CopyBlocksParams&, const Launch&);

}  // namespace attn_ext
