"""Build backend: scikit-build-core, plus the choice of the torch to build against.

The stable ABI makes every torch >= 2.11 equally good for building, so the one that the target environment has is
used; only where there is none does torch become a build requirement. (pip then resolves the same `torch>=2.11` for
the build and for the installation, so it downloads one version, once: the second copy comes from pip's cache.)
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403  (the hooks that need no change)

TORCH = "torch>=2.11"

_FIND = """
import importlib.util
spec = importlib.util.find_spec("torch")
if spec and spec.submodule_search_locations:
    print(spec.submodule_search_locations[0])
"""


def _find_torch() -> str | None:
    """The folder of a torch that will do: the target environment's, else one that was asked for by this backend.

    pip's isolation hides the target environment by PYTHONPATH and PYTHONNOUSERSITE alone, so its interpreter run
    with -E sees exactly what the user will see: user site, system site packages and .pth files included.
    """
    for isolated in (["-E"], []):
        found = subprocess.run(
            [sys.executable, *isolated, "-c", _FIND], cwd=sys.prefix, capture_output=True, text=True, check=False
        ).stdout.strip()
        if found and _version(found) >= (2, 11):
            return found
    return None


def _version(torch_dir: str) -> tuple[int, int]:
    try:
        with open(f"{torch_dir}/version.py") as file:
            match = re.search(r"^__version__ = '(\d+)\.(\d+)", file.read(), re.MULTILINE)
    except OSError:
        match = None
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _torch_settings(config_settings: dict[str, Any] | None) -> dict[str, Any]:
    settings = dict(config_settings or {})
    if "cmake.define.ATTN_EXT_TORCH_DIR" not in settings and (torch_dir := _find_torch()):
        settings["cmake.define.ATTN_EXT_TORCH_DIR"] = torch_dir
    return settings


def _requires(requires: list[str], config_settings: dict[str, Any] | None) -> list[str]:
    known = "cmake.define.ATTN_EXT_TORCH_DIR" in (config_settings or {}) or _find_torch()
    return requires if known else [*requires, TORCH]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _requires(_build.get_requires_for_build_wheel(config_settings), config_settings)


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return _requires(_build.get_requires_for_build_editable(config_settings), config_settings)


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    return _build.build_wheel(wheel_directory, _torch_settings(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    return _build.build_editable(wheel_directory, _torch_settings(config_settings), metadata_directory)
