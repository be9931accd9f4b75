#include "cpu/backend.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#include <dlfcn.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace attn_ext {
namespace {

#define ATTN_EXT_KERNELS(isa)                                                                         \
  Kernels {                                                                                           \
    isa::linear_workspace, isa::linear, isa::qkv_to_cache_workspace, isa::qkv_to_cache, isa::norm,    \
        isa::masked_softmax_workspace, isa::masked_softmax, isa::attention_workspace, isa::attention, \
        isa::merge_attention, isa::peak_f32, isa::peak_bf16, isa::read                                \
  }

#if defined(__x86_64__)
// __builtin_cpu_supports reads CPUID and, for AVX and AVX-512, asks XGETBV whether the system saves the registers.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_avx2();
}

// CPUID and XGETBV say whether CPU and system know tiles; then Linux must permit this process to use them, once, before
// any thread does: it grows the memory that the state of a thread needs.
bool has_amx() {
  static const bool permitted = [] {
    constexpr unsigned kOsxsave = 1u << 27, kTile = 1u << 24, kBf16 = 1u << 22, kTileState = 3u << 17;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kOsxsave)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kTile) || !(d & kBf16)) return false;
    unsigned low, high;
    asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & kTileState) == kTileState && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return permitted && has_avx512() && __builtin_cpu_supports("avx512bf16");
}

// On other CPUs the tests execute tile instructions by a handler of the signal that these raise (tests/amx/emulate.c).
// A thousand times slower, so never the best; asked each time because tests switch it on and off.
bool emulates_amx() {
  if (!has_avx512() || !__builtin_cpu_supports("avx512bf16")) return false;
  auto* emulator = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "attn_ext_amx_emulator"));
  return emulator && emulator();
}

// Products and attention; the other ops have nothing to gain from tiles.
Kernels amx_kernels() {
  Kernels kernels = ATTN_EXT_KERNELS(avx512);
  kernels.linear_workspace = amx::linear_workspace;
  kernels.linear = amx::linear;
  kernels.qkv_to_cache_workspace = amx::qkv_to_cache_workspace;
  kernels.qkv_to_cache = amx::qkv_to_cache;
  kernels.attention_workspace = amx::attention_workspace;
  kernels.attention = amx::attention;
  kernels.peak_bf16 = amx::peak_bf16;
  return kernels;
}
#endif

const Backend kBackends[] = {
#if defined(__x86_64__)
    {"amx", "AMX TILE and BF16, AVX-512 F, BW, VL, DQ, BF16, and a system that permits tiles",
     [] {
       if (has_amx()) return 50;
       return emulates_amx() ? 15 : 0;
     },
     amx_kernels()},
    // Zen multiplies pairs of bfloat16 at the rate of float32, Intel's cores at a quarter of it.
    {"avx512_bf16", "AVX-512 F, BW, VL, DQ, BF16",
     [] {
       if (!has_avx512() || !__builtin_cpu_supports("avx512bf16")) return 0;
       return __builtin_cpu_is("amd") ? 40 : 25;
     },
     ATTN_EXT_KERNELS(avx512_bf16)},
    {"avx512", "AVX-512 F, BW, VL, DQ", [] { return has_avx512() ? 30 : 0; }, ATTN_EXT_KERNELS(avx512)},
    {"avx2", "AVX2, FMA, F16C", [] { return has_avx2() ? 20 : 0; }, ATTN_EXT_KERNELS(avx2)},
#endif
    {"scalar", "any CPU", [] { return 10; }, ATTN_EXT_KERNELS(scalar)},
};

const Backend& scalar_backend() { return *(std::end(kBackends) - 1); }

// Those that run here, best first.
std::vector<const Backend*> supported() {
#if defined(__x86_64__)
  __builtin_cpu_init();  // may run before main
#endif
  std::vector<const Backend*> backends;
  for (const Backend& backend : kBackends)
    if (backend.rank() > 0) backends.push_back(&backend);
  std::stable_sort(backends.begin(), backends.end(), [](auto* a, auto* b) { return a->rank() > b->rank(); });
  return backends;
}

std::atomic<const Backend*> active{supported().front()};

void use(const std::string& name, const std::string& who) {
  std::string possible;
  for (const Backend* backend : supported()) {
    if (name == backend->name) {
      active = backend;
      return;
    }
    possible += (possible.empty() ? "" : ", ") + std::string(backend->name);
  }
  for (const Backend& backend : kBackends)
    if (name == backend.name)
      throw std::invalid_argument(who + " must be one of " + possible + " on this machine, got '" + name +
                                  "' which needs " + backend.needs);
  throw std::invalid_argument(who + " must be one of " + possible + " on this machine, got '" + name + "'");
}

}  // namespace

std::vector<std::string> supported_backends() {
  std::vector<std::string> names;
  for (const Backend* backend : supported()) names.push_back(backend->name);
  return names;
}

std::string active_backend() { return active.load()->name; }

void use_backend(const std::string& name) { use(name, "use_backend: name"); }

void use_backend_of_environment() {
  const char* name = std::getenv("ATTN_EXT_BACKEND");
  if (name && *name) use(name, "ATTN_EXT_BACKEND");
}

const Kernels& kernels_of(const std::string& name) {
  for (const Backend* backend : supported())
    if (name == backend->name) return backend->kernels;
  throw std::invalid_argument("no backend '" + name + "' on this machine");
}

const Kernels& kernels_for(DType dtype) {
  return dtype == DType::f64 ? scalar_backend().kernels : active.load()->kernels;
}

}  // namespace attn_ext
