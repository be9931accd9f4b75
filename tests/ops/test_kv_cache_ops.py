"""append_kv and copy_blocks: in place, byte for byte, and nothing else is touched."""

import pytest
import torch
from problems import new_cache
from tolerance import assert_same_bits

import attn_ext

pytestmark = pytest.mark.usefixtures("backend")

LAYOUTS = ["NHD", "HND", "interleaved"]


def _numbered(num_blocks, block_size, hkv, d, dtype, layout):
    """Caches whose every element is distinct or nearly so, to see what is written."""
    k, v = new_cache(num_blocks, block_size, hkv, d, dtype, layout)
    k.copy_(torch.randn(k.shape))
    v.copy_(torch.randn(v.shape))
    return k, v


def _append_in_torch(key, value, key_cache, value_cache, slots):
    k, v = key_cache.clone(), value_cache.clone()
    for row, slot in enumerate(slots):
        if slot != -1:
            block, offset = divmod(slot, k.shape[1])
            k[block, offset], v[block, offset] = key[row], value[row]
    return k, v


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("block_size", "hkv", "d"), [(1, 1, 1), (2, 3, 7), (4, 1, 64), (15, 2, 16), (16, 2, 80), (17, 1, 300), (64, 1, 8)]
)
def test_append(block_size, hkv, d, layout, dtype):
    num_blocks = 5
    slots = torch.randperm(num_blocks * block_size)[: min(11, num_blocks * block_size)].tolist()
    slots[1::3] = [-1] * len(slots[1::3])
    slots[0] = num_blocks * block_size - 1 if num_blocks * block_size - 1 not in slots else slots[0]
    key, value = (torch.randn(len(slots), hkv, d).to(dtype) for _ in range(2))
    caches = _numbered(num_blocks, block_size, hkv, d, dtype, layout)
    expected = _append_in_torch(key, value, *caches, slots)
    assert attn_ext.append_kv(key, value, *caches, torch.tensor(slots)) is None
    assert_same_bits(caches[0], expected[0], "key_cache")
    assert_same_bits(caches[1], expected[1], "value_cache")


def test_append_copies_bits(dtype):
    """NaN payloads, infinities, denormals and negative zero arrive unchanged."""
    key = (
        torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 2.0**-24, -(2.0**-20)])
        .to(dtype)
        .reshape(1, 1, 6)
    )
    k, v = new_cache(2, 4, 1, 6, dtype, fill=1.0)
    attn_ext.append_kv(key, -key, k, v, torch.tensor([5]))
    assert_same_bits(k[1, 1], key[0])
    assert_same_bits(v[1, 1], -key[0])


def test_append_strided_rows(dtype):
    """key and value as views of a fused QKV buffer, and as expanded rows."""
    qkv = torch.randn(6, 8, 16).to(dtype)
    key, value = qkv[:, 4:6], qkv[:, 6:8]
    slots = torch.tensor([0, 9, -1, 3, 4, 7])
    for k_rows, v_rows in ((key, value), (key[:1].expand(6, 2, 16), value[:, :1].expand(6, 2, 16))):
        caches = _numbered(3, 4, 2, 16, dtype, "NHD")
        expected = _append_in_torch(k_rows, v_rows, *caches, slots.tolist())
        attn_ext.append_kv(k_rows, v_rows, *caches, slots)
        assert_same_bits(caches[0], expected[0])
        assert_same_bits(caches[1], expected[1])


def test_append_strided_slots():
    key = torch.randn(3, 1, 8)
    caches = _numbered(3, 4, 1, 8, torch.float32, "NHD")
    slots = torch.tensor([4, 99, 5, 99, -1, 99])[::2]
    expected = _append_in_torch(key, key, *caches, slots.tolist())
    attn_ext.append_kv(key, key, *caches, slots)
    assert_same_bits(caches[0], expected[0])


def test_append_nothing(dtype):
    caches = _numbered(2, 4, 1, 8, dtype, "NHD")
    before = [c.clone() for c in caches]
    attn_ext.append_kv(*torch.zeros(2, 0, 1, 8, dtype=dtype), *caches, torch.zeros(0, dtype=torch.int64))
    attn_ext.append_kv(*torch.ones(2, 3, 1, 8, dtype=dtype), *caches, torch.full((3,), -1))
    assert_same_bits(caches[0], before[0])
    assert_same_bits(caches[1], before[1])


def test_append_leaves_the_rest_of_a_bigger_buffer_alone(dtype):
    """The caches are one layer of a buffer with guard bytes around each row."""
    buffer = torch.randn(2, 3, 4, 2, 24).to(dtype)
    before = buffer.clone()
    key = torch.randn(2, 2, 8).to(dtype)
    attn_ext.append_kv(key, key, buffer[0, ..., 8:16], buffer[1, ..., 8:16], torch.tensor([2, 9]))
    before[:, 0, 2, :, 8:16] = key[0]
    before[:, 2, 1, :, 8:16] = key[1]
    assert_same_bits(buffer, before)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("block_size", "hkv", "d"), [(1, 1, 1), (3, 2, 7), (16, 2, 64), (17, 1, 80)])
@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [(0, 0)],
        [(0, 1)],
        [(0, 1), (1, 2)],
        [(1, 2), (0, 1)],
        [(0, 1), (1, 0)],
        [(0, 1), (1, 2), (2, 0)],
        [(3, 0), (3, 1), (3, 2)],
        [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (5, 5)],
    ],
    ids=str,
)
def test_copy_blocks(pairs, block_size, hkv, d, layout, dtype):
    """All copies read what was there before any of them: chains, swaps and cycles included."""
    for as_tensor in (True, False):
        caches = _numbered(6, block_size, hkv, d, dtype, layout)
        expected = [c.clone() for c in caches]
        for source, destination in pairs:
            for cache, e in zip(caches, expected, strict=True):
                e[destination] = cache[source]
        argument = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2) if as_tensor else pairs
        assert attn_ext.copy_blocks(*caches, argument) is None
        assert_same_bits(caches[0], expected[0], "key_cache")
        assert_same_bits(caches[1], expected[1], "value_cache")
