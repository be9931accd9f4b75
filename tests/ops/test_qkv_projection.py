"""qkv_projection and qkv_projection_to_cache: one GEMM, three views; or K and V straight into the cache."""

import pytest
import torch
from problems import new_cache
from tolerance import assert_as_accurate_as_torch, assert_same_bits

import attn_ext
from attn_ext import reference

pytestmark = pytest.mark.usefixtures("backend")

HEADS = [(1, 1, 1), (1, 1, 7), (2, 1, 16), (3, 3, 8), (4, 2, 24), (8, 1, 16), (6, 2, 80), (3, 1, 64)]  # H, Hkv, D


def _inputs(h, hkv, d, dtype, tokens=(2, 7), c=40, has_bias=True):
    x = torch.randn(*tokens, c).to(dtype)
    weight = (torch.randn((h + 2 * hkv) * d, c) / c**0.5).to(dtype)
    return x, weight, torch.randn((h + 2 * hkv) * d).to(dtype) if has_bias else None


def _rows(weight, bias, h, hkv, d):
    """The weight's and bias's parts of q, k and v."""
    sizes = [h * d, hkv * d, hkv * d]
    return list(zip(weight.split(sizes), [None] * 3 if bias is None else bias.split(sizes), strict=True))


@pytest.mark.parametrize(("h", "hkv", "d"), HEADS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_accuracy_and_split(h, hkv, d, has_bias, dtype):
    x, weight, bias = _inputs(h, hkv, d, dtype, has_bias=has_bias)
    parts = attn_ext.qkv_projection(x, weight, bias, n_heads=h, n_kv_heads=hkv)
    with reference.precision(torch.float64):
        exact = reference.qkv_projection(x, weight, bias, n_heads=h, n_kv_heads=hkv)
    with reference.precision(dtype):
        plain = reference.qkv_projection(x, weight, bias, n_heads=h, n_kv_heads=hkv)
    terms = (x.double().abs() @ weight.double().abs().T).max().item() + (0 if bias is None else bias.abs().max().item())
    for name, part, e, p, heads in zip("qkv", parts, exact, plain, (h, hkv, hkv), strict=True):
        assert part.shape == (2, 7, heads, d) and part.dtype == dtype
        assert_as_accurate_as_torch(part, e, p, terms=terms, what=name)


@pytest.mark.parametrize(("h", "hkv", "d"), HEADS)
def test_fused_is_separate_to_the_bit(h, hkv, d, dtype):
    """Equal to three GEMMs, and to one per head."""
    x, weight, bias = _inputs(h, hkv, d, dtype)
    parts = attn_ext.qkv_projection(x, weight, bias, n_heads=h, n_kv_heads=hkv)
    for name, part, (w, b) in zip("qkv", parts, _rows(weight, bias, h, hkv, d), strict=True):
        assert_same_bits(part.flatten(-2), attn_ext.linear(x, w, b), name)
        for head, (w_head, b_head) in enumerate(zip(w.split(d), b.split(d), strict=True)):
            assert_same_bits(part[..., head, :], attn_ext.linear(x, w_head, b_head), f"{name}, head {head}")


def test_parts_are_views_of_one_buffer(dtype):
    """No copy in the split, none in attention, none in the concat of the heads."""
    x, weight, bias = _inputs(4, 2, 16, dtype)
    q, k, v = attn_ext.qkv_projection(x, weight, bias, n_heads=4, n_kv_heads=2)
    storage = q.untyped_storage()
    assert k.untyped_storage().data_ptr() == storage.data_ptr() == v.untyped_storage().data_ptr()
    assert storage.nbytes() == 2 * 7 * 8 * 16 * q.element_size()
    assert (q.storage_offset(), k.storage_offset(), v.storage_offset()) == (0, 4 * 16, 6 * 16)
    assert q.stride() == k.stride() == v.stride() == (7 * 8 * 16, 8 * 16, 16, 1)
    out = attn_ext.attention(q, k, v, causal=True)
    assert_same_bits(out, attn_ext.attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True))
    assert out.flatten(-2).data_ptr() == out.data_ptr()


def test_kv_heads_default_to_heads(dtype):
    x, weight, bias = _inputs(3, 3, 8, dtype)
    for a, b in zip(
        attn_ext.qkv_projection(x, weight, bias, n_heads=3),
        attn_ext.qkv_projection(x, weight, bias, n_heads=3, n_kv_heads=3),
        strict=True,
    ):
        assert_same_bits(a, b)


