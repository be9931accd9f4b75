"""flash-attention 2's functions on attn_ext's ops: code written for it runs here by changing one import.

    from attn_ext.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Names, argument order, defaults, layouts and return values are those of `flash_attn` 2.x. What differs:

* More is accepted: float32, any head_dim, any page size, any float dtype for the rotary tables, `cache_leftpad`
  together with a `block_table`.
* `dropout_p` above 0 raises: there is no dropout here.
* `return_attn_probs=True` returns `(out, softmax_lse, S_dmask)`. flash-attention fills `S_dmask` only under dropout, so
  here it is always what flash-attention returns without: an empty tensor. `attn_ext.explain` shows real weights.
* A row that sees no key has lse -inf (flash-attention: +inf or -inf, depending on its kernel). Its output is 0 in both.
* `deterministic` and `num_splits` change no result: every op here is deterministic, and keys are split at fixed places.
* There is no backward pass: inputs that require grad raise, as in every op of attn_ext.

Errors are RuntimeError (NotImplementedError, a kind of it, for what is not supported), raised before a cache is
written.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from attn_ext import ops
from attn_ext.reference import rope

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _check(function: str, ok: bool, message: str, error: type[RuntimeError] = RuntimeError) -> None:
    if not ok:
        raise error(f"{function}: {message}")


def _check_shape(check, argument: str, x: Tensor, shape) -> None:
    """`shape` may hold None for a size that is free."""
    shape = tuple(shape)
    fits = x.dim() == len(shape) and all(want in (None, got) for want, got in zip(shape, x.shape, strict=True))
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    check(fits, f"{argument} must have the shape ({wanted}), got ({', '.join(map(str, x.shape))})")


def _check_dropout(function: str, dropout_p: float) -> None:
    message = f"dropout_p must be 0.0, as dropout is not supported, got {dropout_p}"
    _check(function, dropout_p == 0, message, NotImplementedError)


def _options(softmax_scale, causal, window_size, softcap, alibi_slopes) -> dict:
    """The options every function shares, under the names of attn_ext.attention. Any negative window is no limit."""
    return {
        "causal": causal,
        "scale": softmax_scale,
        "window": tuple(side if side >= 0 else -1 for side in window_size),
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }


def _with_probs(result, q: Tensor, return_attn_probs: bool):
    """`out`, or `(out, softmax_lse, S_dmask)` where S_dmask is empty, as it is without dropout."""
    return (*result, q.new_empty(0)) if return_attn_probs else result


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention over dense tensors, with the signature of `flash_attn.flash_attn_func`.

    Args:
        q: (B, Tq, H, D); k, v: (B, Tk, Hkv, D), with H a multiple of Hkv; float32, bfloat16 or float16.
        dropout_p: must be 0.0.
        softmax_scale: factor on q.k; None means 1/sqrt(D).
        causal: bottom-right aligned: the last query sees every key.
        window_size: (left, right) keys seen around the query's position; negative means no limit.
        softcap: scores become softcap * tanh(score / softcap) if above 0.
        alibi_slopes: (H) or (B, H) float32; adds -slope * distance.
        deterministic: accepted and without effect, the result always is.
        return_attn_probs: also return lse and an empty S_dmask.
    Returns:
        out (B, Tq, H, D), or (out, softmax_lse (B, H, Tq) float32, S_dmask (0)).

    >>> import torch
    >>> from attn_ext.flash_attn import flash_attn_func
    >>> q, kv = torch.randn(1, 5, 4, 16), torch.randn(1, 7, 2, 16)
    >>> flash_attn_func(q, kv, kv, causal=True).shape
    torch.Size([1, 5, 4, 16])
    """
    _check_dropout("flash_attn_func", dropout_p)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _with_probs(ops.attention(q, k, v, return_lse=return_attn_probs, **options), q, return_attn_probs)


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_func` with k and v in one tensor kv (B, Tk, 2, Hkv, D); they are read in place, not copied.

    >>> import torch
    >>> from attn_ext.flash_attn import flash_attn_kvpacked_func
    >>> flash_attn_kvpacked_func(torch.randn(1, 5, 4, 16), torch.randn(1, 7, 2, 2, 16)).shape
    torch.Size([1, 5, 4, 16])
    """
    _check_shape(functools.partial(_check, "flash_attn_kvpacked_func"), "kv", kv, (None, None, 2, None, None))
    return flash_attn_func(
        q,
        *kv.unbind(2),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_func` with q, k and v in one tensor qkv (B, T, 3, H, D); they are read in place, not copied.

    >>> import torch
    >>> from attn_ext.flash_attn import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.randn(1, 5, 3, 4, 16), causal=True).shape
    torch.Size([1, 5, 4, 16])
    """
    _check_shape(functools.partial(_check, "flash_attn_qkvpacked_func"), "qkv", qkv, (None, None, 3, None, None))
    return flash_attn_func(
        *qkv.unbind(2),
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Attention over concatenated sequences, with the signature of `flash_attn.flash_attn_varlen_func`.

    Args:
        q: (total_q, H, D); k, v: (total_k, Hkv, D), or caches (num_blocks, page_size, Hkv, D) with a block_table.
        cu_seqlens_q, cu_seqlens_k: (B + 1) int32, where each sequence begins, and the total.
        max_seqlen_q, max_seqlen_k: at least the longest lengths.
        block_table: (B, max_blocks) int32, the pages of each sequence; any page size.
        The rest as in `flash_attn_func`.
    Returns:
        out (total_q, H, D), or (out, softmax_lse (H, total_q) float32, S_dmask (0)).

    >>> import torch
    >>> from attn_ext.flash_attn import flash_attn_varlen_func
    >>> q, kv = torch.randn(5, 4, 16), torch.randn(9, 2, 16)
    >>> cu_q, cu_k = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 4, 9], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, kv, kv, cu_q, cu_k, 3, 5, causal=True).shape
    torch.Size([5, 4, 16])
    """
    _check_dropout("flash_attn_varlen_func", dropout_p)
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    options.update(max_seqlen_q=max_seqlen_q, return_lse=return_attn_probs)
    if block_table is None:
        result = ops.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_k=max_seqlen_k, **options)
    else:
        check = functools.partial(_check, "flash_attn_varlen_func")
        _check_shape(check, "cu_seqlens_k", cu_seqlens_k, (block_table.shape[0] + 1,))
        check(cu_seqlens_k[0] == 0, f"cu_seqlens_k must start with 0, got {cu_seqlens_k[0]}")
        seq_lens = cu_seqlens_k.diff()
        longest = max(seq_lens.tolist(), default=0)
        check(
            max_seqlen_k is None or max_seqlen_k >= longest,
            f"max_seqlen_k must be at least the longest sequence ({longest}), got {max_seqlen_k}",
        )
        result = ops.paged_attention(q, k, v, block_table, seq_lens, cu_seqlens_q=cu_seqlens_q, **options)
    return _with_probs(result, q, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_varlen_func` with k and v in one tensor kv (total_k, 2, Hkv, D); they are read in place, not copied.

    >>> import torch
    >>> from attn_ext.flash_attn import flash_attn_varlen_kvpacked_func
    >>> cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_kvpacked_func(torch.randn(5, 4, 16), torch.randn(5, 2, 2, 16), cu, cu, 3, 3).shape
    torch.Size([5, 4, 16])
    """
    _check_shape(functools.partial(_check, "flash_attn_varlen_kvpacked_func"), "kv", kv, (None, 2, None, None))
    return flash_attn_varlen_func(
        q,
        *kv.unbind(1),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """`flash_attn_varlen_func` with q, k and v in one tensor qkv (total, 3, H, D); they are read in place, not copied.

    >>> import torch
    >>> from attn_ext.flash_attn import flash_attn_varlen_qkvpacked_func
    >>> cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_qkvpacked_func(torch.randn(5, 3, 4, 16), cu, 3, causal=True).shape
    torch.Size([5, 4, 16])
    """
    _check_shape(functools.partial(_check, "flash_attn_varlen_qkvpacked_func"), "qkv", qkv, (None, 3, None, None))
    return flash_attn_varlen_func(
        *qkv.unbind(1),
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first 2 * cos.shape[1] dims of x (B, T, heads, D) at positions (B, T)."""
    rotary_dim = 2 * cos.shape[1]
    rotated, kept = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:  # pairs (0, 1), (2, 3), ... are brought to the half-split order, rotated, and taken back
        rotated = rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    rotated = rope(rotated, cos, sin, positions)  # half-split, in float32
    if interleaved:
        rotated = rotated.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return torch.cat([rotated, kept], dim=-1)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Append to a KV cache and attend over it, with the signature of `flash_attn.flash_attn_with_kvcache`.

    Args:
        q: (B, T, H, D).
        k_cache, v_cache: (B_cache, S, Hkv, D), or (num_blocks, page_size, Hkv, D) with a block_table.
        k, v: (B, T_new, Hkv, D), written in place behind the first `cache_seqlens` tokens, then attended to too.
        rotary_cos, rotary_sin: (S_rotary, rotary_dim / 2), rotary_dim <= D. Rotate k at cache_seqlens + 0, 1, ...
            before it is stored, and q at the same positions if causal or windowed, else all of q at cache_seqlens.
        cache_seqlens: int or (B) int32, tokens already in the cache; None means all of it.
        cache_batch_idx: (B) int32, which row of the caches each sequence uses; None means row b for sequence b. With k
            and v no row twice.
        cache_leftpad: (B) int32, the first valid position of each sequence; earlier ones are not seen.
        block_table: (B, max_blocks) int32, the pages of each sequence; excludes cache_batch_idx.
        rotary_interleaved: True rotates dims (0, 1), (2, 3), ...; False dims (0, rotary_dim / 2), ... as Llama does.
        num_splits: accepted and without effect: keys are split at fixed places, so that results do not depend on it.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as in `flash_attn_func`.
    Returns:
        out (B, T, H, D), or (out, softmax_lse (B, H, T) float32) if return_softmax_lse.

    >>> import torch
    >>> from attn_ext.flash_attn import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 32, 1, 16), torch.zeros(2, 32, 1, 16)
    >>> q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 1, 16), torch.randn(2, 1, 1, 16)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3, causal=True).shape
    torch.Size([2, 1, 4, 16])
    >>> torch.equal(k_cache[:, 3], k[:, 0])
    True
    """
    check = functools.partial(_check, "flash_attn_with_kvcache")
    check(q.dim() == 4, f"q must have 4 dims (B, T, H, D), got {q.dim()}")
    check(k_cache.dim() == 4, f"k_cache must have 4 dims, got {k_cache.dim()}")
    check((k is None) == (v is None), "k and v must be given together, got only one of them")
    check(
        (rotary_cos is None) == (rotary_sin is None), "rotary_cos and rotary_sin must be given together, got only one"
    )
    append, batch = k is not None, q.shape[0]
    if block_table is None:
        block_table = _rows_as_pages(check, k_cache, cache_batch_idx, batch, q.device)
    else:
        check(cache_batch_idx is None, "cache_batch_idx must be None with a block_table, got a tensor")
        _check_shape(check, "block_table", block_table, (batch, None))
    page_size = k_cache.shape[1]
    capacity = block_table.shape[1] * page_size

    check(not (append and cache_seqlens is None), "cache_seqlens must be given with k and v, got None")
    if cache_seqlens is None or isinstance(cache_seqlens, int):
        length = capacity if cache_seqlens is None else cache_seqlens
        cache_seqlens = torch.full((batch,), length, dtype=torch.int32, device=q.device)
    _check_shape(check, "cache_seqlens", cache_seqlens, (batch,))
    new_tokens = 0
    if append:
        _check_shape(check, "k", k, (batch, None, *k_cache.shape[2:]))
        _check_shape(check, "v", v, k.shape)
        new_tokens = k.shape[1]
    seq_lens = cache_seqlens + new_tokens
    check(
        bool(((cache_seqlens >= 0) & (seq_lens <= capacity)).all()),
        f"cache_seqlens must be in [0, {capacity - new_tokens}] ({capacity} slots, {new_tokens} new tokens), "
        f"got {cache_seqlens.tolist()}",
    )

    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    if cache_leftpad is not None:
        _check_shape(check, "cache_leftpad", cache_leftpad, (batch,))
        valid = torch.arange(capacity, device=q.device) >= cache_leftpad[:, None]
        options["mask"] = valid[:, None, None, :]

    def attend(q):
        return ops.paged_attention(q, k_cache, v_cache, block_table, seq_lens, return_lse=return_softmax_lse, **options)

    if not append:
        check(rotary_cos is None, "rotary_cos must come with the new k and v it is for, got neither")
        return attend(q)
    start = cache_seqlens.long()[:, None]
    positions = start + torch.arange(new_tokens, device=q.device)
    attend(q[:, :0])  # runs every check of the op, so that a wrong argument raises before the cache is written
    if rotary_cos is not None:
        moving = causal or options["window"] != (-1, -1)
        q_positions = start + torch.arange(q.shape[1], device=q.device) * int(moving)
        needed = 1 + max([p.max().item() for p in (positions, q_positions) if p.numel()], default=-1)
        _check_shape(check, "rotary_cos", rotary_cos, (None, None))
        _check_shape(check, "rotary_sin", rotary_sin, rotary_cos.shape)
        for name, table in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
            check(table.is_floating_point(), f"{name} must have a float dtype, got {table.dtype}")
        rows, half = rotary_cos.shape
        check(rows >= needed, f"rotary_cos must have a row for each of {needed} positions, got {rows}")
        check(2 * half <= q.shape[3], f"rotary_cos must have at most {q.shape[3] // 2} columns (D / 2), got {half}")
        q = _rotate(q, rotary_cos, rotary_sin, q_positions, rotary_interleaved)
        k = _rotate(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
    slots = block_table.long().gather(1, positions // page_size) * page_size + positions % page_size
    ops.append_kv(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots.flatten())
    return attend(q)


def _rows_as_pages(check, k_cache: Tensor, cache_batch_idx: Tensor | None, batch: int, device) -> Tensor:
    """The block table (B, 1) of a cache without one: its pages are the rows of its batch."""
    rows = k_cache.shape[0]
    if cache_batch_idx is None:
        check(rows == batch, f"k_cache must have the batch size of q ({batch}) without cache_batch_idx, got {rows}")
        cache_batch_idx = torch.arange(batch, device=device)
    _check_shape(check, "cache_batch_idx", cache_batch_idx, (batch,))
    dtype = cache_batch_idx.dtype
    check(dtype in (torch.int32, torch.int64), f"cache_batch_idx must be int32 or int64, got {dtype}")
    inside = bool(((cache_batch_idx >= 0) & (cache_batch_idx < rows)).all())
    check(inside, f"cache_batch_idx must be in [0, {rows}), got {cache_batch_idx.tolist()}")
    return cache_batch_idx.to(torch.int32).unsqueeze(1)
