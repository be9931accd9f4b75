"""rms_norm and layer_norm: float32 statistics over the last dimension, one rounding at the end."""

import pytest
import torch
from tolerance import assert_as_accurate_as_torch, assert_same_bits

import attn_ext
from attn_ext import reference

pytestmark = pytest.mark.usefixtures("backend")

# 1, primes, one less and more than vectors of 4, 8 and 16 lanes and four of them, and than what CUDA cuts rows into
COLUMNS = [1, 2, 3, 7, 8, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 576, 1023, 1024, 1025, 2049, 8192]
NORMS = ["rms_norm", "layer_norm", "layer_norm without bias"]


def apply(ops, norm, x, weight, bias, eps=1e-5):
    """The norm of the module `ops`."""
    if norm == "rms_norm":
        return ops.rms_norm(x, weight, eps)
    return ops.layer_norm(x, weight, bias if norm == "layer_norm" else None, eps)


def check(norm, x, weight, bias, eps=1e-5):
    out = apply(attn_ext, norm, x, weight, bias, eps)
    with reference.precision(torch.float64):
        exact = apply(reference, norm, x, weight, bias, eps)
    with reference.precision(x.dtype):
        plain = apply(reference, norm, x, weight, bias, eps)
    assert out.dtype == x.dtype and out.is_contiguous()
    added = bias.double().abs() if norm == "layer_norm" else 0.0
    terms = (exact.abs() + 2 * added).nan_to_num(0.0, 0.0, 0.0)  # at least |product| + |bias|
    assert_as_accurate_as_torch(out, exact, plain, terms=terms.max().item() if terms.numel() else 0.0, what=norm)
    return out


def problem(*shape, dtype, size=1.0, offset=0.0):
    x = (torch.randn(shape) * size + offset).to(dtype)
    return x, (1 + torch.randn(shape[-1]) / 4).to(dtype), torch.randn(shape[-1]).to(dtype)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("columns", COLUMNS)
def test_columns(columns, norm, dtype):
    check(norm, *problem(3, columns, dtype=dtype, offset=0.5))


@pytest.mark.parametrize("shape", [(40,), (1, 40), (7, 40), (2, 3, 40), (2, 1, 3, 40), (0, 40), (0, 3, 40), (2, 0, 40)])
def test_any_number_of_leading_dims(shape, dtype):
    for norm in NORMS:
        assert check(norm, *problem(*shape, dtype=dtype)).shape == shape


def test_no_columns(dtype):
    x, none = torch.empty(3, 0, dtype=dtype), torch.empty(0, dtype=dtype)
    for norm in NORMS:
        assert apply(attn_ext, norm, x, none, none).shape == (3, 0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [1e-3, 30.0])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 0.1, 10.0])
def test_sizes_and_eps(size, eps, norm, dtype):
    check(norm, *problem(3, 100, dtype=dtype, size=size), eps)


@pytest.mark.parametrize("offset", [1e4, -1e4, 3e4])
@pytest.mark.parametrize("columns", [100, 1500])
def test_a_mean_far_from_zero(columns, offset, dtype):
    """What rounding takes from the mean does not show: the result is as exact as that of a row around 0."""
    x, weight, bias = problem(3, columns, dtype=dtype, size=20.0, offset=offset)
    with reference.precision(torch.float64):
        exact = reference.layer_norm(x, weight, bias)
    error = (attn_ext.layer_norm(x, weight, bias).double() - exact).abs().max().item()
    assert error <= (torch.finfo(dtype).eps / 2 + 8 * torch.finfo(torch.float32).eps) * exact.abs().max().item()


@pytest.mark.parametrize("value", [0.0, 1.0, -0.1, 1e4, 3.3e4])
def test_a_row_of_one_value(value, dtype):
    """Its variance is 0: layer_norm gives the bias."""
    _, weight, bias = problem(3, 77, dtype=dtype)
    x = torch.full((3, 77), value).to(dtype)
    out = attn_ext.layer_norm(x, weight, bias)
    # of x a few ulps of an ulp may be left, times 1 / sqrt(eps)
    left = 4 * (torch.finfo(torch.float32).eps ** 2) * abs(value) / 1e-5**0.5
    torch.testing.assert_close(out, bias.expand(3, 77), rtol=torch.finfo(dtype).eps, atol=left)
    check("rms_norm", x, weight, bias)


def test_bits_of_a_row_are_its_own(dtype):
    """Not of its batch, nor of its place and alignment in memory."""
    for columns in (37, 576, 1100):
        x, weight, bias = problem(29, columns, dtype=dtype)
        for norm in NORMS:
            whole = apply(attn_ext, norm, x, weight, bias)
            for rows in ((0, 1), (28, 29), (3, 20)):
                part = apply(attn_ext, norm, x[slice(*rows)], weight, bias)
                assert_same_bits(part, whole[slice(*rows)], f"rows {rows}")
            padded = torch.full((29, columns + 3), torch.nan, dtype=dtype)
            padded[:, 1:-2] = x
            assert_same_bits(apply(attn_ext, norm, padded[:, 1:-2], weight, bias), whole, "rows at odd addresses")


def test_strides(dtype):
    """Leading dimensions in any order, rows further apart, one row for all, columns apart."""
    x, weight, bias = problem(3, 5, 48, dtype=dtype)
    for norm in NORMS:
        whole = apply(attn_ext, norm, x, weight, bias)
        assert_same_bits(apply(attn_ext, norm, x.transpose(0, 1), weight, bias), whole.transpose(0, 1).contiguous())
        assert_same_bits(apply(attn_ext, norm, x[::2, 1::2], weight, bias), whole[::2, 1::2].contiguous())
        one = x[:1, :1].expand(3, 5, 48)
        assert_same_bits(apply(attn_ext, norm, one, weight, bias), whole[:1, :1].expand(3, 5, 48).contiguous())
        apart = x.transpose(0, 2).contiguous().transpose(0, 2)
        twice = [t.repeat_interleave(2)[::2] for t in (weight, bias)]
        assert_same_bits(apply(attn_ext, norm, apart, *twice), whole)


def test_inputs_are_kept(dtype):
    inputs = problem(5, 40, dtype=dtype)
    kept = [t.clone() for t in inputs]
    for norm in NORMS:
        apply(attn_ext, norm, *inputs)
    for t, before in zip(inputs, kept, strict=True):
        assert_same_bits(t, before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("columns", [65, 1100])
def test_nan_and_inf_stay_in_their_row(bad, columns, dtype):
    x, weight, bias = problem(9, columns, dtype=dtype)
    for norm in NORMS:
        clean = apply(attn_ext, norm, x, weight, bias)
        broken = x.clone()
        broken[4, 17] = bad
        out = check(norm, broken, weight, bias)
        keep = [i for i in range(9) if i != 4]
        assert_same_bits(out[keep], clean[keep])
        assert out[4, 17].isnan()


def test_it_is_what_torch_computes(dtype):
    """Torch's own functions, in float64."""
    x, weight, bias = problem(6, 576, dtype=dtype)
    wide = [t.double() for t in (x, weight, bias)]
    eps = torch.finfo(dtype).eps
    for out, exact in (
        (attn_ext.rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(wide[0], (576,), wide[1], 1e-6)),
        (attn_ext.layer_norm(x, weight, bias), torch.nn.functional.layer_norm(wide[0], (576,), *wide[1:])),
    ):
        torch.testing.assert_close(out.double(), exact, rtol=2 * max(eps, 1e-6), atol=2 * max(eps, 1e-6))
