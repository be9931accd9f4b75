"""llama.cpp through the C interface of llama-cpp-python, with the weights written as GGUF in the same type."""

from __future__ import annotations

import json
from pathlib import Path

import llama_cpp
import numpy as np

LLAMA = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GPT2 = {
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm", "ln_2": "ffn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """All tensors in float32: 8 bytes of header length, the header, the data."""
    data = np.memmap(path, np.uint8, "r")
    size = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + size]))
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            raw = np.array(data[begin:end])
            values = raw.view("<f4") if entry["dtype"] == "F32" else (raw.view("<u2").astype("<u4") << 16).view("<f4")
            tensors[name] = values.reshape(entry["shape"])
    return tensors


def _write_gguf(directory: Path, path: Path, dtype: str) -> None:
    import gguf

    config = json.loads((directory / "config.json").read_text())
    llama = config["model_type"] == "llama"
    keys = (
        ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
         "max_position_embeddings") if llama else ("n_embd", "n_layer", "n_head", "n_head", None, "n_positions")
    )  # fmt: skip
    width, layers, heads, kv_heads, inner, positions = (config.get(key, 4 * config.get("n_embd", 0)) for key in keys)
    writer = gguf.GGUFWriter(path, config["model_type"])
    writer.add_context_length(positions)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    if llama:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_rope_dimension_count(width // heads)
    else:
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    for name, tensor in _read_safetensors(directory / "model.safetensors").items():
        name, kind = name.rsplit(".", 1)
        prefix = ""
        if name.startswith(("model.layers.", "transformer.h.")):
            _, _, layer, name = name.split(".", 3)
            prefix = f"blk.{layer}."
        part = (LLAMA if llama else GPT2)[name]
        if llama and part in ("attn_q", "attn_k"):  # GGUF has the pairs of a rotation side by side
            n = heads if part == "attn_q" else kv_heads
            tensor = tensor.reshape(n, 2, -1, width).swapaxes(1, 2).reshape(tensor.shape)
        if not llama and kind == "weight" and ".c_" in name:
            tensor = tensor.T
        tensor = np.ascontiguousarray(tensor)
        if dtype == "bfloat16" and tensor.ndim == 2 and part != "position_embd":
            kind_of = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(f"{prefix}{part}.{kind}", gguf.quantize(tensor, kind_of), raw_dtype=kind_of)
        else:
            writer.add_tensor(f"{prefix}{part}.{kind}", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Engine:
    def __init__(self, directory: str, dtype: str, threads: int, max_seqs: int, max_len: int):
        path = Path(directory) / "model.gguf"
        if not path.exists():
            _write_gguf(Path(directory), path.with_suffix(".part"), dtype)
            path.with_suffix(".part").rename(path)
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = max_seqs * max_len
        params.n_batch = max_seqs * max_len
        params.n_seq_max = max_seqs
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = {"bfloat16": 30, "float32": 0}[dtype]  # GGML_TYPE_BF16, GGML_TYPE_F32
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(max_seqs * max_len, 0, max_seqs)
        self.version = f"llama_cpp {llama_cpp.__version__}"

    def generate(self, prompts, n, step):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        tokens, position = [[] for _ in prompts], 0
        new = prompts
        for _ in range(n):
            new = self._step(new, position)
            position += len(prompts[0]) if position == 0 else 1
            for row, token in zip(tokens, new, strict=True):
                row += token
            step()
        return tokens

    def _step(self, rows: list[list[int]], position: int) -> list[list[int]]:
        i, wanted = 0, []
        for sequence, row in enumerate(rows):
            for offset, token in enumerate(row):
                self.batch.token[i] = token
                self.batch.pos[i] = position + offset
                self.batch.n_seq_id[i] = 1
                self.batch.seq_id[i][0] = sequence
                self.batch.logits[i] = offset == len(row) - 1
                i += 1
            wanted.append(i - 1)
        self.batch.n_tokens = i
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [
            [int(np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.context, row), (self.vocab,)).argmax())]
            for row in wanted
        ]
