"""Decode of CUDA under the executor: one query per sequence, blocks that share its keys, and the combine kernel."""

import math

import pytest
import torch
from attention_ops import AttentionOps
from build import compiler
from problems import Case, build, check_accuracy, check_same, run_paged, run_varlen, to_pages

pytestmark = pytest.mark.skipif(compiler() is None, reason="no host compiler for the executor's kernels")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TENSOR_CORE_DIMS = [64, 80, 96, 128, 256]
KERNELS = [(F32, 24), *((BF16, d) for d in TENSOR_CORE_DIMS)]
WALK, SHARE = 1, 10000  # multiprocessors of a device on which a block walks all splits; on which each has its block
SPLIT = 512


@pytest.fixture(scope="module")
def library():
    return AttentionOps()


@pytest.fixture
def ops(library, monkeypatch):
    monkeypatch.setattr("problems.attn_ext", library)
    library.seed, library.sms = 0, SHARE
    return library


@pytest.mark.parametrize("dtype, head_dim", [*KERNELS, (F16, 64)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sinks": True, "window": (700, -1)},
        {"alibi": "bh", "softcap": 4.0, "bias": "hk"},
        {"mask": "bhk", "scale": -0.1},
    ],
    ids=lambda x: "-".join(x) or "causal",
)
def test_every_option(ops, dtype, head_dim, options):
    case = Case(((1, 1), (1, 1300), (1, 0), (1, 512), (1, 513)), heads=(6, 2), head_dim=head_dim, **options)
    problem = build(case, dtype)
    result = run_paged(problem, 16)
    assert [launch["kernel"].split("::")[2].split("<")[0] for launch in ops.launches][1:] == ["combine_splits_kernel"]
    check_accuracy(case, dtype, *result, "decode")
    ops.seed = 1
    check_same(run_paged(problem, 7, "HND", ragged=False), result, "pages of 7")
    ops.seed, ops.sms = 2, WALK
    check_same(run_varlen(problem), result, "one block walks all keys")
    assert len(ops.launches) == 1


@pytest.mark.parametrize("dtype, head_dim", KERNELS)
@pytest.mark.parametrize("group", [1, 3, 16, 17, 65])
def test_the_row_of_a_prefill(ops, dtype, head_dim, group):
    """A token that is decoded has the bits that it has in a prefill."""
    rows, keys = 9, 1030
    problem = build(Case(((rows, keys),), heads=(group, 1), head_dim=head_dim), dtype)
    q, k, v = problem.q[0][None], problem.k[0][None], problem.v[0][None]
    ops.sms = WALK
    out, lse = ops.attention(q, k, v, causal=True, return_lse=True)
    ops.sms = SHARE
    for i in (0, rows - 1):
        seen = keys - rows + i + 1
        token = ops.attention(q[:, i : i + 1], k[:, :seen], v[:, :seen], causal=True, return_lse=True)
        check_same(token, (out[:, i : i + 1], lse[..., i : i + 1]), f"row {i}")


