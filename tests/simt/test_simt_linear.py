"""linear and qkv_projection_to_cache of CUDA under the executor: results, bits, and what the kernels do for them."""

import pytest
import torch
from build import compiler
from executor import far_apart
from kernel_ops import KernelOps
from tolerance import assert_as_accurate_as_torch, assert_same_bits

from attn_ext import reference

pytestmark = pytest.mark.skipif(compiler() is None, reason="no host compiler for the executor's kernels")

# What makes the launcher choose a tile: rows, and multiprocessors to fill.
SMALL, MEDIUM, LARGE = (16, 132), (64, 132), (129, 1)


@pytest.fixture(scope="module")
def ops():
    return KernelOps()


def linear(ops, x, weight, bias=None, *, sms=132, seed=0, **options):
    ops.sms, ops.seed = sms, seed
    return ops.linear(x, weight, bias, **options)


def check(ops, x, weight, bias=None, sms=132, seed=0, **options):
    y = linear(ops, x, weight, bias, sms=sms, seed=seed, **options)
    with reference.precision(torch.float64):
        exact = reference.linear(x, weight, bias, **options)
    with reference.precision(x.dtype):
        plain = reference.linear(x, weight, bias, **options)
    terms = x.double().abs() @ weight.double().abs().T
    terms = terms if bias is None else terms + bias.double().abs()
    multiply, residual = options.get("multiply"), options.get("residual")
    terms = terms if multiply is None else terms * multiply.double().abs()
    terms = terms if residual is None else terms + residual.double().abs()
    assert_as_accurate_as_torch(y, exact, plain, terms=terms.max().item() if terms.numel() else 0.0, what="linear")
    return y


def tile_of(ops):
    """The kernel's rows and columns of a tile."""
    (launch,) = ops.launches
    name = launch["kernel"]
    return (64, 64) if "FloatTile" in name else tuple(int(n) for n in name.split("TensorTile<")[1].split(",")[1:3])


# ---- linear ----------------------------------------------------------------------------------------------------------

# M, N, K: 0, 1, primes, and around the tiles 16 x 32 x 128, 64 x 64 x 64 and (sms = 1) 128 x 128 x 32
SHAPES = [
    (1, 1, 1, 132), (1, 32, 128, 132), (2, 33, 127, 132), (15, 31, 129, 132), (16, 65, 8, 132), (3, 40, 600, 132),
    (17, 64, 64, 132), (63, 65, 65, 132), (64, 127, 16, 132), (65, 7, 200, 132), (70, 72, 63, 132),
    (127, 130, 32, 1), (129, 127, 33, 1), (128, 128, 160, 1), (131, 256, 24, 1),
]  # fmt: skip


@pytest.mark.parametrize(("M", "N", "K", "sms"), SHAPES)
def test_shapes(ops, dtype, M, N, K, sms):
    x, weight = torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype)
    check(ops, x, weight, sms=sms)
    bias, residual = torch.randn(N).to(dtype), torch.randn(M, N).to(dtype)
    check(ops, x, weight, bias, activation="gelu_tanh", residual=residual, sms=sms, seed=M)


@pytest.mark.parametrize("rows,sms", [SMALL, MEDIUM, LARGE])
def test_schedules(ops, dtype, rows, sms):
    x, weight = torch.randn(rows, 104).to(dtype), torch.randn(96, 104).to(dtype)
    first = check(ops, x, weight, sms=sms)
    for seed in range(1, 5):
        assert_same_bits(linear(ops, x, weight, sms=sms, seed=seed), first)


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("N", [36, 37])
def test_epilogues(ops, dtype, activation, N):
    x, weight = torch.randn(14, 40).to(dtype), torch.randn(N, 40).to(dtype) / 6
    bias, residual, multiply = torch.randn(N).to(dtype), torch.randn(14, N).to(dtype), torch.randn(14, N).to(dtype)
    check(ops, x, weight, activation=activation)
    check(ops, x, weight, bias, activation=activation)
    check(ops, x, weight, activation=activation, residual=residual)
    check(ops, x, weight, activation=activation, multiply=multiply)
    check(ops, x, weight, bias, activation=activation, multiply=multiply, residual=residual)


