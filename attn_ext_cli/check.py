"""`attn-ext check`: every op and both models against the reference, on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from attn_ext_cli.common import Threads, UserError, command, console, set_threads


@command
def check(
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend. May be given several times.")] = None,
    threads: Threads = None,
) -> int:
    """Compare each op and both models with the reference; exit status 1 if one is off."""
    set_threads(threads)
    from attn_ext import check as checks

    out = console()
    try:
        with out.status("checking"):  # (shows on a terminal only)
            results = list(checks.run(backend))
    except ValueError as error:
        raise UserError(str(error)) from error
    out.print("largest error ≤ what is allowed, as shares of the result's largest value")
    # float64 has a table of its own: four dtypes side by side are wider than a terminal.
    for name in dict.fromkeys(r.backend for r in results):
        mine = [r for r in results if r.backend == name]
        for part in ([r for r in mine if r.dtype != "float64"], [r for r in mine if r.dtype == "float64"]):
            if part:
                _print_table(out, name, part)
    failed = [r for r in results if not r.ok]
    for r in failed:
        out.print(f"FAILED: {r.name}, {r.dtype}, {r.backend}: {_comparison(r)} {r.problem}", markup=False)
    out.print(f"{len(results)} checks, {len(failed)} failed" if failed else f"{len(results)} checks, all ok")
    return 1 if failed else 0


def _print_table(out, backend: str, results: list) -> None:
    from rich.table import Table
    from rich.text import Text

    dtypes = list(dict.fromkeys(r.dtype for r in results))
    cells = {(r.name, r.dtype): r for r in results}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in (f"\n{backend}", *(f"\n{dtype}" for dtype in dtypes)):
        table.add_column(column, no_wrap=True)
    for name in dict.fromkeys(r.name for r in results):
        row = [cells[name, dtype] for dtype in dtypes]
        table.add_row(name, *(Text(_comparison(r), style="green" if r.ok else "bold red") for r in row))
    out.print(table)


def _comparison(result) -> str:
    """'1.7e-7≤2.3e-6 ok'"""
    error, allowed = (f"{x:.1e}".replace("e-0", "e-") for x in (result.error, result.allowed))
    return f"{error}≤{allowed} ok" if result.ok else f"{error}>{allowed} FAILED"
