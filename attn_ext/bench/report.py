"""The results as data and as Markdown: the tables of docs/performance.md are printed, not typed.

attn-ext bench --json results.json
python -m attn_ext.bench.report results.json                       # prints the tables
python -m attn_ext.bench.report results.json docs/performance.md   # puts them between the page's two markers
"""

from __future__ import annotations

import datetime
import json
import platform
import sys
from pathlib import Path

import torch

from attn_ext.bench import Row
from attn_ext.bench.machine import Limits
from attn_ext.bench.timer import last_level_cache

__all__ = ["describe_machine", "markdown", "row_cells"]

OP_COLUMNS = ("op", "shape", "dtype", "data MB", "attn_ext ms", "torch ms", "x torch", "rate", "limit", "rejected")
MODEL_COLUMNS = ("model", "dtype", "seqs", "engine", "decode ms", "x ours", "prefill ms", "x ours", "same tokens")
VALUES_COLUMNS = ("op", "shape", "dtype", "ordinary ms", "subnormal", "NaN", "inf", "1 % NaN")
GROWTH_COLUMNS = ("curve", "variable", "sizes", "expected", "attn_ext", "torch", "verdict")


def describe_machine(limits: Limits, cpu: str) -> dict:
    """What the numbers hold for, as plain values."""
    import attn_ext

    return {
        "date": datetime.date.today().isoformat(), "cpu": cpu, "threads": torch.get_num_threads(),
        "attn_ext": attn_ext.__version__, "backend": attn_ext.active_backend(), "torch": torch.__version__,
        "python": platform.python_version(), "last_level_cache": last_level_cache(),
        "bytes_per_s": limits.bytes_per_s,
        "flops_per_s": {str(d).removeprefix("torch."): rate for d, rate in limits.flops_per_s.items()},
        "instructions": {str(d).removeprefix("torch."): name for d, name in limits.instructions.items()},
    }  # fmt: skip


def machine_lines(machine: dict) -> list[str]:
    """Two lines about the machine and its limits."""
    rates = ", ".join(f"{rate / 1e9:.1f} GB/s {kind}" for kind, rate in machine["bytes_per_s"].items())
    peaks = ", ".join(
        f"{rate / 1e9:.0f} GFLOP/s {dtype} ({machine['instructions'][dtype]})"
        for dtype, rate in machine["flops_per_s"].items()
    )
    return [
        f"{machine['cpu']}, threads: {machine['threads']}, backend {machine['backend']}, torch {machine['torch']}, "
        f"{machine['date']}",
        f"measured limits: {rates}; {peaks}; last-level cache {machine['last_level_cache'] >> 20} MB",
    ]


def milliseconds(timing: dict) -> str:
    """'0.415 ±2%': the median, and half the distance between the quartiles."""
    half = (timing["p75_s"] - timing["p25_s"]) / 2 / timing["median_s"]
    ms = 1e3 * timing["median_s"]
    return (f"{ms:.0f}" if ms >= 1000 else f"{ms:#.3g}".rstrip(".")) + f" ±{half:.0%}"


def row_cells(row: dict, machine: dict) -> list[list[str]]:
    """The cells of OP_COLUMNS of one row of the JSON; a line more for every candidate beyond torch."""
    ours = row["timings"]["attn_ext"]
    seconds = ours["median_s"]
    rate = f"{row['bytes'] / seconds / 1e9:.1f} GB/s"
    if row["bound"] == "flops":
        rate = f"{row['flops'] / seconds / 1e9:.0f} GFLOP/s"
    megabytes = row["bytes"] / 1e6
    data = f"{megabytes:.0f}" if megabytes >= 10 else f"{megabytes:.2g}"
    data += "*" if row["bytes"] > machine["last_level_cache"] else " "
    rejected = f"{ours['rejected'] / (ours['calls'] + ours['rejected']):.0%}"
    rejected += f" ({ours['disturbed']})" if ours.get("disturbed") else ""
    lines = []
    for name, ratio in row["ratio"].items():
        low, high = row["ratio_quartiles"][name]
        theirs = milliseconds(row["timings"][name])
        cells = [theirs, f"{ratio:.2f} ±{(high - low) / 2 / ratio:.0%}"]
        if name == "torch":
            start = [row["op"], row["shape"], row["dtype"], data, milliseconds(ours)]
            lines.append([*start, *cells, rate, f"{row['share_of_limit']:.0%}", rejected])
        else:
            lines.append(["", f"  beside {name}", "", "", "", *cells, "", "", ""])
    return lines


def model_cells(row: dict) -> list[list[str]]:
    """The cells of MODEL_COLUMNS of one row, a line per engine."""
    lines = []
    for name, engine in row["engines"].items():
        first = name == "attn_ext"
        ratio = row["ratio"].get(name, {})
        lines.append(
            [row["model"] if first else "", row["dtype"] if first else "", str(row["sequences"]) if first else "", name,
             milliseconds(engine["decode"]), f"{ratio['decode']:.2f}" if ratio else "",
             milliseconds(engine["prefill"]), f"{ratio['prefill']:.2f}" if ratio else "",
             "" if first else f"{engine['agreement']:.0%}"]
        )  # fmt: skip
    return lines


