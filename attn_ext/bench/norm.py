"""`rms_norm` and `layer_norm` against torch's: a token of decode and a prompt of 1024, 768 wide."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attn_ext.bench.timer import Case


def cases(quick: bool = False) -> Iterator[Case]:
    import attn_ext

    width, eps = 768, 1e-5
    functional = torch.nn.functional
    pairs = {
        "rms_norm": (
            lambda x, w, b: attn_ext.rms_norm(x, w, eps=eps),
            lambda x, w, b: functional.rms_norm(x, (width,), w, eps),
        ),
        "layer_norm": (
            lambda x, w, b: attn_ext.layer_norm(x, w, b, eps=eps),
            lambda x, w, b: functional.layer_norm(x, (width,), w, b, eps),
        ),
    }
    for op, (ours, theirs) in pairs.items():
        for dtype in (torch.bfloat16, torch.float32):
            for rows in (8, 1024):
                yield Case(
                    op=op,
                    shape=f"{rows} x {width}",
                    dtype=dtype,
                    make=lambda rows=rows, dtype=dtype: tuple(
                        torch.randn(*shape).to(dtype) for shape in ((rows, width), (width,), (width,))
                    ),
                    candidates={"attn_ext": ours, "torch": theirs},
                    bytes=(2 * rows * width + 2 * width) * dtype.itemsize,
                    flops=4 * rows * width,
                    traffic="copy",
                )
