"""The command line: `attn-ext generate | explain | info | check | bench`. One file per command."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line with the process's arguments, then exit.

    Exit status: 0 done; 1 a failed check, or an input that cannot be used (one line says which and why);
    2 a wrong option; 130 interrupted.
    """
    from attn_ext.cli.app import app

    app()
