// The host half of the conformance test.
#include "conformance.cuh"

extern "C" void simt_register(void*, size_t, int, const char*, int);
extern "C" void simt_reset();
extern "C" const char* simt_check_outputs();

extern "C" int conformance_cases() {
  int n;
  conformance::cases(n);
  return n;
}

extern "C" const char* conformance_name(int i) {
  int n;
  return conformance::cases(n)[i].name;
}

// in and out hold warps * 32 lanes' words. Null, or a message.
extern "C" const char* conformance_run(int i, const uint32_t* in, uint32_t* out, int warps) {
  const char* message = simt::guarded([&] {
    int n;
    const conformance::Case& c = conformance::cases(n)[i];
    simt_reset();
    simt_register(const_cast<uint32_t*>(in), size_t(warps) * 32 * c.in * 4, 2, "in", 0);
    simt_register(out, size_t(warps) * 32 * c.out * 4, 2, "out", 1);
    conformance::run(c, in, out, warps);
  });
  return message ? message : simt_check_outputs();
}
