"""OpenVINO GenAI's pipeline with continuous batching, converted by optimum-intel (which needs torch beside it)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai


def _convert(directory: Path, converted: Path) -> None:
    """In a process of its own: the exporter brings torch and its threads."""
    code = (
        "import sys, torch; from optimum.intel import OVModelForCausalLM as M\n"
        # In float32, from which the plugin makes what it computes in: stored as bfloat16 it runs half as fast.
        "options = dict(export=True, compile=False, load_in_8bit=False, torch_dtype=torch.float32)\n"
        "M.from_pretrained(sys.argv[1], **options).save_pretrained(sys.argv[2])\n"
    )
    subprocess.run([sys.executable, "-c", code, directory, converted], check=True, stdout=sys.stderr)


class Engine:
    def __init__(self, directory: str, dtype: str, threads: int, max_seqs: int, max_len: int):
        converted = Path(directory) / "openvino"
        if not (converted / "openvino_model.xml").exists():
            _convert(Path(directory), converted)
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = max_seqs * max_len
        scheduler.max_num_seqs = max_seqs
        scheduler.cache_size = 1  # GiB
        scheduler.enable_prefix_caching = False
        hint = {"bfloat16": ov.Type.bf16, "float32": ov.Type.f32}[dtype]
        options = {"INFERENCE_PRECISION_HINT": hint, "KV_CACHE_PRECISION": hint, "INFERENCE_NUM_THREADS": threads}
        self.pipe = genai.ContinuousBatchingPipeline(str(converted), scheduler, "CPU", options, {})
        self.version = f"openvino_genai {genai.__version__.split('-')[0]}, continuous batching"
        self.requests = 0

    def generate(self, prompts, n, step):
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = n
        config.ignore_eos, config.do_sample = True, False
        handles = []
        for prompt in prompts:
            ids = ov.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self.pipe.add_request(self.requests, ids, config))
            self.requests += 1
        tokens, done = [[] for _ in prompts], 0
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            for row, handle in zip(tokens, handles, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        row += output.generated_ids
            while min(map(len, tokens)) > done:
                done += 1
                step()
        return tokens
