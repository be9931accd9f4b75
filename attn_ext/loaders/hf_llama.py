"""A Hugging Face Llama-family directory (Llama, Mistral, Qwen2): separate q, k and v, fused here."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from attn_ext.llama import Llama, LlamaConfig, llama3_rope_factors
from attn_ext.loaders.hf_files import open_weights, read_json
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

    return build(Llama, config, weights, take)


def _config(directory: Path) -> LlamaConfig:
    file = directory / "config.json"
    c = read_json(file)
    sizes = {}
    for ours, theirs in {
        "vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
        "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "max_seq_len": "max_position_embeddings",
    }.items():  # fmt: skip
        if theirs not in c:
            raise LoadError(f"{file}: key {theirs!r} is missing")
        sizes[ours] = c[theirs]
    if c.get("hidden_act", "silu") != "silu":
        raise LoadError(f"{file}: hidden_act must be 'silu', got {c['hidden_act']!r}")
    qwen2 = c["model_type"] == "qwen2"
    window = c.get("sliding_window")
    if qwen2:
        if c.get("use_sliding_window"):
            raise LoadError(f"{file}: use_sliding_window must be false for qwen2 (its layers differ), got true")
        window = None
    try:
        config = LlamaConfig(
            **sizes,
            n_kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
            head_dim=c.get("head_dim"),
            norm_eps=c.get("rms_norm_eps", 1e-6),
            qkv_bias=qwen2 or bool(c.get("attention_bias")),
            o_bias=not qwen2 and bool(c.get("attention_bias")),
            mlp_bias=bool(c.get("mlp_bias")),
            tie_embeddings=bool(c.get("tie_word_embeddings")),
            sliding_window=window,
        )
        _set_rope(config, c, file)
    except ValueError as e:
        raise LoadError(f"{file}: {e}") from e
    return config


def _set_rope(config: LlamaConfig, c: dict, file: Path) -> None:
    """rope_theta and rope_scaling; newer files hold both in rope_parameters."""
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    config.rope_theta = float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0)
    if rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0)) != 1.0:
        raise LoadError(f"{file}: partial_rotary_factor must be 1, got {c.get('partial_rotary_factor')}")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        missing = [key for key in keys if key not in rope]
        if missing:
            raise LoadError(f"{file}: llama3 rope scaling needs the key {missing[0]!r}")
        config.rope_factors = llama3_rope_factors(
            config.head_dim, config.rope_theta, factor=rope["factor"], low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_seq_len=rope["original_max_position_embeddings"],
        )  # fmt: skip
    elif kind != "default":
        raise LoadError(f"{file}: rope scaling must be 'default' or 'llama3', got {kind!r}")
