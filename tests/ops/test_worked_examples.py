"""Examples worked by hand, and properties that hold for any input, on every backend and dtype.

The numbers are of float64 computations. A dtype may differ from them by what its inputs and results are rounded to.
"""

import pytest
import torch
from tolerance import assert_same_bits

import attn_ext

pytestmark = pytest.mark.usefixtures("backend")

EXAMPLE_1 = {
    "x": [[1, 2], [3, 4]],
    "weight": [[1, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1, -1]],  # (in, out), columns Q Q K K V V
    "bias": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
    "qkv": [[1.1, 2.2, 2.3, 1.4, 3.5, -0.4], [3.1, 4.2, 4.3, 3.4, 7.5, -0.4]],
    "scores": [[5.61, 12.21], [13.01, 27.61]],
    "causal": {
        "weights": [[1, 0], [3.28423457e-05, 9.99967158e-01]],
        "out": [[3.5, -0.4], [7.49986863, -0.4]],
        "lse": [3.96686904, 19.52325107],
    },
    "no mask": {
        "weights": [[9.31376224e-03, 9.90686238e-01], [3.28423457e-05, 9.99967158e-01]],
        "out": [[7.46274495, -0.4], [7.49986863, -0.4]],
        "lse": [8.64313120, 19.52325107],
    },
}
EXAMPLE_2 = {
    "x": [[1, 0, 1, 0], [0, 1, 1, 0], [1, 1, 0, 1]],
    "weight": [[1, 0, 0, 1, 1, 1], [0, 1, 1, 0, 1, 0], [1, 0, 0, 1, 0, 1], [0, 1, 1, 0, 0, 1]],
    "bias": None,
    "qkv": [[2, 0, 0, 2, 1, 2], [1, 1, 1, 1, 1, 1], [1, 2, 2, 1, 2, 2]],
    "scores": [[0, 2, 4], [2, 2, 3], [4, 3, 4]],
    "causal": {
        "weights": [[1, 0, 0], [0.5, 0.5, 0], [0.40111209, 0.19777581, 0.40111209]],
        "out": [[1, 2], [1, 1.5], [1.40111209, 1.80222419]],
        "lse": [0, 2.10736074, 3.74194148],
    },
    "no mask": {
        "weights": [
            [0.04538836, 0.18669370, 0.76791794],
            [0.24825508, 0.24825508, 0.50348984],
            [0.40111209, 0.19777581, 0.40111209],
        ],
        "out": [[1.76791794, 1.81330630], [1.50348984, 1.75174492], [1.40111209, 1.80222419]],
        "lse": [3.09249953, 2.80751208, 3.74194148],
    },
}


def _close(actual, expected, ulps):
    """Within `ulps` roundings of the dtype, and the 9 digits the numbers are given with."""
    eps = ulps * torch.finfo(actual.dtype).eps
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=eps + 1e-8, atol=eps + 1e-8)


def _split(example, dtype):
    """The projected q, k, v (1, T, 1, 2)."""
    x = torch.tensor(example["x"], dtype=dtype)[None]
    weight = torch.tensor(example["weight"], dtype=dtype).T.contiguous()
    bias = None if example["bias"] is None else torch.tensor(example["bias"], dtype=dtype)
    return attn_ext.qkv_projection(x, weight, bias, n_heads=1)


@pytest.mark.parametrize("example", [EXAMPLE_1, EXAMPLE_2], ids=["two tokens", "three tokens"])
def test_projection(example, dtype):
    _close(torch.cat(_split(example, dtype), dim=-1)[0, :, 0], example["qkv"], 2)


@pytest.mark.parametrize("example", [EXAMPLE_1, EXAMPLE_2], ids=["two tokens", "three tokens"])
@pytest.mark.parametrize("masking", ["causal", "no mask"])
def test_softmax_of_the_scores(example, masking, dtype):
    """An error of one ulp in the largest score, 28 / sqrt 2 = 20, moves the weights by 20 ulps."""
    scores = torch.tensor(example["scores"], dtype=dtype)
    weights = attn_ext.masked_softmax(scores, causal=masking == "causal", scale=2**-0.5)
    _close(weights, example[masking]["weights"], 20)


