"""Checks of a model config's values, which mostly come from files."""

from __future__ import annotations

import math
import numbers

__all__ = ["check_positive", "check_sizes"]


def check_sizes(owner: str, values: dict[str, object]) -> None:
    """Raise ValueError, one line, for a value that is no whole number >= 1.

    >>> check_sizes("Config", {"n_layers": 2, "n_heads": 1.5})
    Traceback (most recent call last):
        ...
    ValueError: Config: n_heads must be a whole number >= 1, got 1.5
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise ValueError(f"{owner}: {name} must be a whole number >= 1, got {value!r}")


def check_positive(owner: str, values: dict[str, object]) -> None:
    """Raise ValueError, one line, for a value that is no finite number above 0.

    >>> check_positive("Config", {"norm_eps": "1e-5"})
    Traceback (most recent call last):
        ...
    ValueError: Config: norm_eps must be a number above 0, got '1e-5'
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < value < math.inf:
            raise ValueError(f"{owner}: {name} must be a number above 0, got {value!r}")
