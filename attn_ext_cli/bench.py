"""`attn-ext bench`: the speed table."""

from __future__ import annotations

import json
import platform
import sys
from typing import Annotated

import typer

from attn_ext_cli.common import Threads, UserError, command, console, cpu_name, set_threads


@command
def bench(
    op: Annotated[list[str] | None, typer.Option(help="Only this op. May be given several times.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Under 30 s, with less steady numbers.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, on stdout.")] = False,
    threads: Threads = None,
) -> None:
    """Time each op against torch on this machine: medians in turn on fresh data, and the machine's own limits."""
    set_threads(threads)
    import torch

    import attn_ext
    from attn_ext import bench as measure

    try:
        measured = measure.run(op, quick=quick)
    except ValueError as error:
        raise UserError(str(error)) from error
    rows, seconds = [], 1.0 if quick else 4.0
    with torch.no_grad(), console(stderr=True).status("measuring this machine's limits") as status:
        limits = measure.measure_limits(seconds)
        for row in measured:
            rows.append(row)
            status.update(f"{len(rows)} rows measured, last: {row.case.op} {row.case.shape}")
        limits = limits.best_of(measure.measure_limits(seconds))
    machine = {
        "attn_ext": attn_ext.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "backend": attn_ext.active_backend(),
        "read_bytes_per_s": limits.read_bytes_per_s,
        "flops_per_s": {str(d).removeprefix("torch."): rate for d, rate in limits.flops_per_s.items()},
    }
    if as_json:
        json.dump({"machine": machine, "rows": [row.as_dict(limits) for row in rows]}, sys.stdout, indent=1)
        print()
        return
    _print_table(machine, rows, limits)


def _print_table(machine: dict, rows: list, limits) -> None:
    from rich.table import Table

    out = console()
    out.print(
        f"{machine['cpu']}, threads: {machine['threads']}, backend {machine['backend']}, torch {machine['torch']}"
    )
    rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s {dtype}" for dtype, rate in machine["flops_per_s"].items())
    out.print(f"measured limits: {machine['read_bytes_per_s'] / 1e9:.1f} GB/s read, {rates} (best matrix product)\n")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("op", "shape", "dtype", "attn_ext ms", "torch ms", "x torch", "rate", "limit"):
        table.add_column(name, justify="left" if name in ("op", "shape", "dtype") else "right", no_wrap=name != "shape")
    for row in rows:
        case, ours = row.case, row.ours.median
        by_memory = case.bytes / limits.read_bytes_per_s > case.flops / limits.flops_per_s[case.dtype]
        rate = f"{case.bytes / ours / 1e9:.1f} GB/s" if by_memory else f"{case.flops / ours / 1e9:.0f} GFLOP/s"
        table.add_row(
            case.op, case.shape, str(case.dtype).removeprefix("torch."), _ms(row.ours), _ms(row.torch),
            f"{row.ratio:.2f}", rate, f"{row.share_of_limit(limits):.0%}",
        )  # fmt: skip
    out.print(table)
    out.print(
        "\nms: median ± half the distance between the quartiles.  x torch: torch's time over ours."
        "\nlimit: the least time that the measured limits allow, over ours.",
        style="dim",
    )


def _ms(timing) -> str:
    """'0.415 ±2%'"""
    low, high = timing.spread
    return f"{1e3 * timing.median:#.3g}".rstrip(".") + f" ±{(high - low) / 2 / timing.median:.0%}"
