"""Subnormal numbers count as 0 in x86 arithmetic of float32, bfloat16 and float16: the errors that this makes, and what
it leaves alone: float64, bits that are only moved, float16's own subnormal numbers (normal ones of float32), rows of
normal numbers beside them, and the mode of the threads. Attention over subnormal values is in test_attention.py.

All bounds follow from two facts: an operand changes by less than TINY, and so does a result. On top of that come the
roundings that any other numbers would suffer.
"""

import platform

import pytest
import torch
import torch.nn.functional as F
from tolerance import assert_same_bits

import attn_ext
from attn_ext import reference


@pytest.fixture(autouse=True)
def on_x86(backend):
    if backend == "cuda" or platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("other processors compute with subnormal numbers at full speed")


TINY = 2.0**-126  # the smallest normal number of float32 and bfloat16
SIZES = [2.0**-149, 2.0**-130, 2.0**-126, 2.0**-118, 2.0**-100]
with_float32_exponents = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def assert_within(actual, exact, bound, what="result"):
    excess = ((actual.double() - exact).abs() - bound).flatten()
    worst = excess.argmax()
    assert not torch.isnan(excess).any() and excess[worst] <= 0, (
        f"{what}: {actual.flatten()[worst].item()!r}, exact {exact.flatten()[worst].item()!r}: "
        f"{excess[worst].item():.3e} more than allowed"
    )


def roundings(dtype, count):
    """Of `count` sums in float32, then of the result."""
    return count * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps


# -------------------------------------------------------------------------------------------------------- the errors


@with_float32_exponents
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 9, 33])
def test_linear(rows, size, dtype):
    k = 300
    x, weight, bias = (torch.randn(rows, k) * size).to(dtype), torch.randn(40, k).to(dtype), torch.randn(40).to(dtype)
    bias = (bias * size).to(dtype)
    wide = [t.double() for t in (x, weight, bias)]
    exact = F.linear(*wide)
    # Operands: the sum of |x| TINY + |w| TINY + TINY^2, and the bias. Results: k products, k sums, 2 between blocks.
    operands = wide[0].abs().sum(1, keepdim=True) + wide[1].abs().sum(1) + k * TINY + 1
    terms = F.linear(*(t.abs() for t in wide))
    bound = (operands + 2 * k + 2) * TINY + roundings(dtype, k) * terms
    assert_within(attn_ext.linear(x, weight, bias), exact, bound)


@with_float32_exponents
def test_masked_softmax(dtype):
    """Weights of exp(-100) to 1: a result of less than TINY may be 0."""
    scores = -100 * torch.rand(5, 300).to(dtype)
    scores[:, 7] = 0
    exact = torch.softmax(scores.double(), -1)
    bound = 3 * TINY + (roundings(dtype, 300) + 100 * torch.finfo(torch.float32).eps) * exact  # weight, sum, quotient
    assert_within(attn_ext.masked_softmax(scores), exact, bound)
    none = attn_ext.masked_softmax((torch.rand(3, 8) * TINY).to(dtype), mask=torch.rand(3, 8) * TINY)
    assert_same_bits(none, torch.full_like(none, 1 / 8))


@with_float32_exponents
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("eps", [1e-5, 1e-30, 1e-37, 1e-40, 0.0])
@pytest.mark.parametrize("exponent", [-140, -120, -90, -64, -60, -45, 0])
def test_norms(exponent, eps, norm, dtype):
    """Rows whose squares are subnormal, or 0 in float32, and an eps of that size, count."""
    n = 300
    x, weight, bias = (torch.randn(4, n) * 2.0**exponent).to(dtype), torch.randn(n).to(dtype), torch.zeros(n).to(dtype)
    if eps == 0 and exponent < -126:
        pytest.skip("0 / 0")
    if norm == "rms_norm":
        y, exact = attn_ext.rms_norm(x, weight, eps), reference.rms_norm(x.double(), weight.double(), eps)
        square = x.double().square().mean(1, keepdim=True)
    else:
        y = attn_ext.layer_norm(x, weight, bias, eps)
        exact = reference.layer_norm(x.double(), weight.double(), bias.double(), eps)
        square = x.double().var(1, correction=0, keepdim=True)
    # y = d r w with d = x or x - mean, r = 1 / sqrt(mean(d^2) + eps). Each d changes by at most 2 TINY (x and mean), so
    # r by r^2 times that, and |d| r is at most sqrt(n). The results of the last two products change by TINY each.
    factor = (square + eps).rsqrt() * weight.double().abs()
    bound = 2 * TINY * factor * (1 + n**0.5) + (weight.double().abs() + 1) * TINY
    bound = bound + 4 * torch.finfo(dtype).eps * exact.abs() + 1e-6 * weight.double().abs() * (square * factor > 0)
    assert_within(y, exact, bound)


