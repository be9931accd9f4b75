// Compares each device body of simt.cuh with its host body on random operands. On a GPU machine, from the root:
//   python tests/simt/build.py conformance tests/simt/conformance.cpp      prints the host library's path
//   nvcc -std=c++17 -arch=native -Icsrc -Icsrc/cuda tests/simt/conformance.cu -o build/conformance -ldl
//   build/conformance LIBRARY
// Ends with status 0 when all cases agree.
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <random>
#include <vector>

#include "conformance.cuh"
#include "simt/warp_ops.h"

using namespace conformance;

namespace {

std::mt19937 generator(1);

// Mostly moderate values, some of every bit pattern.
u32 operand(Operands kind, int word) {
  u32 bits = generator();
  std::normal_distribution<float> normal;
  auto number = [&] { return normal(generator); };
  switch (kind) {
    case Operands::words: return bits;
    case Operands::floats: return bits % 4 == 0 ? u32(generator()) : simt::warp_ops::bits_of(4 * number());
    case Operands::bfloats:
      if (word >= 6) return simt::warp_ops::bits_of(number());
      return simt::warp_ops::bf16_of_float(number()) | u32(simt::warp_ops::bf16_of_float(number())) << 16;
    case Operands::halves:
      if (word >= 6) return simt::warp_ops::bits_of(number());
      return simt::warp_ops::f16_of_float(number()) | u32(simt::warp_ops::f16_of_float(number())) << 16;
  }
  return 0;
}

bool agree(u32 a, u32 b, float tolerance) {
  if (a == b) return true;
  if (tolerance == 0) return false;
  float x = simt::warp_ops::float_of_bits(a), y = simt::warp_ops::float_of_bits(b);
  if (isnan(x) || isnan(y)) return isnan(x) && isnan(y);
  if (fabsf(x) < 0x1p-120f && fabsf(y) < 0x1p-120f) return true;  // subnormals are flushed on the device
  if (isinf(x) || isinf(y)) {                                     // a reciprocal of a subnormal
    return isinf(x) && isinf(y) && (x > 0) == (y > 0);
  }
  return fabsf(x - y) <= tolerance * (1 + fmaxf(fabsf(x), fabsf(y)));
}

}  // namespace

int main(int argc, char** argv) {
  void* library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (!library) return fprintf(stderr, "usage: conformance LIBRARY (%s)\n", argc == 2 ? dlerror() : ""), 2;
  auto host_run = reinterpret_cast<const char* (*)(int, const u32*, u32*, int)>(dlsym(library, "conformance_run"));
  if (!host_run) return fprintf(stderr, "conformance: not a conformance library\n"), 2;
  const int warps = 64;
  int count, failures = 0;
  const Case* all = cases(count);
  for (int i = 0; i < count; ++i) {
    const Case& c = all[i];
    size_t lanes = size_t(warps) * 32;
    std::vector<u32> in(lanes * c.in), host(lanes * c.out), device(lanes * c.out);
    for (size_t k = 0; k < in.size(); ++k) in[k] = operand(c.operands, int(k % c.in));
    if (const char* message = host_run(i, in.data(), host.data(), warps)) {
      return fprintf(stderr, "%s: %s\n", c.name, message), 1;
    }
    u32 *in_device, *out_device;
    simt::check(cudaMalloc(&in_device, in.size() * 4), "cudaMalloc");
    simt::check(cudaMalloc(&out_device, device.size() * 4), "cudaMalloc");
    simt::check(cudaMemcpy(in_device, in.data(), in.size() * 4, cudaMemcpyHostToDevice), "copy");
    run(c, in_device, out_device, warps);
    simt::check(cudaMemcpy(device.data(), out_device, device.size() * 4, cudaMemcpyDeviceToHost), c.name);
    cudaFree(in_device);
    cudaFree(out_device);
    size_t different = 0, bits = 0;
    for (size_t k = 0; k < host.size(); ++k) {
      bits += host[k] != device[k];
      if (agree(host[k], device[k], c.tolerance)) continue;
      if (different++ == 0) {
        printf("%s: lane %zu, result %zu: host %08x, device %08x\n", c.name, k / c.out % 32, k % c.out, host[k],
               device[k]);
      }
    }
    printf("%-12s %s, %zu of %zu words differ in bits\n", c.name, different ? "FAILED" : "agrees", bits, host.size());
    failures += different != 0;
  }
  return failures != 0;
}
