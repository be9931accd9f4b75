"""attn_ext.flash_attn: flash-attention 2's functions, compared with the reference and with their documented meaning."""

import inspect
import math

import pytest
import torch
from tolerance import assert_as_accurate_as_torch, assert_same_bits

import attn_ext
from attn_ext import flash_attn, reference
from attn_ext.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

INT32 = torch.int32

# As in flash_attn 2.8: names, order and defaults.
DENSE = [
    "dropout_p=0.0", "softmax_scale=None", "causal=False", "window_size=(-1, -1)", "softcap=0.0", "alibi_slopes=None",
    "deterministic=False", "return_attn_probs=False",
]  # fmt: skip
SIGNATURES = {
    "flash_attn_func": ["q", "k", "v", *DENSE],
    "flash_attn_kvpacked_func": ["q", "kv", *DENSE],
    "flash_attn_qkvpacked_func": ["qkv", *DENSE],
    "flash_attn_varlen_func": [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *DENSE, "block_table=None"
    ],
    "flash_attn_varlen_kvpacked_func": [
        "q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *DENSE
    ],
    "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen", *DENSE],
    "flash_attn_with_kvcache": [
        "q", "k_cache", "v_cache", "k=None", "v=None", "rotary_cos=None", "rotary_sin=None", "cache_seqlens=None",
        "cache_batch_idx=None", "cache_leftpad=None", "block_table=None", "softmax_scale=None", "causal=False",
        "window_size=(-1, -1)", "softcap=0.0", "rotary_interleaved=True", "alibi_slopes=None", "num_splits=0",
        "return_softmax_lse=False",
    ],
}  # fmt: skip

OPTIONS = [
    {},
    {"causal": True},
    {"softmax_scale": -0.3},
    {"window_size": (3, 0)},
    {"window_size": (2, 4), "causal": True},
    {"softcap": 2.0},
    {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05]), "causal": True},
    {"alibi_slopes": torch.rand(2, 4, generator=torch.Generator().manual_seed(0))},
]


def ints(*values):
    return torch.tensor(values, dtype=INT32)


def _reference(q, k, v, *, softmax_scale=None, window_size=(-1, -1), **options):
    """exact, plain and their lse, of dense tensors; options under flash-attention's names."""
    results = []
    for precision in (torch.float64, q.dtype):
        with reference.precision(precision):
            results += reference.attention(q, k, v, scale=softmax_scale, window=window_size, return_lse=True, **options)
    return results


def _check(out, lse, q, k, v, **options):
    exact, exact_lse, plain, _ = _reference(q, k, v, **options)
    assert_as_accurate_as_torch(out, exact, plain, terms=30.0, what="out")
    torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    got = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert got == SIGNATURES[name]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "none")
@pytest.mark.parametrize(("tq", "tk"), [(5, 5), (3, 9), (9, 3), (1, 70)])
def test_dense(tq, tk, options, dtype):
    q, k, v = (torch.randn(2, t, h, 16).to(dtype) for t, h in ((tq, 4), (tk, 2), (tk, 2)))
    out, lse, probs = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    _check(out, lse, q, k, v, **options)
    assert lse.shape == (2, 4, tq) and lse.dtype == torch.float32
    assert probs.numel() == 0 and probs.dtype == dtype
    assert_same_bits(flash_attn_func(q, k, v, **options), out)
    kv = torch.stack([k, v], dim=2)
    assert_same_bits(flash_attn_kvpacked_func(q, kv, **options), out)
    out, lse, _ = flash_attn_kvpacked_func(q, kv, return_attn_probs=True, **options)
    _check(out, lse, q, k, v, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "none")
