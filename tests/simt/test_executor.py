"""The executor can fail: each planted fault is reported at its line. Its arithmetic and its counts are exact."""

import ctypes
import re
from pathlib import Path

import numpy as np
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
    "cp_async_out_of_bounds": "out-of-bounds global read of 16 bytes at byte 512 of 'in', which has 512",
    "stage_overwritten": "race on shared memory|before cp_async_wait",
    "store_into_copy_in_flight": "write to shared memory .* while a cp.async into it is in flight",
    "race_on_output": "race on element (40|104) of 'out'",
    "unordered_global_read": "read of element .* never written|read with no barrier of element .* of 'out'",
    "constant_read_of_output": "constant read of element .* of 'out', written in this launch",
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


def test_only_the_wrappers_use_what_the_host_compiler_lacks():
    builtin = (
        r"\basm\b|\b(thread|block)(Idx|Dim)\b|<<<|"
        r"\b__(syncthreads|syncwarp|shared__|global__|device__|cvta\w*|\w+_sync)\b"
    )
    for source in sorted((ROOT / "csrc/cuda").glob("*.cu*")):
        if source.name != "simt.cuh":
            code = re.sub(r"//.*", "", source.read_text())
            assert not re.search(builtin, code), source


def test_library_goes_on_after_a_fault(faults):
    for fault in EXPECTED:
        with pytest.raises(Fault):
            run_fault(faults, fault, True, 0)
        run_fault(faults, fault, False, 0)


# ---- what the wrappers compute ----


@pytest.fixture(scope="module")
def conformance():
    library = Library(build("conformance", [Path(__file__).parent / "conformance.cpp"]))
    library.lib.conformance_name.restype = ctypes.c_char_p
    names = [library.lib.conformance_name(i).decode() for i in range(library.lib.conformance_cases())]

    def run(name, operands, results, seed=0):
        """operands (warps, 32, words) -> (warps, 32, results), both uint32."""
        operands = np.ascontiguousarray(operands).view(np.uint32)
        out = np.zeros((*operands.shape[:2], results), np.uint32)
        library.seed(seed)
        library.call(
            "conformance_run", names.index(name), ctypes.c_void_p(operands.ctypes.data),
            ctypes.c_void_p(out.ctypes.data), operands.shape[0],
        )  # fmt: skip
        return out

    run.names = names
    return run


def words_of(*columns):
    """Columns of words, floats or halves (two to a word) side by side."""
    return np.concatenate([np.ascontiguousarray(c).view(np.uint32) for c in columns], axis=-1)


LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def half(matrix, dtype):
    """A float32 matrix rounded to a 16-bit dtype: the bits, and the rounded values."""
    rounded = torch.from_numpy(matrix).to(dtype)
    return rounded.view(torch.int16).numpy().view(np.uint16), rounded.float().numpy()


@pytest.mark.parametrize("name", ["mma_bf16", "mma_f16"])
def test_mma_is_the_product_of_the_documented_fragments(conformance, name):
    dtype = torch.bfloat16 if name == "mma_bf16" else torch.float16
    rng = np.random.default_rng(0)
    a_bits, a = half(rng.standard_normal((3, 16, 16), np.float32), dtype)
    b_bits, b = half(rng.standard_normal((3, 16, 8), np.float32), dtype)
    c = rng.standard_normal((3, 16, 8), np.float32)
    rows, columns = [G, G + 8, G, G + 8], [2 * T, 2 * T, 2 * T + 8, 2 * T + 8]
    fragments = [np.stack([a_bits[:, r, k], a_bits[:, r, k + 1]], -1) for r, k in zip(rows, columns, strict=True)]
    fragments += [np.stack([b_bits[:, k, G], b_bits[:, k + 1, G]], -1) for k in (2 * T, 2 * T + 8)]
    accumulator = [(G, 2 * T), (G, 2 * T + 1), (G + 8, 2 * T), (G + 8, 2 * T + 1)]
    fragments += [c[:, r, n, None] for r, n in accumulator]
    out = conformance(name, words_of(*fragments), 4).view(np.float32)
    expected = c.astype(np.float64) + a.astype(np.float64) @ b
    for i, (r, n) in enumerate(accumulator):
        np.testing.assert_allclose(out[:, :, i], expected[:, r, n], rtol=2e-6, atol=4e-6)


