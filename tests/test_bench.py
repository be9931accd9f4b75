"""The benchmark: its timer, a disturbed machine, missing engines, its reports. Nothing here depends on speed."""

import json
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from attn_ext import _C, bench
from attn_ext.bench import (
    Case,
    Guard,
    Timing,
    WrongResult,
    alternate,
    growth,
    machine,
    memory,
    models,
    report,
    timer,
    values,
)
from attn_ext.bench.directories import _gpt2, _write
from attn_ext.bench.peers import PEERS, Unavailable, Worker


class FakeGuard:
    """Takes the times it is told, then 1."""

    def __init__(self, *times):
        self.times, self.best = list(times), 1.0

    def __call__(self):
        return self.times.pop(0) if self.times else 1.0

    def accepts(self, taken):
        return taken <= 1.25 * self.best


def copy_case(**options) -> Case:
    both = {"attn_ext": lambda x: x.clone(), "torch": lambda x: x * 1}
    make = options.pop("make", lambda: (torch.randn(8),))
    return Case("copy", "8", torch.float32, make, options.pop("candidates", both), bytes=64, flops=8, **options)


# ----------------------------------------------------------------------------------------------------------- the timer


def test_rounds_beside_a_slow_guard_do_not_count():
    # Guards: before the first sample, then after each. Two samples a round, so the second round is the disturbed one.
    guard = FakeGuard(1, 1, 1, 9, 1)
    samples = {"a": iter([1.0, 100.0, 3.0, 4.0]), "b": iter([2.0, 200.0, 6.0, 8.0])}
    candidates = {name: lambda i, name=name: next(samples[name]) for name in samples}
    timings = timer.take_turns(candidates, seconds=0, guard=guard, rounds=3)
    assert sorted(timings["a"].seconds) == [1.0, 3.0, 4.0] and timings["a"].rejected == 1
    pairs = zip(timings["a"].seconds, timings["b"].seconds, strict=True)
    assert all(b == 2 * a for a, b in pairs), "samples of one round belong together"


def test_a_machine_that_is_never_calm_still_ends():
    timings = timer.take_turns({"a": lambda i: 1.0}, seconds=0.0, guard=FakeGuard(*[9.0] * 1000), rounds=3)
    assert (len(timings["a"].seconds), timings["a"].disturbed) == (3, 3)


def test_calm_rounds_come_first_where_they_are_too_few():
    guard = FakeGuard(1, 1, *[9.0] * 1000)  # around the first sample only
    timings = timer.take_turns({"a": lambda i: float(i)}, seconds=0.0, guard=guard, rounds=3)
    assert timings["a"].seconds[0] == 0.0 and (timings["a"].disturbed, timings["a"].rejected) == (2, 6)


def test_candidates_take_turns_on_changing_inputs():
    seen = []
    candidates = {name: lambda i, name=name: seen.append((name, i)) or 1.0 for name in "ab"}
    timer.take_turns(candidates, seconds=0, guard=FakeGuard(), rounds=3)
    assert seen == [("a", 0), ("b", 1), ("b", 2), ("a", 3), ("a", 4), ("b", 5)]


def test_guard_sees_all_threads_work():
    guard = Guard(1e-4)
    assert guard.accepts(guard.best) and not guard.accepts(2 * guard.best)


def test_medians_and_quartiles():
    timing = Timing([3.0, 1.0, 2.0, 5.0, 4.0], taken=7)
    assert (timing.median, timing.spread, timing.rejected) == (3.0, (2.0, 4.0), 2)
    assert Timing([3.0], 1).spread == (3.0, 3.0)


def test_a_wrong_result_is_refused():
    case = copy_case(candidates={"attn_ext": lambda x: x, "torch": lambda x: x * 1.01})
    with pytest.raises(WrongResult, match="bench: copy 8 torch.float32: torch differs from attn_ext by 1.0e-02"):
        alternate(case, seconds=0.01, guard=FakeGuard())
    case = copy_case(candidates={"attn_ext": lambda x: x, "torch": lambda x: x * math.nan})
    with pytest.raises(WrongResult, match="by nan"):
        alternate(case, seconds=0.01, guard=FakeGuard())


def test_a_candidate_that_computes_something_else_is_not_compared():
    candidates = {"attn_ext": lambda x: x, "torch": lambda x: x.clone(), "zeros": torch.zeros_like}
    case = copy_case(candidates=candidates, unlike=frozenset({"zeros"}))
    assert set(alternate(case, seconds=0, guard=FakeGuard())) == set(candidates)