def test_qkv_packed(options, dtype):
    qkv = torch.randn(2, 7, 3, 4, 16).to(dtype)
    out, lse, _ = flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options)
    _check(out, lse, *qkv.unbind(2), **options)
    assert_same_bits(flash_attn_qkvpacked_func(qkv, **options), out)
    flat = qkv.flatten(0, 1)
    assert_same_bits(flash_attn_varlen_qkvpacked_func(flat, ints(0, 7, 14), 7, **options), out.flatten(0, 1))


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "none")
def test_varlen(options, dtype):
    """Against the dense function, sequence by sequence; K and V also packed and in pages of 3."""
    lens = [(5, 9), (1, 4)]
    q, k, v = (torch.randn(n, h, 16).to(dtype) for n, h in ((6, 4), (13, 2), (13, 2)))
    cu_q, cu_k = ints(0, 5, 6), ints(0, 9, 13)
    out, lse, probs = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 9, return_attn_probs=True, **options)
    assert lse.shape == (4, 6) and probs.numel() == 0
    for b, (tq, tk) in enumerate(lens):
        rows, keys = slice(int(cu_q[b]), int(cu_q[b]) + tq), slice(int(cu_k[b]), int(cu_k[b]) + tk)
        slopes = options.get("alibi_slopes")
        own = {**options, **({} if slopes is None else {"alibi_slopes": slopes if slopes.dim() == 1 else slopes[b]})}
        one = flash_attn_func(q[None, rows], k[None, keys], v[None, keys], return_attn_probs=True, **own)
        assert_same_bits(out[rows], one[0][0])
        assert_same_bits(lse[:, rows], one[1][0])
    kv = torch.stack([k, v], dim=1)
    assert_same_bits(flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 5, 9, **options), out)
    table = torch.tensor([[4, 0, 2], [1, 3, 99]], dtype=INT32)
    pages = torch.full((2, 5, 3, 2, 16), math.nan, dtype=dtype)
    for cache, x in zip(pages, (k, v), strict=True):
        cache[[4, 0, 2]] = x[:9].view(3, 3, 2, 16)
        cache[1], cache[3, :1] = x[9:12], x[12:]
    paged = flash_attn_varlen_func(q, *pages, cu_q, cu_k, 5, 9, block_table=table, **options)
    assert_same_bits(paged, out)


# ------------------------------------------------------------------------------------------ with_kvcache


def _rotated(x, cos, sin, positions, interleaved):
    """Rotary embedding of x (B, T, H, D) as flash-attention defines it, dim by dim in float64."""
    out = x.double().clone()
    half = cos.shape[1]
    for d in range(half):
        a, b = (2 * d, 2 * d + 1) if interleaved else (d, d + half)
        c, s = (t.double()[positions, d][:, :, None] for t in (cos, sin))
        out[..., a] = x[..., a].double() * c - x[..., b].double() * s
        out[..., b] = x[..., a].double() * s + x[..., b].double() * c
    return out


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "none")
@pytest.mark.parametrize("paged", [False, True])
def test_kvcache_read(options, paged, dtype):
    """No new tokens: attention over the first cache_seqlens tokens; what lies behind them is not read."""
    lens = (7, 11)
    q = torch.randn(2, 3, 4, 16).to(dtype)
    k_cache, v_cache = torch.randn(2, 2, 12, 2, 16).to(dtype)
    table = None
    if paged:
        table = torch.tensor([[5, 0, 2], [1, 4, 3]], dtype=INT32)
        pages = torch.full((2, 6, 4, 2, 16), math.nan, dtype=dtype)
        for cache, x in zip(pages, (k_cache, v_cache), strict=True):
            cache[table.long()] = x.view(2, 3, 4, 2, 16)
        caches = pages
    else:
        caches = torch.stack([k_cache, v_cache])
    full = flash_attn_with_kvcache(q, *caches, block_table=table, return_softmax_lse=True, **options)
    _check(*full, q, k_cache, v_cache, **options)
    if not paged:
        for b, n in enumerate(lens):
            caches[:, b, n:] = math.nan
    out, lse = flash_attn_with_kvcache(
        q, *caches, cache_seqlens=ints(*lens), block_table=table, return_softmax_lse=True, **options
    )
    assert lse.shape == (2, 4, 3)
    for b, n in enumerate(lens):
        slopes = options.get("alibi_slopes")
        own = {**options, **({} if slopes is None else {"alibi_slopes": slopes if slopes.dim() == 1 else slopes[b]})}
        _check(out[b : b + 1], lse[b : b + 1], q[b : b + 1], k_cache[b : b + 1, :n], v_cache[b : b + 1, :n], **own)
    same = flash_attn_with_kvcache(q, *caches, cache_seqlens=7, block_table=table, **options)
    given = flash_attn_with_kvcache(q, *caches, cache_seqlens=ints(7, 7), block_table=table, num_splits=3, **options)
    assert_same_bits(same, given)


