// Runs a CPU kernel on torch's threads with scratch memory.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#include "params.h"

namespace attn_ext::ops {

// Threads a kernel may use: torch.get_num_threads().
int worker_count();

// Launch::parallel on torch's pool; in a forked child, where that pool's threads do not exist, on plain threads.
void run_workers(int workers, void (*body)(void*, int), void* context);

// kernel(params, launch) with `bytes(params, workers)` of workspace.
template <class Params, class Bytes, class Kernel>
void launch(const char* op, const Params& params, const Bytes& bytes, const Kernel& kernel) {
  const int workers = worker_count();
  const int64_t size = bytes(params, workers);
  std::unique_ptr<char, decltype(&std::free)> memory(nullptr, &std::free);
  if (size > 0) {
    memory.reset(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>((size + 63) / 64 * 64))));
    if (!memory)
      throw std::runtime_error(std::string(op) + ": no memory for " + std::to_string(size) + " bytes of scratch");
  }
  kernel(params, Launch{workers, memory.get(), run_workers});
}

}  // namespace attn_ext::ops
