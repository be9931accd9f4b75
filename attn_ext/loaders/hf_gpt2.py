"""A Hugging Face GPT-2: nanoGPT's names, with the linear layers stored transposed (as `Conv1D`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from attn_ext.loaders.hf_files import open_weights, read_json, read_sizes
from attn_ext.loaders.weights import LoadError, Weights, build
from attn_ext.nanogpt import GPT, GPTConfig

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
PREFIX = "transformer."


def load(directory: Path, *, dtype: torch.dtype = torch.float32, device="cpu") -> GPT:
    """The GPT-2 in `directory`, whose tensors may or may not carry the prefix "transformer."."""
    config = _config(directory)
    weights = open_weights(directory, dtype=dtype, device=device)
    weights.ignore(lambda name: name.endswith((".attn.bias", ".attn.masked_bias")))  # the causal mask, in old files
    prefix = PREFIX if f"{PREFIX}wte.weight" in weights else ""

    def take(weights: Weights, name: str, shape: tuple) -> Tensor:
        stored = prefix + name.removeprefix(PREFIX)
        return (
            weights.take(stored, shape[::-1]).t().contiguous() if name.endswith(CONV1D) else weights.take(stored, shape)
        )

    return build_gpt(config, weights, take)


def build_gpt(config: GPTConfig, weights: Weights, take: Callable[[Weights, str, tuple], Tensor]) -> GPT:
    """The model, with the head, where it is stored too, checked to be the token embedding."""
    head = None
    if "lm_head.weight" in weights:
        head = weights.take("lm_head.weight", (config.vocab_size, config.n_embd))
    model = build(GPT, config, config.n_layer, weights, take)
    if head is not None and not torch.equal(head, model.lm_head.weight):
        raise LoadError(f"{weights.source}: tensor 'lm_head.weight' must equal 'transformer.wte.weight' (a tied head)")
    return model


def _config(directory: Path) -> GPTConfig:
    file = directory / "config.json"
    c = read_json(file)
    keys = {key: key for key in ("vocab_size", "n_layer", "n_head", "n_embd")}
    sizes = read_sizes(file, c, {**keys, "block_size": "n_positions"}, optional={})
    activation = c.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise LoadError(f"{file}: activation_function must be one of {sorted(ACTIVATIONS)}, got {activation!r}")
    required = {
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
        "tie_word_embeddings": True,
    }  # fmt: skip
    for key, value in required.items():
        if c.get(key, value) != value:
            raise LoadError(f"{file}: {key} must be {value}, got {c[key]}")
    if c.get("n_inner") not in (None, 4 * c["n_embd"]):
        raise LoadError(f"{file}: n_inner must be 4 * n_embd ({4 * c['n_embd']}), got {c['n_inner']}")
    try:
        return GPTConfig(**sizes, activation=ACTIVATIONS[activation], layer_norm_eps=c.get("layer_norm_epsilon", 1e-5))
    except ValueError as e:
        raise LoadError(f"{file}: {e}") from e
