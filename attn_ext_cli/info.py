"""`attn-ext info`: what is installed, and what it can use on this machine."""

from __future__ import annotations

import platform

from attn_ext_cli.common import command, console, cpu_name


@command
def info() -> None:
    """Show version, build, torch, CPU, backends and threads. Paste it into a bug report."""
    from rich.table import Table

    import attn_ext

    build = attn_ext.build_info()
    active = build["backend"]
    rows = {
        "attn_ext": f"{build['version']}, built by {build['compiler']} against torch {build['torch_built']}",
        "CUDA": "in this build" if build["cuda"] else "not in this build",
        "torch": build["torch_running"],
        "python": f"{platform.python_version()} on {platform.platform()}",
        "CPU": cpu_name(),
        "threads": build["threads"],
        "backends": ", ".join(f"{name} (active)" if name == active else name for name in build["backends"]),
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, str(value))
    console().print(table)
