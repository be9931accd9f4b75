"""The definition of correct: one short torch function per op, with the signature of the public function.

Nothing here is fast. Scores, softmax and sums are computed in float32 (float64 for float64 inputs) and rounded
once to the input's dtype at the end. `precision(dtype)` changes the dtype of the computation:
`precision(torch.float64)` gives the oracle the tests compare with, `precision(torch.bfloat16)` what plain
low-precision torch would give, which sets the tolerance.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

__all__ = [
    "append_kv",
    "attention",
    "attention_varlen",
    "attention_weights",
    "copy_blocks",
    "decoder_layer",
    "decoder_layers",
    "layer_norm",
    "linear",
    "masked_softmax",
    "merge_attention",
    "paged_attention",
    "precision",
    "qkv_projection",
    "qkv_projection_to_cache",
    "rms_norm",
    "rope",
]

_forced: torch.dtype | None = None


@contextlib.contextmanager
def precision(dtype: torch.dtype):
    """Compute in `dtype` inside this context, instead of float32 (float64 for float64 inputs).

    >>> import torch
    >>> from attn_ext import reference
    >>> with reference.precision(torch.float64):
    ...     reference.masked_softmax(torch.zeros(1, 2), scale=3.0).dtype
    torch.float64
    """
    global _forced
    before, _forced = _forced, dtype
    try:
        yield
    finally:
        _forced = before


def _compute_dtype(x: Tensor) -> torch.dtype:
    return _forced or (torch.float64 if x.dtype == torch.float64 else torch.float32)


def _result_dtype(x: Tensor) -> torch.dtype:
    """Under `precision` the result stays in the precision it was computed in, so that errors can be seen."""
    return _forced or x.dtype


# ---------------------------------------------------------------------------------------------- projections


def linear(x, weight, bias=None, *, activation=None, residual=None, multiply=None):
    """`activation(x @ weight.T + bias) * multiply + residual`; x (..., K), weight (N, K), bias (N), others (..., N).

    A weight of four dimensions is packed: (N/16, K/P, 16, P).

    >>> import torch
    >>> from attn_ext import reference
    >>> x = torch.tensor([[1.0, 2.0]])
    >>> reference.linear(x, torch.eye(2), torch.tensor([0.5, -2.0]), residual=x)
    tensor([[2.5000, 2.0000]])
    """
    c = _compute_dtype(x)
    if weight.dim() == 4:
        weight = weight.transpose(1, 2).flatten(2).flatten(0, 1)
    y = x.to(c) @ weight.to(c).T
    if bias is not None:
        y = y + bias.to(c)
    if activation == "gelu":
        y = torch.nn.functional.gelu(y)
    elif activation == "gelu_tanh":
        y = torch.nn.functional.gelu(y, approximate="tanh")
    elif activation == "silu":
        y = torch.nn.functional.silu(y)
    elif activation is not None:
        raise ValueError(f"linear: activation must be None, 'gelu', 'gelu_tanh' or 'silu', got {activation!r}")
    if multiply is not None:
        y = y * multiply.to(c)
    if residual is not None:
        y = y + residual.to(c)
    return y.to(_result_dtype(x))


def _split_qkv(qkv: Tensor, n_heads: int, n_kv_heads: int | None):
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    heads = qkv.unflatten(-1, (n_heads + 2 * n_kv_heads, -1))
    return heads.split([n_heads, n_kv_heads, n_kv_heads], dim=-2)


def qkv_projection(x, weight, bias=None, *, n_heads, n_kv_heads=None):
    """x (..., C), weight ((H + 2 Hkv) D, C) -> q (..., H, D), k (..., Hkv, D), v (..., Hkv, D): views of one buffer.

    >>> import torch
    >>> from attn_ext import reference
    >>> q, k, v = reference.qkv_projection(torch.ones(1, 2), torch.arange(16.0).reshape(8, 2), n_heads=2, n_kv_heads=1)
    >>> q.tolist(), k.tolist(), v.tolist()
    ([[[1.0, 5.0], [9.0, 13.0]]], [[[17.0, 21.0]]], [[[25.0, 29.0]]])
    """
    return _split_qkv(linear(x, weight, bias), n_heads, n_kv_heads)


def rope(x, cos, sin, positions):
    """Rotate (..., heads, D) by half-split (Llama) rotary tables cos, sin (max_pos, D/2) at `positions` (...).

    >>> import torch
    >>> from attn_ext import reference
    >>> cos, sin = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])  # no turn at position 0, 90 degrees at 1
    >>> reference.rope(torch.tensor([[[3.0, 4.0]], [[3.0, 4.0]]]), cos, sin, torch.tensor([0, 1])).tolist()
    [[[3.0, 4.0]], [[-4.0, 3.0]]]
    """
    c = _compute_dtype(x)
    cos, sin = cos[positions.long()].to(c).unsqueeze(-2), sin[positions.long()].to(c).unsqueeze(-2)
    a, b = x.to(c).chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(_result_dtype(x))


def qkv_projection_to_cache(
    x, weight, bias, key_cache, value_cache, slot_mapping, *, n_heads, n_kv_heads=None, rope=None
):
    """QKV projection, optional rotation of q and k, then k and v into their cache slots; returns q (..., H, D).

    >>> import torch
    >>> from attn_ext import reference
    >>> key_cache, value_cache = torch.zeros(1, 2, 1, 1), torch.zeros(1, 2, 1, 1)
    >>> weight = torch.tensor([[1.0], [2.0], [3.0]])  # rows of q, k and v
    >>> slot = torch.tensor([1])
    >>> reference.qkv_projection_to_cache(torch.ones(1, 1), weight, None, key_cache, value_cache, slot, n_heads=1)
    tensor([[[1.]]])
    >>> key_cache.flatten(), value_cache.flatten()
    (tensor([0., 2.]), tensor([0., 3.]))
    """
    c = _compute_dtype(x)
    qkv = linear(x.to(c), weight.to(c), None if bias is None else bias.to(c))
    q, k, v = _split_qkv(qkv, n_heads, n_kv_heads)
    if rope is not None:
        cos, sin, positions = rope
        q = globals()["rope"](q, cos, sin, positions.reshape(q.shape[:-2]))
        k = globals()["rope"](k, cos, sin, positions.reshape(k.shape[:-2]))
    append_kv(k.flatten(0, -3), v.flatten(0, -3), key_cache, value_cache, slot_mapping)
    return q.to(_result_dtype(x))


# --------------------------------------------------------------------------------------------------- norms


def rms_norm(x, weight, eps=1e-5):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension; x (..., C), weight (C).

    >>> import torch
    >>> from attn_ext import reference
    >>> reference.rms_norm(torch.tensor([3.0, 4.0, 0.0, 0.0]), torch.ones(4), eps=0.0)
    tensor([1.2000, 1.6000, 0.0000, 0.0000])
    """
    c = _compute_dtype(x)
    v = x.to(c)
    y = v / torch.sqrt(v.square().mean(-1, keepdim=True) + eps) * weight.to(c)
    return y.to(_result_dtype(x))


