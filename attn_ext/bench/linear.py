"""`linear` against torch.nn.functional.linear: GPT-2's fused QKV projection, with its weight plain and packed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_ext.bench.timer import Case


def cases(quick: bool = False) -> Iterator[Case]:
    import attn_ext

    k, n = 768, 2304

    def make(m: int, dtype: torch.dtype) -> tuple:
        weight = (torch.randn(n, k) / k**0.5).to(dtype)
        return torch.randn(m, k).to(dtype), weight, torch.randn(n).to(dtype), attn_ext.pack_weight(weight)

    for dtype in (torch.bfloat16, torch.float32):
        for m in (1, 8, 128, 1024):
            for packed in (False, True):
                yield Case(
                    op="linear",
                    shape=f"{m} x {k} x {n}{' packed' if packed else ''}",
                    dtype=dtype,
                    make=lambda m=m, dtype=dtype: make(m, dtype),
                    candidates={
                        "attn_ext": (lambda x, w, b, p: attn_ext.linear(x, p, b))
                        if packed
                        else (lambda x, w, b, p: attn_ext.linear(x, w, b)),
                        "torch": lambda x, w, b, p: torch.nn.functional.linear(x, w, b),
                    },
                    bytes=(m * k + n * k + n + m * n) * dtype.itemsize,
                    flops=2 * m * n * k,
                )
