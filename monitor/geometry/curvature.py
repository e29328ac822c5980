"""The chordal ceiling: a linear probe reads straight chords of a curved space, and chords cannot grow without end.

Two classes sit at geodesic distance r on a round sphere of curvature κ (radius 1/√κ), each spread by τ along the sphere
and by σ in all directions of the space around it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr

from monitor.geometry.ranges import as_given, in_range

_ROUNDING = 1e-9  # of π/√κ computed elsewhere


def chord_ratio(curvature: ArrayLike, distance: ArrayLike) -> float | NDArray[np.float64]:
    """Length of a chord over that of its arc.

    Parameters
    ----------
    curvature : float or array_like, [0, inf)
        κ, in 1/length². 0 is flat.
    distance : float or array_like, [0, π/√κ]
        r, the geodesic distance: no two points of the sphere are farther apart than π/√κ.

    Returns
    -------
    float, or float64 array of the broadcast shape
        In [2/π, 1], decreasing in both; 1 where it is flat.

    Raises
    ------
    ValueError
        For values outside their range, NaN included.

    Notes
    -----
    g = sin(√κ r/2) / (√κ r/2) (arXiv 2609.22337, eq. 5).
    """
    return as_given(np.sinc(_angle(curvature, distance) / (2.0 * math.pi)))  # numpy's sinc is that of πx


def chord_length(curvature: ArrayLike, distance: ArrayLike) -> float | NDArray[np.float64]:
    """Straight distance of two points at a geodesic distance; parameters as in `chord_ratio`.

    Returns
    -------
    float, or float64 array of the broadcast shape
        c = (2/√κ) sin(√κ r/2) <= min(r, 2/√κ).
    """
    return as_given(np.asarray(distance, dtype=np.float64) * chord_ratio(curvature, distance))


def within_class_std(
    curvature: ArrayLike, distance: ArrayLike, intrinsic_std: ArrayLike, ambient_std: ArrayLike
) -> float | NDArray[np.float64]:
    """Spread of a class along the chord that joins the two centres.

    Parameters
    ----------
    curvature, distance
        As in `chord_ratio`.
    intrinsic_std : float or array_like, [0, inf)
        τ, along the sphere.
    ambient_std : float or array_like, [0, inf)
        σ, in every direction of the space around it.

    Returns
    -------
    float, or float64 array of the broadcast shape
        σ_w, a length.

    Notes
    -----
    σ_w² = σ² + τ² cos²(√κ r/2) to first order in τ√κ (arXiv 2609.22337, appendix C-B): a step along the sphere moves
    along the chord by the cosine of half the angle.
    """
    intrinsic_std, ambient_std = _std(intrinsic_std, "intrinsic_std"), _std(ambient_std, "ambient_std")
    return as_given(np.hypot(ambient_std, intrinsic_std * np.cos(_angle(curvature, distance) / 2.0)))


def chordal_auc(
    curvature: ArrayLike, distance: ArrayLike, intrinsic_std: ArrayLike, ambient_std: ArrayLike
) -> float | NDArray[np.float64]:
    """Largest AUC of a linear probe on a sphere; parameters as in `within_class_std`.

    Returns
    -------
    float, or float64 array of the broadcast shape
        In [1/2, 1].

    Raises
    ------
    ValueError
        For values outside their range, and where both spreads are 0: points without spread have no AUC short of 1.

    Notes
    -----
    Φ(c/(√2 σ_w)) (arXiv 2609.22337, Theorem 2, eq. 6). To first order in τ√κ: on a sphere of d dimensions the mean of a
    class lies inside it, and the chord between the means is shorter by a factor of about 1 - dτ²κ/2, so that the AUC is
    overstated where dτ²κ is not small.
    """
    _check_spread(intrinsic_std, ambient_std)
    chord = np.asarray(chord_length(curvature, distance))
    return as_given(ndtr(chord / (math.sqrt(2.0) * within_class_std(curvature, distance, intrinsic_std, ambient_std))))


def geodesic_auc(distance: ArrayLike, intrinsic_std: ArrayLike, ambient_std: ArrayLike) -> float | NDArray[np.float64]:
    """AUC of an ideal detector that reads positions along the sphere: what the flat case would give.

    Parameters
    ----------
    distance : float or array_like, [0, inf)
        r, the geodesic distance.
    intrinsic_std, ambient_std
        As in `within_class_std`, not both 0.

    Returns
    -------
    float, or float64 array of the broadcast shape
        In [1/2, 1], equal to `chordal_auc` at curvature 0.

    Notes
    -----
    Φ(r/sqrt(2(τ² + σ²))) (arXiv 2609.22337, Corollary 1). With τ = 0 it is never below `chordal_auc`,
    and no detector reaches it (experiment E10). With σ = 0 it is never above: the spread of the classes, seen along the
    chord, shrinks faster than the chord, and eq. 6 has no gap for a nonlinear detector to recover.
    """
    distance = in_range(distance, "distance", 0.0, math.inf, open_high=True)
    _check_spread(intrinsic_std, ambient_std)
    spread = np.hypot(_std(intrinsic_std, "intrinsic_std"), _std(ambient_std, "ambient_std"))
    return as_given(ndtr(distance / (math.sqrt(2.0) * spread)))


def auc_ceiling(curvature: ArrayLike, within_std: ArrayLike) -> float | NDArray[np.float64]:
    """AUC that no linear probe on a sphere exceeds, however far apart the classes are.

    Parameters
    ----------
    curvature : float or array_like, [0, inf]
        κ, in 1/length².
    within_std : float or array_like, (0, inf)
        σ_w, see `within_class_std`; the ambient σ is the smallest it can be.

    Returns
    -------
    float, or float64 array of the broadcast shape
        In [1/2, 1]: 1 where it is flat, 1/2 for extreme curvature, decreasing in between.

    Notes
    -----
    Φ(√2/(√κ σ_w)) (arXiv 2609.22337, eq. 7): c <= 2/√κ in `chordal_auc`.
    """
    curvature = in_range(curvature, "curvature", 0.0)
    within_std = in_range(within_std, "within_std", 0.0, math.inf, open_low=True, open_high=True)
    with np.errstate(divide="ignore"):  # flat: the argument is infinite, the AUC 1
        return as_given(ndtr(math.sqrt(2.0) / (np.sqrt(curvature) * within_std)))


def _angle(curvature: ArrayLike, distance: ArrayLike) -> NDArray[np.float64]:
    """√κ r, the angle at the sphere's centre, in [0, π]."""
    curvature = in_range(curvature, "curvature", 0.0, math.inf, open_high=True)
    distance = in_range(distance, "distance", 0.0, math.inf, open_high=True)
    angle = np.sqrt(curvature) * distance
    if (angle > math.pi * (1.0 + _ROUNDING)).any():
        raise ValueError(
            "distance must be at most π/√curvature, half the way around the sphere; "
            f"got {angle.max() / math.pi:g} times that"
        )
    return np.minimum(angle, math.pi)


def _std(value: ArrayLike, name: str) -> NDArray[np.float64]:
    return in_range(value, name, 0.0, math.inf, open_high=True)


def _check_spread(intrinsic_std: ArrayLike, ambient_std: ArrayLike) -> None:
    if (_std(intrinsic_std, "intrinsic_std") + _std(ambient_std, "ambient_std") == 0.0).any():
        raise ValueError("intrinsic_std and ambient_std must not both be 0: classes without spread do not overlap")
