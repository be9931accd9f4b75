"""What the commands share: option types, one-line errors, consoles, loading a model."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Model", "OptionalDtype", "Threads", "UserError", "command", "console", "cpu_name", "load", "set_threads"]

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="smollm2, a checkpoint's path (folder, .pt, .gguf) or a Hugging Face name."),
]
OptionalDtype = Annotated[
    str | None, typer.Option("--dtype", help="float32, bfloat16 or float16. Default: the checkpoint's choice.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: what torch chooses.")]


class UserError(Exception):
    """Something the user can mend: printed as one line, exit status 1, no traceback."""


def command(function: Callable[..., int | None]) -> Callable[..., None]:
    """Make `function` a command: its return value is the exit status, and its ends are clean ones."""

    @functools.wraps(function)
    def wrapper(**options) -> None:
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a letter must not stop the others
        try:
            status = function(**options) or 0
            sys.stdout.flush()
        except KeyboardInterrupt:
            status = 130
        except BrokenPipeError:  # the reader (head, less) has seen enough
            status = 141
        except (UserError, ImportError, OSError) as error:  # attn_ext cannot be imported, the output's disk is full
            message = _one_line(error).removeprefix(f"{function.__name__}: ")
            print(f"attn-ext {function.__name__}: {message}", file=sys.stderr)
            status = 1
        raise typer.Exit(status)

    return wrapper


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def console(*, stderr: bool = False, width: int = 110) -> Console:
    """A rich console: colours on a terminal, plain text of a fixed width in a pipe or file."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else width
    return Console(stderr=stderr, width=width, highlight=False)


def set_threads(threads: int | None) -> None:
    """Use so many CPU threads, where the user said how many."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def cpu_name() -> str:
    """The processor's name as the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def load(model: str, dtype: str | None):
    """-> (model, tokenizer) of a name or path; anything wrong with either becomes one line."""
    import torch

    from attn_ext.loaders import LoadError, load_model

    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype is not None and dtype not in names:
        raise UserError(f"--dtype must be one of {', '.join(names)}, got {dtype!r}")
    try:
        network, tokenizer = load_model(model, **({} if dtype is None else {"dtype": names[dtype]}))
    except LoadError as error:
        raise UserError(str(error)) from error
    if tokenizer is None:
        raise UserError(f"{model}: no tokenizer; put the tokenizer.json it was trained with beside it")
    return network, tokenizer