@pytest.mark.parametrize("rows,sms", [SMALL, MEDIUM, LARGE])
def test_any_stride_and_alignment(ops, dtype, rows, sms):
    """The same bits as from contiguous tensors."""
    K, N = 72, 44
    x, weight, bias = torch.randn(rows, K).to(dtype), torch.randn(N, K).to(dtype), torch.randn(N).to(dtype)
    residual, multiply = torch.randn(rows, N).to(dtype), torch.randn(rows, N).to(dtype)
    right = check(ops, x, weight, bias, residual=residual, multiply=multiply, sms=sms)

    def strided(t, before, after):
        wide = torch.full((*t.shape[:-1], before + t.shape[-1] + after), torch.nan, dtype=dtype)
        return wide[..., before : before + t.shape[-1]].copy_(t)

    for before, after in [(0, 8), (1, 0), (8, 3)]:
        for changed in ("x", "weight", "bias", "residual", "multiply"):
            tensors = {"x": x, "weight": weight, "bias": bias, "residual": residual, "multiply": multiply}
            tensors[changed] = strided(tensors[changed], before, after)
            assert_same_bits(linear(ops, **tensors, sms=sms), right, changed)


@pytest.mark.parametrize("K", [64, 77, 264])
def test_bits_of_a_row_and_column_are_their_own(ops, dtype, K):
    """Whatever tile computes them: the decode of a token and its prefill, a fused and a separate product."""
    M, N = 130, 136
    x, weight = torch.randn(M, K).to(dtype), torch.randn(N, K).to(dtype)
    bias, residual, multiply = torch.randn(N).to(dtype), torch.randn(M, N).to(dtype), torch.randn(M, N).to(dtype)

    def epilogue(rows=slice(None), columns=slice(None)):
        return {"activation": "silu", "residual": residual[rows, columns], "multiply": multiply[rows, columns]}

    whole = linear(ops, x, weight, bias, sms=1, **epilogue())
    tiles = {tile_of(ops)}
    for rows, sms in [(M, 132), (65, 132), (33, 132), (16, 132), (1, 132)]:
        some = slice(M - rows, M)
        y = linear(ops, x[some], weight, bias, sms=sms, seed=rows, **epilogue(some))
        assert_same_bits(y, whole[some], f"{rows} rows")
        tiles.add(tile_of(ops))
    assert tiles == ({(64, 64)} if dtype == torch.float32 else {(16, 32), (64, 64), (128, 128)})
    for columns in [slice(0, 40), slice(3, 136), slice(131, 132)]:
        y = linear(ops, x, weight[columns], bias[columns], **epilogue(columns=columns))
        assert_same_bits(y, whole[:, columns])


def test_offsets_beyond_32_bits(ops):
    x, weight, residual, multiply = (torch.randn(2, n).bfloat16() for n in (40, 40, 2, 2))
    right = check(ops, x, weight, residual=residual, multiply=multiply)
    apart = {"residual": far_apart(residual), "multiply": far_apart(multiply)}
    assert_same_bits(linear(ops, far_apart(x), far_apart(weight), **apart), right)


def test_nan_of_other_rows_stays_there(ops, dtype):
    x, weight = torch.randn(20, 40).to(dtype), torch.randn(24, 40).to(dtype)
    clean = linear(ops, x, weight)
    x[3], weight[5, 7] = torch.nan, torch.inf
    y = linear(ops, x, weight)
    rows, columns = [i for i in range(20) if i != 3], [j for j in range(24) if j != 5]
    assert y[3].isnan().all() and not y[rows][:, 5].isfinite().any()
    assert_same_bits(y[rows][:, columns], clean[rows][:, columns])


def test_no_terms_is_the_epilogue_alone(ops, dtype):
    bias = torch.randn(9).to(dtype)
    assert_same_bits(linear(ops, torch.empty(3, 0).to(dtype), torch.empty(9, 0).to(dtype), bias), bias.expand(3, 9))


