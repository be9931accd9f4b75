"""The files of a Hugging Face model: a directory or a hub name, its configs and its tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from attn_ext.loaders.weights import LoadError, Weights, check_keys, load_pickled, reason

__all__ = ["download", "open_weights", "read_json", "read_sizes"]


def download(name: str) -> Path:
    """The local directory of hub model `name`, fetched if it is not in the hub's cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=["*.json", "*.jinja", "*.safetensors"], ignore_patterns=["*/*"]
            )  # the files at the top: folders hold exports for other runtimes
        )
    except Exception as e:  # the hub and its http client raise dozens of unrelated types
        raise LoadError(f"{name}: neither a file or directory here nor to be had from the hub: {reason(e)}") from e


def read_json(path: Path) -> dict:
    """The object in a JSON file; {} where there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise LoadError(f"{path}: not valid JSON: {e}") from e
    if not isinstance(content, dict):
        raise LoadError(f"{path}: must hold a JSON object, got {type(content).__name__}")
    return content


def read_sizes(file: Path, content: dict, keys: dict[str, str], optional: dict[str, str]) -> dict[str, int]:
    """The whole numbers of a config, {our name: value}, of {our name: the file's key}; null is as good as missing."""
    for key in keys.values():
        if key not in content:
            raise LoadError(f"{file}: key {key!r} is missing")
    names = {**keys, **{name: key for name, key in optional.items() if content.get(key) is not None}}
    check_keys(file, {key: content[key] for key in names.values()})
    return {name: content[key] for name, key in names.items()}


def open_weights(directory: Path, *, dtype: torch.dtype, device) -> Weights:
    """The tensors of model.safetensors, of the shards of model.safetensors.index.json, or of pytorch_model.bin."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    pickled = directory / "pytorch_model.bin"
    if single.exists():
        return _safetensors(directory, [single], dtype, device)
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
            raise LoadError(f"{index}: 'weight_map' must be an object of file names, got {shards!r:.100}")
        return _safetensors(directory, [directory / file for file in sorted(set(shards.values()))], dtype, device)
    if pickled.exists():
        state = load_pickled(pickled)
        if not isinstance(state, dict):
            raise LoadError(f"{pickled}: must hold a dict of tensors, got {type(state).__name__}")
        return Weights(str(directory), state, state.__getitem__, dtype, device)
    raise LoadError(f"{directory}: no model.safetensors, model.safetensors.index.json or pytorch_model.bin")


def _safetensors(directory: Path, files: list[Path], dtype, device) -> Weights:
    from safetensors import SafetensorError, safe_open

    where = {}
    for file in files:
        if not file.exists():
            raise LoadError(f"{file}: the shard is missing")
        try:
            opened = safe_open(file, framework="pt")
        except SafetensorError as e:
            raise LoadError(f"{file}: not a safetensors file: {e}") from e
        where.update(dict.fromkeys(opened.keys(), opened))
    return Weights(str(directory), where, lambda name: where[name].get_tensor(name), dtype, device)