def test_norms_of_zeros_with_a_subnormal_eps():
    x, weight = torch.zeros(2, 20), torch.ones(20)
    assert_same_bits(attn_ext.rms_norm(x, weight, 1e-40), x)
    assert_same_bits(attn_ext.layer_norm(x + 3, weight, None, 1e-40), x)


@with_float32_exponents
@pytest.mark.parametrize("size", SIZES)
def test_merge_attention(size, dtype):
    outs = [(torch.randn(2, 9, 3, 24) * size).to(dtype) for _ in "ab"]
    lses = [torch.randn(2, 3, 9) * 5 for _ in "ab"]
    out, lse = attn_ext.merge_attention(outs[0], lses[0], outs[1], lses[1])
    exact, exact_lse = reference.merge_attention(outs[0].double(), lses[0].double(), outs[1].double(), lses[1].double())
    largest = max(t.abs().max().item() for t in outs)
    # Weights sum to 1; two products and their sum. An ulp in an lse moves a weight by |lse| ulps.
    assert_within(out, exact, (1 + 3) * TINY + roundings(dtype, 40) * largest)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


def test_results_that_are_subnormal_are_zero():
    """The same on every backend, in a vector's body and tail."""
    y = attn_ext.linear(torch.full((20, 1), 1e-30), torch.full((37, 1), 1e-10))
    assert_same_bits(y, torch.zeros_like(y))
    y = attn_ext.rms_norm(torch.ones(3, 37), torch.full((37,), 1e-40), 0.0)
    assert_same_bits(y, torch.zeros_like(y))


# -------------------------------------------------------------------------------------------- parameters that are tiny


@with_float32_exponents
@pytest.mark.parametrize("scale", [1e-38, -1e-38, 1e-39, 1e-40, 3e-45])
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_a_subnormal_scale_counts(scale, rows, dtype):
    q, k, v = (torch.randn(1, n, 1, 32).to(dtype) for n in (rows, 70, 70))
    q, k = ((t.float() * 2e18).to(dtype) for t in (q, k))
    out, lse = attn_ext.attention(q, k, v, scale=scale, return_lse=True)
    exact, exact_lse = reference.attention(q.double(), k.double(), v.double(), scale=scale, return_lse=True)
    assert_within(out, exact, 8 * torch.finfo(dtype).eps)
    assert_within(lse, exact_lse, 1e-5)
    scores = torch.einsum("bthd,bshd->bhts", q.float(), k.float())
    weights = attn_ext.masked_softmax(scores, scale=scale)
    assert_within(weights, torch.softmax(scores.double() * scale, -1), 1e-6)
    masked = attn_ext.masked_softmax(scores, torch.zeros(70), scale=scale)
    assert_same_bits(masked, weights)


@with_float32_exponents
@pytest.mark.parametrize("softcap", [1e30, 1e38, 3e38])
@pytest.mark.parametrize("rows", [1, 4, 20])
def test_a_softcap_that_makes_scores_subnormal_leaves_them(softcap, rows, dtype):
    q, k, v = (torch.randn(1, n, 1, 32).to(dtype) for n in (rows, 70, 70))
    out, lse = attn_ext.attention(q, k, v, softcap=softcap, return_lse=True)
    plain, plain_lse = attn_ext.attention(q, k, v, return_lse=True)
    assert_within(out, plain.double(), 8 * torch.finfo(dtype).eps)
    assert_within(lse, plain_lse.double(), 1e-5)


# --------------------------------------------------------------------------------------------- what it does not touch


