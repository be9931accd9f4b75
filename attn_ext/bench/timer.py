"""One timer for everything: candidates take turns on fresh data in one run, and the result is a median with its spread.

Times of two runs on a busy machine cannot be compared, times taken in turn can: both see the same neighbours,
the same clock speed and the same cache pollution.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Case", "Timing", "alternate", "last_level_cache"]


@dataclass
class Case:
    """One row of the speed table: what is computed, on what, and by whom.

    `make()` returns the inputs of one call as a tuple; each of `candidates` is called as `candidate(*inputs)`.
    `bytes` is what one call must read and write at least once, `flops` what it must multiply and add (2 per
    multiply-add), each counted once however a candidate goes about it.
    """

    op: str
    shape: str
    dtype: torch.dtype
    make: Callable[[], tuple]
    candidates: dict[str, Callable]
    bytes: int
    flops: int


@dataclass
class Timing:
    """Seconds of each timed call of one candidate.

    >>> from attn_ext.bench import Timing
    >>> Timing([0.003, 0.001, 0.002]).median
    0.002
    """

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 25th and the 75th percentile: half of the calls lie between them."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def last_level_cache() -> int:
    """Bytes of the largest cache that core 0 sees; 32 MiB where the system does not say."""
    sizes = [32 << 20] if not (found := list(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))) else []
    for path in found:
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes)


def _pool(make: Callable[[], tuple], at_most: int = 1 << 30) -> list[tuple]:
    """Enough different inputs that one pass over them all empties the last-level cache twice (within 1 GiB).

    An odd number of at least three, so that candidates that take turns meet every one of them.
    """
    first = make()
    size = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor))
    wanted = min(2 * last_level_cache(), at_most) // max(size, 1)
    return [first] + [make() for _ in range(2 * (min(wanted, 512) // 2) + 2)]


def alternate(case: Case, *, seconds: float, rounds: int = 7) -> dict[str, Timing]:
    """Time the candidates of `case` in turn until `seconds` have passed and each had at least `rounds` calls.

    Every call gets the next input of a ring larger than the caches, and the order changes every round, so no
    candidate is served by what another one has just loaded. Before timing, all results must agree.

    >>> import torch
    >>> from attn_ext.bench import Case, alternate
    >>> twice = {"a": lambda x: x + x, "b": lambda x: 2 * x}
    >>> case = Case("twice", "16", torch.float32, lambda: (torch.randn(16),), twice, bytes=128, flops=16)
    >>> sorted(alternate(case, seconds=0.01))
    ['a', 'b']
    """
    inputs = _pool(case.make)
    _require_same_results(case, inputs[0])
    taken: dict[str, list[float]] = {name: [] for name in case.candidates}
    order = list(case.candidates.items())
    begin, turn = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds or min(map(len, taken.values())) < rounds:
        for name, candidate in order:
            arguments = inputs[turn % len(inputs)]
            turn += 1
            start = time.perf_counter()
            candidate(*arguments)
            taken[name].append(time.perf_counter() - start)
        order.reverse()
    return {name: Timing(t) for name, t in taken.items()}


def _require_same_results(case: Case, arguments: tuple) -> None:
    """A fast wrong answer is no answer. Doubles as the warm-up call."""
    results = {name: candidate(*arguments).double() for name, candidate in case.candidates.items()}
    (first, expected), *others = results.items()
    for name, result in others:
        error = ((result - expected).norm() / expected.norm().clamp_min(1e-30)).item()
        if not error <= {torch.float32: 1e-5, torch.float64: 1e-12}.get(case.dtype, 2e-2):
            raise RuntimeError(f"bench {case.op} {case.shape} {case.dtype}: {name} differs from {first} by {error:.1e}")