@pytest.mark.parametrize("tokens", [(1,), (5,), (2, 3), (1, 2, 3), (0,), (2, 0), (0, 2)])
def test_leading_dims(tokens, dtype):
    x, weight, bias = _inputs(2, 1, 8, dtype, tokens)
    q, k, v = attn_ext.qkv_projection(x, weight, bias, n_heads=2, n_kv_heads=1)
    assert q.shape == (*tokens, 2, 8) and k.shape == v.shape == (*tokens, 1, 8)


def test_a_row_depends_on_its_own_row_only(dtype):
    x, weight, bias = _inputs(4, 2, 16, dtype, (13,))
    before = attn_ext.qkv_projection(x, weight, bias, n_heads=4, n_kv_heads=2)
    x[5] = torch.randn(40)
    after = attn_ext.qkv_projection(x, weight, bias, n_heads=4, n_kv_heads=2)
    others = [i for i in range(13) if i != 5]
    for a, b in zip(after, before, strict=True):
        assert_same_bits(a[others], b[others])
        assert not torch.equal(a[5], b[5])


# ------------------------------------------------------------------------------------------- into the cache


def _tables(max_pos, d):
    angle = torch.arange(max_pos)[:, None] / 100.0 ** (torch.arange(0, d, 2) / d)
    return angle.cos(), angle.sin()