@pytest.mark.parametrize("example", [EXAMPLE_1, EXAMPLE_2], ids=["two tokens", "three tokens"])
@pytest.mark.parametrize("masking", ["causal", "no mask"])
@pytest.mark.parametrize("presentation", ["dense", "varlen", "paged"])
def test_attention(example, masking, presentation, dtype):
    """From the given q, k and v; scores up to 20 times as sensitive to their rounding, values up to 7.5."""
    qkv = torch.tensor(example["qkv"], dtype=dtype).reshape(1, -1, 3, 1, 2)
    q, k, v = qkv.unbind(2)
    options = {"causal": masking == "causal", "return_lse": True}
    if presentation == "dense":
        out, lse = attn_ext.attention(q, k, v, **options)
        out, lse = out[0], lse[0]
    elif presentation == "varlen":
        cu = torch.tensor([0, q.shape[1]], dtype=torch.int32)
        out, lse = attn_ext.attention_varlen(q[0], k[0], v[0], cu, cu, **options)
    else:
        table, lens = torch.tensor([[0]], dtype=torch.int32), torch.tensor([q.shape[1]], dtype=torch.int32)
        out, lse = attn_ext.paged_attention(q, k, v, table, lens, **options)
        out, lse = out[0], lse[0]
    _close(out[:, 0], example[masking]["out"], 20)
    assert lse.dtype in (torch.float32, torch.float64)
    exact_inputs = 20 * torch.finfo(dtype).eps  # a rounded q or k moves a score of 20 by that
    torch.testing.assert_close(
        lse[0].double(), torch.tensor(example[masking]["lse"]).double(), rtol=0, atol=exact_inputs + 1e-5
    )


def test_the_whole_example_in_one_go(dtype):
    """Projection and attention of the first example, as a layer runs them."""
    out, lse = attn_ext.attention(*_split(EXAMPLE_1, dtype), causal=True, return_lse=True)
    _close(out[0, :, 0], EXAMPLE_1["causal"]["out"], 20)
    torch.testing.assert_close(
        lse[0, 0].double(),
        torch.tensor(EXAMPLE_1["causal"]["lse"]).double(),
        rtol=4 * torch.finfo(dtype).eps,
        atol=1e-5,
    )


# ------------------------------------------------------------------------------------------------- properties


def _layer(dtype, tokens=9, c=24, h=4, hkv=2, d=8):
    x = torch.randn(2, tokens, c).to(dtype)
    return x, (torch.randn((h + 2 * hkv) * d, c) / c**0.5).to(dtype), torch.randn((h + 2 * hkv) * d).to(dtype)


def test_property_1_fused_is_separate(dtype):
    """To the bit: three GEMMs with W_Q, W_K, W_V, and (H + 2 Hkv) head projections (C, D)."""
    x, weight, bias = _layer(dtype)
    q, k, v = attn_ext.qkv_projection(x, weight, bias, n_heads=4, n_kv_heads=2)
    fused = torch.cat([q, k, v], dim=-2)
    for first, last in ((0, 4), (4, 6), (6, 8)):
        rows = slice(first * 8, last * 8)
        assert_same_bits(attn_ext.linear(x, weight[rows], bias[rows]), fused[..., first:last, :].flatten(-2))
    for head in range(8):
        rows = slice(head * 8, head * 8 + 8)
        assert_same_bits(attn_ext.linear(x, weight[rows], bias[rows]), fused[..., head, :])


def test_property_2_split_and_concat_are_views(dtype):
    x, weight, bias = _layer(dtype)
    q, k, v = attn_ext.qkv_projection(x, weight, bias, n_heads=4, n_kv_heads=2)
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    out = attn_ext.attention(q, k, v, causal=True)  # takes the strided views as they are
    assert out.view(2, 9, 32).untyped_storage().data_ptr() == out.untyped_storage().data_ptr()


def test_property_3_row_local_projection(dtype):
    x, weight, bias = _layer(dtype)
    before = attn_ext.qkv_projection(x, weight, bias, n_heads=4, n_kv_heads=2)
    x[0, 4] += 1
    after = attn_ext.qkv_projection(x, weight, bias, n_heads=4, n_kv_heads=2)
    for a, b in zip(after, before, strict=True):
        changed = (a != b).flatten(2).any(-1)
        assert changed[0, 4] and changed.sum() == 1


def test_property_4_weights(dtype):
    """Read off by values that are the unit vectors: non-negative, rows sum to 1, causal, not symmetric."""
    q, k = torch.randn(2, 1, 8, 1, 8).to(dtype)
    v = torch.eye(8, dtype=dtype).reshape(1, 8, 1, 8)
    weights = attn_ext.attention(q, k, v, causal=True)[0, :, 0]
    assert (weights >= 0).all()
    torch.testing.assert_close(
        weights.double().sum(-1), torch.ones(8, dtype=torch.float64), rtol=0, atol=8 * torch.finfo(dtype).eps
    )
    assert (weights.triu(1) == 0).all()
    everything = attn_ext.attention(q, k, v)[0, :, 0]
    assert not torch.allclose(everything, everything.T, atol=0.01)


def test_property_5_scaling(backend):
    """With unit-variance entries the scores have variance d_k, and 1 after scaling: as the op sees them, through lse
    of single keys. 4096 samples put the estimate within 10 % (4.5 standard deviations of sqrt(2/4096))."""
    for d in (16, 64):
        q, k = torch.randn(2, 4096, 1, 1, d)
        for scale, variance in ((1.0, d), (None, 1.0)):
            scores = attn_ext.attention(q, k, k, scale=scale, return_lse=True)[1]
            assert scores.var().item() == pytest.approx(variance, rel=0.1)


