#include "ops/huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace attn_ext::ops {

void advise_huge_pages([[maybe_unused]] uint64_t address, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr uint64_t page = kHugePage;
  const uint64_t begin = (address + page - 1) / page * page, end = (address + uint64_t(bytes)) / page * page;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace attn_ext::ops
