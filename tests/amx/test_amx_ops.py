"""The ops on tiles, beyond what the op suite asks of every backend: sizes around those of tiles, memory that tiles can
and cannot be loaded from, and what the instructions cost."""

import contextlib
import math
import os
import random
import signal
import time

import emulator
import pytest
import torch
import torch.nn.functional as F
from tolerance import assert_as_accurate_as_torch, assert_same_bits

import attn_ext
from attn_ext import reference

BF16 = torch.bfloat16
EMULATES = emulator.possible()  # else the instructions are real, and nobody counts them
counts_instructions = pytest.mark.skipif(not EMULATES, reason="only the emulator counts instructions")
AROUND = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65]


@pytest.fixture(autouse=True)
def amx():
    with emulator.running() if EMULATES else contextlib.nullcontext(), attn_ext.use_backend("amx"):
        yield


def aligned(*shape, offset=0):
    """Random bfloat16 that begin `offset` elements behind a multiple of 64 bytes."""
    count = math.prod(shape)
    memory = torch.empty(count + offset + 32, dtype=BF16)
    begin = -memory.data_ptr() % 64 // 2 + offset
    return memory[begin : begin + count].view(shape).copy_(torch.randn(shape))


# ------------------------------------------------------------------------------------------------ linear


def check_linear(m, k, n):
    x, weight, bias = torch.randn(m, k).to(BF16), torch.randn(n, k).to(BF16), torch.randn(n).to(BF16)
    y = attn_ext.linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    terms = F.linear(x.abs().double(), weight.abs().double()).max().item()
    assert_as_accurate_as_torch(y, exact, F.linear(x, weight, bias), terms=terms, what=f"{m} x {k} x {n}")
    row = random.randrange(m)
    assert_same_bits(attn_ext.linear(x[row : row + 1], weight, bias), y[row : row + 1], f"row {row} alone")
    if n % 16 == 0 and k % 2 == 0:
        assert_same_bits(attn_ext.linear(x, attn_ext.pack_weight(weight), bias), y, "packed")


@pytest.mark.parametrize("size", AROUND)
def test_linear_around_a_tile(size):
    check_linear(size, 70, 50)
    check_linear(20, size, 50)
    check_linear(20, 70, size)


@pytest.mark.parametrize("seed", range(40))
def test_linear_of_any_size(seed):
    r = random.Random(seed)
    check_linear(*(r.choice([*AROUND, 127, 128, 129, 500, 514]) for _ in range(3)))


@pytest.mark.parametrize(("m", "k"), [(7, 64), (40, 64), (40, 512), (600, 64)])
def test_rows_of_x_may_lie_anywhere(m, k):
    """In lines of the cache, across them, far apart: the same bits."""
    weight = torch.randn(48, k).to(BF16)
    x = aligned(m, k)
    expected = attn_ext.linear(x, weight)
    for other in (aligned(m, k, offset=1), aligned(m, k + 3)[:, 1 : k + 1], aligned(m, k + 32)[:, :k]):
        assert_same_bits(attn_ext.linear(other.copy_(x), weight), expected)


