"""Load a model and its tokenizer from any of the formats this package reads.

nanogpt_checkpoint   nanoGPT's ckpt.pt
hf_gpt2              a Hugging Face GPT-2
hf_llama             a Hugging Face Llama-family model (Llama, Mistral, Qwen2)
gguf_file            a GGUF file of the Llama family
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from attn_ext.loaders.weights import LoadError, reason
from attn_ext.tokenizer import Tokenizer

__all__ = ["LoadError", "load_model"]


def load_model(name_or_path: str | Path = "smollm2", *, dtype: torch.dtype = torch.float32, device="cpu"):
    """Load a model -> (model, tokenizer), the model in eval mode, without gradients, in `dtype` on `device`.

    `name_or_path` is one of
      "smollm2"        SmolLM2-135M-Instruct from the cache folder, fetched the first time (98 MB)
      *.gguf           a GGUF file of the Llama family
      *.pt             a nanoGPT checkpoint
      a directory      a Hugging Face model: GPT-2, Llama, Mistral or Qwen2
      a hub name       the same from the Hugging Face hub, such as "openai-community/gpt2"

    The tokenizer of a directory is its tokenizer.json, that of a nanoGPT checkpoint a tokenizer.json beside it (a
    character-level meta.pkl is a pickle and is not read); it is None where there is none.

    Raises LoadError, one line that names the file and the key, tensor or architecture that is wrong.

    >>> load_model("missing.gguf")
    Traceback (most recent call last):
        ...
    attn_ext.loaders.weights.LoadError: missing.gguf: no such file
    """
    try:
        return _load(name_or_path, {"dtype": dtype, "device": device})
    except LoadError:
        raise
    except Exception as e:  # what a damaged file makes of the libraries that read it has no common type
        raise LoadError(f"{name_or_path}: cannot be loaded: {reason(e)}") from e


def _load(name_or_path: str | Path, options: dict):
    path = Path(name_or_path).expanduser()
    if str(name_or_path) == "smollm2":
        from attn_ext import smollm2

        path = smollm2.fetch()
    if path.is_dir():
        return _load_directory(path, options)
    if path.suffix in (".gguf", ".pt") or path.is_file():
        return _load_file(path, options)
    if re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(name_or_path)):
        from attn_ext.loaders.hf_files import download

        return _load_directory(download(str(name_or_path)), options)
    raise LoadError(f"{name_or_path}: no such file or directory")


def _load_file(path: Path, options: dict):
    if not path.is_file():
        raise LoadError(f"{path}: no such file")
    if path.suffix == ".gguf":
        from attn_ext.loaders import gguf_file

        return gguf_file.load(path, **options)
    if path.suffix != ".pt":
        raise LoadError(f"{path}: a model file must end in .gguf or .pt")
    from attn_ext.loaders import nanogpt_checkpoint

    return _checked(nanogpt_checkpoint.load(path, **options), path.parent)


def _load_directory(directory: Path, options: dict):
    from attn_ext.loaders import hf_gpt2, hf_llama
    from attn_ext.loaders.hf_files import read_json

    if not (directory / "config.json").exists():
        raise LoadError(f"{directory}: no config.json")
    kind = read_json(directory / "config.json").get("model_type")
    if kind == "gpt2":
        model = hf_gpt2.load(directory, **options)
    elif kind in hf_llama.MODEL_TYPES:
        model = hf_llama.load(directory, **options)
    else:
        supported = ("gpt2", *hf_llama.MODEL_TYPES)
        raise LoadError(f"{directory / 'config.json'}: model_type must be one of {supported}, got {kind!r}")
    return _checked(model, directory)


def _checked(model, directory: Path):
    """The model with the tokenizer of its directory, which must fit it."""
    try:
        tokenizer = Tokenizer.from_directory(directory)
    except ValueError as e:
        raise LoadError(f"{directory}: {e}") from e
    if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
        raise LoadError(
            f"{directory / 'tokenizer.json'}: has {tokenizer.vocab_size} tokens, the model only {model.vocab_size}"
        )
    return model, tokenizer
