"""`paged_attention`, one new token per sequence, against torch's attention over the same keys without pages.

torch has no paged cache; it gets the keys and values contiguous in its own layout, which a server could only offer
by keeping every sequence at its longest. Where query heads share a key head they are handed to torch as rows, in
bfloat16 many times faster than its `enable_gqa`. Pages of 16 tokens lie in random order. All of it is in huge pages of
the system's, which PagedKVCache asks for. Rows whose keys and values fit the last-level cache measure that cache; the
others measure memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_ext import _C
from attn_ext.bench.timer import Case

BLOCK_SIZE = 16


def _in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    _C.advise_huge_pages(memory.data_ptr(), memory.nbytes)
    return memory.copy_(tensor)


def _inputs(batch: int, tokens: int, heads: int, kv_heads: int, d: int, dtype: torch.dtype) -> tuple:
    """q, both caches with shuffled blocks, the table and the lengths; then the same keys and values contiguous."""
    blocks = batch * tokens // BLOCK_SIZE
    caches = [_in_huge_pages(torch.randn(blocks, kv_heads, BLOCK_SIZE, d).to(dtype)).transpose(1, 2) for _ in "kv"]
    table = torch.randperm(blocks).reshape(batch, -1).to(torch.int32)
    dense = [_in_huge_pages(c[table.long()].flatten(1, 2).transpose(1, 2)) for c in caches]
    q = torch.randn(batch, 1, heads, d).to(dtype)
    return q, *caches, table, torch.full((batch,), tokens, dtype=torch.int32), *dense


def _torch(q, key_cache, value_cache, block_table, seq_lens, k, v):
    batch, _, heads, d = q.shape
    rows = q.view(batch, k.shape[1], heads // k.shape[1], d)  # (B, Hkv, query heads of one key head, D)
    return torch.nn.functional.scaled_dot_product_attention(rows, k, v).view(q.shape)


def cases(quick: bool = False) -> Iterator[Case]:
    import attn_ext

    shapes = [  # batch, tokens, heads, kv_heads, d, dtypes
        (8, 2048, 32, 32, 128, (torch.bfloat16,)),
        (8, 2048, 32, 8, 128, (torch.bfloat16,)),
        (8, 1024, 12, 12, 64, (torch.float32, torch.float16, torch.bfloat16)),
        (8, 1024, 9, 3, 64, (torch.bfloat16, torch.float32)),
    ]
    for batch, tokens, heads, kv_heads, d, dtypes in shapes[1:] if quick else shapes:
        for dtype in dtypes:
            shape = (batch, tokens, heads, kv_heads, d, dtype)
            yield Case(
                op="paged_attention",
                shape=f"B{batch} T{tokens} H{heads}/{kv_heads} D{d}",
                dtype=dtype,
                make=lambda shape=shape: _inputs(*shape),
                candidates={"attn_ext": lambda *a: attn_ext.paged_attention(*a[:5]), "torch": _torch},
                bytes=2 * batch * (tokens * kv_heads + heads) * d * dtype.itemsize,
                flops=2 * 2 * batch * heads * tokens * d,
            )