def test_ldmatrix_gives_the_documented_elements(conformance):
    rows = np.random.default_rng(0).integers(0, 2**16, (2, 32, 8), np.uint16)
    out = conformance("ldmatrix", rows, 12).view(np.uint16).reshape(2, 32, 12, 2)
    matrices = rows[:, ::-1].reshape(2, 4, 8, 8)  # lane l names row 31 - l
    for m in range(4):
        plain = np.stack([matrices[:, m, G, 2 * T], matrices[:, m, G, 2 * T + 1]], -1)
        transposed = np.stack([matrices[:, m, 2 * T, G], matrices[:, m, 2 * T + 1, G]], -1)
        np.testing.assert_array_equal(out[:, :, m], plain)
        np.testing.assert_array_equal(out[:, :, 4 + m], transposed)
        if m < 2:
            np.testing.assert_array_equal(out[:, :, 8 + m], plain)
            np.testing.assert_array_equal(out[:, :, 10 + m], transposed)


@pytest.mark.parametrize("seed", range(4))
def test_shuffles_and_votes(conformance, seed):
    x = np.random.default_rng(seed).integers(0, 2**32, (4, 32, 3), np.uint64).astype(np.uint32)
    x[:, :, 0] &= 0x7F7FFFFF  # no NaN
    out = conformance("shuffle", x, 7, seed)
    value, source = x[:, :, 0], x[:, :, 2] % 32
    np.testing.assert_array_equal(out[:, :, 0], np.take_along_axis(value, source, 1))
    np.testing.assert_array_equal(out[:, :, 1], value[:, LANE ^ 5])
    np.testing.assert_array_equal(out[:, :, 2], value[:, np.where(LANE + 3 < 32, LANE + 3, LANE)])
    np.testing.assert_array_equal(out[:, :, 3], value[:, np.where(LANE >= 3, LANE - 3, LANE)])
    np.testing.assert_array_equal(out[:, :, 4], out[:, :, 0])
    np.testing.assert_array_equal(out[:, :, 5], value[:, LANE ^ 9])
    np.testing.assert_array_equal(out[:, :, 6], x[:, LANE ^ 9, 1])
    bits = np.stack([np.zeros(32), np.ones(32), LANE == 7, LANE % 2]).astype(np.uint32)
    ballots = np.array([0, 0xFFFFFFFF, 1 << 7, 0xAAAAAAAA], np.uint32)
    out = conformance("vote", bits[:, :, None], 4, seed)
    for i, column in enumerate((ballots, ballots != 0, ballots == 0xFFFFFFFF, ballots != 0)):
        np.testing.assert_array_equal(out[:, :, i], np.broadcast_to(column[:, None], (4, 32)))


def test_conversions_round_to_nearest_even(conformance):
    rng = np.random.default_rng(0)
    any_bits = rng.integers(0, 2**32, (256, 32, 2), np.uint64).astype(np.uint32).view(np.float32)
    moderate = rng.standard_normal((256, 32, 2), np.float32)
    ties = (np.arange(256 * 64, dtype=np.uint32) << 11 | 0x38000000).reshape(256, 32, 2).view(np.float32)
    tiny = (rng.standard_normal((256, 32, 2), np.float32) * 2.0**-18).astype(np.float32)
    for x in (any_bits, moderate, ties, tiny, np.float32(np.array([[[65519.0, 65520.0]] * 32]))):
        pair = rng.integers(0, 2**16, (*x.shape[:2], 2), np.uint16)
        out = conformance("convert", words_of(x, pair), 8)
        expected = []
        for dtype in (torch.bfloat16, torch.float16):
            bits, values = half(x, dtype)
            expected.append(np.where(np.isnan(values), 0x7FFF, bits))
        np.testing.assert_array_equal(out[..., 0], expected[0][..., 0])
        np.testing.assert_array_equal(out[..., 1], expected[1][..., 0])
        for i in (0, 1):
            np.testing.assert_array_equal(out[..., 2 + i].copy().view(np.uint16).reshape(pair.shape), expected[i])
        as_half = torch.from_numpy(pair.view(np.int16))
        np.testing.assert_array_equal(out[..., 4:6].view(np.float32), as_half.view(torch.bfloat16).float().numpy())
        np.testing.assert_array_equal(
            out[..., 6:8].view(np.float32),
            np.nan_to_num(as_half.view(torch.float16).float().numpy(), posinf=np.inf, neginf=-np.inf),
        )  # fmt: skip


