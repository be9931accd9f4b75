"""CTranslate2, converted from the Hugging Face directory (which needs transformers and torch beside it)."""

from __future__ import annotations

from pathlib import Path

import ctranslate2


class Engine:
    def __init__(self, directory: str, dtype: str, threads: int, max_seqs: int, max_len: int):
        converted = Path(directory) / "ctranslate2"
        if not converted.exists():
            ctranslate2.converters.TransformersConverter(directory).convert(str(converted), quantization=dtype)
        self.model = ctranslate2.Generator(str(converted), "cpu", compute_type=dtype, intra_threads=threads)
        self.max_seqs = max_seqs
        self.version = f"ctranslate2 {ctranslate2.__version__}, computes in {self.model.compute_type}"

    def generate(self, prompts, n, step):
        results = [[] for _ in prompts]
        done = 0

        def on_token(result) -> bool:
            nonlocal done
            results[result.batch_id].append(result.token_id)
            if min(map(len, results)) > done:
                done += 1
                step()
            return False

        words = [[f"<{token}>" for token in prompt] for prompt in prompts]
        self.model.generate_batch(
            words, max_length=n, min_length=n, beam_size=1, sampling_topk=1, include_prompt_in_result=False,
            callback=on_token,
        )  # fmt: skip
        return results