@with_float32_exponents
def test_rows_of_normal_numbers_beside_subnormal_ones(dtype):
    """... have the bits that they have alone; the others have those that they have alone, too."""
    size = torch.tensor([1.0, 1e-39, 1e-42, 1.0, 1e-38, 1e-20] * 4)

    def rows(*shape):
        return (torch.randn(24, *shape) * size.view(-1, *[1] * len(shape))).to(dtype)

    def same(op, *tensors):
        together = op(*tensors)
        for r in range(24):
            assert_same_bits(op(*(t[r : r + 1] for t in tensors)), together[r : r + 1], f"row {r}")

    weight, bias, residual = torch.randn(40, 50).to(dtype), torch.randn(40).to(dtype), rows(40)
    weight[::3] = (weight[::3].float() * 1e-39).to(dtype)
    same(lambda x, z: attn_ext.linear(x, weight, bias, activation="gelu", residual=z), rows(50), residual)
    same(attn_ext.masked_softmax, rows(50))
    same(lambda x: attn_ext.rms_norm(x, weight[0]), rows(50))
    same(lambda x: attn_ext.layer_norm(x, weight[0], weight[1], 1e-40), rows(50))
    k, v = ((torch.randn(1, 600, 1, 32) * 10.0 ** (-torch.rand(600, 1, 1) * 45)).to(dtype) for _ in "kv")
    q = rows(1, 32)[None]
    together = attn_ext.attention(q, k, v)
    for r in range(24):
        assert_same_bits(attn_ext.attention(q[:, r : r + 1], k, v), together[:, r : r + 1], f"row {r}")
    lse = torch.randn(24, 2, 1)
    lse[::5] = 1e-40
    same(lambda a, b, la, lb: attn_ext.merge_attention(a, la, b, lb)[0], rows(1, 2, 32), rows(1, 2, 32), lse, -lse)


def every(dtype):
    """Every finite number of a 16-bit type, in rows of 64."""
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()].view(-1, 64)


def test_float16_is_exact_whatever_its_size():
    """Read: by each op, as factor and as value. Written: 0.75 x is rounded as torch rounds it."""
    x = every(torch.float16)
    values = x.view(-1, 1, 1, 64)
    assert torch.equal(attn_ext.attention(values * 0, values * 0, values), values)
    for packed in (False, True):
        weight = torch.eye(64).half() * 0.75
        y = attn_ext.linear(x, attn_ext.pack_weight(weight) if packed else weight)
        assert torch.equal(y, (x.float() * 0.75).half())
    assert torch.equal(attn_ext.linear(torch.eye(64).half(), x[:16]), x[:16].T)
    lse = torch.full((len(x), 1, 1), 100.0)  # of one side; the other adds nothing
    assert torch.equal(attn_ext.merge_attention(values, lse, values, -lse)[0], values)
    smallest = torch.full((1, 4), 2.0**-24).half()
    assert torch.equal(attn_ext.rms_norm(smallest, torch.ones(4).half(), 0.0), torch.ones(1, 4).half())
    mask = torch.tensor([[2.0**-24, 0.0]]).half()
    weights = attn_ext.masked_softmax(torch.zeros(1, 2).half(), mask, scale=1.0)
    assert torch.equal(weights, torch.full((1, 2), 0.5).half())
    weights = attn_ext.masked_softmax(torch.tensor([[0.0, -16.0, -16.5]]).half())
    assert torch.equal(weights, torch.softmax(torch.tensor([[0.0, -16.0, -16.5]]).double(), -1).half())


def test_bfloat16_is_exact_where_it_is_normal():
    values = every(torch.bfloat16).view(-1, 1, 1, 64)
    out = attn_ext.attention(values * 0, values * 0, values)
    normal = values.abs() >= TINY
    assert torch.equal(out[normal], values[normal]) and (out[~normal].abs() < TINY).all()


def test_what_is_moved_keeps_its_bits():
    for dtype, integer in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)):
        low = torch.arange(1, 1 + 4 * 3 * 2 * 16).view(12, 2, 16).to(integer).view(dtype)  # the smallest of each type
        key_cache, value_cache = torch.zeros(4, 3, 2, 16, dtype=dtype), torch.zeros(4, 3, 2, 16, dtype=dtype)
        attn_ext.append_kv(low, -low, key_cache, value_cache, torch.arange(12))
        assert_same_bits(key_cache.view(12, 2, 16), low)
        assert_same_bits(value_cache.view(12, 2, 16), -low)
        attn_ext.copy_blocks(key_cache, value_cache, torch.tensor([[0, 3], [1, 2]]))
        assert_same_bits(key_cache[[3, 2]].view(6, 2, 16), low[:6])
        weight = low.view(24, 16)[:16].contiguous()
        assert_same_bits(attn_ext.unpack_weight(attn_ext.pack_weight(weight)), weight)


# ------------------------------------------------------------------------------------------------------- the threads


