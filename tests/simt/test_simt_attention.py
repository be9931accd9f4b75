"""attention, attention_varlen and paged_attention of CUDA under the executor: against the reference, and their counts.

Tensor cores run bf16 and f16 of head_dim 64, 80, 96, 128 and 256; the plain kernel everything else.
"""

import dataclasses
import math

import pytest
import torch
from attention_ops import AttentionOps
from build import compiler
from executor import far_apart
from problems import (
    Case,
    build,
    check_accuracy,
    check_same,
    random_case,
    run_dense,
    run_each,
    run_paged,
    run_varlen,
    to_pages,
)
from tolerance import assert_same_bits

from attn_ext import reference

pytestmark = pytest.mark.skipif(compiler() is None, reason="no host compiler for the executor's kernels")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TENSOR_CORE_DIMS = [64, 80, 96, 128, 256]
WALK, SHARE = 1, 10000  # multiprocessors of a device on which a block walks all splits; on which each has its block


@pytest.fixture(scope="module")
def library():
    return AttentionOps()


@pytest.fixture
def ops(library, monkeypatch):
    """The ops, also for the runners of the op suite."""
    monkeypatch.setattr("problems.attn_ext", library)
    library.seed, library.sms = 0, 132
    return library


D64 = {"head_dim": 64}
OPTIONS = [
    Case(((5, 70), (70, 5)), **D64, causal=False),
    Case(((5, 70), (70, 5)), **D64, scale=0.0),
    Case(((5, 70), (70, 5)), **D64, scale=-0.7),
    *(Case(((9, 140), (70, 70)), **D64, window=w) for w in ((0, 0), (3, -1), (64, 0), (100, 7))),
    *(Case(((9, 140), (70, 70)), **D64, causal=False, window=w) for w in ((0, 0), (-1, 3), (64, 64), (2, 30))),
    *(Case(((5, 70), (70, 5)), **D64, softcap=c, magnitude=3.0) for c in (0.5, 20.0)),
    *(Case(((5, 70), (70, 5)), **D64, heads=(4, 2), alibi=a, causal=c) for a in ("h", "bh") for c in (True, False)),
    Case(((5, 70), (70, 5), (3, 0)), **D64, heads=(4, 2), sinks=True),
    *(Case(((5, 70), (5, 70)), **D64, causal=False, mask=m) for m in ("", "k", "qk", "b", "hqk", "bhqk")),
    *(Case(((5, 70), (5, 70)), **D64, causal=False, bias=m) for m in ("", "k", "qk", "b", "hqk", "bhqk")),
    Case(((5, 70), (9, 9)), **D64, bias="bhqk", bias_in_q_dtype=True),
    Case(((70, 70),), **D64, heads=(8, 2), mask="bqk", bias="h", window=(40, -1), softcap=5.0, alibi="h", sinks=True),
    Case(((5, 70), (9, 9)), **D64, magnitude=100.0, scale=0.2),  # scores of about 1e4: one key takes it all
]
SIZES = [
    *(Case(((7, 7), (1, 65), (3, 10)), head_dim=d) for d in TENSOR_CORE_DIMS),
    *(Case(((70, 200),), heads=(2, 2), head_dim=d) for d in TENSOR_CORE_DIMS),  # several tiles and steps
    *(
        Case((pair,), heads=(3, 1), **D64)
        for pair in [(1, 1), (2, 1), (5, 3), (1, 63), (3, 64), (13, 129), (0, 5), (3, 0)]
    ),
    *(Case(((5, 70), (1, 9)), heads=heads, **D64) for heads in ((1, 1), (5, 1), (6, 3), (17, 1), (40, 2))),
    *(Case(((1, 1025), (20, 600), (2, 3)), heads=(2, 1), head_dim=d) for d in (64, 128, 256)),  # splits of 512 keys
]
RANDOM = [
    dataclasses.replace(random_case(seed), head_dim=d) for seed, d in zip(range(20), TENSOR_CORE_DIMS * 4, strict=True)
]
PLAIN = [
    *(Case(((7, 7), (1, 65), (3, 10)), head_dim=d) for d in (1, 3, 64, 72, 300)),
    Case(((2, 70),), heads=(2, 1), head_dim=1030),  # longer than what of Q stays in shared memory
    Case(((1, 600), (20, 600), (2, 3)), head_dim=8),
    *(random_case(seed) for seed in range(100, 108)),
]