def growth_cells(curve: dict) -> list[str]:
    if "skipped" in curve:
        return [curve["name"], "", "", "", "", "", f"skipped: {curve['skipped']}"]
    exponents = curve["exponent"]
    return [
        curve["name"], curve["variable"], f"{curve['sizes'][0]} to {curve['sizes'][-1]}",
        f"{curve['expected_exponent']:g}", f"{exponents['attn_ext']:.2f}", f"{exponents['torch']:.2f}",
        curve["verdict"],
    ]  # fmt: skip


def values_cells(row: dict) -> list[str]:
    """The cells of VALUES_COLUMNS of one row: our time over the ordinary one, * above the limit, and (torch's)."""

    def shown(kind: str) -> str:
        ours, theirs = (
            f"{r:.2f}" if r < 10 else f"{r:.0f}" for r in (row["ratio"][c][kind] for c in ("attn_ext", "torch"))
        )
        return f"{ours}{'*' if kind in row['above_limit'] else ''} ({theirs})"

    ordinary = f"{1e3 * row['median_s']['attn_ext']['ordinary']:#.3g}"
    return [row["op"], row["shape"], row["dtype"], ordinary, *(shown(kind) for kind in VALUES_COLUMNS[4:])]


def memory_lines(memory: dict) -> list[str]:
    kv, peak = memory["kv"], memory["peak"]
    mb = {key: f"{kv[key] / 1e6:.0f} MB" for key in ("stored", "paged", "contiguous")}
    lines = [
        f"keys and values of {kv['sequences']} sequences, mean {kv['mean']:.0f} tokens, longest {kv['longest']}: "
        f"{mb['stored']} stored; paged (blocks of {kv['block_size']}) {mb['paged']}, "
        f"{1 - kv['stored'] / kv['paged']:.1%} wasted; "
        f"contiguous {mb['contiguous']}, {1 - kv['stored'] / kv['contiguous']:.1%} wasted"
    ]
    if isinstance(peak, str):
        return [*lines, f"peak memory skipped: {peak}"]
    mb = {key: f"{value / 1e6:.0f} MB" for key, value in peak.items()}
    return [
        *lines,
        f"SmolLM2 in bfloat16, resident memory of the process: {mb['imported']} before; {mb['loaded']} with the model, "
        f"whose weights are {mb['weights']}; at most {mb['load_peak']} while it was loaded, {mb['engine_peak']} while "
        f"the engine packed the weights, {mb['run_peak']} while it ran",
    ]


def model_skips(models: list[dict]) -> dict[str, list[str]]:
    """Reason -> where: what peers said that did not run."""
    found: dict[str, list[str]] = {}
    for row in models:
        for name, reason in row["skipped"].items():
            where = found.setdefault(f"{name}: {reason}", [])
            if (place := f"{row['model']} {row['dtype']}") not in where:
                where.append(place)
    return found


def results(
    machine: dict, rows: list[Row], limits: Limits, models=(), curves=(), memory: dict | None = None, values=()
) -> dict:
    """Everything measured, as plain data."""
    data = {"machine": machine, "rows": [row.as_dict(limits) for row in rows]}
    data |= {"models": [row.as_dict() for row in models], "growth": [curve.as_dict() for curve in curves]}
    data |= {"values": [row.as_dict() for row in values]}
    return data | ({"memory": memory} if memory else {})


def markdown(data: dict) -> str:
    """The tables of `results`."""
    machine = data["machine"]
    parts = ["\n".join(machine_lines(machine))]
    if data["rows"]:
        parts.append(_table(OP_COLUMNS, [cells for row in data["rows"] for cells in row_cells(row, machine)], text=3))
    if data["models"]:
        parts.append(_table(MODEL_COLUMNS, [cells for row in data["models"] for cells in model_cells(row)], text=4))
        versions = sorted({v for row in data["models"] for v in row["versions"].values()})
        skips = [f"skipped {where}: {what}" for what, where in _skips(data["models"])]
        parts.append("\n".join(f"* {line}" for line in versions + skips))
    if data["growth"]:
        parts.append(_table(GROWTH_COLUMNS, [growth_cells(curve) for curve in data["growth"]], text=3))
    if data["values"]:
        parts.append(_table(VALUES_COLUMNS, [values_cells(row) for row in data["values"]], text=3))
    if "memory" in data:
        parts.append("\n".join(f"* {line}" for line in memory_lines(data["memory"])))
    return "\n\n".join(parts) + "\n"


def _skips(models: list[dict]) -> list[tuple[str, str]]:
    return [(what, ", ".join(where)) for what, where in model_skips(models).items()]


def _table(columns: tuple[str, ...], lines: list[list[str]], text: int) -> str:
    """Markdown; the first `text` columns are words, the others numbers."""
    rule = ["---" if i < text else "---:" for i in range(len(columns))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [list(columns), rule, *lines])


BEGIN, END = "<!-- begin: tables of attn-ext bench -->\n", "<!-- end: tables of attn-ext bench -->\n"


def insert(page: str, tables: str) -> str:
    """`page` with `tables` between its markers, in place of what is there.

    >>> insert(f"# Page\\n{BEGIN}old\\n{END}text", "new\\n") == f"# Page\\n{BEGIN}\\nnew\\n\\n{END}text"
    True
    """
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{tables}\n{END}{rest.split(END)[1]}"


def main(file: str, page: str | None = None) -> None:
    tables = markdown(json.loads(Path(file).read_text(encoding="utf-8")))
    if page is None:
        print(tables, end="")
    else:
        path = Path(page)
        path.write_text(insert(path.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
