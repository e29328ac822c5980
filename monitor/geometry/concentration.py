"""The concentration index: how much one direction stands out of a spectrum, and what that says about a separation.

No labels are used. On real representations the index itself does not rank difficulty (arXiv 2609.22337, experiment E7):
other directions than the signal's carry most of the variance there.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from monitor.geometry.gram import check_vectors
from monitor.geometry.ranges import as_given, in_range

_ROUNDING = 1e-9


def concentration_index(features: Tensor, n_components: int = 50) -> Tensor:
    """Excess of the largest eigenvalue over the mean one, as a share of the variance.

    Parameters
    ----------
    features : Tensor, [n, d] or [n, L, d]
        Pooled states of n texts; n >= 2. Layers are read one by one.
    n_components : int, >= 2
        Leading principal components kept. Where there are fewer, min(n - 1, d), all are.

    Returns
    -------
    Tensor, scalar or [L], float64, on the device of ``features``
        β in [0, 1 - 1/k] for k components kept. 0: all directions alike; 1 - 1/k: one direction is all there is. Higher
        means easier to detect where all variance but the signal's is alike in every direction.

    Raises
    ------
    ValueError
        For other shapes, values that are not finite, and layers without any variance.

    Notes
    -----
    β = (λ₁ - λ̄)/tr Σ, λ̄ = tr Σ/k (arXiv 2609.22337, Definition 1). As in experiment E7, Σ is that of the features
    standardised one by one (constant ones are 0), reduced to their k leading components: λ₁ ... λ_k are its largest
    eigenvalues. Give the same k to `separation_from_concentration`.
    """
    if features.ndim not in (2, 3):
        raise ValueError(f"features must be [n, d] or [n, L, d], got shape {tuple(features.shape)}")
    if n_components < 2:
        raise ValueError(f"n_components must be at least 2, got {n_components}")
    layers = features[:, None] if features.ndim == 2 else features
    # One layer at a time: all of them in float64 at once would double the memory of the activations several times.
    indices = [_index(layers[:, layer], n_components) for layer in range(layers.shape[1])]
    return indices[0] if features.ndim == 2 else torch.stack(indices)


def _index(features: Tensor, n_components: int) -> Tensor:
    x = check_vectors(features, "features")
    n, d = x.shape
    size = x.abs().amax(0)
    x = x - x.mean(0)
    std = x.square().mean(0).sqrt()
    varies = std > 1e-12 * size  # less is rounding
    x = torch.where(varies, x / torch.where(varies, std, 1.0), 0.0)
    second_moments = x.mT @ x if d <= n else x @ x.mT  # the same eigenvalues above 0
    k = min(n_components, n - 1, d)
    if k < 2:
        raise ValueError(f"features must have at least 3 rows and 2 columns to have a spectrum, got {n} and {d}")
    leading = torch.linalg.eigvalsh(second_moments)[-k:].clamp(min=0.0)
    total = leading.sum()
    if total <= 0.0:
        raise ValueError("features must vary over the texts; in some layer all rows are the same")
    return (leading[-1] / total - 1.0 / k).clamp(min=0.0)


def separation_from_concentration(
    beta: ArrayLike, purity: ArrayLike, dimension: ArrayLike = 50
) -> float | NDArray[np.float64]:
    """The separation at which isotropic noise has a concentration index.

    Parameters
    ----------
    beta : float or array_like, [0, 1 - 1/d]
    purity : float or array_like, (0, 1]
    dimension : float or array_like, >= 2
        d, the number of components the index was computed on.

    Returns
    -------
    float, or float64 array of the broadcast shape
        s in [0, inf], increasing in beta. inf at the pole 1 - 1/d: all variance lies in one direction.

    Raises
    ------
    ValueError
        For values outside their range: above the pole no spectrum has that index.

    Notes
    -----
    s² = 4dβ / (a (1 - 1/d - β)) (arXiv 2609.22337, Lemma 2, eq. 13). It takes all concentration for the
    signal's: pure noise of n samples in d dimensions has an index of about 2/sqrt(nd) + 1/n, read as a separation too.
    """
    beta = in_range(beta, "beta", 0.0)
    purity = in_range(purity, "purity", 0.0, 1.0, open_low=True)
    dimension = _dimension(dimension)
    gap = 1.0 - 1.0 / dimension - beta
    if (gap < -_ROUNDING).any():
        raise ValueError(
            "beta must be at most 1 - 1/dimension, the index of a single direction; "
            f"got {beta.max():g} with dimension {dimension.min():g} (was the index computed on as many components?)"
        )
    pole = gap <= _ROUNDING
    squared = np.where(pole, math.inf, 4.0 * dimension * beta / (purity * np.where(pole, 1.0, gap)))
    return as_given(np.sqrt(squared))


def concentration_from_separation(
    separation: ArrayLike, purity: ArrayLike, dimension: ArrayLike = 50
) -> float | NDArray[np.float64]:
    """Concentration index of two clusters in isotropic noise: the inverse of `separation_from_concentration`.

    Parameters
    ----------
    separation : float or array_like, [0, inf)
    purity : float or array_like, [0, 1]
    dimension : float or array_like, >= 2

    Returns
    -------
    float, or float64 array of the broadcast shape
        In [0, 1 - 1/d).

    Notes
    -----
    Labels balanced, the neutral texts at the midpoint: the covariance is I + (a s²/4) u uᵀ, so that with t = a s²/4

        β = t (1 - 1/d) / (d + t)

    (arXiv 2609.22337, Lemma 2, eq. 13, in units of the within-class standard deviation).
    """
    separation = in_range(separation, "separation", 0.0, math.inf, open_high=True)
    dimension = _dimension(dimension)
    signal = in_range(purity, "purity", 0.0, 1.0) * separation**2 / 4.0
    return as_given(signal * (1.0 - 1.0 / dimension) / (dimension + signal))


def _dimension(value: ArrayLike) -> NDArray[np.float64]:
    return in_range(value, "dimension", 2.0, math.inf, open_high=True)
