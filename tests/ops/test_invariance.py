"""A row's bits depend on its own inputs only: not on its batch, its pages, the chunks of its prefill, or the threads.

Lengths lie around the places where kernels cut the keys: steps of 64, splits of 512.
"""

import random

import pytest
import torch
from problems import (
    Case,
    build,
    check_same,
    cu_seqlens,
    new_cache,
    new_pages,
    run_dense,
    run_each,
    run_paged,
    run_varlen,
)
from tolerance import assert_same_bits

import attn_ext

pytestmark = pytest.mark.usefixtures("backend")

OPTIONS = {
    "causal": {},
    "window": {"window": (100, -1)},
    "all": {"window": (600, 0), "softcap": 5.0, "alibi": "h", "sinks": True},
}


def _prefill(case: Case, dtype):
    """The one sequence of a causal case, its options, and its full prefill (out (T, H, D), lse (H, T))."""
    problem = build(case, dtype)
    return problem.q[0], problem.k[0], problem.v[0], problem.of_sequence(0), run_each(problem)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_decode_one_by_one_is_the_full_prefill(options, heads, dtype):
    """Token by token over a cache that is filled as it goes; each row equals its row of the prefill."""
    length = 1040
    case = Case(((length, length),), heads=heads, head_dim=16, **OPTIONS[options])
    q, k, v, kwargs, (out, lse) = _prefill(case, dtype)
    pages = new_pages(case, dtype, block_size=16)
    near = [t + d for t in (0, 64, 128, 512, 576, 1024) for d in (-2, -1, 0, 1)]
    tokens = sorted({t for t in near if 0 <= t} | {length - 1})
    done = 0
    for t in tokens:
        attn_ext.append_kv(
            k[done : t + 1], v[done : t + 1], pages.key_cache, pages.value_cache, pages.slots(0, done, t + 1)
        )
        done = t + 1
        row, row_lse = attn_ext.paged_attention(
            q[None, t : t + 1], pages.key_cache, pages.value_cache, pages.block_table,
            torch.tensor([t + 1], dtype=torch.int32), return_lse=True, **kwargs,
        )  # fmt: skip
        assert_same_bits(row[0], out[t : t + 1], f"token {t}")
        assert_same_bits(row_lse[0], lse[:, t : t + 1], f"token {t}: lse")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_any_chunking_of_a_prefill(options, seed, dtype):
    r = random.Random(seed)
    length = r.choice([63, 130, 515, 577])
    case = Case(((length, length),), heads=(4, 2), head_dim=8, seed=seed, **OPTIONS[options])
    q, k, v, kwargs, (out, lse) = _prefill(case, dtype)
    pages = new_pages(case, dtype, block_size=r.choice([1, 5, 16, 64]), layout=r.choice(["NHD", "HND"]), seed=seed)
    begin = 0
    while begin < length:
        end = min(length, begin + r.choice([1, 2, 5, 6, 7, 31, 64, 65, 200, 512]))
        attn_ext.append_kv(k[begin:end], v[begin:end], pages.key_cache, pages.value_cache, pages.slots(0, begin, end))
        rows, rows_lse = attn_ext.paged_attention(
            q[None, begin:end], pages.key_cache, pages.value_cache, pages.block_table,
            torch.tensor([end], dtype=torch.int32), return_lse=True, **kwargs,
        )  # fmt: skip
        assert_same_bits(rows[0], out[begin:end], f"tokens {begin}..{end}")
        assert_same_bits(rows_lse[0], lse[:, begin:end], f"tokens {begin}..{end}: lse")
        begin = end


@pytest.mark.parametrize("pair", [(1, 70), (1, 513), (7, 7), (33, 600)])
def test_batch(pair, dtype):
    """Alone, twice, first, last, among shorter and longer, prefilling and decoding ones."""
    alone = run_each(build(Case((pair,), heads=(4, 2)), dtype))
    problem = build(Case((pair,), heads=(4, 2)), dtype)
    q, k, v = problem.q[0], problem.k[0], problem.v[0]
    other = build(Case(((1, 5), (9, 9), (1, 700), (0, 3), (65, 130)), heads=(4, 2), seed=9), dtype)
    for position in (0, 2, 5):
        qs, ks, vs = ([*x[:position], own, *x[position:]] for x, own in ((other.q, q), (other.k, k), (other.v, v)))
        cu_q, cu_k = cu_seqlens([len(x) for x in qs]), cu_seqlens([len(x) for x in ks])
        out, lse = attn_ext.attention_varlen(
            torch.cat(qs), torch.cat(ks), torch.cat(vs), cu_q, cu_k, causal=True, return_lse=True
        )
        rows = slice(int(cu_q[position]), int(cu_q[position + 1]))
        check_same((out[rows], lse[:, rows]), alone, f"at {position} of 6")
    for copies in (2, 3, 17):
        out, lse = attn_ext.attention(
            *(x[None].expand(copies, *x.shape) for x in (q, k, v)), causal=True, return_lse=True
        )
        for b in (0, copies - 1):
            check_same((out[b], lse[b]), alone, f"{b} of {copies}")


