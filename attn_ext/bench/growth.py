"""Does time grow as theory says? One size of an op is swept, and the exponent of its time is fitted.

Attention over a prompt does work in proportion to T², decode to the length of the context, both to batch and heads,
and threads should divide it. Fixed costs flatten the small end of each curve, so the fit takes the larger half of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from attn_ext.bench.timer import Case, Guard, Timing, alternate

__all__ = ["CURVES", "Curve", "fit_exponent", "measure_growth", "plot_growth"]


@dataclass
class Curve:
    """Time against one size; `expected` is the exponent that theory gives. `skipped`: why there are no points."""

    name: str
    title: str
    variable: str
    expected: float
    points: list[tuple[int, dict[str, Timing]]] = field(default_factory=list)
    skipped: str = ""

    def exponent(self, engine: str = "attn_ext") -> float:
        """The measured one, over the larger half of the sizes."""
        points = [(size, timings[engine].median) for size, timings in self.points]
        if self.expected > 0:
            points = points[-max(3, len(points) // 2 + 1) :]
        return fit_exponent(*zip(*points, strict=True))

    def verdict(self, engine: str = "attn_ext", tolerance: float = 0.15) -> str:
        return verdict(self.exponent(engine), self.expected, tolerance)

    def as_dict(self) -> dict:
        if self.skipped:
            return {"name": self.name, "skipped": self.skipped}
        engines = list(self.points[0][1])
        return {
            "name": self.name, "variable": self.variable, "expected_exponent": self.expected,
            "sizes": [size for size, _ in self.points],
            "median_s": {e: [timings[e].median for _, timings in self.points] for e in engines},
            "exponent": {e: self.exponent(e) for e in engines},
            "verdict": self.verdict(),
        }  # fmt: skip


def fit_exponent(sizes, seconds) -> float:
    """The p of seconds = c * size**p that fits best: least squares of the logarithms.

    >>> from attn_ext.bench.growth import fit_exponent
    >>> fit_exponent([1, 2, 4], [3, 12, 48])
    2.0
    """
    x, y = ([math.log2(value) for value in values] for values in (sizes, seconds))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


def verdict(measured: float, expected: float, tolerance: float) -> str:
    """
    >>> verdict(2.05, 2, 0.15), verdict(1.5, 2, 0.15), verdict(2.5, 2, 0.15)
    ('as expected', 'grows more slowly: fixed costs still show', 'grows faster than it should')
    >>> verdict(-0.5, -1, 0.15)
    'grows faster than it should'
    """
    if abs(measured - expected) <= tolerance:
        return "as expected"
    return "grows more slowly: fixed costs still show" if measured < expected else "grows faster than it should"


# ------------------------------------------------------------------------------------------------------ the sweeps


def _attention(b: int, t: int, h: int, d: int = 64) -> Case:
    import attn_ext

    def in_torch(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return Case(
        "attention", f"B{b} H{h} T{t} D{d} causal", torch.bfloat16,
        lambda: tuple(torch.randn(b, t, 3, h, d).bfloat16().unbind(2)),
        {"attn_ext": lambda q, k, v: attn_ext.attention(q, k, v, causal=True), "torch": in_torch},
        bytes=4 * b * t * h * d * 2, flops=2 * b * h * d * t * (t + 1),
    )  # fmt: skip


def _decode(b: int, t: int, h: int = 8, d: int = 64) -> Case:
    import attn_ext
    from attn_ext.bench.paged_decode import _inputs, _torch

    return Case(
        "paged_attention", f"B{b} T{t} H{h} D{d} decode", torch.bfloat16,
        lambda: _inputs(b, t, h, h, d, torch.bfloat16),
        {"attn_ext": lambda *a: attn_ext.paged_attention(*a[:5]), "torch": _torch},
        bytes=2 * b * (t + 1) * h * d * 2, flops=4 * b * h * t * d,
    )  # fmt: skip


@dataclass
class Sweep:
    title: str
    variable: str
    expected: float
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]
    case: Callable[[int], Case]


CURVES = {
    "prefill": Sweep(
        "Causal attention over a prompt (8 heads of 64, bfloat16)", "tokens T", 2,
        (128, 256, 512, 1024, 2048, 4096), (256, 512, 1024), lambda t: _attention(1, t, 8),
    ),
    "context": Sweep(
        "Paged decode of 8 sequences (8 heads of 64, bfloat16)", "context length", 1,
        (256, 512, 1024, 2048, 4096, 8192, 16384), (1024, 2048, 4096), lambda t: _decode(8, t),
    ),
    "batch": Sweep(
        "Paged decode after 2048 tokens (8 heads of 64, bfloat16)", "sequences", 1,
        (1, 2, 4, 8, 16, 32, 64), (4, 8, 16), lambda b: _decode(b, 2048),
    ),
    "heads": Sweep(
        "Causal attention over 512 tokens (heads of 64, bfloat16)", "heads", 1,
        (1, 2, 4, 8, 16, 32, 64), (4, 8, 16), lambda h: _attention(1, 512, h),
    ),
    "threads": Sweep(
        "Causal attention over 1024 tokens (16 heads of 64, bfloat16)", "threads", -1, (), (),
        lambda threads: _attention(1, 1024, 16),
    ),
}  # fmt: skip


def measure_growth(*, quick: bool = False) -> Iterator[Curve]:
    """Measure the curves, one at a time."""
    for name, sweep in CURVES.items():
        curve = Curve(name, sweep.title, sweep.variable, sweep.expected)
        sizes = sweep.quick_sizes if quick else sweep.sizes
        threads = torch.get_num_threads()
        if name == "threads":
            sizes = sorted({2**i for i in range(threads.bit_length()) if 2**i <= threads} | {threads})
            if len(sizes) < 2:
                curve.skipped = "one thread has nothing to be compared with"
        if not curve.skipped:
            for size in sizes:
                torch.set_num_threads(size if name == "threads" else threads)
                try:
                    timings = alternate(
                        sweep.case(size), seconds=0.15 if quick else 1.0, rounds=3 if quick else 7, guard=Guard()
                    )
                finally:
                    torch.set_num_threads(threads)
                curve.points.append((size, timings))
        yield curve


def plot_growth(curves: list[Curve], folder: Path) -> list[Path]:
    """One PNG per curve that has points -> their paths. Needs matplotlib (the extra `plot`)."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for curve in curves:
        if curve.skipped:
            continue
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        sizes = [size for size, _ in curve.points]
        for engine, colour, marker in (("attn_ext", "tab:blue", "o"), ("torch", "tab:orange", "s")):
            timings = [timings[engine] for _, timings in curve.points]
            milliseconds = [1e3 * t.median for t in timings]
            lows, highs = zip(*(t.spread for t in timings), strict=True)
            label = f"{engine}: exponent {curve.exponent(engine):.2f}"
            axes.plot(sizes, milliseconds, color=colour, marker=marker, label=label)
            axes.fill_between(sizes, [1e3 * s for s in lows], [1e3 * s for s in highs], color=colour, alpha=0.2)
        anchor = curve.points[-1][1]["attn_ext"].median * 1e3
        guide = [anchor * (size / sizes[-1]) ** curve.expected for size in sizes]
        axes.plot(sizes, guide, color="grey", linestyle="--", label=f"theory: exponent {curve.expected:g}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        low, high = axes.get_ylim()
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1, 2, 5), range(1, 10)):  # the coarser ones, if they are enough
            ticks = [digit * 10.0**decade for decade in decades for digit in digits]
            axes.set_yticks(shown := [tick for tick in ticks if low <= tick <= high])
            if len(shown) > 2:
                break
        axes.set_xlabel(curve.variable)
        axes.set_ylabel("ms (median, band: quartiles)")
        axes.set_title(curve.title)
        axes.grid(alpha=0.3)
        axes.legend()
        path = folder / f"growth-{curve.name}.png"
        figure.savefig(path, dpi=120)
        written.append(path)
    return written
