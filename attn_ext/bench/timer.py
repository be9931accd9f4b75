"""One timer for everything: candidates take turns on fresh data in one run, and the result is a median with its spread.

Times of two runs on a busy machine cannot be compared, times taken in turn can: both see the same neighbours,
the same clock speed and the same cache pollution. Between any two samples a guard runs, a fixed piece of arithmetic in
registers: a turn whose guards took much longer than the fastest guard of the run was disturbed and does not count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from attn_ext import _C

__all__ = [
    "Case", "Guard", "Timing", "WrongResult", "alternate", "last_level_cache", "quartiles", "require_same_results",
    "take_turns",
]  # fmt: skip


class WrongResult(RuntimeError):
    """A candidate's result differs from another's: a fast wrong answer is no answer."""


@dataclass
class Case:
    """One row of the speed table: what is computed, on what, and by whom.

    `make()` returns the inputs of one call as a tuple; each of `candidates` is called as `candidate(*inputs)`: first
    "attn_ext", then "torch", then others. `bytes` is what one call must read and write at least once, `flops` what it
    must multiply and add (2 per multiply-add), each counted once however a candidate goes about it. `traffic` says
    which bandwidth bounds it: "read", or "copy" for an op that writes about what it reads.
    """

    op: str
    shape: str
    dtype: torch.dtype
    make: Callable[[], tuple]
    candidates: dict[str, Callable]
    bytes: int
    flops: int
    traffic: str = "read"
    unlike: frozenset[str] = frozenset()  # candidates that compute something else, such as a plain copy
    skipped: dict[str, str] = field(default_factory=dict)  # candidate -> why it is not here


def quartiles(values: list[float]) -> tuple[float, float]:
    """The 25th and the 75th percentile: half of the values lie between them."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


@dataclass
class Timing:
    """Seconds of each timed call of one candidate that counts, how many were taken, and how many of those that count
    come from a disturbed machine, because there were too few others.

    >>> from attn_ext.bench import Timing
    >>> timing = Timing([0.003, 0.001, 0.002], taken=4)
    >>> timing.median, timing.rejected
    (0.002, 1)
    """

    seconds: list[float]
    taken: int
    disturbed: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        return quartiles(self.seconds)

    @property
    def rejected(self) -> int:
        return self.taken - len(self.seconds)


class Guard:
    """A fixed piece of arithmetic, about `seconds` long, on all of torch's threads. Calling it gives its time.

    `slack`: a sample counts where the guards around it took at most that many times the fastest guard so far.

    >>> from attn_ext.bench import Guard
    >>> guard = Guard(1e-4)
    >>> taken = guard()
    >>> 0 < guard.best <= taken
    True
    """

    def __init__(self, seconds: float = 2e-4, slack: float = 1.25):
        self.slack, self.best, self._backend = slack, math.inf, _C.supported_backends()[0]
        # The arithmetic of the best kernels, so that a slow state of just those units is seen too.
        self._bf16 = _C.peak_probe(self._backend, True, 1) > 0
        self._iterations = 1000
        while (taken := min(self() for _ in range(3))) < seconds:
            self._iterations = math.ceil(self._iterations * min(4, 1.1 * seconds / taken))
        self.best = taken

    def __call__(self) -> float:
        for _ in range(2):  # the first call wakes threads that sleep
            start = time.perf_counter()
            _C.peak_probe(self._backend, self._bf16, self._iterations)
            taken = time.perf_counter() - start
        self.best = min(self.best, taken)
        return taken

    def accepts(self, taken: float) -> bool:
        return taken <= self.slack * self.best


def last_level_cache() -> int:
    """Bytes of the largest cache that core 0 sees; 32 MiB where the system does not say."""
    sizes = [32 << 20] if not (found := list(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))) else []
    for path in found:
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
    return max(sizes)