def test_arithmetic(conformance):
    x = np.random.default_rng(0).standard_normal((8, 32, 3), np.float32) * 8
    x[0, :4, 0] = [0, -np.inf, np.inf, -200]
    out = conformance("arithmetic", x, 4).view(np.float32)
    wide = x.astype(np.float64)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(out[..., 0], np.exp2(wide[..., 0]), rtol=3e-7, atol=2.0**-126)
        np.testing.assert_allclose(out[..., 1], np.log2(np.abs(wide[..., 0])), rtol=3e-7, atol=3e-7)
        np.testing.assert_allclose(out[..., 2], 1 / wide[..., 0], rtol=3e-7)
    np.testing.assert_allclose(out[..., 3], wide[..., 0] * wide[..., 1] + wide[..., 2], rtol=1e-6, atol=1e-6)


def test_copies_and_accesses_of_every_width(conformance):
    x = np.random.default_rng(0).integers(0, 2**32, (2, 32, 4), np.uint64).astype(np.uint32)
    out = conformance("copy", x, 16)
    cut = x.copy().view(np.uint8)
    cut[..., 7:] = 0
    zero = np.zeros_like(x[..., :1])
    expected = [x, cut.view(np.uint32), x[..., 2:], x[..., 1:2], zero, zero, zero, zero, zero]
    np.testing.assert_array_equal(out, np.concatenate(expected, -1))
    np.testing.assert_array_equal(conformance("memory", x, 8), np.concatenate([x, x], -1))


# ---- what it counts ----


@pytest.fixture(scope="module")
def kernels():
    return Library(build("counters", [Path(__file__).parent / "counters.cpp"]))


@pytest.fixture(params=[0, 3])
def counted(kernels, request):
    """Runs an entry point with tensors registered by role, and returns the launch's counters."""

    def run(entry, *args, **roles):
        kernels.reset()
        kernels.seed(request.param)
        for kind, tensor in roles.items():
            kernels.register(kind, tensor, kind)
        kernels.call(entry, *roles.values(), *args)
        kernels.check_outputs()
        (launch,) = kernels.launches()
        return launch

    return run