def layer_norm(x, weight, bias=None, eps=1e-5):
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension; x (..., C), weight and bias (C).

    >>> import torch
    >>> from attn_ext import reference
    >>> reference.layer_norm(torch.tensor([1.0, 3.0]), torch.ones(2), torch.tensor([0.0, 0.5]), eps=0.0)
    tensor([-1.0000,  1.5000])
    """
    c = _compute_dtype(x)
    d = x.to(c)
    d = d - d.mean(-1, keepdim=True)
    y = d / torch.sqrt(d.square().mean(-1, keepdim=True) + eps) * weight.to(c)
    if bias is not None:
        y = y + bias.to(c)
    return y.to(_result_dtype(x))


# ------------------------------------------------------------------------------------------------- softmax


def _softmax(s: Tensor, visible: Tensor | None, sinks: Tensor | None = None):
    """Softmax over the last dim of the keys that are seen; a row that sees none gives 0. -> weights, lse.

    A key is seen when it is visible and its score is above -inf. `sinks` (..., 1) joins the denominator only.
    """
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    m = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -math.inf)
    if sinks is not None:
        m = torch.maximum(m, sinks)
    m0 = m.masked_fill(m == -math.inf, 0.0)
    p = torch.exp(s - m0)
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - m0)
    weights = (p / total).masked_fill(s == -math.inf, 0.0)  # in a row with a NaN too, what is not seen is 0
    lse = m + torch.log(total)
    return weights, torch.where(total == 0, torch.full_like(lse, -math.inf), lse).squeeze(-1)


def masked_softmax(scores, mask=None, *, causal=False, scale=1.0):
    """Softmax over the last dim of `scale * scores` (..., Tq, Tk); mask bool (True = may attend) or additive.

    >>> import torch
    >>> from attn_ext import reference
    >>> reference.masked_softmax(torch.zeros(2, 2), causal=True)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    c = _compute_dtype(scores)
    s = scores.to(c) * scale
    tq, tk = s.shape[-2:]
    visible = torch.ones(tq, tk, dtype=torch.bool, device=s.device)
    if causal:
        visible = _causal_visible(tq, tk, s.device)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        s = s + mask.to(c)
    return _softmax(s, visible)[0].to(_result_dtype(scores))