@pytest.mark.parametrize("dtype, head_dim", KERNELS)
def test_a_sequence_that_grows(ops, dtype, head_dim):
    """With the bound of a captured graph, larger than any length, the bits are those of the exact bound."""
    problem = build(Case(((1, 1100), (1, 700)), heads=(4, 2), head_dim=head_dim), dtype)
    pages, q = to_pages(problem, 16), torch.stack(problem.q)
    for lens in ([1, 1], [511, 512], [513, 700], [1100, 0]):
        lens = torch.tensor(lens, dtype=torch.int32)
        caches = pages.key_cache, pages.value_cache, pages.block_table, lens
        ops.sms = SHARE
        graph = ops.paged_attention(q, *caches, max_seqlen_k=4096, return_lse=True)
        assert ops.launches[0]["blocks"] == 2 * 2 * (4096 // SPLIT)
        ops.sms = WALK
        check_same(ops.paged_attention(q, *caches, return_lse=True), graph, str(lens))


@pytest.mark.parametrize("dtype, head_dim", [(F32, 8), (BF16, 64), (BF16, 256)])
def test_poison_past_the_end(ops, dtype, head_dim):
    """The rest of the last block, other blocks and the table's tail hold NaN and garbage (problems.new_pages)."""
    problem = build(Case(((1, 530), (1, 3)), heads=(2, 1), head_dim=head_dim, causal=False), dtype)
    out, lse = run_paged(problem, 32)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


@pytest.mark.parametrize("dtype, head_dim", [(F32, 8), (BF16, 64), (BF16, 256)])
def test_splits_in_which_a_row_sees_nothing(ops, dtype, head_dim):
    keys = 4 * SPLIT
    problem = build(Case(((1, keys),), heads=(2, 1), head_dim=head_dim, causal=False), dtype)
    q, k, v = problem.q[0][None], problem.k[0][None], problem.v[0][None]
    for seen in (0, SPLIT + 3, keys - 1):
        mask = torch.zeros(1, 2, 1, keys, dtype=torch.bool)
        mask[:, 0, :, seen] = True  # and head 1 sees nothing at all
        for sms in (SHARE, WALK):
            ops.sms = sms
            out, lse = ops.attention(q, k, v, mask=mask, return_lse=True)
            assert torch.equal(out[0, 0, 0], v[0, seen, 0])
            assert (out[0, 0, 1] == 0).all() and lse[0, 1, 0] == -math.inf


def test_the_workspace_is_bounded(ops):
    """Where single results of all splits would take gigabytes, a block walks all keys: the same bits."""
    problem = build(Case(((3, 1100), (1, 70)), heads=(2, 1), head_dim=64), BF16)
    q, k, v = (torch.cat(x) for x in (problem.q, problem.k, problem.v))
    cu_q, cu_k = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([0, 1100, 1170], dtype=torch.int32)
    shared = ops.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True)
    assert len(ops.launches) == 2
    bounds = {"max_seqlen_q": 50000, "max_seqlen_k": 2**17}
    walked = ops.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True, **bounds)
    assert len(ops.launches) == 1
    check_same(walked, shared, "walked")


# ----------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize("head_dim", TENSOR_CORE_DIMS)
@pytest.mark.parametrize("group", [1, 2, 5, 8, 16, 32, 64])
def test_keys_are_read_once(ops, head_dim, group):
    """Each byte of K and V once per KV head, whatever the group, and only whole sectors; Q once per split."""
    if head_dim == 256 and group > 32:
        group = 32  # the rows of its largest tile
    lens, hkv = (1100, 37), 2
    problem = build(Case(tuple((1, n) for n in lens), heads=(group * hkv, hkv), head_dim=head_dim), BF16)
    pages, q = to_pages(problem, 16), torch.stack(problem.q)
    ops.paged_attention(q, pages.key_cache, pages.value_cache, pages.block_table, pages.seq_lens)
    attend, combine = ops.launches
    for name in "kv":
        ideal = sum(lens) * hkv * head_dim * 2
        assert attend["traffic"][name]["load_bytes"] == ideal
        assert attend["traffic"][name]["load_sectors"] * 32 == ideal
        assert name not in combine["traffic"]
    splits = sum(-(-n // SPLIT) for n in lens)
    assert attend["traffic"]["q"]["load_bytes"] == splits * group * hkv * head_dim * 2
    assert combine["traffic"]["workspace"]["load_bytes"] >= splits * group * hkv * head_dim * 4
    step, column_warps = (64, 1) if head_dim < 256 else (32, 2)
    warps = -(-group // 16) if group <= 16 else 8 if head_dim == 64 else 4 if head_dim < 256 else 2  # m16 tiles
    steps = hkv * sum(-(-n // step) for n in lens)
    assert attend["mma"] == steps * warps * (step // 8) * (head_dim // 16) * (column_warps + 1)
    assert attend["ldmatrix_wavefronts"] == attend["ldmatrix_ideal"]
    assert attend["shared_load_wavefronts"] == attend["shared_load_ideal"]
    assert attend["shared_store_wavefronts"] == attend["shared_store_ideal"]


@pytest.mark.parametrize("group", [1, 4, 16])
def test_keys_are_read_once_in_float32(ops, group):
    problem = build(Case(((1, 1100),), heads=(group, 1), head_dim=64), F32)
    q, k, v = problem.q[0][None], problem.k[0][None], problem.v[0][None]
    ops.attention(q, k, v)
    attend, _ = ops.launches
    for name in "kv":
        assert attend["traffic"][name]["load_sectors"] * 32 == k.numel() * 4
