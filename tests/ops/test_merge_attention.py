"""merge_attention: attention over the union of disjoint keys from the attention over each part."""

import math

import pytest
import torch
from problems import Case, build
from tolerance import assert_as_accurate_as_torch, assert_same_bits

import attn_ext
from attn_ext import reference

pytestmark = pytest.mark.usefixtures("backend")


def _wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(out_a, lse_a, out_b, lse_b):
    out, lse = attn_ext.merge_attention(out_a, lse_a, out_b, lse_b)
    with reference.precision(torch.float64):
        exact, exact_lse = reference.merge_attention(out_a, lse_a, out_b, lse_b)
    with reference.precision(_wide(out_a.dtype)):
        plain, plain_lse = reference.merge_attention(out_a, lse_a, out_b, lse_b)
    plain = plain.to(out_a.dtype)
    assert out.dtype == out_a.dtype and lse.dtype == _wide(out_a.dtype)
    finite = torch.cat([lse_a[lse_a.isfinite()], lse_b[lse_b.isfinite()]]).double().abs()
    size = finite.max().item() if finite.numel() else 0.0
    values = torch.cat([out_a.flatten(), out_b.flatten()]).double().abs()
    values = values[values.isfinite()]
    # an ulp in an lse moves a weight by |lse| ulps
    terms = (1 + size) * (values.max().item() if values.numel() else 0.0)
    assert_as_accurate_as_torch(out, exact, plain, terms=terms, what="out")
    assert_as_accurate_as_torch(lse, exact_lse, plain_lse, terms=1 + size, what="lse")
    return out, lse


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 5, 3, 7), (1, 9, 2, 64), (2, 3, 4, 80), (0, 3, 2, 8), (2, 0, 2, 8)]
)
def test_dense(shape, dtype):
    b, t, h, _ = shape
    outs = [torch.randn(shape).to(dtype) for _ in range(2)]
    lses = [(torch.randn(b, h, t) * 5).to(_wide(dtype)) for _ in range(2)]
    out, lse = check(outs[0], lses[0], outs[1], lses[1])
    assert out.shape == shape and lse.shape == (b, h, t)


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 3, 16), (0, 2, 8), (65, 2, 24)])
def test_varlen(shape, dtype):
    total, h, _ = shape
    outs = [torch.randn(shape).to(dtype) for _ in range(2)]
    lses = [(torch.randn(h, total) * 5).to(_wide(dtype)) for _ in range(2)]
    out, lse = check(outs[0], lses[0], outs[1], lses[1])
    assert out.shape == shape and lse.shape == (h, total)


@pytest.mark.parametrize("cut", [0, 1, 33, 64, 69, 70])
def test_a_cut_through_the_keys(cut, dtype):
    """Two parts of the keys, merged, give all of them; an empty part changes nothing."""
    problem = build(Case(((5, 70), (5, 70)), heads=(4, 2), head_dim=24), dtype)
    q, k, v = torch.stack(problem.q), torch.stack(problem.k), torch.stack(problem.v)
    whole, whole_lse = attn_ext.attention(q, k, v, return_lse=True)
    a = attn_ext.attention(q, k[:, :cut], v[:, :cut], return_lse=True)
    b = attn_ext.attention(q, k[:, cut:], v[:, cut:], return_lse=True)
    out, lse = check(*a, *b)
    # three roundings to the dtype (both parts and the merged result) instead of one
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, whole, rtol=2 * eps, atol=2 * eps * v.abs().max().item())
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)
    if cut in (0, 70):
        assert_same_bits(out, whole)
        assert_same_bits(lse, whole_lse)


def test_cascade_of_a_shared_prefix(dtype):
    """A prefix that every sequence shares, attended once, merged with each one's own causal suffix."""
    problem = build(Case(((3, 3), (3, 3)), heads=(4, 2), head_dim=16, seed=1), dtype)
    q, k, v = torch.stack(problem.q), torch.stack(problem.k), torch.stack(problem.v)
    prefix_k, prefix_v = torch.randn(1, 40, 2, 16).to(dtype), torch.randn(1, 40, 2, 16).to(dtype)
    shared = attn_ext.attention(q.reshape(1, 6, 4, 16), prefix_k, prefix_v, return_lse=True)
    shared_out = shared[0].reshape(2, 3, 4, 16)
    shared_lse = shared[1].reshape(4, 2, 3).transpose(0, 1)
    own = attn_ext.attention(q, k, v, causal=True, return_lse=True)
    out, lse = check(shared_out, shared_lse, *own)
    keys, values = (torch.cat([p.expand(2, -1, -1, -1), x], dim=1) for p, x in ((prefix_k, k), (prefix_v, v)))
    whole, whole_lse = attn_ext.attention(q, keys, values, causal=True, return_lse=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, whole, rtol=2 * eps, atol=2 * eps * 4)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


def test_empty_parts(dtype):
    """Of two parts of which one or both saw no key: lse -inf, and what its output holds does not matter."""
    out = torch.randn(1, 3, 2, 8).to(dtype)
    lse = torch.randn(1, 2, 3).to(_wide(dtype))
    empty = torch.full_like(lse, -math.inf)
    for junk in (torch.zeros_like(out), torch.full_like(out, math.nan)):
        for args in ((out, lse, junk, empty), (junk, empty, out, lse)):
            merged, merged_lse = attn_ext.merge_attention(*args)
            assert_same_bits(merged, out)
            assert_same_bits(merged_lse, lse)
        merged, merged_lse = attn_ext.merge_attention(junk, empty, junk, empty)
        assert (merged == 0).all()
        assert_same_bits(merged_lse, empty)


def test_far_apart(dtype):
    """A part whose lse is 1e4 below the other does not count, and nothing overflows."""
    a, b = torch.randn(2, 1, 3, 2, 8).to(dtype)
    high, low = (torch.full((1, 2, 3), x, dtype=_wide(dtype)) for x in (1e4, -1e4))
    assert_same_bits(attn_ext.merge_attention(a, high, b, low)[0], a)
    assert_same_bits(attn_ext.merge_attention(a, low, b, high)[0], b)
    check(a, high, b, high)
    check(a, low, b, low)


def test_order_does_not_matter(dtype):
    a, b = torch.randn(2, 2, 3, 2, 8).to(dtype)
    la, lb = torch.randn(2, 2, 2, 3).to(_wide(dtype))
    one, other = attn_ext.merge_attention(a, la, b, lb), attn_ext.merge_attention(b, lb, a, la)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(one[0], other[0], rtol=2 * eps, atol=4 * eps)
    torch.testing.assert_close(one[1], other[1], rtol=1e-6, atol=1e-6)


def test_strides(dtype):
    a, b = torch.randn(2, 3, 2, 5, 8).to(dtype).transpose(2, 3)
    la, lb = torch.randn(2, 3, 5, 2).to(_wide(dtype)).transpose(2, 3)
    la, lb = torch.stack([la, lb]).transpose(-1, -2).contiguous().transpose(-1, -2)
    expected = attn_ext.merge_attention(a.contiguous(), la.contiguous(), b.contiguous(), lb.contiguous())
    out, lse = attn_ext.merge_attention(a, la, b, lb)
    assert_same_bits(out, expected[0])
    assert_same_bits(lse, expected[1])
