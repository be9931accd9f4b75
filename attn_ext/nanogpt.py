"""nanoGPT's model, its parameter names and its forward, on attn_ext's ops.

The modules and parameters are named as in nanoGPT (`transformer.h.0.attn.c_attn.weight`, ...), so a nanoGPT state
dict loads with no renaming. `GPT.forward` goes through nanoGPT's steps; each step is one op of this library:

    c_attn          qkv_projection: q, k, v are views of one buffer
    attention       attention, or with `flash=False` the explicit path through masked_softmax
    c_proj + x      linear(..., residual=x)
    c_fc, GELU      linear(..., activation="gelu")
    c_proj + x      linear(..., residual=x)

`GPT.forward_paged` is the same model over a paged KV cache, for generation and for the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attn_ext import ops, packing
from attn_ext._config import check_positive, check_sizes
from attn_ext.kv_cache import PagedKVCache, StepBatch

__all__ = ["GPT", "MLP", "Block", "CausalSelfAttention", "GPTConfig", "LayerNorm"]


@dataclass
class GPTConfig:
    """The shape of a GPT; the first seven fields are nanoGPT's.

    `activation` is "gelu" (erf, nanoGPT) or "gelu_tanh" (OpenAI's GPT-2 weights). `flash=False` runs the explicit
    attention path in `forward`. `layer_norm_eps` is nanoGPT's constant. Raises ValueError, one line, for a value that
    no such model can have.

    >>> GPTConfig(n_layer=2, n_head=2, n_embd=8).bias
    True
    """

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True
    activation: str = "gelu"
    layer_norm_eps: float = 1e-5
    flash: bool = True

    def __post_init__(self):
        sizes = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
        check_sizes("GPTConfig", {name: getattr(self, name) for name in sizes})
        check_positive("GPTConfig", {"layer_norm_eps": self.layer_norm_eps})
        if not isinstance(self.dropout, float | int) or not 0 <= self.dropout <= 1:
            raise ValueError(f"GPTConfig: dropout must be a number from 0 to 1, got {self.dropout!r}")
        if not isinstance(self.bias, bool):
            raise ValueError(f"GPTConfig: bias must be True or False, got {self.bias!r}")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"GPTConfig: n_embd must be a multiple of n_head, got n_embd {self.n_embd} and n_head {self.n_head}"
            )
        if self.activation not in ("gelu", "gelu_tanh"):
            raise ValueError(f"GPTConfig: activation must be 'gelu' or 'gelu_tanh', got {self.activation!r}")


def _refuse_dropout(module: nn.Module, p: float) -> None:
    # Dropping nothing where the user asked for dropout would train another model than the one described.
    if module.training and p > 0:
        raise RuntimeError(
            f"{type(module).__name__}: dropout must be 0 in training mode (dropout is not implemented), got {p};"
            " call eval() or set dropout=0.0"
        )


class LayerNorm(nn.Module):
    """LayerNorm over the last dim with an optional bias; x (..., ndim) -> the same shape and dtype.

    >>> import torch
    >>> with torch.no_grad():
    ...     LayerNorm(2, bias=False)(torch.tensor([[1.0, 3.0]])).round().tolist()
    [[-1.0, 1.0]]
    """

    def __init__(self, ndim: int, bias: bool, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention; x (B, T, C) -> (B, T, C), plus `residual` of that shape if given.

    `flash` (an attribute, set from the config) chooses between the fused `attention` and nanoGPT's explicit path:
    scores, causal mask, softmax, weighted sum. Both give the same output up to rounding.

    >>> import torch
    >>> attn = CausalSelfAttention(GPTConfig(block_size=4, n_head=2, n_embd=8))
    >>> x = torch.randn(1, 3, 8)
    >>> with torch.no_grad():
    ...     fused = attn(x)
    ...     attn.flash = False
    ...     torch.allclose(fused, attn(x), atol=1e-6)
    True
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_attn = packing.Projection(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = packing.Projection(config.n_embd, config.n_embd, bias=config.bias)
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.flash = config.flash

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        _refuse_dropout(self, self.dropout)
        q, k, v = ops.qkv_projection(x, self.c_attn.weight, self.c_attn.bias, n_heads=self.n_head)
        y = ops.attention(q, k, v, causal=True) if self.flash else self._explicit(q, k, v)
        return self._output(y, residual)

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, T, H, D) -> (B, H, T, D)
        scores = q @ k.transpose(-2, -1)
        weights = ops.masked_softmax(scores, causal=True, scale=1.0 / math.sqrt(q.shape[-1]))
        return (weights @ v).transpose(1, 2)

    def _output(self, y: Tensor, residual: Tensor | None) -> Tensor:
        return ops.linear(y.flatten(-2), self.c_proj.weight, self.c_proj.bias, residual=residual)


class MLP(nn.Module):
    """Two linear layers with GELU between; x (..., C) -> (..., C), plus `residual` if given.

    >>> import torch
    >>> with torch.no_grad():
    ...     MLP(GPTConfig(n_head=2, n_embd=8))(torch.randn(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = packing.Projection(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = packing.Projection(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.activation = config.activation
        self.dropout = config.dropout

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        _refuse_dropout(self, self.dropout)
        h = ops.linear(x, self.c_fc.weight, self.c_fc.bias, activation=self.activation)
        return ops.linear(h, self.c_proj.weight, self.c_proj.bias, residual=residual)


class Block(nn.Module):
    """One transformer layer: `x + attn(ln_1(x))`, then `x + mlp(ln_2(x))`; x (B, T, C) -> (B, T, C).

    >>> import torch
    >>> with torch.no_grad():
    ...     Block(GPTConfig(block_size=4, n_head=2, n_embd=8))(torch.randn(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd, bias=config.bias, eps=config.layer_norm_eps)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config.n_embd, bias=config.bias, eps=config.layer_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.ln_1(x), residual=x)
        return self.mlp(self.ln_2(x), residual=x)

    def weights(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """As `decoder_layers` takes them."""
        own, affine = self._modules, packing.affine
        attn, mlp = own["attn"]._modules, own["mlp"]._modules
        return {
            "norm_1": affine(own["ln_1"]), "qkv": affine(attn["c_attn"]), "out": affine(attn["c_proj"]),
            "norm_2": affine(own["ln_2"]), "up": affine(mlp["c_fc"]), "down": affine(mlp["c_proj"]),
        }  # fmt: skip


class GPT(packing.PackableModel):
    """nanoGPT's GPT: token and position embeddings, `n_layer` blocks, a final LayerNorm and a head tied to `wte`.

    >>> import torch
    >>> model = GPT(GPTConfig(block_size=8, vocab_size=16, n_layer=1, n_head=2, n_embd=8)).eval()
    >>> idx = torch.tensor([[1, 2, 3]])
    >>> with torch.no_grad():
    ...     logits, loss = model(idx)                  # no targets: the last position only
    ...     logits.shape, loss
    (torch.Size([1, 1, 16]), None)
    >>> model.generate(idx, max_new_tokens=8, temperature=0).shape
    torch.Size([1, 11])
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
                "ln_f": LayerNorm(config.n_embd, bias=config.bias, eps=config.layer_norm_eps),
            }
        )
        self.lm_head = packing.Projection(config.n_embd, config.vocab_size, bias=False)
        self.tie_weights()
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):  # the layers that write to the residual stream
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))

    def tie_weights(self) -> None:
        """Make the token embedding and the head one parameter (again after weights were assigned)."""
        self.lm_head.weight = self.transformer.wte.weight

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    n_layers = property(lambda self: self.config.n_layer)
    n_heads = property(lambda self: self.config.n_head)
    n_kv_heads = property(lambda self: self.config.n_head)
    head_dim = property(lambda self: self.config.n_embd // self.config.n_head)
    vocab_size = property(lambda self: self.config.vocab_size)
    max_seq_len = property(lambda self: self.config.block_size)
    dtype = property(lambda self: self.lm_head.weight.dtype)
    device = property(lambda self: self.lm_head.weight.device)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """idx int64 (B, T), targets int64 (B, T) with -1 = ignore -> logits, loss.

        With targets: logits (B, T, vocab_size) and the mean cross entropy. Without: the logits of the last position
        only, (B, 1, vocab_size), and None.

        Raises ValueError where T is over `block_size`, RuntimeError in training mode with dropout, and, from the
        ops, RuntimeError where gradients are asked for (call it under `torch.no_grad()`).
        """
        t = idx.shape[1]
        if t > self.config.block_size:
            raise ValueError(f"GPT.forward: idx must be at most block_size ({self.config.block_size}) long, got {t}")
        _refuse_dropout(self, self.config.dropout)
        x = packing.embed(self.transformer.wte, idx) + self.transformer.wpe(torch.arange(t, device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return packing.head(self.lm_head, x[:, -1:]), None
        logits = packing.head(self.lm_head, x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def forward_paged(self, batch: StepBatch, cache: PagedKVCache) -> Tensor:
        """One step of any mix of sequences over the paged cache -> float32 logits (len(logit_rows), vocab_size).

        Writes the K and V of the step's tokens into their slots. Inference only. Positions must be below
        `max_seq_len`; torch's embedding raises IndexError where they are not.
        """
        c = self.config
        for block in self.transformer.h:
            mlp = block._modules["mlp"]
            _refuse_dropout(mlp, mlp.dropout)
        with torch.inference_mode():  # the logits come from outside: they are ordinary tensors
            x = packing.embed(self.transformer.wte, batch.tokens) + self.transformer.wpe(batch.positions)
            x = ops.decoder_layers(
                x, *cache.layers(), batch.slot_mapping, batch.block_table, batch.seq_lens, batch.cu_seqlens_q,
                layers=[block.weights() for block in self.transformer.h], n_heads=c.n_head, eps=c.layer_norm_eps,
                activation=c.activation, max_seqlen_q=batch.max_seqlen_q,
            )  # fmt: skip
        x = self.transformer.ln_f(x[batch.logit_rows])
        return packing.head(self.lm_head, x).float()

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """Append `max_new_tokens` sampled tokens to idx int64 (B, T) -> (B, T + max_new_tokens).

        nanoGPT's sampling: for the same seed (`torch.manual_seed`) the same tokens. K and V are kept in a paged
        cache, so a step computes one token per row. Past `block_size` the last `block_size` tokens are the context,
        as in nanoGPT; their learned positions shift at every step, so each such step computes the whole context.

        `temperature=0` takes the most likely token and draws no random number. `top_k` above the vocabulary means
        all of it. Raises ValueError for an empty prompt, tokens that are not int64 or not in the vocabulary, a
        negative temperature or max_new_tokens, and top_k < 1.
        """
        if idx.dim() != 2 or 0 in idx.shape:
            raise ValueError(f"generate: idx must be (B, T) with B and T >= 1, got shape {tuple(idx.shape)}")
        if idx.dtype != torch.int64:
            raise ValueError(f"generate: idx must be int64, got {idx.dtype}")
        low, high = (bound.item() for bound in idx.aminmax())
        if low < 0 or high >= self.vocab_size:
            got = low if low < 0 else high
            raise ValueError(f"generate: idx must hold tokens in 0 … {self.vocab_size - 1}, got {got}")
        if max_new_tokens < 0:
            raise ValueError(f"generate: max_new_tokens must be >= 0, got {max_new_tokens}")
        if not temperature >= 0:
            raise ValueError(f"generate: temperature must be >= 0, got {temperature}")
        if top_k is not None and top_k < 1:
            raise ValueError(f"generate: top_k must be >= 1 or None, got {top_k}")
        rows, context, block_size = idx.shape[0], self.config.block_size, 16
        blocks = -(-min(idx.shape[1] + max_new_tokens, context) // block_size)
        cache = PagedKVCache(
            self.n_layers, self.n_kv_heads, self.head_dim, num_blocks=rows * blocks, block_size=block_size,
            dtype=self.dtype, device=self.device, prefix_cache=False,
        )  # fmt: skip
        sequences = [cache.add_sequence() for _ in range(rows)]
        for _ in range(max_new_tokens):
            if idx.shape[1] > context:  # the window moved on: every token has a new position, nothing cached holds
                for sequence in sequences:
                    cache.free(sequence)
                sequences = [cache.add_sequence() for _ in range(rows)]
            new = idx[:, -context:][:, cache.length(sequences[0]) :]
            batch = cache.prepare(zip(sequences, new.tolist(), strict=True))
            logits = self.forward_paged(batch, cache)
            cache.commit(batch)
            idx = torch.cat([idx, _sample(logits, temperature, top_k)], dim=1)
        return idx


def _sample(logits: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """One token per row of logits (B, vocab) -> (B, 1)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if temperature < 1e-20:  # logits / temperature may overflow, and the temperature be 0 in float32
        logits = logits - logits.amax(-1, keepdim=True)
        temperature = max(temperature, torch.finfo(logits.dtype).tiny)
    logits = logits / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    return torch.multinomial(logits.softmax(-1), num_samples=1)