def present_in_every_way(ops, case, dtype):
    """As accurate as torch; the same to the bit one by one, as a dense batch and over pages, on various schedules."""
    problem = build(case, dtype)
    varlen = run_varlen(problem)
    check_accuracy(case, dtype, *varlen, "varlen")
    ops.seed = 1 + case.seed
    check_same(run_each(problem), varlen, "one by one")
    ops.seed, ops.sms = 2 + case.seed, SHARE
    check_same(run_paged(problem, 16, "HND"), varlen, "paged, block size 16")
    ops.seed, ops.sms = 3 + case.seed, WALK
    check_same(run_paged(problem, 5, "interleaved"), varlen, "paged, block size 5")
    if len(set(case.lens)) == 1:
        check_same(run_dense(problem), varlen, "dense")
        check_same(run_paged(problem, 64, "NHD", ragged=False), varlen, "paged, dense queries")


@pytest.mark.parametrize("case", [*OPTIONS, *SIZES, *RANDOM], ids=str)
def test_tensor_cores(ops, case):
    present_in_every_way(ops, case, BF16)


@pytest.mark.parametrize("case", [*OPTIONS[::4], *SIZES[::3], *RANDOM[::5]], ids=str)
def test_tensor_cores_f16(ops, case):
    present_in_every_way(ops, case, F16)


@pytest.mark.parametrize("case", PLAIN, ids=str)
def test_plain(ops, case):
    present_in_every_way(ops, case, F32)


@pytest.mark.parametrize("case", [*PLAIN[:2], *PLAIN[-2:]], ids=str)
def test_plain_bf16(ops, case):
    present_in_every_way(ops, case, BF16)


# Every kernel on many schedules; blocks that share the keys, and blocks that do not.
@pytest.mark.parametrize("dtype, head_dim", [(F32, 24), *((BF16, d) for d in TENSOR_CORE_DIMS)])
@pytest.mark.parametrize("rows", [1, 12])
def test_schedules(ops, dtype, head_dim, rows):
    problem = build(Case(((rows, 600), (rows, 3)), heads=(2, 1), head_dim=head_dim, window=(580, -1)), dtype)
    expected = run_varlen(problem)
    for seed in range(1, 9):
        ops.seed, ops.sms = seed, (WALK, SHARE)[seed % 2]
        check_same(run_paged(problem, 3 + seed), expected, f"schedule {seed}")


@pytest.mark.parametrize("block_size", [1, 2, 3, 15, 17, 64, 65, 300])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_block_sizes(ops, block_size, dtype):
    case = Case(((5, 130), (1, block_size), (1, block_size + 1), (2, 2 * block_size)), heads=(2, 1), head_dim=64)
    problem = build(case, dtype)
    check_same(run_paged(problem, block_size, "HND", seed=block_size), run_varlen(problem), "paged")


# ---------------------------------------------------------------------------------------- a row's bits are its own


