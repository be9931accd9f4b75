"""GGUF files of the Llama family (architectures `llama` and `qwen2`), through the `gguf` package.

Quantised tensors are dequantised when they are read.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from attn_ext.llama import Llama, LlamaConfig
from attn_ext.loaders.weights import LoadError, Weights, build, check_keys, reason
from attn_ext.tokenizer import Tokenizer

ARCHITECTURES = ("llama", "qwen2")
NAMES = {
    "embed": "token_embd", "norm": "output_norm", "lm_head": "output",
    "norm_1": "attn_norm", "norm_2": "ffn_norm", "attn.wo": "attn_output",
    "mlp.gate": "ffn_gate", "mlp.up": "ffn_up", "mlp.down": "ffn_down",
}  # fmt: skip
REQUIRED = object()


def load(path: Path, *, dtype: torch.dtype = torch.float32, device="cpu") -> tuple[Llama, Tokenizer | None]:
    """The model of a GGUF file, and its tokenizer if it holds one."""
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name, value):
            # A plain view of the mapped file: the reader cuts it a million times, which a memmap makes 4 times slower.
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    try:
        reader = Reader(path)
    except (ValueError, KeyError, IndexError) as e:
        raise LoadError(f"{path}: not a GGUF file: {reason(e)}") from e
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def read(name: str) -> Tensor:
        tensor = tensors[name]
        try:
            return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError as e:
            raise LoadError(f"{path}: tensor {name!r} has the unsupported type {tensor.tensor_type.name}") from e

    architecture = fields.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise LoadError(f"{path}: architecture must be one of {ARCHITECTURES}, got {architecture!r}")
    weights = Weights(str(path), tensors, read, dtype, device)
    config = _config(path, architecture, fields, weights, tensors)
    model = build(Llama, config, config.n_layers, weights, _taker(architecture, config))
    tokenizer = None
    if "tokenizer.ggml.model" in fields:
        try:
            tokenizer = Tokenizer.from_gguf(fields)
        except ValueError as e:
            raise LoadError(f"{path}: {e}") from e
    return model, tokenizer


def _config(path: Path, architecture: str, fields: dict, weights: Weights, tensors: dict) -> LlamaConfig:
    def field(key: str, default=REQUIRED):
        value = fields.get(f"{architecture}.{key}", default)
        if value is REQUIRED:
            raise LoadError(f"{path}: key '{architecture}.{key}' is missing")
        return value

    def size(key: str, default=REQUIRED) -> int | None:
        value = field(key, default)
        if value is not default:
            check_keys(path, {f"{architecture}.{key}": value})
        return value

    if "token_embd.weight" not in tensors:
        raise LoadError(f"{path}: tensor 'token_embd.weight' is missing")
    if field("expert_count", 0):
        raise LoadError(f"{path}: key '{architecture}.expert_count' must be 0 (no mixture of experts)")
    if field("rope.scaling.type", "none") != "none":
        raise LoadError(
            f"{path}: key '{architecture}.rope.scaling.type' must be 'none', got {field('rope.scaling.type')!r}"
        )
    hidden, n_heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", hidden // n_heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if field(key, head_dim) != head_dim:
            raise LoadError(f"{path}: key '{architecture}.{key}' must be the head_dim {head_dim}, got {field(key)}")
    factors = None
    if "rope_freqs.weight" in weights:  # how GGUF stores Llama 3's stretch
        float32 = Weights(str(path), ["rope_freqs.weight"], weights.read)
        factors = tuple(float32.take("rope_freqs.weight", (head_dim // 2,)).tolist())
        weights.ignore(lambda name: name == "rope_freqs.weight")
    try:
        return LlamaConfig(
            vocab_size=int(tensors["token_embd.weight"].shape[-1]),  # GGUF gives dims in reverse
            hidden_size=hidden,
            intermediate_size=size("feed_forward_length"),
            n_layers=size("block_count"),
            n_heads=n_heads,
            n_kv_heads=size("attention.head_count_kv", n_heads),
            head_dim=head_dim,
            max_seq_len=size("context_length"),
            norm_eps=field("attention.layer_norm_rms_epsilon"),
            rope_theta=field("rope.freq_base", 10000.0),
            rope_factors=factors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_gate.bias" in tensors,
            tie_embeddings="output.weight" not in tensors,
            sliding_window=field("attention.sliding_window", None) or None,
        )
    except ValueError as e:
        raise LoadError(f"{path}: {e}") from e


def _taker(architecture: str, config: LlamaConfig):
    def take(weights: Weights, name: str, shape: tuple) -> Tensor:
        module, kind = name.rsplit(".", 1)
        layer = re.match(r"layers\.(\d+)\.", name)
        base = "" if layer is None else f"blk.{layer[1]}."
        part = module if layer is None else module.removeprefix(layer[0])
        if part != "attn.wqkv":
            return weights.take(f"{base}{NAMES[part]}.{kind}", shape)
        rows = []
        for p, heads in (("q", config.n_heads), ("k", config.n_kv_heads), ("v", config.n_kv_heads)):
            tensor = weights.take(f"{base}attn_{p}.{kind}", (heads * config.head_dim, *shape[1:]))
            # Only `llama` files are reordered, and only what is rotated.
            rows.append(half_split_rows(tensor, heads) if architecture == "llama" and p != "v" else tensor)
        return torch.cat(rows)

    return take


def half_split_rows(tensor: Tensor, heads: int) -> Tensor:
    """Rows (heads * D, ...) of a rotary projection from interleaved pairs, as GGUF stores them, to half-split order.

    `heads` are the heads of this tensor: n_kv_heads for k.

    >>> import torch
    >>> half_split_rows(torch.arange(8), heads=2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