# ----------------------------------------------------------------------------------------------- attention


def _causal_visible(tq, tk, device):
    position = torch.arange(tq, device=device)[:, None] + (tk - tq)
    return torch.arange(tk, device=device) <= position


def _scores(q, k, causal, scale, window, softcap, alibi_slopes, mask, bias):
    """Scores (B, H, Tq, Tk) in the order of the contract, and which keys each query may see."""
    c = _compute_dtype(q)
    (b, tq, h, d), tk = q.shape, k.shape[1]
    scale = 1.0 / math.sqrt(d) if scale is None else scale
    k = k.to(c).repeat_interleave(h // k.shape[2], dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q.to(c), k) * scale
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    position = torch.arange(tq, device=q.device)[:, None] + (tk - tq)
    distance = position - torch.arange(tk, device=q.device)
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(c).reshape(-1, h, 1, 1) * distance.abs().to(c)
    if bias is not None:
        s = s + bias.to(c)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    left, right = (-1, -1) if window is None else window
    if left >= 0:
        visible &= distance <= left
    if right >= 0:
        visible &= -distance <= right
    if mask is not None:
        visible = visible & mask
    return s, visible.expand(b, h, tq, tk)


def _weighted_sum(weights: Tensor, s_seen: Tensor, v: Tensor) -> Tensor:
    """weights (B,H,Tq,Tk) @ v (B,Tk,H,D), where an unseen key adds nothing even if its value is NaN or inf."""
    v = v.transpose(1, 2)
    if torch.isfinite(v).all():
        return (weights @ v).transpose(1, 2)
    terms = (weights[..., None] * v[:, :, None]).masked_fill(~s_seen[..., None], 0.0)
    return terms.sum(3).transpose(1, 2)


def attention_weights(
    q, k, *, causal=False, scale=None, window=None, softcap=0.0, alibi_slopes=None, sinks=None, mask=None, bias=None
):
    """-> scores before masking (B,H,Tq,Tk), visible (bool, same shape), weights (same shape), lse (B,H,Tq).

    >>> import torch
    >>> from attn_ext import reference
    >>> q, k = torch.ones(1, 1, 1, 4), torch.ones(1, 3, 1, 4)
    >>> scores, visible, weights, lse = reference.attention_weights(q, k, window=(1, 0))
    >>> scores.flatten(), visible.flatten(), weights.flatten()
    (tensor([2., 2., 2.]), tensor([False,  True,  True]), tensor([0.0000, 0.5000, 0.5000]))
    """
    s, visible = _scores(q, k, causal, scale, window, softcap, alibi_slopes, mask, bias)
    logits = None if sinks is None else sinks.to(s.dtype).reshape(1, -1, 1, 1)
    weights, lse = _softmax(s, visible, logits)
    return s, visible, weights, lse


def attention(
    q, k, v, *, causal=False, scale=None, window=None, softcap=0.0,
    alibi_slopes=None, sinks=None, mask=None, bias=None, return_lse=False,
):  # fmt: skip
    """q (B,Tq,H,D), k and v (B,Tk,Hkv,D) -> out (B,Tq,H,D) [, lse (B,H,Tq)].

    >>> import torch
    >>> from attn_ext import reference
    >>> q, k, v = torch.zeros(1, 2, 1, 1), torch.zeros(1, 4, 1, 1), torch.arange(1.0, 5).reshape(1, 4, 1, 1)
    >>> reference.attention(q, k, v, causal=True).flatten()  # the last query sees all four keys, the one before three
    tensor([2.0000, 2.5000])
    """
    s, visible, weights, lse = attention_weights(
        q, k, causal=causal, scale=scale, window=window, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=sinks, mask=mask, bias=bias,
    )  # fmt: skip
    v = v.to(s.dtype).repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    out = _weighted_sum(weights, visible & (s != -math.inf), v).to(_result_dtype(q))
    return (out, lse.to(_lse_dtype(q))) if return_lse else out


def _lse_dtype(q):
    return _forced or (torch.float64 if q.dtype == torch.float64 else torch.float32)


def _of_sequence(x: Tensor | None, b: int, tq: int, tk: int) -> Tensor | None:
    """The part of a mask or bias, broadcastable to (B, H, max Tq, max Tk), that belongs to sequence b."""
    if x is None:
        return None
    x = x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))
    x = x[b : b + 1] if x.shape[0] > 1 else x
    x = x[:, :, :tq] if x.shape[2] > 1 else x
    return x[..., :tk] if x.shape[3] > 1 else x


