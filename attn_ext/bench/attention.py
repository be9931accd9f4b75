"""`attention`, causal, against torch's scaled_dot_product_attention and its FlexAttention.

Both get (B, H, T, D) views of the same (B, T, H, D) tensors: what a nanoGPT-style model hands them. FlexAttention is
compiled for its causal mask, which needs a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_ext.bench.timer import Case


def _sdpa(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _flex(t: int):
    """FlexAttention for `t` causal tokens, tried on small heads; RuntimeError with the reason where it does not run."""
    from torch.nn.attention import flex_attention

    try:
        mask = flex_attention.create_block_mask(lambda b, h, i, j: i >= j, None, None, t, t, device="cpu")
        compiled = torch.compile(flex_attention.flex_attention)

        def call(q, k, v):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return compiled(q, k, v, block_mask=mask).transpose(1, 2)

        call(*torch.randn(3, 1, t, 1, 64).unbind(0))
    except Exception as error:  # what a missing compiler makes of torch.compile has no common type
        raise RuntimeError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return call


def cases(quick: bool = False) -> Iterator[Case]:
    import attn_ext

    for b, h, t, d in ((1, 12, 1024, 64), (4, 12, 1024, 64), (1, 32, 2048, 128)):
        for dtype in (torch.bfloat16, torch.float32):
            candidates = {"attn_ext": lambda q, k, v: attn_ext.attention(q, k, v, causal=True), "torch": _sdpa}
            skipped = {}
            try:
                if quick:
                    raise RuntimeError("it is compiled first, which a quick run does not wait for")
                candidates["flex"] = _flex(t)
            except RuntimeError as error:
                skipped["flex"] = str(error)
            yield Case(
                op="attention",
                shape=f"B{b} H{h} T{t} D{d} causal",
                dtype=dtype,
                make=lambda b=b, h=h, t=t, d=d, dtype=dtype: tuple(torch.randn(b, t, 3, h, d).to(dtype).unbind(2)),
                candidates=candidates,
                bytes=4 * b * t * h * d * dtype.itemsize,
                flops=2 * 2 * b * h * d * t * (t + 1) // 2,
                skipped=skipped,
            )
