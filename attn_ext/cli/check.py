"""`attn-ext check`: every op and both models against the reference, on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from attn_ext.cli.common import Threads, UserError, command, console, prepare


@command
def check(
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend. May be given several times.")] = None,
    threads: Threads = None,
) -> int:
    """Compare each op and both models with the reference; exit status 1 if one is off."""
    prepare(threads)
    from rich.table import Table

    from attn_ext import check as checks

    out = console()
    try:
        results = []
        with out.status("checking"):  # (prints nothing where there is no terminal)
            for result in checks.run(backend):
                results.append(result)
    except ValueError as error:
        raise UserError(str(error)) from error

    table = Table(title="largest error against the float64 reference, as a share of the largest value")
    for name in ("op", "dtype", "backend", "error", "allowed", ""):
        table.add_column(name, justify="right" if name in ("error", "allowed") else "left")
    for r in results:
        mark = "ok" if r.ok else "[bold red]FAILED"
        table.add_row(r.name, r.dtype, r.backend, f"{r.error:.1e}", f"{r.allowed:.1e}", mark)
    out.print(table)
    failed = sum(not r.ok for r in results)
    out.print(f"{len(results)} checks, " + (f"[bold red]{failed} failed" if failed else "all ok"))
    return 1 if failed else 0
