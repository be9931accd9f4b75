// Switching between stacks: by hand on x86-64 (about 20 ns), by ucontext elsewhere.
#pragma once

#include <sys/mman.h>

#include <new>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace simt {
namespace fiber {

#ifdef __x86_64__
// Saves the callee-saved registers on this stack and its pointer in *save, then continues on the stack `load`.
extern "C" void simt_switch(void** save, void* load);
#endif

// Stacks with a guard page below each.
class Stacks {
 public:
  static constexpr size_t size = 192 * 1024, page = 4096;
  explicit Stacks(int n) : n_(n) {
    void* p = mmap(nullptr, n * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<char*>(p);
    for (int i = 0; i < n; ++i) mprotect(base_ + i * size, page, PROT_NONE);
  }
  ~Stacks() { munmap(base_, n_ * size); }
  Stacks(const Stacks&) = delete;

  int count() const { return n_; }

  // Tops differ modulo the cache's set stride, or all frames would share a few sets.
  char* top(int i) const { return base_ + (i + 1) * size - i % 32 * 2112; }
  char* bottom(int i) const { return base_ + i * size + page; }

 private:
  char* base_;
  int n_;
};

#ifdef __x86_64__
using Context = void*;

inline void start(Context& context, const Stacks& stacks, int i, void (*entry)()) {
  auto* top = reinterpret_cast<void**>(reinterpret_cast<size_t>(stacks.top(i)) & ~size_t(15));
  *--top = nullptr;  // no return address: entry never returns
  *--top = reinterpret_cast<void*>(entry);
  for (int r = 0; r < 6; ++r) *--top = nullptr;
  context = top;
}

inline void swap(Context& from, Context& to) { simt_switch(&from, to); }
#else
using Context = ucontext_t;

inline void start(Context& context, const Stacks& stacks, int i, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stacks.bottom(i);
  context.uc_stack.ss_size = stacks.top(i) - stacks.bottom(i);
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

inline void swap(Context& from, Context& to) { swapcontext(&from, &to); }
#endif

}  // namespace fiber
}  // namespace simt
