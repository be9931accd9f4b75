"""`masked_softmax`, causal, against torch's scale, masked_fill and softmax: the middle of nanoGPT's explicit path.

`clone()` of the scores beside it shows what moving them costs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_ext.bench.timer import Case


def cases(quick: bool = False) -> Iterator[Case]:
    import attn_ext

    h, t, scale = 12, 1024, 0.125
    above_diagonal = torch.ones(t, t, dtype=torch.bool).triu(1)

    def in_torch(scores):
        return torch.softmax((scores * scale).masked_fill(above_diagonal, float("-inf")), dim=-1)

    for dtype in (torch.bfloat16, torch.float32):
        yield Case(
            op="masked_softmax",
            shape=f"H{h} T{t} causal",
            dtype=dtype,
            make=lambda dtype=dtype: (torch.randn(1, h, t, t).to(dtype),),
            candidates={
                "attn_ext": lambda scores: attn_ext.masked_softmax(scores, causal=True, scale=scale),
                "torch": in_torch,
                "clone": lambda scores: scores.clone(),
            },
            # Only the lower triangle need be read; every element is written.
            bytes=h * (t * (t + 1) // 2 + t * t) * dtype.itemsize,
            flops=5 * h * t * (t + 1) // 2,
            traffic="copy",
            unlike=frozenset({"clone"}),
        )