def test_nothing_launches_nothing(ops, dtype):
    for M, N in [(0, 8), (8, 0)]:
        linear(ops, torch.empty(M, 8).to(dtype), torch.empty(N, 8).to(dtype))
        assert ops.launches == []


# ---- qkv_projection_to_cache -----------------------------------------------------------------------------------------


def qkv_to_cache(ops, x, weight, bias, caches, slots, H, Hkv, rope=None, sms=132, seed=0):
    ops.sms, ops.seed = sms, seed
    return ops.qkv_projection_to_cache(x, weight, bias, *caches, slots, n_heads=H, n_kv_heads=Hkv, rope=rope)


def make_problem(H, Hkv, D, tokens, dtype, block_size=4, heads_first=False, K=40):
    x = torch.randn(tokens, K).to(dtype)
    weight, bias = (torch.randn((H + 2 * Hkv) * D, K) / K**0.5).to(dtype), torch.randn((H + 2 * Hkv) * D).to(dtype)
    blocks = tokens // block_size + 2
    shape = (blocks, Hkv, block_size, D) if heads_first else (blocks, block_size, Hkv, D)
    caches = [torch.randn(shape).to(dtype) for _ in range(2)]
    if heads_first:
        caches = [cache.transpose(1, 2) for cache in caches]
    slots = torch.randperm(blocks * block_size)[:tokens]
    slots[torch.rand(tokens) < 0.2] = -1
    angles = torch.rand(50, D // 2) * 6
    rope = (angles.cos(), angles.sin(), torch.randint(50, (tokens,))) if D % 2 == 0 else None
    return x, weight, bias, caches, slots, rope


HEADS = [(1, 1, 1), (2, 1, 7), (3, 1, 6), (2, 2, 8), (4, 2, 24), (2, 1, 64), (6, 2, 80), (2, 1, 128), (1, 1, 256)]


@pytest.mark.parametrize(("H", "Hkv", "D"), HEADS)
@pytest.mark.parametrize("rows,sms", [(5, 132), (21, 132), (65, 1)])
def test_qkv_to_cache(ops, dtype, H, Hkv, D, rows, sms):
    x, weight, some_bias, caches, slots, some_rope = make_problem(H, Hkv, D, rows, dtype, heads_first=D % 3 == 0)
    for bias, rope in [(some_bias, some_rope), (None, None)]:
        exact, plain = [c.double() for c in caches], [c.clone() for c in caches]
        with reference.precision(torch.float64):
            q_exact = reference.qkv_projection_to_cache(
                x, weight, bias, *exact, slots, n_heads=H, n_kv_heads=Hkv, rope=rope
            )
        with reference.precision(dtype):
            q_plain = reference.qkv_projection_to_cache(
                x, weight, bias, *plain, slots, n_heads=H, n_kv_heads=Hkv, rope=rope
            )
        q = qkv_to_cache(ops, x, weight, bias, caches, slots, H, Hkv, rope, sms=sms, seed=rows)
        terms = 1.5 * (x.double().abs() @ weight.double().abs().T).max().item() + 3  # rotated, with bias
        results = zip(("q", "k", "v"), [q, *caches], [q_exact, *exact], [q_plain, *plain], strict=True)
        for name, got, right, other in results:
            assert_as_accurate_as_torch(got, right, other, terms=terms, what=name)


@pytest.mark.parametrize("rows,sms", [SMALL, MEDIUM, LARGE])
@pytest.mark.parametrize("D", [6, 64])
def test_qkv_to_cache_is_linear_to_the_bit(ops, dtype, rows, sms, D):
    """Without rotation; and with it, whatever the tile: one row alone has the bits it has among others."""
    H, Hkv = 3, 1
    x, weight, bias, caches, slots, rope = make_problem(H, Hkv, D, rows, dtype)
    right = linear(ops, x, weight, bias).view(rows, H + 2 * Hkv, D).split([H, Hkv, Hkv], 1)
    expected = [cache.clone() for cache in caches]
    reference.append_kv(*right[1:], *expected, slots)
    q = qkv_to_cache(ops, x, weight, bias, caches, slots, H, Hkv, sms=sms)
    for got, wanted in zip([q, *caches], [right[0], *expected], strict=True):
        assert_same_bits(got, wanted)

    q = qkv_to_cache(ops, x, weight, bias, caches, slots, H, Hkv, rope, sms=sms)
    row = int((slots >= 0).nonzero()[-1])
    one = slice(row, row + 1)
    again = [cache.clone() for cache in caches]
    for cache in again:
        cache.flatten(0, 1)[slots[one]] = 0
    position = (rope[0], rope[1], rope[2][one])
    q_row = qkv_to_cache(ops, x[one], weight, bias, again, slots[one], H, Hkv, position)
    for got, wanted in zip([q_row, *again], [q[one], *caches], strict=True):
        assert_same_bits(got, wanted)


def test_qkv_to_cache_keeps_to_the_cache_and_the_tables(ops, dtype):
    """The host cannot read slots and positions on a device: bad ones write nothing, and read no other memory."""
    x, weight, bias, caches, slots, rope = make_problem(2, 1, 16, 6, dtype)
    slots.copy_(torch.tensor([-5, 1 << 50, len(caches[0]) * 4, 1, -1, 2]))
    before = [cache.clone() for cache in caches]
    cos, sin, _ = rope
    positions = torch.tensor([-1, 50, 1 << 40, 3, -(1 << 60), 49])
    qkv_to_cache(ops, x, weight, bias, caches, slots, 2, 1, (cos, sin, positions))
    for cache, old in zip(caches, before, strict=True):
        changed = (cache != old).flatten(2).any(2).flatten()
        assert changed.nonzero().flatten().tolist() == [1, 2]


# ---- counters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("M", "N", "K", "sms", "tile"), [
    (16, 64, 256, 132, (16, 32, 128)), (64, 128, 128, 132, (64, 64, 64)), (256, 128, 96, 1, (128, 128, 32)),
])  # fmt: skip
def test_counters(ops, M, N, K, sms, tile):
    """Each tile reads its rows of x and W once, in whole sectors; shared memory has no bank conflict."""
    x, weight = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
    bias, residual = torch.randn(N).bfloat16(), torch.randn(M, N).bfloat16()
    linear(ops, x, weight, bias, residual=residual, multiply=residual.clone(), activation="gelu", sms=sms)
    (launch,) = ops.launches
    tile_m, tile_n, depth = tile
    m_tiles, n_tiles, steps = M // tile_m, N // tile_n, K // depth
    assert launch["blocks"] == m_tiles * n_tiles
    assert launch["mma"] == M * N * K // (16 * 8 * 16)
    assert launch["traffic"]["x"]["load_sectors"] == n_tiles * M * K * 2 // 32
    assert launch["traffic"]["weight"]["load_sectors"] == m_tiles * N * K * 2 // 32
    assert launch["traffic"]["residual"]["load_sectors"] == M * N * 2 // 32
    assert launch["traffic"]["multiply"]["load_sectors"] == M * N * 2 // 32
    assert launch["traffic"]["y"]["store_sectors"] == M * N * 2 // 32
    assert launch["ldmatrix_wavefronts"] == launch["ldmatrix_ideal"] > 0
    assert launch["shared_load_wavefronts"] == launch["shared_load_ideal"] > 0
    assert launch["shared_store_wavefronts"] == launch["shared_store_ideal"] > 0
    assert launch["barriers"] == launch["blocks"] * (steps + 2)


def test_cache_rows_are_written_in_whole_sectors(ops):
    H, Hkv, D, tokens = 4, 2, 64, 64
    x, weight, bias, caches, slots, rope = make_problem(H, Hkv, D, tokens, torch.bfloat16)
    slots = torch.randperm(len(caches[0]) * 4)[:tokens]
    qkv_to_cache(ops, x, weight, bias, caches, slots, H, Hkv, rope)
    (launch,) = ops.launches
    assert launch["traffic"]["q"]["store_sectors"] == tokens * H * D * 2 // 32
    assert launch["traffic"]["key_cache"]["store_sectors"] == tokens * Hkv * D * 2 // 32
    assert launch["traffic"]["value_cache"]["store_sectors"] == tokens * Hkv * D * 2 // 32
