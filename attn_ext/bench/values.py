"""Does time depend on the values? Each op on ordinary numbers and on subnormal ones, NaN and infinities, in turns.

The rule is that none takes more than three times as long as ordinary numbers. Weights, and the log-sum-exps of
`merge_attention`, are ordinary throughout; all else is of the one kind.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attn_ext.bench.timer import Case, Guard, Timing, require_same_results, take_turns

__all__ = ["KINDS", "LIMIT", "ValuesRow", "cases", "measure_values"]

LIMIT = 3.0  # times the ordinary time

# Name -> makes a tensor of random numbers one of that kind, in place.
KINDS: dict[str, Callable[[torch.Tensor], None]] = {
    "ordinary": lambda x: None,
    "subnormal": lambda x: x.copy_(x.float() * 1e-39),
    "NaN": lambda x: x.fill_(float("nan")),
    "inf": lambda x: x.fill_(float("inf")),
    "1 % NaN": lambda x: x.masked_fill_(torch.rand(x.shape) < 0.01, float("nan")),
}


@dataclass
class ValuesRow:
    """One op: the times of (candidate, kind of values)."""

    op: str
    shape: str
    dtype: torch.dtype
    timings: dict[tuple[str, str], Timing]

    def ratio(self, candidate: str, kind: str) -> float:
        """Its time over that with ordinary numbers, the median of turns."""
        pairs = zip(self.timings[candidate, kind].seconds, self.timings[candidate, "ordinary"].seconds, strict=True)
        return statistics.median(special / ordinary for special, ordinary in pairs)

    def as_dict(self) -> dict:
        """Plain numbers for a JSON file; times in seconds."""
        candidates = dict.fromkeys(candidate for candidate, _ in self.timings)
        ratio = {c: {kind: self.ratio(c, kind) for kind in KINDS if kind != "ordinary"} for c in candidates}
        return {
            "op": self.op, "shape": self.shape, "dtype": str(self.dtype).removeprefix("torch."),
            "median_s": {c: {kind: self.timings[c, kind].median for kind in KINDS} for c in candidates},
            "ratio": ratio, "above_limit": [kind for kind, r in ratio["attn_ext"].items() if r > LIMIT],
        }  # fmt: skip


def _randn(*shapes: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def _merge_in_torch(out_a, out_b, lse_a, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = ((x - lse).exp().transpose(1, 2).unsqueeze(-1) for x in (lse_a, lse_b))
    return (a * out_a + b * out_b).to(out_a.dtype)


def cases(dtype: torch.dtype) -> Iterator[tuple[Case, tuple[int, ...]]]:
    """The ops, and which of their inputs take the values."""
    import attn_ext
    from attn_ext.bench.attention import _sdpa
    from attn_ext.bench.paged_decode import _inputs, _torch

    functional, causal = torch.nn.functional, torch.ones(256, 256, dtype=torch.bool).triu(1)

    def case(op, shape, make, ours, theirs):
        return Case(op, shape, dtype, make, {"attn_ext": ours, "torch": theirs}, bytes=0, flops=0)

    for m in (1, 64):
        yield case(
            "linear", f"{m} x 768 x 768", lambda m=m: _randn((m, 768), (768, 768), (768,), dtype=dtype),
            attn_ext.linear, functional.linear,
        ), (0,)  # fmt: skip
    yield case(
        "attention", "B1 H4 T256 D64 causal", lambda: _randn(*[(1, 256, 4, 64)] * 3, dtype=dtype),
        lambda q, k, v: attn_ext.attention(q, k, v, causal=True), _sdpa,
    ), (0, 1, 2)  # fmt: skip
    yield case(
        "paged_attention", "B4 T512 H8/8 D64", lambda: _inputs(4, 512, 8, 8, 64, dtype),
        lambda *inputs: attn_ext.paged_attention(*inputs[:5]), _torch,
    ), (0, 1, 2, 5, 6)  # fmt: skip
    yield case(
        "masked_softmax", "H4 T256 causal", lambda: _randn((1, 4, 256, 256), dtype=dtype),
        lambda scores: attn_ext.masked_softmax(scores, causal=True, scale=0.125),
        lambda scores: torch.softmax((scores * 0.125).masked_fill(causal, float("-inf")), dim=-1),
    ), (0,)  # fmt: skip
    yield case(
        "rms_norm", "256 x 768", lambda: _randn((256, 768), (768,), dtype=dtype),
        lambda x, w: attn_ext.rms_norm(x, w, eps=1e-5), lambda x, w: functional.rms_norm(x, (768,), w, 1e-5),
    ), (0,)  # fmt: skip
    yield case(
        "layer_norm", "256 x 768", lambda: _randn((256, 768), (768,), (768,), dtype=dtype),
        lambda x, w, b: attn_ext.layer_norm(x, w, b, eps=1e-5),
        lambda x, w, b: functional.layer_norm(x, (768,), w, b, 1e-5),
    ), (0,)  # fmt: skip
    yield case(
        "merge_attention", "B1 T256 H8 D64",
        lambda: (*_randn(*[(1, 256, 8, 64)] * 2, dtype=dtype), *torch.randn(2, 1, 8, 256).unbind(0)),
        lambda a, b, lse_a, lse_b: attn_ext.merge_attention(a, lse_a, b, lse_b)[0], _merge_in_torch,
    ), (0, 1)  # fmt: skip


def measure_values(*, quick: bool = False, guard: Guard | None = None) -> Iterator[ValuesRow]:
    """Measure the ops in float32 and bfloat16, one at a time; raises WrongResult as the other benchmarks do."""
    guard = guard or Guard()

    def sampler(candidate: Callable, arguments: tuple) -> Callable[[int], float]:
        def sample(number: int) -> float:
            start = time.perf_counter()
            candidate(*arguments)
            return time.perf_counter() - start

        return sample

    for dtype in (torch.float32, torch.bfloat16):
        for case, which in cases(dtype):
            samplers = {}
            for kind, change in KINDS.items():
                arguments = case.make()
                for i in which:
                    change(arguments[i])
                if kind == "ordinary":
                    require_same_results(case, arguments)
                samplers |= {(name, kind): sampler(call, arguments) for name, call in case.candidates.items()}
            timings = take_turns(samplers, seconds=0.1 if quick else 1.5, rounds=3 if quick else 7, guard=guard)
            yield ValuesRow(case.op, case.shape, dtype, timings)