def test_inputs_are_more_than_the_cache_holds(monkeypatch):
    monkeypatch.setattr(timer, "last_level_cache", lambda: 1 << 14)
    pool = timer._pool(lambda: (torch.zeros(1024),))  # 4 KiB each
    assert len(pool) % 2 == 1 and len(pool) * 4096 >= 2 << 14
    assert len(timer._pool(lambda: (torch.zeros(1 << 16),))) == 1  # nothing of its beginning is left at its end


# ---------------------------------------------------------------------------------------------------------- the limits


@pytest.mark.parametrize("backend", _C.supported_backends())
def test_peak_probe_counts_what_it_does(backend):
    one, many = (_C.peak_probe(backend, False, n) for n in (1, 50))
    assert one > 0 and many == 50 * one
    assert _C.peak_probe(backend, True, 50) == 50 * _C.peak_probe(backend, True, 1)


def test_peak_probe_of_no_backend():
    with pytest.raises(ValueError, match="no backend 'abacus' on this machine"):
        _C.peak_probe("abacus", False, 1)


def test_limits_are_the_better_of_two():
    a = machine.Limits({"read": 1.0, "copy": 4.0}, {torch.float32: 10.0, torch.bfloat16: 20.0}, {})
    b = machine.Limits({"read": 2.0, "copy": 3.0}, {torch.float32: 5.0, torch.bfloat16: 40.0}, {})
    best = a.best_of(b)
    assert best.bytes_per_s == {"read": 2.0, "copy": 4.0} and best.flops_per_s[torch.bfloat16] == 40.0
    assert best.least_seconds(20, 20, torch.float32) == 10.0  # memory
    assert best.least_seconds(20, 400, torch.bfloat16, "copy") == 10.0  # arithmetic
    assert best.least_seconds(0, 20, torch.float16) == 2.0  # float16 is multiplied as float32


# -------------------------------------------------------------------------------------------------------------- growth


def curve(seconds, expected) -> growth.Curve:
    points = [(2**i, {"attn_ext": Timing([s], 1), "torch": Timing([2 * s], 1)}) for i, s in enumerate(seconds)]
    return growth.Curve("prefill", "title", "tokens T", expected, points)


def test_exponent_of_the_larger_half():
    # Fixed costs at first, quadratic at the end.
    found = curve([1.0, 1.0, 1.0, 1.0, 4.0, 16.0, 64.0], 2)
    assert found.exponent() == pytest.approx(2.0) and found.verdict() == "as expected"
    assert curve([1.0, 8.0, 64.0], 2).verdict() == "grows faster than it should"
    assert curve([1.0, 2.0, 4.0], 2).verdict() == "grows more slowly: fixed costs still show"
    assert curve([4.0, 2.0, 1.0], -1).verdict() == "as expected"


def test_plots_are_written(tmp_path):
    pytest.importorskip("matplotlib")
    curves = [curve([1.0, 4.0, 16.0], 2), growth.Curve("threads", "title", "threads", -1, skipped="one thread")]
    (path,) = growth.plot_growth(curves, tmp_path / "plots")
    assert path.name == "growth-prefill.png" and path.read_bytes().startswith(b"\x89PNG")


# -------------------------------------------------------------------------------------------------------------- values


def test_values_are_of_their_kind():
    for dtype in (torch.float32, torch.bfloat16):
        tensors = {kind: torch.randn(100, 40).to(dtype) for kind in values.KINDS}
        for kind, change in values.KINDS.items():
            change(tensors[kind])
        assert (tensors["ordinary"].abs() > 2.0**-126).all() and (tensors["subnormal"].abs() < 2.0**-126).all()
        assert (tensors["subnormal"] != 0).float().mean() > 0.95 and torch.isnan(tensors["NaN"]).all()
        assert torch.isposinf(tensors["inf"]).all() and 10 < torch.isnan(tensors["1 % NaN"]).sum() < 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_values_are_measured_on_the_same_problem(dtype):
    for case, which in values.cases(dtype):
        arguments = case.make()
        timer.require_same_results(case, arguments)
        assert all(arguments[i].dtype == dtype for i in which)


def test_values_take_turns(monkeypatch):
    one = next(values.cases(torch.float32))
    monkeypatch.setattr(values, "cases", lambda dtype: [one])
    rows = list(values.measure_values(quick=True, guard=FakeGuard()))
    assert [row.dtype for row in rows] == [torch.float32, torch.bfloat16]
    assert all(set(row.timings) == {(c, kind) for c in ("attn_ext", "torch") for kind in values.KINDS} for row in rows)


# -------------------------------------------------------------------------------------------------------------- memory


