"""The ops: what users call, with shapes, dtypes and errors; beside each, what torch.compile needs to know of it.

Every op takes float32, bfloat16, float16 and float64 tensors (float64 always runs on the `scalar` backend) with any
strides that have a unit last one, computes scores, softmax and sums in float32 (float64 for float64), and gives
results whose bits depend on a row's own inputs only: not on the batch, the page layout, the chunking of a prefill or
the number of threads. A bad argument raises RuntimeError with one line that names the op, the argument, the rule and
what it got, before anything is written. `attn_ext.reference` holds the definition of each op.

On x86 CPUs, subnormal numbers of float32 and bfloat16 (below 2^-126) count as 0 in this arithmetic, as operands and as
results, whatever `torch.set_flush_denormal` says, which stays as it is. A `scale` or `eps` of that size counts; so do
float64 and the subnormal numbers of float16; what is only moved, into caches or packed weights, keeps its bits.

On a CUDA device there is no float64, and what index tensors hold (slots, positions, block tables, lengths, block pairs)
is not checked: reading it would make the host wait for the device, and keep the op out of CUDA graphs. The kernels
guard it instead: a slot or block outside the cache is skipped, a length is cut to what the tensors hold. Pass
`max_seqlen_q` and `max_seqlen_k` where you know them; without them the number of rows is the bound, and a mask or bias
that is shorter makes the op read the lengths after all. Slots and copy destinations must not repeat.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch._C import _AutoDispatchBelowAutograd as _below_autograd
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from attn_ext import _registration
from attn_ext._extension import _C as _C  # registers the ops with torch

__all__ = [
    "append_kv",
    "attention",
    "attention_varlen",
    "copy_blocks",
    "decoder_layer",
    "decoder_layers",
    "layer_norm",
    "linear",
    "masked_softmax",
    "merge_attention",
    "pack_weight",
    "paged_attention",
    "qkv_projection",
    "qkv_projection_to_cache",
    "rms_norm",
    "unpack_weight",
]

_ops = torch.ops.attn_ext


def _quick(op):
    """The op, called past the Python kernel that asks for gradients (_registration.py) where none can be wanted."""

    def call(*args, **kwargs):
        asks = is_compiling() or torch.is_grad_enabled() or forward_ad._current_level >= 0
        if asks or torch.is_inference_mode_enabled():
            return op(*args, **kwargs)
        with _below_autograd():
            return op(*args, **kwargs)

    return call


_append_kv = _quick(_ops.append_kv.default)
_attention = _quick(_ops.attention.default)
_attention_varlen = _quick(_ops.attention_varlen.default)
_copy_blocks = _quick(_ops.copy_blocks.default)
_decoder_layer = _quick(_ops.decoder_layer.default)
_decoder_layers = _quick(_ops.decoder_layers.default)
_layer_norm = _quick(_ops.layer_norm.default)
_linear = _quick(_ops.linear.default)
_masked_softmax = _quick(_ops.masked_softmax.default)
_merge_attention = _quick(_ops.merge_attention.default)
_paged_attention = _quick(_ops.paged_attention.default)
_qkv_projection = _quick(_ops.qkv_projection.default)
_qkv_projection_to_cache = _quick(_ops.qkv_projection_to_cache.default)
_rms_norm = _quick(_ops.rms_norm.default)


def _fake(name):
    return torch.library.register_fake(f"attn_ext::{name}")


def _must(ok, op, argument, rule, got):
    """The checks that need no data, for tensors that have none (meta, torch.compile); csrc/ops has all of them."""
    if not ok:
        got = f"{got:g}" if isinstance(got, float) else got  # as a stream of C++ writes it
        raise RuntimeError(f"{op}: {argument} must {rule}, got {got}")


def _must_share_device(op, **tensors):
    first, *others = [(name, t) for name, t in tensors.items() if t is not None]
    for name, t in others:
        _must(t.device == first[1].device, op, name, f"be on the device of {first[0]} ({first[1].device})", t.device)


def _must_share_dtype(op, **tensors):
    given = {name: t for name, t in tensors.items() if t is not None}
    first = next(iter(given.values()))
    _must(first.is_floating_point(), op, next(iter(given)), "be floating point", first.dtype)
    _must(all(t.dtype == first.dtype for t in given.values()), op, ", ".join(given), "have the same dtype",
          ", ".join(str(t.dtype) for t in given.values()))  # fmt: skip


def _weight_sizes(op, weight):
    """(N, K) of a plain or packed weight."""
    if weight.dim() == 4:
        width = _packed_width(weight.dtype)
        dtype, pairs = str(weight.dtype).removeprefix("torch."), " / 2" if width == 2 else ""
        _must(weight.shape[2] == _PANEL and weight.shape[3] == width, op, "weight",
              f"be packed in its present dtype ({dtype}: shape (N / {_PANEL}, K{pairs}, {_PANEL}, {width}))",
              tuple(weight.shape))  # fmt: skip
        _must(weight.is_contiguous(), op, "weight", "be contiguous when it is packed", "another layout")
        return weight.shape[0] * _PANEL, weight.shape[1] * width
    _must(weight.dim() == 2, op, "weight", "have shape (N, K) or be packed by pack_weight", tuple(weight.shape))
    return weight.shape[0], weight.shape[1]


def _must_be_product(op, x, weight, bias):
    """-> N"""
    _must_share_device(op, x=x, weight=weight, bias=bias)
    _must_share_dtype(op, x=x, weight=weight, bias=bias)
    n, k = _weight_sizes(op, weight)
    _must(x.dim() >= 1 and x.shape[-1] == k, op, "x", "have as last dimension the K of weight",
          f"{tuple(x.shape)} and {tuple(weight.shape)}")  # fmt: skip
    _must(bias is None or bias.shape == (n,), op, "bias", f"have shape ({n},)",
          None if bias is None else tuple(bias.shape))  # fmt: skip
    return n


def _must_have_heads(op, n_heads, n_kv_heads):
    _must(
        n_heads >= 1 and n_kv_heads >= 1 and n_heads % n_kv_heads == 0, op, "the number of query heads",
        "be a positive multiple of the number of key/value heads",
        f"{n_heads} query heads and {n_kv_heads} key/value heads",
    )  # fmt: skip


def _lse_dtype(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------------------------------------- projections

_PANEL = 16  # outputs of a panel of a packed weight


def _packed_width(dtype):
    """Neighbours of k that lie together in a packed weight."""
    return 2 if dtype in (torch.bfloat16, torch.float16) else 1


def pack_weight(weight: Tensor) -> Tensor:
    """A weight (N, K) in the order in which the CPU kernels read it; do it once, when the weight is loaded.

    Every op that takes a weight takes a packed one on the CPU, reads it faster, and gives the same bits. The memory is
    as large; `unpack_weight` gives the weight back.

    Args:
        weight: (N, K), N a multiple of 16; K even for bfloat16 and float16.
    Returns:
        (N/16, K/P, 16, P), contiguous: panels of 16 outputs, in which P neighbours of k of each output lie together;
        P is 2 for bfloat16 and float16, else 1. To change the dtype, unpack first: P may differ.

    >>> import torch, attn_ext
    >>> x, weight = torch.randn(3, 8), torch.randn(32, 8)
    >>> packed = attn_ext.pack_weight(weight)
    >>> packed.shape, torch.equal(attn_ext.linear(x, packed), attn_ext.linear(x, weight))
    (torch.Size([2, 8, 16, 1]), True)
    """
    if not weight.is_floating_point():
        raise ValueError(f"pack_weight: weight must be a floating-point tensor, got {weight.dtype}")
    width = _packed_width(weight.dtype)
    if weight.dim() != 2 or weight.shape[0] % _PANEL or weight.shape[1] % width:
        raise ValueError(
            f"pack_weight: weight must have shape (N, K) with N a multiple of {_PANEL}"
            f"{' and K even' if width == 2 else ''}, got {tuple(weight.shape)}"
        )
    n, k = weight.shape
    panels = weight.reshape(n // _PANEL, _PANEL, k // width, width).transpose(1, 2)
    return panels.clone(memory_format=torch.contiguous_format)


def unpack_weight(packed: Tensor) -> Tensor:
    """The weight (N, K) that `pack_weight` has packed: a copy, contiguous.

    >>> import torch, attn_ext
    >>> weight = torch.randn(32, 8, dtype=torch.bfloat16)
    >>> torch.equal(attn_ext.unpack_weight(attn_ext.pack_weight(weight)), weight)
    True
    """
    width = packed.shape[-1] if packed.dim() == 4 else 0
    if width not in (1, 2) or packed.shape[2] != _PANEL:
        raise ValueError(
            f"unpack_weight: packed must have shape (N / {_PANEL}, K / P, {_PANEL}, P) with P 1 or 2, "
            f"got {tuple(packed.shape)}"
        )
    rows = packed.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return rows.view(packed.shape[0] * _PANEL, packed.shape[1] * width)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None,
    residual: Tensor | None = None, multiply: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`activation(x @ weight.T + bias) * multiply + residual` in one pass over the product.

    Args:
        x: (..., K).
        weight: (N, K), as torch.nn.Linear stores it, or packed by `pack_weight`.
        bias: (N) or None.
        activation: None, "gelu" (by erf), "gelu_tanh" or "silu".
        residual: (..., N), added last, or None.
        multiply: (..., N), a factor of each element after the activation, or None. A gated MLP is two calls (SwiGLU,
            Shazeer, arXiv 2002.05202): `linear(x, w_gate, activation="silu", multiply=linear(x, w_up))`.
    Returns:
        (..., N), contiguous. Column n depends on row n of `weight` only, so fused and separate products agree to the
        bit.

    >>> import torch, attn_ext
    >>> x = torch.tensor([[1.0, 2.0]])
    >>> attn_ext.linear(x, torch.eye(2), torch.tensor([0.5, -2.0]), residual=x)
    tensor([[2.5000, 2.0000]])
    """
    return _linear(x, weight, bias, activation=activation, residual=residual, multiply=multiply)


