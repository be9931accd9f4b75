"""`attn-ext bench`: the speed table."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from attn_ext_cli.common import Threads, UserError, command, console, cpu_name, set_threads

STUDIES = ("model", "growth", "memory", "values")


@command
def bench(
    op: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this: linear, norm, attention, paged_attention, masked_softmax; model, growth, memory, values. "
            "May be given several times. Default: all ops, and without --quick the models."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Under 40 s: results are checked, numbers less steady.")
    ] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Machine-readable, to a file, or - for stdout.")
    ] = None,
    markdown_file: Annotated[
        str | None, typer.Option("--markdown", metavar="FILE", help="The tables as Markdown, to a file, or -.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Growth curves as PNG files (implies --op growth).")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Engine to compare models with: transformers, vllm, openvino_genai, llama_cpp, ctranslate2, none, or "
            "NAME=PYTHON with the interpreter that has its packages. May be given several times. Default: all."
        ),
    ] = None,
    threads: Threads = None,
) -> None:
    """Time each op against torch and models against other engines: in turns, on fresh data, beside machine limits."""
    set_threads(threads)
    from attn_ext import bench as measure
    from attn_ext.bench.models import EngineFailed

    wanted = list(op or ())
    if plot is not None and "growth" not in wanted:
        wanted.append("growth")
    if not wanted:
        wanted = list(measure.OPS) + ([] if quick else ["model"])
    for name in wanted:
        if name not in (*measure.OPS, *STUDIES):
            raise UserError(f"op must be one of {', '.join((*measure.OPS, *STUDIES))}, got {name!r}")
    peers = _peers(peer)
    for name, target in (("--json", json_file), ("--markdown", markdown_file)):
        if target not in (None, "-"):
            _must_be_writable(name, Path(target))

    try:
        data, curves = _measure(wanted, peers, quick)
    except (measure.WrongResult, EngineFailed) as error:
        raise UserError(str(error)) from error
    if plot is not None:
        _plot(curves, plot)
    for target, text in ((json_file, lambda: json.dumps(data, indent=1) + "\n"), (markdown_file, lambda: _md(data))):
        if target == "-":
            sys.stdout.write(text())
        elif target is not None:
            Path(target).write_text(text(), encoding="utf-8")
    if "-" not in (json_file, markdown_file):
        _print(data)


def _must_be_writable(name: str, path: Path) -> None:
    """Asked before anything is measured: minutes of work would be lost otherwise."""
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UserError(f"{name} must be a file that can be written, got {path}: {error.strerror}") from error


def _measure(wanted: list[str], peers: dict[str, str], quick: bool) -> tuple[dict, list]:
    """Everything that is wanted -> the results as plain data, and the growth curves."""
    import torch

    from attn_ext import bench as measure
    from attn_ext.bench import report

    rows, models, curves, values, memory, seconds = [], [], [], [], None, 1.0 if quick else 4.0
    with torch.no_grad(), _status() as say:
        say("measuring this machine's limits")
        limits, guard = measure.measure_limits(seconds), measure.Guard()
        ops = [name for name in wanted if name in measure.OPS]
        for row in measure.run(ops, quick=quick, guard=guard) if ops else ():
            rows.append(row)
            say(f"{len(rows)} rows measured, last: {row.case.op} {row.case.shape}")
        if "model" in wanted:
            from attn_ext.bench.models import compare_models

            count = torch.get_num_threads()
            models += compare_models(peers, quick=quick, threads=count, guard=guard, say=say)
        if "growth" in wanted:
            from attn_ext.bench.growth import measure_growth

            say("growth")
            for curve in measure_growth(quick=quick):
                curves.append(curve)
                say(f"growth: {len(curves)} curves measured, last: {curve.name}")
        if "values" in wanted:
            from attn_ext.bench.values import measure_values

            say("values")
            for row in measure_values(quick=quick, guard=guard):
                values.append(row)
                say(f"values: {len(values)} rows measured, last: {row.op} {row.shape}")
        if "memory" in wanted:
            say("memory")
            memory = _memory(torch.get_num_threads())
        if ops:
            limits = limits.best_of(measure.measure_limits(seconds))
    described = report.describe_machine(limits, cpu_name())
    return report.results(described, rows, limits, models, curves, memory, values), curves


def _md(data: dict) -> str:
    from attn_ext.bench.report import markdown

    return markdown(data)


def _peers(choices: list[str] | None) -> dict[str, str]:
    """Engine -> Python interpreter."""
    from attn_ext.bench.peers import PEERS

    peers = {}
    for choice in list(PEERS) if choices is None else choices:
        name, _, python = choice.partition("=")
        if choice != "none" and name not in PEERS:
            raise UserError(f"peer must be one of {', '.join(PEERS)} or none, got {name!r}")
        if choice != "none":
            peers[name] = str(Path(python).expanduser()) if python else sys.executable
    return peers


def _memory(threads: int) -> dict:
    from attn_ext.bench import memory

    try:
        peak = memory.peak_memory(threads)
    except OSError as error:
        peak = str(error)
    return memory.as_dict(memory.kv_memory(), peak)


def _plot(curves: list, folder: Path) -> None:
    from attn_ext.bench.growth import plot_growth

    out = console(stderr=True)
    try:
        for path in plot_growth(curves, folder):
            out.print(f"wrote {path}", soft_wrap=True)
    except ModuleNotFoundError as error:
        out.print(f"plots skipped: {error} (pip install 'attn_ext[plot]')", soft_wrap=True)


@contextmanager
def _status():
    """A line on a terminal that says what is going on; nothing elsewhere."""
    with console(stderr=True).status("starting") as status:
        yield status.update


# ------------------------------------------------------------------------------------------------------- the tables


def _print(data: dict) -> None:
    from attn_ext.bench import report

    out, machine = console(width=120), data["machine"]
    for line in report.machine_lines(machine):
        out.print(line)
    if data["rows"]:
        lines = [cells for row in data["rows"] for cells in report.row_cells(row, machine)]
        out.print()
        out.print(_table(report.OP_COLUMNS, lines, words=3))
        out.print(
            "data: what a call must read and write; * more than the last-level cache holds.  ms: median ± half the"
            " distance\nbetween the quartiles.  x torch: its time over ours, calls side by side.  limit: the least time"
            " that the measured\nlimits allow, over ours.  rejected: share of rounds during which the machine was"
            "\ndisturbed; in brackets: such rounds that count, for want of others.",
            style="dim",
        )
        for name, reason in {pair for row in data["rows"] for pair in row["skipped"].items()}:
            out.print(f"skipped: {name}: {reason}", style="dim")
    if data["models"]:
        lines = [cells for row in data["models"] for cells in report.model_cells(row)]
        out.print()
        out.print(_table(report.MODEL_COLUMNS, lines, words=4))
        out.print(
            "prompts of 512 random tokens.  decode: one step.  x ours: the peer's time over ours.  same tokens: share"
            " of the\ngreedy tokens before the first that differs from ours.",
            style="dim",
        )
        for version in dict.fromkeys(v for row in data["models"] for v in row["versions"].values()):
            out.print(version, style="dim")
        for what, where in report.model_skips(data["models"]).items():
            out.print(f"skipped: {what} ({', '.join(where)})", style="dim")
    if data["growth"]:
        out.print()
        out.print(_table(report.GROWTH_COLUMNS, [report.growth_cells(curve) for curve in data["growth"]], words=3))
        out.print("exponent p of time = c size^p over the larger half of the sizes", style="dim")
    if data["values"]:
        out.print()
        out.print(_table(report.VALUES_COLUMNS, [report.values_cells(row) for row in data["values"]], words=3))
        out.print(
            "time with such inputs over the time with ordinary ones, in turns; in parentheses: torch's.  *: above 3,"
            "\nagainst the rule.",
            style="dim",
        )
    if "memory" in data:
        out.print()
        for line in report.memory_lines(data["memory"]):
            out.print(line)


def _table(columns: tuple[str, ...], lines: list[list[str]], words: int):
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < words or name == "verdict" else "right", no_wrap=name != "verdict")
    for cells in lines:
        table.add_row(*cells)
    return table
