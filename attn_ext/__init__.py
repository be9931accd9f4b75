"""The attention layer of a GPT as torch ops: fused QKV GEMM, masked softmax, fused attention, paged KV cache.

>>> import torch, attn_ext
>>> x, w_qkv, w_o = torch.randn(1, 6, 64), torch.randn(192, 64), torch.randn(64, 64)
>>> q, k, v = attn_ext.qkv_projection(x, w_qkv, n_heads=4)
>>> y = attn_ext.linear(attn_ext.attention(q, k, v, causal=True).flatten(-2), w_o)
>>> y.shape
torch.Size([1, 6, 64])
"""

import importlib

from attn_ext._extension import _C  # first: it says what is missing

# isort: split
from attn_ext import ops, reference
from attn_ext.backend import active_backend, backends, build_info, use_backend
from attn_ext.kv_cache import BlockAllocator, OutOfBlocks, PagedKVCache
from attn_ext.ops import (
    append_kv,
    attention,
    attention_varlen,
    copy_blocks,
    decoder_layer,
    decoder_layers,
    layer_norm,
    linear,
    masked_softmax,
    merge_attention,
    pack_weight,
    paged_attention,
    qkv_projection,
    qkv_projection_to_cache,
    rms_norm,
    unpack_weight,
)

__version__ = _C.version

# Loaded on first use: they need more than torch, or are not needed to compute.
_SUBMODULES = ("explain", "flash_attn", "generate", "llama", "loaders", "nanogpt", "smollm2", "tokenizer")

__all__ = [
    "BlockAllocator",
    "OutOfBlocks",
    "PagedKVCache",
    "active_backend",
    "append_kv",
    "attention",
    "attention_varlen",
    "backends",
    "build_info",
    "copy_blocks",
    "decoder_layer",
    "decoder_layers",
    "layer_norm",
    "linear",
    "masked_softmax",
    "merge_attention",
    "ops",
    "pack_weight",
    "paged_attention",
    "qkv_projection",
    "qkv_projection_to_cache",
    "reference",
    "rms_norm",
    "unpack_weight",
    "use_backend",
    *_SUBMODULES,
]


def __getattr__(name: str):
    if name in _SUBMODULES:
        return importlib.import_module(f"attn_ext.{name}")
    raise AttributeError(f"module 'attn_ext' has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_SUBMODULES})
