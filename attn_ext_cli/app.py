"""The command table. What a command needs (torch included) is imported only when it runs."""

from __future__ import annotations

import typer

from attn_ext_cli.bench import bench
from attn_ext_cli.check import check
from attn_ext_cli.explain import explain
from attn_ext_cli.generate import generate
from attn_ext_cli.info import info

app = typer.Typer(
    name="attn-ext",
    help="Exact attention for GPT-style models: generate text, look inside a layer, check and time this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for function in (generate, explain, info, check, bench):
    app.command()(function)
