"""`import attn_ext`: alone, quick, light, and one clear line where something is missing."""

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attn_ext
from attn_ext import _C


def run(code: str, *flags: str) -> subprocess.CompletedProcess:
    # -c looks into the current folder first: not the source tree, whose attn_ext is not the installed one.
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)


class Package:
    """A copy of the installed package, alone in a folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.attn_ext = folder / "attn_ext"
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(Path(attn_ext.__file__).parent, self.attn_ext, ignore=ignored)
        self.module = Path(shutil.copy(_C.__file__, self.attn_ext))

    def add_torch(self, source: str) -> None:
        (self.folder / "torch").mkdir()
        (self.folder / "torch/__init__.py").write_text(source)

    def import_error(self, *, site_packages: bool) -> str:
        """The line that the user sees at the end of the traceback. -S: an interpreter without site-packages."""
        path = [str(self.folder), *([str(Path(torch.__file__).parents[1])] if site_packages else [])]
        result = run(f"import sys; sys.path[:0] = {path}; import attn_ext", "-S", "-E")
        assert result.returncode == 1, result.stdout + result.stderr
        return result.stderr.strip().splitlines()[-1]


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


def test_import_before_torch():
    result = run("import attn_ext, torch; q = torch.ones(1, 2, 1, 4); print(attn_ext.attention(q, q, q).sum().item())")
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) == pytest.approx(8)


def test_missing_torch(package: Package):
    line = package.import_error(site_packages=False)
    assert line == "ImportError: attn_ext needs torch >= 2.11, and no torch is installed: pip install torch"


def test_broken_torch_is_not_called_missing(package: Package):
    package.add_torch("import a_library_that_torch_needs")
    line = package.import_error(site_packages=False)
    assert line == "ModuleNotFoundError: No module named 'a_library_that_torch_needs'"


@pytest.mark.parametrize("version", ["2.10.0", "1.13.1+cu117", "2.9.1.dev20250901"])
def test_old_torch(package: Package, version: str):
    package.add_torch(f"__version__ = {version!r}")
    (package.attn_ext / "_built.py").write_text('TORCH = "3.14.0+cpu"\n')
    line = package.import_error(site_packages=False)
    needs = "attn_ext needs torch >= 2.11 (built with 3.14.0+cpu)"
    assert line == f"ImportError: {needs}, got torch {version}: pip install --upgrade torch"


def test_the_build_writes_down_its_torch():
    """Outside the source folder, where the module was put without it."""
    if Path(attn_ext.__file__).parents[1] != Path(__file__).parents[1]:
        assert importlib.import_module("attn_ext._built").TORCH == _C.torch_version


def test_wheel_for_another_python(package: Package):
    package.module.rename(package.attn_ext / "_C.cpython-399-x86_64-linux-gnu.so")
    line = package.import_error(site_packages=True)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert line.startswith(f"ImportError: attn_ext is built for Python 3.99 and this is Python {running}")


def test_not_compiled(package: Package):
    package.module.unlink()
    line = package.import_error(site_packages=True)
    assert line.startswith(f"ImportError: attn_ext in {package.attn_ext} has no compiled module: ")


def test_import_time():
    code = "import time, torch; t = time.perf_counter(); import attn_ext; print(time.perf_counter() - t)"
    times = []
    for _ in range(5):  # one quiet run is enough: other processes only ever add time
        times.append(float(run(code).stdout))
        if times[-1] <= 0.2:
            return
    pytest.fail(f"import attn_ext takes {min(times):.2f} s beyond torch's own, at most 0.2 is allowed: {times}")


def test_imports_nothing_but_torch():
    code = """
import sys, torch
before = {name.partition(".")[0] for name in sys.modules}
import attn_ext
added = {name.partition(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)
print(*sorted(added))
"""
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["attn_ext"]
