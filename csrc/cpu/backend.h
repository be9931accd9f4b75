// The CPU backends: a table of named kernel sets in priority order, and which of them is in use.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace attn_ext {

struct Backend {
  const char* name;
  const char* needs;  // CPU features, for people
  int (*rank)();      // on this CPU and operating system: 0 = does not run, the highest is the best
  Kernels kernels;
};

// Names of the backends that run here, best first.
std::vector<std::string> supported_backends();

// Name of the backend in use.
std::string active_backend();

// Puts a backend in use for the whole process; throws std::invalid_argument that lists the possible names.
void use_backend(const std::string& name);

// Takes ATTN_EXT_BACKEND from the environment if it is set. Called once, when the module loads.
void use_backend_of_environment();

// Kernels of one that runs here; throws std::invalid_argument for another name.
const Kernels& kernels_of(const std::string& name);

// Kernels for tensors of this type: those of the backend in use, except float64, which only `scalar` computes.
const Kernels& kernels_for(DType dtype);

}  // namespace attn_ext