@pytest.mark.parametrize("dtype, head_dim", [(F32, 16), *((BF16, d) for d in TENSOR_CORE_DIMS)])
def test_chunks_of_a_prefill(ops, dtype, head_dim):
    """Whole, in chunks that take the larger or the smaller tiles, token by token: the same bits."""
    lens, heads = (140, 601), (2, 1)
    problem = build(Case((lens,), heads=heads, head_dim=head_dim, sinks=True, window=(570, -1)), dtype)
    q, k, v = problem.q[0][None], problem.k[0][None], problem.v[0][None]
    options = {**problem.options, "return_lse": True}
    whole, lse = ops.attention(q, k, v, **options)
    cuts = [0, 1, 2, 10, 75, 138, 139, 140]
    for i, (begin, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        ops.seed, ops.sms = i, (WALK, SHARE)[i % 2]
        seen = lens[1] - lens[0] + end
        part = ops.attention(q[:, begin:end], k[:, :seen], v[:, :seen], **options)
        check_same(part, (whole[:, begin:end], lse[..., begin:end]), f"rows {begin} to {end}")


@pytest.mark.parametrize("head_dim", TENSOR_CORE_DIMS)
@pytest.mark.parametrize("options", [{}, {"scale": -0.3, "softcap": 9.0}], ids=["plain", "transformed"])
def test_masked_steps_and_plain_steps_agree(ops, head_dim, options):
    """A mask that hides nothing, and neighbours in the tile that see less, change no bit."""
    problem = build(Case(((64, 256),), heads=(1, 1), head_dim=head_dim, causal=False), BF16)
    q, k, v = problem.q[0][None], problem.k[0][None], problem.v[0][None]
    plain = ops.attention(q, k, v, return_lse=True, **options)
    mask = torch.ones(64, 256, dtype=torch.bool)
    check_same(ops.attention(q, k, v, return_lse=True, mask=mask, **options), plain, "mask of ones")
    mask[1::2, 3:] = False
    some = ops.attention(q, k, v, return_lse=True, mask=mask, **options)
    check_same((some[0][:, ::2], some[1][..., ::2]), (plain[0][:, ::2], plain[1][..., ::2]), "rows that see all")


# -------------------------------------------------------------------------------- what must not reach an output


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype, head_dim", [(F32, 8), (BF16, 64), (F16, 128), (BF16, 256)])
def test_poison_at_unseen_keys_changes_nothing(ops, dtype, head_dim, poison):
    """Row by row, keys the row does not see hold NaN or inf, in K and in V; each of causal, window, mask in turn."""
    tq, tk = 20, 150
    problem = build(Case(((tq, tk),), heads=(2, 1), head_dim=head_dim), dtype)
    q, k, v = problem.q[0][None], problem.k[0][None], problem.v[0][None]
    mask = torch.rand(1, 1, tq, tk) < 0.5
    i, j = torch.arange(tq)[:, None] + tk - tq, torch.arange(tk)
    for options, seen in (
        ({"causal": True}, j <= i),
        ({"window": (3, 2)}, (j >= i - 3) & (j <= i + 2)),
        ({"mask": mask}, mask[0, 0]),
        ({"bias": torch.zeros(1, 1, tq, tk).masked_fill(~mask, -math.inf)}, mask[0, 0]),
    ):
        out, lse = ops.attention(q, k, v, return_lse=True, **options)
        assert torch.isfinite(out).all()
        for row in (0, tq // 2, tq - 1):
            unseen = ~seen[row]
            bad_k, bad_v = k.clone(), v.clone()
            bad_v[:, unseen] = poison
            if "bias" not in options:  # NaN in K makes the score NaN, whatever is added to it
                bad_k[:, unseen] = poison
            bad_out, bad_lse = ops.attention(q, bad_k, bad_v, return_lse=True, **options)
            assert_same_bits(bad_out[:, row], out[:, row], f"{options}, row {row}")
            assert_same_bits(bad_lse[..., row], lse[..., row], f"{options}, row {row}: lse")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype, head_dim", [(F32, 8), (BF16, 64), (F16, 128), (BF16, 256)])
@pytest.mark.parametrize("tk", [70, 600])
def test_visible_nan_and_inf_propagate(ops, dtype, head_dim, bad, tk):
    problem = build(Case(((4, tk),), heads=(2, 1), head_dim=head_dim), dtype)
    q, k, v = problem.q[0][None], problem.k[0][None], problem.v[0][None]
    clean = ops.attention(q, k, v, causal=True)
    for name, x in (("q", q), ("k", k), ("v", v)):
        dirty = {"q": q, "k": k, "v": v}
        dirty[name] = x.clone()
        dirty[name][0, -2, 0, 3] = bad
        out, lse = ops.attention(**dirty, causal=True, return_lse=True)
        exact, exact_lse = reference.attention(**dirty, causal=True, return_lse=True)
        torch.testing.assert_close(out, exact, equal_nan=True, rtol=0, atol=1e-5 if dtype == F32 else 0.01)
        torch.testing.assert_close(lse, exact_lse, equal_nan=True, rtol=1e-5, atol=1e-5)
        rows = [0, 1] if name != "q" else [0, 1, 3]  # the last key but one: seen by the last two rows only
        assert_same_bits(out[:, rows], clean[:, rows])


@pytest.mark.parametrize("dtype, head_dim", [(F32, 8), (BF16, 64)])
def test_huge_scores(ops, dtype, head_dim):
    """Up to the largest float32, where a rounded exponent is off by powers of two."""
    q, k, v = torch.randn(1, 3, 1, head_dim), torch.randn(1, 600, 1, head_dim), torch.randn(1, 600, 1, head_dim)
    for size in (1e3, 1e8, 1e15):
        x = [(q * size).to(dtype), (k * size).to(dtype), v.to(dtype)]
        out, lse = ops.attention(*x, scale=1.0, return_lse=True)
        exact, exact_lse = reference.attention(*x, scale=1.0, return_lse=True)
        torch.testing.assert_close(out, exact)
        torch.testing.assert_close(lse, exact_lse)


# ----------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("dtype, head_dim", [(BF16, 64), (F16, 80), (F32, 24)])
def test_any_strides(ops, dtype, head_dim):
    """Rows that do not start at multiples of 16 bytes, heads outside of tokens, broadcast keys: the same bits."""
    problem = build(Case(((20, 70), (20, 70)), heads=(4, 2), head_dim=head_dim), dtype)
    q, k, v = (torch.stack(x) for x in (problem.q, problem.k, problem.v))
    expected = ops.attention(q, k, v, causal=True, return_lse=True)

    def shifted(x):
        return torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)[..., 1 : 1 + x.shape[-1]].copy_(x)

    def heads_first(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    for change in (shifted, heads_first):
        check_same(ops.attention(*map(change, (q, k, v)), causal=True, return_lse=True), expected, change.__name__)
    one_key = [x[:, :1, :1] for x in (k, v)]
    copies = [x.repeat(1, 70, 2, 1) for x in one_key]
    check_same(
        ops.attention(q, *(x.expand(2, 70, 2, -1) for x in one_key), return_lse=True),
        ops.attention(q, *copies, return_lse=True), "expanded",
    )  # fmt: skip


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kernel", ["tensor cores", "plain"])
def test_offsets_beyond_32_bits(ops, kernel, paged):
    head_dim = 64 if kernel == "tensor cores" else 8
    problem = build(Case(((3, 40), (3, 40)), head_dim=head_dim, mask="bhqk", bias="bhqk", bias_in_q_dtype=True), BF16)
    q, k, v = (torch.stack(x) for x in (problem.q, problem.k, problem.v))
    table, lens = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([40, 40], dtype=torch.int32)

    def run(change):
        options = {**problem.of_batch, "mask": change(problem.mask), "bias": change(problem.bias), "return_lse": True}
        if paged:  # each sequence in one block
            return ops.paged_attention(change(q), change(k), change(v), table, lens, **options)
        return ops.attention(change(q), change(k), change(v), **options)

    check_same(run(far_apart), run(lambda x: x), "far apart")


@pytest.mark.parametrize("dtype, head_dim", [(BF16, 64), (F32, 8)])
def test_indices_out_of_range_are_no_fault(ops, dtype, head_dim):
    """A device cannot report what its tensors hold. Whatever they hold, nothing outside the tensors is touched."""
    problem = build(Case(((3, 40), (1, 600)), heads=(2, 1), head_dim=head_dim), dtype)
    pages = to_pages(problem, 16)
    q = torch.cat(problem.q)
    cu_q = torch.tensor([0, 3, 4], dtype=torch.int32)
    caches = pages.key_cache, pages.value_cache
    table = torch.full_like(pages.block_table, 2**31 - 1)
    table[:, ::2] = -(2**31)
    for sms in (WALK, SHARE):
        ops.sms = sms
        ops.paged_attention(q, *caches, table, pages.seq_lens, cu_seqlens_q=cu_q)
        lens = torch.tensor([-5, 2**31 - 1], dtype=torch.int32)
        ops.paged_attention(q, *caches, pages.block_table, lens, cu_seqlens_q=cu_q, max_seqlen_k=600)
        k, v = torch.cat(problem.k), torch.cat(problem.v)
        cu_k = torch.tensor([0, 2**31 - 1, -(2**31)], dtype=torch.int32)
        ops.attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_k=640, causal=True)


def test_bounds_are_hints_only(ops):
    """Longer bounds, which a device that does not read lengths has to take, change nothing."""
    problem = build(Case(((5, 70), (1, 9)), head_dim=64), BF16)
    q, k, v = torch.cat(problem.q), torch.cat(problem.k), torch.cat(problem.v)
    cu_q, cu_k = torch.tensor([0, 5, 6], dtype=torch.int32), torch.tensor([0, 70, 79], dtype=torch.int32)
    right = ops.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True)
    for sms in (WALK, SHARE):
        ops.sms = sms
        long = ops.attention_varlen(
            q, k, v, cu_q, cu_k, max_seqlen_q=300, max_seqlen_k=3000, causal=True, return_lse=True
        )
        check_same(long, right, "long bounds")


