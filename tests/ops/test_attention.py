"""attention, attention_varlen and paged_attention: one problem, presented in three ways."""

import math

import pytest
import torch
from problems import (
    Case,
    build,
    check_accuracy,
    check_same,
    random_case,
    run_dense,
    run_each,
    run_paged,
    run_varlen,
)
from tolerance import assert_same_bits

import attn_ext
from attn_ext import reference

pytestmark = pytest.mark.usefixtures("backend")

LENGTHS = [
    (1, 1),
    (1, 2),
    (2, 1),
    (5, 3),
    (6, 6),
    (7, 7),
    (1, 63),
    (3, 64),
    (1, 65),
    (12, 127),
    (13, 129),
    (0, 5),
    (3, 0),
]
LONG = [(1, 511), (1, 512), (2, 513), (1, 1025), (7, 577)]
CASES = [
    *(Case(((7, 7), (1, 65), (3, 10)), head_dim=d) for d in (1, 3, 7, 16, 64, 80, 96, 128, 256, 300)),
    *(Case((pair,), heads=(3, 1), head_dim=d) for pair in LENGTHS for d in (8, 64)),
    *(Case((pair,), head_dim=32) for pair in LONG),
    Case(((1, 1025), (600, 600), (2, 3)), head_dim=8),  # splits of 512 keys, long and short rows together
    *(
        Case(((5, 70), (1, 9)), heads=heads)
        for heads in ((1, 1), (2, 2), (3, 1), (4, 1), (8, 1), (6, 2), (6, 3), (8, 8))
    ),
    # every option alone
    Case(((5, 70), (70, 5)), causal=False),
    Case(((5, 70), (70, 5)), scale=0.0),
    Case(((5, 70), (70, 5)), scale=-0.7),
    *(Case(((9, 140), (70, 70)), window=w) for w in ((0, 0), (3, -1), (64, 0), (100, 7))),
    *(Case(((9, 140), (70, 70)), causal=False, window=w) for w in ((0, 0), (-1, 3), (3, -1), (64, 64), (2, 30))),
    *(Case(((5, 70), (70, 5)), softcap=c, magnitude=3.0) for c in (0.5, 20.0)),
    *(Case(((5, 70), (70, 5)), heads=(4, 2), alibi=a, causal=c) for a in ("h", "bh") for c in (True, False)),
    Case(((5, 70), (70, 5), (3, 0)), heads=(4, 2), sinks=True),
    *(Case(((5, 70), (5, 70)), causal=False, mask=m) for m in ("", "k", "q", "qk", "b", "bk", "hqk", "bhqk")),
    *(Case(((5, 70), (5, 70)), causal=False, bias=m) for m in ("", "k", "q", "qk", "b", "bk", "hqk", "bhqk")),
    Case(((5, 70), (9, 9)), bias="bhqk", bias_in_q_dtype=True),
    Case(
        ((70, 70),),
        heads=(8, 2),
        head_dim=64,
        mask="bqk",
        bias="h",
        window=(40, -1),
        softcap=5.0,
        alibi="h",
        sinks=True,
    ),
    # scores of about 1e4: one key takes it all
    Case(((5, 70), (9, 9)), head_dim=64, magnitude=100.0, scale=0.2),
    *(random_case(seed) for seed in range(48)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_presentation(case, dtype):
    """As accurate as torch; the same to the bit as one by one, as a dense batch, and over pages of any size."""
    problem = build(case, dtype)
    varlen = run_varlen(problem)
    check_accuracy(case, dtype, *varlen, "varlen")
    check_same(run_each(problem), varlen, "one by one")
    check_same(run_paged(problem, 16, "HND"), varlen, "paged, block size 16")
    check_same(run_paged(problem, 5, "interleaved"), varlen, "paged, block size 5")
    if len(set(case.lens)) == 1:
        check_same(run_dense(problem), varlen, "dense")
        check_same(run_paged(problem, 64, "NHD", ragged=False), varlen, "paged, dense queries")


@pytest.mark.parametrize("block_size", [1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 128, 300])
@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
def test_block_sizes(block_size, layout):
    case = Case(((5, 130), (1, block_size), (1, block_size + 1), (2, 3 * block_size)), heads=(4, 2), head_dim=24)
    problem = build(case, torch.float32)
    check_same(run_paged(problem, block_size, layout), run_varlen(problem), "paged")


def test_lse_is_optional(dtype):
    problem = build(Case(((5, 70), (5, 70))), dtype)
    q, k, v = torch.stack(problem.q), torch.stack(problem.k), torch.stack(problem.v)
    out, _ = attn_ext.attention(q, k, v, causal=True, return_lse=True)
    assert_same_bits(attn_ext.attention(q, k, v, causal=True), out)


def test_defaults():
    """attention and attention_varlen see everything, paged_attention is causal; scale is 1/sqrt(D)."""
    case = Case(((5, 7), (5, 7)), head_dim=16)
    problem = build(case, torch.float32)
    q, k, v = torch.stack(problem.q), torch.stack(problem.k), torch.stack(problem.v)
    everything = attn_ext.attention(q, k, v, causal=False, scale=0.25)
    assert_same_bits(attn_ext.attention(q, k, v), everything)
    cu_q, cu_k = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([0, 7, 14], dtype=torch.int32)
    varlen = attn_ext.attention_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_q, cu_k)
    assert_same_bits(varlen, everything.flatten(0, 1))
    table, lens = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([7, 7], dtype=torch.int32)
    assert_same_bits(attn_ext.paged_attention(q, k, v, table, lens), attn_ext.attention(q, k, v, causal=True))


def test_max_seqlen_is_a_hint_only(dtype):
    case = Case(((5, 70), (1, 9)))
    problem = build(case, dtype)
    q, k, v = torch.cat(problem.q), torch.cat(problem.k), torch.cat(problem.v)
    cu_q, cu_k = torch.tensor([0, 5, 6], dtype=torch.int32), torch.tensor([0, 70, 79], dtype=torch.int32)
    given = attn_ext.attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=5, max_seqlen_k=70)
    assert_same_bits(given, attn_ext.attention_varlen(q, k, v, cu_q, cu_k))