def _per_sequence(q, ranges, keys_and_values, *, alibi_slopes=None, mask=None, bias=None, return_lse=False, **options):
    """Attention sequence by sequence over q (total, H, D); `ranges[b]` are the query rows of sequence b."""
    out = torch.zeros_like(q, dtype=_result_dtype(q))
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=_lse_dtype(q), device=q.device)
    for b, (begin, end) in enumerate(ranges):
        k, v = keys_and_values(b)
        tq, tk = end - begin, k.shape[0]
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        part, part_lse = attention(
            q[None, begin:end], k[None], v[None], alibi_slopes=slopes, return_lse=True,
            mask=_of_sequence(mask, b, tq, tk), bias=_of_sequence(bias, b, tq, tk), **options,
        )  # fmt: skip
        out[begin:end], lse[:, begin:end] = part[0], part_lse[0]
    return (out, lse) if return_lse else out


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, max_seqlen_q=None, max_seqlen_k=None, **options):
    """q (total_q,H,D), k and v (total_k,Hkv,D), cu_seqlens int32 (B+1) -> out (total_q,H,D) [, lse (H,total_q)].

    >>> import torch
    >>> from attn_ext import reference
    >>> q, v = torch.zeros(3, 1, 1), torch.tensor([1.0, 3.0, 8.0]).reshape(3, 1, 1)
    >>> cu = torch.tensor([0, 2, 3], dtype=torch.int32)  # a sequence of two tokens, then one of one
    >>> reference.attention_varlen(q, q, v, cu, cu).flatten()
    tensor([2., 2., 8.])
    """
    cu_q, cu_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    ranges = list(zip(cu_q[:-1], cu_q[1:], strict=True))
    return _per_sequence(q, ranges, lambda b: (k[cu_k[b] : cu_k[b + 1]], v[cu_k[b] : cu_k[b + 1]]), **options)


