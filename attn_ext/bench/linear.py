"""`linear` against torch.nn.functional.linear: GPT-2's fused QKV projection for 1, 8 and 1024 tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_ext.bench.timer import Case


def cases() -> Iterator[Case]:
    import attn_ext

    k, n = 768, 2304
    for dtype in (torch.float32, torch.bfloat16):
        for m in (1, 8, 1024):
            yield Case(
                op="linear",
                shape=f"({m},{k}) x ({n},{k})",
                dtype=dtype,
                make=lambda m=m, dtype=dtype: (
                    torch.randn(m, k).to(dtype),
                    (torch.randn(n, k) / k**0.5).to(dtype),
                    torch.randn(n).to(dtype),
                ),
                candidates={"attn_ext": attn_ext.linear, "torch": torch.nn.functional.linear},
                bytes=(m * k + n * k + n + m * n) * dtype.itemsize,
                flops=2 * m * n * k,
            )
