// What the benchmark asks of the CPU itself. No torch in this header: the Python module includes it.
#pragma once

#include <stdint.h>

#include <string>

namespace attn_ext::ops {

// `iterations` rounds of multiply-adds in registers on every thread that torch uses, with the instructions of a backend
// that runs here: of float32, or of bfloat16 pairs -> operations done by all of them; 0 where it has no such
// instruction.
int64_t peak_probe(const std::string& backend, bool bf16, int64_t iterations);

// Every thread that torch uses reads its part of `bytes` bytes at `address`, whole pages of 4096.
void read_probe(const std::string& backend, uint64_t address, int64_t bytes);

}  // namespace attn_ext::ops