@_fake("linear")
def _(x, weight, bias=None, *, activation=None, residual=None, multiply=None):
    _must_share_device("linear", x=x, weight=weight, bias=bias, residual=residual, multiply=multiply)
    n = _must_be_product("linear", x, weight, bias)
    y = x.new_empty((*x.shape[:-1], n))
    for name, t in (("residual", residual), ("multiply", multiply)):
        _must_share_dtype("linear", x=x, **{name: t})
        _must(t is None or t.shape == y.shape, "linear", name, f"have shape {tuple(y.shape)}",
              None if t is None else tuple(t.shape))  # fmt: skip
    return y


def qkv_projection(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, n_heads: int, n_kv_heads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of an attention layer by one fused product.

    Args:
        x: (..., C).
        weight: ((n_heads + 2 n_kv_heads) D, C): the rows of W_q, then W_k, then W_v (GPT-2's c_attn, transposed); or
            that, packed by `pack_weight`.
        bias: ((n_heads + 2 n_kv_heads) D) or None.
        n_heads: query heads. n_kv_heads: key/value heads, None for as many.
    Returns:
        q (..., n_heads, D), k and v (..., n_kv_heads, D): views of one buffer, which `attention` takes without a copy.

    >>> import torch, attn_ext
    >>> q, k, v = attn_ext.qkv_projection(torch.randn(2, 5, 16), torch.randn(32, 16), n_heads=4, n_kv_heads=2)
    >>> q.shape, k.shape, q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    (torch.Size([2, 5, 4, 4]), torch.Size([2, 5, 2, 4]), True)
    """
    n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
    qkv = _qkv_projection(x, weight, bias, n_heads=n_heads, n_kv_heads=n_kv_heads)
    heads = qkv.unflatten(-1, (n_heads + 2 * n_kv_heads, -1))
    return heads.split([n_heads, n_kv_heads, n_kv_heads], dim=-2)


def _must_be_fused_weight(op, x, weight, bias, n_heads, n_kv_heads):
    """-> N"""
    _must_have_heads(op, n_heads, n_kv_heads)
    n, heads = _weight_sizes(op, weight)[0], n_heads + 2 * n_kv_heads
    _must(n > 0 and n % heads == 0, op, "weight",
          f"have a positive multiple of n_heads + 2 n_kv_heads ({heads}) rows", tuple(weight.shape))  # fmt: skip
    return _must_be_product(op, x, weight, bias)


@_fake("qkv_projection")
def _(x, weight, bias=None, *, n_heads, n_kv_heads):
    n = _must_be_fused_weight("qkv_projection", x, weight, bias, n_heads, n_kv_heads)
    return x.new_empty((*x.shape[:-1], n))


def qkv_projection_to_cache(
    x: Tensor, weight: Tensor, bias: Tensor | None, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    *, n_heads: int, n_kv_heads: int | None = None, rope: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """QKV projection whose keys and values go from the product straight into their cache slots.

    Args:
        x: (..., C); its rows are the tokens. weight, bias, n_heads, n_kv_heads: as in `qkv_projection`.
        key_cache, value_cache: (num_blocks, block_size, n_kv_heads, D), dtype of x, written in place.
        slot_mapping: (tokens) int64, block * block_size + offset, -1 = write nothing; no slot twice.
        rope: None or (cos, sin, positions): q and k are rotated before they are rounded, pairs (d, d + D/2) as in
            Llama (Su et al., RoFormer, arXiv 2104.09864); cos and sin (max_pos, D/2) float32, positions (tokens) int64.
    Returns:
        q (..., n_heads, D), contiguous.

    >>> import torch, attn_ext
    >>> k_cache, v_cache = torch.zeros(2, 3, 4, 2, 8)  # 3 blocks of 4 slots, 2 heads of 8
    >>> x, w = torch.randn(2, 16), torch.randn(48, 16)
    >>> q = attn_ext.qkv_projection_to_cache(x, w, None, k_cache, v_cache, torch.tensor([4, -1]), n_heads=2)
    >>> q.shape, bool(k_cache[1, 0].any()), bool(k_cache[1, 1:].any())
    (torch.Size([2, 2, 8]), True, False)
    """
    cos, sin, positions = (None, None, None) if rope is None else rope
    return _qkv_projection_to_cache(
        x, weight, bias, key_cache, value_cache, slot_mapping,
        n_heads=n_heads, n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        rope_cos=cos, rope_sin=sin, positions=positions,
    )  # fmt: skip


@_fake("qkv_projection_to_cache")
def _(x, weight, bias, key_cache, value_cache, slot_mapping, *, n_heads, n_kv_heads, rope_cos=None, rope_sin=None,
      positions=None):  # fmt: skip
    op = "qkv_projection_to_cache"
    _must_share_device(op, x=x, weight=weight, bias=bias, key_cache=key_cache, value_cache=value_cache,
                       slot_mapping=slot_mapping, cos=rope_cos, sin=rope_sin, positions=positions)  # fmt: skip
    n = _must_be_fused_weight(op, x, weight, bias, n_heads, n_kv_heads)
    _must_share_dtype(op, x=x, key_cache=key_cache, value_cache=value_cache)
    return x.new_empty((*x.shape[:-1], n_heads, n // (n_heads + 2 * n_kv_heads)))


# --------------------------------------------------------------------------------------------------- norms


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich, arXiv 1910.07467).

    Args:
        x: (..., C).
        weight: (C), dtype of x.
        eps: at least 0.
    Returns:
        the shape and dtype of x, contiguous, rounded once. A NaN or inf stays in its row.

    >>> import torch, attn_ext
    >>> attn_ext.rms_norm(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.ones(4), eps=0.0)
    tensor([[1.2000, 1.6000, 0.0000, 0.0000]])
    """
    return _rms_norm(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias` over the last dimension (Ba et al., arXiv 1607.06450).

    var is the biased variance, mean((x - mean(x))^2), and is right however far the mean is from 0.

    Args:
        x: (..., C).
        weight: (C), dtype of x. bias: (C), dtype of x, or None.
        eps: at least 0.
    Returns:
        the shape and dtype of x, contiguous, rounded once. A NaN or inf stays in its row.

    >>> import torch, attn_ext
    >>> attn_ext.layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), torch.tensor([0.0, 0.5]), eps=0.0)
    tensor([[-1.0000,  1.5000]])
    """
    return _layer_norm(x, weight, bias, eps)


_FLOAT32_OVERFLOW = 2.0**128 - 2.0**103  # from here on a number is infinite in float32


def _must_be_eps(op, eps, dtype):
    wide = dtype == torch.float64
    _must(math.isfinite(eps) if wide else abs(eps) < _FLOAT32_OVERFLOW, op, "eps",
          "be finite" if wide else "be finite in float32", eps)  # fmt: skip
    _must(eps >= 0, op, "eps", "be at least 0", eps)


def _fake_norm(op, x, weight, bias, eps):
    _must_share_device(op, x=x, weight=weight, bias=bias)
    _must_share_dtype(op, x=x, weight=weight, bias=bias)
    _must(x.dim() >= 1, op, "x", "have shape (..., C)", tuple(x.shape))
    for name, t in (("weight", weight), ("bias", bias)):
        _must(t is None or t.shape == x.shape[-1:], op, name, f"have shape ({x.shape[-1]},)",
              None if t is None else tuple(t.shape))  # fmt: skip
    _must_be_eps(op, eps, x.dtype)
    return x.new_empty(x.shape)


@_fake("rms_norm")
def _(x, weight, eps=1e-5):
    return _fake_norm("rms_norm", x, weight, None, eps)


@_fake("layer_norm")
def _(x, weight, bias=None, eps=1e-5):
    return _fake_norm("layer_norm", x, weight, bias, eps)


# ------------------------------------------------------------------------------------------------- softmax


def masked_softmax(scores: Tensor, mask: Tensor | None = None, *, causal: bool = False, scale: float = 1.0) -> Tensor:
    """Softmax over the last dimension of `scale * scores`, where masked elements count as -inf.

    Args:
        scores: (..., Tq, Tk).
        mask: bool (True = may attend) or additive (float32 or dtype of scores), broadcast to scores; or None.
        causal: row i sees columns j <= i + Tk - Tq (bottom-right: the last row sees every column).
        scale: any factor that is finite in float32, 0 and negative included.
    Returns:
        the shape and dtype of scores, contiguous. A row that sees nothing is 0.

    >>> import torch, attn_ext
    >>> attn_ext.masked_softmax(torch.zeros(2, 2), causal=True)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])
    """
    return _masked_softmax(scores, mask, causal=causal, scale=scale)


@_fake("masked_softmax")
def _(scores, mask=None, *, causal=False, scale=1.0):
    _must_share_device("masked_softmax", scores=scores, mask=mask)
    _must(scores.dim() >= 2, "masked_softmax", "scores", "have shape (..., Tq, Tk)", tuple(scores.shape))
    return scores.new_empty(scores.shape)


# ----------------------------------------------------------------------------------------------- attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None,
    window: tuple[int, int] | None = None, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, mask: Tensor | None = None, bias: Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Exact attention, `softmax(scale * q k^T + ...) v`, without storing the scores (Dao, arXiv 2307.08691).

    Query i stands at position p = i + Tk - Tq among the keys. The score of (i, j) is `scale * q_i . k_j`, then
    `softcap * tanh(score / softcap)`, `- alibi_slopes * |p - j|`, `+ bias`.

    Args:
        q: (B, Tq, H, D). k, v: (B, Tk, Hkv, D), H a multiple of Hkv (grouped queries).
        causal: query i sees keys j <= p (bottom-right: the last query sees every key).
        scale: None for 1/sqrt(D); any number that is finite in float32.
        window: (left, right), keys p - left <= j <= p + right; -1 = unlimited.
        softcap: 0 for none; else a normal number of float32.
        alibi_slopes: (H) or (B, H) float32 (Press et al., arXiv 2108.12409).
        sinks: (H) float32, one more logit per head that joins the softmax's denominator and carries no value.
        mask: bool, True = may attend, broadcast to (B, H, Tq, Tk).
        bias: additive, float32 or dtype of q, broadcast to (B, H, Tq, Tk).
        return_lse: also return the log-sum-exp of the scores.
    Returns:
        out (B, Tq, H, D), contiguous, dtype of q; with return_lse also lse (B, H, Tq), natural logarithm, float32
        (float64 for float64). A query that sees no key gives output 0 and lse -inf (with sinks, the sink's logit);
        keys it does not see never reach it, NaN and inf included.

    >>> import torch, attn_ext
    >>> q = k = torch.zeros(1, 3, 1, 2)
    >>> v = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1).expand(1, 3, 1, 2)
    >>> attn_ext.attention(q, k, v, causal=True)[0, :, 0, 0]
    tensor([1.0000, 1.5000, 2.0000])
    """
    out, lse = _attention(
        q, k, v, **_options("attention", causal, scale, window, softcap, alibi_slopes, sinks, mask, bias)
    )
    return (out, lse) if return_lse else out


def _options(op, causal, scale, window, softcap, alibi_slopes, sinks, mask, bias):
    window = (-1, -1) if window is None else window
    _must(isinstance(window, tuple | list) and len(window) == 2, op, "window", "be None or (left, right)", repr(window))
    # What has its default is left out: the dispatcher takes time for every argument.
    options = {"causal": causal, "scale": scale, "softcap": softcap}
    if tuple(window) != (-1, -1):
        options["window_left"], options["window_right"] = window
    tensors = {"alibi_slopes": alibi_slopes, "sinks": sinks, "mask": mask, "bias": bias}
    return options | {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _fake_attention(op, q, keys_and_values, options, **tensors):
    extra = {name: options.get(name) for name in ("alibi_slopes", "sinks", "mask", "bias")}
    _must_share_device(op, q=q, **keys_and_values, **tensors, **extra)
    _must_share_dtype(op, q=q, **keys_and_values)
    (name, k), (v_name, v) = keys_and_values.items()
    ragged = op == "attention_varlen" or tensors.get("cu_seqlens_q") is not None
    _must(q.dim() == (3 if ragged else 4), op, "q", f"have {3 if ragged else 4} dimensions", tuple(q.shape))
    _must(k.dim() == (3 if op == "attention_varlen" else 4), op, name, "have the dimensions of its layout",
          tuple(k.shape))  # fmt: skip
    _must(v.shape == k.shape, op, v_name, f"have the shape of {name} {tuple(k.shape)}", tuple(v.shape))
    _must(k.shape[-1] == q.shape[-1], op, name, f"have the head_dim of q ({q.shape[-1]})", k.shape[-1])
    _must_have_heads(op, q.shape[-2], k.shape[-2])
    if q.dim() == 3:
        lse = q.new_empty((q.shape[1], q.shape[0]), dtype=_lse_dtype(q))
    else:
        lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=_lse_dtype(q))
    return q.new_empty(q.shape), lse


@_fake("attention")
def _(q, k, v, **options):
    return _fake_attention("attention", q, {"k": k, "v": v}, options)


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, causal: bool = False,
    scale: float | None = None, window: tuple[int, int] | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, mask: Tensor | None = None,
    bias: Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` over sequences of different lengths, concatenated without padding.

    Args:
        q: (total_q, H, D). k, v: (total_k, Hkv, D).
        cu_seqlens_q, cu_seqlens_k: (B + 1) int32: sequence b has rows cu_seqlens[b] to cu_seqlens[b + 1] - 1.
        max_seqlen_q, max_seqlen_k: None, or at least the longest sequence.
        mask, bias: broadcast to (B, H, longest Tq, longest Tk); rows and columns count within a sequence, and what
            lies past a sequence's end is not read.
        The other arguments: as in `attention`.
    Returns:
        out (total_q, H, D); with return_lse also lse (H, total_q).

    >>> import torch, attn_ext
    >>> cu = torch.tensor([0, 1, 4], dtype=torch.int32)  # one sequence of 1 token, one of 3
    >>> q, k, v = torch.randn(3, 4, 2, 8)
    >>> out = attn_ext.attention_varlen(q, k, v, cu, cu, causal=True)
    >>> bool(torch.equal(out[1:], attn_ext.attention(q[None, 1:], k[None, 1:], v[None, 1:], causal=True)[0]))
    True
    """
    out, lse = _attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        **_options("attention_varlen", causal, scale, window, softcap, alibi_slopes, sinks, mask, bias),
    )  # fmt: skip
    return (out, lse) if return_lse else out


@_fake("attention_varlen")
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
    return _fake_attention(
        "attention_varlen", q, {"k": k, "v": v}, options, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k
    )


def paged_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, *,
    cu_seqlens_q: Tensor | None = None, max_seqlen_q: int | None = None, causal: bool = True,
    scale: float | None = None, window: tuple[int, int] | None = None, softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, mask: Tensor | None = None,
    bias: Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` over keys and values in a paged cache (Kwon et al., arXiv 2309.06180): decode, chunked prefill, both.

    The queries are the last tokens of their sequence: query i of Tq stands at position i + seq_len - Tq.

    Args:
        q: (B, Tq, H, D), or (total, H, D) with cu_seqlens_q for a batch of different query counts.
        key_cache, value_cache: (num_blocks, block_size, Hkv, D), any strides with a unit last one.
        block_table: (B, max_blocks) int32: token t of sequence b is in block block_table[b, t // block_size]. Entries
            past a sequence's need are never read.
        seq_lens: (B) int32, keys of each sequence; slots past them are never read.
        cu_seqlens_q: (B + 1) int32 or None. max_seqlen_q: None, or at least the most queries of a sequence.
        mask, bias: broadcast to (B, H, longest Tq, longest sequence).
        The other arguments: as in `attention`, but causal by default.
    Returns:
        out, the shape of q; with return_lse also lse (B, H, Tq), or (H, total). Equal to `attention` over the same keys
        to the bit.

    >>> import torch, attn_ext
    >>> k_cache, v_cache = torch.randn(2, 4, 2, 1, 8)  # 4 blocks of 2 slots
    >>> table = torch.tensor([[3, 0]], dtype=torch.int32)
    >>> q = torch.randn(1, 1, 1, 8)
    >>> out = attn_ext.paged_attention(q, k_cache, v_cache, table, torch.tensor([3], dtype=torch.int32))
    >>> k, v = (cache[[3, 0]].flatten(0, 1)[None, :3] for cache in (k_cache, v_cache))
    >>> bool(torch.equal(out, attn_ext.attention(q, k, v)))
    True
    """
    out, lse = _paged_attention(
        q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        **_options("paged_attention", causal, scale, window, softcap, alibi_slopes, sinks, mask, bias),
    )  # fmt: skip
    return (out, lse) if return_lse else out


@_fake("paged_attention")
def _(q, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q=None, **options):
    return _fake_attention(
        "paged_attention", q, {"key_cache": key_cache, "value_cache": value_cache}, options,
        block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q,
    )  # fmt: skip


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over two disjoint sets of keys, from the results over each (shared prefixes, cascades).

    `lse = log(exp(lse_a) + exp(lse_b))`, `out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse)`. A side whose lse is
    -inf saw no key and adds nothing, whatever its output holds.

    Args:
        out_a, out_b: (B, T, H, D) or (total, H, D).
        lse_a, lse_b: (B, H, T) or (H, total), natural logarithm, float32 (float64 for float64 outputs).
    Returns:
        out, lse of the same shapes.

    >>> import torch, attn_ext
    >>> q, k, v = torch.randn(3, 1, 8, 2, 16)
    >>> a = attn_ext.attention(q, k[:, :5], v[:, :5], return_lse=True)
    >>> b = attn_ext.attention(q, k[:, 5:], v[:, 5:], return_lse=True)
    >>> out, lse = attn_ext.merge_attention(*a, *b)
    >>> torch.allclose(out, attn_ext.attention(q, k, v), atol=1e-6)
    True
    """
    return _merge_attention(out_a, lse_a, out_b, lse_b)


@_fake("merge_attention")
def _(out_a, lse_a, out_b, lse_b):
    _must_share_device("merge_attention", out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    _must_share_dtype("merge_attention", out_a=out_a, out_b=out_b)
    _must(out_a.shape == out_b.shape, "merge_attention", "out_b", f"have the shape of out_a {tuple(out_a.shape)}",
          tuple(out_b.shape))  # fmt: skip
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


# ------------------------------------------------------------------------------------------- layers as one op


def decoder_layer(
    x: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, block_table: Tensor, seq_lens: Tensor,
    cu_seqlens_q: Tensor, *, norm_1: tuple, qkv: tuple, out: tuple, norm_2: tuple, up: tuple, down: tuple,
    gate: tuple = (None, None), n_heads: int, n_kv_heads: int | None = None, norm: str = "layer_norm",
    eps: float = 1e-5, activation: str = "gelu", window_left: int = -1,
    rope: tuple[Tensor, Tensor, Tensor] | None = None, max_seqlen_q: int | None = None,
) -> Tensor:  # fmt: skip
    """A layer of a decoder over the paged cache: what a model does to `x` in one step, as one call.

    `x = x + attention(norm_1(x))`, then `x + mlp(norm_2(x))`: to the bit what the separate ops give, without the time
    between them, which in a step of decode is as long as a product.

    Args:
        x: (total, C), the rows of all sequences; cu_seqlens_q (B + 1) int32 says whose is which.
        key_cache, value_cache, slot_mapping, rope: as in `qkv_projection_to_cache`, which writes to the caches.
        block_table, seq_lens, cu_seqlens_q, max_seqlen_q: as in `paged_attention`, which is causal here.
        norm_1, qkv, out, norm_2, up, down, gate: (weight, bias or None) each; a weight of a product may be packed. qkv
            is fused as in `qkv_projection`; out, up, down and gate have shapes (C, n_heads D), (I, C), (C, I), (I, C).
            With gate the MLP is `down(activation(gate(y)) * up(y))`, without it `down(activation(up(y)))`.
        norm: "layer_norm" or "rms_norm", which has no bias, with `eps`.
        activation: "gelu", "gelu_tanh" or "silu".
        window_left: a query sees at most this many keys before its own; -1 = all.
    Returns:
        (total, C), contiguous.

    >>> import torch, attn_ext
    >>> k_cache, v_cache = torch.zeros(2, 1, 4, 2, 8)  # a block of 4 slots
    >>> lens, cu = torch.tensor([3], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    >>> table, slots = torch.zeros(1, 1, dtype=torch.int32), torch.arange(3)
    >>> shapes = {"qkv": (48, 16), "out": (16, 16), "up": (64, 16), "down": (16, 64)}
    >>> weights = {name: (torch.randn(shape), None) for name, shape in shapes.items()}
    >>> ones = (torch.ones(16), None)
    >>> x = torch.randn(3, 16)
    >>> y = attn_ext.decoder_layer(
    ...     x, k_cache, v_cache, slots, table, lens, cu, norm_1=ones, norm_2=ones, **weights, n_heads=2
    ... )
    >>> y.shape
    torch.Size([3, 16])
    """
    cos, sin, positions = (None, None, None) if rope is None else rope
    return _decoder_layer(
        x, *norm_1, *qkv, *out, *norm_2, *gate, *up, *down, key_cache, value_cache, slot_mapping, block_table, seq_lens,
        cu_seqlens_q, max_seqlen_q, n_heads=n_heads, n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        norm=norm, eps=eps, activation=activation, window_left=window_left, rope_cos=cos, rope_sin=sin,
        positions=positions,
    )  # fmt: skip


@_fake("decoder_layer")
def _(x, norm_1, norm_1_bias, qkv, qkv_bias, out, out_bias, norm_2, norm_2_bias, gate, gate_bias, up, up_bias, down,
      down_bias, key_cache, value_cache, slot_mapping, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, *, n_heads,
      n_kv_heads, norm, eps, activation, window_left=-1, rope_cos=None, rope_sin=None, positions=None):  # fmt: skip
    shared = (slot_mapping, block_table, seq_lens, cu_seqlens_q, rope_cos, rope_sin, positions)
    weights = (norm_1, norm_1_bias, qkv, qkv_bias, out, out_bias, norm_2, norm_2_bias, gate, gate_bias, up, up_bias,
               down, down_bias)  # fmt: skip
    return _fake_layer("decoder_layer", x, weights, key_cache, value_cache, shared, n_heads, n_kv_heads, eps)


def _fake_layer(op, x, weights, key_cache, value_cache, shared, n_heads, n_kv_heads, eps):
    (norm_1, norm_1_bias, qkv, qkv_bias, out, out_bias, norm_2, norm_2_bias, gate, gate_bias, up, up_bias, down,
     down_bias) = weights  # fmt: skip
    slot_mapping, block_table, seq_lens, cu_seqlens_q, rope_cos, rope_sin, positions = shared
    _must(gate is not None or gate_bias is None, op, "gate", "have a weight where it has a bias", "none")
    _must(x.dim() == 2, op, "x", "have shape (total, C)", tuple(x.shape))
    _must_share_device(op, x=x, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping,
                       block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q, cos=rope_cos,
                       sin=rope_sin, positions=positions)  # fmt: skip
    _must_share_dtype(op, x=x, key_cache=key_cache, value_cache=value_cache)
    _must_be_fused_weight(op, x, qkv, qkv_bias, n_heads, n_kv_heads)
    for weight, bias in ((norm_1, norm_1_bias), (norm_2, norm_2_bias)):
        _fake_norm(op, x, weight, bias, eps)
    inner = _must_be_product(op, x, up, up_bias)
    if gate is not None:
        _must_be_product(op, x, gate, gate_bias)
    _must_be_product(op, x.new_empty(len(x), n_heads * key_cache.shape[-1]), out, out_bias)
    _must_be_product(op, x.new_empty(len(x), inner), down, down_bias)
    return x.new_empty(x.shape)


def _weights(*, norm_1, qkv, out, norm_2, up, down, gate=(None, None)):
    """A layer's weights as the op takes them."""
    return (*norm_1, *qkv, *out, *norm_2, *gate, *up, *down)


def decoder_layers(
    x: Tensor, key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], slot_mapping: Tensor, block_table: Tensor,
    seq_lens: Tensor, cu_seqlens_q: Tensor, *, layers: Iterable[Mapping[str, tuple]], n_heads: int,
    n_kv_heads: int | None = None, norm: str = "layer_norm", eps: float = 1e-5, activation: str = "gelu",
    window_left: int = -1, rope: tuple[Tensor, Tensor, Tensor] | None = None, max_seqlen_q: int | None = None,
) -> Tensor:  # fmt: skip
    """`decoder_layer` for each of the layers in turn: what a model does between embedding and head, as one call.

    To the bit what a call a layer gives. All layers are checked before the first one writes to its caches; an error
    says which layer's argument it is about.

    Args:
        x: (total, C), what the first layer starts from; each of the others starts from the result of the one before.
        key_caches, value_caches: one each a layer, all of one shape.
        layers: for each layer a dict of its (weight, bias or None): norm_1, qkv, out, norm_2, up, down and, where it
            has one, gate, as in `decoder_layer`.
        The other arguments: as in `decoder_layer`, the same for all layers.
    Returns:
        (total, C), contiguous.

    >>> import torch, attn_ext
    >>> k_caches, v_caches = torch.zeros(2, 3, 1, 4, 2, 8)  # 3 layers, each with a block of 4 slots
    >>> lens, cu = torch.tensor([3], dtype=torch.int32), torch.tensor([0, 3], dtype=torch.int32)
    >>> table, slots = torch.zeros(1, 1, dtype=torch.int32), torch.arange(3)
    >>> shapes = {"qkv": (48, 16), "out": (16, 16), "up": (64, 16), "down": (16, 64)}
    >>> ones = {"norm_1": (torch.ones(16), None), "norm_2": (torch.ones(16), None)}
    >>> layers = [ones | {name: (torch.randn(shape), None) for name, shape in shapes.items()} for _ in range(3)]
    >>> x, step = torch.randn(3, 16), (slots, table, lens, cu)
    >>> y = attn_ext.decoder_layers(x, list(k_caches), list(v_caches), *step, layers=layers, n_heads=2)
    >>> for layer, k_cache, v_cache in zip(layers, k_caches, v_caches):
    ...     x = attn_ext.decoder_layer(x, k_cache, v_cache, *step, **layer, n_heads=2)
    >>> torch.equal(y, x)
    True
    """
    cos, sin, positions = (None, None, None) if rope is None else rope
    return _decoder_layers(
        x, [t for layer in layers for t in _weights(**layer)], key_caches, value_caches, slot_mapping, block_table,
        seq_lens, cu_seqlens_q, max_seqlen_q, n_heads=n_heads, n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
        norm=norm, eps=eps, activation=activation, window_left=window_left, rope_cos=cos, rope_sin=sin,
        positions=positions,
    )  # fmt: skip


@_fake("decoder_layers")
def _(x, weights, key_caches, value_caches, slot_mapping, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, *, n_heads,
      n_kv_heads, norm, eps, activation, window_left=-1, rope_cos=None, rope_sin=None, positions=None):  # fmt: skip
    op, n, size = "decoder_layers", len(key_caches), len(_registration.LAYER_WEIGHTS)
    _must(n > 0, op, "key_caches", "hold a cache for each layer, and there be one", "no layer")
    _must(len(value_caches) == n, op, "value_caches", f"be as many as key_caches ({n})", len(value_caches))
    _must(len(weights) == size * n, op, "weights", f"be {size} for each of key_caches ({size * n})", len(weights))
    shared = (slot_mapping, block_table, seq_lens, cu_seqlens_q, rope_cos, rope_sin, positions)
    for i, (key_cache, value_cache) in enumerate(zip(key_caches, value_caches, strict=True)):
        layer = weights[size * i : size * (i + 1)]
        for name, weight in zip(_registration.LAYER_WEIGHTS, layer, strict=True):
            optional = name == "gate" or name.endswith("_bias")
            _must(optional or weight is not None, op, f"{name} of layer {i}", "have a weight", "none")
        x = _fake_layer(op, x, layer, key_cache, value_cache, shared, n_heads, n_kv_heads, eps)
    return x


# ------------------------------------------------------------------------------------------------ the cache


def append_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys and values of new tokens into their cache slots, in place.

    Args:
        key, value: (tokens, Hkv, D), not views of the slots that are written: rows are copied in order.
        key_cache, value_cache: (num_blocks, block_size, Hkv, D), same dtype; only the named slots change.
        slot_mapping: (tokens) int64, block * block_size + offset, -1 = skip the token; no slot twice.

    >>> import torch, attn_ext
    >>> k_cache, v_cache = torch.zeros(2, 3, 4, 1, 2)  # 3 blocks of 4 slots
    >>> attn_ext.append_kv(torch.ones(2, 1, 2), torch.ones(2, 1, 2), k_cache, v_cache, torch.tensor([5, -1]))
    >>> k_cache[1, :, 0, 0]
    tensor([0., 1., 0., 0.])
    """
    _append_kv(key, value, key_cache, value_cache, slot_mapping)


@_fake("append_kv")
def _(key, value, key_cache, value_cache, slot_mapping):
    op = "append_kv"
    _must_share_device(
        op, key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slot_mapping
    )
    _must_share_dtype(op, key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    _must(value.shape == key.shape, op, "value", f"have the shape of key {tuple(key.shape)}", tuple(value.shape))
    _must(key.shape[1:] == key_cache.shape[2:], op, "key",
          f"have the key/value heads and head_dim of key_cache {tuple(key_cache.shape[2:])}",
          tuple(key.shape))  # fmt: skip


def copy_blocks(key_cache: Tensor, value_cache: Tensor, block_pairs: Tensor | list[tuple[int, int]]) -> None:
    """Copy whole blocks within the caches, in place, as if all at once (copy-on-write of forked sequences).

    Args:
        key_cache, value_cache: (num_blocks, block_size, Hkv, D).
        block_pairs: (pairs, 2) int64, or a list of (source, destination); no destination twice.

    >>> import torch, attn_ext
    >>> k_cache, v_cache = torch.arange(3.0).reshape(3, 1, 1, 1).repeat(2, 1, 1, 1, 1)
    >>> attn_ext.copy_blocks(k_cache, v_cache, [(0, 1), (1, 0)])
    >>> k_cache.flatten()
    tensor([1., 0., 2.])
    """
    if not isinstance(block_pairs, Tensor):
        pairs = torch.tensor(block_pairs, device=key_cache.device)  # of floats or bools: refused like such a tensor
        block_pairs = pairs if len(block_pairs) else pairs.long().reshape(0, 2)
    _copy_blocks(key_cache, value_cache, block_pairs)


@_fake("copy_blocks")
def _(key_cache, value_cache, block_pairs):
    _must_share_device("copy_blocks", key_cache=key_cache, value_cache=value_cache, block_pairs=block_pairs)


_registration.register([name for name in __all__ if name not in ("pack_weight", "unpack_weight")], unpack_weight)
