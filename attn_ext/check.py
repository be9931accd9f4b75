"""Does this build compute the right thing on this machine? Every op and both models, per backend and dtype.

    for result in attn_ext.check.run(): print(result)

A result is right when its error against the float64 reference is at most twice the error of the same computation in
plain torch in the same dtype, plus a floor: one rounding of the result, and one float32 rounding of what is summed.
This is the self-test of an installation; the test suite asks far more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import attn_ext
from attn_ext import reference

__all__ = ["Result", "run"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Result:
    """One line of the table. `error` and `allowed` are relative to the largest value of the exact result; `problem`
    is what was raised where there is no result."""

    name: str
    dtype: str
    backend: str
    error: float
    allowed: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed  # (False where the error is NaN)


def run(backends: Sequence[str] | None = None) -> Iterator[Result]:
    """Check every op and both models on each of `backends` (default: all usable here), one result at a time.

    Raises ValueError for a backend that this machine cannot use, before anything is checked.

    >>> from attn_ext import check
    >>> next(check.run(["scalar"])).ok
    True
    """
    usable = attn_ext.backends()
    for name in backends or ():
        if name not in usable:
            raise ValueError(f"check: backend must be one of {', '.join(usable)}, got {name!r}")
    return _results(backends or usable)


def _results(backends: Sequence[str]) -> Iterator[Result]:
    for backend in backends:
        # float64 runs on the scalar kernels whatever the backend: once is enough.
        for dtype in (*DTYPES, torch.float64) if backend == "scalar" else DTYPES:
            with attn_ext.use_backend(backend), torch.no_grad():
                for name, ours, expected in (*_op_cases(dtype), *_model_cases(dtype)):
                    try:
                        judgement = _judge(ours(), expected, dtype)
                    except RuntimeError as error:  # an op that refuses a valid call is wrong too
                        judgement = math.inf, 0.0, str(error)
                    yield Result(name, str(dtype).removeprefix("torch."), backend, *judgement)


def _judge(actual: Sequence[Tensor], expected: Callable[[], Sequence[Tensor]], dtype: torch.dtype):
    """-> the error of the output that comes closest to what is allowed (or is past it), and what is allowed there."""
    with reference.precision(torch.float64):
        exact = expected()
    with reference.precision(dtype):
        plain = expected()
    pairs = []
    for a, e, p in zip(actual, exact, plain, strict=True):
        largest = max(e.abs().max().item(), 1e-30)
        error, torchs = ((x.double() - e).abs().max().item() / largest for x in (a, p))
        # What sums of some hundred terms in another order differ by. In float64 the exact result is one more such sum.
        sums = 16 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        rounding = max(torch.finfo(dtype).eps, torch.finfo(a.dtype).eps) / 2  # (paged logits are float32 always)
        allowed = 2 * torchs + rounding + sums
        pairs.append((math.inf if math.isnan(error) else error, allowed))
    return max(pairs, key=lambda pair: pair[0] / pair[1])


# ----------------------------------------------------------------------------------------------------- the cases
# A case is (name, ours, expected): two functions without arguments that return the outputs in the same order. The
# second one is called inside `reference.precision`.

BLOCK_SIZE = 16


def _op_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable, Callable]]:
    """Sizes that no tile divides, every option once."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def on_both(name: str, call: Callable) -> tuple[str, Callable, Callable]:
        return name, lambda: call(attn_ext), lambda: call(reference)

    m, c, h, hkv, d = 19, 70, 6, 2, 40
    x, rows = randn(m, c), (h + 2 * hkv) * d
    weight, bias, residual = randn(rows, c) / c**0.5, randn(rows), randn(m, rows)
    for activation in (None, "gelu", "gelu_tanh", "silu"):
        name = "linear" if activation is None else f"linear, {activation}"
        yield on_both(name, lambda op, a=activation: [op.linear(x, weight, bias, activation=a, residual=residual)])
    yield on_both("linear, multiply", lambda op: [op.linear(x, weight, bias, activation="silu", multiply=residual)])
    yield on_both("qkv_projection", lambda op: op.qkv_projection(x, weight, bias, n_heads=h, n_kv_heads=hkv))

    def caches(blocks: int) -> list[Tensor]:
        return [torch.zeros(blocks, BLOCK_SIZE, hkv, d, dtype=reference._result_dtype(x)) for _ in "kv"]

    slots = torch.randperm(3 * BLOCK_SIZE, generator=generator)[:m]
    slots[4] = -1
    angles = torch.rand(50, d // 2, generator=generator) * 6
    rope = (angles.cos(), angles.sin(), torch.arange(7, 7 + m))

    def project_to_cache(op, rope):
        key_cache, value_cache = caches(3)
        q = op.qkv_projection_to_cache(
            x, weight, bias, key_cache, value_cache, slots, n_heads=h, n_kv_heads=hkv, rope=rope
        )
        return q, key_cache, value_cache

    yield on_both("qkv_projection_to_cache", lambda op: project_to_cache(op, None))
    yield on_both("qkv_projection_to_cache, rope", lambda op: project_to_cache(op, rope))

    yield on_both("rms_norm", lambda op: [op.rms_norm(x, weight[0])])
    yield on_both("layer_norm", lambda op: [op.layer_norm(x, weight[0], weight[1])])

    scores, mask = randn(2, 3, 21, 37), torch.rand(21, 37, generator=generator) > 0.3
    yield on_both("masked_softmax", lambda op: [op.masked_softmax(scores, mask, causal=True, scale=0.7)])

    b, tq, tk, wide = 2, 37, 83, torch.promote_types(dtype, torch.float32)
    q, k, v = randn(b, tq, h, d), randn(b, tk, hkv, d), randn(b, tk, hkv, d)
    options = {
        "causal": {"causal": True},
        "window": {"causal": True, "window": (9, -1)},
        "softcap": {"softcap": 5.0},
        "alibi": {"causal": True, "alibi_slopes": torch.rand(h, generator=generator).to(wide)},
        "sinks": {"sinks": torch.randn(h, generator=generator).to(wide)},
        "mask, bias": {"mask": torch.rand(tq, tk, generator=generator) > 0.3, "bias": randn(1, h, tq, tk)},
    }
    for name, option in options.items():
        yield on_both(f"attention, {name}", lambda op, o=option: op.attention(q, k, v, return_lse=True, **o))

    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 5, 5, 37], [0, 20, 21, 83]))
    packed = q[0], k[0], v[0], cu_q, cu_k
    yield on_both("attention_varlen", lambda op: op.attention_varlen(*packed, causal=True, return_lse=True))

    key_cache, value_cache = randn(12, BLOCK_SIZE, hkv, d), randn(12, BLOCK_SIZE, hkv, d)
    table = torch.randperm(12, generator=generator).to(torch.int32).reshape(2, 6)
    lens = torch.tensor([83, 50], dtype=torch.int32)
    paged = key_cache, value_cache, table, lens
    yield on_both("paged_attention, decode", lambda op: op.paged_attention(q[:, :1], *paged, return_lse=True))
    mixed = torch.tensor([0, 1, 37], dtype=torch.int32)
    yield on_both(
        "paged_attention, mixed", lambda op: op.paged_attention(q[0], *paged, cu_seqlens_q=mixed, return_lse=True)
    )

    halves = [reference.attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(40), slice(40, tk))]
    yield on_both("merge_attention", lambda op: op.merge_attention(*halves[0], *halves[1]))

    def append(op):
        pair = caches(3)
        op.append_kv(k[0, :m], v[0, :m], *pair, slots)
        return pair

    def copy(op):
        pair = [cache.to(reference._result_dtype(x), copy=True) for cache in (key_cache, value_cache)]
        op.copy_blocks(*pair, [(0, 1), (1, 2), (5, 0)])
        return pair

    yield on_both("append_kv", append)
    yield on_both("copy_blocks", copy)