@pytest.mark.parametrize("head_dim", [8, 16, 20, 48, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_heads_need_not_fill_tiles(head_dim, packed):
    """With a packed weight a head may begin in the middle of a tile."""
    heads, kv_heads, m, k = 4, 2, 19, 70
    x, weight = torch.randn(m, k).to(BF16), torch.randn((heads + 2 * kv_heads) * head_dim, k).to(BF16)
    cos, sin = torch.randn(2, 30, head_dim // 2).unbind(0)
    positions, slots = torch.randint(30, (m,)), torch.randperm(m)
    kv = torch.zeros(2, m, 1, kv_heads, head_dim, dtype=BF16)
    arguments = {"n_heads": heads, "n_kv_heads": kv_heads, "rope": (cos, sin, positions)}
    given = attn_ext.pack_weight(weight) if packed else weight
    q = attn_ext.qkv_projection_to_cache(x, given, None, *kv, slots, **arguments)
    exact = torch.zeros_like(kv).double()
    exact_q = reference.qkv_projection_to_cache(x.double(), weight.double(), None, *exact, slots, **arguments)
    for ours, e in ((q, exact_q), *zip(kv, exact, strict=True)):
        error = (ours.double() - e).abs().max().item()
        assert error <= 2**-8 * e.abs().max().item()


# ---------------------------------------------------------------------------------------------- attention


def check_attention(tq, tk, heads, kv_heads, head_dim, **options):
    q, k, v = (torch.randn(1, t, h, head_dim).to(BF16) for t, h in ((tq, heads), (tk, kv_heads), (tk, kv_heads)))
    out, lse = attn_ext.attention(q, k, v, return_lse=True, **options)
    exact, exact_lse = reference.attention(q.double(), k.double(), v.double(), return_lse=True, **options)
    plain, plain_lse = reference.attention(q, k, v, return_lse=True, **options)
    what = f"{tq} x {tk}, heads {heads}/{kv_heads}, D {head_dim}"
    assert_as_accurate_as_torch(out, exact, plain, terms=v.abs().max().item(), what=what)
    assert_as_accurate_as_torch(lse, exact_lse, plain_lse, terms=16.0, what=f"{what}: lse")
    row = random.randrange(tq)
    if options.get("causal"):
        seen = row + tk - tq + 1
        if seen <= 0:
            return
        k, v = k[:, :seen], v[:, :seen]
    alone, alone_lse = attn_ext.attention(q[:, row : row + 1], k, v, return_lse=True, **options)
    assert_same_bits(alone, out[:, row : row + 1], f"{what}: row {row} alone")
    assert_same_bits(alone_lse, lse[..., row : row + 1], f"{what}: lse of row {row} alone")


@pytest.mark.parametrize("size", AROUND)
def test_attention_around_a_tile(size):
    check_attention(size, 70, 2, 2, 40, causal=True)
    check_attention(5, size, 3, 1, 40)
    check_attention(5, 70, 2, 1, size, causal=True)


@pytest.mark.parametrize("seed", range(40))
def test_attention_of_any_size(seed):
    r = random.Random(seed)
    kv_heads = r.choice([1, 2])
    tq, tk = r.choice([*AROUND, 127, 129]), r.choice([*AROUND, 127, 129, 511, 513])
    check_attention(
        tq, tk, kv_heads * r.choice([1, 3, 16, 17]), kv_heads, r.choice(AROUND[:-1]), causal=r.random() < 0.5
    )


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("head_dim", [32, 64, 80])
def test_keys_may_lie_anywhere(rows, head_dim):
    """Tiles of keys in place, of copies, of far rows, of pages that hold a tile, of others: the same bits."""
    tk = 150
    q = torch.randn(1, rows, 4, head_dim).to(BF16)
    k, v = aligned(1, tk, 2, head_dim), aligned(1, tk, 2, head_dim)
    expected = attn_ext.attention(q, k, v, causal=True)
    for shape, offset in (((1, tk, 2, head_dim), 1), ((1, tk, 2, head_dim + 3), 0), ((1, tk, 16, 512), 0)):
        other_k, other_v = (aligned(*shape, offset=offset)[:, :, :2, :head_dim].copy_(x) for x in (k, v))
        assert_same_bits(attn_ext.attention(q, other_k, other_v, causal=True), expected, str(shape))
    for block_size in (16, 32, 24, 7):
        blocks = -(-tk // block_size)
        caches = [torch.full((blocks, block_size, 2, head_dim), math.nan, dtype=BF16) for _ in "kv"]
        for cache, x in zip(caches, (k, v), strict=True):
            cache.flatten(0, 1)[:tk] = x[0]
        order = torch.randperm(blocks)
        table = torch.empty(1, blocks, dtype=torch.int32)
        table[0, order] = torch.arange(blocks, dtype=torch.int32)
        caches = [cache[order] for cache in caches]
        out = attn_ext.paged_attention(q, *caches, table, torch.tensor([tk], dtype=torch.int32), causal=True)
        assert_same_bits(out, expected, f"blocks of {block_size}")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_not_finite_reach_only_rows_that_see_them(value):
    """Rows of one tile before and behind the key; the finite elements of the key count."""
    t = 100
    q, k, v = (torch.randn(1, t, 2, 24).to(BF16) for _ in range(3))
    expected = attn_ext.attention(q, k, v, causal=True)
    v[0, 40, 1, 3] = value
    out = attn_ext.attention(q, k, v, causal=True)
    assert not out[0, 40:, 1, 3].isfinite().any()
    out[0, 40:, 1, 3] = expected[0, 40:, 1, 3]
    assert_same_bits(out, expected)


# --------------------------------------------------------------------------------------- types, threads, forks


@counts_instructions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_those_of_avx512(dtype):
    x, weight = torch.randn(9, 40).to(dtype), torch.randn(48, 40).to(dtype)
    q = torch.randn(1, 9, 4, 16).to(dtype)

    def run():
        caches = torch.zeros(2, 9, 1, 1, 12, dtype=dtype)
        projected = attn_ext.qkv_projection_to_cache(x, weight, None, *caches, torch.arange(9), n_heads=2, n_kv_heads=1)
        return attn_ext.linear(x, weight), projected, caches, attn_ext.attention(q, q, q, causal=True)

    with emulator.counting() as counts:
        results = run()
    assert counts["traps"] == 0
    with attn_ext.use_backend("avx512"):
        for ours, other in zip(results, run(), strict=True):
            assert_same_bits(ours, other)


@pytest.fixture
def work():
    x, weight, q = torch.randn(200, 70).to(BF16), torch.randn(64, 70).to(BF16), torch.randn(1, 300, 4, 32).to(BF16)
    return lambda: [attn_ext.linear(x, weight), attn_ext.attention(q, q[:, :, :2], q[:, :, 2:], causal=True)]


@counts_instructions
def test_every_configuration_is_released(threads, work):
    for n in (1, 4):
        threads(n)
        with emulator.counting() as counts:
            work()
        assert counts["ldtilecfg"] == counts["tilerelease"] > 0 and emulator.configured() == 0


def test_a_forked_child(threads, work):
    """Its threads are new ones, without a configuration."""
    threads(2)
    expected = work()
    child = os.fork()
    if child == 0:
        results = work()
        torch.set_num_threads(1)  # torch's own operators wait for threads that a child does not have
        same = all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        os._exit(0 if same and not (EMULATES and emulator.configured()) else 1)
    for _ in range(600):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise AssertionError("the child hangs")
    assert status == 0


# ------------------------------------------------------------------------------------------------ what it costs


@counts_instructions
def test_the_cost_of_linear():
    """Products of tiles are those of the matrices, a load feeds one or, where few rows wait for memory, half of one;
    sums are stored once, and all are whole lines."""
    n, k = 256, 768
    for m, packed in ((128, True), (128, False), (8, True), (1, True), (1, False)):
        x, weight = aligned(m, k), aligned(n, k)
        if packed:
            weight = attn_ext.pack_weight(weight)
        with emulator.counting() as counts:
            attn_ext.linear(x, weight)
        tiles = -(-m // 16) * n // 16
        assert counts["tdpbf16ps"] == tiles * k // 32
        assert counts["tileloadd"] == counts["tdpbf16ps"] * (1.0 if m > 16 else 2.0)
        assert counts["tilestored"] == tiles and counts["unaligned_rows"] == 0


@counts_instructions
def test_the_cost_of_attention():
    t, d = 384, 64
    q, k, v = (aligned(1, t, 1, d) for _ in range(3))
    with emulator.counting() as counts:
        attn_ext.attention(q, k, v)
    pairs = t // 32  # of blocks of 16 rows; a step of 64 keys takes a pair
    steps, tiles, depth = pairs * (t // 64), d // 16, d // 32
    sums = pairs * 2 * tiles  # they stay in tiles for 256 keys
    assert counts["tdpbf16ps"] == steps * (8 * depth + 4 * tiles)
    scores = 6 * depth  # loads of K once, of Q^T once: it fits in registers beside K
    assert counts["tileloadd"] == steps * (scores + 4 * tiles) + sums  # the first 256 keys add to nothing
    assert counts["tilestored"] == steps * 8 + 2 * sums and counts["unaligned_rows"] == 0
    with emulator.counting() as causal:
        attn_ext.attention(q, k, v, causal=True)
    seen = sum(-(-(row + 32) // 64) for row in range(0, t, 32))  # steps that pairs see something of
    assert causal["tdpbf16ps"] == seen * (8 * depth + 4 * tiles)
