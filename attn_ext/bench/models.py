"""Whole models: a step of decode and the reading of a prompt, by our engine and by the peers that are installed.

Every engine runs in a process of its own (peers/worker.py) on the same weights, gets the same prompts in turn, and
decodes greedily; how far its tokens are ours is part of the result.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from attn_ext.bench.directories import MODELS, model_directory
from attn_ext.bench.peers import Unavailable, Worker
from attn_ext.bench.timer import Guard, Timing, quartiles

__all__ = ["EngineFailed", "ModelRow", "compare_models"]

PROMPT, SEQUENCES = 512, (1, 8)  # a quick run: one sequence


class EngineFailed(RuntimeError):
    """Our own engine does not run, or one ended in the middle."""


@dataclass
class EngineTimes:
    """What one engine took for one model, dtype and number of sequences. Seconds."""

    decode: Timing  # one sample is the median step of one call
    prefill: Timing
    agreement: float  # share of the tokens that are ours, up to the first that is not, over all sequences

    def as_dict(self) -> dict:
        return {
            name: {"median_s": t.median, "p25_s": t.spread[0], "p75_s": t.spread[1],
                   "samples": len(t.seconds), "rejected": t.rejected, "disturbed": t.disturbed}
            for name, t in (("decode", self.decode), ("prefill", self.prefill))
        } | {"agreement": self.agreement}  # fmt: skip


@dataclass
class ModelRow:
    """One model in one dtype with so many sequences; `engines` begins with "attn_ext"."""

    model: str
    dtype: torch.dtype
    sequences: int
    engines: dict[str, EngineTimes]
    versions: dict[str, str]
    skipped: dict[str, str] = field(default_factory=dict)  # peer -> why it is not here

    def ratio(self, name: str, what: str) -> tuple[float, tuple[float, float]]:
        """A peer's time over ours for "decode" or "prefill", calls that were neighbours: median and quartiles."""
        theirs, ours = (getattr(self.engines[n], what).seconds for n in (name, "attn_ext"))
        ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
        return statistics.median(ratios), quartiles(ratios)

    def as_dict(self) -> dict:
        others = [name for name in self.engines if name != "attn_ext"]
        return {
            "model": self.model, "dtype": str(self.dtype).removeprefix("torch."), "sequences": self.sequences,
            "prompt": PROMPT, "engines": {name: e.as_dict() for name, e in self.engines.items()},
            "ratio": {n: {what: self.ratio(n, what)[0] for what in ("decode", "prefill")} for n in others},
            "versions": self.versions, "skipped": self.skipped,
        }  # fmt: skip


def compare_models(
    peers: dict[str, str],
    *,
    quick: bool = False,
    threads: int,
    guard: Guard,
    say: Callable[[str], None] = lambda text: None,
    log: Path | None = None,
) -> Iterator[ModelRow]:
    """Measure every model in bfloat16 and float32, a row per number of sequences; `quick`: SmolLM2, bfloat16, one.

    peers: engine -> the Python interpreter that has its packages. `say` is told what is going on; `log` gets what the
    engines print.
    """
    with tempfile.TemporaryDirectory(prefix="attn_ext_bench-") as scratch:
        log = log or Path(scratch) / "engines.log"
        for model in ("smollm2",) if quick else MODELS:
            for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float32):
                say(f"{model} {dtype}: writing the weights")
                directory = model_directory(model, dtype, Path(scratch))
                yield from _compare(model, directory, dtype, peers, quick, threads, guard, say, log)


def _compare(model, directory, dtype, peers, quick, threads, guard, say, log) -> Iterator[ModelRow]:
    new, sequences = (9, SEQUENCES[:1]) if quick else (17, SEQUENCES)
    options = {"threads": threads, "max_seqs": max(sequences), "max_len": PROMPT + 2 * new, "log": log}
    vocab = 49152 if model == "smollm2" else 50257
    draw = random.Random(0)

    def prompts(count: int) -> list[list[int]]:
        return [[draw.randrange(vocab) for _ in range(PROMPT)] for _ in range(count)]

    with ExitStack() as open_workers:
        workers, skipped = {}, {}
        for name, python in {"attn_ext": None, **peers}.items():
            say(f"{model} {dtype}: starting {name}")
            try:
                arguments = options if python is None else options | {"python": python}
                worker = Worker(name, directory, str(dtype).removeprefix("torch."), **arguments)
                open_workers.callback(worker.close)
                for count in sequences:  # what is compiled or allocated first
                    worker.generate(prompts(count), 2)
                workers[name] = worker
            except Unavailable as error:
                if name == "attn_ext":
                    raise EngineFailed(f"bench: {model} {dtype}: {error}") from error
                skipped[name] = str(error)
        for count in sequences:
            rounds = 2 if quick else 5 if count == 1 else 3
            say(f"{model} {dtype}: {count} sequences, {len(workers)} engines in turn")
            yield ModelRow(
                model, dtype, count, _measure(workers, count, rounds, new, prompts, guard),
                {name: worker.version for name, worker in workers.items()}, skipped,
            )  # fmt: skip


def _measure(workers, count, rounds, new, prompts, guard, pause: float = 0.3) -> dict[str, EngineTimes]:
    """`rounds` rounds in which every engine gets the same prompts; disturbed ones are repeated, at most as often."""
    order, kept, taken, disturbed = list(workers), [], 0, 0
    while len(kept) < rounds and taken < 2 * rounds:
        batch, samples, before = prompts(count), {}, guard()
        calm = True
        for name in order:
            time.sleep(pause)  # threads of the engine before may still be spinning
            before = guard()
            try:
                tokens, seconds = workers[name].generate(batch, new)
            except Unavailable as error:
                raise EngineFailed(f"bench: {name}: {error}") from error
            calm = calm and guard.accepts(max(before, guard()))
            samples[name] = (tokens, seconds[0], statistics.median(seconds[1:]))
        order.reverse()
        taken += 1
        if calm or taken > 2 * rounds - (rounds - len(kept)):  # no turns left to wait for a calm one
            kept.append(samples)
            disturbed += not calm
    return {
        name: EngineTimes(
            decode=Timing([round[name][2] for round in kept], taken, disturbed),
            prefill=Timing([round[name][1] for round in kept], taken, disturbed),
            agreement=statistics.mean(_agreement(round["attn_ext"][0], round[name][0]) for round in kept),
        )
        for name in workers
    }


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens before the first difference.

    >>> _agreement([[1, 2, 3, 4]], [[1, 2, 9, 4]])
    0.5
    """
    equal = 0
    for a, b in zip(ours, theirs, strict=True):
        equal += next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
    return equal / sum(map(len, ours))
