"""The speed table: each op against what torch offers for the same job, on this machine.

    for row in attn_ext.bench.run(["linear"], quick=True):
        print(row.case.shape, row.ratio)

The rules: candidates take turns in one run on fresh random data, inputs rotate through buffers larger than the
caches, the number is a median with its spread, and the machine's limits are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from attn_ext.bench.machine import Limits, measure_limits
from attn_ext.bench.timer import Case, Timing, alternate

__all__ = ["OPS", "Case", "Limits", "Row", "Timing", "alternate", "measure_limits", "run"]

# Op name -> the module here that lists its cases.
OPS = {
    "linear": "linear",
    "attention": "attention",
    "paged_attention": "paged_decode",
    "masked_softmax": "masked_softmax",
}


@dataclass
class Row:
    """One measured case."""

    case: Case
    ours: Timing
    torch: Timing

    @property
    def ratio(self) -> float:
        """torch's median time over ours: above 1 we are faster."""
        return self.torch.median / self.ours.median

    def share_of_limit(self, limits: Limits) -> float:
        """The least time that the machine's measured limits allow, over what we took."""
        case = self.case
        return limits.least_seconds(case.bytes, case.flops, case.dtype) / self.ours.median

    def as_dict(self, limits: Limits) -> dict:
        """Plain numbers for a JSON file; times in seconds."""
        case = self.case
        timings = {
            name: {"median_s": t.median, "p25_s": t.spread[0], "p75_s": t.spread[1], "calls": len(t.seconds)}
            for name, t in (("attn_ext", self.ours), ("torch", self.torch))
        }
        return {
            "op": case.op, "shape": case.shape, "dtype": str(case.dtype).removeprefix("torch."), **timings,
            "ratio": self.ratio, "bytes": case.bytes, "flops": case.flops,
            "share_of_limit": self.share_of_limit(limits),
        }  # fmt: skip


def run(ops: list[str] | None = None, *, quick: bool = False) -> Iterator[Row]:
    """Measure the cases of `ops` (all by default), one row at a time; `quick` spends about 1 s on each.

    Raises ValueError for an op that has no benchmark, before anything is measured.

    >>> from attn_ext import bench
    >>> bench.run(["conv"])
    Traceback (most recent call last):
    ...
    ValueError: bench: op must be one of linear, attention, paged_attention, masked_softmax, got 'conv'
    """
    for op in ops or ():
        if op not in OPS:
            raise ValueError(f"bench: op must be one of {', '.join(OPS)}, got {op!r}")
    return _rows(ops or list(OPS), seconds=0.6 if quick else 4.0)


def _rows(ops: list[str], seconds: float) -> Iterator[Row]:
    for op in ops:
        for case in import_module(f"attn_ext.bench.{OPS[op]}").cases():
            timings = alternate(case, seconds=seconds)
            yield Row(case, timings["attn_ext"], timings["torch"])