@pytest.mark.parametrize("pair", [(1, 513), (7, 577), (130, 130)])
def test_heads(pair, dtype):
    """A head's bits do not depend on the other heads, in its group or out of it."""
    problem = build(Case((pair,), heads=(6, 2)), dtype)
    q, k, v = problem.q[0][None], problem.k[0][None], problem.v[0][None]
    out, lse = attn_ext.attention(q, k, v, causal=True, return_lse=True)
    for head in range(6):
        own = slice(head, head + 1), slice(head // 3, head // 3 + 1)
        one, one_lse = attn_ext.attention(
            q[:, :, own[0]], k[:, :, own[1]], v[:, :, own[1]], causal=True, return_lse=True
        )
        assert_same_bits(one, out[:, :, own[0]], f"head {head}")
        assert_same_bits(one_lse, lse[:, own[0]], f"head {head}: lse")


@pytest.mark.parametrize("rows", [(0, 1), (5, 6), (6, 12), (1, 8), (12, 13)])
def test_queries(rows, dtype):
    """Queries alone, when they see the same keys as among others."""
    problem = build(Case(((13, 600),), heads=(2, 1)), dtype)
    q, k, v = problem.q[0][None], problem.k[0][None], problem.v[0][None]
    out, lse = attn_ext.attention(q, k, v, return_lse=True)
    some = slice(*rows)
    part, part_lse = attn_ext.attention(q[:, some], k, v, return_lse=True)
    assert_same_bits(part, out[:, some])
    assert_same_bits(part_lse, lse[..., some])


@pytest.mark.parametrize("length", [511, 512, 513, 1100])
@pytest.mark.parametrize("block_size", [1, 7, 16, 100, 512, 2048])
def test_pages(length, block_size, dtype):
    problem = build(Case(((1, length), (3, length)), heads=(4, 2)), dtype)
    expected = run_varlen(problem)
    for layout, seed in (("NHD", 0), ("HND", 1), ("interleaved", 2)):
        check_same(run_paged(problem, block_size, layout, seed=seed), expected, f"{layout}, order {seed}")


def test_a_block_may_be_shared(dtype):
    """The same block in two tables, and twice in one table."""
    k, v = new_cache(3, 4, 1, 8, dtype, fill=0.0)
    k.copy_(torch.randn(k.shape))
    v.copy_(torch.randn(v.shape))
    q = torch.randn(3, 1, 2, 8).to(dtype)
    table = torch.tensor([[0, 1], [0, 2], [1, 1]], dtype=torch.int32)
    out = attn_ext.paged_attention(q, k, v, table, torch.tensor([7, 8, 6], dtype=torch.int32))
    for b, length in enumerate((7, 8, 6)):
        keys, values = (c[table[b].long()].flatten(0, 1)[None, :length] for c in (k, v))
        assert_same_bits(out[b : b + 1], attn_ext.attention(q[b : b + 1], keys, values, causal=True))


# Many rows, few rows and many keys, few rows and few keys, one head, uneven sequences, nothing at all
PARALLEL = [
    Case(((200, 200), (200, 200)), heads=(6, 2)),
    Case(((1, 2000), (1, 3), (1, 700)), heads=(4, 1)),
    Case(((1, 1025),), heads=(1, 1), head_dim=64),
    Case(((7, 1100), (0, 5), (65, 65), (1, 1)), heads=(8, 2), window=(600, 0), alibi="h"),
    Case(((2, 3),), heads=(2, 2)),
    Case(((0, 3), (0, 0))),
]


@pytest.mark.parametrize("case", PARALLEL, ids=str)
def test_threads_of_attention(case, dtype, threads):
    problem = build(case, dtype)
    threads(1)
    expected = run_varlen(problem)
    for n in (2, 3, 8):
        threads(n)
        check_same(run_varlen(problem), expected, f"varlen on {n} threads")
        check_same(run_paged(problem), expected, f"paged on {n} threads")
        check_same(run_each(problem), expected, f"one by one on {n} threads")


@pytest.mark.parametrize(("m", "k", "n"), [(1, 300, 700), (150, 300, 200), (6, 40, 33), (300, 20, 5), (2, 1, 1)])
def test_threads_of_products(m, k, n, dtype, threads):
    x, weight, bias = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    residual = torch.randn(m, n).to(dtype)
    threads(1)
    expected = attn_ext.linear(x, weight, bias, activation="gelu", residual=residual)
    for count in (2, 3, 8):
        threads(count)
        out = attn_ext.linear(x, weight, bias, activation="gelu", residual=residual)
        assert_same_bits(out, expected, f"on {count} threads")


def test_threads_of_the_other_ops(dtype, threads):
    problem = build(PARALLEL[0], dtype)
    x, weight, bias = torch.randn(150, 300).to(dtype), torch.randn(5 * 40, 300).to(dtype), torch.randn(200).to(dtype)
    scores = torch.randn(3, 4, 50, 70).to(dtype)
    slots = torch.randperm(160)[:150]
    pairs = torch.stack([torch.arange(5), torch.arange(5).flip(0) + 5], dim=1)
    out, lse = (x[None] for x in run_dense(problem))

    def run():
        caches = new_cache(10, 16, 1, 40, dtype)
        q = attn_ext.qkv_projection_to_cache(x, weight, bias, *caches, slots, n_heads=3, n_kv_heads=1)
        written = [c.clone() for c in caches]
        attn_ext.copy_blocks(*caches, pairs)
        merged = attn_ext.merge_attention(out, lse, out.flip(1), lse.flip(2))
        norms = attn_ext.rms_norm(x, weight[0]), attn_ext.layer_norm(x, weight[1], weight[2])
        return [q, *written, *caches, *norms, attn_ext.masked_softmax(scores, causal=True), *merged]

    threads(1)
    expected = run()
    for n in (2, 3, 8):
        threads(n)
        for i, (result, e) in enumerate(zip(run(), expected, strict=True)):
            assert_same_bits(result, e, f"result {i} on {n} threads")


def test_repeated_runs(dtype):
    problem = build(Case(((33, 600), (1, 513), (0, 4)), heads=(4, 2)), dtype)
    expected = run_varlen(problem)
    for _ in range(5):
        check_same(run_varlen(problem), expected, "again")
