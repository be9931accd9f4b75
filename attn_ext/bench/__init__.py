"""The speed of every op and of whole models: ours beside others for the same job, on this machine.

    for row in attn_ext.bench.run(["linear"], quick=True):
        print(row.case.shape, row.ratio)

The rules: candidates take turns in one run on fresh random data, inputs rotate through buffers larger than the
caches, a turn during which the machine was disturbed does not count, the number is a median with its spread, and the
machine's limits are measured in the same run.

timer           taking turns, guards, medians
machine         the limits
linear, ...     the cases of one op each
models          whole models, ours and other engines (peers)
growth          time against length, batch, heads and threads
memory          bytes of the paged cache, peak of a process
values          whether subnormal numbers, NaN and infinities take longer than others
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from attn_ext.bench.machine import Limits, measure_limits
from attn_ext.bench.timer import Case, Guard, Timing, WrongResult, alternate, quartiles, take_turns

__all__ = [
    "OPS", "Case", "Guard", "Limits", "Row", "Timing", "WrongResult", "alternate", "measure_limits", "run",
    "take_turns",
]  # fmt: skip

# Op name -> the module here that lists its cases.
OPS = {
    "linear": "linear",
    "norm": "norm",
    "attention": "attention",
    "paged_attention": "paged_decode",
    "masked_softmax": "masked_softmax",
}


@dataclass
class Row:
    """One measured case: the timing of every candidate, "attn_ext" first, and the bytes of its inputs."""

    case: Case
    timings: dict[str, Timing]

    @property
    def ours(self) -> Timing:
        return self.timings["attn_ext"]

    @property
    def ratio(self) -> float:
        """torch's time over ours, the median of turns: above 1 we are faster."""
        return self.ratio_to("torch")

    def ratio_to(self, name: str) -> float:
        return statistics.median(self._ratios(name))

    def ratio_spread(self, name: str) -> tuple[float, float]:
        """The quartiles of the ratio of two calls that were neighbours."""
        return quartiles(self._ratios(name))

    def _ratios(self, name: str) -> list[float]:
        pairs = zip(self.timings[name].seconds, self.ours.seconds, strict=True)
        return [theirs / ours for theirs, ours in pairs]

    def share_of_limit(self, limits: Limits) -> float:
        """The least time that the machine's measured limits allow, over what we took."""
        case = self.case
        return limits.least_seconds(case.bytes, case.flops, case.dtype, case.traffic) / self.ours.median

    def bound(self, limits: Limits) -> str:
        """What bounds it: "flops", or the kind of traffic."""
        case = self.case
        memory, arithmetic = limits.times(case.bytes, case.flops, case.dtype, case.traffic)
        return case.traffic if memory > arithmetic else "flops"

    def as_dict(self, limits: Limits) -> dict:
        """Plain numbers for a JSON file; times in seconds."""
        case = self.case
        timings = {
            name: {
                "median_s": t.median, "p25_s": t.spread[0], "p75_s": t.spread[1],
                "calls": len(t.seconds), "rejected": t.rejected, "disturbed": t.disturbed,
            }
            for name, t in self.timings.items()
        }  # fmt: skip
        others = [name for name in self.timings if name != "attn_ext"]
        return {
            "op": case.op, "shape": case.shape, "dtype": str(case.dtype).removeprefix("torch."), "timings": timings,
            "ratio": {name: self.ratio_to(name) for name in others},
            "ratio_quartiles": {name: self.ratio_spread(name) for name in others},
            "bytes": case.bytes, "flops": case.flops, "bound": self.bound(limits),
            "share_of_limit": self.share_of_limit(limits), "skipped": case.skipped,
        }  # fmt: skip


def run(ops: list[str] | None = None, *, quick: bool = False, guard: Guard | None = None) -> Iterator[Row]:
    """Measure the cases of `ops` (all by default), one row at a time; `quick` spends less than a second on each.

    Raises ValueError for an op that has no benchmark, before anything is measured.

    >>> from attn_ext import bench
    >>> bench.run(["conv"])
    Traceback (most recent call last):
    ...
    ValueError: bench: op must be one of linear, norm, attention, paged_attention, masked_softmax, got 'conv'
    """
    for op in ops or ():
        if op not in OPS:
            raise ValueError(f"bench: op must be one of {', '.join(OPS)}, got {op!r}")
    return _rows(ops or list(OPS), guard or Guard(), seconds=0.25 if quick else 3.0, quick=quick)


def _rows(ops: list[str], guard: Guard, seconds: float, quick: bool) -> Iterator[Row]:
    for op in ops:
        for case in import_module(f"attn_ext.bench.{OPS[op]}").cases(quick):
            yield Row(case, alternate(case, seconds=seconds, guard=guard, rounds=3 if quick else 7))
