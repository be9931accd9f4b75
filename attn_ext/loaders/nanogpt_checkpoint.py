"""nanoGPT's `ckpt.pt`: a dict with `model` (the state dict) and `model_args` (the config)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from attn_ext.loaders.weights import LoadError, Weights, build, load_pickled
from attn_ext.nanogpt import GPT, GPTConfig

COMPILED_PREFIX = "_orig_mod."  # torch.compile puts it before every name


def load(path: Path, *, dtype: torch.dtype = torch.float32, device="cpu") -> GPT:
    """The model of a nanoGPT checkpoint. Nothing but tensors and plain values is unpickled (`weights_only`)."""
    checkpoint = load_pickled(path)
    for key in ("model", "model_args"):
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(key), dict):
            raise LoadError(f"{path}: a nanoGPT checkpoint must be a dict with a dict {key!r}")
    fields = {f.name for f in dataclasses.fields(GPTConfig)}
    unknown = sorted(set(checkpoint["model_args"]) - fields)
    if unknown:
        raise LoadError(f"{path}: model_args has the unknown key {unknown[0]!r}")
    state = {name.removeprefix(COMPILED_PREFIX): tensor for name, tensor in checkpoint["model"].items()}
    weights = Weights(str(path), state, state.__getitem__, dtype, device)
    # The causal mask, a buffer where nanoGPT runs without flash attention, and the head's second name.
    weights.ignore(lambda name: name.endswith(".attn.bias"))
    if "lm_head.weight" in state and "transformer.wte.weight" in state:
        if not torch.equal(state["lm_head.weight"], state["transformer.wte.weight"]):
            raise LoadError(f"{path}: tensor 'lm_head.weight' must equal 'transformer.wte.weight' (a tied head)")
        weights.ignore(lambda name: name == "lm_head.weight")
    try:
        config = GPTConfig(**checkpoint["model_args"])
    except ValueError as e:
        raise LoadError(f"{path}: {e}") from e
    return build(GPT, config, weights, Weights.take)