@pytest.mark.parametrize(
    "stride, offset, sectors_per_warp",
    [(1, 0, 4), (1, 1, 5), (2, 0, 8), (4, 0, 16), (8, 0, 32), (100, 0, 32), (0, 7, 1)],
)
def test_sectors_of_4_byte_loads(counted, stride, offset, sectors_per_warp):
    x = torch.empty(2 * 64 * 100 + 16, dtype=torch.int32)
    x = x[-x.data_ptr() // 4 % 8 :]  # at a sector's start
    launch = counted("copy_words", 2, 64, stride, offset, input=x, output=torch.empty(128, dtype=torch.int32))
    assert launch["blocks"] == 2 and launch["threads"] == 64
    assert launch["global_loads"] == launch["global_stores"] == 4
    traffic = launch["traffic"]["input"]
    assert traffic == {"load_sectors": 4 * sectors_per_warp, "load_bytes": 512, "store_sectors": 0, "store_bytes": 0}
    assert launch["traffic"]["output"]["store_sectors"] == 128 * 4 // 32


def test_sectors_of_16_byte_loads(counted):
    x, out = torch.empty(256 * 2 + 4, 4), torch.empty(256, 4)
    x = x[-x.data_ptr() // 16 % 2 :]
    traffic = counted("copy_vectors", 4, 64, 1, 0, input=x, output=out)["traffic"]
    assert traffic["input"]["load_sectors"] == traffic["output"]["store_sectors"] == 256 * 16 // 32
    assert counted("copy_vectors", 4, 64, 2, 0, input=x, output=out)["traffic"]["input"]["load_sectors"] == 256


@pytest.mark.parametrize(
    "stride, wavefronts", [(0, 1), (1, 1), (2, 2), (3, 1), (4, 4), (5, 1), (8, 8), (16, 16), (31, 1)]
)
def test_bank_conflicts_of_4_byte_reads(counted, stride, wavefronts):
    launch = counted("shared_words", stride, output=torch.empty(32, dtype=torch.int32))
    assert launch["shared_load_wavefronts"] == wavefronts and launch["shared_load_ideal"] == 1
    assert launch["shared_store_wavefronts"] == launch["shared_store_ideal"] == 32


@pytest.mark.parametrize("stride, wavefronts", [(1, 4), (2, 8), (3, 4), (8, 32), (9, 4)])
def test_bank_conflicts_of_16_byte_reads(counted, stride, wavefronts):
    launch = counted("shared_vectors", stride, output=torch.empty(32, 4, dtype=torch.int32))
    assert launch["shared_load_wavefronts"] == wavefronts and launch["shared_load_ideal"] == 4
    assert launch["shared_store_wavefronts"] == launch["shared_store_ideal"] == 128


@pytest.mark.parametrize(
    "row_bytes, pitch, divide, modulo, per_matrix",
    [
        (64, 64, 1, 1, 4), (64, 64, 2, 4, 1), (64, 80, 1, 1, 1),
        (128, 128, 1, 1, 8), (128, 128, 1, 8, 1), (128, 144, 1, 1, 1),
        (256, 256, 1, 1, 8), (256, 256, 1, 8, 1), (256, 272, 1, 1, 1),
    ],
)  # fmt: skip
def test_bank_conflicts_of_ldmatrix(counted, row_bytes, pitch, divide, modulo, per_matrix):
    launch = counted("rows", row_bytes, pitch, divide, modulo)
    assert launch["ldmatrix"] == row_bytes // 16
    assert launch["ldmatrix_ideal"] == 4 * launch["ldmatrix"]
    assert launch["ldmatrix_wavefronts"] == per_matrix * launch["ldmatrix_ideal"]


def test_instruction_counts(counted):
    launch = counted("instruction_counts", 3, input=torch.zeros(4))
    expected = {
        "mma": 3 * 2 * 5, "shuffles": 3 * 2 * 2, "votes": 3 * 2, "warp_barriers": 3 * 2, "barriers": 3 * 3,
        "exp": 3 * 64, "cp_async_bytes": 3 * 64 * 16, "ldmatrix": 0, "atomics": 0, "global_loads": 3 * 2,
    }  # fmt: skip
    assert {name: launch[name] for name in expected} == expected
    assert launch["kernel"] == "counters::instructions" and launch["where"].startswith("tests/simt/counters.cpp:")


def test_atomics_of_different_blocks_add_up(counted):
    total = torch.zeros(1, dtype=torch.int32)
    assert counted("ones", 5, inout=total)["atomics"] == 5 * 64
    assert total.item() == 5 * 64


@pytest.mark.parametrize(
    "which, rule", [(0, r"grid \(0"), (1, r"grid \(1, 70000"), (2, r"block \(48"), (3, "233472 bytes")]
)
def test_impossible_launches_are_faults(kernels, which, rule):
    kernels.reset()
    with pytest.raises(Fault, match=f"tests/simt/counters.cpp:[0-9]+: {rule}"):
        kernels.call("bad_launch", which)
