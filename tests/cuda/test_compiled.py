"""What the compiler made of the CUDA kernels, read from the compiled module: registers, shared memory, instructions.

`python tests/cuda/test_compiled.py` writes the table that the tests compare with, compiled.json; look at its diff.
Another nvcc allocates registers in another way: then the limits hold, and the numbers are not compared.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attn_ext import _C

TABLE = Path(__file__).with_name("compiled.json")
ARCHITECTURES = ["sm_80", "sm_86", "sm_90", "sm_120"]
MAX_REGISTERS = 255


def find_cuobjdump():
    """cuobjdump of the toolkit or of the package nvidia-cuda-cuobjdump, whose folder must be on PATH for nvdisasm."""
    folders = [Path(p) / "nvidia" / "cu13" / "bin" for p in sys.path]
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin", *map(str, folders)])
    return (shutil.which("cuobjdump", path=path), path) if shutil.which("nvdisasm", path=path) else (None, path)


CUOBJDUMP, TOOL_PATH = find_cuobjdump()

pytestmark = [
    pytest.mark.skipif(
        not _C.cuda_built, reason="this build has no CUDA kernels: nvcc was not found when it was built"
    ),
    pytest.mark.skipif(
        CUOBJDUMP is None, reason="no disassembler: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    ),
]


def cuobjdump(*options: str) -> str:
    command = [CUOBJDUMP, *options, _C.__file__]
    environment = {**os.environ, "PATH": TOOL_PATH}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def short_name(mangled: str) -> str:
    name = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    name = re.sub(r"^void |attn_ext::cuda::|simt::|\(int\)|\(.*\)$", "", name)
    return name.replace(" ", "")


short_name = functools.lru_cache(maxsize=None)(short_name)


@functools.cache
def usage(architecture: str) -> dict[str, dict[str, int]]:
    """{kernel: {registers, stack, shared}} of one architecture. Dynamic shared memory is the launchers' business."""
    text = cuobjdump("-res-usage", "-arch", architecture)
    kernels = {}
    for mangled, registers, stack, shared in re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text):
        kernels[short_name(mangled)] = {"registers": int(registers), "stack": int(stack), "shared": int(shared)}
    return dict(sorted(kernels.items()))


@functools.cache
def instructions(architecture: str) -> dict[str, set[str]]:
    """{kernel: names of its instructions, without modifiers}."""
    kernels, current = {}, set()
    for line in cuobjdump("-sass", "-arch", architecture).splitlines():
        if function := re.search(r"Function : (\S+)", line):
            current = kernels.setdefault(short_name(function[1]), set())
        elif operation := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?([A-Z]\w*)", line):
            current.add(operation[1])
    return kernels


def table() -> dict:
    return json.loads(TABLE.read_text())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_is_there_and_none_spills(architecture):
    kernels = usage(architecture)
    assert set(kernels) == set(table()["kernels"][architecture])
    spills = {name: k for name, k in kernels.items() if k["stack"]}
    assert not spills
    assert all(k["registers"] <= MAX_REGISTERS for k in kernels.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_registers_and_shared_memory(architecture):
    if table()["compiler"] != _C.cuda_compiler:
        pytest.skip(f"the table is of {table()['compiler']}, this build of {_C.cuda_compiler}")
    expected = table()["kernels"][architecture]
    changed = {k: (expected[k], v) for k, v in usage(architecture).items() if expected.get(k) != v}
    assert not changed, f"if the change is meant: python {Path(__file__).name}"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_instructions(architecture):
    """Matrix products are tensor-core instructions fed by ldmatrix and cp.async; nothing lives in local memory."""
    on_tensor_cores = 0
    for name, operations in instructions(architecture).items():
        assert operations, name
        assert not operations & {"LDL", "STL"}, name
        if "TensorTile" in name or "attention_mma" in name:
            on_tensor_cores += 1
            assert {"HMMA", "LDSM", "LDGSTS"} <= operations, name
    assert on_tensor_cores == sum("TensorTile" in name or "attention_mma" in name for name in usage(architecture))
    assert on_tensor_cores >= 6


def test_newer_gpus_can_compile_the_kernels():
    assert ".sm_90.ptx" in cuobjdump("-lptx")


if __name__ == "__main__":
    kernels = {architecture: usage(architecture) for architecture in ARCHITECTURES}
    TABLE.write_text(json.dumps({"compiler": _C.cuda_compiler, "kernels": kernels}, indent=1) + "\n")