@pytest.mark.parametrize("rotary_dim", [0, 2, 8, 16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("mode", ["causal", "window", "neither"])
@pytest.mark.parametrize("presentation", ["dense", "batch index", "paged"])
def test_kvcache_append(rotary_dim, interleaved, mode, presentation, dtype):
    """New tokens go behind the old ones, rotated, and are attended to; nothing else in the caches changes."""
    lens, new = (3, 6), 2
    q, k, v = (torch.randn(2, new, h, 16).to(dtype) for h in (4, 2, 2))
    options = {"causal": {"causal": True}, "window": {"window_size": (4, 1)}, "neither": {}}[mode]
    if presentation == "paged":
        size, table = 4, torch.tensor([[3, 1], [4, 0]], dtype=INT32)
        where = {"block_table": table}
    elif presentation == "batch index":
        size, table = 8, ints(4, 2)[:, None]
        where = {"cache_batch_idx": ints(4, 2)}
    else:
        size, table, where = 8, ints(0, 1)[:, None], {}
    caches = torch.randn(2, 2 if presentation == "dense" else 5, size, 2, 16).to(dtype)
    rotary = {}
    cos = sin = torch.zeros(20, 0)
    if rotary_dim:
        angle = torch.rand(20, rotary_dim // 2) * 6
        cos, sin = angle.cos(), angle.sin()
        rotary = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved}
    expected_caches = caches.clone()
    start = torch.tensor(lens)[:, None]
    positions = start + torch.arange(new)
    k_new = _rotated(k, cos, sin, positions, interleaved)
    q_new = _rotated(q, cos, sin, start.expand(2, new) if mode == "neither" else positions, interleaved)
    for b in range(2):
        for i in range(new):
            block, offset = divmod(lens[b] + i, size)
            expected_caches[0, table[b, block], offset] = k_new[b, i].to(dtype)
            expected_caches[1, table[b, block], offset] = v[b, i]
    before = [x.clone() for x in (q, k, v, caches)]
    out, lse = flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=ints(*lens), return_softmax_lse=True, **options, **where, **rotary
    )
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(caches, expected_caches, rtol=eps, atol=eps)  # a rotation may round the other way
    assert_same_bits(caches[1], expected_caches[1], "v_cache")
    for x, kept in zip((q, k, v), before, strict=False):
        assert_same_bits(x, kept, "an input")
    old = (expected_caches == before[3]).flatten(3).all(-1)  # slots that no new token belongs to
    assert old.sum() == old.numel() - 2 * 2 * new
    assert_same_bits(caches[old], before[3][old], "slots of old tokens")
    for b, n in enumerate(lens):
        keys, values = (c[table[b].long()].flatten(0, 1)[None, : n + new] for c in caches)
        _check(out[b : b + 1], lse[b : b + 1], q_new[b : b + 1].to(dtype), keys, values, **options)


def test_kvcache_append_touches_only_the_new_slots():
    caches = torch.randn(2, 2, 8, 2, 16)
    before = caches.clone()
    k, v = torch.randn(2, 2, 3, 2, 16)
    flash_attn_with_kvcache(torch.randn(2, 1, 4, 16), *caches, k, v, cache_seqlens=ints(5, 0))
    before[0, 0, 5:], before[1, 0, 5:], before[0, 1, :3], before[1, 1, :3] = k[0], v[0], k[1], v[1]
    assert_same_bits(caches, before)


def test_kvcache_leftpad(dtype):
    """Keys before the left padding are not seen, whatever they hold; also with pages."""
    q = torch.randn(2, 3, 4, 16).to(dtype)
    caches = torch.randn(2, 2, 12, 2, 16).to(dtype)
    pads, lens = (2, 5), (9, 12)
    expected = []
    for b in range(2):
        keys, values = (c[b : b + 1, pads[b] : lens[b]] for c in caches)
        expected.append(flash_attn_func(q[b : b + 1], keys, values, causal=True))
    for b in range(2):
        caches[:, b, : pads[b]] = math.nan
        caches[:, b, lens[b] :] = math.nan
    options = {"cache_seqlens": ints(*lens), "cache_leftpad": ints(*pads), "causal": True}
    out = flash_attn_with_kvcache(q, *caches, **options)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, torch.cat(expected), rtol=2 * eps, atol=4 * eps)  # keys are summed in other groups
    table = torch.tensor([[3, 0, 2], [1, 5, 4]], dtype=INT32)
    pages = torch.full((2, 6, 4, 2, 16), math.nan, dtype=dtype)
    for page, cache in zip(pages, caches, strict=True):
        page[table.long()] = cache.view(2, 3, 4, 2, 16)
    assert_same_bits(flash_attn_with_kvcache(q, *pages, block_table=table, **options), out)
    nothing = flash_attn_with_kvcache(q, *caches, cache_seqlens=ints(9, 12), cache_leftpad=ints(9, 12))
    assert (nothing == 0).all()


