// One small kernel per wrapper of simt.cuh: every lane reads its operands as words and writes its results as words.
// Built for the host they show what the executor computes, built by nvcc what the hardware does.
#pragma once

#include "simt.cuh"

namespace conformance {

using simt::bf16;
using simt::f16;
using simt::u32;
using simt::u64;

struct Words {
  const u32* in;
  u32* out;
};

// A lane's operands and results; warp b of a launch is block b.
template <int In, int Out>
struct Lane {
  u32 in[In], out[Out];
  u32* to;
  ATTN_DEVICE explicit Lane(const Words& p) {
    u64 i = u64(simt::block_idx().x) * 32 + simt::lane();
    for (int k = 0; k < In; ++k) in[k] = simt::ldg(p.in + i * In + k);
    to = p.out + i * Out;
  }
  ATTN_DEVICE float f(int k) const { return simt::float_from_bits(in[k]); }
  ATTN_DEVICE void set(int k, float x) { out[k] = simt::float_bits(x); }
  ATTN_DEVICE void store() {
    for (int k = 0; k < Out; ++k) simt::st(to + k, out[k]);
  }
};

template <class T>
ATTN_KERNEL(32, 1)
mma(ATTN_CONSTANT_PARAM Words p) {  // in: a, b, c
  Lane<10, 4> l(p);
  u32 a[4] = {l.in[0], l.in[1], l.in[2], l.in[3]}, b[2] = {l.in[4], l.in[5]};
  float c[4] = {l.f(6), l.f(7), l.f(8), l.f(9)};
  simt::mma_m16n8k16<T>(c, a, b);
  for (int k = 0; k < 4; ++k) l.set(k, c[k]);
  l.store();
}

template <int Dummy>
ATTN_KERNEL(32, 1)
ldmatrix(ATTN_CONSTANT_PARAM Words p) {  // in: 16 bytes of row `lane`; rows are given in reverse
  Lane<4, 12> l(p);
  auto* rows = reinterpret_cast<simt::U32x4*>(simt::shared());
  simt::sts128(rows + simt::lane(), simt::U32x4{l.in[0], l.in[1], l.in[2], l.in[3]});
  simt::sync_warp();
  const void* row = rows + (31 - simt::lane());
  u32 x4[4], x2[2];
  simt::ldmatrix_x4(x4, row);
  for (int k = 0; k < 4; ++k) l.out[k] = x4[k];
  simt::ldmatrix_x4_trans(x4, row);
  for (int k = 0; k < 4; ++k) l.out[4 + k] = x4[k];
  simt::ldmatrix_x2(x2, row);
  l.out[8] = x2[0];
  l.out[9] = x2[1];
  simt::ldmatrix_x2_trans(x2, row);
  l.out[10] = x2[0];
  l.out[11] = x2[1];
  l.store();
}

template <int Dummy>
ATTN_KERNEL(32, 1)
shuffle(ATTN_CONSTANT_PARAM Words p) {  // in: value, value, lane; xor 5, up 3, down 3
  Lane<3, 7> l(p);
  int source = int(l.in[2] % 32);
  l.out[0] = simt::shfl(l.in[0], source);
  l.out[1] = simt::shfl_xor(l.in[0], 5);
  l.out[2] = simt::shfl_down(l.in[0], 3);
  l.out[3] = simt::shfl_up(l.in[0], 3);
  l.set(4, simt::shfl(l.f(0), source));
  auto wide = simt::shfl_xor((unsigned long long)(l.in[0]) | (unsigned long long)(l.in[1]) << 32, 9);
  l.out[5] = u32(wide);
  l.out[6] = u32(wide >> 32);
  l.store();
}

template <int Dummy>
ATTN_KERNEL(32, 1)
vote(ATTN_CONSTANT_PARAM Words p) {
  Lane<1, 4> l(p);
  bool odd = l.in[0] & 1;
  l.out[0] = simt::ballot(odd);
  l.out[1] = simt::any(odd);
  l.out[2] = simt::all(odd);
  l.out[3] = simt::sync_threads_or(odd);
  l.store();
}

template <int Dummy>
ATTN_KERNEL(32, 1)
convert(ATTN_CONSTANT_PARAM Words p) {  // in: float, float, 16-bit pair
  Lane<3, 8> l(p);
  l.out[0] = simt::from_float<bf16>(l.f(0)).bits;
  l.out[1] = simt::from_float<f16>(l.f(0)).bits;
  l.out[2] = simt::pack2<bf16>(l.f(0), l.f(1));
  l.out[3] = simt::pack2<f16>(l.f(0), l.f(1));
  simt::Float2 b = simt::unpack2<bf16>(l.in[2]), h = simt::unpack2<f16>(l.in[2]);
  l.set(4, b.x);
  l.set(5, b.y);
  l.set(6, h.x == h.x ? h.x : 0.0f);  // the payload of a NaN is not specified
  l.set(7, h.y == h.y ? h.y : 0.0f);
  l.store();
}

template <int Dummy>
ATTN_KERNEL(32, 1)
arithmetic(ATTN_CONSTANT_PARAM Words p) {
  Lane<3, 4> l(p);
  l.set(0, simt::ex2(l.f(0)));
  l.set(1, simt::lg2(fabsf(l.f(0))));
  l.set(2, simt::rcp(l.f(0)));
  l.set(3, simt::fma(l.f(0), l.f(1), l.f(2)));
  l.store();
}

template <int Dummy>
ATTN_KERNEL(32, 1)
copy(ATTN_CONSTANT_PARAM Words p) {  // in: 4 words; copies of 16, 8, 4 bytes, cut to 7 and to 0
  Lane<4, 16> l(p);
  const u32* from = p.in + (u64(simt::block_idx().x) * 32 + simt::lane()) * 4;
  auto* to = reinterpret_cast<u32*>(simt::shared()) + 16 * simt::lane();
  simt::cp_async16(to, from);
  simt::cp_async16(to + 4, from, 7);
  simt::cp_async_commit();
  simt::cp_async<8>(to + 8, from + 2);
  simt::cp_async<4>(to + 10, from + 1);
  simt::cp_async<4>(to + 11, from + 1, 0);
  simt::cp_async16(to + 12, from, 0);
  simt::cp_async_commit();
  simt::cp_async_wait<1>();
  simt::U32x4 v = simt::lds128(to);
  l.out[0] = v.x;
  l.out[1] = v.y;
  l.out[2] = v.z;
  l.out[3] = v.w;
  simt::cp_async_wait<0>();
  for (int k = 4; k < 16; ++k) l.out[k] = simt::lds(to + k);
  l.store();
}

// Loads and stores of every width; the result is the operands again, twice.
template <int Dummy>
ATTN_KERNEL(32, 1)
memory(ATTN_CONSTANT_PARAM Words p) {
  u64 i = u64(simt::block_idx().x) * 32 + simt::lane();
  const u32* from = p.in + 4 * i;
  u32* to = p.out + 8 * i;
  simt::st128(to, simt::ldg128(from));
  simt::U32x4 v = simt::ld128(from);
  simt::st(to + 4, v.x);
  simt::st(reinterpret_cast<simt::u16*>(to + 5), simt::ldg(reinterpret_cast<const simt::u16*>(from + 1)));
  simt::st(reinterpret_cast<simt::u16*>(to + 5) + 1, simt::ld(reinterpret_cast<const simt::u16*>(from + 1) + 1));
  simt::st(reinterpret_cast<simt::U32x2*>(to + 6), simt::ldg(reinterpret_cast<const simt::U32x2*>(from + 2)));
}

enum class Operands : int { words, floats, halves, bfloats };  // what random inputs look like

struct Case {
  const char* name;
  void (*kernel)(const Words);
  int in, out;  // words per lane
  Operands operands;
  float tolerance;  // relative, of float results; 0: all bits
};

inline const Case* cases(int& count) {
  static const Case all[] = {
      {"mma_bf16", mma<bf16>, 10, 4, Operands::bfloats, 1e-5f},
      {"mma_f16", mma<f16>, 10, 4, Operands::halves, 1e-5f},
      {"ldmatrix", ldmatrix<0>, 4, 12, Operands::words, 0},
      {"shuffle", shuffle<0>, 3, 7, Operands::words, 0},
      {"vote", vote<0>, 1, 4, Operands::words, 0},
      {"convert", convert<0>, 3, 8, Operands::floats, 0},
      {"arithmetic", arithmetic<0>, 3, 4, Operands::floats, 4e-7f},
      {"copy", copy<0>, 4, 16, Operands::words, 0},
      {"memory", memory<0>, 4, 8, Operands::words, 0},
  };
  count = int(sizeof all / sizeof all[0]);
  return all;
}

inline void run(const Case& c, const u32* in, u32* out, int warps) {
  simt::launch(c.kernel, simt::Dim{u32(warps)}, simt::Dim{32}, 2048, nullptr, Words{in, out});
}

}  // namespace conformance
