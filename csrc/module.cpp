// attn_ext._C: what is not a tensor op. Build facts, the backend table, the block allocator.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/backend.h"
#include "ops/huge_pages.h"
#include "ops/probe.h"

void bind_block_allocator(pybind11::module_& m);  // bind_block_allocator.cpp

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of attn_ext. The tensor ops are in torch.ops.attn_ext.";
  m.def("supported_backends", &attn_ext::supported_backends);
  m.def("active_backend", &attn_ext::active_backend);
  m.def("use_backend", &attn_ext::use_backend, pybind11::arg("name"));
  m.def("peak_probe", &attn_ext::ops::peak_probe, pybind11::arg("backend"), pybind11::arg("bf16"),
        pybind11::arg("iterations"));
  m.def("read_probe", &attn_ext::ops::read_probe, pybind11::arg("backend"), pybind11::arg("address"),
        pybind11::arg("bytes"));
  m.def("advise_huge_pages", &attn_ext::ops::advise_huge_pages, pybind11::arg("address"), pybind11::arg("bytes"));
  m.attr("version") = ATTN_EXT_VERSION;
  m.attr("torch_version") = ATTN_EXT_TORCH_VERSION;
  m.attr("compiler") =
#if defined(__clang__)
      "clang " __clang_version__;
#else
      "gcc " __VERSION__;
#endif
  m.attr("cuda_built") = bool(ATTN_EXT_CUDA_BUILT);
  m.attr("cuda_compiler") = ATTN_EXT_CUDA_COMPILER;
  bind_block_allocator(m);
  attn_ext::use_backend_of_environment();
}