def calls(dtype):
    """Op -> a call with enough work for two threads, and subnormal numbers on its way."""

    def tensor(*shape):
        t = torch.randn(shape) * 10.0 ** (-45 * torch.rand(shape))
        return t.to(dtype)

    d = 32
    x, weight, bias = tensor(80, 96), tensor(3 * d, 96), tensor(3 * d)
    q, k, v = tensor(2, 130, 2, d), tensor(2, 130, 2, d), tensor(2, 130, 2, d)
    cache, table = tensor(140, 16, 1, d), torch.randperm(140).to(torch.int32).view(2, 70)
    slots = torch.arange(80)
    lens = torch.tensor([1100, 700], dtype=torch.int32)
    many, lse = tensor(2, 130, 4, d), torch.randn(2, 4, 130)

    def to_cache():
        caches = torch.zeros(2, 80, 1, d, dtype=dtype).unflatten(1, (5, 16)).unbind(0)
        return (attn_ext.qkv_projection_to_cache(x, weight, bias, *caches, slots, n_heads=1), *caches)

    return {
        "linear": lambda: attn_ext.linear(x, weight, bias, activation="silu"),
        "linear, packed": lambda: attn_ext.linear(x, attn_ext.pack_weight(weight), bias),
        "linear, tiny": lambda: attn_ext.linear(x[:1, :2], weight[:2, :2]),
        "qkv_projection_to_cache": to_cache,
        "attention": lambda: attn_ext.attention(q, k, v, causal=True, return_lse=True),
        "softcap": lambda: attn_ext.attention(q, k, v, softcap=20.0, scale=1e-39),
        "decode": lambda: attn_ext.paged_attention(q[:, :1], cache, cache, table, lens),  # splits are shared
        "masked_softmax": lambda: attn_ext.masked_softmax(q.flatten(2).repeat(1, 2, 1)),
        "rms_norm": lambda: attn_ext.rms_norm(many.reshape(-1, 2 * d).repeat(2, 1), bias[: 2 * d]),
        "layer_norm": lambda: attn_ext.layer_norm(many.reshape(-1, 2 * d).repeat(2, 1), bias[: 2 * d], bias[: 2 * d]),
        "merge_attention": lambda: attn_ext.merge_attention(many, lse, many.flip(0), lse.flip(0)),
    }


def counted() -> torch.Tensor:
    """Whether subnormal numbers count in torch's arithmetic: on this thread, then on all of its threads."""
    one = (torch.full((8,), 1e-40) * 1.0).view(torch.int32)
    many = (torch.full((1 << 20,), 1e-40) * 1.0).view(torch.int32)
    return torch.stack([(one != 0).all(), (many != 0).all()])


@pytest.fixture
def flush_denormal():
    """`torch.set_flush_denormal`, undone after the test."""
    if not torch.set_flush_denormal(False):
        pytest.skip("torch knows no mode of this CPU")
    yield torch.set_flush_denormal
    torch.set_flush_denormal(False)


@with_float32_exponents
def test_the_mode_of_the_threads_neither_matters_nor_changes(dtype, threads, flush_denormal):
    threads(2)
    ops = calls(dtype)
    assert counted().all()
    for name, call in ops.items():
        results = call()
        assert counted().all(), name
        flush_denormal(True)
        before, flushed = counted(), call()
        assert not before[0] and torch.equal(counted(), before), name
        threads(1)
        alone = call()
        threads(2)
        flush_denormal(False)
        for other in (flushed, alone):
            pairs = zip(results, other, strict=True) if isinstance(results, tuple) else [(results, other)]
            for a, b in pairs:
                assert_same_bits(b, a, name)


def test_float64_counts_them(threads, flush_denormal, backend):
    """... whatever the mode of the threads: it always runs on the scalar kernels."""
    if backend != "scalar":
        pytest.skip("float64 is the scalar backend's")
    threads(2)
    low = torch.arange(1, 1 + 300 * 64).view(300, 64).view(torch.float64)  # the smallest, from 2^-1074 on
    eye = torch.eye(64, dtype=torch.float64)
    values = low.view(300, 1, 1, 64)
    lse = torch.full((300, 1, 1), 500.0, dtype=torch.float64)
    for mode in (False, True):
        flush_denormal(mode)
        results = {
            "linear": attn_ext.linear(low, eye),
            "attention": attn_ext.attention(values * 0, values * 0, values).view(300, 64),
            "merge_attention": attn_ext.merge_attention(values, lse, values, -lse)[0].view(300, 64),
        }
        flush_denormal(False)
        for name, result in results.items():
            assert_same_bits(result, low, f"{name}, torch.set_flush_denormal({mode})")
