// Runs a CUDA kernel on the current stream of a tensor's device. One library serves torch with and without CUDA: what
// is needed of torch's CUDA part is looked up in the running process.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "cuda/kernels.h"
#include "ops/check.h"

// A CUDA launcher, or null in a build without CUDA kernels.
#if ATTN_EXT_CUDA_BUILT
#define ATTN_EXT_CUDA_KERNEL(name) cuda::name
#else
#define ATTN_EXT_CUDA_KERNEL(name) nullptr
#endif

namespace attn_ext::ops {

// The stream on which torch runs this thread's work on a device.
inline void* current_cuda_stream(const char* op, int32_t device) {
  // Python loads torch's libraries without making their symbols global, so they are asked for by library.
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function current_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  if (!current_stream || current_stream(device, &stream) != 0)
    throw std::runtime_error(std::string(op) + ": CUDA tensors need a torch that was built with CUDA");
  return stream;
}

inline DType kernel_dtype(const QkvToCacheParams& p) { return p.gemm.dtype; }
template <class Params>
DType kernel_dtype(const Params& p) {
  if constexpr (requires { p.dtype; })
    return p.dtype;
  else
    return DType::f32;  // moves elements of any type
}

// kernel(params, launch) with `bytes(params)` of workspace.
template <class Params, class Bytes, class Kernel>
void on_cuda(const char* op, const Tensor& on, const Params& params, const Bytes& bytes, const Kernel& kernel) {
  if constexpr (std::is_null_pointer_v<Kernel>) {
    throw std::runtime_error(std::string(op) +
                             ": this build of attn_ext has no CUDA kernels (nvcc was not found when it was built)");
  } else {
    if (kernel_dtype(params) == DType::f64)
      throw std::runtime_error(std::string(op) +
                               ": tensors must be float32, bfloat16 or float16 on a CUDA device, got float64");
    const int32_t device = on.get_device_index();
    void* stream = current_cuda_stream(op, device);
    try {
      const cuda::DeviceScope scope(device);
      const int64_t size = bytes(params);
      // Freed when this returns, for later work on the same stream.
      const Tensor workspace = torch::stable::new_empty(on, {size}, ScalarType::Byte);
      kernel(params, cuda::Launch{stream, static_cast<char*>(workspace.mutable_data_ptr())});
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(op) + ": CUDA: " + error.what());
    }
  }
}

}  // namespace attn_ext::ops
