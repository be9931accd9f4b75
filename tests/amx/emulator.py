"""Runs the `amx` backend on CPUs without AMX: builds emulate.c, switches it on, reads its counters."""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import attn_ext

ROOT = Path(__file__).resolve().parents[2]
COUNTERS = ["ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps", "traps", "unaligned_rows"]


def compiler(variable: str = "CC", default: str = "gcc") -> str | None:
    return os.environ.get(variable) or shutil.which(default)


def possible() -> bool:
    """Whether the emulator runs here and is needed: the kernels' other instructions are real ones."""
    backends = attn_ext.backends()
    return platform.machine() == "x86_64" and "avx512_bf16" in backends and "amx" not in backends and bool(compiler())


def build(source: Path, command: list[str]) -> Path:
    """The shared library that `command` makes of `source`; kept until the text or the command changes."""
    texts = [source.read_bytes(), *(f.read_bytes() for f in sorted((ROOT / "csrc/cpu").rglob("*.h")))]
    digest = hashlib.sha256(b"\0".join([" ".join(command).encode(), *texts])).hexdigest()[:16]
    target = Path(os.environ.get("ATTN_EXT_AMX_CACHE", ROOT / "build" / "amx")) / f"{source.stem}-{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, "-shared", "-fPIC", source, "-o", new], check=True)
        new.rename(target)
    return target


def library_path() -> Path:
    return build(ROOT / "tests/amx/emulate.c", [compiler(), "-O2", "-mavx512f", "-Wall", "-Wextra", "-Werror"])


@functools.cache
def library() -> ctypes.CDLL:
    emulator = ctypes.CDLL(library_path(), mode=ctypes.RTLD_GLOBAL)  # where the table of backends looks for it
    emulator.amx_emulator_configured.restype = ctypes.c_int64
    return emulator


@contextlib.contextmanager
def running():
    """Tile instructions work, and `amx` is a backend. After the block no thread may hold tiles."""
    library().amx_emulator_start()
    try:
        yield
        held = configured()
    finally:
        library().amx_emulator_stop()
    assert held == 0, f"{held} threads still hold tiles"


def configured() -> int:
    """How many threads hold a tile configuration."""
    return library().amx_emulator_configured()


def _totals() -> dict[str, int]:
    values = (ctypes.c_uint64 * len(COUNTERS))()
    library().amx_emulator_counts(values)
    return dict(zip(COUNTERS, values, strict=True))


@contextlib.contextmanager
def counting():
    """A dict that holds, when the block has ended, what was executed in it, by kind."""
    counts: dict[str, int] = {}
    before = _totals()
    yield counts
    counts.update({name: value - before[name] for name, value in _totals().items()})
