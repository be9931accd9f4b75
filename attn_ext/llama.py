"""Llama-family models (Llama, SmolLM2, Mistral, Qwen2) on attn_ext's ops.

RMSNorm, grouped-query attention with rotary embeddings, SwiGLU. The separate q, k and v projections of a checkpoint
are one weight here, `wqkv`, rows in the order q heads, k heads, v heads; the loaders fuse them. The rotary tables
are in half-split order (the first half of a head pairs with the second), as in Hugging Face checkpoints.

`Llama.forward` is the dense path, `Llama.forward_paged` the same model over a paged KV cache. Both go through the
same ops, so a row's logits are the same to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attn_ext import ops, packing
from attn_ext._config import check_positive, check_sizes
from attn_ext.kv_cache import PagedKVCache, StepBatch

__all__ = ["Attention", "Block", "Llama", "LlamaConfig", "RMSNorm", "SwiGLU", "llama3_rope_factors", "rope_tables"]

MAX_SEQ_LEN = 2**24  # the rotary tables hold positions in float32: beyond, neighbours are one


@dataclass
class LlamaConfig:
    """The shape of a Llama-family model.

    `head_dim` defaults to hidden_size / n_heads. `sliding_window` W lets a token see itself and the W - 1 before it.
    `rope_factors` are divisors of the head_dim / 2 rotary frequencies (see `llama3_rope_factors`). `max_seq_len` is at
    most 2**24. Raises ValueError, one line, for a value that no such model can have.

    >>> LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=16, n_layers=1, n_heads=2, n_kv_heads=1).head_dim
    4
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int | None = None
    max_seq_len: int = 2048
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_factors: tuple[float, ...] | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None

    def __post_init__(self):
        sizes = ["vocab_size", "hidden_size", "intermediate_size", "n_layers", "n_heads", "n_kv_heads", "max_seq_len"]
        sizes += [name for name in ("head_dim", "sliding_window") if getattr(self, name) is not None]
        check_sizes("LlamaConfig", {name: getattr(self, name) for name in sizes})
        check_positive("LlamaConfig", {"norm_eps": self.norm_eps, "rope_theta": self.rope_theta})
        if self.max_seq_len > MAX_SEQ_LEN:
            raise ValueError(f"LlamaConfig: max_seq_len must be at most {MAX_SEQ_LEN}, got {self.max_seq_len}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                "LlamaConfig: n_heads must be a multiple of n_kv_heads,"
                f" got n_heads {self.n_heads} and n_kv_heads {self.n_kv_heads}"
            )
        if self.head_dim is None:
            if self.hidden_size % self.n_heads:
                raise ValueError(
                    "LlamaConfig: hidden_size must be a multiple of n_heads where head_dim is not given,"
                    f" got hidden_size {self.hidden_size} and n_heads {self.n_heads}"
                )
            self.head_dim = self.hidden_size // self.n_heads
        if self.head_dim % 2:
            raise ValueError(f"LlamaConfig: head_dim must be even for rotary embeddings, got {self.head_dim}")
        if self.rope_factors is not None:
            if len(self.rope_factors) != self.head_dim // 2:
                raise ValueError(
                    f"LlamaConfig: rope_factors must have head_dim / 2 ({self.head_dim // 2}) entries,"
                    f" got {len(self.rope_factors)}"
                )
            check_positive("LlamaConfig", {f"rope_factors[{i}]": factor for i, factor in enumerate(self.rope_factors)})


def _rope_frequencies(head_dim: int, theta: float) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)


def rope_tables(
    head_dim: int, max_seq_len: int, theta: float = 10000.0, factors: tuple[float, ...] | None = None, device="cpu"
) -> tuple[Tensor, Tensor]:
    """cos, sin float32 (max_seq_len, head_dim / 2) of the angles position * theta ** (-2i / head_dim) / factors[i].

    Frequencies and angles are rounded to float32, as in training: more exact angles would be other angles than
    those the model learned.

    >>> cos, sin = rope_tables(4, 3)
    >>> cos.shape, cos[0].tolist(), sin[0].tolist()
    (torch.Size([3, 2]), [1.0, 1.0], [0.0, 0.0])
    """
    frequencies = _rope_frequencies(head_dim, theta)
    if factors is not None:
        frequencies = frequencies / torch.tensor(factors, dtype=torch.float32, device="cpu")
    angles = torch.arange(max_seq_len, dtype=torch.float32, device="cpu")[:, None] * frequencies
    return angles.cos().to(device), angles.sin().to(device)


