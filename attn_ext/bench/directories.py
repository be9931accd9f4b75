"""The two models of the table as Hugging Face directories: one set of weights that ours and every peer read.

smollm2   SmolLM2-135M, dequantised from the GGUF file of `attn_ext.smollm2`
gpt2      the shape of GPT-2 124M with random weights (seeded): speed does not depend on their values

Each comes with a tokenizer of one word per token ("<17>"), for peers that insist on one.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["MODELS", "model_directory"]


def model_directory(name: str, dtype: torch.dtype, parent: Path) -> Path:
    """Write the model `name` in `dtype` to a folder of `parent` -> that folder, which is kept if it is there."""
    directory = parent / f"{name}-{str(dtype).removeprefix('torch.')}"
    if (directory / "tokenizer.json").exists():  # written last
        return directory
    config, tensors = MODELS[name]()
    _write(directory, config, {key: tensor.to(dtype).contiguous() for key, tensor in tensors.items()}, dtype)
    return directory


def _write(directory: Path, config: dict, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    name = str(dtype).removeprefix("torch.")
    ends = {f"{kind}_token_id": config["vocab_size"] - 1 for kind in ("bos", "eos", "pad")}
    (directory / "config.json").write_text(json.dumps({**config, **ends, "dtype": name, "torch_dtype": name}, indent=1))
    (directory / "generation_config.json").write_text(json.dumps(ends))
    words = {f"<{i}>": i for i in range(config["vocab_size"])}
    last = f"<{config['vocab_size'] - 1}>"
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": last},
    }  # fmt: skip
    special = {f"{kind}_token": last for kind in ("bos", "eos", "pad", "unk")}
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20, **special})
    )
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def _smollm2() -> tuple[dict, dict[str, Tensor]]:
    import gguf
    import numpy as np

    from attn_ext import smollm2
    from attn_ext.loaders.gguf_file import half_split_rows

    class Reader(gguf.GGUFReader):
        def __setattr__(self, name, value):  # a plain view of the mapped file, which is faster to cut (gguf_file.py)
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    reader = Reader(smollm2.fetch())
    field = {name.removeprefix("llama."): f.contents() for name, f in reader.fields.items() if name[:6] == "llama."}
    heads, kv_heads = field["attention.head_count"], field["attention.head_count_kv"]
    names = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    tensors = {}
    for stored in reader.tensors:
        tensor = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
        *layer, part, kind = stored.name.split(".")  # "blk.3.attn_q.weight" or "output_norm.weight"
        if part in ("attn_q", "attn_k"):
            tensor = half_split_rows(tensor, heads if part == "attn_q" else kv_heads)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        tensors[f"{prefix}{names[part]}.{kind}"] = tensor
    vocab, hidden = tensors["model.embed_tokens.weight"].shape
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": vocab,
        "hidden_size": hidden, "intermediate_size": field["feed_forward_length"],
        "num_hidden_layers": field["block_count"], "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads, "max_position_embeddings": field["context_length"],
        "rms_norm_eps": field["attention.layer_norm_rms_epsilon"], "rope_theta": field["rope.freq_base"],
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
    }, tensors  # fmt: skip


def _gpt2(n_layer: int = 12, width: int = 768, vocab: int = 50257, positions: int = 1024) -> tuple[dict, dict]:
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Tensor:
        return 0.02 * torch.randn(*shape, generator=generator)

    tensors = {"transformer.wte.weight": weight(vocab, width), "transformer.wpe.weight": weight(positions, width)}
    for i in range(n_layer):
        h = f"transformer.h.{i}"
        for part, rows, columns in (  # the file format stores these as (in, out)
            ("attn.c_attn", width, 3 * width), ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width), ("mlp.c_proj", 4 * width, width),
        ):  # fmt: skip
            tensors |= {f"{h}.{part}.weight": weight(rows, columns), f"{h}.{part}.bias": weight(columns)}
        for part in ("ln_1", "ln_2"):
            tensors |= {f"{h}.{part}.weight": 1 + weight(width), f"{h}.{part}.bias": weight(width)}
    tensors |= {"transformer.ln_f.weight": 1 + weight(width), "transformer.ln_f.bias": weight(width)}
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": vocab, "n_positions": positions,
        "n_ctx": positions, "n_embd": width, "n_layer": n_layer, "n_head": width // 64, "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new", "tie_word_embeddings": True,
    }, tensors  # fmt: skip


# Name -> (config.json, tensors in float32).
MODELS = {"smollm2": _smollm2, "gpt2": _gpt2}
