// What this instruction set can do at most, which is what a kernel's time is judged by: multiply-adds in registers
// (also a fixed piece of work whose time shows whether the machine is disturbed), and reading memory.
//
// The multiply-adds are chains, as many as hide the latency of one (4 cycles, up to 2 started in each).
#include "cpu/kernels.h"
#include "cpu/vec.h"

namespace attn_ext::ATTN_EXT_ISA {
namespace {

constexpr int kChains = 12;

// A constraint of inline assembly: a vector register.
#if defined(__x86_64__)
#define ATTN_EXT_IN_REGISTER "+x"
#elif defined(__aarch64__)
#define ATTN_EXT_IN_REGISTER "+w"
#else
#define ATTN_EXT_IN_REGISTER "+m"
#endif

// `step(sum)` `iterations` times on each chain; the compiler must neither merge chains nor drop them.
template <class V, class Step>
ATTN_INLINE void run_chains(int64_t iterations, const Step& step) {
  V sums[kChains] = {};
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sums[c] = step(sums[c]);
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) asm volatile("" : ATTN_EXT_IN_REGISTER(sums[c]));
  }
}

}  // namespace

int64_t peak_f32(int64_t iterations) {
  const Vec<float> a = splat(0.5f), b = splat(0.25f);
  run_chains<Vec<float>>(iterations, [&](Vec<float> sum) { return fma(a, b, sum); });
  return iterations * kChains * W<float> * 2;
}

int64_t peak_bf16([[maybe_unused]] int64_t iterations) {
#if defined(__AVX512BF16__)
  const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
  run_chains<__m512>(iterations, [&](__m512 sum) { return _mm512_dpbf16_ps(sum, ones, ones); });
  return iterations * kChains * W<float> * 4;
#else
  return 0;
#endif
}

void read(const char* data, int64_t bytes) {
  constexpr int64_t kStep = 8 * kVectorBytes;
  typedef long long V __attribute__((vector_size(kVectorBytes)));
  V all[8] = {};
  for (int64_t i = 0; i + kStep <= bytes; i += kStep) {
#pragma GCC unroll 8
    for (int c = 0; c < 8; ++c) {
      V loaded;
      memcpy(&loaded, data + i + c * kVectorBytes, sizeof(V));
      all[c] |= loaded;
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < 8; ++c) asm volatile("" : ATTN_EXT_IN_REGISTER(all[c]));
}

}  // namespace attn_ext::ATTN_EXT_ISA