def _pool(make: Callable[[], tuple], at_most: int = 1 << 30) -> list[tuple]:
    """Enough different inputs that one pass over them all empties the last-level cache twice (within 1 GiB).

    An odd number of at least three, so that candidates that take turns meet every one of them; one alone where it is
    so large that nothing of it is left in a cache at its end.
    """
    first = make()
    size = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor))
    if size > 8 * last_level_cache():
        return [first]
    wanted = min(2 * last_level_cache(), at_most) // max(size, 1)
    return [first] + [make() for _ in range(2 * (min(wanted, 512) // 2) + 2)]


def take_turns(
    candidates: dict[str, Callable[[int], float]], *, seconds: float, guard: Guard, rounds: int = 7
) -> dict[str, Timing]:
    """Call `candidates` in turn, until `seconds` have passed and `rounds` rounds count.

    Each is given the number of the sample and returns its seconds. The order turns round every time. A round counts as
    a whole or not at all, so that the i-th sample of one candidate is beside the i-th of the others. Where the machine
    is disturbed for three times as long as was planned, the rounds with the fastest guards count, which favours nobody:
    guards know nothing of the samples. What does not count is reported as rejected, what counts all the same as
    disturbed.

    >>> from attn_ext.bench import Guard, take_turns
    >>> one = take_turns({"a": lambda i: 1.0, "b": lambda i: 2.0}, seconds=0.0, guard=Guard(1e-5), rounds=3)
    >>> one["b"].median
    2.0
    """
    order = list(candidates)
    taken: list[tuple[float, dict[str, float]]] = []  # the slowest guard of a round, and its samples
    begin, number, before = time.perf_counter(), 0, guard()
    while True:
        worst, sample = before, {}
        for name in order:
            sample[name] = candidates[name](number)
            number += 1
            before = guard()
            worst = max(worst, before)
        taken.append((worst, sample))
        order.reverse()
        passed = time.perf_counter() - begin
        if passed < seconds or len(taken) < rounds:
            continue
        counted = sum(guard.accepts(slowest) for slowest, _ in taken)
        if counted >= rounds or (passed > 3 * seconds and len(taken) >= 3 * rounds):
            break
    taken.sort(key=lambda entry: entry[0])
    kept = [sample for _, sample in taken[: max(counted, min(rounds, len(taken)))]]
    disturbed = max(0, len(kept) - counted)
    return {name: Timing([sample[name] for sample in kept], len(taken), disturbed) for name in candidates}


def alternate(case: Case, *, seconds: float, guard: Guard | None = None, rounds: int = 7) -> dict[str, Timing]:
    """Time the candidates of `case` in turn for about `seconds`, and at least `rounds` calls of each.

    Every call gets the next input of a ring larger than the caches, so no candidate is served by what another one has
    just loaded. Before timing, all results must agree.

    >>> import torch
    >>> from attn_ext.bench import Case, alternate
    >>> twice = {"a": lambda x: x + x, "b": lambda x: 2 * x}
    >>> case = Case("twice", "16", torch.float32, lambda: (torch.randn(16),), twice, bytes=128, flops=16)
    >>> sorted(alternate(case, seconds=0.01))
    ['a', 'b']
    """
    inputs = _pool(case.make)
    require_same_results(case, inputs[0])

    def sampler(candidate: Callable) -> Callable[[int], float]:
        def sample(number: int) -> float:
            arguments = inputs[number % len(inputs)]
            start = time.perf_counter()
            candidate(*arguments)
            return time.perf_counter() - start

        return sample

    candidates = {name: sampler(candidate) for name, candidate in case.candidates.items()}
    return take_turns(candidates, seconds=seconds, guard=guard or Guard(), rounds=rounds)


def require_same_results(case: Case, arguments: tuple) -> None:
    """Raises WrongResult where candidates of `case` differ. Doubles as the warm-up call."""
    results = {name: candidate(*arguments).double() for name, candidate in case.candidates.items()}
    (first, expected), *others = results.items()
    for name, result in others:
        error = ((result - expected).norm() / expected.norm().clamp_min(1e-30)).item()
        limit = {torch.float32: 1e-5, torch.float64: 1e-12}.get(case.dtype, 2e-2)
        if name not in case.unlike and not error <= limit:
            what = f"{case.op} {case.shape} {case.dtype}"
            raise WrongResult(f"bench: {what}: {name} differs from {first} by {error:.1e}")
