"""attn_ext: `Engine`, the same that `attn-ext generate` runs."""

from __future__ import annotations

import torch

import attn_ext
from attn_ext import generate
from attn_ext.loaders import load_model


class Engine:
    def __init__(self, directory: str, dtype: str, threads: int, max_seqs: int, max_len: int):
        torch.set_num_threads(threads)
        model, _ = load_model(directory, dtype=getattr(torch, dtype))
        self.engine = generate.Engine(
            model, num_blocks=max_seqs * -(-max_len // 16), max_seqs=max_seqs, max_batch_tokens=max_seqs * max_len,
            prefix_cache=False,
        )  # fmt: skip
        self.version = (
            f"attn_ext {attn_ext.__version__}, backend {attn_ext.active_backend()}, torch {torch.__version__}"
        )

    def generate(self, prompts, n, step):
        params = generate.SamplingParams(max_new_tokens=n, temperature=0)
        requests = [self.engine.submit(prompt, params) for prompt in prompts]
        tokens = {request: [] for request in requests}
        while self.engine.has_work:
            for event in self.engine.step():
                if event.token is not None:
                    tokens[event.request_id].append(event.token)
            step()
        return [tokens[request] for request in requests]
