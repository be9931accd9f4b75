"""One generator of attention problems, and its presentations: dense, varlen and paged."""

from __future__ import annotations

import dataclasses
import functools
import math
import random

import torch
from tolerance import assert_as_accurate_as_torch, assert_same_bits
from torch import Tensor

import attn_ext
from attn_ext import reference


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences of (queries, keys), and the options of the op. `mask` and `bias` name the dims, of "bhqk", that they
    have; the others are of size 1 and broadcast. `alibi` is "h" or "bh"."""

    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (2, 1)
    head_dim: int = 16
    causal: bool = True
    scale: float | None = None
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    alibi: str | None = None
    sinks: bool = False
    mask: str | None = None
    bias: str | None = None
    bias_in_q_dtype: bool = False
    magnitude: float = 1.0
    seed: int = 0

    def __str__(self):
        changed = [f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self) if f.name != "lens"
                   and getattr(self, f.name) != f.default]  # fmt: skip
        return "-".join(["lens=" + ",".join(f"{q}x{k}" for q, k in self.lens), *changed]).replace(" ", "")


@dataclasses.dataclass
class Problem:
    """The tensors of a case; q, k and v per sequence, (Tq, H, D) and (Tk, Hkv, D)."""

    case: Case
    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    options: dict  # causal, scale, window, softcap, sinks
    alibi_slopes: Tensor | None  # (H) or (B, H)
    mask: Tensor | None  # broadcasts to (B, H, max Tq, max Tk)
    bias: Tensor | None

    @property
    def max_lens(self) -> tuple[int, int]:
        return max((q for q, _ in self.case.lens), default=0), max((k for _, k in self.case.lens), default=0)

    def of_sequence(self, b: int) -> dict:
        """All options of sequence b, as a batch of one."""
        tq, tk = self.case.lens[b]

        def part(x):
            if x is None:
                return None
            x = x[b : b + 1] if x.shape[0] > 1 else x
            x = x[:, :, :tq] if x.shape[2] > 1 else x
            return x[..., :tk] if x.shape[3] > 1 else x

        slopes = self.alibi_slopes
        slopes = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        return {**self.options, "alibi_slopes": slopes, "mask": part(self.mask), "bias": part(self.bias)}

    @property
    def of_batch(self) -> dict:
        return {**self.options, "alibi_slopes": self.alibi_slopes, "mask": self.mask, "bias": self.bias}


def _broadcastable(dims: str, b: int, h: int, tq: int, tk: int) -> list[int]:
    return [size if letter in dims else 1 for letter, size in zip("bhqk", (b, h, tq, tk), strict=True)]


@functools.cache
def build(case: Case, dtype: torch.dtype) -> Problem:
    g = torch.Generator().manual_seed(case.seed)
    randn = functools.partial(torch.randn, generator=g)
    h, hkv = case.heads
    d, batch = case.head_dim, len(case.lens)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q = [(randn(tq, h, d) * case.magnitude).to(dtype) for tq, _ in case.lens]
    k = [(randn(tk, hkv, d) * case.magnitude).to(dtype) for _, tk in case.lens]
    v = [randn(tk, hkv, d).to(dtype) for _, tk in case.lens]
    options = {"causal": case.causal, "scale": case.scale, "window": case.window, "softcap": case.softcap}
    options["sinks"] = randn(h).to(wide) if case.sinks else None
    problem = Problem(case, q, k, v, options, None, None, None)
    if case.alibi:
        slopes = 2.0 ** -torch.arange(1, h + 1)
        if case.alibi == "bh":
            slopes = slopes * torch.rand(batch, 1, generator=g)
        problem.alibi_slopes = slopes.to(wide)
    tq, tk = problem.max_lens
    if case.mask is not None:
        shape = _broadcastable(case.mask, batch, h, tq, tk)
        problem.mask = torch.rand(shape, generator=g) < 0.6
    if case.bias is not None:
        bias = randn(_broadcastable(case.bias, batch, h, tq, tk))
        bias[torch.rand(bias.shape, generator=g) < 0.1] = -math.inf
        problem.bias = bias.to(dtype if case.bias_in_q_dtype else wide)
    return problem


@dataclasses.dataclass
class Solution:
    """Of all sequences, concatenated: out (total, H, D), lse (H, total); in float64, and as plain torch gives them."""

    out: Tensor
    lse: Tensor
    plain_out: Tensor
    plain_lse: Tensor
    out_terms: float
    lse_terms: float


def _solve_in(problem: Problem, precision: torch.dtype) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    with reference.precision(precision):
        for b, (q, k, v) in enumerate(zip(problem.q, problem.k, problem.v, strict=True)):
            out, lse = reference.attention(q[None], k[None], v[None], return_lse=True, **problem.of_sequence(b))
            outs.append(out[0])
            lses.append(lse[0])
    h, d = problem.case.heads[0], problem.case.head_dim
    empty = torch.zeros(0, h, d, dtype=precision), torch.zeros(h, 0, dtype=precision)
    return torch.cat([empty[0], *outs]), torch.cat([empty[1], *lses], dim=1)


@functools.cache
def solve(case: Case, dtype: torch.dtype) -> Solution:
    """An error of one ulp in a score s moves a weight by |s| ulps, so outputs are made of terms of (1 + |s|) |v|."""
    problem = build(case, dtype)
    exact_out, exact_lse = _solve_in(problem, torch.float64)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    plain_out, wide_lse = _solve_in(problem, dtype)[0], _solve_in(problem, wide)[1]  # lse is not rounded to bfloat16
    score = value = 0.0
    for b, (q, k, v) in enumerate(zip(problem.q, problem.k, problem.v, strict=True)):
        options = problem.of_sequence(b)
        with reference.precision(torch.float64):
            s, visible, _, _ = reference.attention_weights(q[None], k[None], **options)
        s = s[visible & torch.isfinite(s)].abs()
        score = max(score, s.max().item() if s.numel() else 0.0)
        value = max(value, v.abs().max().item() if v.numel() else 0.0)
    return Solution(exact_out, exact_lse, plain_out, wide_lse, (1 + score) * value, 1 + score)


# --------------------------------------------------------------------------------------------- presentations


def cu_seqlens(lens) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def run_each(problem: Problem) -> tuple[Tensor, Tensor]:
    """Sequence by sequence through `attention`, batches of one."""
    h, d = problem.case.heads[0], problem.case.head_dim
    outs, lses = [problem.q[0].new_zeros(0, h, d)], []
    for b, (q, k, v) in enumerate(zip(problem.q, problem.k, problem.v, strict=True)):
        out, lse = attn_ext.attention(q[None], k[None], v[None], return_lse=True, **problem.of_sequence(b))
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


def run_dense(problem: Problem) -> tuple[Tensor, Tensor]:
    """One batch through `attention`; the sequences must have equal lengths."""
    q, k, v = torch.stack(problem.q), torch.stack(problem.k), torch.stack(problem.v)
    out, lse = attn_ext.attention(q, k, v, return_lse=True, **problem.of_batch)
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


def run_varlen(problem: Problem) -> tuple[Tensor, Tensor]:
    cu_q, cu_k = (cu_seqlens([lens[i] for lens in problem.case.lens]) for i in (0, 1))
    return attn_ext.attention_varlen(
        torch.cat(problem.q),
        torch.cat(problem.k),
        torch.cat(problem.v),
        cu_q,
        cu_k,
        return_lse=True,
        **problem.of_batch,
    )


def new_cache(num_blocks: int, block_size: int, hkv: int, d: int, dtype, layout: str = "NHD", fill: float = math.nan):
    """Two caches (num_blocks, block_size, Hkv, D) full of `fill`. Layouts: NHD dense; HND, one head's block contiguous;
    interleaved, K and V of a block side by side in one buffer."""
    if layout == "NHD":
        return tuple(torch.full((num_blocks, block_size, hkv, d), fill, dtype=dtype) for _ in range(2))
    if layout == "HND":
        return tuple(torch.full((num_blocks, hkv, block_size, d), fill, dtype=dtype).transpose(1, 2) for _ in range(2))
    assert layout == "interleaved"
    return torch.full((num_blocks, 2, block_size, hkv, d), fill, dtype=dtype).unbind(1)


@dataclasses.dataclass
class Pages:
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor  # (B, max_blocks) int32; unused entries are garbage
    seq_lens: Tensor

    def slots(self, b: int, begin: int, end: int) -> Tensor:
        """Slot of each token begin..end of sequence b."""
        t, block_size = torch.arange(begin, end), self.key_cache.shape[1]
        return self.block_table[b].long()[t // block_size] * block_size + t % block_size


def new_pages(case: Case, dtype, block_size: int, layout: str = "NHD", seed: int = 0) -> Pages:
    """An empty cache for the sequences of `case`: blocks in random order, every slot NaN, table tails garbage."""
    order = random.Random(seed)
    need = [-(-tk // block_size) for _, tk in case.lens]
    blocks = list(range(sum(need) + 2))  # two blocks belong to nobody
    order.shuffle(blocks)
    table = torch.tensor([2**31 - 1, -1, 12345, -(2**31)], dtype=torch.int32)
    table = table.repeat(len(case.lens), 1 + max(need, default=0) // 4)[:, : max(need, default=0) + 1].contiguous()
    for b, n in enumerate(need):
        table[b, :n] = torch.tensor([blocks.pop() for _ in range(n)], dtype=torch.int32)
    k, v = new_cache(sum(need) + 2, block_size, case.heads[1], case.head_dim, dtype, layout)
    return Pages(k, v, table, torch.tensor([tk for _, tk in case.lens], dtype=torch.int32))


def to_pages(problem: Problem, block_size: int, layout: str = "NHD", seed: int = 0) -> Pages:
    pages = new_pages(problem.case, problem.q[0].dtype, block_size, layout, seed)
    for b, (k, v) in enumerate(zip(problem.k, problem.v, strict=True)):
        slots = pages.slots(b, 0, k.shape[0])
        at = slots // block_size, slots % block_size
        pages.key_cache[at], pages.value_cache[at] = k, v
    return pages


def run_paged(problem: Problem, block_size: int = 16, layout: str = "NHD", ragged: bool = True, seed: int = 0):
    """Through `paged_attention`, with concatenated queries, or as a dense batch if not `ragged`."""
    pages = to_pages(problem, block_size, layout, seed)
    caches = pages.key_cache, pages.value_cache, pages.block_table, pages.seq_lens
    if ragged:
        cu_q = cu_seqlens([tq for tq, _ in problem.case.lens])
        return attn_ext.paged_attention(
            torch.cat(problem.q), *caches, cu_seqlens_q=cu_q, return_lse=True, **problem.of_batch
        )
    out, lse = attn_ext.paged_attention(torch.stack(problem.q), *caches, return_lse=True, **problem.of_batch)
    return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)


# ----------------------------------------------------------------------------------------------------- checks


def check_accuracy(case: Case, dtype: torch.dtype, out: Tensor, lse: Tensor, what: str) -> None:
    s = solve(case, dtype)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_as_accurate_as_torch(out, s.out, s.plain_out, terms=s.out_terms, what=f"{what}: out")
    assert_as_accurate_as_torch(lse, s.lse, s.plain_lse, terms=s.lse_terms, what=f"{what}: lse")


def check_same(result, expected, what: str) -> None:
    assert_same_bits(result[0], expected[0], f"{what}: out")
    assert_same_bits(result[1], expected[1], f"{what}: lse")


def random_case(seed: int) -> Case:
    """Any combination of the options, on small awkward sizes."""
    r = random.Random(seed)

    def maybe(chance, choice):
        return choice() if r.random() < chance else None

    hkv = r.choice([1, 1, 2, 3])
    dims = "".join(letter for letter in "bhqk" if r.random() < 0.6)
    lengths = [0, 1, 2, 5, 6, 7, 13, 31]
    lens = [(r.choice(lengths), r.choice([*lengths, 63, 64, 65, 130])) for _ in range(r.choice([1, 2, 3]))]
    if r.random() < 0.4:  # equal lengths can also be presented as a dense batch
        lens = [lens[0]] * len(lens)
    return Case(
        lens=tuple(lens),
        heads=(hkv * r.choice([1, 2, 3, 4, 8]), hkv),
        head_dim=r.choice([1, 3, 7, 8, 16, 24, 64, 80]),
        causal=r.random() < 0.5,
        scale=maybe(0.4, lambda: r.choice([0.0, 1.0, -0.3, 0.05])),
        window=maybe(0.4, lambda: (r.choice([-1, 0, 1, 5, 64]), r.choice([-1, 0, 2, 40]))),
        softcap=r.choice([0.0, 0.0, 1.5, 30.0]),
        alibi=maybe(0.4, lambda: r.choice(["h", "bh"])),
        sinks=r.random() < 0.3,
        mask=maybe(0.4, lambda: dims),
        bias=maybe(0.4, lambda: "".join(letter for letter in "bhqk" if r.random() < 0.6)),
        bias_in_q_dtype=r.random() < 0.5,
        magnitude=r.choice([1.0, 1.0, 4.0]),
        seed=seed,
    )
