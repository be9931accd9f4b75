"""The executor can fail: each planted fault is reported at its line. Its arithmetic and its counts are exact."""

import re
from pathlib import Path

import pytest
import torch
from build import ROOT, build, compiler
from executor import Fault, Library

pytestmark = pytest.mark.skipif(compiler() is None, reason="no host compiler for the executor's kernels")

FAULTS = Path(__file__).parent / "faults/faults.cpp"
SEEDS = range(8)

# What the report says about each fault.
EXPECTED = {
    "missing_sync_threads": "read of shared memory never written|race on shared memory",
    "missing_cp_async_wait": "before cp_async_wait",
    "missing_barrier_after_cp_async": "race on shared memory|never written|before cp_async_wait",
    "cp_async_wait_too_short": "before cp_async_wait",
    "shared_race": "race on shared memory",
    "missing_sync_warp": "race on shared memory|never written",
    "divergent_collective": "lanes diverge at a warp collective",
    "collective_after_exit": "lanes diverge at a warp collective",
    "global_read_out_of_bounds": "out-of-bounds global read of 4 bytes",
    "global_write_out_of_bounds": "out-of-bounds global write of 4 bytes|written by two blocks",
    "shared_out_of_bounds": "out-of-bounds shared write",
    "unwritten_shared_read": "read of shared memory never written",
    "unwritten_ldmatrix_read": "read of shared memory never written",
    "output_never_written": "2 of 128 elements of 'out' never written, the first is 63",
    "output_written_twice": "element 63 of 'out' written by two blocks",
    "read_of_another_block": "read of element .* of 'out', (never written|written in this launch)",
    "input_written": "write to 'in', an input",
    "deadlock_at_barrier": "deadlock at a barrier: 32 of 64 threads wait, 32 have exited",
    "different_barriers": "meet at different barriers",
    "misaligned_access": "misaligned global read of 16 bytes",
}


@pytest.fixture(scope="module")
def faults():
    return Library(build("faults", [FAULTS]))


def lines_of(fault):
    """The numbers of the lines marked with a fault's name."""
    text = FAULTS.read_text().splitlines()
    return {i for i, line in enumerate(text, 1) if line.endswith(f"// fault: {fault}")}


def run_fault(library, fault, faulty, seed):
    x = torch.randn(128)
    out = torch.empty(128)
    library.reset()
    library.seed(seed)
    library.register("in", x, "input")
    library.register("out", out, "output")
    library.call(fault, x, out, int(faulty))
    library.check_outputs()
    return x, out


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", EXPECTED)
def test_planted_fault_is_reported(faults, fault, seed):
    with pytest.raises(Fault) as report:
        run_fault(faults, fault, True, seed)
    message = str(report.value)
    place = re.match(r"tests/simt/faults/faults.cpp:(\d+): ", message)
    assert place and int(place[1]) in lines_of(fault), message
    assert re.search(EXPECTED[fault], message), message
    assert f"[kernel faults::{fault}" in message


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", EXPECTED)
def test_same_kernel_without_the_fault_passes(faults, fault, seed):
    x, out = run_fault(faults, fault, False, seed)
    assert torch.equal(out, x.view(2, 64).flip(1).flatten())


def test_library_goes_on_after_a_fault(faults):
    for fault in EXPECTED:
        with pytest.raises(Fault):
            run_fault(faults, fault, True, 0)
        run_fault(faults, fault, False, 0)
