"""`paged_attention`, one new token per sequence, against torch's attention over the same keys without pages.

torch has no paged cache; it gets the keys and values contiguous in its own layout, which a server could only offer
by keeping every sequence at its longest. GPT-2's heads (12 of 12), and 9 query heads on 3 key heads as in SmolLM2:
there the query heads of a key head are handed to torch as rows, in bfloat16 many times faster than its `enable_gqa`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_ext.bench.timer import Case

BLOCK_SIZE = 16


def _inputs(batch: int, tokens: int, heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> tuple:
    """q, both caches with shuffled blocks, the table and the lengths; then the same keys and values contiguous."""
    blocks = batch * tokens // BLOCK_SIZE
    caches = [torch.randn(blocks, kv_heads, BLOCK_SIZE, d).to(dtype).transpose(1, 2) for _ in "kv"]
    table = torch.randperm(blocks).reshape(batch, -1).to(torch.int32)
    dense = [c[table.long()].flatten(1, 2).transpose(1, 2).contiguous() for c in caches]
    q = torch.randn(batch, 1, heads, d).to(dtype)
    return q, *caches, table, torch.full((batch,), tokens, dtype=torch.int32), *dense


def _torch(q, key_cache, value_cache, block_table, seq_lens, k, v):
    batch, _, heads, d = q.shape
    rows = q.view(batch, k.shape[1], heads // k.shape[1], d)  # (B, Hkv, query heads of one key head, D)
    return torch.nn.functional.scaled_dot_product_attention(rows, k, v).view(q.shape)


def cases() -> Iterator[Case]:
    import attn_ext

    batch, tokens, d = 8, 1024, 64
    for heads, kv_heads in ((12, 12), (9, 3)):
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(
                op="paged_attention",
                shape=f"B{batch} Tk{tokens} H{heads}/{kv_heads} D{d}",
                dtype=dtype,
                make=lambda heads=heads, kv_heads=kv_heads, dtype=dtype: _inputs(
                    batch, tokens, heads, kv_heads, d, dtype
                ),
                candidates={"attn_ext": lambda *a: attn_ext.paged_attention(*a[:5]), "torch": _torch},
                bytes=2 * batch * (tokens * kv_heads + heads) * d * dtype.itemsize,
                flops=2 * 2 * batch * heads * tokens * d,
            )
