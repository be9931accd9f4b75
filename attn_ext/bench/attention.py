"""`attention`, causal, against torch's scaled_dot_product_attention: a prompt of 1024 tokens with GPT-2's heads.

torch gets (B, H, T, D) views of the same (B, T, H, D) tensors: what a nanoGPT-style model hands it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_ext.bench.timer import Case


def _torch(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def cases() -> Iterator[Case]:
    import attn_ext

    b, t, h, d = 1, 1024, 12, 64
    for dtype in (torch.float32, torch.bfloat16):
        yield Case(
            op="attention",
            shape=f"T{t} H{h} D{d} causal",
            dtype=dtype,
            make=lambda dtype=dtype: tuple(torch.randn(b, t, 3, h, d).to(dtype).unbind(2)),
            candidates={"attn_ext": lambda q, k, v: attn_ext.attention(q, k, v, causal=True), "torch": _torch},
            bytes=4 * b * t * h * d * dtype.itemsize,
            flops=2 * 2 * b * h * d * t * (t + 1) // 2,
        )