def test_a_decoding_loop_is_the_full_forward(dtype):
    """Code written for flash-attention: prefill through the cache, then one token at a time."""
    length, prompt = 21, 9
    q, k, v = (torch.randn(2, length, h, 16).to(dtype) for h in (4, 2, 2))
    full = flash_attn_func(q, k, v, causal=True)
    k_cache, v_cache = (torch.full((2, 32, 2, 16), math.nan, dtype=dtype) for _ in range(2))
    outs, lens = [], torch.zeros(2, dtype=INT32)
    for begin, end in [(0, prompt), *((t, t + 1) for t in range(prompt, length))]:
        part = slice(begin, end)
        outs.append(
            flash_attn_with_kvcache(
                q[:, part], k_cache, v_cache, k[:, part], v[:, part], cache_seqlens=lens, causal=True
            )
        )
        lens += end - begin
    assert_same_bits(torch.cat(outs, dim=1), full)


def test_empty():
    assert flash_attn_func(*(torch.zeros(0, 3, 2, 8) for _ in "qkv")).shape == (0, 3, 2, 8)
    cache = torch.zeros(2, 8, 2, 8)
    out = flash_attn_with_kvcache(torch.zeros(2, 1, 2, 8), cache, cache.clone(), cache_seqlens=0)
    assert (out == 0).all()
    none = torch.zeros(2, 0, 2, 8)
    out = flash_attn_with_kvcache(torch.zeros(2, 1, 2, 8), cache, cache.clone(), none, none, cache_seqlens=3)
    assert out.shape == (2, 1, 2, 8)


def test_rows_without_keys():
    """Causal with more queries than keys: output 0 as in flash-attention, lse -inf."""
    q, k, v = torch.randn(1, 5, 2, 8), torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (out[:, :3] == 0).all() and (lse[..., :3] == -math.inf).all()
    assert torch.isfinite(lse[..., 3:]).all()


# ---------------------------------------------------------------------------------------------------- errors