def paged_attention(
    q, key_cache, value_cache, block_table, seq_lens, *, cu_seqlens_q=None, max_seqlen_q=None, causal=True, **options
):
    """q (B,Tq,H,D), or (total,H,D) with cu_seqlens_q; caches (num_blocks,block_size,Hkv,D); queries are the last
    tokens of their sequence, so position i of Tq is i + seq_len - Tq.

    >>> import torch
    >>> from attn_ext import reference
    >>> q, key_cache = torch.zeros(1, 1, 1, 1), torch.zeros(2, 2, 1, 1)
    >>> value_cache = torch.tensor([8.0, -1.0, 1.0, 3.0]).reshape(2, 2, 1, 1)
    >>> table, lens = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    >>> reference.paged_attention(q, key_cache, value_cache, table, lens).flatten()  # the mean of 1, 3 and 8
    tensor([4.])
    """
    block_size, lens = key_cache.shape[1], seq_lens.tolist()

    def keys_and_values(b):
        blocks = block_table[b, : -(-lens[b] // block_size)].long()
        return key_cache[blocks].flatten(0, 1)[: lens[b]], value_cache[blocks].flatten(0, 1)[: lens[b]]

    if cu_seqlens_q is not None:
        cu_q = cu_seqlens_q.tolist()
        return _per_sequence(q, list(zip(cu_q[:-1], cu_q[1:], strict=True)), keys_and_values, causal=causal, **options)
    batch, tq = q.shape[:2]
    ranges = [(b * tq, (b + 1) * tq) for b in range(batch)]
    result = _per_sequence(q.flatten(0, 1), ranges, keys_and_values, causal=causal, **options)
    if not options.get("return_lse"):
        return result.unflatten(0, (batch, tq))
    out, lse = result
    return out.unflatten(0, (batch, tq)), lse.unflatten(1, (batch, tq)).transpose(0, 1)


def merge_attention(out_a, lse_a, out_b, lse_b):
    """Attention over the union of two disjoint key sets, from the results over each.

    out (B,T,H,D) with lse (B,H,T), or out (total,H,D) with lse (H,total) -> (out, lse).

    >>> import torch
    >>> from attn_ext import reference
    >>> one, three, lse = torch.full((1, 1, 1), 1.0), torch.full((1, 1, 1), 3.0), torch.zeros(1, 1)
    >>> reference.merge_attention(one, lse, three, lse)  # as many keys with 1 as with 3
    (tensor([[[2.]]]), tensor([[0.6931]]))
    """
    c = _compute_dtype(out_a)
    la, lb = lse_a.to(torch.promote_types(c, torch.float32)), lse_b.to(torch.promote_types(c, torch.float32))
    m = torch.maximum(la, lb)
    m0 = m.masked_fill(m == -math.inf, 0.0)
    wa, wb = torch.exp(la - m0), torch.exp(lb - m0)
    total = wa + wb
    lse = torch.where(total == 0, torch.full_like(total, -math.inf), m0 + torch.log(total))
    wa, wb = (torch.where(total == 0, torch.zeros_like(w), w / total).transpose(-1, -2)[..., None] for w in (wa, wb))
    a = torch.where(wa == 0, 0.0, wa * out_a.to(wa.dtype))
    b = torch.where(wb == 0, 0.0, wb * out_b.to(wb.dtype))
    return (a + b).to(_result_dtype(out_a)), lse.to(_lse_dtype(out_a))


# ------------------------------------------------------------------------------------------------ the cache


def decoder_layer(
    x, key_cache, value_cache, slot_mapping, block_table, seq_lens, cu_seqlens_q, *, norm_1, qkv, out, norm_2, up, down,
    gate=(None, None), n_heads, n_kv_heads=None, norm="layer_norm", eps=1e-5, activation="gelu", window_left=-1,
    rope=None, max_seqlen_q=None,
):  # fmt: skip
    """`x = x + attention(norm_1(x))`, then `x + mlp(norm_2(x))`, over a paged cache.

    >>> import torch
    >>> from attn_ext import reference
    >>> eye, ones, cache = (torch.eye(2), None), (torch.ones(2), None), torch.zeros(1, 1, 1, 2)
    >>> ints = [torch.tensor(values, dtype=torch.int32) for values in ([[0]], [1], [0, 1])]
    >>> reference.decoder_layer(
    ...     torch.tensor([[1.0, -1.0]]), cache, cache.clone(), torch.tensor([0]), *ints, n_heads=1, activation="silu",
    ...     norm_1=ones, qkv=(torch.eye(2).repeat(3, 1), None), out=eye, norm_2=ones, up=eye, down=eye,
    ... ).round(decimals=2)
    tensor([[ 2.7300, -2.2700]])
    """

    def normed(y, weight, bias):
        return rms_norm(y, weight, eps) if norm == "rms_norm" else layer_norm(y, weight, bias, eps)

    q = qkv_projection_to_cache(
        normed(x, *norm_1), *qkv, key_cache, value_cache, slot_mapping, n_heads=n_heads, n_kv_heads=n_kv_heads,
        rope=rope,
    )  # fmt: skip
    seen = paged_attention(
        q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q=cu_seqlens_q, window=(window_left, -1)
    )
    x = linear(seen.flatten(-2), *out, residual=x)
    y = normed(x, *norm_2)
    if gate[0] is None:
        h = linear(y, *up, activation=activation)
    else:
        h = linear(y, *up, multiply=linear(y, *gate, activation=activation))
    return linear(h, *down, residual=x)


def decoder_layers(x, key_caches, value_caches, *step, layers, **options):
    """`decoder_layer` for each of the layers, from the result of the one before.

    >>> import torch
    >>> from attn_ext import reference
    >>> eye, ones, caches = (torch.eye(2), None), (torch.ones(2), None), list(torch.zeros(4, 1, 1, 1, 2))
    >>> ints = [torch.tensor(values, dtype=torch.int32) for values in ([[0]], [1], [0, 1])]
    >>> layer = dict(norm_1=ones, qkv=(torch.eye(2).repeat(3, 1), None), out=eye, norm_2=ones, up=eye, down=eye)
    >>> reference.decoder_layers(
    ...     torch.tensor([[1.0, -1.0]]), caches[:2], caches[2:], torch.tensor([0]), *ints, layers=[layer, layer],
    ...     n_heads=1, activation="silu",
    ... ).round(decimals=2)
    tensor([[ 4.4600, -3.5400]])
    """
    for layer, key_cache, value_cache in zip(layers, key_caches, value_caches, strict=True):
        x = decoder_layer(x, key_cache, value_cache, *step, **layer, **options)
    return x


def append_kv(key, value, key_cache, value_cache, slot_mapping):
    """key and value (tokens, Hkv, D) into slot `slot_mapping[i]` = block * block_size + offset; -1 skips a row.

    >>> import torch
    >>> from attn_ext import reference
    >>> key_cache, value_cache = torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1, 1)
    >>> new = torch.tensor([5.0, 6.0]).reshape(2, 1, 1)
    >>> reference.append_kv(new, -new, key_cache, value_cache, torch.tensor([3, -1]))
    >>> key_cache.flatten(), value_cache.flatten()
    (tensor([0., 0., 0., 5.]), tensor([ 0.,  0.,  0., -5.]))
    """
    block_size = key_cache.shape[1]
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            key_cache[slot // block_size, slot % block_size] = key[i].to(key_cache.dtype)
            value_cache[slot // block_size, slot % block_size] = value[i].to(value_cache.dtype)


def copy_blocks(key_cache, value_cache, block_pairs):
    """Copy whole blocks, `block_pairs` (n, 2) of (source, destination), as if all at once.

    >>> import torch
    >>> from attn_ext import reference
    >>> cache = torch.tensor([10.0, 20.0, 30.0]).reshape(3, 1, 1, 1)
    >>> reference.copy_blocks(cache, cache.clone(), [(0, 1), (1, 2)])
    >>> cache.flatten()
    tensor([10., 10., 20.])
    """
    pairs = torch.as_tensor(block_pairs, dtype=torch.int64).reshape(-1, 2)
    for cache in (key_cache, value_cache):
        cache[pairs[:, 1]] = cache[pairs[:, 0]].clone()
