"""A Hugging Face Llama-family directory (Llama, Mistral, Qwen2): separate q, k and v, fused here."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import torch
from torch import Tensor

from attn_ext.llama import Llama, LlamaConfig, llama3_rope_factors
from attn_ext.loaders.hf_files import open_weights, read_json, read_sizes
from attn_ext.loaders.weights import LoadError, Weights, build

MODEL_TYPES = ("llama", "mistral", "qwen2")
NAMES = {
    "embed": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head",
    "norm_1": "input_layernorm", "norm_2": "post_attention_layernorm", "attn.wo": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
}  # fmt: skip
PREFIX = "model."


def load(directory: Path, *, dtype: torch.dtype = torch.float32, device="cpu") -> Llama:
    """The model in `directory`, whose tensors may or may not carry the prefix "model."."""
    config = _config(directory)
    weights = open_weights(directory, dtype=dtype, device=device)
    weights.ignore(lambda name: name.endswith("rotary_emb.inv_freq"))  # a buffer, in old files
    if config.tie_embeddings:
        weights.ignore(lambda name: name == "lm_head.weight")
    prefix = PREFIX if f"{PREFIX}embed_tokens.weight" in weights else ""
    q_rows, kv_rows = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim

    def take(weights: Weights, name: str, shape: tuple) -> Tensor:
        module, kind = name.rsplit(".", 1)
        layer = re.match(r"layers\.(\d+)\.", name)
        if layer is None:
            return weights.take(f"{NAMES[module].replace(PREFIX, prefix)}.{kind}", shape)
        base, part = f"{prefix}{layer[0]}", module.removeprefix(layer[0])
        if part != "attn.wqkv":
            return weights.take(f"{base}{NAMES[part]}.{kind}", shape)
        rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
        return torch.cat([weights.take(f"{base}self_attn.{p}.{kind}", (n, *shape[1:])) for p, n in rows.items()])

    return build(Llama, config, config.n_layers, weights, take)


def _config(directory: Path) -> LlamaConfig:
    file = directory / "config.json"
    c = read_json(file)
    keys = {key: key for key in ("vocab_size", "hidden_size", "intermediate_size")}
    keys |= {
        "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "max_seq_len": "max_position_embeddings"
    }  # fmt: skip
    optional = {"n_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    if c["model_type"] != "qwen2":
        optional["sliding_window"] = "sliding_window"
    sizes = read_sizes(file, c, keys, optional)
    if c.get("hidden_act", "silu") != "silu":
        raise LoadError(f"{file}: hidden_act must be 'silu', got {c['hidden_act']!r}")
    qwen2 = c["model_type"] == "qwen2"
    if qwen2 and c.get("use_sliding_window"):
        raise LoadError(f"{file}: use_sliding_window must be false for qwen2 (its layers differ), got true")
    rope = _rope(c, file)
    try:
        config = LlamaConfig(
            **{"n_kv_heads": sizes["n_heads"], **sizes},
            norm_eps=c.get("rms_norm_eps", 1e-6),
            qkv_bias=qwen2 or bool(c.get("attention_bias")),
            o_bias=not qwen2 and bool(c.get("attention_bias")),
            mlp_bias=bool(c.get("mlp_bias")),
            tie_embeddings=bool(c.get("tie_word_embeddings")),
            rope_theta=rope["rope_theta"],
        )
        return dataclasses.replace(config, rope_factors=_rope_factors(config, rope, file))
    except ValueError as e:
        raise LoadError(f"{file}: {e}") from e


def _rope(c: dict, file: Path) -> dict:
    """rope_theta and rope_scaling as one dict; newer files hold both in rope_parameters."""
    rope = {"rope_theta": c.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(c.get(key), dict | None):
            raise LoadError(f"{file}: {key} must be an object or null, got {c[key]!r}")
        rope |= {name: value for name, value in (c.get(key) or {}).items() if value is not None}
    if rope["rope_theta"] is None:
        rope["rope_theta"] = 10000.0
    partial = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise LoadError(f"{file}: partial_rotary_factor must be 1, got {partial!r}")
    return rope


def _rope_factors(config: LlamaConfig, rope: dict, file: Path) -> tuple[float, ...] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        missing = [key for key in keys if key not in rope]
        if missing:
            raise LoadError(f"{file}: llama3 rope scaling needs the key {missing[0]!r}")
        return llama3_rope_factors(
            config.head_dim, config.rope_theta, factor=rope["factor"], low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_seq_len=rope["original_max_position_embeddings"],
        )  # fmt: skip
    if kind != "default":
        raise LoadError(f"{file}: rope scaling must be 'default' or 'llama3', got {kind!r}")
    return None
