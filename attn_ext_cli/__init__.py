"""The command line: `attn-ext generate | explain | info | check | bench`. One file per command.

A package of its own, beside attn_ext: importing attn_ext loads torch and the kernels, which takes a second and may
fail. A command does it when it runs, so that help is quick and whatever is missing becomes one line.
"""

from __future__ import annotations

import os
import shutil
import sys

__all__ = ["main"]

MIN_COLUMNS = 40  # tables and text heat maps have no layout for less


def main() -> None:
    """Run the command line with the process's arguments, then exit.

    Exit status: 0 done; 1 a failed check, or an input or output that cannot be used (one line says which and why);
    2 a wrong option; 130 interrupted.
    """
    if sys.stderr is None:  # closed by the caller, as stdout and stdin may be
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        sys.exit("attn-ext: the standard output is closed")
    columns = shutil.get_terminal_size().columns
    if columns < MIN_COLUMNS or "COLUMNS" in os.environ:
        os.environ["COLUMNS"] = str(max(columns, MIN_COLUMNS))
    from attn_ext_cli.app import app

    try:
        app()
    except OSError as error:  # outside of a command: help that cannot be written
        sys.exit(f"attn-ext: {error}")
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # nobody reads it, or no space: Python would complain once more when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