@pytest.mark.parametrize(("h", "hkv", "d"), HEADS)
@pytest.mark.parametrize("layout", ["NHD", "HND", "interleaved"])
@pytest.mark.parametrize("block_size", [1, 4, 17])
def test_to_cache_equals_projection_and_append(h, hkv, d, layout, block_size, dtype):
    """To the bit, without rotation; skipped rows and all other slots keep theirs."""
    x, weight, bias = _inputs(h, hkv, d, dtype, (9,))
    slots = torch.randperm(12)[:9]
    slots[3] = slots[7] = -1
    caches = new_cache(-(-12 // block_size), block_size, hkv, d, dtype, layout)
    expected_caches = [c.clone() for c in caches]
    q, k, v = attn_ext.qkv_projection(x, weight, bias, n_heads=h, n_kv_heads=hkv)
    attn_ext.append_kv(k, v, *expected_caches, slots)
    got = attn_ext.qkv_projection_to_cache(x, weight, bias, *caches, slots, n_heads=h, n_kv_heads=hkv)
    assert_same_bits(got, q, "q")
    assert_same_bits(caches[0], expected_caches[0], "key_cache")
    assert_same_bits(caches[1], expected_caches[1], "value_cache")


@pytest.mark.parametrize(
    ("h", "hkv", "d"), [heads for heads in HEADS if heads[2] % 2 == 0] + [(2, 1, 2), (2, 2, 6), (1, 1, 34)]
)
def test_to_cache_with_rope(h, hkv, d, dtype):
    """q and k rotated in float32 before their one rounding, v not; positions in any order, repeated, far out."""
    x, weight, bias = _inputs(h, hkv, d, dtype, (2, 5))
    cos, sin = _tables(50, d)
    positions = torch.tensor([3, 49, 0, 0, 17, 4, 5, 6, 7, 31])
    slots = torch.tensor([0, 1, 2, -1, 4, 11, 10, 9, 8, 7])
    rope = (cos, sin, positions)
    caches = new_cache(3, 4, hkv, d, dtype)
    q = attn_ext.qkv_projection_to_cache(x, weight, bias, *caches, slots, n_heads=h, n_kv_heads=hkv, rope=rope)
    results = []
    for precision in (torch.float64, dtype):
        k, v = new_cache(3, 4, hkv, d, precision)
        with reference.precision(precision):
            results.append((reference.qkv_projection_to_cache(
                x, weight, bias, k, v, slots, n_heads=h, n_kv_heads=hkv, rope=rope), k, v))  # fmt: skip
    terms = 2 * (x.double().abs() @ weight.double().abs().T + bias.double().abs()).max().item()
    assert q.shape == (2, 5, h, d)
    for name, got, exact, plain in zip(("q", "key_cache", "value_cache"), (q, *caches), *results, strict=True):
        assert_as_accurate_as_torch(got, exact, plain, terms=terms, what=name)  # slots not written are NaN in all


def test_rope_at_position_0_is_no_rotation(dtype):
    x, weight, bias = _inputs(2, 1, 16, dtype, (5,))
    rope = (*_tables(4, 16), torch.zeros(5, dtype=torch.int64))
    plain, rotated = new_cache(2, 4, 1, 16, dtype), new_cache(2, 4, 1, 16, dtype)
    slots = torch.arange(5)
    q = attn_ext.qkv_projection_to_cache(x, weight, bias, *plain, slots, n_heads=2, n_kv_heads=1)
    q_rotated = attn_ext.qkv_projection_to_cache(x, weight, bias, *rotated, slots, n_heads=2, n_kv_heads=1, rope=rope)
    torch.testing.assert_close(q_rotated, q, rtol=0, atol=0)  # -0 + 0 is 0: equal, though not always to the bit
    torch.testing.assert_close(rotated[0], plain[0], rtol=0, atol=0, equal_nan=True)
    assert_same_bits(rotated[1], plain[1])


def test_rope_rows_stand_alone(dtype):
    """A token's q, k and v do not depend on which tokens it is projected with."""
    x, weight, bias = _inputs(4, 2, 24, dtype, (13,))
    cos, sin = _tables(20, 24)
    positions = torch.arange(13) + 3
    whole, single = new_cache(4, 4, 2, 24, dtype), new_cache(4, 4, 2, 24, dtype)
    slots = torch.arange(13)
    q = attn_ext.qkv_projection_to_cache(
        x, weight, bias, *whole, slots, n_heads=4, n_kv_heads=2, rope=(cos, sin, positions)
    )
    for i in range(13):
        one = slice(i, i + 1)
        q_i = attn_ext.qkv_projection_to_cache(
            x[one], weight, bias, *single, slots[one], n_heads=4, n_kv_heads=2, rope=(cos, sin, positions[one])
        )
        assert_same_bits(q_i, q[one], f"q of token {i}")
    assert_same_bits(single[0], whole[0], "key_cache")
    assert_same_bits(single[1], whole[1], "value_cache")


def test_to_cache_of_no_tokens(dtype):
    x, weight, bias = _inputs(2, 1, 8, dtype, (0,))
    caches = new_cache(2, 4, 1, 8, dtype)
    empty = torch.zeros(0, dtype=torch.int64)
    q = attn_ext.qkv_projection_to_cache(
        x, weight, bias, *caches, empty, n_heads=2, n_kv_heads=1, rope=(*_tables(4, 8), empty)
    )
    assert q.shape == (0, 2, 8)
    assert caches[0].isnan().all() and caches[1].isnan().all()


@pytest.mark.parametrize(
    ("h", "hkv", "d"), [(1, 1, 16), (2, 1, 8), (14, 1, 7), (4, 2, 24), (6, 2, 80), (9, 3, 64), (1, 1, 256)]
)
@pytest.mark.parametrize("m", [1, 8, 9, 25])
def test_packed_is_plain_to_the_bit(h, hkv, d, m, dtype, backend):
    """Heads that begin inside a panel of 16 too; with and without rotation and bias."""
    if backend in ("cuda", "simt"):
        pytest.skip("packed weights are for CPU tensors")
    c = 300
    x, weight, bias = _inputs(h, hkv, d, dtype, (m,), c=c)
    packed = attn_ext.pack_weight(weight)
    for a, b in zip(*(attn_ext.qkv_projection(x, w, bias, n_heads=h, n_kv_heads=hkv) for w in (weight, packed)),
                    strict=True):  # fmt: skip
        assert_same_bits(b, a)
    slots = torch.randperm(32)[:m]
    rope = (*_tables(40, d), torch.randint(0, 40, (m,))) if d % 2 == 0 else None
    for given, turn in ((bias, rope), (None, None)):
        results = []
        for w in (weight, packed):
            caches = new_cache(8, 4, hkv, d, dtype)
            q = attn_ext.qkv_projection_to_cache(x, w, given, *caches, slots, n_heads=h, n_kv_heads=hkv, rope=turn)
            results.append((q, *caches))
        for a, b in zip(*results, strict=True):
            assert_same_bits(b, a)
