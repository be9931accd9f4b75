"""linear: activation(x @ weight.T + bias) * multiply + residual."""

import pytest
import torch
from tolerance import assert_as_accurate_as_torch, assert_same_bits

import attn_ext
from attn_ext import reference

pytestmark = pytest.mark.usefixtures("backend")

BF16, F16 = torch.bfloat16, torch.float16

# 0, 1, primes, and one less and more than what kernels cut the work into: 6 rows, 16, 32 or 64 columns, 256 terms
SHAPES = [
    (0, 8, 8), (8, 0, 8), (8, 8, 0), (1, 1, 1), (1, 7, 3), (2, 16, 15), (3, 17, 16), (5, 31, 17), (6, 32, 31),
    (7, 33, 32), (11, 64, 33), (12, 63, 63), (13, 65, 64), (1, 255, 65), (6, 256, 97), (7, 257, 127), (18, 300, 129),
    (1, 520, 40), (97, 24, 10), (64, 128, 192),
]  # fmt: skip
ACTIVATIONS = [None, "gelu", "gelu_tanh", "silu"]


def _exact_and_plain(x, weight, bias, **options):
    with reference.precision(torch.float64):
        exact = reference.linear(x, weight, bias, **options)
    with reference.precision(x.dtype):
        plain = reference.linear(x, weight, bias, **options)
    return exact, plain