def test_nothing_launches_nothing(ops):
    for b, tq, h in [(0, 3, 2), (2, 0, 2)]:
        out, lse = ops.attention(
            torch.empty(b, tq, h, 64), torch.empty(b, 5, 1, 64), torch.empty(b, 5, 1, 64), return_lse=True
        )
        assert ops.launches == [] and out.shape == (b, tq, h, 64) and lse.shape == (b, h, tq)
    for dtype, d in ((BF16, 64), (F32, 8)):
        q, k = torch.randn(2, 3, 2, d).to(dtype), torch.empty(2, 0, 1, d, dtype=dtype)
        out, lse = ops.attention(q, k, k, return_lse=True)
        assert (out == 0).all() and (lse == -math.inf).all()


# ----------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize("head_dim", TENSOR_CORE_DIMS)
@pytest.mark.parametrize("causal", [True, False])
def test_counts(ops, head_dim, causal):
    """Q is read once, K and V once per tile that sees them, by whole sectors; invisible steps cost nothing; no bank
    conflicts; nothing is computed twice, but scores at head_dim 256 by the two warps that share a row."""
    n, heads = 256, 2
    tile, step, column_warps = (128, 64, 1) if head_dim == 64 else (64, 64, 1) if head_dim < 256 else (32, 32, 2)
    q, k, v = (torch.randn(1, n, heads, head_dim).bfloat16() for _ in range(3))
    ops.attention(q, k, v, causal=causal)
    (launch,) = ops.launches
    steps = [(n if not causal else end) // step for end in range(tile, n + 1, tile)]
    assert launch["blocks"] == heads * len(steps)
    per_step = tile // 16 * (step // 8) * (head_dim // 16) * (column_warps + 1)  # of m16n8k16: Q K^T, and P V
    assert launch["mma"] == heads * sum(steps) * per_step
    row_bytes = head_dim * 2
    for name, rows in (("q", n), ("k", sum(steps) * step), ("v", sum(steps) * step)):
        assert launch["traffic"][name]["load_bytes"] == heads * rows * row_bytes
        assert launch["traffic"][name]["load_sectors"] * 32 == heads * rows * row_bytes
    assert launch["traffic"]["out"]["store_sectors"] * 32 == q.numel() * 2
    exps = heads * column_warps * tile * sum(steps) * step
    assert exps <= launch["exp"] <= exps * 1.3  # and the factors of rows
    assert launch["ldmatrix_wavefronts"] == launch["ldmatrix_ideal"]
    assert launch["shared_load_wavefronts"] == launch["shared_load_ideal"]
    assert launch["shared_store_wavefronts"] == launch["shared_store_ideal"]
    assert launch["shared_bytes"] <= 81 * 1024  # two blocks per multiprocessor from sm_80 on


def test_a_window_costs_what_it_shows(ops):
    n = 640
    q, k, v = (torch.randn(1, n, 1, 64).bfloat16() for _ in range(3))
    ops.sms = WALK
    ops.attention(q, k, v, causal=True, window=(63, 0))
    (launch,) = ops.launches
    assert launch["traffic"]["k"]["load_bytes"] == sum(min(128 + 63, i + 128) for i in range(0, n, 128)) * 128
    assert launch["mma"] == sum(min(3, i // 64 + 2) for i in range(0, n, 128)) * 8 * 64