def llama3_rope_factors(
    head_dim: int, theta: float, *, factor: float, low_freq_factor: float, high_freq_factor: float,
    original_max_seq_len: int,
) -> tuple[float, ...]:  # fmt: skip
    """Llama 3's stretch to a longer context, as divisors of the rotary frequencies.

    A frequency that makes at least `high_freq_factor` turns in the original context keeps its value (divisor 1), one
    that makes at most `low_freq_factor` turns is divided by `factor`, and those between are blended. Raises ValueError
    for a value that is no number above 0, and where `high_freq_factor` is not above `low_freq_factor`.

    >>> llama3_rope_factors(
    ...     4, 10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=64
    ... )
    (1.0, 8.0)
    """
    numbers = {"factor": factor, "low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor}
    check_positive("llama3_rope_factors", {**numbers, "original_max_seq_len": original_max_seq_len})
    if not low_freq_factor < high_freq_factor:
        raise ValueError(
            "llama3_rope_factors: high_freq_factor must be above low_freq_factor,"
            f" got {high_freq_factor} and {low_freq_factor}"
        )
    turns = original_max_seq_len * _rope_frequencies(head_dim, theta).double() / (2 * math.pi)
    kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return tuple((1 / ((1 - kept) / factor + kept)).tolist())


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dim; x (..., dim) -> the same shape and dtype.

    >>> import torch
    >>> with torch.no_grad():
    ...     [round(v, 4) for v in RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 4.0]]))[0].tolist()]
    [0.8485, 1.1314]
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query self-attention with rotary embeddings; x (B, T, C) -> (B, T, C) + residual."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        rows = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.wqkv = packing.Projection(config.hidden_size, rows, bias=config.qkv_bias)
        self.wo = packing.Projection(config.n_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        self.window = None if config.sliding_window is None else (config.sliding_window - 1, 0)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor, Tensor], residual: Tensor) -> Tensor:
        """rope = (cos, sin, positions): the tables, and int64 positions (B * T)."""
        q, k, v = self.qkv(x, rope)
        return self._output(ops.attention(q, k, v, causal=True, window=self.window), residual)

    def qkv(self, x: Tensor, rope: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, C) -> q (B, T, H, D), k and v (B, T, Hkv, D), q and k rotated."""
        b, t, _ = x.shape
        # B dense sequences are a cache of B blocks of T slots: the paged op rotates and stores in one pass, and the
        # dense path has the paged path's bits.
        k = x.new_empty(b, t, self.n_kv_heads, self.head_dim)
        v = torch.empty_like(k)
        return self._project(x, k, v, torch.arange(b * t, device=x.device), rope), k, v

    def _project(self, x, key_cache, value_cache, slot_mapping, rope) -> Tensor:
        return ops.qkv_projection_to_cache(
            x, self.wqkv.weight, self.wqkv.bias, key_cache, value_cache, slot_mapping,
            n_heads=self.n_heads, n_kv_heads=self.n_kv_heads, rope=rope,
        )  # fmt: skip

    def _output(self, y: Tensor, residual: Tensor) -> Tensor:
        return ops.linear(y.flatten(-2), self.wo.weight, self.wo.bias, residual=residual)


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x)) + residual`; x and residual (..., C) -> (..., C)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate = packing.Projection(hidden, inner, bias=bias)
        self.up = packing.Projection(hidden, inner, bias=bias)
        self.down = packing.Projection(inner, hidden, bias=bias)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        gate = ops.linear(x, self.gate.weight, self.gate.bias, activation="silu")
        h = ops.linear(x, self.up.weight, self.up.bias, multiply=gate)
        return ops.linear(h, self.down.weight, self.down.bias, residual=residual)


class Block(nn.Module):
    """One layer: `x + attn(norm_1(x))`, then `x + mlp(norm_2(x))`."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.norm_1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = Attention(config)
        self.norm_2 = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x = self.attn(self.norm_1(x), rope, residual=x)
        return self.mlp(self.norm_2(x), residual=x)

    def weights(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """As `decoder_layers` takes them."""
        own, affine = self._modules, packing.affine
        attn, mlp = own["attn"]._modules, own["mlp"]._modules
        return {
            "norm_1": affine(own["norm_1"]), "qkv": affine(attn["wqkv"]), "out": affine(attn["wo"]),
            "norm_2": affine(own["norm_2"]), "gate": affine(mlp["gate"]), "up": affine(mlp["up"]),
            "down": affine(mlp["down"]),
        }  # fmt: skip


class Llama(packing.PackableModel):
    """A Llama-family language model.

    >>> import torch
    >>> config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=16, n_layers=1, n_heads=2, n_kv_heads=1)
    >>> model = Llama(config)
    >>> with torch.no_grad():
    ...     model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 32])
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.n_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = packing.Projection(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.tie_weights()
        # Not a buffer: `model.to(torch.bfloat16)` must leave the angles in float32.
        self._rope_tables: tuple[Tensor, Tensor] | None = None

    def tie_weights(self) -> None:
        """Make the head the embedding where the config says so (again after weights were assigned)."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed.weight

    n_layers = property(lambda self: self.config.n_layers)
    n_heads = property(lambda self: self.config.n_heads)
    n_kv_heads = property(lambda self: self.config.n_kv_heads)
    head_dim = property(lambda self: self.config.head_dim)
    vocab_size = property(lambda self: self.config.vocab_size)
    max_seq_len = property(lambda self: self.config.max_seq_len)
    dtype = property(lambda self: self.embed.weight.dtype)
    device = property(lambda self: self.embed.weight.device)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The (cos, sin, positions) that `qkv_projection_to_cache` takes, with the tables on the model's device."""
        if self._rope_tables is None or self._rope_tables[0].device != self.device:
            c = self.config
            with torch.inference_mode(False):  # kept: a later call may stand in another mode
                self._rope_tables = rope_tables(c.head_dim, c.max_seq_len, c.rope_theta, c.rope_factors, self.device)
        return (*self._rope_tables, positions)

    def forward(self, idx: Tensor) -> Tensor:
        """idx int64 (B, T) -> logits (B, T, vocab_size) in the model's dtype.

        Raises ValueError where T is over `max_seq_len` and, from the ops, RuntimeError where gradients are asked
        for (call it under `torch.no_grad()`).
        """
        b, t = idx.shape
        if t > self.max_seq_len:
            raise ValueError(f"Llama.forward: idx must be at most max_seq_len ({self.max_seq_len}) long, got {t}")
        rope = self.rope(torch.arange(t, device=idx.device).repeat(b))
        x = packing.embed(self.embed, idx)
        for block in self.layers:
            x = block(x, rope)
        return packing.head(self.lm_head, self.norm(x))

    @torch.no_grad()
    def forward_paged(self, batch: StepBatch, cache: PagedKVCache) -> Tensor:
        """One step of any mix of sequences over the paged cache -> float32 logits (len(logit_rows), vocab_size).

        Writes the K and V of the step's tokens into their slots. Inference only. Positions must be below
        `max_seq_len`.
        """
        with torch.inference_mode():  # the logits come from outside: they are ordinary tensors
            rope = self.rope(batch.positions)
            x = packing.embed(self.embed, batch.tokens)
            c = self.config
            x = ops.decoder_layers(
                x, *cache.layers(), batch.slot_mapping, batch.block_table, batch.seq_lens, batch.cu_seqlens_q,
                layers=[block.weights() for block in self.layers], n_heads=c.n_heads, n_kv_heads=c.n_kv_heads,
                norm="rms_norm", eps=c.norm_eps, activation="silu",
                window_left=-1 if c.sliding_window is None else c.sliding_window - 1, rope=rope,
                max_seqlen_q=batch.max_seqlen_q,
            )  # fmt: skip
        return packing.head(self.lm_head, self.norm(x[batch.logit_rows])).float()
