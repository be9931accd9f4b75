"""masked_softmax of CUDA under the executor, against the reference; its bits and what it reads and writes."""

import pytest
import torch
from build import compiler
from executor import far_apart
from kernel_ops import KernelOps
from tolerance import assert_as_accurate_as_torch, assert_same_bits

from attn_ext import reference

pytestmark = pytest.mark.skipif(compiler() is None, reason="no host compiler for the executor's kernels")


@pytest.fixture(scope="module")
def ops():
    return KernelOps()


def masked_softmax(ops, scores, mask=None, *, seed=0, max_shared=227 * 1024, **options):
    ops.seed, ops.max_shared = seed, max_shared
    return ops.masked_softmax(scores, mask, **options)


def check(ops, scores, mask=None, **options):
    got = masked_softmax(ops, scores, mask, **options)
    options = {name: options[name] for name in ("causal", "scale") if name in options}
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    exact = reference.masked_softmax(scores.double(), wide, **options)
    plain = reference.masked_softmax(scores, mask, **options)
    assert_as_accurate_as_torch(got, exact, plain, what="masked_softmax")
    return got


LENGTHS = [1, 2, 7, 8, 31, 33, 64, 127, 255, 256, 257, 1000, 1023, 1024, 1025, 2048, 2049, 4097]


@pytest.mark.parametrize("Tk", LENGTHS)
def test_lengths(ops, dtype, Tk):
    scores = (4 * torch.randn(1, 2, 3, Tk)).to(dtype)
    check(ops, scores, seed=Tk)
    check(ops, scores, causal=True, scale=-0.5, seed=Tk + 1)


@pytest.mark.parametrize("Tk", [40, 45, 1080, 1087])
@pytest.mark.parametrize("shape", ["full", "row", "column", "heads", "transposed"])
@pytest.mark.parametrize("kind", ["bool", "float32", "same"])
def test_masks(ops, dtype, Tk, shape, kind):
    B0, B1, Tq = 2, 2, 3
    dims = {"full": (B0, B1, Tq, Tk), "row": (1, 1, 1, Tk), "column": (B0, 1, Tq, 1), "heads": (1, B1, 1, 1)}
    mask = torch.randn(dims.get(shape, (B0, B1, Tk, Tq)))
    mask = mask > 0 if kind == "bool" else mask.to(torch.float32 if kind == "float32" else dtype)
    if shape == "transposed":
        mask = mask.transpose(2, 3)
    scores = torch.randn(B0, B1, Tq, Tk).to(dtype)
    check(ops, scores, mask, causal=shape == "row", scale=0.3, seed=Tk)


@pytest.mark.parametrize("Tk", [24, 33, 1100])
def test_row_strides(ops, dtype, Tk):
    """Rows padded to any length, heads and batches in any order, broadcast rows."""
    for pad in (0, 1, 8):
        buffer = torch.randn(2, 3, 2, Tk + pad).to(dtype)
        check(ops, buffer[..., pad:])
        check(ops, buffer[..., :Tk].transpose(1, 2))
        check(ops, buffer[:, :1, :, :Tk].expand(2, 3, 2, Tk))


@pytest.mark.parametrize("Tk", [5, 1030])
def test_rows_that_see_nothing_and_infinities(ops, dtype, Tk):
    scores = torch.randn(1, 2, 6, Tk).to(dtype)
    scores[0, 0, 1] = -torch.inf
    scores[0, 0, 2, 1:] = -torch.inf
    scores[0, 0, 3, 3] = torch.nan
    mask = torch.rand(1, 1, 6, Tk) > 0.5
    mask[..., 0, :] = False
    got = check(ops, scores, mask)
    assert got[0, 0, :2].eq(0).all() and got[0, 1, 0].eq(0).all()
    got = check(ops, scores, causal=True)
    if Tk < 6:
        assert got[0, :, 0].eq(0).all()


def test_more_columns_than_shared_memory_holds(ops, dtype):
    """The chunks that do not fit are read again, and give the same bits."""
    scores, mask = torch.randn(1, 1, 2, 5000).to(dtype), torch.randn(5000)
    all_kept = check(ops, scores, mask, causal=True)
    for max_shared in (64, 10000, 20000):
        assert_same_bits(check(ops, scores, mask, causal=True, max_shared=max_shared), all_kept)


@pytest.mark.parametrize("Tk", [37, 512, 1500, 2064])
def test_bits_of_a_row_are_its_own(ops, dtype, Tk):
    """Not of the batch, the row's place and alignment in memory, or the schedule."""
    scores, mask = torch.randn(2, 2, 5, Tk).to(dtype), torch.randn(2, 1, 5, Tk)
    whole = masked_softmax(ops, scores, mask)
    padded = torch.empty(2, 2, 5, Tk + 3, dtype=dtype)[..., 3:].copy_(scores)
    assert_same_bits(masked_softmax(ops, padded, mask, seed=3), whole)
    for b, i in [(0, 0), (1, 3)]:
        row = masked_softmax(ops, scores[b : b + 1, 1:, i : i + 1], mask[b : b + 1, :, i : i + 1], seed=b + 1)
        assert_same_bits(row, whole[b : b + 1, 1:, i : i + 1])


@pytest.mark.parametrize("Tk", [70, 1100])
def test_offsets_beyond_32_bits(ops, Tk):
    scores, mask = torch.randn(2, 1, 3, Tk).bfloat16(), torch.randn(2, 1, 3, Tk).bfloat16()
    right = check(ops, scores, mask)
    assert_same_bits(masked_softmax(ops, far_apart(scores), far_apart(mask)), right)


def test_nothing_launches_nothing(ops):
    for shape in [(0, 1, 2, 3), (1, 0, 2, 3), (1, 1, 0, 3), (1, 1, 2, 0)]:
        masked_softmax(ops, torch.empty(shape))
        assert ops.launches == []


# What goes over the bus. Rows that start at a sector move exactly their sectors; others share some with a neighbouring
# access: one more for every 16 where lanes move 16 bytes, for every 2 to 4 where they move one element.
@pytest.mark.parametrize("Tk,ratio", [(1024, 1), (1000, 1.07), (2048, 1), (4096, 1), (1021, 1.53), (2047, 1.53)])
def test_one_read_and_one_write(ops, dtype, Tk, ratio):
    scores = torch.randn(1, 2, 8, Tk).to(dtype)
    masked_softmax(ops, scores)
    (launch,) = ops.launches
    ideal = scores.numel() * scores.element_size() / 32
    assert launch["traffic"]["scores"]["load_bytes"] == scores.numel() * scores.element_size()
    assert launch["traffic"]["out"]["store_bytes"] == scores.numel() * scores.element_size()
    assert ideal <= launch["traffic"]["scores"]["load_sectors"] <= ratio * ideal
    assert ideal <= launch["traffic"]["out"]["store_sectors"] <= ratio * ideal
    assert launch["shared_load_wavefronts"] == launch["shared_load_ideal"]
    assert launch["shared_store_wavefronts"] == launch["shared_store_ideal"]


def test_causal_reads_what_is_visible(ops, dtype):
    Tq = Tk = 256
    scores = torch.randn(1, 1, Tq, Tk).to(dtype)
    masked_softmax(ops, scores, causal=True)
    (launch,) = ops.launches
    vector = 16 // scores.element_size()
    visible = sum((i + vector) // vector * vector for i in range(Tq))  # whole vectors
    assert launch["traffic"]["scores"]["load_bytes"] == visible * scores.element_size()