def test_kv_memory_of_mixed_lengths():
    kv = memory.kv_memory(sequences=16, longest=300, block_size=16)
    token = kv.contiguous // (16 * 300)
    assert token == 2 * 30 * 3 * 64 * 2  # K and V, layers, heads, head_dim, bytes
    assert kv.stored == round(kv.mean * 16) * token
    assert 0 <= kv.paged - kv.stored < 16 * 16 * token and kv.wasted(kv.paged) < kv.wasted(kv.contiguous)


# --------------------------------------------------------------------------------------------------- models and engines


@pytest.fixture(scope="module")
def tiny_gpt2(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "gpt2"
    config, tensors = _gpt2(n_layer=1, width=64, vocab=64, positions=32)
    _write(directory, config, {name: tensor.contiguous() for name, tensor in tensors.items()}, torch.float32)
    return directory


def start(name: str, directory: Path, **options) -> Worker:
    log = directory / f"{name}.log"
    return Worker(name, directory, "float32", threads=1, max_seqs=2, max_len=32, log=log, **options)


PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_our_engine_in_a_process_of_its_own(tiny_gpt2):
    from attn_ext.generate import Engine, SamplingParams
    from attn_ext.loaders import load_model

    worker = start("attn_ext", tiny_gpt2)
    try:
        tokens, seconds = worker.generate(PROMPTS, 4)
        assert worker.version.startswith("attn_ext ")
    finally:
        worker.close()
    engine = Engine(load_model(tiny_gpt2)[0], num_blocks=8)
    requests = [engine.submit(prompt, SamplingParams(max_new_tokens=4, temperature=0)) for prompt in PROMPTS]
    done = engine.run()
    assert tokens == [done[request].tokens for request in requests]
    assert len(seconds) == 4 and min(seconds) > 0


def test_a_missing_engine_says_so(tiny_gpt2, tmp_path):
    # A Python without any package: what a peer that is not installed looks like.
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(Unavailable, match="ModuleNotFoundError: No module named"):
        start("transformers", tiny_gpt2, python=str(bare))
    with pytest.raises(Unavailable, match="no such interpreter"):
        start("transformers", tiny_gpt2, python=str(tmp_path / "none"))


def test_every_peer_has_its_file():
    folder = Path(sys.modules["attn_ext.bench.peers"].__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "worker"}
    assert files == {"attn_ext", *PEERS}
    for name in files:
        assert re.search(r"^class Engine:\n", (folder / f"{name}.py").read_text(), re.M)


class FakeWorker:
    def __init__(self, step):
        self.step, self.version = step, "fake"

    def generate(self, prompts, n):
        return [[7] * n for _ in prompts], [10 * self.step] + [self.step] * (n - 1)


def fake_row(skipped=()) -> models.ModelRow:
    workers = {"attn_ext": FakeWorker(0.01), "vllm": FakeWorker(0.03)}
    engines = models._measure(workers, 2, 2, 5, lambda count: [[1]] * count, FakeGuard(), pause=0)
    versions = {name: worker.version for name, worker in workers.items()}
    return models.ModelRow("smollm2", torch.bfloat16, 2, engines, versions, dict(skipped))


def test_engines_take_turns():
    row = fake_row()
    assert row.ratio("vllm", "decode")[0] == pytest.approx(3.0) and row.ratio("vllm", "prefill")[0] == pytest.approx(
        3.0
    )
    assert row.engines["attn_ext"].prefill.median == pytest.approx(0.1) and row.engines["vllm"].agreement == 1.0


def test_a_disturbed_round_of_engines_is_repeated():
    guard = FakeGuard(1, 9)  # before and after the first engine of the first round
    engines = models._measure({"attn_ext": FakeWorker(0.01)}, 1, 2, 5, lambda count: [[1]], guard, pause=0)
    assert (len(engines["attn_ext"].decode.seconds), engines["attn_ext"].decode.rejected) == (2, 1)


# ------------------------------------------------------------------------------------------------------------- reports


def values_row(subnormal: float) -> values.ValuesRow:
    times = dict.fromkeys(values.KINDS, 0.001) | {"subnormal": subnormal}
    timings = {(c, kind): Timing([s] * 3, 3) for c in ("attn_ext", "torch") for kind, s in times.items()}
    timings["torch", "subnormal"] = Timing([0.05] * 3, 3)
    return values.ValuesRow("paged_attention", "B4 T512 H8/8 D64", torch.bfloat16, timings)


def some_results() -> dict:
    limits = machine.Limits(
        {"read": 1e10, "copy": 1e10}, {torch.float32: 1e11, torch.bfloat16: 2e11},
        {torch.float32: "avx2", torch.bfloat16: "avx2"},
    )  # fmt: skip
    case = copy_case(skipped={"flex": "no compiler"})
    timings = {"attn_ext": Timing([0.001] * 4, 5), "torch": Timing([0.002] * 4, 5), "clone": Timing([0.003] * 4, 5)}
    kv = memory.kv_memory(4, 64)
    return report.results(
        report.describe_machine(limits, "Abacus 1"), [bench.Row(case, timings)], limits,
        [fake_row({"llama_cpp": "not installed"})], [curve([1.0, 4.0, 16.0], 2)], memory.as_dict(kv, "no /proc"),
        [values_row(0.0012), values_row(0.1)],
    )  # fmt: skip


def test_milliseconds():
    def shown(seconds):
        return report.milliseconds({"median_s": seconds, "p25_s": 0.9 * seconds, "p75_s": 1.1 * seconds})

    assert [shown(s) for s in (0.00001234, 0.001, 0.4, 2.3456)] == ["0.0123 ±10%", "1.00 ±10%", "400 ±10%", "2346 ±10%"]


def test_report_as_json_and_markdown():
    data = json.loads(json.dumps(some_results()))
    row = data["rows"][0]
    assert row["ratio"] == pytest.approx({"torch": 2.0, "clone": 3.0}) and row["timings"]["torch"]["rejected"] == 1
    text = report.markdown(data)
    assert re.search(r"^\| copy \| 8 \| float32 \| 6\.4e-05  \| 1\.00 ±0% \| 2\.00 ±0% \| 2\.00 ±0% \|", text, re.M)
    assert "Abacus 1, threads:" in text and "| prefill | tokens T | 1 to 4 | 2 | 2.00 | 2.00 | as expected |" in text
    assert data["values"][1]["above_limit"] == ["subnormal"] and data["values"][0]["above_limit"] == []
    assert re.search(r"D64 \| bfloat16 \| 1\.00 \| 1\.20 \(50\) \| 1\.00 \(1\.00\) \|", text)
    assert re.search(r"D64 \| bfloat16 \| 1\.00 \| 100\* \(50\) \| 1\.00 \(1\.00\) \|", text)
    assert "skipped smollm2 bfloat16: llama_cpp: not installed" in text and "peak memory skipped: no /proc" in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):  # every line of a table has its columns
        assert len({line.count("|") for line in block.splitlines()}) == 1


