// Memory in pages of 2 MB. No torch in this header: the Python module includes it.
#pragma once

#include <stdint.h>

namespace attn_ext::ops {

constexpr int64_t kHugePage = int64_t(2) << 20;  // bytes

// Asks the system for huge pages for what of `bytes` bytes at `address` fills whole ones and is not yet written. It is
// advice: where it is refused, nothing changes.
void advise_huge_pages(uint64_t address, int64_t bytes);

}  // namespace attn_ext::ops