def _model_cases(dtype: torch.dtype) -> Iterator[tuple[str, Callable, Callable]]:
    """Random small models: the dense forward, and prefill plus decode over the paged cache."""
    from attn_ext.explain import reference_logits
    from attn_ext.llama import Llama, LlamaConfig
    from attn_ext.nanogpt import GPT, GPTConfig

    vocab, length = 97, 21
    gpt = GPTConfig(block_size=64, vocab_size=vocab, n_layer=2, n_head=3, n_embd=48)
    llama = LlamaConfig(vocab, hidden_size=48, intermediate_size=80, n_layers=2, n_heads=6, n_kv_heads=2)
    tokens = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(0))
    # nanoGPT's forward gives all logits only where there are targets.
    families = {
        "nanogpt": (lambda: GPT(gpt), lambda model: model(tokens[None], tokens[None])[0][0]),
        "llama": (lambda: Llama(llama), lambda model: model(tokens[None])[0]),
    }
    for name, (build, dense) in families.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = build().eval().to(dtype)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # the usual small initial weights would make attention almost uniform

        def expected(model=model) -> list[Tensor]:
            return [reference_logits(model, tokens)]

        yield f"{name}, dense", lambda m=model, d=dense: [d(m)], expected
        yield f"{name}, paged", lambda m=model: [_paged(m, tokens)], expected


def _paged(model, tokens: Tensor) -> Tensor:
    """The same logits from a prefill of all but the last four tokens, and four decode steps."""
    from attn_ext.kv_cache import PagedKVCache

    cache = PagedKVCache(
        model.n_layers, model.n_kv_heads, model.head_dim, num_blocks=2, block_size=BLOCK_SIZE, dtype=model.dtype
    )
    sequence, logits, start = cache.add_sequence(), [], 0
    for end in range(len(tokens) - 4, len(tokens) + 1):
        batch = cache.prepare([(sequence, tokens[start:end].tolist())], logits="all")
        logits.append(model.forward_paged(batch, cache))
        cache.commit(batch)
        start = end
    return torch.cat(logits)
