#include "ops/launch.h"

#include <pthread.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <thread>
#include <vector>

namespace attn_ext::ops {
namespace {

// OpenMP's threads do not survive a fork, and a parallel region in the child would wait for them for ever.
bool forked_child = false;
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked_child = true; });

}  // namespace

int worker_count() { return std::max(1, static_cast<int>(torch::stable::get_num_threads())); }

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

}  // namespace attn_ext::ops