def test_property_6_mask_before_softmax(dtype):
    """Rows sum to 1 whatever is masked, which masking after the softmax would break."""
    scores = torch.randn(6, 6).to(dtype) * 2
    mask = torch.rand(6, 6) < 0.5
    mask.fill_diagonal_(True)
    weights = attn_ext.masked_softmax(scores, mask)
    atol = 6 * torch.finfo(dtype).eps
    torch.testing.assert_close(weights.double().sum(-1), torch.ones(6, dtype=torch.float64), rtol=0, atol=atol)
    after = attn_ext.masked_softmax(scores).masked_fill(~mask, 0).double().sum(-1)
    assert (after < 1 - atol).any()


@pytest.mark.parametrize("tokens", [9, 70])
def test_property_7_no_leak(tokens, dtype):
    """Changing token j changes no output row before j, to the bit."""
    x, weight, bias = _layer(dtype, tokens)
    before = attn_ext.attention(*attn_ext.qkv_projection(x, weight, bias, n_heads=4, n_kv_heads=2), causal=True)
    for j in (1, tokens // 2, tokens - 1):
        changed = x.clone()
        changed[:, j] += 1
        qkv = attn_ext.qkv_projection(changed, weight, bias, n_heads=4, n_kv_heads=2)
        after = attn_ext.attention(*qkv, causal=True)
        assert_same_bits(after[:, :j], before[:, :j])
        assert not torch.equal(after[:, j:], before[:, j:])


def test_property_8_cache(dtype):
    """Appending a token changes nothing before it; prefill and decode one by one equal the full forward, to the bit."""
    x, weight, bias = _layer(dtype, tokens=21)
    x = x[:1]
    full = attn_ext.attention(*attn_ext.qkv_projection(x, weight, bias, n_heads=4, n_kv_heads=2), causal=True)
    caches = [torch.full((6, 4, 2, 8), float("nan"), dtype=dtype) for _ in range(2)]
    table = torch.tensor([[5, 2, 0, 4, 1, 3]], dtype=torch.int32)
    position = torch.arange(21)
    slots = table[0].long()[position // 4] * 4 + position % 4
    rows = []
    for begin, end in [(0, 7), *((i, i + 1) for i in range(7, 21))]:
        before = [c.clone() for c in caches]
        q = attn_ext.qkv_projection_to_cache(
            x[:, begin:end], weight, bias, *caches, slots[begin:end], n_heads=4, n_kv_heads=2
        )
        for cache, old in zip(caches, before, strict=True):
            earlier = slots[:begin]
            assert_same_bits(cache.flatten(0, 1)[earlier], old.flatten(0, 1)[earlier])
        rows.append(attn_ext.paged_attention(q, *caches, table, torch.tensor([end], dtype=torch.int32)))
    assert_same_bits(torch.cat(rows, dim=1), full)


def test_property_9_cross_attention(dtype):
    """Other lengths for queries and keys, no mask: every query sees every key."""
    q, k = torch.randn(2, 5, 4, 8).to(dtype), torch.randn(2, 7, 2, 8).to(dtype)
    v = torch.eye(7, 8, dtype=dtype).reshape(1, 7, 1, 8).expand(2, 7, 2, 8)
    weights = attn_ext.attention(q, k, v)[..., :7]
    assert weights.shape == (2, 5, 4, 7)
    assert (weights > 0).all()


def test_property_10_stored_fused_and_stored_separate(dtype):
    """GPT-2 stores one (in, out) matrix, Llama three (out, in): the same result from both, to the bit."""
    x, weight, bias = _layer(dtype)
    c_attn = weight.T.contiguous()
    from_gpt2 = attn_ext.qkv_projection(x, c_attn.T.contiguous(), bias, n_heads=4, n_kv_heads=2)
    separate = weight.split([32, 16, 16])
    fused = torch.cat(separate)
    from_llama = attn_ext.qkv_projection(x, fused, bias, n_heads=4, n_kv_heads=2)
    for a, b in zip(from_gpt2, from_llama, strict=True):
        assert_same_bits(a, b)


def test_property_11_two_paths(dtype):
    """The explicit path (scores, mask, softmax, weighted sum) agrees with the fused one and with torch's."""
    q, k, v = torch.randn(3, 2, 9, 4, 16).to(dtype)
    fused = attn_ext.attention(q, k, v, causal=True).transpose(1, 2)
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    explicit = attn_ext.masked_softmax(qt @ kt.transpose(-1, -2), causal=True, scale=0.25) @ vt
    theirs = torch.nn.functional.scaled_dot_product_attention(qt, kt, vt, is_causal=True)
    # scores, weights and outputs are each rounded to the dtype; scores reach 4, values 4
    atol = 3 * 4 * torch.finfo(dtype).eps + 1e-6
    torch.testing.assert_close(explicit, fused, rtol=0, atol=atol)
    torch.testing.assert_close(theirs, fused, rtol=0, atol=atol)
