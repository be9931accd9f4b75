"""rms_norm and layer_norm of CUDA under the executor, against the reference; their bits, what they read and write."""

import pytest
import torch
from build import compiler
from executor import far_apart
from kernel_ops import KernelOps
from tolerance import assert_as_accurate_as_torch, assert_same_bits

from attn_ext import reference

pytestmark = pytest.mark.skipif(compiler() is None, reason="no host compiler for the executor's kernels")

NORMS = ["rms_norm", "layer_norm", "layer_norm without bias"]


@pytest.fixture(scope="module")
def ops():
    return KernelOps()


def apply(ops, norm, x, weight, bias):
    if norm == "rms_norm":
        return ops.rms_norm(x, weight)
    return ops.layer_norm(x, weight, bias if norm == "layer_norm" else None)


def run(ops, norm, *tensors, seed=0, max_shared=227 * 1024):
    ops.seed, ops.max_shared = seed, max_shared
    return apply(ops, norm, *tensors)


def check(ops, norm, *tensors, **options):
    got = run(ops, norm, *tensors, **options)
    with reference.precision(torch.float64):
        exact = apply(reference, norm, *tensors)
    with reference.precision(got.dtype):
        plain = apply(reference, norm, *tensors)
    added = tensors[2].double().abs().max().item() if norm == "layer_norm" else 0.0
    assert_as_accurate_as_torch(got, exact, plain, terms=exact.abs().max().item() + 2 * added, what=norm)
    return got


def problem(*shape, dtype, size=1.0, offset=0.5):
    x = (torch.randn(shape) * size + offset).to(dtype)
    return x, torch.randn(shape[-1]).to(dtype), torch.randn(shape[-1]).to(dtype)


COLUMNS = [1, 2, 7, 8, 31, 33, 64, 127, 255, 256, 257, 576, 1000, 1023, 1024, 1025, 2048, 2049, 4097]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_columns(ops, dtype, columns, norm):
    for rows in (1, 5):
        check(ops, norm, *problem(rows, columns, dtype=dtype), seed=columns + rows)


@pytest.mark.parametrize("columns", [24, 33, 1100])
def test_row_strides_and_alignment(ops, dtype, columns):
    """Rows padded to any length, one row for all; weight and bias at any address."""
    x, weight, bias = problem(6, columns, dtype=dtype)
    for norm in NORMS:
        whole = run(ops, norm, x, weight, bias)
        for pad in (1, 2, 8):
            padded = torch.empty(6, columns + pad, dtype=dtype)[:, pad:].copy_(x)
            assert_same_bits(run(ops, norm, padded, weight, bias, seed=pad), whole)
            odd = [torch.empty(columns + pad, dtype=dtype)[pad:].copy_(t) for t in (weight, bias)]
            assert_same_bits(run(ops, norm, x, *odd, seed=pad), whole)
        assert_same_bits(run(ops, norm, x[:1].expand(6, columns), weight, bias), whole[:1].expand(6, columns))


@pytest.mark.parametrize("columns", [37, 512, 1500, 2064])
def test_bits_of_a_row_are_its_own(ops, dtype, columns):
    """Not of the batch or the schedule."""
    x, weight, bias = problem(11, columns, dtype=dtype)
    for norm in NORMS:
        whole = run(ops, norm, x, weight, bias)
        for rows in (slice(0, 1), slice(10, 11), slice(3, 9)):
            assert_same_bits(run(ops, norm, x[rows], weight, bias, seed=rows.stop), whole[rows])


def test_more_columns_than_shared_memory_holds(ops, dtype):
    """The chunks that do not fit are read again, and give the same bits."""
    tensors = problem(2, 5000, dtype=dtype)
    for norm in NORMS:
        all_kept = check(ops, norm, *tensors)
        for max_shared in (64, 10000, 20000):
            assert_same_bits(check(ops, norm, *tensors, max_shared=max_shared, seed=max_shared), all_kept)


@pytest.mark.parametrize("columns", [100, 1500])
def test_a_mean_far_from_zero(ops, dtype, columns):
    for offset in (1e4, -3e4):
        x, weight, bias = problem(3, columns, dtype=dtype, size=20.0, offset=offset)
        exact = reference.layer_norm(x.double(), weight.double(), bias.double())
        error = (run(ops, "layer_norm", x, weight, bias).double() - exact).abs().max().item()
        assert error <= (torch.finfo(dtype).eps / 2 + 8 * torch.finfo(torch.float32).eps) * exact.abs().max().item()


@pytest.mark.parametrize("columns", [70, 1100])
def test_offsets_beyond_32_bits(ops, columns):
    x, weight, bias = problem(2, columns, dtype=torch.bfloat16)
    for norm in NORMS:
        assert_same_bits(run(ops, norm, far_apart(x), weight, bias), check(ops, norm, x, weight, bias))


def test_nothing_launches_nothing(ops):
    for shape in [(0, 8), (3, 0)]:
        for norm in NORMS:
            apply(ops, norm, torch.empty(shape), torch.empty(shape[1]), torch.empty(shape[1]))
            assert ops.launches == []


@pytest.mark.parametrize("columns", [64, 576, 1024, 2048, 8192])
def test_one_read_and_one_write(ops, dtype, columns):
    """Whole sectors, no bank conflict; weight and bias, which stay in the cache, once a row."""
    x, weight, bias = problem(8, columns, dtype=dtype)
    run(ops, "layer_norm", x, weight, bias)
    (launch,) = ops.launches
    size = x.numel() * x.element_size()
    for name in ("x", "weight", "bias"):
        assert launch["traffic"][name]["load_bytes"] == launch["traffic"][name]["load_sectors"] * 32 == size
    assert launch["traffic"]["y"]["store_bytes"] == launch["traffic"]["y"]["store_sectors"] * 32 == size
    assert launch["shared_load_wavefronts"] == launch["shared_load_ideal"]
    assert launch["shared_store_wavefronts"] == launch["shared_store_ideal"]
