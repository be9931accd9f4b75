"""Caches that share memory: refused where an element would be written twice, accepted where they only interleave."""

import pytest
import torch

import attn_ext

SHAPE = (4, 4, 2, 8)  # num_blocks, block_size, Hkv, D


def _same():
    cache = torch.zeros(SHAPE)
    return cache, cache


def _shifted():
    buffer = torch.zeros(4 * 4 * 2 * 8 + 16)
    return buffer[:-16].view(SHAPE), buffer[16:].view(SHAPE)


def _repeated(*dims):
    one = [1 if i in dims else n for i, n in enumerate(SHAPE)]
    return torch.zeros(one).expand(SHAPE), torch.zeros(SHAPE)


def _sliding():
    return torch.zeros(300).as_strided(SHAPE, (32, 8, 4, 1)), torch.zeros(SHAPE)


OVERLAPPING = {
    "same tensor": _same,
    "shifted by a token": _shifted,
    "one block for all": lambda: _repeated(0),
    "one head for all": lambda: _repeated(2),
    "one slot of 2^62": lambda: [torch.zeros(1, 1, 1, 1).expand(2, 2**31, 2**30, 1)] * 2,
    "windows": _sliding,
}
APART = {
    "two tensors": lambda: torch.zeros(2, *SHAPE).unbind(),
    "interleaved by block": lambda: torch.zeros(4, 2, 4, 2, 8).unbind(1),
    "interleaved by token": lambda: torch.zeros(4, 4, 2, 2, 8).unbind(2),
    "interleaved by head": lambda: torch.zeros(4, 4, 2, 2, 8).unbind(3),
    "interleaved by element": lambda: torch.zeros(4, 4, 2, 16).split(8, dim=-1),
    "heads first": lambda: torch.zeros(2, 4, 2, 4, 8).transpose(2, 3).unbind(),
    "layers of one buffer": lambda: torch.zeros(3, 2, *SHAPE)[1].unbind(),
}


def _append(key_cache, value_cache):
    rows = torch.ones(3, *key_cache.shape[2:])
    attn_ext.append_kv(rows, 2 * rows, key_cache, value_cache, torch.tensor([4, 7, 2]))


def _project(key_cache, value_cache):
    heads, dim = key_cache.shape[2:]
    x, weight = torch.ones(3, 1), torch.ones(3 * heads * dim, 1)
    weight[2 * heads * dim :] = 2
    slots = torch.tensor([4, 7, 2])
    attn_ext.qkv_projection_to_cache(x, weight, None, key_cache, value_cache, slots, n_heads=heads)


def _copy(key_cache, value_cache):
    attn_ext.copy_blocks(key_cache, value_cache, [(0, 1)])


# Rows of 2^30 heads do not fit in memory, whole blocks of them are only named.
WRITES = [(write, caches) for write in (_append, _project, _copy) for caches in OVERLAPPING]
WRITES = [(write, caches) for write, caches in WRITES if write is _copy or caches != "one slot of 2^62"]


@pytest.mark.parametrize("write,caches", WRITES)
def test_overlapping_caches_are_refused(write, caches):
    key_cache, value_cache = OVERLAPPING[caches]()
    with pytest.raises(
        RuntimeError, match="^[a-z_]+: (key_cache must not overlap itself|value_cache must not overlap)"
    ):
        write(key_cache, value_cache)
    assert not key_cache[:, :1, :1].any() and not value_cache[:, :1, :1].any()


@pytest.mark.parametrize("caches", APART.values(), ids=APART)
@pytest.mark.parametrize("write", [_append, _project])
def test_interleaved_caches_are_written(write, caches):
    key_cache, value_cache = caches()
    write(key_cache, value_cache)
    expected = torch.zeros(SHAPE)
    expected.view(16, 2, 8)[[4, 7, 2]] = 1
    assert torch.equal(key_cache, expected) and torch.equal(value_cache, 2 * expected)


def test_overlapping_caches_can_be_read():
    """Only writing needs them apart."""
    cache = torch.randn(1, 4, 2, 8).expand(SHAPE)
    q, table, lens = (
        torch.randn(1, 1, 2, 8),
        torch.tensor([[2, 0]], dtype=torch.int32),
        torch.tensor([6], dtype=torch.int32),
    )
    out = attn_ext.paged_attention(q, cache, cache, table, lens)
    copy = cache.contiguous()
    assert torch.equal(out, attn_ext.paged_attention(q, copy, copy.clone(), table, lens))
