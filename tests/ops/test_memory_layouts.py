"""Any strides with a unit last one are taken as they are; others give the same bits through a copy."""

import math

import pytest
import torch
from tolerance import assert_same_bits

import attn_ext

pytestmark = pytest.mark.usefixtures("backend")

INT32 = torch.int32


def in_a_bigger_buffer(x):
    """Rows with guard columns of NaN at both sides; strides that no other layout has."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 5), math.nan, dtype=x.dtype)
    view = wide[..., 3 : 3 + x.shape[-1]]
    view.copy_(x)
    return view


def transposed(x):
    """All but the last dim in reverse order in memory."""
    order = [*reversed(range(x.dim() - 1)), x.dim() - 1]
    return x.permute(order).contiguous().permute(order)


def every_other(x):
    """Every second row of each leading dim of a buffer full of NaN."""
    wide = torch.full((*(2 * n for n in x.shape[:-1]), x.shape[-1]), math.nan, dtype=x.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in x.shape[:-1])]
    view.copy_(x)
    return view


def odd_offset(x):
    """One element into its storage: aligned to nothing but the element."""
    flat = torch.full((x.numel() + 1,), math.nan, dtype=x.dtype)
    view = flat[1:].view(x.shape)
    view.copy_(x)
    return view


def last_stride_not_1(x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


LAYOUTS = [in_a_bigger_buffer, transposed, every_other, odd_offset, last_stride_not_1]


@pytest.fixture(params=LAYOUTS, ids=lambda f: f.__name__)
def layout(request):
    return request.param


def _check(function, tensors: dict, layout, **options):
    """Each tensor in turn in the layout, then all of them: the bits of the contiguous ones, and no tensor changed."""
    expected = function(**tensors, **options)
    for names in [[name] for name in tensors] + [list(tensors)]:
        moved = {name: layout(t) if name in names else t for name, t in tensors.items()}
        result = function(**moved, **options)
        for r, e in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (result, expected)), strict=True):
            assert_same_bits(r, e, f"{function.__name__} with {', '.join(names)} in {layout.__name__}")
        for name in names:
            assert_same_bits(moved[name], tensors[name], f"{name} afterwards")


def test_linear(layout, dtype):
    tensors = {
        "x": torch.randn(3, 5, 40).to(dtype), "weight": torch.randn(33, 40).to(dtype),
        "residual": torch.randn(3, 5, 33).to(dtype), "multiply": torch.randn(3, 5, 33).to(dtype),
    }  # fmt: skip
    _check(attn_ext.linear, tensors, layout, activation="silu", bias=torch.randn(66).to(dtype)[::2])


def test_qkv_projection(layout, dtype):
    tensors = {"x": torch.randn(3, 5, 40).to(dtype), "weight": torch.randn(32, 40).to(dtype)}
    _check(attn_ext.qkv_projection, tensors, layout, n_heads=2, n_kv_heads=1, bias=torch.randn(64).to(dtype)[::2])


def test_norms(layout, dtype):
    x, weight, bias = torch.randn(3, 5, 70).to(dtype), torch.randn(140).to(dtype)[::2], torch.randn(71).to(dtype)[1:]
    _check(attn_ext.rms_norm, {"x": x}, layout, weight=weight)
    _check(attn_ext.layer_norm, {"x": x}, layout, weight=weight, bias=bias)


def test_masked_softmax(layout, dtype):
    tensors = {"scores": torch.randn(2, 3, 5, 70).to(dtype), "mask": torch.rand(2, 3, 5, 70) < 0.6}
    if layout not in (in_a_bigger_buffer, every_other, odd_offset):  # those fill with NaN, which no bool is
        _check(attn_ext.masked_softmax, tensors, layout)
    tensors["mask"] = torch.randn(2, 3, 5, 70).to(dtype)
    _check(attn_ext.masked_softmax, tensors, layout)


def _extra(b, h, tq, tk, dtype):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {"alibi_slopes": torch.rand(b, h).to(wide), "bias": torch.randn(b, h, tq, tk).to(dtype)}


@pytest.mark.parametrize("tq", [1, 7])
def test_attention(tq, layout, dtype):
    q = torch.randn(2, tq, 4, 24).to(dtype)
    k, v = torch.randn(2, 2, 70, 2, 24).to(dtype)
    tensors = {"q": q, "k": k, "v": v, **_extra(2, 4, tq, 70, dtype)}
    sinks = torch.randn(8).to(tensors["alibi_slopes"].dtype)[::2]
    mask = (torch.rand(70, tq, 4, 2) < 0.7).permute(3, 2, 1, 0)  # all strides unusual, the last one too
    _check(attn_ext.attention, tensors, layout, return_lse=True, sinks=sinks, mask=mask)
    dense = attn_ext.attention(**tensors, return_lse=True, sinks=sinks.contiguous(), mask=mask.contiguous())[0]
    assert_same_bits(attn_ext.attention(**tensors, return_lse=True, sinks=sinks, mask=mask)[0], dense)


def test_attention_varlen(layout, dtype):
    q = torch.randn(9, 4, 24).to(dtype)
    k, v = torch.randn(2, 80, 2, 24).to(dtype)
    tensors = {"q": q, "k": k, "v": v, **_extra(2, 4, 7, 70, dtype)}
    cu_q, cu_k = (torch.tensor(x, dtype=INT32)[::2] for x in ([0, 99, 2, 99, 9], [0, 99, 10, 99, 80]))
    _check(
        attn_ext.attention_varlen, tensors, layout, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, return_lse=True
    )


def test_paged_attention_queries(layout, dtype):
    tensors = {"q": torch.randn(2, 3, 4, 24).to(dtype), **_extra(2, 4, 3, 30, dtype)}
    caches = torch.randn(2, 6, 8, 2, 24).to(dtype)
    table = torch.tensor([[5, 9, 0, 9, 2, 9, 4, 9], [1, 9, 3, 9, 9, 9, 9, 9]], dtype=INT32)[:, ::2]
    lens = torch.tensor([30, 99, 11], dtype=INT32)[::2]
    _check(
        attn_ext.paged_attention, tensors, layout, key_cache=caches[0], value_cache=caches[1], block_table=table,
        seq_lens=lens, return_lse=True,
    )  # fmt: skip


CACHE_LAYOUTS = [in_a_bigger_buffer, transposed, every_other, odd_offset]


@pytest.mark.parametrize("cache_layout", CACHE_LAYOUTS, ids=lambda f: f.__name__)
def test_caches(cache_layout, dtype):
    """append_kv, qkv_projection_to_cache, copy_blocks and paged_attention over caches of any strides."""
    k, v = torch.randn(2, 6, 8, 2, 24).to(dtype)
    odd_k, odd_v = cache_layout(k), cache_layout(v)
    x, weight = torch.randn(4, 16).to(dtype), torch.randn(8 * 24, 16).to(dtype)
    key, value = torch.randn(2, 3, 2, 24).to(dtype)
    q = torch.randn(1, 5, 4, 24).to(dtype)
    table, lens = torch.tensor([[5, 0, 2, 4]], dtype=INT32), torch.tensor([30], dtype=INT32)
    cos, sin = torch.randn(2, 9, 12)
    outs = []
    for caches in ((k, v), (odd_k, odd_v)):
        attn_ext.append_kv(key, value, *caches, torch.tensor([3, 47, 20]))
        rope = (cos, sin, torch.tensor([0, 8, 3, 3]))
        projected = attn_ext.qkv_projection_to_cache(
            x, weight, None, *caches, torch.tensor([1, -1, 19, 40]), n_heads=4, n_kv_heads=2, rope=rope
        )
        attn_ext.copy_blocks(*caches, [(5, 1), (1, 0)])
        outs.append([projected, *attn_ext.paged_attention(q, *caches, table, lens, return_lse=True)])
    for got, expected in zip(outs[1], outs[0], strict=True):
        assert_same_bits(got, expected)
    assert_same_bits(odd_k, k)
    assert_same_bits(odd_v, v)


def test_guard_elements_of_a_cache_stay(dtype):
    """Nothing between the rows of a strided cache is written."""
    buffer = torch.randn(2, 4, 3, 2, 13).to(dtype)
    before = buffer.clone()
    k, v = buffer[0, ..., 2:10], buffer[1, ..., 2:10]
    attn_ext.append_kv(*torch.randn(2, 2, 2, 8).to(dtype), k, v, torch.tensor([1, 11]))
    x, weight = torch.randn(2, 16).to(dtype), torch.randn(48, 16).to(dtype)
    attn_ext.qkv_projection_to_cache(x, weight, None, k, v, torch.tensor([4, 5]), n_heads=2)
    attn_ext.copy_blocks(k, v, [(0, 2)])
    assert_same_bits(buffer[..., :2], before[..., :2])
    assert_same_bits(buffer[..., 10:], before[..., 10:])


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_expanded(dims, dtype):
    """Stride 0 in any dims of q, k and v."""
    shape, keys = (2, 7, 4, 24), (2, 70, 4, 24)
    one = [1 if i in dims else n for i, n in enumerate(shape)]
    one_key = [1 if i in dims else n for i, n in enumerate(keys)]
    q, k, v = torch.randn(one).to(dtype), torch.randn(one_key).to(dtype), torch.randn(one_key).to(dtype)
    q, k, v = q.expand(shape), k.expand(keys), v.expand(keys)
    for causal in (False, True):
        expected = attn_ext.attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=causal)
        assert_same_bits(attn_ext.attention(q, k, v, causal=causal), expected)


def test_expanded_rows_of_a_product(dtype):
    x, weight = torch.randn(1, 40).to(dtype), torch.randn(1, 40).to(dtype)
    for xs, ws in ((x.expand(7, 40), weight), (x, weight.expand(33, 40)), (x.expand(3, 7, 40), weight.expand(33, 40))):
        assert_same_bits(attn_ext.linear(xs, ws), attn_ext.linear(xs.contiguous(), ws.contiguous()))
    bias = torch.randn(1).to(dtype).expand(33)
    residual = torch.randn(1).to(dtype).expand(7, 33)
    assert_same_bits(
        attn_ext.linear(x.expand(7, 40), weight.expand(33, 40), bias, residual=residual),
        attn_ext.linear(x.repeat(7, 1), weight.repeat(33, 1), bias.contiguous(), residual=residual.contiguous()),
    )


def test_expanded_scores(dtype):
    for shape in ((1, 1, 1, 70), (1, 1, 5, 70), (2, 1, 1, 1)):
        scores = torch.randn(shape).to(dtype).expand(2, 3, 5, 70)
        assert_same_bits(attn_ext.masked_softmax(scores), attn_ext.masked_softmax(scores.contiguous()))


def test_one_tensor_as_everything(dtype):
    """q, k and v, or both outputs and all three inputs of a product, may be the same memory."""
    x = torch.randn(1, 7, 2, 16).to(dtype)
    assert_same_bits(attn_ext.attention(x, x, x), attn_ext.attention(x, x.clone(), x.clone()))
    square = torch.randn(9, 9).to(dtype)
    assert_same_bits(
        attn_ext.linear(square, square, square[0], residual=square),
        attn_ext.linear(square, square.clone(), square[0].clone(), residual=square.clone()),
    )
