"""append_kv and copy_blocks of CUDA under the executor: bytes move exactly, nothing else is touched."""

import pytest
import torch
from build import compiler
from executor import far_apart
from kernel_ops import KernelOps

from attn_ext import reference

pytestmark = pytest.mark.skipif(compiler() is None, reason="no host compiler for the executor's kernels")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SEEDS = [0, 1, 2]


@pytest.fixture(scope="module")
def ops():
    return KernelOps()


def random_cache(blocks, block_size, heads, head_dim, dtype, layout):
    """(blocks, block_size, heads, head_dim), physically in one of the layouts that the ops take."""
    if layout == "heads first":
        return torch.randn(blocks, heads, block_size, head_dim).to(dtype).transpose(1, 2)
    if layout == "padded":  # strides and base that are no multiple of 16 bytes
        return torch.randn(blocks, block_size, heads, head_dim + 1).to(dtype)[..., 1:]
    return torch.randn(blocks, block_size, heads, head_dim).to(dtype)


def append_kv(ops, key, value, key_cache, value_cache, slots, seed):
    ops.seed = seed
    ops.append_kv(key, value, key_cache, value_cache, slots)


@pytest.mark.parametrize("element", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["plain", "heads first", "padded"])
@pytest.mark.parametrize(
    "tokens,heads,head_dim,block_size", [(1, 1, 64, 1), (7, 3, 80, 5), (19, 2, 7, 16), (5, 1, 1, 3)]
)
def test_append_kv(ops, element, layout, tokens, heads, head_dim, block_size):
    blocks = 2 + tokens // block_size
    for seed in SEEDS:
        caches = [random_cache(blocks, block_size, heads, head_dim, element, layout) for _ in range(2)]
        rows = [torch.randn(tokens, heads, head_dim + 1).to(element)[..., :head_dim] for _ in range(2)]
        slots = torch.randperm(blocks * block_size)[:tokens]
        slots[torch.rand(tokens) < 0.2] = -1
        expected = [cache.clone() for cache in caches]
        reference.append_kv(*rows, *expected, slots)
        append_kv(ops, *rows, *caches, slots, seed)
        for cache, right in zip(caches, expected, strict=True):
            assert torch.equal(cache, right)


def test_offsets_beyond_32_bits(ops):
    rows = [torch.randn(2, 2, 8).bfloat16() for _ in range(2)]
    caches = [far_apart(torch.randn(2, 4, 2, 8).bfloat16()) for _ in range(2)]
    append_kv(ops, *map(far_apart, rows), *caches, torch.tensor([3, 6]), 0)
    for cache, row in zip(caches, rows, strict=True):
        assert torch.equal(cache[0, 3], row[0]) and torch.equal(cache[1, 2], row[1])
    ops.copy_blocks(*caches, torch.tensor([[0, 1]]))
    assert torch.equal(caches[0][1], caches[0][0])


def test_append_kv_keeps_to_the_cache(ops):
    """The host cannot read slots on a device: one that names no slot writes nothing."""
    caches = [torch.zeros(2, 4, 1, 8) for _ in range(2)]
    rows = torch.ones(4, 1, 8)
    append_kv(ops, rows, rows, *caches, torch.tensor([8, -2, 1 << 40, 3]), 0)
    for cache in caches:
        assert cache.flatten(0, 1)[3].eq(1).all() and cache.sum() == 8


def test_append_kv_of_nothing_launches_nothing(ops):
    for tokens, heads, head_dim in [(0, 1, 8), (3, 0, 8), (3, 1, 0)]:
        rows, cache = torch.zeros(tokens, heads, head_dim), torch.zeros(2, 4, heads, head_dim)
        append_kv(ops, rows, rows, cache, cache.clone(), torch.zeros(tokens, dtype=torch.int64), 0)
        assert ops.launches == []


def test_append_kv_moves_whole_sectors(ops):
    """16-byte accesses: every sector of the rows is read once and written once."""
    tokens, heads, head_dim = 24, 2, 64
    caches = [torch.zeros(4, 8, heads, head_dim, dtype=torch.bfloat16) for _ in range(2)]
    rows = [torch.randn(tokens, heads, head_dim).bfloat16() for _ in range(2)]
    append_kv(ops, *rows, *caches, torch.randperm(32)[:tokens], 0)
    (launch,) = ops.launches
    sectors = tokens * heads * head_dim * 2 // 32
    for name in ("key", "value"):
        assert launch["traffic"][name]["load_sectors"] == sectors
        assert launch["traffic"][f"{name}_cache"]["store_sectors"] == sectors


def copy_blocks(ops, cache, pairs, seed):
    """On a cache and a copy of it, which must end the same."""
    ops.seed = seed
    other = cache.clone()
    ops.copy_blocks(cache, other, pairs)
    assert torch.equal(cache, other)


@pytest.mark.parametrize("element", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["plain", "heads first", "padded"])
@pytest.mark.parametrize("shape", [(6, 1, 1, 1), (7, 3, 2, 5), (6, 4, 1, 64)])
def test_copy_blocks_as_if_all_at_once(ops, element, layout, shape):
    """Blocks that are a source and a destination: a chain, a swap, and one source for two."""
    pairs = torch.tensor([[0, 1], [1, 2], [3, 4], [4, 3], [0, 5]])
    for seed in SEEDS:
        cache = random_cache(*shape, element, layout)
        expected = cache.clone()
        expected[pairs[:, 1]] = cache[pairs[:, 0]].clone()
        copy_blocks(ops, cache, pairs, seed)
        assert torch.equal(cache, expected)


def test_copy_blocks_keeps_to_the_cache(ops):
    cache = torch.randn(3, 2, 1, 8)
    expected = cache.clone()
    expected[2] = cache[0]
    copy_blocks(ops, cache, torch.tensor([[0, 3], [-1, 1], [0, 2], [1 << 40, 0]]), 0)
    assert torch.equal(cache, expected)


def test_copy_blocks_of_nothing_launches_nothing(ops):
    copy_blocks(ops, torch.zeros(3, 2, 1, 8), torch.zeros(0, 2, dtype=torch.int64), 0)
    assert ops.launches == []