def test_tables_fit_120_columns(capsys, monkeypatch):
    from attn_ext_cli.bench import _print

    monkeypatch.delenv("COLUMNS", raising=False)
    data = some_results()
    data["rows"][0] |= {"op": "paged_attention", "shape": "B1 H32 T2048 D128 causal", "dtype": "bfloat16"}
    _print(data)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120 and "…" not in out
    assert "skipped: flex: no compiler" in out and "skipped: llama_cpp: not installed (smollm2 bfloat16)" in out


def test_command(tmp_path):
    """One op, quickly, through the command: the results are right, and all three outputs are there."""
    command = [sys.executable, "-m", "attn_ext_cli", "bench", "--quick", "--op", "norm", "--threads", "1"]
    files = ["--json", str(tmp_path / "a.json"), "--markdown", str(tmp_path / "a.md")]
    result = subprocess.run(
        [*command, *files], capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "120"},
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0 and result.stderr == ""
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["machine"]["threads"] == 1 and data["machine"]["bytes_per_s"]["read"] > 1e8
    assert {(row["op"], row["dtype"]) for row in data["rows"]} >= {("rms_norm", "bfloat16"), ("layer_norm", "float32")}
    assert all(row["timings"]["attn_ext"]["calls"] >= 3 for row in data["rows"])
    assert "threads: 1," in result.stdout and re.search(r"^layer_norm +1024 x 768 +float32 ", result.stdout, re.M)
    assert (tmp_path / "a.md").read_text() == report.markdown(data)


def test_command_fails_on_a_wrong_result(tmp_path):
    code = """
        import sys, torch, attn_ext
        right = attn_ext.rms_norm
        attn_ext.rms_norm = lambda *arguments, **options: right(*arguments, **options) * 1.1
        sys.argv = ["attn-ext", "bench", "--quick", "--op", "norm", "--threads", "1"]
        from attn_ext_cli import main
        main()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.returncode == 1
    assert re.fullmatch(r"attn-ext bench: rms_norm .*: torch differs from attn_ext by .*\n", result.stderr)


def test_the_performance_page_takes_the_tables():
    page = (Path(__file__).parents[1] / "docs/performance.md").read_text(encoding="utf-8")
    changed = report.insert(page, "new tables\n")
    assert "new tables\n" in changed and report.insert(changed, "new tables\n") == changed
    assert changed.split(report.END)[1] == page.split(report.END)[1]
