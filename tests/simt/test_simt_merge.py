"""merge_attention of CUDA under the executor."""

import math

import pytest
import torch
from attention_ops import AttentionOps
from build import compiler
from problems import Case, build
from tolerance import assert_as_accurate_as_torch, assert_same_bits

from attn_ext import reference

pytestmark = pytest.mark.skipif(compiler() is None, reason="no host compiler for the executor's kernels")


@pytest.fixture(scope="module")
def ops():
    return AttentionOps()


def check(ops, out_a, lse_a, out_b, lse_b):
    out, lse = ops.merge_attention(out_a, lse_a, out_b, lse_b)
    with reference.precision(torch.float64):
        exact, exact_lse = reference.merge_attention(out_a, lse_a, out_b, lse_b)
    with reference.precision(torch.float32):
        plain, plain_lse = reference.merge_attention(out_a, lse_a, out_b, lse_b)
    size = torch.cat([x[x.isfinite()].abs() for x in (lse_a, lse_b)]).max().item()
    values = torch.cat([x.float()[x.isfinite()].abs() for x in (out_a, out_b)]).max().item()
    # an ulp in an lse moves a weight by |lse| ulps
    assert_as_accurate_as_torch(out, exact, plain.to(out_a.dtype), terms=(1 + size) * values, what="out")
    assert_as_accurate_as_torch(lse, exact_lse, plain_lse, terms=1 + size, what="lse")
    return out, lse


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 5, 3, 7), (1, 9, 2, 64), (2, 3, 4, 80), (1, 2, 1, 300), (65, 2, 24)]
)
def test_against_reference(ops, shape, dtype):
    lse_shape = (shape[0], shape[2], shape[1]) if len(shape) == 4 else (shape[1], shape[0])
    outs, lses = [torch.randn(shape).to(dtype) for _ in range(2)], [torch.randn(lse_shape) * 5 for _ in range(2)]
    ops.seed = 0
    right = check(ops, outs[0], lses[0], outs[1], lses[1])
    for seed in range(1, 4):
        ops.seed = seed
        # rows at odd addresses, and lse with its rows outermost
        strange = [torch.empty(*shape[:-1], shape[-1] + 1, dtype=dtype)[..., 1:].copy_(x) for x in outs]
        strange_lse = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in lses]
        result = ops.merge_attention(strange[0], strange_lse[0], strange[1], strange_lse[1])
        for got, expected in zip(result, right, strict=True):
            assert_same_bits(got, expected)


@pytest.mark.parametrize("cut", [0, 1, 33, 64, 70])
def test_a_cut_through_the_keys(ops, dtype, cut):
    """Two parts of the keys, merged, give all of them; an empty part changes nothing."""
    problem = build(Case(((5, 70), (5, 70)), heads=(4, 2), head_dim=64), dtype)
    q, k, v = (torch.stack(x) for x in (problem.q, problem.k, problem.v))
    parts = [ops.attention(q, *kv, return_lse=True) for kv in ((k[:, :cut], v[:, :cut]), (k[:, cut:], v[:, cut:]))]
    out, lse = ops.merge_attention(*parts[0], *parts[1])
    whole, whole_lse = ops.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.01)
    if cut in (0, 70):
        assert_same_bits(out, whole)


def test_what_an_unseen_side_holds_does_not_matter(ops, dtype):
    bad, good = torch.full((1, 2, 1, 64), math.nan, dtype=dtype), torch.randn(1, 2, 1, 64).to(dtype)
    nothing, lse = torch.full((1, 1, 2), -math.inf), torch.zeros(1, 1, 2)
    for args in ((bad, nothing, good, lse), (good, lse, bad, nothing)):
        out, total = ops.merge_attention(*args)
        assert_same_bits(out, good)
        assert_same_bits(total, lse)
    out, total = ops.merge_attention(bad, nothing, bad, nothing)
    assert (out == 0).all() and (total == -math.inf).all()


def test_nothing_launches_nothing(ops):
    ops.merge_attention(torch.empty(2, 0, 2, 8), torch.empty(2, 2, 0), torch.empty(2, 0, 2, 8), torch.empty(2, 2, 0))
    assert ops.launches == []


def test_one_read_and_one_write(ops, dtype):
    shape = (2, 16, 4, 128)
    outs, lses = [torch.randn(shape).to(dtype) for _ in range(2)], [torch.randn(2, 4, 16) for _ in range(2)]
    ops.merge_attention(outs[0], lses[0], outs[1], lses[1])
    (launch,) = ops.launches
    size = outs[0].numel() * outs[0].element_size()
    for name in ("out_a", "out_b"):
        assert launch["traffic"][name]["load_bytes"] == launch["traffic"][name]["load_sectors"] * 32 == size
    assert launch["traffic"]["out"]["store_bytes"] == launch["traffic"]["out"]["store_sectors"] * 32 == size
