"""`attn-ext info`: what is installed, and what it can use on this machine."""

from __future__ import annotations

import platform

from attn_ext.cli.common import command, console, cpu_name, prepare


@command
def info() -> None:
    """Show version, build, torch, CPU, backends and threads. Paste it into a bug report."""
    prepare()
    import torch
    from rich.table import Table

    import attn_ext

    build = dict(attn_ext.build_info())
    usable = list(attn_ext.backends())
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in {
        "python": platform.python_version(),
        "torch running": torch.__version__,
        "CPU": f"{cpu_name()}, {torch.get_num_threads()} threads in use",
        "backends usable": ", ".join(usable),
        **build,
    }.items():
        table.add_row(name.replace("_", " "), str(value))
    console().print(table)
