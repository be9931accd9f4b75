"""Hugging Face transformers with torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
import transformers


class Engine:
    def __init__(self, directory: str, dtype: str, threads: int, max_seqs: int, max_len: int):
        torch.set_num_threads(threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}, sdpa, dynamic cache"

    @torch.inference_mode()
    def generate(self, prompts, n, step):
        tokens, cache, new = torch.tensor(prompts), None, []
        for _ in range(n):
            out = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, tokens = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            new.append(tokens.flatten().tolist())
            step()
        return [list(row) for row in zip(*new, strict=True)]
