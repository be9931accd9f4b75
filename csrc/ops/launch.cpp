#include "ops/launch.h"

#include <pthread.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu/backend.h"
#include "ops/launch_cuda.h"
#include "ops/probe.h"

namespace attn_ext::ops {
namespace {

// OpenMP's threads do not survive a fork, and a parallel region in the child would wait for them for ever.
bool forked_child = false;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked_child = true; });

// Launch::parallel on torch's pool; in a forked child, where that pool's threads do not exist, on plain threads.
void run_workers(int workers, void (*body)(void*, int), void* context) {
  if (!forked_child) {
    torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
      for (int64_t w = begin; w < end; ++w) body(context, static_cast<int>(w));
    });
    return;
  }
  std::vector<std::thread> threads;
  for (int w = 1; w < workers; ++w) threads.emplace_back(body, context, w);
  body(context, 0);
  for (std::thread& thread : threads) thread.join();
}

// kernel(params, launch) on as many threads as torch uses, with `bytes(params, workers)` of workspace.
template <class Params, class Bytes, class Kernel>
void on_cpu(const char* op, const Params& params, const Bytes& bytes, const Kernel& kernel) {
  const int workers = std::max(1, static_cast<int>(torch::stable::get_num_threads()));
  const int64_t size = bytes(params, workers);
  std::unique_ptr<char, decltype(&std::free)> memory(nullptr, &std::free);
  if (size > 0) {
    memory.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>((size + 63) / 64 * 64))));
    if (!memory)
      throw std::runtime_error(std::string(op) + ": no memory for " + std::to_string(size) + " bytes of scratch");
  }
  kernel(params, Launch{workers, memory.get(), run_workers});
}

constexpr auto no_workspace = [](const auto&, auto...) { return int64_t(0); };

}  // namespace

void read_probe(const std::string& backend, uint64_t address, int64_t bytes) {
  struct Work {
    void (*read)(const char*, int64_t);
    const char* data;
    int64_t share;
  };
  const int workers = std::max(1, static_cast<int>(torch::stable::get_num_threads()));
  Work work{kernels_of(backend).read, reinterpret_cast<const char*>(address), bytes / workers / 4096 * 4096};
  const auto body = [](void* context, int worker) {
    const Work& w = *static_cast<const Work*>(context);
    w.read(w.data + worker * w.share, w.share);
  };
  run_workers(workers, body, &work);
}

int64_t peak_probe(const std::string& backend, bool bf16, int64_t iterations) {
  struct Work {
    int64_t (*peak)(int64_t);
    int64_t iterations;
    std::atomic<int64_t> operations;
  };
  const Kernels& kernels = kernels_of(backend);
  Work work{bf16 ? kernels.peak_bf16 : kernels.peak_f32, iterations, 0};
  const auto body = [](void* context, int) {
    Work& w = *static_cast<Work*>(context);
    w.operations += w.peak(w.iterations);
  };
  run_workers(std::max(1, static_cast<int>(torch::stable::get_num_threads())), body, &work);
  return work.operations;
}

void run(const char* op, const Tensor& on, const LinearParams& p) {
  if (on.is_cuda()) return on_cuda(op, on, p, no_workspace, ATTN_EXT_CUDA_KERNEL(linear));
  const Kernels& kernels = kernels_for(p.dtype);
  on_cpu(op, p, kernels.linear_workspace, kernels.linear);
}

void run(const char* op, const Tensor& on, const QkvToCacheParams& p) {
  if (on.is_cuda()) return on_cuda(op, on, p, no_workspace, ATTN_EXT_CUDA_KERNEL(qkv_to_cache));
  const Kernels& kernels = kernels_for(p.gemm.dtype);
  on_cpu(op, p, kernels.qkv_to_cache_workspace, kernels.qkv_to_cache);
}

void run(const char* op, const Tensor& on, const NormParams& p) {
  if (on.is_cuda()) return on_cuda(op, on, p, no_workspace, ATTN_EXT_CUDA_KERNEL(norm));
  on_cpu(op, p, no_workspace, kernels_for(p.dtype).norm);
}

void run(const char* op, const Tensor& on, const MaskedSoftmaxParams& p) {
  if (on.is_cuda()) return on_cuda(op, on, p, no_workspace, ATTN_EXT_CUDA_KERNEL(masked_softmax));
  const Kernels& kernels = kernels_for(p.dtype);
  on_cpu(op, p, kernels.masked_softmax_workspace, kernels.masked_softmax);
}

void run(const char* op, const Tensor& on, const AttentionParams& p) {
  if (on.is_cuda())
    return on_cuda(op, on, p, ATTN_EXT_CUDA_KERNEL(attention_workspace), ATTN_EXT_CUDA_KERNEL(attention));
  const Kernels& kernels = kernels_for(p.dtype);
  on_cpu(op, p, kernels.attention_workspace, kernels.attention);
}

void run(const char* op, const Tensor& on, const MergeAttentionParams& p) {
  if (on.is_cuda()) return on_cuda(op, on, p, no_workspace, ATTN_EXT_CUDA_KERNEL(merge_attention));
  on_cpu(op, p, no_workspace, kernels_for(p.dtype).merge_attention);
}

void run(const char* op, const Tensor& on, const AppendKvParams& p) {
  if (on.is_cuda()) return on_cuda(op, on, p, no_workspace, ATTN_EXT_CUDA_KERNEL(append_kv));
  on_cpu(op, p, no_workspace, append_kv);
}

void run(const char* op, const Tensor& on, const CopyBlocksParams& p) {
  if (on.is_cuda())
    return on_cuda(op, on, p, ATTN_EXT_CUDA_KERNEL(copy_blocks_workspace), ATTN_EXT_CUDA_KERNEL(copy_blocks));
  on_cpu(op, p, [](const CopyBlocksParams& q, int) { return copy_blocks_workspace(q); }, copy_blocks);
}

}  // namespace attn_ext::ops