def _kvcache(**wrong):
    arguments = {
        "q": torch.randn(2, 1, 4, 16), "k_cache": torch.randn(2, 8, 2, 16), "v_cache": torch.randn(2, 8, 2, 16),
        "k": torch.randn(2, 1, 2, 16), "v": torch.randn(2, 1, 2, 16), "cache_seqlens": ints(3, 6), **wrong,
    }  # fmt: skip
    return arguments


ROTARY = {"rotary_cos": torch.randn(20, 4), "rotary_sin": torch.randn(20, 4)}
WRONG = [
    ({"k": None}, "k and v must be given together"),
    ({"v": None}, "k and v must be given together"),
    ({"cache_seqlens": None}, "cache_seqlens must be given"),
    ({"cache_seqlens": ints(3)}, "cache_seqlens must have the shape"),
    ({"cache_seqlens": ints(3, 8)}, "cache_seqlens must be in"),
    ({"cache_seqlens": ints(-1, 3)}, "cache_seqlens must be in"),
    ({"cache_seqlens": 8}, "cache_seqlens must be in"),
    ({"k": torch.randn(2, 1, 2, 15)}, "k must have the shape"),
    ({"k": torch.randn(2, 1, 1, 16)}, "k must have the shape"),
    ({"k": torch.randn(3, 1, 2, 16)}, "k must have the shape"),
    ({"v": torch.randn(2, 2, 2, 16)}, "v must have the shape"),
    ({"q": torch.randn(2, 4, 16)}, "q must have 4 dims"),
    ({"k_cache": torch.randn(2, 8, 32)}, "k_cache must have 4 dims"),
    ({"q": torch.randn(3, 1, 4, 16), "cache_seqlens": 3}, "k_cache must have the batch size of q"),
    ({"cache_batch_idx": ints(0)}, "cache_batch_idx must have the shape"),
    ({"cache_batch_idx": torch.tensor([1.0, 0.5])}, "cache_batch_idx must be int32 or int64"),
    ({"cache_batch_idx": ints(0, 2)}, "cache_batch_idx must be in"),
    ({"cache_batch_idx": ints(-1, 0)}, "cache_batch_idx must be in"),
    ({"cache_batch_idx": ints(1, 1), "cache_seqlens": 3}, "slot_mapping must name each slot once"),
    ({"cache_batch_idx": ints(0, 1), "block_table": ints(0, 1)[:, None]}, "cache_batch_idx must be None"),
    ({"block_table": ints(0, 1)}, "block_table must have the shape"),
    ({"block_table": ints(0, 1, 0)[:, None]}, "block_table must have the shape"),
    ({"block_table": ints(0, 2)[:, None]}, r"block_table\[1\]\[0\] must be a block"),
    ({"block_table": ints(-1, 1)[:, None]}, r"block_table\[0\]\[0\] must be a block"),
    ({"cache_leftpad": ints(1)}, "cache_leftpad must have the shape"),
    ({"rotary_cos": ROTARY["rotary_cos"]}, "rotary_cos and rotary_sin must be given together"),
    ({**ROTARY, "k": None, "v": None}, "rotary_cos must come with"),
    ({**ROTARY, "rotary_sin": torch.randn(20, 5)}, "rotary_sin must have the shape"),
    ({**ROTARY, "rotary_cos": torch.zeros(20, 4, dtype=INT32)}, "rotary_cos must have a float dtype"),
    ({**ROTARY, "rotary_sin": torch.zeros(20, 4, dtype=INT32)}, "rotary_sin must have a float dtype"),
    ({"rotary_cos": torch.randn(6, 4), "rotary_sin": torch.randn(6, 4)}, "rotary_cos must have a row for each"),
    ({"rotary_cos": torch.randn(20, 9), "rotary_sin": torch.randn(20, 9)}, "rotary_cos must have at most 8 columns"),
    ({"rotary_cos": torch.randn(20), "rotary_sin": torch.randn(20)}, "rotary_cos must have the shape"),
    ({"q": torch.randn(2, 1, 3, 16)}, "the number of query heads must be"),
    ({"q": torch.randn(2, 1, 4, 16).half()}, "must have the same dtype"),
    ({"k": torch.randn(2, 1, 2, 16).half()}, "must have the same dtype"),
    ({"alibi_slopes": torch.randn(3)}, "alibi_slopes must have shape"),
    ({"softcap": -1.0}, "softcap must be"),
    ({"softmax_scale": math.inf}, "scale must be finite"),
    ({"v_cache": torch.randn(2, 8, 2, 15)}, "value_cache must have the shape"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ",".join(x))
def test_kvcache_errors_leave_the_caches_alone(wrong, message):
    arguments = _kvcache(**wrong)
    caches = [arguments[name].clone() for name in ("k_cache", "v_cache")]
    with pytest.raises(RuntimeError, match=rf"^\w+: .*{message}.*, got "):
        flash_attn_with_kvcache(**arguments)
    assert_same_bits(arguments["k_cache"], caches[0])
    assert_same_bits(arguments["v_cache"], caches[1])
    flash_attn_with_kvcache(**_kvcache())  # what it starts from is right


@pytest.mark.parametrize(
    ("cu_seqlens_k", "max_seqlen_k", "message"),
    [
        (ints(0, 9), 8, r"max_seqlen_k must be at least the longest sequence \(9\), got 8"),
        (ints(4, 9), 9, "cu_seqlens_k must start with 0, got 4"),
        (ints(0, 4, 9), 9, r"cu_seqlens_k must have the shape \(2\), got \(3\)"),
    ],
)
def test_varlen_errors_with_pages(cu_seqlens_k, max_seqlen_k, message):
    q, cache, table = torch.randn(3, 4, 16), torch.randn(2, 8, 2, 16), ints(1, 0)[None]
    flash_attn_varlen_func(q, cache, cache, ints(0, 3), ints(0, 9), 3, 9, block_table=table)
    with pytest.raises(RuntimeError, match=f"^flash_attn_varlen_func: {message}$"):
        flash_attn_varlen_func(q, cache, cache, ints(0, 3), cu_seqlens_k, 3, max_seqlen_k, block_table=table)


def test_dropout_raises():
    q, qkv = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 3, 2, 8)
    cu = ints(0, 3)
    for call in (
        lambda p: flash_attn_func(q, q, q, p),
        lambda p: flash_attn_kvpacked_func(q, qkv[:, :, :2], dropout_p=p),
        lambda p: flash_attn_qkvpacked_func(qkv, dropout_p=p),
        lambda p: flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 3, 3, p),
        lambda p: flash_attn_varlen_kvpacked_func(q[0], qkv[0, :, :2], cu, cu, 3, 3, p),
        lambda p: flash_attn_varlen_qkvpacked_func(qkv[0], cu, 3, p),
    ):
        with pytest.raises(NotImplementedError, match=r"^flash_attn\w*: dropout_p must be 0.0, .*got 0.1"):
            call(0.1)
        call(0.0)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (flash_attn_kvpacked_func, lambda x: (x, x)),
        (flash_attn_qkvpacked_func, lambda x: (x,)),
        (flash_attn_varlen_kvpacked_func, lambda x: (x[0], x[0], ints(0, 3), ints(0, 3), 3, 3)),
        (flash_attn_varlen_qkvpacked_func, lambda x: (x[0], ints(0, 3), 3)),
    ],
)
def test_packed_shapes(function, args):
    with pytest.raises(RuntimeError, match=rf"^{function.__name__}: q?kv must have the shape .*, got "):
        function(*args(torch.randn(1, 3, 2, 8)))


def test_gradients_raise():
    q = torch.randn(1, 3, 2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="grad"):
        flash_attn_func(q, q, q)
    with torch.no_grad():
        assert_same_bits(flash_attn_func(q, q, q), attn_ext.attention(q.detach(), q.detach(), q.detach()))
