"""How close a result must be to the float64 reference: at most twice as far as plain torch in the same dtype.

Torch's own error says how hard a problem is, but on few elements it may be 0 by luck, so a floor is added:

* one rounding of the result to its dtype: half an ulp of the largest value;
* one ulp (of float32, in which all sums are made) of `terms`, the size of what is added up. That is what sums of some
  hundred terms in another order differ by: n roundings of half an ulp, in random directions, of partial sums that grow
  up to `terms`.

float64 results have no better reference than another float64 computation, whose error is as large again as theirs, and
no plain torch to be compared with; they get 16 ulps of `terms`.
"""

import torch
from torch import Tensor


def _compute_eps(dtype: torch.dtype) -> float:
    return 16 * torch.finfo(dtype).eps if dtype == torch.float64 else torch.finfo(torch.float32).eps


def _worst(actual: Tensor, exact: Tensor) -> tuple[float, tuple[int, ...]]:
    """The largest error over finite elements, and its index."""
    error = (actual.double() - exact.double()).abs()
    error[~(torch.isfinite(actual) & torch.isfinite(exact))] = 0.0
    if error.numel() == 0:
        return 0.0, ()
    index = torch.unravel_index(error.argmax(), error.shape)
    return error.max().item(), tuple(int(i) for i in index)


def assert_as_accurate_as_torch(
    actual: Tensor, exact: Tensor, plain: Tensor, *, terms: float = 0.0, what: str = "result"
) -> None:
    """`actual` is as close to `exact` (float64) as `plain`, the same computation in plain torch in actual's dtype.

    NaN and inf must be where `exact`, brought to actual's dtype, has them. `terms` is the largest sum of absolute
    values that any element is made of (see the module); the largest |exact| if that is larger.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    rounded = exact.to(actual.dtype)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        wrong = (kind(actual) != kind(rounded)).nonzero().tolist()
        assert not wrong, (
            f"{what}: {kind.__name__} differs at {len(wrong)} of {actual.numel()} elements, first {wrong[0]}: "
            f"got {actual[tuple(wrong[0])].item()}, expected {rounded[tuple(wrong[0])].item()}"
        )
    finite = exact[torch.isfinite(exact)].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    ours, index = _worst(actual, exact)
    torchs, _ = _worst(plain, exact)
    info = torch.finfo(actual.dtype)
    floor = info.eps / 2 * largest + info.smallest_normal * info.eps + _compute_eps(actual.dtype) * max(terms, largest)
    bound = 2 * torchs + floor
    assert ours <= bound, (
        f"{what}: error {ours:.3e} at {index}, allowed {bound:.3e} (torch's own {torchs:.3e}, floor {floor:.3e}): "
        f"got {actual[index].item()!r}, exact {exact[index].item()!r}, torch {plain[index].item()!r}"
    )


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Equal to the bit, NaN included."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, (
        f"{what}: {tuple(actual.shape)} {actual.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
    )
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    a, b = actual.contiguous().view(integer), expected.contiguous().view(integer)
    different = (a != b).nonzero()
    if len(different):
        index = tuple(different[0].tolist())
        raise AssertionError(
            f"{what}: {len(different)} of {a.numel()} elements differ, first at {index}: "
            f"got {actual[index].item()!r}, expected {expected[index].item()!r}"
        )
