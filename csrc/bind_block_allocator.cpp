// attn_ext._C.BlockAllocator and attn_ext._C.OutOfBlocks.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "block_allocator.h"

namespace py = pybind11;

namespace {

// What pybind11 holds. For an object whose __init__ never ran (BlockAllocator.__new__(BlockAllocator)) it calls the
// class's operator new to have memory for `this`, and would go on with its garbage: here that is an error.
struct BoundBlockAllocator : attn_ext::BlockAllocator {
  using BlockAllocator::BlockAllocator;
  static void* operator new(size_t) { throw std::logic_error("BlockAllocator: __init__ has not been called"); }
};

}  // namespace

void bind_block_allocator(py::module_& m) {
  using attn_ext::BlockAllocator;
  using attn_ext::OutOfBlocks;

  py::register_exception<OutOfBlocks>(m, "OutOfBlocks", PyExc_RuntimeError);
  m.attr("OutOfBlocks").attr("__doc__") =
      "The KV cache has fewer free or cached blocks than were asked for; nothing was changed.";

  py::class_<BoundBlockAllocator>(m, "BlockAllocator", R"(Hands out the blocks of a paged KV cache.

A block is *free* (holds nothing), *used* (has references: block tables that name it) or *cached* (has no reference, but
its tokens are published, so a prompt with the same beginning can take it again). Allocation takes free blocks first, then
evicts cached ones, the least recently used first. Only block numbers are managed here; the tensors are PagedKVCache's.

Misuse (an id out of range, freeing what is not allocated) raises ValueError, exhaustion raises OutOfBlocks, both before
anything is changed. Calls from several threads are safe under the GIL, which no method releases.

>>> from attn_ext import BlockAllocator, OutOfBlocks
>>> blocks = BlockAllocator(num_blocks=4, block_size=2)
>>> a, b = blocks.allocate(2)
>>> blocks.publish(a, [10, 11]), blocks.publish(b, [12, 13], parent=a)  # their keys and values are now written
(0, 1)
>>> blocks.free([a, b])
>>> blocks.num_free, blocks.num_cached, blocks.num_used
(2, 2, 0)
>>> shared = blocks.match([10, 11, 12, 13, 14])  # both full blocks are found again
>>> shared
[0, 1]
>>> blocks.fork(shared)  # a second sequence names the same blocks ...
>>> blocks.num_shared
2
>>> blocks.make_writable([1])  # ... and copies one before it writes to it
([2], [])
>>> try:
...     blocks.allocate(2)
... except OutOfBlocks as error:
...     print(error)
BlockAllocator.allocate: 2 blocks asked for, 1 of 4 are free or cached
)")
      .def(py::init([](int64_t num_blocks, int64_t block_size) {
             return ::new BoundBlockAllocator(num_blocks, block_size);
           }),
           py::arg("num_blocks"), py::arg("block_size"),
           "num_blocks: 1 to 2**31 - 1. block_size: tokens per block, at least 1.")
      .def("allocate", &BlockAllocator::allocate, py::arg("count") = 1,
           "`count` blocks with one reference each, or OutOfBlocks and no change.")
      .def("free", &BlockAllocator::free, py::arg("blocks"),
           "Drop one reference of each block. Blocks late in the list are evicted before early "
           "ones.")
      .def("fork", &BlockAllocator::fork, py::arg("blocks"),
           "Add one reference to each block: another sequence now names them.")
      .def("make_writable", &BlockAllocator::make_writable, py::arg("blocks"), py::arg("count") = 0,
           R"(Copy-on-write.

`blocks` are about to be written, one held reference each, and `count` new blocks are wanted. An entry that is shared or
published gives up its reference for a new block; copying the contents is up to the caller. Returns (the blocks to write
to, the new ones), or raises OutOfBlocks and changes nothing.)")
      .def("match", &BlockAllocator::match, py::arg("tokens"),
           "The longest run of published blocks that begins `tokens`, with one reference added to "
           "each.")
      .def("publish", &BlockAllocator::publish, py::arg("block"), py::arg("tokens"), py::arg("parent") = py::none(),
           R"(Let `match` find a full, finished block: `tokens` (block_size of them) after the published block `parent`.

Returns the block to use from now on: `block`, or one that already holds this prefix; the reference has then moved to it.)")
      .def("clear_prefixes", &BlockAllocator::clear_prefixes,
           "Forget every published prefix; cached blocks become free.")
      .def("ref_count", &BlockAllocator::ref_count, py::arg("block"), "References to `block`; 0 when free or cached.")
      .def("is_published", &BlockAllocator::is_published, py::arg("block"), "Whether `match` can find `block`.")
      .def("check_invariants", &BlockAllocator::check_invariants,
           "Recount everything; RuntimeError names the first contradiction. For tests.")
      .def_property_readonly("num_blocks", &BlockAllocator::num_blocks, "Blocks in the pool.")
      .def_property_readonly("block_size", &BlockAllocator::block_size, "Tokens per block.")
      .def_property_readonly("num_free", &BlockAllocator::num_free, "Blocks that hold nothing.")
      .def_property_readonly("num_used", &BlockAllocator::num_used, "Blocks with references.")
      .def_property_readonly("num_shared", &BlockAllocator::num_shared, "Blocks with two references or more.")
      .def_property_readonly("num_cached", &BlockAllocator::num_cached, "Published blocks with no reference.")
      .def_property_readonly("num_available", &BlockAllocator::num_available, "Free or cached: what can be allocated.")
      .def_property_readonly("num_published", &BlockAllocator::num_published, "Entries in the prefix index.");
}
