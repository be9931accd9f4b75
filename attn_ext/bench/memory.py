"""Memory: what a paged cache reserves beside a contiguous one, and the peak of a process that runs SmolLM2."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

__all__ = ["KVMemory", "PeakMemory", "kv_memory", "peak_memory"]


@dataclass
class KVMemory:
    """Bytes of keys and values of one mix of sequences, at the moment when all have their final length."""

    sequences: int
    longest: int
    mean: float
    stored: int  # bytes that hold a token
    paged: int  # bytes of the blocks in use
    contiguous: int  # bytes of a cache with room for the longest in every sequence
    block_size: int

    def wasted(self, reserved: int) -> float:
        return 1 - self.stored / reserved


def kv_memory(sequences: int = 64, longest: int = 2048, block_size: int = 16, seed: int = 0) -> KVMemory:
    """Fill a `PagedKVCache` with sequences of mixed lengths, log-uniform from 16 to `longest`.

    The heads are SmolLM2's, in bfloat16. The cache holds one layer; bytes are those of all 30.

    >>> from attn_ext.bench.memory import kv_memory
    >>> memory = kv_memory(8, 256)
    >>> memory.stored <= memory.paged < memory.contiguous
    True
    """
    from attn_ext import PagedKVCache

    draw = random.Random(seed)
    lengths = [longest] + [round(16 * (longest / 16) ** draw.random()) for _ in range(sequences - 1)]
    shape = {"n_kv_heads": 3, "head_dim": 64, "block_size": block_size, "dtype": torch.bfloat16}
    cache = PagedKVCache(n_layers=1, num_blocks=sum(-(-n // block_size) for n in lengths), prefix_cache=False, **shape)
    for sequence, length in [(cache.add_sequence(), length) for length in lengths]:
        cache.commit(cache.prepare([(sequence, [0] * length)]))
    stats, block_bytes = cache.stats(), PagedKVCache.block_nbytes(n_layers=30, **shape)
    token_bytes = block_bytes // block_size
    return KVMemory(
        sequences, longest, sum(lengths) / sequences,
        stored=(stats.used * block_size - stats.wasted_slots) * token_bytes,
        paged=stats.used * block_bytes, contiguous=sequences * longest * token_bytes, block_size=block_size,
    )  # fmt: skip


@dataclass
class PeakMemory:
    """Resident bytes of a process that loads SmolLM2 in bfloat16 and generates with it."""

    weights: int  # bytes of the model's parameters
    imported: int  # before the model was loaded
    load_peak: int  # the most while it was loaded
    loaded: int
    engine_peak: int  # the most while the engine was made, which packs the weights
    run_peak: int  # the most while 512 tokens were read and 16 generated


_CHILD = """
import json, pathlib, torch
def status(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) << 10
def forget_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")
import attn_ext, gguf
from attn_ext import generate
from attn_ext.loaders import load_model
torch.set_num_threads({threads})
torch.randn(64, 64) @ torch.randn(64, 64)
forget_peak()
imported = status("VmRSS")
model, _ = load_model("smollm2", dtype=torch.bfloat16)
load_peak, loaded = status("VmHWM"), status("VmRSS")
forget_peak()
engine = generate.Engine(model, num_blocks=40)
engine_peak = status("VmHWM")
forget_peak()
engine.submit(list(range(3, 515)), generate.SamplingParams(max_new_tokens=16, temperature=0))
engine.run()
weights = sum(p.numel() * p.element_size() for p in [*model.parameters(), *model.buffers()])
sizes = dict(weights=weights, imported=imported, load_peak=load_peak, loaded=loaded, engine_peak=engine_peak)
print(json.dumps(sizes | {"run_peak": status("VmHWM")}))
"""


def peak_memory(threads: int = 1) -> PeakMemory:
    """Measure in a new process. Raises OSError where the system does not tell (it needs Linux's /proc)."""
    if not Path("/proc/self/clear_refs").exists():
        raise OSError("peak memory: there is no /proc/self/clear_refs here")
    code = f"import sys; sys.path[:0] = {sys.path!r}\n" + _CHILD.replace("{threads}", str(threads))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if result.returncode:
        raise OSError(f"peak memory: {result.stderr.strip().splitlines()[-1]}")
    return PeakMemory(**json.loads(result.stdout))


def as_dict(kv: KVMemory, peak: PeakMemory | str) -> dict:
    return {"kv": asdict(kv), "peak": peak if isinstance(peak, str) else asdict(peak)}
