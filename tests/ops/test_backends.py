"""The table of backends: which there are, how one is chosen, and what an unknown one says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from problems import Case, build, check_same, run_varlen
from tolerance import assert_same_bits

import attn_ext


def test_the_list_ends_with_scalar():
    names = attn_ext.backends()
    assert names[-1] == "scalar" and len(set(names)) == len(names)
    assert attn_ext.build_info()["backends"] == names


def test_the_fixture_forces_it(backend):
    assert attn_ext.active_backend() == backend == attn_ext.build_info()["backend"]


def test_float64_is_the_same_everywhere(backend):
    """It always runs on scalar, whatever is in use."""
    problem = build(Case(((5, 70), (1, 513)), heads=(4, 2)), torch.float64)
    x, weight = torch.randn(7, 40).double(), torch.randn(33, 40).double()
    results = run_varlen(problem), attn_ext.linear(x, weight), attn_ext.masked_softmax(x)
    with attn_ext.use_backend("scalar"):
        check_same(results[0], run_varlen(problem), "attention")
        assert_same_bits(results[1], attn_ext.linear(x, weight))
        assert_same_bits(results[2], attn_ext.masked_softmax(x))


def test_a_call_is_for_good_and_a_context_is_undone():
    """Also when the body raises."""
    best = attn_ext.backends()[0]
    with attn_ext.use_backend(best):
        with pytest.raises(RuntimeError), attn_ext.use_backend("scalar"):
            assert attn_ext.active_backend() == "scalar"
            attn_ext.linear(torch.randn(3), torch.randn(3))
        assert attn_ext.active_backend() == best
        attn_ext.use_backend("scalar")
        assert attn_ext.active_backend() == "scalar"


def test_contexts_that_overlap_leave_the_backend_of_before():
    """As those of two threads may: the first to begin is the first to end."""
    names = attn_ext.backends()
    with attn_ext.use_backend(names[0]):
        first = attn_ext.use_backend(names[len(names) // 2]).__enter__()
        second = attn_ext.use_backend("scalar").__enter__()
        first.__exit__(None, None, None)
        assert attn_ext.active_backend() == "scalar"
        second.__exit__(None, None, None)
        assert attn_ext.active_backend() == names[0]


@pytest.mark.parametrize("name", ["", "cuda9", "AVX2", "scalar "])
def test_an_unknown_name_lists_the_possible_ones(name):
    before = attn_ext.active_backend()
    with pytest.raises(ValueError, match=", ".join(attn_ext.backends())):
        attn_ext.use_backend(name)
    assert attn_ext.active_backend() == before


def _active_with(value: str):
    return subprocess.run(
        [sys.executable, "-c", "import attn_ext; print(attn_ext.active_backend())"],
        env={**os.environ, "ATTN_EXT_BACKEND": value}, capture_output=True, text=True, timeout=120, check=False,
        cwd=Path(__file__).parent,  # not the source folder: its attn_ext may be another one
    )  # fmt: skip


def test_the_environment_chooses():
    for name in ("scalar", attn_ext.backends()[0]):
        assert _active_with(name).stdout.strip() == name
    assert _active_with("").stdout.strip() == attn_ext.backends()[0]
    refused = _active_with("sse9")
    assert refused.returncode != 0
    last = refused.stderr.strip().splitlines()[-1]
    assert "ATTN_EXT_BACKEND" in last and "scalar" in last and "sse9" in last
