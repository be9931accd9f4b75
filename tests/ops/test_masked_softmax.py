"""masked_softmax: softmax over the last dim of scale * scores, bool or additive mask, bottom-right causal."""

import math

import pytest
import torch
from tolerance import assert_as_accurate_as_torch, assert_same_bits

import attn_ext
from attn_ext import reference

pytestmark = pytest.mark.usefixtures("backend")

SHAPES = [
    (1, 1), (1, 2), (2, 1), (5, 3), (3, 5), (0, 4), (4, 0), (0, 3, 4), (2, 0, 4), (7, 7), (2, 3, 16), (2, 3, 4, 17),
    (1, 2, 6, 63), (2, 1, 5, 64), (3, 65), (2, 5, 129), (1, 1, 2, 1000), (2, 2, 2, 3, 9),
]  # fmt: skip


def check(scores, mask=None, **options):
    out = attn_ext.masked_softmax(scores, mask, **options)
    with reference.precision(torch.float64):
        exact = reference.masked_softmax(scores, mask, **options)
    with reference.precision(scores.dtype):
        plain = reference.masked_softmax(scores, mask, **options)
    assert out.dtype == scores.dtype
    size = (scores.double() * options.get("scale", 1.0)).abs()
    size = size[torch.isfinite(size)]
    # an ulp in a score s moves a weight, which is at most 1, by |s| ulps
    terms = 1 + (size.max().item() if size.numel() else 0.0)
    assert_as_accurate_as_torch(out, exact, plain, terms=terms, what=f"masked_softmax {options}")
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, dtype):
    scores = torch.randn(shape).to(dtype) * 3
    for causal in (False, True):
        assert check(scores, causal=causal).shape == shape
        check(scores, torch.rand(shape) < 0.6, causal=causal, scale=0.3)


@pytest.mark.parametrize(
    "mask_shape", [(), (1,), (70,), (5, 1), (5, 70), (1, 5, 70), (3, 1, 1), (2, 1, 1, 70), (2, 3, 5, 70), (2, 1, 5, 1)]
)
def test_masks_broadcast(mask_shape, dtype):
    scores = torch.randn(2, 3, 5, 70).to(dtype)
    check(scores, torch.rand(mask_shape) < 0.6, causal=True)
    check(scores, torch.randn(mask_shape).to(dtype), causal=True)
    check(scores, torch.randn(mask_shape).to(torch.float64 if dtype == torch.float64 else torch.float32))


@pytest.mark.parametrize("scale", [0.0, -1.5, 0.125, 40.0])
def test_scale(scale, dtype):
    check(torch.randn(3, 4, 33).to(dtype), scale=scale)


def test_weights_are_a_distribution(dtype):
    """Non-negative, rows sum to 1, nothing above the bottom-right diagonal."""
    out = check(torch.randn(2, 3, 9, 40).to(dtype) * 4, causal=True)
    assert (out >= 0).all()
    ulps = 40 * torch.finfo(dtype).eps / 2  # 40 weights, each at most 1 and rounded once
    torch.testing.assert_close(out.double().sum(-1), torch.ones(2, 3, 9, dtype=torch.float64), rtol=0, atol=ulps)
    above = torch.ones(9, 40, dtype=torch.bool).triu(40 - 9 + 1)
    assert (out[..., above] == 0).all()


def test_rows_that_see_nothing(dtype):
    """All-False, all -inf, more queries than keys: zeros, not NaN."""
    scores = torch.randn(2, 4, 6).to(dtype)
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1] = False
    out = check(scores, mask)
    assert (out[:, 1] == 0).all()
    additive = torch.zeros(4, 6, dtype=dtype).masked_fill(~mask, -math.inf)
    assert_same_bits(check(scores, additive), out)
    assert (check(torch.full((3, 70), -math.inf, dtype=dtype)) == 0).all()
    assert (check(torch.randn(7, 3).to(dtype), causal=True)[:4] == 0).all()


def test_poison_where_nothing_is_seen(dtype):
    """NaN and inf under the mask or above the diagonal do not reach a visible weight."""
    scores = torch.randn(3, 70, 70).to(dtype)
    clean = attn_ext.masked_softmax(scores, causal=True)
    above = torch.ones(70, 70, dtype=torch.bool).triu(1)
    for bad in (math.nan, math.inf):
        assert_same_bits(attn_ext.masked_softmax(scores.masked_fill(above, bad), causal=True), clean)
        assert_same_bits(attn_ext.masked_softmax(scores.masked_fill(above, bad), ~above), clean)


def test_visible_nan_and_inf_propagate(dtype):
    """A NaN or +inf makes its own row NaN; -inf is weight 0."""
    scores = torch.randn(4, 70).to(dtype)
    clean = attn_ext.masked_softmax(scores)
    scores[0, 3], scores[1, 69], scores[2, 7] = math.nan, math.inf, -math.inf
    out = check(scores)
    assert out[:2].isnan().all()
    assert out[2, 7] == 0
    assert_same_bits(out[3], clean[3])


def test_large_scores():
    """1e4 apart, all equal at 1e38, and the largest negative number used as a mask by others."""
    scores = torch.tensor([[0.0, 1e4, 1e4], [1e38, 1e38, -1e38], [-3.4e38, -3.4e38, -3.4e38]])
    torch.testing.assert_close(check(scores), torch.tensor([[0, 0.5, 0.5], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]]))


def test_strides(dtype):
    """Transposed, sliced and expanded scores and masks equal their contiguous copies to the bit."""
    wide = torch.randn(3, 9, 4, 50).to(dtype)
    mask = (torch.rand(4, 1, 1, 50) < 0.6).expand(4, 3, 9, 50)
    for scores, m in (
        (wide.transpose(1, 2), None),
        (wide[:, 1:8, :, 5:42], None),
        (wide.permute(2, 0, 1, 3), mask),
        (wide[:1, :1].expand(3, 9, 4, 50), torch.rand(50, 4).T < 0.5),
        (torch.randn(50, 4).to(dtype).T, None),  # the last stride is not 1
    ):
        expected = attn_ext.masked_softmax(scores.contiguous(), None if m is None else m.contiguous(), causal=True)
        assert_same_bits(attn_ext.masked_softmax(scores, m, causal=True), expected)


def test_rows_stand_alone(dtype):
    scores = torch.randn(4, 13, 300).to(dtype)
    full = attn_ext.masked_softmax(scores)
    assert_same_bits(attn_ext.masked_softmax(scores[2:3, 5:6]), full[2:3, 5:6])
    assert_same_bits(attn_ext.masked_softmax(scores[:, 7:]), full[:, 7:])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_score_spreads_to_seen_keys_only(backend, dtype, bad):
    """A NaN or +inf score makes the row's seen weights NaN; what is not seen stays 0, by causality or by mask."""
    scores = torch.randn(7, 70).to(dtype)
    scores[3, 10] = bad
    mask = torch.ones(7, 70, dtype=torch.bool).tril(63)
    causal, masked = attn_ext.masked_softmax(scores, causal=True), attn_ext.masked_softmax(scores, mask)
    assert torch.equal(causal.isnan(), masked.isnan()) and torch.equal(causal.nan_to_num(), masked.nan_to_num())
    assert torch.equal(causal[3].isnan(), mask[3]) and not causal[3, ~mask[3]].any()
    assert not causal[[0, 1, 2, 4, 5, 6]].isnan().any()
    assert torch.equal(causal.isnan(), reference.masked_softmax(scores, causal=True).isnan())