def check(x, weight, bias=None, what="linear", **options):
    out = attn_ext.linear(x, weight, bias, **options)
    exact, plain = _exact_and_plain(x, weight, bias, **options)
    terms = x.double().abs() @ weight.double().abs().T
    for added in (bias, options.get("residual")):
        terms = terms if added is None else terms + added.double().abs()
    assert out.dtype == x.dtype
    assert_as_accurate_as_torch(out, exact, plain, terms=terms.max().item() if terms.numel() else 0.0, what=what)
    return out


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_shapes(m, k, n, dtype):
    x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    bias, residual = torch.randn(n).to(dtype), torch.randn(m, n).to(dtype)
    check(x, weight)
    check(x, weight, bias)
    check(x, weight, bias, activation="gelu_tanh", residual=residual)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_epilogues(activation, has_bias, has_residual, dtype):
    """The residual is added after the activation."""
    x, weight = torch.randn(2, 7, 40).to(dtype), torch.randn(37, 40).to(dtype) / 6
    bias = torch.randn(37).to(dtype) if has_bias else None
    residual = torch.randn(2, 7, 37).to(dtype) if has_residual else None
    check(x, weight, bias, activation=activation, residual=residual)


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
def test_activation_everywhere(activation, dtype):
    """Along the whole line, tails and zeros included; NaN stays NaN."""
    x = torch.cat([torch.linspace(-40, 40, 1601), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e4, -1e4])])
    x = x.to(dtype).reshape(-1, 1)
    one = torch.ones(1, 1, dtype=dtype)
    check(x, one, activation=activation)
    out = attn_ext.linear(torch.full((1, 1), torch.nan, dtype=dtype), one, activation=activation)
    assert out.isnan().all()
    out = attn_ext.linear(torch.full((1, 1), torch.inf, dtype=dtype), one, activation=activation)
    assert out.item() == torch.inf


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_activation_is_relatively_accurate_near_zero(activation, backend):
    """Small values keep their leading bits: gelu(x) = x/2 + ..., silu(x) = x/2 + ..."""
    x = torch.tensor([1e-3, -1e-3, 1e-6, -1e-6, 1e-12, 1e-30]).reshape(-1, 1)
    exact = reference.linear(x.double(), torch.ones(1, 1, dtype=torch.float64), activation=activation)
    out = attn_ext.linear(x, torch.ones(1, 1), activation=activation)
    torch.testing.assert_close(out.double(), exact, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.parametrize("shape", [(40,), (1, 40), (3, 40), (2, 3, 40), (2, 1, 3, 40), (0, 3, 40), (2, 0, 40)])
def test_any_number_of_leading_dims(shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(9, 40).to(dtype)
    residual = torch.randn(*shape[:-1], 9).to(dtype)
    assert check(x, weight, residual=residual).shape == (*shape[:-1], 9)


def test_rows_and_columns_stand_alone(dtype):
    """A row does not depend on the other rows, nor a column on the other columns, to the bit."""
    x, weight, bias = torch.randn(29, 300).to(dtype), torch.randn(131, 300).to(dtype), torch.randn(131).to(dtype)
    full = attn_ext.linear(x, weight, bias, activation="gelu")
    for rows in ((0, 1), (28, 29), (5, 11), (3, 20)):
        part = attn_ext.linear(x[slice(*rows)], weight, bias, activation="gelu")
        assert_same_bits(part, full[slice(*rows)], f"rows {rows}")
    for columns in ((0, 1), (130, 131), (15, 17), (64, 131), (1, 66)):
        part = attn_ext.linear(x, weight[slice(*columns)], bias[slice(*columns)], activation="gelu")
        assert_same_bits(part, full[:, slice(*columns)], f"columns {columns}")


def test_result_is_contiguous_and_new(dtype):
    x, weight = torch.randn(4, 3, 8).to(dtype), torch.randn(5, 8).to(dtype)
    residual = torch.randn(4, 3, 5).to(dtype)
    kept = residual.clone()
    out = attn_ext.linear(x.transpose(0, 1), weight, residual=residual.transpose(0, 1))
    assert out.is_contiguous()
    assert_same_bits(residual, kept)


def test_large_and_small_magnitudes(dtype):
    for size in (1e-3, 100.0):
        check(torch.randn(7, 65).to(dtype) * size, torch.randn(33, 65).to(dtype), torch.randn(33).to(dtype) * size)


def test_nan_stays_in_its_row(dtype):
    x, weight = torch.randn(13, 65).to(dtype), torch.randn(33, 65).to(dtype)
    clean = attn_ext.linear(x, weight)
    x[6, 64] = torch.nan
    out = attn_ext.linear(x, weight)
    assert out[6].isnan().all()
    keep = [i for i in range(13) if i != 6]
    assert_same_bits(out[keep], clean[keep])


def takes_packed(backend):
    return backend not in ("cuda", "simt")


def test_nan_in_a_weight_stays_in_its_column(dtype, backend):
    for m in (1, 13):
        x, weight = torch.randn(m, 66).to(dtype), torch.randn(48, 66).to(dtype)
        clean = attn_ext.linear(x, weight)
        weight[17, 65] = torch.nan
        keep = [i for i in range(48) if i != 17]
        for given in (weight, attn_ext.pack_weight(weight)) if takes_packed(backend) else (weight,):
            out = attn_ext.linear(x, given)
            assert out[:, 17].isnan().all()
            assert_same_bits(out[:, keep], clean[:, keep])


# ------------------------------------------------------------------------------------------- packed weights


@pytest.fixture
def cpu(backend):
    """A backend that takes packed weights."""
    if not takes_packed(backend):
        pytest.skip("packed weights are for CPU tensors")
    return backend


@pytest.mark.parametrize("m", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 24, 25, 191, 192, 193])
@pytest.mark.parametrize(("k", "n"), [(2, 16), (64, 48), (254, 64), (256, 80), (258, 112), (770, 144)])
def test_packed_is_plain_to_the_bit(m, k, n, dtype, cpu):
    x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    bias, residual = torch.randn(n).to(dtype), torch.randn(m, n).to(dtype)
    packed = attn_ext.pack_weight(weight)
    assert packed.is_contiguous() and packed.nbytes == weight.nbytes
    assert_same_bits(attn_ext.linear(x, packed), attn_ext.linear(x, weight))
    options = {"activation": "silu", "residual": residual}
    assert_same_bits(attn_ext.linear(x, packed, bias, **options), attn_ext.linear(x, weight, bias, **options))
    assert_same_bits(reference.linear(x, packed, bias), reference.linear(x, weight, bias))


@pytest.mark.parametrize("count", [2, 3, 8])
def test_packed_on_threads(count, dtype, cpu, threads):
    for m, k, n in ((1, 300, 720), (8, 600, 720), (150, 300, 208)):
        x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        threads(1)
        expected = attn_ext.linear(x, weight)
        threads(count)
        assert_same_bits(attn_ext.linear(x, attn_ext.pack_weight(weight)), expected, f"{(m, k, n)}")


def test_packed_without_k(dtype, cpu):
    packed = attn_ext.pack_weight(torch.empty(32, 0, dtype=dtype))
    assert_same_bits(attn_ext.linear(torch.randn(3, 0).to(dtype), packed), torch.zeros(3, 32, dtype=dtype))


def test_packed_x_of_any_strides(dtype, cpu):
    wide, weight = torch.randn(13, 2, 67).to(dtype), torch.randn(32, 64).to(dtype)
    for x in (wide[:, 0, 3:], wide[:, 1, :64], wide[:, :, 1:65].transpose(0, 1), wide[0, 0, :64].expand(9, 64)):
        assert_same_bits(attn_ext.linear(x, attn_ext.pack_weight(weight)), attn_ext.linear(x.contiguous(), weight))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16, torch.float64])
