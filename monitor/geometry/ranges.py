"""Numbers checked against the range their formula holds on: one clear error instead of a NaN further down."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray


def in_range(
    value: ArrayLike,
    name: str,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> NDArray[np.float64]:
    """`value` as float64, after checking that all of it lies between `low` and `high`.

    Parameters
    ----------
    value : float or array_like
    name : str
        What the message calls it.
    low, high : float
        Ends of the range. They belong to it unless `open_low`, `open_high`.

    Returns
    -------
    ndarray of float64, of the shape of `value`

    Raises
    ------
    ValueError
        Where a value lies outside or is NaN, and for values that are not numbers.
    """
    try:
        numbers = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be a number or an array of numbers, got {value!r}") from error
    above = numbers > low if open_low else numbers >= low
    below = numbers < high if open_high else numbers <= high
    inside = above & below  # NaN compares false
    if not inside.all():
        outside = numbers[~inside].flat[0]
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
        raise ValueError(f"{name} must lie in {interval}, got {outside:g}")
    return numbers


def as_given(result: NDArray[np.float64]) -> float | NDArray[np.float64]:
    """A float where scalars were given, the array otherwise."""
    result = np.asarray(result, dtype=np.float64)
    return float(result) if result.ndim == 0 else result
