"""A library of kernels built for the host, and its executor."""

import ctypes
import json

import torch

KINDS = {"input": 0, "output": 1, "inout": 2, "scratch": 3}


class Fault(Exception):
    """What a kernel did wrong; the message starts with file:line."""


class Library:
    """
    A shared library made by build.build.

    Its entry points are C functions that return null or a message: on the C++ side
    ``extern "C" const char* entry(args) { return simt::guarded([&] { ... launch ... }); }``.
    """

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.simt_register.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p, ctypes.c_int,
        ]  # fmt: skip
        self.lib.simt_seed.argtypes = [ctypes.c_ulonglong]
        self.runs = True
        self.registered = {}  # name -> bytes, since the last reset
        self.lib.simt_check_outputs.restype = ctypes.c_char_p
        self.lib.simt_launches.restype = ctypes.c_char_p

    def reset(self):
        """Forgets buffers and counters."""
        self.lib.simt_reset()
        self.registered = {}

    def seed(self, value):
        """0: the fixed schedule; others: shuffled warps, lanes and blocks."""
        self.lib.simt_seed(value)

    def device(self, sms=132, max_shared=227 * 1024, cc=90):
        """What simt::device() tells launchers."""
        self.lib.simt_device(sms, max_shared, cc)

    def dry_run(self, on):
        """Whether launches are only recorded: nothing runs, tensors need not hold memory."""
        self.runs = not on
        self.lib.simt_dry_run(int(on))

    def register(self, name, tensor, kind):
        """
        Tells the executor of a tensor that kernels may touch, and nothing outside its elements' extent.

        kind: "input" (read only), "output" (must be written, each element by one block), "inout", or "scratch" (as
        output, but need not be written). Outputs and scratch are filled with NaN patterns. Tensors of one name are
        counted together.
        """
        if tensor is None or tensor.numel() == 0:
            return
        elements = extent(tensor)
        self.registered[name] = self.registered.get(name, 0) + tensor.numel() * tensor.element_size()
        if not self.runs:
            return
        if kind in ("output", "scratch"):
            ctypes.memset(tensor.data_ptr(), 0xFF, elements * tensor.element_size())
        self.lib.simt_register(
            tensor.data_ptr(), elements * tensor.element_size(), tensor.element_size(), name.encode(), KINDS[kind]
        )

    def call(self, entry, *args):
        """Runs an entry point; raises Fault. Tensors are passed as pointers."""
        function = getattr(self.lib, entry)
        function.restype = ctypes.c_char_p
        message = function(*(ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in args))
        if message is not None:
            raise Fault(message.decode())

    def check_outputs(self):
        """Raises Fault unless every element of every output is written."""
        message = self.lib.simt_check_outputs() if self.runs else None
        if message is not None:
            raise Fault(message.decode())

    def launches(self):
        """What each launch since the last reset did: a list of dicts, see csrc/cuda/simt/state.h."""
        return json.loads(self.lib.simt_launches().decode())


def extent(t):
    """Elements from the first to the last of `t`."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0


def far_apart(t, distance=2**31 + 8):
    """`t` with its parts along the first dimension so many elements apart, in memory that nothing else touches."""
    buffer = torch.empty((t.shape[0] - 1) * distance + t[0].numel(), dtype=t.dtype)
    return buffer.as_strided(t.shape, (distance, *t[0].contiguous().stride())).copy_(t)
