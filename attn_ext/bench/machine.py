"""What this machine can do at most, measured in the same run as the table that is judged by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attn_ext import _C
from attn_ext.bench.timer import last_level_cache

__all__ = ["Limits", "measure_limits"]


@dataclass
class Limits:
    """Bandwidth in bytes/s, reading and copying (read and written bytes both count), and multiply-adds in flop/s.

    The rate of bfloat16 is that of the best instruction that multiplies it: AMX tiles, pairs (vdpbf16ps), or those of
    float32 after widening. `instructions` names it.
    """

    bytes_per_s: dict[str, float]  # "read", "copy"
    flops_per_s: dict[torch.dtype, float]
    instructions: dict[torch.dtype, str]

    def best_of(self, other: Limits) -> Limits:
        """Limits measured twice, as before and after a table: a disturbed measurement is too low, never too high."""
        flops = {dtype: max(rate, other.flops_per_s[dtype]) for dtype, rate in self.flops_per_s.items()}
        rates = {kind: max(rate, other.bytes_per_s[kind]) for kind, rate in self.bytes_per_s.items()}
        return Limits(rates, flops, self.instructions)

    def times(self, nbytes: int, flops: int, dtype: torch.dtype, traffic: str = "read") -> tuple[float, float]:
        """Seconds that the memory and that the arithmetic need at least."""
        return nbytes / self.bytes_per_s[traffic], flops / self.flops_per_s.get(dtype, self.flops_per_s[torch.float32])

    def least_seconds(self, nbytes: int, flops: int, dtype: torch.dtype, traffic: str = "read") -> float:
        """No call that moves `nbytes` through memory and does `flops` can be faster than this."""
        return max(self.times(nbytes, flops, dtype, traffic))


def _best(call: Callable[[], object], seconds: float) -> float:
    call()
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def _peak(bf16: bool, seconds: float) -> tuple[float, str]:
    """The highest rate among the backends that run here, and the name of that backend."""
    backends, iterations = _C.supported_backends(), 200_000
    peaks = []
    for name in backends:
        if operations := _C.peak_probe(name, bf16, 1):
            operations *= iterations
            peaks.append((operations / _best(lambda n=name: _C.peak_probe(n, bf16, iterations), seconds), name))
    return max(peaks, default=(0.0, ""))


def measure_limits(seconds: float) -> Limits:
    """Measure for about `seconds`: multiply-adds in registers on all threads, with every instruction set there is, and
    the reading and the copying of a buffer four times the last-level cache.

    >>> import torch
    >>> from attn_ext.bench import measure_limits
    >>> limits = measure_limits(0.01)
    >>> limits.flops_per_s[torch.bfloat16] >= limits.flops_per_s[torch.float32] > 1e6
    True
    """
    best = _C.supported_backends()[0]
    buffer = torch.ones(min(4 * last_level_cache(), 1 << 30) // 4)
    target, nbytes = torch.empty_like(buffer), buffer.numel() * buffer.element_size()
    rates = {
        "read": nbytes / _best(lambda: _C.read_probe(best, buffer.data_ptr(), nbytes), seconds / 4),
        "copy": 2 * nbytes / _best(lambda: target.copy_(buffer), seconds / 4),
    }
    share = seconds / 4 / len(_C.supported_backends())
    float32, pairs = _peak(False, share), _peak(True, share)
    peaks = {torch.float32: float32, torch.bfloat16: max(pairs, float32)}
    return Limits(rates, {d: p[0] for d, p in peaks.items()}, {d: p[1] for d, p in peaks.items()})
