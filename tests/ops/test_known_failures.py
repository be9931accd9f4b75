"""Inputs on which other attention code goes wrong, each with its neighbours; H.. is the id of the failure.

Not here, as no op is involved or as it is tested with what it belongs to:
  H17 (stale prefix entry), H19's capacity and fill counts: the block allocator, test_block_allocator.py and
    test_kv_cache.py.
  H20 (preemption), H30 (temperature 0, top_k, past the context): the engine and the models, test_generate.py.
  H21 (strided grad_out) and the gradients of H01 and H06: there are no gradients yet; H22 checks that all ops say so.
  H23 on CUDA and H27's two GPUs: no GPU code yet; meta tensors stand in for a second device.
  H28 (import order, foreign build): packaging, test_import.py.
"""

import math
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from problems import new_cache
from tolerance import assert_same_bits

import attn_ext
from attn_ext import reference

pytestmark = pytest.mark.usefixtures("backend")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INT32 = torch.int32


def ints(*values):
    return torch.tensor(values, dtype=INT32)


def tensor_bhtd(values, dtype=F32):
    """From nested lists (T, D) to (1, T, 1, D)."""
    return torch.tensor(values, dtype=dtype)[None, :, None]


def three_ways(q, k, v, block_size=4, **options):
    """q (1, Tq, H, D) through attention, attention_varlen and paged_attention: the same to the bit; -> out."""
    out = attn_ext.attention(q, k, v, **options)
    cu_q, cu_k = ints(0, q.shape[1]), ints(0, k.shape[1])
    varlen = attn_ext.attention_varlen(q[0], k[0], v[0], cu_q, cu_k, **options)
    assert_same_bits(varlen, out[0], "varlen")
    blocks = -(-k.shape[1] // block_size)
    caches = new_cache(blocks + 1, block_size, *k.shape[2:], k.dtype)
    for cache, x in zip(caches, (k, v), strict=True):
        cache[1:].flatten(0, 1)[: k.shape[1]] = x[0]
    table = torch.arange(1, blocks + 1, dtype=INT32)[None]
    paged = attn_ext.paged_attention(q, *caches, table, ints(k.shape[1]), **{"causal": False, **options})
    assert_same_bits(paged, out, "paged")
    return out


# ------------------------------------------------------------------------------------------ H01: masked rows


def test_H01_fully_masked_row(dtype):
    q = k = tensor_bhtd([[1.0, 0.0], [0.0, 1.0]], dtype)
    v = tensor_bhtd([[1.0, 2.0], [3.0, 4.0]], dtype)
    mask = torch.tensor([[True, True], [False, False]])
    out = attn_ext.attention(q, k, v, mask=mask.reshape(1, 1, 2, 2))
    torch.testing.assert_close(out[0, :, 0], torch.tensor([[1.66048, 2.66048], [0, 0]], dtype=dtype), rtol=1e-5
                               if dtype in (F32, torch.float64) else torch.finfo(dtype).eps, atol=1e-5)  # fmt: skip
    assert (out[0, 1] == 0).all()
    probabilities = attn_ext.masked_softmax((q[0, :, 0] @ k[0, :, 0].T), mask, scale=2**-0.5)
    assert (probabilities[1] == 0).all()
    assert probabilities[0].sum().item() == pytest.approx(1, abs=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("tk", [1, 63, 64, 65, 513])
@pytest.mark.parametrize("how", ["mask", "bias", "causal", "window"])
def test_H01_neighbours(how, tk, dtype):
    """Rows hidden by a mask, by -inf, by more queries than keys, by a window past the end; first, middle and last."""
    tq = tk + 3 if how == "causal" else 5
    q, k, v = torch.randn(1, tq, 2, 8).to(dtype), torch.randn(1, tk, 2, 8).to(dtype), torch.randn(1, tk, 2, 8).to(dtype)
    mask = torch.ones(1, 1, tq, tk, dtype=torch.bool)
    if how == "causal":
        options, hidden = {"causal": True}, [0, 1, 2]
    elif how == "window":  # each query sees the key at its own position only, and that of one is masked
        options = {"window": (0, 0), "mask": torch.arange(tk) != tk - 3}
        hidden = [i for i in range(tq) if i + tk - tq in (tk - 3, *range(-tq, 0))]
    else:
        hidden = [0, 2, 4]
        mask[..., hidden, :] = False
        options = (
            {"mask": mask}
            if how == "mask"
            else {"bias": torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)}
        )
    out, lse = attn_ext.attention(q, k, v, return_lse=True, **options)
    assert (out[:, hidden] == 0).all()
    assert (lse[..., hidden] == -math.inf).all()
    assert torch.isfinite(out).all() and not lse.isnan().any()


# ---------------------------------------------------------------------------------- H02: tiles wholly masked


@pytest.mark.parametrize("length", [63, 64, 65, 511, 513, 640])
@pytest.mark.parametrize("how", ["bias", "mask", "window"])
def test_H02_banded_mask(how, length, dtype):
    """Late rows see nothing in all early tiles."""
    ones = torch.ones(1, length, 1, 4, dtype=dtype)
    i, j = torch.arange(length)[:, None], torch.arange(length)
    band = ((j <= i) & (j > i - 10))[None, None]
    options = {
        "bias": {"bias": torch.zeros(band.shape, dtype=dtype).masked_fill(~band, -math.inf)},
        "mask": {"mask": band},
        "window": {"window": (9, 0)},
    }[how]
    out = attn_ext.attention(ones, ones, ones, **options)
    assert (out == 1).all()
    weights = attn_ext.masked_softmax(torch.ones(length, length, dtype=dtype), band[0, 0])
    assert torch.isfinite(weights).all() and (weights[9:].amax(-1) == torch.tensor(0.1, dtype=dtype)).all()


@pytest.mark.parametrize("seen", [0, 64, 511, 512, 639])
def test_H02_only_one_key_in_many_tiles(seen, dtype):
    q, k, v = torch.randn(3, 1, 640, 1, 4).to(dtype)
    mask = (torch.arange(640) == seen).reshape(1, 1, 1, 640)
    out = attn_ext.attention(q[:, :2], k, v, mask=mask)
    assert_same_bits(out, v[:, seen : seen + 1].expand(1, 2, 1, 4))


# ------------------------------------------------------------------------------------------------- H03: scale


@pytest.mark.parametrize(
    ("scale", "expected"),
    # 1 / (1 + exp(2 scale)) of the weight is on the second key
    [(-0.5, 17.31058579), (0.0, 15.0), (0.5, 12.68941421), (-0.0, 15.0), (1e-30, 15.0), (-50.0, 20.0), (50.0, 10.0)],
)
def test_H03_negative_and_zero_scale(scale, expected, dtype):
    q, k, v = (tensor_bhtd(x, dtype) for x in ([[1.0]], [[1.0], [-1.0]], [[10.0], [20.0]]))
    out = three_ways(q, k, v, scale=scale)
    tolerance = 1e-6 if dtype in (F32, torch.float64) else torch.finfo(dtype).eps
    assert out.item() == pytest.approx(expected, rel=tolerance)
    scores = torch.tensor([[1.0, -1.0]], dtype=dtype)
    weights = attn_ext.masked_softmax(scores, scale=scale)
    assert (weights.double() @ torch.tensor([10.0, 20.0]).double()).item() == pytest.approx(expected, rel=tolerance)


# -------------------------------------------------------------------------------------- H04: causal alignment


@pytest.mark.parametrize(
    ("tq", "tk", "expected"),
    [
        (1, 4, [2.5]),
        (2, 4, [2.0, 2.5]),
        (3, 4, [1.5, 2.0, 2.5]),
        (4, 4, [1.0, 1.5, 2.0, 2.5]),
        (5, 4, [0.0, 1.0, 1.5, 2.0, 2.5]),
        (2, 1, [0.0, 1.0]),
        (2, 65, [32.5, 33.0]),
    ],
)
def test_H04_causal_is_bottom_right(tq, tk, expected, dtype):
    q, k = torch.zeros(1, tq, 1, 1, dtype=dtype), torch.randn(1, tk, 1, 1).to(dtype)
    v = torch.arange(1.0, tk + 1).to(dtype).reshape(1, tk, 1, 1)
    out = three_ways(q, k, v, causal=True)
    torch.testing.assert_close(out.flatten().double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)
    weights = attn_ext.masked_softmax(torch.zeros(tq, tk, dtype=dtype), causal=True)
    positions = torch.arange(tq)[:, None] + tk - tq
    assert_same_bits(weights > 0, torch.arange(tk) <= positions)


# --------------------------------------------------------------------------- H05: outputs from dirty memory


@pytest.mark.parametrize("m", [1, 3, 17])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_H05_poisoned_allocator(m, dtype, backend):
    """Every op writes all of its result, whatever its memory held before."""
    x, weight = torch.randn(m, 40).to(dtype), torch.randn(3 * 37, 40).to(dtype)
    q = torch.randn(1, m, 3, 37).to(dtype)
    hidden = torch.zeros(1, 1, m, m, dtype=torch.bool)
    lse = torch.zeros(1, 3, m)

    def run():
        return [
            torch.cat(attn_ext.qkv_projection(x, weight, None, n_heads=1), dim=-1),
            attn_ext.linear(x, weight),
            *attn_ext.attention(q, q, q, causal=True, return_lse=True),
            attn_ext.attention(q, q, q, mask=hidden),
            attn_ext.attention(q, q[:, :0], q[:, :0]),
            attn_ext.masked_softmax(q),
            *attn_ext.merge_attention(q, lse, q, lse),
        ]

    first = run()
    for result in first:
        assert torch.isfinite(result).all()
    torch.testing.assert_close(first[1], (x.float() @ weight.float().T).to(dtype))
    for _ in range(50):
        for result in first:
            poison = torch.full_like(result, math.nan)
            del poison
        for again, result in zip(run(), first, strict=True):
            assert_same_bits(again, result)


# -------------------------------------------------------------------------------------------- H06: empty sizes


def test_H06_empty_sizes(dtype):
    def zeros(*shape):
        return torch.zeros(shape, dtype=dtype)

    def attention(q, k):
        return attn_ext.attention(zeros(*q), zeros(*k), zeros(*k), causal=True, return_lse=True)

    out, lse = attention((0, 3, 2, 8), (0, 3, 2, 8))
    assert out.shape == (0, 3, 2, 8) and lse.shape == (0, 2, 3)
    out, lse = attention((1, 0, 2, 8), (1, 5, 2, 8))
    assert out.shape == (1, 0, 2, 8) and lse.shape == (1, 2, 0)
    out, lse = attention((1, 3, 2, 8), (1, 0, 2, 8))
    assert out.shape == (1, 3, 2, 8) and (out == 0).all() and (lse == -math.inf).all()
    out, lse = attention((2, 0, 2, 8), (2, 0, 2, 8))
    assert out.shape == (2, 0, 2, 8) and lse.shape == (2, 2, 0)

    # varlen: no tokens, no sequences, sequences without queries or without keys
    for cu_q, cu_k in ((ints(0), ints(0)), (ints(0, 0), ints(0, 0)), (ints(0, 0, 0), ints(0, 3, 3))):
        k = zeros(int(cu_k[-1]), 2, 8)
        out, lse = attn_ext.attention_varlen(zeros(0, 2, 8), k, k, cu_q, cu_k, return_lse=True)
        assert out.shape == (0, 2, 8) and lse.shape == (2, 0)
    out, lse = attn_ext.attention_varlen(
        zeros(3, 2, 8), zeros(0, 2, 8), zeros(0, 2, 8), ints(0, 2, 2, 3), ints(0, 0, 0, 0), return_lse=True
    )
    assert (out == 0).all() and (lse == -math.inf).all()

    # paged: no sequences, no blocks, no keys
    cache = zeros(3, 4, 2, 8)
    empty_table = torch.zeros(0, 2, dtype=INT32)
    assert attn_ext.paged_attention(zeros(0, 3, 2, 8), cache, cache, empty_table, ints()).shape == (0, 3, 2, 8)
    out = attn_ext.paged_attention(zeros(0, 2, 8), cache, cache, empty_table, ints(), cu_seqlens_q=ints(0))
    assert out.shape == (0, 2, 8)
    out = attn_ext.paged_attention(zeros(2, 3, 2, 8), cache, cache, torch.zeros(2, 0, dtype=INT32), ints(0, 0))
    assert out.shape == (2, 3, 2, 8) and (out == 0).all()
    none = zeros(0, 4, 2, 8)
    out = attn_ext.paged_attention(zeros(1, 3, 2, 8), none, none, torch.zeros(1, 1, dtype=INT32), ints(0))
    assert (out == 0).all()

    # the other ops
    q, k, v = attn_ext.qkv_projection(zeros(0, 5, 16), zeros(32, 16), None, n_heads=2, n_kv_heads=1)
    assert q.shape == (0, 5, 2, 8) and k.shape == v.shape == (0, 5, 1, 8)
    assert attn_ext.linear(zeros(0, 16), zeros(4, 16)).shape == (0, 4)
    assert attn_ext.linear(zeros(3, 16), zeros(0, 16)).shape == (3, 0)
    assert (attn_ext.linear(zeros(3, 0), zeros(4, 0), torch.ones(4, dtype=dtype)) == 1).all()
    for shape in ((0, 4), (4, 0), (0, 0), (0, 2, 3, 4), (2, 3, 4, 0)):
        assert attn_ext.masked_softmax(zeros(*shape), causal=True).shape == shape
    out, lse = attn_ext.merge_attention(*[zeros(0, 3, 2, 8), torch.zeros(0, 2, 3, dtype=_lse_dtype(dtype))] * 2)
    assert out.shape == (0, 3, 2, 8) and lse.shape == (0, 2, 3)
    attn_ext.append_kv(zeros(0, 2, 8), zeros(0, 2, 8), cache, cache.clone(), torch.zeros(0, dtype=torch.int64))
    attn_ext.copy_blocks(cache, cache.clone(), torch.zeros(0, 2, dtype=torch.int64))
    attn_ext.copy_blocks(none, none.clone(), [])


def _lse_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else F32


# ---------------------------------------------------------------------------------------------- H07: GQA ratio


@pytest.mark.parametrize(("h", "hkv"), [(3, 2), (33, 2), (2, 3), (4, 0), (1, 2), (5, 4)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_H07_heads_must_divide(h, hkv, device, backend):
    def zeros(*shape, dtype=F32):
        return torch.zeros(shape, dtype=dtype, device=device)

    q, k = zeros(1, 3, h, 8), zeros(1, 4, hkv, 8)
    table, lens, cu_q, cu_k = zeros(1, 1, dtype=INT32), ints(4).to(device), ints(0, 3).to(device), ints(0, 4).to(device)
    calls = {
        "attention": lambda: attn_ext.attention(q, k, k),
        "attention_varlen": lambda: attn_ext.attention_varlen(q[0], k[0], k[0], cu_q, cu_k),
        "paged_attention": lambda: attn_ext.paged_attention(q, k, k, table, lens),
        "qkv_projection": lambda: attn_ext.qkv_projection(
            zeros(3, 5), zeros((h + 2 * hkv) * 8, 5), None, n_heads=h, n_kv_heads=hkv
        ),
        "qkv_projection_to_cache": lambda: attn_ext.qkv_projection_to_cache(
            zeros(3, 5), zeros((h + 2 * hkv) * 8, 5), None, k, k.clone(), zeros(3, dtype=torch.int64), n_heads=h,
            n_kv_heads=hkv,
        ),
    }  # fmt: skip
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"^{name}: ") as error:
            call()
        message = str(error.value).splitlines()[0]
        assert str(h) in message and str(hkv) in message, message


@pytest.mark.parametrize(("key_heads", "cache_heads"), [(3, 2), (2, 3), (1, 2), (0, 1)])
def test_H07_append_heads_must_match_the_cache(key_heads, cache_heads, backend):
    caches = new_cache(2, 4, cache_heads, 8, F32)
    rows = torch.zeros(3, key_heads, 8)
    with pytest.raises(RuntimeError, match=r"^append_kv: ") as error:
        attn_ext.append_kv(rows, rows, *caches, torch.arange(3))
    assert str(key_heads) in str(error.value) and str(cache_heads) in str(error.value)
    assert caches[0].isnan().all() and caches[1].isnan().all()


# ------------------------------------------------------------------------------------- H08: expanded K and V


@pytest.mark.parametrize(("tq", "tk"), [(1, 15), (1, 16), (1, 32), (7, 17), (7, 33), (1, 64), (7, 65)])
def test_H08_expanded_keys(tq, tk, dtype):
    """Stride 0 over the heads, over the batch, over the tokens; with and without a mask that is itself expanded."""
    q = torch.randn(2, tq, 16, 128).to(dtype)
    for one in ((1, tk, 1, 128), (2, tk, 1, 128), (1, tk, 16, 128), (1, 1, 1, 128)):
        k, v = (torch.randn(one).to(dtype).expand(2, tk, 16, 128) for _ in range(2))
        for mask in (
            None,
            torch.ones(1, 1, 1, tk, dtype=torch.bool),
            (torch.rand(1, 1, 1, tk) < 0.7).expand(2, 16, tq, tk),
        ):
            out = attn_ext.attention(q, k, v, mask=mask)
            assert_same_bits(out, attn_ext.attention(q, k.contiguous(), v.contiguous(), mask=mask))


# ------------------------------------------------------------------------------- H09: K and V in one buffer


@pytest.mark.parametrize("tq", [1, 7, 33])
def test_H09_interleaved_cache(tq, dtype):
    """Decode, chunk and prefill over a cache whose blocks hold K and V side by side."""
    kv = torch.randn(4, 2, 16, 1, 8).to(dtype)
    k_cache, v_cache = kv.unbind(1)
    table, lens = torch.tensor([[3, 0, 2]], dtype=INT32), ints(33)
    q = torch.randn(1, tq, 2, 8).to(dtype)
    expected = attn_ext.paged_attention(q, k_cache.contiguous(), v_cache.contiguous(), table, lens)
    assert_same_bits(attn_ext.paged_attention(q, k_cache, v_cache, table, lens), expected)
    dense = [c[table[0].long()].flatten(0, 1)[None, :33] for c in (k_cache, v_cache)]
    assert_same_bits(attn_ext.attention(q, *dense, causal=True), expected)

    # append changes the intended rows of the buffer, and no others
    key, value = torch.randn(2, 2, 1, 8).to(dtype)
    before = kv.clone()
    attn_ext.append_kv(key, value, k_cache, v_cache, torch.tensor([2 * 16 + 1, 15]))
    before[2, 0, 1], before[2, 1, 1], before[0, 0, 15], before[0, 1, 15] = key[0], value[0], key[1], value[1]
    assert_same_bits(kv, before)
    attn_ext.copy_blocks(k_cache, v_cache, [(2, 1)])
    before[1] = before[2]
    assert_same_bits(kv, before)


# ---------------------------------------------------------------------------------------- H10: dims of size 1


def test_H10_size_1_dims_of_masks(dtype):
    q, k, v = torch.randn(1, 4, 2, 8).to(dtype), torch.randn(1, 5, 2, 8).to(dtype), torch.randn(1, 5, 2, 8).to(dtype)
    column = torch.randn(1, 1, 4, 1).to(dtype)  # its storage has 4 elements
    weird = torch.randn(20).to(dtype).as_strided((1, 1, 4, 5), (999, 777, 5, 1))
    for additive in (column, weird, column[:, :, :1], torch.randn(1, 1, 1, 1).to(dtype)):
        dense = additive.expand(1, 2, 4, 5).contiguous()
        assert_same_bits(attn_ext.attention(q, k, v, bias=additive), attn_ext.attention(q, k, v, bias=dense))
        assert_same_bits(attn_ext.attention(q, k, v, mask=additive > 0), attn_ext.attention(q, k, v, mask=dense > 0))
        scores = torch.randn(1, 2, 4, 5).to(dtype)
        for mask in (additive, additive > 0):
            full = mask.expand(1, 2, 4, 5).contiguous()
            assert_same_bits(attn_ext.masked_softmax(scores, mask), attn_ext.masked_softmax(scores, full))


def test_H10_size_1_dims_of_everything(dtype):
    """Strides of dims of size 1 are never used, however large."""

    def with_strides(x, *strides):
        return x.as_strided(x.shape, strides)

    q, k, v = torch.randn(3, 1, 4, 1, 8).to(dtype)
    expected = attn_ext.attention(q, k, v)
    big = 10**9
    for qq, kk in (
        (with_strides(q, big, 8, big, 1), with_strides(k, big, 8, big, 1)),
        (with_strides(q, 0, 8, 0, 1), k),
    ):
        assert_same_bits(attn_ext.attention(qq, kk, v), expected)
        assert_same_bits(attn_ext.attention(q, kk, kk), attn_ext.attention(q, k, k))
    one = torch.randn(1, 1, 1, 1).to(dtype)
    wide_one = one.as_strided((1, 1, 1, 1), (big, big, big, big))
    assert_same_bits(attn_ext.attention(wide_one, wide_one, wide_one), one)
    x, weight = torch.randn(1, 8).to(dtype), torch.randn(1, 8).to(dtype)
    assert_same_bits(attn_ext.linear(with_strides(x, big, 1), with_strides(weight, big, 1)), attn_ext.linear(x, weight))
    cache = torch.randn(1, 4, 1, 8).to(dtype)
    weird_cache = cache.as_strided(cache.shape, (big, 8, big, 1))
    table = torch.zeros(1, 1, dtype=INT32).as_strided((1, 1), (big, big))
    out = attn_ext.paged_attention(q[:, :1], weird_cache, weird_cache, table, ints(4))
    assert_same_bits(out, attn_ext.attention(q[:, :1], cache, cache))
    attn_ext.append_kv(q[0, :1], q[0, :1], weird_cache, weird_cache.clone(), torch.tensor([2]))
    assert_same_bits(cache[0, 2], q[0, 0])


# -------------------------------------------------------------------------------------- H11: 32-bit overflow


@pytest.mark.parametrize("block", [65535, 65536])
def test_H11_offsets_past_32_bits(block, backend):
    """Memory that is never touched is never resident."""
    caches = [torch.empty(65537, 16, 16, 128, dtype=F16) for _ in range(2)]
    caches[0][block], caches[1][block] = 0, 1
    table, lens = torch.tensor([[block]], dtype=INT32), ints(16)
    out = attn_ext.paged_attention(torch.randn(1, 2, 16, 128).to(F16), *caches, table, lens)
    assert (out == 1).all()
    rows = torch.full((2, 16, 128), 3.0, dtype=F16)
    slots = torch.tensor([block * 16, block * 16 + 15])
    attn_ext.append_kv(rows, rows, *caches, slots)
    for cache in caches:
        assert (cache[block, [0, 15]] == 3).all()
        assert (cache[block, 1:15] == cache[block, 1, 0, 0]).all()
    attn_ext.copy_blocks(*caches, [(block, 7), (block, block - 2)])
    for cache in caches:
        assert_same_bits(cache[7], cache[block])
        assert_same_bits(cache[block - 2], cache[block])


def test_H11_neighbours_large_strides_everywhere(backend):
    """Rows a gigabyte apart in the inputs of every op."""
    step = 2**30 + 8
    memory = torch.empty(2 * step + 4096, dtype=F16)

    def spread(*shape, at=0):
        """A tensor whose first dim has the stride `step`, the others dense."""
        strides = [step] + [math.prod(shape[i + 1 :]) for i in range(1, len(shape))]
        x = memory.as_strided(shape, strides, at)
        x.copy_(torch.randn(shape))
        return x

    x, weight = spread(3, 40), spread(3, 40, at=1024)
    assert_same_bits(attn_ext.linear(x, weight), attn_ext.linear(x.contiguous(), weight.contiguous()))
    q, k, v = (spread(3, 5, 2, 8, at=at) for at in (0, 1024, 2048))
    out, lse = attn_ext.attention(q, k, v, return_lse=True)
    expected, expected_lse = attn_ext.attention(q.contiguous(), k.contiguous(), v.contiguous(), return_lse=True)
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)
    rows = [spread(3, 2, 8, at=at) for at in (0, 1024, 2048)]  # rows as tokens of one sequence
    assert_same_bits(
        attn_ext.attention_varlen(*rows, ints(0, 3), ints(0, 3)),
        attn_ext.attention_varlen(*(r.contiguous() for r in rows), ints(0, 3), ints(0, 3)),
    )
    bias = spread(3, 1, 5, 5, at=3072)
    assert_same_bits(
        attn_ext.attention(expected, expected, expected, bias=bias),
        attn_ext.attention(expected, expected, expected, bias=bias.contiguous()),
    )
    scores = spread(3, 2, 5, 7)
    assert_same_bits(attn_ext.masked_softmax(scores), attn_ext.masked_softmax(scores.contiguous()))
    a, b = spread(3, 5, 2, 8), spread(3, 5, 2, 8, at=1024)
    merged = attn_ext.merge_attention(a, lse, b, lse)[0]
    assert_same_bits(merged, attn_ext.merge_attention(a.contiguous(), lse, b.contiguous(), lse)[0])


# ----------------------------------------------------------------------------------- H12, H13: past the end


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("seq_len", [1, 5, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("d", [8, 64])
def test_H12_unused_slots(d, seq_len, poison, dtype):
    """Slots past the end, in K and V, and whole dead blocks."""
    caches = new_cache(4, 16, 2, d, dtype, fill=poison)
    k, v = torch.randn(2, 1, seq_len, 2, d).to(dtype)
    table = torch.tensor([[2, 0, 3]], dtype=INT32)
    slots = table[0].long()[torch.arange(seq_len) // 16] * 16 + torch.arange(seq_len) % 16
    attn_ext.append_kv(k[0], v[0], *caches, slots)
    for tq in {1, min(3, seq_len), seq_len}:
        q = torch.randn(1, tq, 4, d).to(dtype)
        for causal in (True, False):
            out, lse = attn_ext.paged_attention(q, *caches, table, ints(seq_len), causal=causal, return_lse=True)
            expected, expected_lse = attn_ext.attention(q, k, v, causal=causal, return_lse=True)
            assert torch.isfinite(out).all()
            assert_same_bits(out, expected)
            assert_same_bits(lse, expected_lse)


def _paged_and_dense(table, seq_len, block_size=16, dtype=F32):
    caches = [torch.randn(4, block_size, 1, 8).to(dtype) for _ in range(2)]
    q = torch.randn(1, 1, 2, 8).to(dtype)
    used = table[0, : -(-seq_len // block_size)].long()
    k, v = (c[used].flatten(0, 1)[None, :seq_len] for c in caches)
    return attn_ext.paged_attention(q, *caches, table, ints(seq_len)), attn_ext.attention(q, k, v, causal=True)


@pytest.mark.parametrize("seq_len", [1, 3, 15, 16])
def test_H13_table_tail(seq_len, dtype):
    """Entries past the used ones may be anything; a table may end with the last used one."""
    for entries in ([2, 2**31 - 1, -1, 12345], [2, -(2**31)], [2]):
        table = torch.tensor([entries], dtype=INT32)
        assert_same_bits(*_paged_and_dense(table, seq_len, dtype=dtype))
    storage = torch.tensor([7, 7, 7, 2], dtype=INT32)  # the last row of a tensor that fills its storage
    assert_same_bits(*_paged_and_dense(storage.reshape(4, 1)[3:], seq_len, dtype=dtype))
    wide = torch.tensor([[2, 99, 1, 99, 99, 99]], dtype=INT32)[:, ::2]  # strided in both dims
    assert_same_bits(*_paged_and_dense(wide, 2 * seq_len, dtype=dtype))


# ---------------------------------------------------------------------------------------- H14: slot mapping


def test_H14_padded_rows_are_skipped(dtype):
    key, value = torch.randn(2, 5, 2, 8).to(dtype)
    key[3:], value[3:] = math.nan, math.nan
    caches = [torch.randn(3, 4, 2, 8).to(dtype) for _ in range(2)]
    expected = [c.clone() for c in caches]
    attn_ext.append_kv(key, value, *caches, torch.tensor([4, -1, 9, -1, -1]))
    for e, rows in zip(expected, (key, value), strict=True):
        e[1, 0], e[2, 1] = rows[0], rows[2]
    assert_same_bits(caches[0], expected[0])
    assert_same_bits(caches[1], expected[1])


@pytest.mark.parametrize(
    "slots",
    [[0, 1, 2], [0, 1, 2, 3, 5, 6], [], [4, -2, 0, 1, 2], [0, 1, 2, 3, 12], [0, 1, 2, 3, 2**31], [0, 1, 2, 3, 2**40],
     [-(2**40), 0, 1, 2, 3], [0, 1, 2, 3, 2**62]],
    ids=str,
)  # fmt: skip
def test_H14_bad_slots_raise_before_any_write(slots, dtype):
    rows = torch.full((5, 2, 8), math.nan, dtype=dtype)
    caches = [torch.randn(3, 4, 2, 8).to(dtype) for _ in range(2)]
    before = [c.clone() for c in caches]
    slot_mapping = torch.tensor(slots, dtype=torch.int64)
    x, weight = torch.randn(5, 6).to(dtype), torch.randn(6 * 8, 6).to(dtype)
    for call, name in (
        (lambda: attn_ext.append_kv(rows, rows, *caches, slot_mapping), "append_kv"),
        (
            lambda: attn_ext.qkv_projection_to_cache(x, weight, None, *caches, slot_mapping, n_heads=2, n_kv_heads=2),
            "qkv_projection_to_cache",
        ),
    ):
        with pytest.raises(RuntimeError, match=rf"^{name}: .*slot_mapping.*got"):
            call()
        assert_same_bits(caches[0], before[0])
        assert_same_bits(caches[1], before[1])


# -------------------------------------------------------------------------------------- H15: block copies


def test_H15_copies_are_simultaneous(dtype):
    def caches():
        blocks = torch.tensor([10.0, 20.0, 30.0]).to(dtype).reshape(3, 1, 1, 1).expand(3, 4, 2, 8)
        return blocks.clone(), -blocks

    for pairs, expected in (
        ([(0, 1), (1, 2)], [10, 10, 20]),
        ([(1, 2), (0, 1)], [10, 10, 20]),
        ([(0, 1), (1, 0)], [20, 10, 30]),
        ([(0, 1), (1, 2), (2, 0)], [30, 10, 20]),
        ([(0, 1), (0, 2)], [10, 10, 10]),
        ([(2, 2)], [10, 20, 30]),
        ([], [10, 20, 30]),
    ):
        k, v = caches()
        attn_ext.copy_blocks(k, v, torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2))
        assert k[:, 0, 0, 0].tolist() == expected and v[:, 3, 1, 7].tolist() == [-e for e in expected]
        assert (k == k[:, :1, :1, :1]).all() and (v == v[:, :1, :1, :1]).all()


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 2), (1, 2)],
        [(0, 1), (0, 1)],
        [(0, 0), (1, 0)],
        [(0, 3)],
        [(3, 0)],
        [(-1, 0)],
        [(0, -1)],
        [(0, 1), (1, 2**40)],
    ],
    ids=str,
)
def test_H15_bad_pairs_raise_before_any_write(pairs, dtype):
    caches = [torch.randn(3, 4, 2, 8).to(dtype) for _ in range(2)]
    before = [c.clone() for c in caches]
    with pytest.raises(RuntimeError, match=r"^copy_blocks: .*block_pairs.*got"):
        attn_ext.copy_blocks(*caches, torch.tensor(pairs, dtype=torch.int64))
    assert_same_bits(caches[0], before[0])
    assert_same_bits(caches[1], before[1])


# -------------------------------------------------------------------------------------- H16: chunked prefill


@pytest.mark.parametrize("chunks", [[4, 4, 2], [1] * 10, [3, 3, 3, 1], [10], [9, 1], [1, 9]], ids=str)
def test_H16_chunked_prefill(chunks, dtype):
    """Over a cache that is NaN where nothing was written yet: chunks equal the one-shot prefill, to the bit."""
    q, k, v = (torch.randn(1, 10, heads, 8).to(dtype) for heads in (4, 2, 2))
    one_shot = attn_ext.attention(q, k, v, causal=True)
    caches = new_cache(5, 4, 2, 8, dtype)
    table = torch.tensor([[3, 0, 4]], dtype=INT32)
    out, begin = [], 0
    for length in chunks:
        t = torch.arange(begin, begin + length)
        attn_ext.append_kv(k[0, t], v[0, t], *caches, table[0].long()[t // 4] * 4 + t % 4)
        begin += length
        out.append(attn_ext.paged_attention(q[:, t], *caches, table, ints(begin)))
    assert_same_bits(torch.cat(out, dim=1), one_shot)


# ----------------------------------------------------------------- H18, H19: what the ops must do at the edges


def test_H18_no_query_tokens_and_a_recomputed_last_token(dtype):
    """A sequence without queries beside one with: fine. Recomputing the last cached token rewrites the same bits."""
    k, v = torch.randn(2, 8, 2, 8).to(dtype)
    caches = new_cache(4, 4, 2, 8, dtype)
    attn_ext.append_kv(k, v, *caches, torch.arange(8))
    before = [c.clone() for c in caches]
    table, lens = torch.tensor([[0, 1], [0, 1]], dtype=INT32), ints(8, 8)
    q = torch.randn(1, 4, 8).to(dtype)
    out = attn_ext.paged_attention(q, *caches, table, lens, cu_seqlens_q=ints(0, 0, 1))
    assert_same_bits(out, attn_ext.attention(q[None], k[None], v[None], causal=True)[0])
    attn_ext.append_kv(k[7:], v[7:], *caches, torch.tensor([7]))
    assert_same_bits(caches[0], before[0])
    assert_same_bits(caches[1], before[1])


@pytest.mark.parametrize("seq_len", [0, 1, 3, 4, 5, 7, 8])
def test_H19_exact_multiples_of_the_block(seq_len, dtype):
    """At a boundary neither a block too few nor one too many is read."""
    k, v = torch.randn(2, 1, seq_len, 1, 8).to(dtype)
    q = torch.randn(1, 2, 1, 8).to(dtype)
    caches = new_cache(3, 4, 1, 8, dtype)
    for cache, x in zip(caches, (k, v), strict=True):
        cache[1:].flatten(0, 1)[:seq_len] = x[0]
    table = torch.arange(1, 1 + -(-seq_len // 4), dtype=INT32)[None]  # no entry past the last used one
    out = attn_ext.paged_attention(q, *caches, table, ints(seq_len))
    assert_same_bits(out, attn_ext.attention(q, k, v, causal=True))


# -------------------------------------------------------------------------------------- H22: silent detach


def _gradient_calls():
    """name -> (function, its floating tensors): every op with every input that could require grad."""
    q, k, v = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 8)
    x, weight, bias = torch.randn(3, 8), torch.randn(32, 8), torch.randn(32)
    lse = torch.randn(1, 2, 3)
    rows = {"residual": torch.randn(3, 32), "multiply": torch.randn(3, 32)}
    table, lens, cu, slots = torch.tensor([[0]], dtype=INT32), ints(3), ints(0, 3), torch.arange(3)
    cos = torch.randn(4, 4)
    positions = torch.arange(3)
    extra = {"alibi_slopes": torch.randn(2), "sinks": torch.randn(2), "bias": torch.randn(1, 1, 3, 3)}
    cache = torch.randn(1, 4, 1, 8)
    return {
        "linear": (attn_ext.linear, {"x": x, "weight": weight, "bias": bias, **rows}, {}),
        "qkv_projection": (
            attn_ext.qkv_projection, {"x": x, "weight": weight, "bias": bias}, {"n_heads": 2, "n_kv_heads": 1}
        ),
        "qkv_projection_to_cache": (
            attn_ext.qkv_projection_to_cache,
            {"x": x, "weight": weight, "bias": bias, "key_cache": cache, "value_cache": cache.clone()},
            {"slot_mapping": slots, "n_heads": 2, "n_kv_heads": 1, "rope": (cos, cos, positions)},
        ),
        "rms_norm": (attn_ext.rms_norm, {"x": x, "weight": x[0]}, {}),
        "layer_norm": (attn_ext.layer_norm, {"x": x, "weight": x[0], "bias": x[1]}, {}),
        "masked_softmax": (attn_ext.masked_softmax, {"scores": torch.randn(2, 3), "mask": torch.randn(2, 3)}, {}),
        "attention": (attn_ext.attention, {"q": q, "k": k, "v": v, **extra}, {}),
        "attention_varlen": (
            attn_ext.attention_varlen, {"q": q[0], "k": k[0], "v": v[0], **extra},
            {"cu_seqlens_q": cu, "cu_seqlens_k": cu},
        ),
        "paged_attention": (
            attn_ext.paged_attention, {"q": q, "key_cache": cache, "value_cache": cache.clone(), **extra},
            {"block_table": table, "seq_lens": lens},
        ),
        "append_kv": (
            attn_ext.append_kv, {"key": k[0], "value": v[0], "key_cache": cache, "value_cache": cache.clone()},
            {"slot_mapping": slots},
        ),
        "copy_blocks": (
            attn_ext.copy_blocks, {"key_cache": cache, "value_cache": cache.clone()}, {"block_pairs": [(0, 0)]}
        ),
        "merge_attention": (attn_ext.merge_attention, {"out_a": q, "lse_a": lse, "out_b": q, "lse_b": lse}, {}),
    }  # fmt: skip


@pytest.mark.parametrize("name", _gradient_calls())
def test_H22_no_silent_detach(name, backend):
    """An input that requires grad raises, and nothing is written; without grad mode it works."""
    function, tensors, others = _gradient_calls()[name]
    for argument in tensors:
        inputs = {n: t.clone() for n, t in tensors.items()}
        kept = {n: t.clone() for n, t in inputs.items()}
        inputs[argument].requires_grad_()
        with pytest.raises(RuntimeError, match=rf"^{name}: .*(grad|differentiable)"):
            function(**inputs, **others)
        for n, t in inputs.items():
            assert_same_bits(t.detach(), kept[n], f"{name}: {n}")
        with torch.no_grad():
            function(**inputs, **others)
        with torch.inference_mode():
            function(**{n: t.detach().clone() for n, t in inputs.items()}, **others)
    result = function(**{n: t.clone() for n, t in tensors.items()}, **others)
    for x in result if isinstance(result, tuple) else [] if result is None else [result]:
        assert not x.requires_grad


def test_H22_rope_tables(backend):
    """The tables of a rotation, which are inside a tuple, are inputs like all others."""
    function, tensors, others = _gradient_calls()["qkv_projection_to_cache"]
    cos, sin, positions = others["rope"]
    with pytest.raises(RuntimeError, match=r"^qkv_projection_to_cache: .*(grad|differentiable)"):
        function(**tensors, **{**others, "rope": (cos.clone().requires_grad_(), sin, positions)})


# ---------------------------------------------------------------------------- H25: autocast, mixed dtypes


@pytest.mark.parametrize("low", [-math.inf, -3.4e38])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_H25_autocast(low, dtype, backend):
    """Inputs of float32 linears, an additive float32 mask with -inf or the lowest float32: runs in autocast's dtype."""
    x = torch.randn(2, 5, 16)
    weight = torch.randn(32, 16) / 4
    mask = torch.zeros(2, 1, 5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), low)
    q, k, v = attn_ext.qkv_projection(x, weight, None, n_heads=2, n_kv_heads=1)
    expected = attn_ext.attention(q, k, v, bias=mask)
    q_t = q.transpose(1, 2)
    with torch.autocast("cpu", dtype):
        out, lse = attn_ext.attention(q, k, v, bias=mask, return_lse=True)
        mixed = attn_ext.attention(q, k.to(dtype), v, bias=mask)
        projected = attn_ext.qkv_projection(x, weight, None, n_heads=2, n_kv_heads=1)
        hidden = attn_ext.linear(x, weight, activation="gelu")
        weights = attn_ext.masked_softmax(q_t @ q_t.transpose(-1, -2), mask)
    assert out.dtype == mixed.dtype == hidden.dtype == projected[0].dtype == dtype and lse.dtype == F32
    assert weights.dtype in (dtype, F32)  # as torch's own softmax, which autocast runs in float32
    for result in (out, mixed):
        assert (result.float() - expected).abs().max() <= 2e-2
    assert not weights.isnan().any()
    assert attn_ext.attention(q, k, v).dtype == F32


def test_H25_autocast_of_the_paged_ops(backend):
    """A bfloat16 cache filled and read by float32 activations under autocast."""
    x, weight = torch.randn(5, 16), torch.randn(32, 16) / 4
    caches = new_cache(2, 4, 1, 8, BF16)
    with torch.autocast("cpu", BF16):
        q = attn_ext.qkv_projection_to_cache(x, weight, None, *caches, torch.arange(5), n_heads=2, n_kv_heads=1)
        assert q.dtype == BF16
        out = attn_ext.paged_attention(q.float()[None], *caches, torch.tensor([[0, 1]], dtype=INT32), ints(5))
        attn_ext.append_kv(torch.randn(1, 1, 8), torch.randn(1, 1, 8), *caches, torch.tensor([5]))
    assert out.dtype == BF16
    q, k, v = attn_ext.qkv_projection(x, weight, None, n_heads=2, n_kv_heads=1)
    expected = attn_ext.attention(q[None], k[None], v[None], causal=True)
    assert (out.float() - expected).abs().max() <= 2e-2


@pytest.mark.parametrize("odd", ["q", "k", "v"])
@pytest.mark.parametrize("other", [BF16, F16], ids=str)
def test_H25_mixed_dtypes_raise(odd, other, backend):
    tensors = {name: torch.randn(1, 3, 2, 8, dtype=other if name == odd else F32) for name in "qkv"}
    q, k, v = tensors.values()
    table, lens, cu = torch.tensor([[0]], dtype=INT32), ints(3), ints(0, 3)
    for call in (
        lambda: attn_ext.attention(q, k, v),
        lambda: attn_ext.attention_varlen(q[0], k[0], v[0], cu, cu),
        lambda: attn_ext.paged_attention(q, k, v, table, lens),
    ):
        with pytest.raises(RuntimeError) as error:
            call()
        message = str(error.value).lower()
        dtypes = [t.dtype for t in tensors.values()]
        assert message.count("bfloat16") == dtypes.count(BF16) and message.count("float32") == dtypes.count(F32), (
            message
        )
        assert message.replace("bfloat16", "").count("float16") == dtypes.count(F16), message


# -------------------------------------------------------------------------------------- H26: fork and threads

FORK_SCRIPT = """
    import multiprocessing, sys
    import torch
    import attn_ext

    torch.set_num_threads(1)  # torch's own ops hang in a forked child if its pool has started: they get one thread here
    torch.manual_seed(0)
    q, cache, weight = torch.randn(1, 256, 8, 64), torch.randn(20, 16, 8, 64), torch.randn(70, 512)
    table, lens = torch.arange(16, dtype=torch.int32)[None], torch.tensor([250], dtype=torch.int32)

    def work(queue):
        torch.set_num_threads(2)
        dense = attn_ext.attention(q, q, q, causal=True)
        paged = attn_ext.paged_attention(q[:, :1], cache, cache, table, lens)
        gemm = attn_ext.linear(q.view(1, 256, 512), weight)
        torch.set_num_threads(1)
        queue.put([x.double().sum().item() for x in (dense, paged, gemm)])

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        queue = context.Queue()
        work(queue)  # the parent starts its thread pool
        mine = queue.get()
        child = context.Process(target=work, args=(queue,), daemon=True)
        child.start()
        assert queue.get(timeout=60) == mine
        child.join(20)
        assert child.exitcode == 0, child.exitcode
        print("same")
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_H26_child_processes(method, backend, tmp_path):
    """A child runs in parallel after its parent has; a hang ends this test by its time limit."""
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(FORK_SCRIPT))
    result = subprocess.run(
        [sys.executable, str(script), method],
        env={**os.environ, "ATTN_EXT_BACKEND": backend}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0 and result.stdout.strip() == "same", result.stderr


# ----------------------------------------------------------------------------------- H27: tensors elsewhere


def _device_calls():
    q, k, v = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 8)
    x, weight, bias = torch.randn(3, 8), torch.randn(32, 8), torch.randn(32)
    lse = torch.randn(1, 2, 3)
    rows = {"residual": torch.randn(3, 32), "multiply": torch.randn(3, 32)}
    table, lens, cu, slots = torch.tensor([[0]], dtype=INT32), ints(3), ints(0, 3), torch.arange(3)
    extra = {
        "alibi_slopes": torch.randn(2), "sinks": torch.randn(2), "bias": torch.randn(1, 1, 3, 3),
        "mask": torch.ones(1, 1, 3, 3, dtype=torch.bool),
    }  # fmt: skip
    cache = torch.randn(1, 4, 1, 8)
    caches = {"key_cache": cache, "value_cache": cache.clone()}
    return {
        "linear": ({"x": x, "weight": weight, "bias": bias, **rows}, {}),
        "qkv_projection": ({"x": x, "weight": weight, "bias": bias}, {"n_heads": 2, "n_kv_heads": 1}),
        "qkv_projection_to_cache": (
            {"x": x, "weight": weight, "bias": bias, **caches, "slot_mapping": slots}, {"n_heads": 2, "n_kv_heads": 1}
        ),
        "rms_norm": ({"x": x, "weight": x[0]}, {}),
        "layer_norm": ({"x": x, "weight": x[0], "bias": x[1]}, {}),
        "masked_softmax": ({"scores": torch.randn(2, 3), "mask": torch.randn(2, 3)}, {}),
        "attention": ({"q": q, "k": k, "v": v, **extra}, {}),
        "attention_varlen": ({"q": q[0], "k": k[0], "v": v[0], "cu_seqlens_q": cu, "cu_seqlens_k": cu, **extra}, {}),
        "paged_attention": ({"q": q, **caches, "block_table": table, "seq_lens": lens, **extra}, {}),
        "append_kv": ({"key": k[0], "value": v[0], **caches, "slot_mapping": slots}, {}),
        "copy_blocks": ({**caches, "block_pairs": torch.tensor([[0, 0]])}, {}),
        "merge_attention": ({"out_a": q, "lse_a": lse, "out_b": q, "lse_b": lse}, {}),
    }  # fmt: skip


@pytest.mark.parametrize("name", _device_calls())
def test_H27_mixed_devices_name_the_odd_one(name, backend):
    tensors, others = _device_calls()[name]
    for argument in list(tensors)[1:]:
        moved = {**tensors, argument: tensors[argument].to("meta")}
        with pytest.raises(RuntimeError, match=rf"^{name}: .*\b{argument}\b.*meta"):
            getattr(attn_ext, name)(**moved, **others)


# ------------------------------------------------------------------------------------ H29: fused QKV at load


@pytest.mark.parametrize(("h", "hkv"), [(8, 2), (4, 2), (6, 1), (3, 3)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_H29_separate_weights_fused(h, hkv, has_bias, dtype):
    """q_proj, k_proj and v_proj of a Llama-style layer, concatenated: the parts are the three projections."""
    x = torch.randn(2, 5, 32).to(dtype)
    weights = [torch.randn(heads * 12, 32).to(dtype) for heads in (h, hkv, hkv)]
    biases = [torch.randn(heads * 12).to(dtype) if has_bias else None for heads in (h, hkv, hkv)]
    bias = torch.cat(biases) if has_bias else None
    parts = attn_ext.qkv_projection(x, torch.cat(weights), bias, n_heads=h, n_kv_heads=hkv)
    for part, w, b, heads in zip(parts, weights, biases, (h, hkv, hkv), strict=True):
        assert_same_bits(part, attn_ext.linear(x, w, b).unflatten(-1, (heads, 12)))
    out = attn_ext.attention(*parts, causal=True)
    unfused = reference.attention(
        *(reference.linear(x.double(), w.double(), None if b is None else b.double()).unflatten(-1, (heads, 12))
          for w, b, heads in zip(weights, biases, (h, hkv, hkv), strict=True)), causal=True)  # fmt: skip
    if dtype in (F32, torch.float64):
        # scores of x, W ~ N(0, 1): 32 * sqrt(12) in size; weights move by that many ulps
        torch.testing.assert_close(out.double(), unfused, rtol=0, atol=400 * 20 * torch.finfo(F32).eps)
