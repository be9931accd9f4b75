"""The build backend uses the torch of the target environment and asks for one only where there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BACKEND = Path(__file__).parents[1] / "build_backend"

STUB = """
def _requires(config_settings=None): return ["ninja"]
def _build(directory, config_settings=None, metadata_directory=None): return repr(config_settings)
get_requires_for_build_wheel = get_requires_for_build_editable = _requires
build_wheel = build_editable = _build
"""


@pytest.fixture
def environment(tmp_path: Path):
    """A virtual environment without pip, and the variables by which pip hides it from a build."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    overlay = tmp_path / "overlay"
    (overlay / "scikit_build_core").mkdir(parents=True)
    (overlay / "scikit_build_core/build.py").write_text(STUB)

    class Environment:
        site_packages = next((tmp_path / "env/lib").glob("python*")) / "site-packages"
        build_requirements = overlay

        @staticmethod
        def call(expression: str) -> str:
            return subprocess.run(
                [tmp_path / "env/bin/python", "-c", f"import attn_ext_build as b; print({expression})"],
                env={**os.environ, "PYTHONPATH": f"{overlay}:{BACKEND}", "PYTHONNOUSERSITE": "1"},
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()

    return Environment


def add_torch(folder: Path, version: str) -> str:
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").touch()
    (folder / "torch/version.py").write_text(f"__all__ = ['__version__']\n__version__ = '{version}'\n")
    return str(folder / "torch")


HOOKS = ["wheel", "editable"]


@pytest.mark.parametrize("hook", HOOKS)
def test_no_torch(environment, hook):
    assert environment.call(f"b.get_requires_for_build_{hook}()") == "['ninja', 'torch>=2.11']"


@pytest.mark.parametrize("hook", HOOKS)
def test_the_torch_that_was_asked_for_is_used(environment, hook):
    folder = add_torch(environment.build_requirements, "2.14.1")
    assert environment.call(f"b.build_{hook}('out')") == str({"cmake.define.ATTN_EXT_TORCH_DIR": folder})


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "3.0.0a0"])
def test_torch_of_the_target_environment_is_used(environment, hook, version):
    folder = add_torch(environment.site_packages, version)
    add_torch(environment.build_requirements, "2.14.1")
    assert environment.call(f"b.get_requires_for_build_{hook}()") == "['ninja']"
    assert environment.call(f"b.build_{hook}('out', {{'x': '1'}})") == str(
        {"x": "1", "cmake.define.ATTN_EXT_TORCH_DIR": folder}
    )


@pytest.mark.parametrize("hook", HOOKS)
def test_too_old_torch_is_not_used(environment, hook):
    add_torch(environment.site_packages, "2.10.0")
    assert environment.call(f"b.get_requires_for_build_{hook}()") == "['ninja', 'torch>=2.11']"


@pytest.mark.parametrize("hook", HOOKS)
def test_torch_given_by_the_user_is_used(environment, hook):
    settings = {"cmake.define.ATTN_EXT_TORCH_DIR": "/given"}
    assert environment.call(f"b.get_requires_for_build_{hook}({settings})") == "['ninja']"
    assert environment.call(f"b.build_{hook}('out', {settings})") == str(settings)
