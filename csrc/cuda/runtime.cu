// The device of this thread.
#include <stdexcept>

#include "cuda/kernels.h"
#include "cuda/simt.cuh"

namespace attn_ext::cuda {
namespace {

// The driver's functions, found through the runtime: the module must load where there is no driver.
template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  simt::check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("the driver has no ") + name);
  return reinterpret_cast<Function>(function);
}

}  // namespace

// torch has a CUDA runtime of its own. What both share is the driver's current context, so that is what is put back.
DeviceScope::DeviceScope(int device) : before_(nullptr) {
  static const auto get = driver_function<int (*)(void**)>("cuCtxGetCurrent");
  if (get(&before_) != 0) throw std::runtime_error("cuCtxGetCurrent failed");
  simt::check(cudaSetDevice(device), "cudaSetDevice");
}

DeviceScope::~DeviceScope() {
  static const auto set = driver_function<int (*)(void*)>("cuCtxSetCurrent");
  set(before_);
}

}  // namespace attn_ext::cuda