# -------------------------------------------------------------------------------- what must not reach an output


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("tq", "tk"), [(7, 7), (6, 70), (3, 64), (65, 65), (2, 600)])
def test_poison_at_unseen_keys_changes_nothing(tq, tk, poison, dtype):
    """Row by row, keys the row does not see hold NaN or inf, in K and in V; each of causal, window, mask in turn."""
    problem = build(Case(((tq, tk),), heads=(2, 1), head_dim=8), dtype)
    q, k, v = problem.q[0][None], problem.k[0][None], problem.v[0][None]
    mask = torch.rand(1, 1, tq, tk) < 0.5
    i, j = torch.arange(tq)[:, None] + tk - tq, torch.arange(tk)
    for options, seen in (
        ({"causal": True}, j <= i),
        ({"window": (3, 2)}, (j >= i - 3) & (j <= i + 2)),
        ({"causal": True, "window": (70, -1)}, (j <= i) & (j >= i - 70)),
        ({"mask": mask}, mask[0, 0]),
    ):
        out, lse = attn_ext.attention(q, k, v, return_lse=True, **options)
        assert torch.isfinite(out).all()
        for row in {0, tq // 2, tq - 1}:
            unseen = ~seen[row]
            bad_k, bad_v = k.clone(), v.clone()
            bad_k[:, unseen] = poison
            bad_v[:, unseen] = poison
            bad_out, bad_lse = attn_ext.attention(q, bad_k, bad_v, return_lse=True, **options)
            assert_same_bits(bad_out[:, row], out[:, row], f"{options}, row {row}")
            assert_same_bits(bad_lse[..., row], lse[..., row], f"{options}, row {row}: lse")


def test_minus_inf_bias_hides_a_value(dtype):
    """A key whose score is -inf is not seen: a NaN in its value stays there."""
    problem = build(Case(((5, 70),), head_dim=8), dtype)
    q, k, v = problem.q[0][None], problem.k[0][None], problem.v[0][None]
    bias = torch.zeros(1, 1, 1, 70, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    bias[..., 3::2] = -math.inf
    out = attn_ext.attention(q, k, v, bias=bias)
    v[:, 3::2] = math.nan
    assert torch.isfinite(out).all()
    assert_same_bits(attn_ext.attention(q, k, v, bias=bias), out)


# ------------------------------------------------------------------------------------ extremes that are visible


def _like_reference(q, k, v, **options):
    """NaN and inf where the reference has them, and finite values close to it."""
    out, lse = attn_ext.attention(q, k, v, return_lse=True, **options)
    exact, exact_lse = reference.attention(q, k, v, return_lse=True, **options)
    eps = torch.finfo(q.dtype).eps  # weights may be rounded to the dtype: eps times values of about 1
    torch.testing.assert_close(out, exact, equal_nan=True, rtol=max(4 * eps, 1e-5), atol=max(2 * eps, 1e-5))
    torch.testing.assert_close(lse, exact_lse, equal_nan=True)
    return out


@pytest.mark.parametrize("tk", [5, 64, 70, 600])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_visible_nan_and_inf_propagate(bad, tk, dtype):
    problem = build(Case(((4, tk),), heads=(2, 1), head_dim=8), dtype)
    q, k, v = problem.q[0][None], problem.k[0][None], problem.v[0][None]
    clean = attn_ext.attention(q, k, v, causal=True)
    for name, x in (("q", q), ("k", k), ("v", v)):
        dirty = {"q": q, "k": k, "v": v}
        dirty[name] = x.clone()
        dirty[name][0, -2, 0, 3] = bad
        out = _like_reference(**dirty, causal=True)
        if name != "q":  # the last key but one: seen by the last two rows only
            assert_same_bits(out[:, :2], clean[:, :2])
        else:
            assert_same_bits(out[:, [0, 1, 3]], clean[:, [0, 1, 3]])
    _like_reference(q, k * 0 + bad, v, causal=True)
    _like_reference(q, k, v * 0 + bad, causal=True)


@pytest.mark.parametrize("rows", [1, 3, 20, 130])
@pytest.mark.parametrize("head_dim", [7, 72])
def test_infinities_of_both_signs_and_nan_meet(head_dim, rows, dtype):
    """In each element of a value another mix of them; a row sees those up to its own key."""
    q, k, v = (torch.randn(1, n, 1, head_dim).to(dtype) for n in (rows, 140, 140))
    v[..., 0], v[..., 1] = math.inf, -math.inf
    v[0, :, 0, 2] = torch.randn(140).sign() * math.inf
    v[0, -30:, :, 3], v[0, -20:, :, 3] = math.inf, -math.inf
    v[0, 5, :, 4], v[0, -2, :, 5] = math.nan, math.inf
    for options in ({}, {"softcap": 3.0}, {"mask": torch.rand(1, 1, rows, 140) < 0.5}):
        _like_reference(q, k, v, causal=True, **options)


def test_large_scores_that_cancel(dtype):
    """All scores equal and huge: the mean, without overflow."""
    q = torch.full((1, 3, 2, 4), 64.0, dtype=dtype)
    k, v = (
        torch.full((1, 70, 1, 4), 64.0, dtype=dtype),
        torch.arange(70.0, dtype=dtype).reshape(1, 70, 1, 1).repeat(1, 1, 1, 4),
    )
    out, lse = attn_ext.attention(q, k, v, scale=10.0, return_lse=True)
    torch.testing.assert_close(out, torch.full_like(out, 34.5))
    torch.testing.assert_close(lse, torch.full_like(lse, 163840.0 + math.log(70)))


def test_overflowing_scores_like_reference():
    """Products past the largest float32: inf where the reference has inf, as NaN rows or unseen keys."""
    q = torch.full((1, 2, 1, 4), 1e30)
    q[0, 1] = 1.0
    k = torch.ones(1, 70, 1, 4)
    k[0, 3], k[0, 69] = -1e30, 1e30
    _like_reference(q, k, torch.randn(1, 70, 1, 4), scale=1.0)
    _like_reference(-q, k, torch.randn(1, 70, 1, 4), scale=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("size", [2.0**-149, 2.0**-130, 2.0**-126, 2.0**-118, 2.0**-100])
def test_denormals(size, rows, dtype, backend):
    """They may count as 0, as operands and as results, which changes each by less than the smallest normal number."""
    n, tiny = 70, torch.finfo(torch.float32).smallest_normal
    q, k = torch.randn(1, rows, 2, 32).to(dtype), torch.randn(1, n, 1, 32).to(dtype)
    v = (torch.randn(1, n, 1, 32) * size).to(dtype)
    error = (attn_ext.attention(q, k, v).double() - reference.attention(q.double(), k.double(), v.double())).abs()
    # Weights sum to 1: the values' changes are one of the result. n products, n sums, what rescales them after each of
    # two steps of keys, and the final factor, which is at most 1. Beyond that, weights and result are rounded to the
    # dtype, and sums to float32.
    counted_as_zero = (1 + 2 * n + 2 + 1) * tiny
    roundings = 5 * torch.finfo(dtype).eps + n * torch.finfo(torch.float32).eps
    assert (error <= counted_as_zero + roundings * v.abs().max().double()).all()
    lse = attn_ext.attention((q * size).to(dtype), k, v, return_lse=True)[1]
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(n)))


def test_smallest_half_values():
    """float16 below its normal range is read and written exactly."""
    v = torch.full((1, 1, 1, 8), 2.0**-24, dtype=torch.float16)
    assert_same_bits(attn_ext.attention(torch.zeros_like(v), torch.zeros_like(v), v), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_the_smallest_scales_and_softcaps_count(backend, dtype, rows):
    q, k, v = (torch.randn(1, n, 1, 32).to(dtype) for n in (rows, 8, 8))
    huge_q, huge_k = ((t.float() * 2e18).to(dtype) for t in (q, k))
    options = {"scale": 1e-38, "return_lse": True}
    out, lse = attn_ext.attention(huge_q, huge_k, v, **options)
    exact, exact_lse = reference.attention(huge_q.double(), huge_k.double(), v.double(), **options)
    torch.testing.assert_close(out.double(), exact, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
    small = torch.finfo(torch.float32).smallest_normal  # every score becomes this, its negative or 0
    out = attn_ext.attention(q, k, v, softcap=small)
    mean = v.double().mean(1, keepdim=True).expand(out.shape)
    torch.testing.assert_close(out.double(), mean, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_infinite_value_is_seen_whatever_its_weight(backend, dtype):
    """Its score is so far below the largest that the difference overflows; a weight of 0 times inf is NaN."""
    q, k, v = torch.zeros(1, 33, 1, 32), torch.zeros(1, 64, 1, 32), torch.randn(1, 64, 1, 32)
    q[..., 0], k[..., 0], k[0, 5, 0, 0], v[0, 9, 0, 3] = 1e19, -2e19, 2e19, math.inf
    mask = torch.ones(1, 1, 33, 64, dtype=torch.bool)
    mask[..., -1] = False
    q, k, v = (t.to(dtype) for t in (q, k, v))
    for rows in (1, 2, 3, 16, 17, 33):
        out = attn_ext.attention(q[:, :rows], k, v, scale=1.0, mask=mask[:, :, :rows])
        assert torch.isnan(out[..., 3]).all() and torch.isfinite(out[..., :3]).all(), rows


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("key", [0, 512])  # alone in its split of keys, or not
def test_a_score_of_nan_makes_nan(backend, dtype, rows, key):
    q, k, v = (torch.randn(1, n, 1, 32).to(dtype) for n in (rows, 513, 513))
    k[0, key] = math.nan
    out, lse = attn_ext.attention(q, k, v, return_lse=True)
    assert torch.isnan(out).all() and torch.isnan(lse).all()


def test_one_key_has_all_the_weight(backend, dtype):
    """lse is the score itself, to a rounding of the score."""
    q, k, v = torch.randn(1, 40, 2, 24).mul(100).to(dtype), torch.randn(1, 1, 2, 24).to(dtype), torch.randn(1, 1, 2, 24)
    out, lse = attn_ext.attention(q, k, v.to(dtype), scale=1e-20, return_lse=True)
    torch.testing.assert_close(lse.double(), torch.einsum("bthd,bshd->bht", q.double(), k.double()) * 1e-20,
                               rtol=1e-4, atol=0)  # fmt: skip
    assert_same_bits(out, v.to(dtype).expand_as(out))
