"""The purity law: the best AUC any probe can reach where only a fraction of the texts carries the signal.

A text is marked with probability a and neutral otherwise, whatever its label. Marked texts of the two groups are
N(μ±, Σ), s apart in Mahalanobis distance; neutral ones are N(μ₀, Σ), by default at the midpoint.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erf

from monitor.geometry.ranges import as_given, in_range

_BISECTIONS = 120  # halves any bracket below the spacing of doubles


def auc_max(separation: ArrayLike, purity: ArrayLike, offset: ArrayLike = 0.0) -> float | NDArray[np.float64]:
    """Largest AUC of a linear probe at a separation and a purity.

    Parameters
    ----------
    separation : float or array_like, [0, inf]
        Mahalanobis distance s of the two marked groups.
    purity : float or array_like, [0, 1]
        Fraction a of texts that carry a marker.
    offset : float or array_like, finite
        Distance b of the neutral centre from the midpoint along the discriminant, in within-class standard deviations.

    Returns
    -------
    float, or float64 array of the broadcast shape
        In [1/2, 1]; higher means easier to detect. Strictly increasing in the purity for every offset when s > 0,
        increasing in s, decreasing in the size of b.

    Raises
    ------
    ValueError
        For values outside their range, NaN included.

    Notes
    -----
    arXiv 2609.22337, eq. 8 and Corollary 2. A marked or neutral text of one group meets a marked or neutral one of the
    other, with score gaps s, s/2 - b, s/2 + b and 0 in units of the within-class standard deviation:

        AUC_max = a² Φ(s/√2) + a(1-a) [Φ((s/2 - b)/√2) + Φ((s/2 + b)/√2)] + (1-a)²/2.

    For b = 0 no measurable classifier does better (Remark 1): the likelihood ratio increases in the linear score. For
    b ≠ 0 it is the AUC of the linear discriminant between the marked groups.
    """
    return as_given(0.5 + _excess(*_checked(separation, purity, offset)))


def auc_excess(separation: ArrayLike, purity: ArrayLike, offset: ArrayLike = 0.0) -> float | NDArray[np.float64]:
    """`auc_max` less 1/2, without the rounding of the difference: what a faint signal adds to chance.

    Parameters and errors as in `auc_max`.

    Returns
    -------
    float, or float64 array of the broadcast shape
        In [0, 1/2].

    Notes
    -----
    With A₁ = Φ(s/√2) - 1/2 and M = Φ((s/2 - b)/√2) + Φ((s/2 + b)/√2) the excess is a² A₁ + a(1-a)(M - 1). Φ(x) - 1/2 is
    taken as erf(x/√2)/2, so that the relative precision does not depend on how small it is.
    """
    return as_given(_excess(*_checked(separation, purity, offset)))


def saturated_auc(purity: ArrayLike) -> float | NDArray[np.float64]:
    """`auc_max` for a separation beyond all bounds: purity alone is left.

    Parameters
    ----------
    purity : float or array_like, [0, 1]

    Returns
    -------
    float, or float64 array
        In [1/2, 1], strictly increasing.

    Notes
    -----
    1/2 + a(2 - a)/2 (arXiv 2609.22337, eq. 9). For s >= 6.6 the whole law is within 0.005 of it.
    """
    purity = in_range(purity, "purity", 0.0, 1.0)
    return as_given(0.5 + purity * (2.0 - purity) / 2.0)


def weak_signal_auc(separation: ArrayLike, purity: ArrayLike) -> float | NDArray[np.float64]:
    """`auc_max` to first order in a small separation.

    Parameters
    ----------
    separation : float or array_like, [0, inf)
    purity : float or array_like, [0, 1]

    Returns
    -------
    float, or float64 array of the broadcast shape
        From 1/2 upwards; above the law for every s > 0, and above 1 where the separation is not small.

    Notes
    -----
    1/2 + a s/(2√π), with an error of order s³ (arXiv 2609.22337, eq. 9).
    """
    separation = in_range(separation, "separation", 0.0, math.inf, open_high=True)
    purity = in_range(purity, "purity", 0.0, 1.0)
    return as_given(0.5 + purity * separation / (2.0 * math.sqrt(math.pi)))


def separation_from_auc(
    auc: ArrayLike, purity: ArrayLike = 1.0, offset: ArrayLike = 0.0
) -> float | NDArray[np.float64]:
    """The separation at which the purity law gives an AUC: the inverse of `auc_max` in s.

    Parameters
    ----------
    auc : float or array_like, [0, 1]
    purity : float or array_like, (0, 1]
    offset : float or array_like, finite

    Returns
    -------
    float, or float64 array of the broadcast shape
        In [0, inf]. 0 at or below an AUC of 1/2. inf at or above the supremum `saturated_auc(purity)`, which no finite
        separation reaches: an AUC of 1.000 certifies only that s is large.

    Raises
    ------
    ValueError
        For values outside their range, NaN included; a purity of 0 tells nothing about s.

    Notes
    -----
    Unique, since the law increases strictly in s; found by bisection.
    """
    auc = in_range(auc, "auc", 0.0, 1.0)
    purity = in_range(purity, "purity", 0.0, 1.0, open_low=True)
    offset = in_range(offset, "offset", -math.inf, math.inf, open_low=True, open_high=True)
    auc, purity, offset = np.broadcast_arrays(auc, purity, offset)
    wanted = auc - 0.5
    low = np.zeros(auc.shape)
    high = 2.0 * np.abs(offset) + 64.0  # erf(x) is 1 in double precision from x = 6 on
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        reached = _excess(middle, purity, offset) >= wanted
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    supremum = purity * (2.0 - purity) / 2.0
    return as_given(np.where(wanted <= 0.0, 0.0, np.where(wanted >= supremum, np.inf, high)))


def fit_separation(purities: ArrayLike, aucs: ArrayLike, low: float = 0.01, high: float = 20.0) -> float:
    """The separation whose purity curve is nearest to measured AUCs, by least squares.

    Parameters
    ----------
    purities : array_like of shape (k,), [0, 1]
        At least one above 0.
    aucs : array_like of shape (k,), [0, 1]
    low, high : float
        The search range, 0 < low < high.

    Returns
    -------
    float
        In [low, high]. A value at the upper end says that the curve is saturated, not that s is known.

    Raises
    ------
    ValueError
        For shapes that differ, empty input, values outside their range.

    Notes
    -----
    argmin over s of Σ_k (auc_k - AUC_max(a_k; s))²: the one-parameter reference of experiment E2 (arXiv 2609.22337,
    table V). The sum may have more than one minimum: a logarithmic grid finds the lowest, golden sections refine it.
    """
    purities, aucs = in_range(purities, "purities", 0.0, 1.0), in_range(aucs, "aucs", 0.0, 1.0)
    if purities.ndim != 1 or purities.shape != aucs.shape or purities.size == 0:
        raise ValueError(
            "purities and aucs must be one-dimensional, equally long and not empty, "
            f"got shapes {purities.shape} and {aucs.shape}"
        )
    if not (purities > 0).any():
        raise ValueError("purities must hold one above 0: without marked texts the AUC does not depend on s")
    if not 0.0 < low < high < math.inf:
        raise ValueError(f"low and high must satisfy 0 < low < high < inf, got {low} and {high}")

    def loss(separations: NDArray[np.float64]) -> NDArray[np.float64]:
        errors = aucs - 0.5 - _excess(np.asarray(separations)[..., None], purities, np.zeros(()))
        return (errors**2).sum(axis=-1)

    grid = np.geomspace(low, high, 512)
    grid[0], grid[-1] = low, high  # the ends as given, not as rounded
    best = int(loss(grid).argmin())
    left, right = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, grid.size - 1)])
    golden = (math.sqrt(5.0) - 1.0) / 2.0
    for _ in range(64):
        inner = np.array([right - golden * (right - left), left + golden * (right - left)])
        losses = loss(inner)
        left, right = (left, float(inner[1])) if losses[0] <= losses[1] else (float(inner[0]), right)
    candidates = np.array([float(grid[best]), (left + right) / 2.0])
    return float(candidates[loss(candidates).argmin()])


def _checked(separation: ArrayLike, purity: ArrayLike, offset: ArrayLike) -> tuple[NDArray[np.float64], ...]:
    return (
        in_range(separation, "separation", 0.0),
        in_range(purity, "purity", 0.0, 1.0),
        in_range(offset, "offset", -math.inf, math.inf, open_low=True, open_high=True),
    )


def _excess(s: NDArray[np.float64], a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    both_marked = erf(s / 2.0) / 2.0
    one_marked = (erf((s / 2.0 - b) / 2.0) + erf((s / 2.0 + b) / 2.0)) / 2.0
    return a**2 * both_marked + a * (1.0 - a) * one_marked
