"""Imports torch, then the compiled module; whatever is missing is one clear line."""

import importlib
import re
import sys
from pathlib import Path

MIN_TORCH = (2, 11)


def _built_with() -> str:
    """The torch of the build, as that wrote it down: the compiled module cannot say so to an older torch."""
    try:
        return f" (built with {importlib.import_module('attn_ext._built').TORCH})"
    except ModuleNotFoundError:  # in the source folder
        return ""


def _import_torch() -> None:
    needs = f"attn_ext needs torch >= {MIN_TORCH[0]}.{MIN_TORCH[1]}"
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise  # torch is there, and misses something of its own
        raise ImportError(f"{needs}, and no torch is installed: pip install torch") from None
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is None or (int(found[1]), int(found[2])) < MIN_TORCH:
        raise ImportError(f"{needs}{_built_with()}, got torch {torch.__version__}: pip install --upgrade torch")


def _import_compiled():
    try:
        return importlib.import_module("attn_ext._C")
    except ModuleNotFoundError as error:
        if error.name != "attn_ext._C":
            raise
    running = f"{sys.version_info.major}.{sys.version_info.minor}{sys.abiflags}"
    files = sorted(file.name for file in Path(__file__).parent.glob("_C.*"))
    built = [f"{m[1]}.{m[2]}" for m in (re.match(r"_C\.cpython-(\d)(\d+t?)-", name) for name in files) if m]
    if built:
        raise ImportError(
            f"attn_ext is built for Python {', '.join(built)} and this is Python {running}: "
            "install it with this Python's own pip"
        )
    # Usual cause: Python started in a clone finds ./attn_ext before the installed package.
    raise ImportError(
        f"attn_ext in {Path(__file__).parent} has no compiled module: if this is its source folder, "
        "start Python elsewhere or install it with pip install -e ."
    )


_import_torch()  # first: the module's symbols are torch's
_C = _import_compiled()