def test_pack_and_unpack(dtype):
    weight = torch.arange(32 * 6).reshape(32, 6).to(dtype)
    packed = attn_ext.pack_weight(weight)
    width = packed.shape[-1]
    assert packed.shape == (2, 6 // width, 16, width) and width == (2 if dtype in (BF16, F16) else 1)
    for n, k in ((0, 0), (3, 1), (17, 4), (31, 5)):
        assert packed[n // 16, k // width, n % 16, k % width] == weight[n, k]
    assert_same_bits(attn_ext.unpack_weight(packed), weight)
    assert_same_bits(attn_ext.pack_weight(weight.T.contiguous().T), packed)
    assert attn_ext.unpack_weight(attn_ext.pack_weight(weight[:0])).shape == (0, 6)
    column = torch.randn(16, 1, dtype=torch.float32)  # lies in memory as it does packed: still a copy
    assert attn_ext.pack_weight(column).data_ptr() != column.data_ptr()


def test_pack_refuses_other_sizes():
    for weight in (torch.randn(17, 4), torch.randn(16), torch.randn(1, 16, 4), torch.randn(16, 3, dtype=BF16)):
        with pytest.raises(ValueError, match=r"^pack_weight: weight must have shape \(N, K\) .*, got \(.*\)$"):
            attn_ext.pack_weight(weight)
    with pytest.raises(ValueError, match=r"^pack_weight: weight must be a floating-point tensor, got torch.int8$"):
        attn_ext.pack_weight(torch.zeros(16, 4, dtype=torch.int8))
    for packed in (torch.randn(16, 4), torch.randn(1, 4, 16, 3), torch.randn(1, 4, 8, 1)):
        with pytest.raises(ValueError, match=r"^unpack_weight: packed must have shape .*, got \(.*\)$"):
            attn_ext.unpack_weight(packed)


def test_packed_errors(cpu):
    x, weight = torch.randn(3, 8), torch.randn(32, 8)
    packed = attn_ext.pack_weight(weight)
    cases = [
        (x, packed.to(BF16), "linear: weight must be packed in its present dtype .*16, 2.*, got .2, 8, 16, 1."),
        (x.to(F16), packed.to(F16), "linear: weight must be packed in its present dtype .*16, 2.*, got .2, 8, 16, 1."),
        (x, attn_ext.pack_weight(weight.to(BF16)).float(), "linear: weight must be packed in its present dtype"),
        (x.to(BF16), packed, "linear: x and weight must have the same dtype, got"),
        (x[:, :6], packed, r"linear: x must have as last dimension the K of weight \(8\), got \(3, 6\)"),
        (x, torch.randn(4, 8, 8, 1), "linear: weight must be packed in its present dtype"),
        (x, packed.expand(2, 8, 16, 1)[:, ::1].transpose(0, 1).contiguous().transpose(0, 1),
         "linear: weight must be contiguous when it is packed"),
        (x, packed[0], r"linear: weight must have shape \(N, K\) or be packed by pack_weight, got \(8, 16, 1\)"),
    ]  # fmt: skip
    for given, wrong, message in cases:
        with pytest.raises(RuntimeError, match=message) as error:
            attn_ext.linear(given, wrong)
        assert "\n" not in str(error.value).strip().partition("Exception raised")[0].strip()


def test_packed_under_autocast(cpu):
    """Autocast changes the dtype, and with it the width for which a weight is packed: the results stay the same."""
    x = torch.randn(3, 8)
    for width in (16, 32):
        weight = torch.randn(width, 8 if width == 16 else 7)  # K odd: no packed form in bfloat16
        for dtype in (torch.float32, F16, BF16):
            if weight.shape[1] % 2 and dtype != torch.float32:
                continue
            with torch.autocast("cpu", BF16):
                out = attn_ext.linear(x[:, : weight.shape[1]], attn_ext.pack_weight(weight.to(dtype)))
                assert_same_bits(out, attn_ext.linear(x[:, : weight.shape[1]], weight.to(dtype)))


# ------------------------------------------------------------------------------------------------ multiply


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("has_residual", [False, True])
def test_multiply(activation, has_residual, dtype):
    """A factor after the activation, before the residual."""
    for m, k, n in ((1, 40, 37), (14, 40, 37), (7, 257, 64), (33, 17, 130), (0, 8, 8), (8, 0, 8), (1, 1, 1)):
        x, weight, bias = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype) / 6, torch.randn(n).to(dtype)
        multiply, residual = torch.randn(m, n).to(dtype), torch.randn(m, n).to(dtype) if has_residual else None
        options = {"activation": activation, "multiply": multiply, "residual": residual}
        out = attn_ext.linear(x, weight, bias, **options)
        exact, plain = _exact_and_plain(x, weight, bias, **options)
        terms = (x.double().abs() @ weight.double().abs().T + bias.double().abs()) * multiply.double().abs()
        terms = terms if residual is None else terms + residual.double().abs()
        terms = terms.max().item() if terms.numel() else 0.0
        assert_as_accurate_as_torch(out, exact, plain, terms=terms, what=f"linear {m} {k} {n} {activation}")


def test_multiply_by_one_changes_no_bit(dtype):
    x, weight, bias = torch.randn(13, 65).to(dtype), torch.randn(33, 65).to(dtype), torch.randn(33).to(dtype)
    residual = torch.randn(13, 33).to(dtype)
    plain = attn_ext.linear(x, weight, bias, activation="silu", residual=residual)
    ones = torch.ones(1, 1, dtype=dtype).expand(13, 33)
    for one in (ones, ones.contiguous()):
        assert_same_bits(attn_ext.linear(x, weight, bias, activation="silu", residual=residual, multiply=one), plain)
    part = attn_ext.linear(x[3:4], weight, bias, activation="silu", multiply=residual[3:4])
    assert_same_bits(part, attn_ext.linear(x, weight, bias, activation="silu", multiply=residual)[3:4])


def test_nan_in_multiply_stays_in_its_element(dtype):
    x, weight, multiply = torch.randn(5, 20).to(dtype), torch.randn(37, 20).to(dtype), torch.randn(5, 37).to(dtype)
    clean = attn_ext.linear(x, weight, multiply=multiply)
    multiply[2, 36] = torch.nan
    out = attn_ext.linear(x, weight, multiply=multiply)
    assert out[2, 36].isnan()
    out[2, 36] = clean[2, 36]
    assert_same_bits(out, clean)


def test_long_rows_in_several_tasks(dtype, cpu):
    """Rows so long that a task takes few of them, in slices over many depth blocks: each is the row alone."""
    x, weight = torch.randn(110, 33002).to(dtype), torch.randn(16, 33002).to(dtype)
    out = attn_ext.linear(x, weight)
    assert_same_bits(attn_ext.linear(x, attn_ext.pack_weight(weight)), out)
    for row in (0, 47, 48, 59, 109):
        assert_same_bits(attn_ext.linear(x[row : row + 1], weight), out[row : row + 1])
    exact, plain = _exact_and_plain(x, weight, None)
    terms = (x.double().abs() @ weight.double().abs().T).max().item()
    assert_as_accurate_as_torch(out, exact, plain, terms=terms, what="linear of long rows")
