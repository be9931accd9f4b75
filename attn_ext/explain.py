"""One layer of a model taken apart: every stage from the residual stream to the layer's output, as tensors.

`attn_ext.explain` is this module; the function is `attn_ext.explain.explain`.

The kernels never write scores or weights to memory, so the stages are computed again with the functions of
`attn_ext.reference`, from the model's own weights. That the result is the layer's real output is a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_ext import packing, reference

__all__ = ["Explanation", "Stage", "explain", "reference_logits"]


@dataclass
class Stage:
    """One row of the story: the tensor, how it came about, and what is worth knowing about it."""

    name: str
    formula: str
    tensor: Tensor
    note: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        return self.tensor.stride()


@dataclass
class Explanation:
    """The stages of one layer for one sequence of T tokens (B = 1, D = head_dim, C = the model's width).

    `scores`, `weights` and `head_outputs` are three different things: how well query i matches key j, which share
    of attention i therefore gives to j (a row sums to 1), and the sum of the values with these shares.
    """

    tokens: list[int]
    layer: int
    heads: tuple[int, ...]  # the heads asked for; the tensors hold all of them
    x: Tensor  # (1, T, C) the residual stream that enters the layer
    normed: Tensor  # (1, T, C)
    qkv: Tensor  # (1, T, (H + 2 Hkv) D) the fused buffer
    q: Tensor  # (1, T, H, D) a view of qkv
    k: Tensor  # (1, T, Hkv, D) a view of qkv
    v: Tensor  # (1, T, Hkv, D) a view of qkv
    rotated: tuple[Tensor, Tensor] | None  # q and k after RoPE, where the model has it
    scores: Tensor  # (1, H, T, T) q·k, before anything else
    scaled: Tensor  # (1, H, T, T) scores / sqrt(D)
    masked: Tensor  # (1, H, T, T) scaled, -inf where a query may not see the key
    weights: Tensor  # (1, H, T, T) softmax of masked
    head_outputs: Tensor  # (1, H, T, D) weights @ v: a view of the (1, T, H, D) output
    concat: Tensor  # (1, T, H D) the same memory, heads side by side
    projected: Tensor  # (1, T, C) concat @ W_o.T + b
    after_attention: Tensor  # (1, T, C) x + projected
    output: Tensor  # (1, T, C) after_attention + MLP: what the next layer gets
    mask_note: str  # the visibility rule in words

    @property
    def n_heads(self) -> int:
        return self.q.shape[2]

    @property
    def n_kv_heads(self) -> int:
        return self.k.shape[2]

    def kv_head(self, head: int) -> int:
        """The key/value head that query head `head` reads."""
        return head // (self.n_heads // self.n_kv_heads)

    def visible(self, head: int) -> Tensor:
        """bool (T, T): which keys (columns) each query (row) may see."""
        return self.masked[0, head] != -torch.inf

    def panel(self, name: str, head: int) -> Tensor:
        """One head's "scores" (scaled and masked, T x T), "weights" (T x T) or "outputs" (T x D), in float32."""
        return {"scores": self.masked, "weights": self.weights, "outputs": self.head_outputs}[name][0, head].float()

    def reach(self, name: str, head: int) -> float:
        """The size of the largest value of that panel, 1 for weights: what its colour scale ends at."""
        if name == "weights":
            return 1.0
        values = self.panel(name, head)
        return max(values.masked_fill(~values.isfinite(), 0.0).abs().max().item(), 1e-6)

    def stages(self) -> list[Stage]:
        """Every stage in order, each with a short formula and, where it is one, the proof that it is a view."""
        h, hkv, d = self.n_heads, self.n_kv_heads, self.q.shape[-1]
        rows = [
            Stage("X", f"output of layer {self.layer - 1}" if self.layer else "embedding", self.x, "one row per token"),
            Stage("norm", "norm(X)", self.normed, "token by token"),
            Stage("QKV", "norm @ W_qkv.T + b", self.qkv, f"({h} + 2·{hkv})·{d} columns"),
            Stage("Q", f"columns 0 … {h * d - 1}", self.q, _view_note(self.q, self.qkv)),
            Stage("K", f"columns {h * d} … {(h + hkv) * d - 1}", self.k, _view_note(self.k, self.qkv)),
            Stage("V", f"columns {(h + hkv) * d} … {(h + 2 * hkv) * d - 1}", self.v, _view_note(self.v, self.qkv)),
        ]  # fmt: skip
        if self.rotated is not None:
            q, k = self.rotated
            rows += [Stage("RoPE(Q)", "rotate by position", q), Stage("RoPE(K)", "rotate by position", k)]
        shared = "" if h == hkv else f"{h // hkv} heads per K/V head"
        return rows + [
            Stage("scores", "Q·Kᵀ per head", self.scores, shared or "query × key"),
            Stage("scaled", f"scores / √{d}", self.scaled),
            Stage("masked", "-inf if key > query", self.masked, self.mask_note),
            Stage("weights", "softmax(masked)", self.weights, "rows sum to 1"),
            Stage("head outputs", "weights @ V per head", self.head_outputs, "Σ weight · value"),
            Stage("concat", "heads side by side", self.concat, _view_note(self.concat, self.head_outputs)),
            Stage("W_o", "concat @ W_o.T + b", self.projected),
            Stage("X + attention", "X + W_o", self.after_attention, "residual"),
            Stage("layer output", "+ MLP(norm(…))", self.output, "to the next layer"),
        ]


def _view_note(view: Tensor, base: Tensor) -> str:
    """Looked up in the tensors, not assumed."""
    if view.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
        return "a copy"
    offset = view.storage_offset() - base.storage_offset()
    return "view, no copy" + (f", from {offset}" if offset else "")


def explain(model, tokens: Tensor | Sequence[int], *, layer: int = 0, head: int | None = None) -> Explanation:
    """Take layer `layer` of `model` (a `nanogpt.GPT` or a `llama.Llama`) apart for the sequence `tokens`.

    `tokens`: T token ids, a list or an int64 tensor (T). `layer` and `head` count from 0, from the end where
    negative; `head=None` means all heads. Returns an `Explanation`.

    Raises TypeError for another kind of model, ValueError for an empty or too long sequence, a token, a layer or a
    head that the model does not have.

    >>> import torch
    >>> from attn_ext.explain import explain
    >>> from attn_ext.nanogpt import GPT, GPTConfig
    >>> model = GPT(GPTConfig(block_size=8, vocab_size=16, n_layer=2, n_head=2, n_embd=8)).eval()
    >>> e = explain(model, [3, 1, 2], layer=1)
    >>> e.weights.shape, e.weights[0, 0, 0].tolist()
    (torch.Size([1, 2, 3, 3]), [1.0, 0.0, 0.0])
    >>> [stage.note for stage in e.stages() if stage.name == "concat"]
    ['view, no copy']
    """
    family = _family(model)
    ids = _checked_tokens(model, tokens)
    layer = _checked_index("layer", layer, model.n_layers)
    heads = tuple(range(model.n_heads)) if head is None else (_checked_index("head", head, model.n_heads),)
    with torch.no_grad():
        x = family.embed(model, ids)
        for before in range(layer):
            x = _stages(family.layer(model, before), x, model.n_heads, model.n_kv_heads)["output"]
        stages = _stages(family.layer(model, layer), x, model.n_heads, model.n_kv_heads)
    return Explanation(tokens=ids[0].tolist(), layer=layer, heads=heads, x=x, **stages)


def reference_logits(model, tokens: Tensor | Sequence[int]) -> Tensor:
    """The model's logits (T, vocab_size) by the reference functions alone, layer by layer as `explain` does it.

    Inside `reference.precision(torch.float64)` this is what the model's forward is judged by.

    >>> import torch
    >>> from attn_ext.explain import reference_logits
    >>> from attn_ext.nanogpt import GPT, GPTConfig
    >>> model = GPT(GPTConfig(block_size=8, vocab_size=16, n_layer=1, n_head=2, n_embd=8)).eval()
    >>> with torch.no_grad():
    ...     logits, _ = model(torch.tensor([[3, 1, 2]]))
    >>> torch.allclose(reference_logits(model, [3, 1, 2])[-1], logits[0, -1], atol=1e-5)
    True
    """
    family = _family(model)
    ids = _checked_tokens(model, tokens)
    with torch.no_grad():
        x = family.embed(model, ids)
        for layer in range(model.n_layers):
            x = _stages(family.layer(model, layer), x, model.n_heads, model.n_kv_heads)["output"]
        return family.logits(model, x)[0]


def _checked_index(name: str, index: int, count: int) -> int:
    if not -count <= index < count:
        raise ValueError(f"explain: {name} must be in 0 … {count - 1}, got {index}")
    return index % count


def _checked_tokens(model, tokens: Tensor | Sequence[int]) -> Tensor:
    """-> int64 (1, T) on the model's device."""
    ids = torch.as_tensor(tokens, dtype=torch.int64, device=model.device)
    if ids.dim() != 1 or not 1 <= len(ids) <= model.max_seq_len:
        raise ValueError(
            f"explain: tokens must be one sequence of 1 … {model.max_seq_len} token ids, got shape {tuple(ids.shape)}"
        )
    if not (0 <= ids.min() and ids.max() < model.vocab_size):
        raise ValueError(f"explain: tokens must be in 0 … {model.vocab_size - 1}, got {ids.tolist()}")
    return ids[None]


# ---------------------------------------------------------------------------------------- one layer, plainly


@dataclass
class _Layer:
    """The parts of a transformer layer that differ between families."""

    norm_1: Callable[[Tensor], Tensor]
    norm_2: Callable[[Tensor], Tensor]
    mlp: Callable[[Tensor, Tensor], Tensor]  # (normed input, residual) -> residual + MLP(input)
    qkv_weight: Tensor
    qkv_bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None
    rope: tuple[Tensor, Tensor] | None = None  # cos, sin (max_pos, D/2)
    window: tuple[int, int] | None = None  # keys to the left and right of a query that it may see


def _stages(layer: _Layer, x: Tensor, n_heads: int, n_kv_heads: int) -> dict:
    """x (1, T, C) -> every tensor of the layer, under the names of `Explanation`."""
    normed = layer.norm_1(x)
    qkv = reference.linear(normed, layer.qkv_weight, layer.qkv_bias)
    q, k, v = qkv.unflatten(-1, (n_heads + 2 * n_kv_heads, -1)).split([n_heads, n_kv_heads, n_kv_heads], dim=-2)
    rotated = None
    if layer.rope is not None:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotated = tuple(reference.rope(t, *layer.rope, positions) for t in (q, k))
    queries, keys = rotated or (q, k)
    scores = reference.attention_weights(queries, keys, scale=1.0)[0]
    scaled, visible, weights, _ = reference.attention_weights(queries, keys, causal=True, window=layer.window)
    # (1, T, H, D) in memory, as the kernels write it: side by side, the heads are the rows that W_o takes.
    out = reference.attention(queries, keys, v, causal=True, window=layer.window).contiguous()
    concat = out.flatten(-2)
    after_attention = reference.linear(concat, layer.out_weight, layer.out_bias, residual=x)
    return {
        "normed": normed, "qkv": qkv, "q": q, "k": k, "v": v, "rotated": rotated,
        "scores": scores, "scaled": scaled, "masked": scaled.masked_fill(~visible, -torch.inf), "weights": weights,
        "mask_note": "causal" if layer.window is None else f"causal, window of {layer.window[0] + 1} tokens",
        "head_outputs": out.transpose(1, 2), "concat": concat,
        "projected": reference.linear(concat, layer.out_weight, layer.out_bias),
        "after_attention": after_attention, "output": layer.mlp(layer.norm_2(after_attention), after_attention),
    }  # fmt: skip


# --------------------------------------------------------------------------------------- the model families


def _norm(function: Callable, module) -> Callable[[Tensor], Tensor]:
    """A LayerNorm or RMSNorm module as a function that computes and rounds as the reference functions do."""
    bias = getattr(module, "bias", None)

    def apply(x: Tensor) -> Tensor:
        c = reference._compute_dtype(x)
        parameters = [module.weight.to(c)] + ([] if bias is None else [bias.to(c)])
        return function(x.to(c), module.weight.shape, *parameters, eps=module.eps).to(reference._result_dtype(x))

    return apply


def _logits(model, x: Tensor) -> Tensor:
    return reference.linear(x, model.lm_head.weight)[..., : model.vocab_size]  # a packed head has padding


class _GPT:
    """nanogpt.GPT, GPT-2 included."""

    @staticmethod
    def embed(model, ids: Tensor) -> Tensor:
        tokens, positions = packing.embed(model.transformer.wte, ids), model.transformer.wpe.weight
        c = reference._result_dtype(tokens)
        return tokens.to(c) + positions[: ids.shape[1]].to(c)

    @staticmethod
    def layer(model, index: int) -> _Layer:
        block = model.transformer.h[index]
        fc, proj = block.mlp.c_fc, block.mlp.c_proj

        def mlp(x: Tensor, residual: Tensor) -> Tensor:
            h = reference.linear(x, fc.weight, fc.bias, activation=block.mlp.activation)
            return reference.linear(h, proj.weight, proj.bias, residual=residual)

        return _Layer(
            norm_1=_norm(F.layer_norm, block.ln_1), norm_2=_norm(F.layer_norm, block.ln_2), mlp=mlp,
            qkv_weight=block.attn.c_attn.weight, qkv_bias=block.attn.c_attn.bias,
            out_weight=block.attn.c_proj.weight, out_bias=block.attn.c_proj.bias,
        )  # fmt: skip

    @staticmethod
    def logits(model, x: Tensor) -> Tensor:
        return _logits(model, _norm(F.layer_norm, model.transformer.ln_f)(x))


class _Llama:
    """llama.Llama: rotary embeddings, RMSNorm, SwiGLU."""

    @staticmethod
    def embed(model, ids: Tensor) -> Tensor:
        return packing.embed(model.embed, ids).to(reference._result_dtype(model.embed.weight))

    @staticmethod
    def layer(model, index: int) -> _Layer:
        block = model.layers[index]
        gate, up, down = block.mlp.gate, block.mlp.up, block.mlp.down

        def mlp(x: Tensor, residual: Tensor) -> Tensor:
            h = reference.linear(x, gate.weight, gate.bias, activation="silu") * reference.linear(x, up.weight, up.bias)
            return reference.linear(h, down.weight, down.bias, residual=residual)

        cos, sin, _ = model.rope(torch.empty(0, dtype=torch.int64))
        return _Layer(
            norm_1=_norm(F.rms_norm, block.norm_1), norm_2=_norm(F.rms_norm, block.norm_2), mlp=mlp,
            qkv_weight=block.attn.wqkv.weight, qkv_bias=block.attn.wqkv.bias,
            out_weight=block.attn.wo.weight, out_bias=block.attn.wo.bias,
            rope=(cos, sin), window=block.attn.window,
        )  # fmt: skip

    @staticmethod
    def logits(model, x: Tensor) -> Tensor:
        return _logits(model, _norm(F.rms_norm, model.norm)(x))


def _family(model) -> type[_GPT] | type[_Llama]:
    from attn_ext.llama import Llama
    from attn_ext.nanogpt import GPT

    for kind, family in ((GPT, _GPT), (Llama, _Llama)):
        if isinstance(model, kind):
            return family
    raise TypeError(f"explain: model must be a nanogpt.GPT or a llama.Llama, got {type(model).__name__}")
