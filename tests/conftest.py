"""Fixtures of every test: the backend that runs the ops, the dtype, and settings that a test must not leak."""

import contextlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

import attn_ext

sys.path.append(str(Path(__file__).parent / "amx"))
import emulator

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# Tests of results, which also run on `simt`: the CUDA kernels, executed on the CPU (docs/simt.md).
SIMT_MODULES = [
    "test_attention", "test_invariance", "test_known_failures", "test_kv_cache_ops", "test_linear",
    "test_masked_softmax", "test_merge_attention", "test_norm", "test_qkv_projection", "test_worked_examples",
]  # fmt: skip

# ... but for these, which are about torch's dispatcher and the CPU kernels' threads.
NOT_ON_SIMT = ["test_H25_autocast", "test_H25_autocast_of_the_paged_ops", "test_H26_child_processes"]

# Tests that run `amx` where its instructions have to be emulated (tests/amx): those of the ops that it has kernels for.
EMULATED_MODULES = [
    "test_attention", "test_decoder_layer", "test_errors", "test_invariance", "test_known_failures", "test_linear",
    "test_memory_layouts", "test_qkv_projection", "test_subnormals", "test_worked_examples",
]  # fmt: skip
NOT_EMULATED = ["test_H26_child_processes"]  # of their own; tests/amx has one on forks
EMULATES = emulator.possible()


def _backends(metafunc) -> list[str]:
    """The CPU backends of this machine; `cuda` where there is a GPU and the build has kernels for it; `simt`."""
    cuda = ["cuda"] if attn_ext._C.cuda_built and torch.cuda.is_available() else []
    on_simt = metafunc.module.__name__ in SIMT_MODULES and metafunc.function.__name__ not in NOT_ON_SIMT
    simt = ["simt"] if on_simt and (shutil.which("g++") or os.environ.get("CXX")) else []
    on_emulator = metafunc.module.__name__ in EMULATED_MODULES and metafunc.function.__name__ not in NOT_EMULATED
    amx = ["amx"] if EMULATES and on_emulator else []
    return attn_ext.backends() + cuda + simt + amx


def _dtypes(backend: str) -> list[torch.dtype]:
    """float64 exists on the scalar backend only; avx512_bf16 and amx are avx512 but for bfloat16."""
    if backend == "scalar":
        return [*DTYPES, torch.float64]
    return [torch.bfloat16] if backend in ("avx512_bf16", "amx") else DTYPES


def _name(value) -> str:
    return str(value).removeprefix("torch.")


def _argument_names(names) -> list[str]:
    return names.replace(",", " ").split() if isinstance(names, str) else list(names)


def pytest_generate_tests(metafunc):
    """A test that asks for `backend` runs on each one usable here; one that asks for `dtype` too, on all of its dtypes.

    A test that lists its own dtypes keeps them.
    """
    own = {name for mark in metafunc.definition.iter_markers("parametrize") for name in _argument_names(mark.args[0])}
    wants = set(metafunc.fixturenames) - own
    if "backend" in wants and "dtype" in wants:
        pairs = [(backend, dtype) for backend in _backends(metafunc) for dtype in _dtypes(backend)]
        metafunc.parametrize("backend,dtype", pairs, ids=lambda value: _name(value), indirect=["backend"])
    elif "backend" in wants:
        metafunc.parametrize("backend", _backends(metafunc), indirect=True)
    elif "dtype" in wants:
        metafunc.parametrize("dtype", DTYPES, ids=_name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """`-n auto`: a process for each core that this one may use; each holds torch, so not more than 8."""
    return min(8, len(os.sched_getaffinity(0)))


@pytest.fixture
def backend(request):
    """The name of a backend, in force while the test runs; with `cuda`, tensors are made on the GPU."""
    if request.param == "cuda":
        torch.set_default_device("cuda")
        yield request.param
        torch.set_default_device(None)
        return
    if request.param == "simt":
        sys.path.append(str(Path(__file__).parent / "simt"))
        from suite import on_executor

        with on_executor():
            yield request.param
        return
    emulation = emulator.running() if request.param == "amx" and EMULATES else contextlib.nullcontext()
    with emulation, attn_ext.use_backend(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def settings():
    """The same random numbers whatever ran before. One thread: on a busy machine the tests' small problems would mostly
    wait for a second one; tests of parallel runs ask for `threads`."""
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads(settings):
    """`torch.set_num_threads`, undone after the test."""
    return torch.set_num_threads
