"""What this machine can do at most, measured in the same run as the table that is judged by it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attn_ext.bench.timer import last_level_cache

__all__ = ["Limits", "measure_limits"]


@dataclass
class Limits:
    """Read bandwidth in bytes/s, and the highest matrix-product rate in flop/s per dtype."""

    read_bytes_per_s: float
    flops_per_s: dict[torch.dtype, float]

    def best_of(self, other: Limits) -> Limits:
        """Limits measured twice, as before and after a table: a disturbed measurement is too low, never too high."""
        flops = {dtype: max(rate, other.flops_per_s[dtype]) for dtype, rate in self.flops_per_s.items()}
        return Limits(max(self.read_bytes_per_s, other.read_bytes_per_s), flops)

    def least_seconds(self, nbytes: int, flops: int, dtype: torch.dtype) -> float:
        """No call that moves `nbytes` through memory and does `flops` can be faster than this."""
        return max(nbytes / self.read_bytes_per_s, flops / self.flops_per_s[dtype])


def _best(call: Callable[[], object], seconds: float) -> float:
    call()
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure_limits(seconds: float, n: int = 1024) -> Limits:
    """Measure for about `seconds`: the sum of a buffer four times the last-level cache, and n x n products.

    The products go through torch and through `linear`, and the faster one counts: the true peak of the
    multiply-add units is at least that.

    >>> import torch
    >>> from attn_ext.bench import measure_limits
    >>> limits = measure_limits(0.01, n=64)
    >>> limits.flops_per_s[torch.float32] > 1e6
    True
    """
    import attn_ext

    buffer = torch.ones(min(4 * last_level_cache(), 1 << 30) // 4)
    read = buffer.numel() * buffer.element_size() / _best(buffer.sum, seconds / 3)
    flops = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
        # (bound early: a closure over a loop variable would see the last one)
        calls = (lambda a=a, b=b: a @ b.T, lambda a=a, b=b: attn_ext.linear(a, b))
        flops[dtype] = 2 * n**3 / min(_best(call, seconds / 6) for call in calls)
    return Limits(read, flops)
