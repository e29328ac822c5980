"""P-values corrected for a family of tests: Bonferroni for the family-wise error, Benjamini-Hochberg for the FDR."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from monitor.geometry.ranges import in_range


def bonferroni(p_values: ArrayLike) -> NDArray[np.float64]:
    """Adjusted p-values that keep the chance of any false detection in the family below the level.

    Parameters
    ----------
    p_values : array_like of any shape, [0, 1]
        The whole family: all its elements count.

    Returns
    -------
    ndarray of float64, of the shape of `p_values`
        min(1, m p) for a family of m. At most the level: detected.

    Raises
    ------
    ValueError
        For values outside [0, 1], NaN included: a missing test must be left out, it does not belong to the family.

    Notes
    -----
    Valid under every dependence between the tests.
    """
    p_values = in_range(p_values, "p_values", 0.0, 1.0)
    return np.minimum(1.0, p_values * p_values.size)


def benjamini_hochberg(p_values: ArrayLike) -> NDArray[np.float64]:
    """Adjusted p-values that keep the expected share of false detections among all detections below the level.

    Parameters
    ----------
    p_values : array_like of any shape, [0, 1]
        The whole family: all its elements count.

    Returns
    -------
    ndarray of float64, of the shape of `p_values`
        In [0, 1], never below the given p-values, never above `bonferroni`'s.

    Raises
    ------
    ValueError
        As `bonferroni`.

    Notes
    -----
    The k-th smallest of m becomes min over j >= k of m p_(j)/j (Benjamini and Hochberg, 1995). Valid for independent
    and for positively dependent tests.
    """
    p_values = in_range(p_values, "p_values", 0.0, 1.0)
    flat = p_values.ravel()
    order = np.argsort(flat, kind="stable")
    scaled = flat[order] * (flat.size / np.arange(1, flat.size + 1))  # factors of at least 1: never below p
    adjusted = np.empty_like(flat)
    adjusted[order] = np.minimum.accumulate(scaled[::-1])[::-1]  # p_(m) m/m <= 1 caps them all
    return adjusted.reshape(p_values.shape)
