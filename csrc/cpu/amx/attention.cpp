#include "cpu/kernels.h"
namespace attn_ext::amx {
int64_t attention_workspace(const AttentionParams& p, int w) { return avx512::attention_workspace(p, w); }
void attention(const AttentionParams& p, const Launch& l) { avx512::attention(p, l); }
}
