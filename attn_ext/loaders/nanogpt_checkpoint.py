"""nanoGPT's `ckpt.pt`: a dict with `model` (the state dict) and `model_args` (the config)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from attn_ext.loaders.hf_gpt2 import build_gpt
from attn_ext.loaders.weights import LoadError, Weights, load_pickled
from attn_ext.nanogpt import GPT, GPTConfig

COMPILED_PREFIX = "_orig_mod."  # torch.compile puts it before every name


def load(path: Path, *, dtype: torch.dtype = torch.float32, device="cpu") -> GPT:
    """The model of a nanoGPT checkpoint. Nothing but tensors and plain values is unpickled (`weights_only`)."""
    checkpoint = load_pickled(path)
    for key in ("model", "model_args"):
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get(key), dict):
            raise LoadError(f"{path}: a nanoGPT checkpoint must be a dict with a dict {key!r}")
    fields = {f.name for f in dataclasses.fields(GPTConfig)}
    unknown = sorted(map(repr, set(checkpoint["model_args"]) - fields))
    if unknown:
        raise LoadError(f"{path}: model_args has the unknown key {unknown[0]}")
    state = {str(name).removeprefix(COMPILED_PREFIX): tensor for name, tensor in checkpoint["model"].items()}
    weights = Weights(str(path), state, state.__getitem__, dtype, device)
    weights.ignore(lambda name: name.endswith(".attn.bias"))  # the mask: a buffer where there is no flash attention
    try:
        config = GPTConfig(**checkpoint["model_args"])
    except ValueError as e:
        raise LoadError(f"{path}: {e}") from e
    return build_gpt(config, weights, Weights.take)
