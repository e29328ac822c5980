"""Intrinsic dimension of a cloud of points, from distances to nearest neighbours alone."""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 1024  # of a distance matrix at once
# A gap below this share of the cloud's size is rounding: such points are one point.
_SAME = 1e-9
# Below this share distances from inner products are known to fewer than five digits.
_DOUBTFUL = 1e-5


def mle_dimension(points: Tensor, k: tuple[int, int] = (10, 20)) -> Tensor:
    """Maximum-likelihood intrinsic dimension.

    Parameters
    ----------
    points : Tensor, [n, L, d] or [n, d]
        Any float dtype; layers are read one by one.
    k : (int, int)
        Smallest and largest number of neighbours, both included; at least 2. The estimates are averaged.

    Returns
    -------
    Tensor, [L] (or scalar), float64, on the device of `points`
        Above 0; higher: the cloud varies in more directions.

    Raises
    ------
    ValueError
        For other shapes, points that are not finite, or fewer than k + 1 different points.

    Notes
    -----
    With T_j the distance to the j-th neighbour, m_k⁻¹ = mean over points and j < k of log(T_k / T_j): Levina and Bickel
    (2004), with inverses averaged over points as MacKay and Ghahramani (2005) correct it; then the mean over k, as in
    arXiv 2609.22337, Sec. V-F. Points that coincide count once. The estimate falls short of a high dimension (by 40 %
    at 25 on linear manifolds, there), because neighbours of few points are far.
    """
    low, high = k
    if not 2 <= low <= high:
        raise ValueError(f"k must be two numbers of neighbours, at least 2, in order; got {k!r}")

    def of_layer(cloud: Tensor) -> Tensor:
        logs = _neighbour_distances(cloud, high).log()
        estimates = [1 / (logs[:, j - 1 : j] - logs[:, : j - 1]).mean() for j in range(low, high + 1)]
        return torch.stack(estimates).mean()

    return _by_layer(points, of_layer)


def two_nn_dimension(points: Tensor, discard: float = 0.1) -> Tensor:
    """Intrinsic dimension from the two nearest neighbours of each point.

    Parameters
    ----------
    points : Tensor, [n, L, d] or [n, d]
    discard : float in [0, 1)
        Share of the points with the largest ratios that is left out of the fit.

    Returns
    -------
    Tensor, [L] (or scalar), float64
        Above 0; higher: the cloud varies in more directions.

    Raises
    ------
    ValueError
        As `mle_dimension`; for `discard` outside [0, 1).

    Notes
    -----
    The ratio μ of the second to the first neighbour's distance has the distribution 1 - μ⁻ᵈ: d is the slope of
    -log(1 - i/n) on log μ_(i) through the origin (Facco et al., Scientific Reports 7, 2017). It looks at the smallest
    scale there is: of minimal pairs, at the distance within a pair.
    """
    if not 0 <= discard < 1:
        raise ValueError(f"discard must be a share from 0 up to but not 1, got {discard!r}")

    def of_layer(cloud: Tensor) -> Tensor:
        nearest = _neighbour_distances(cloud, 2)
        ratios = (nearest[:, 1] / nearest[:, 0]).log().sort().values
        n = len(ratios)
        kept = max(2, int(n * (1 - discard)))
        share = torch.arange(1, n + 1, dtype=torch.float64, device=ratios.device) / n
        x, y = ratios[:kept], -torch.log1p(-share[:kept].clamp_max(1 - 0.5 / n))
        return (x * y).sum() / x.square().sum()

    return _by_layer(points, of_layer)


def _by_layer(points: Tensor, of_layer) -> Tensor:
    if points.ndim not in (2, 3) or 0 in points.shape:
        raise ValueError(f"points must be [n, L, d] or [n, d] and not empty; got shape {tuple(points.shape)}")
    if not bool(torch.isfinite(points).all()):
        raise ValueError("points must be finite; some are inf or nan")
    if points.ndim == 2:
        return of_layer(points)
    return torch.stack([of_layer(points[:, layer]) for layer in range(points.shape[1])])


def _neighbour_distances(cloud: Tensor, k: int) -> Tensor:
    """Distances [m, k] of each of the m different points to its k nearest others, in order; in sizes of the cloud."""
    x = cloud.to(torch.float64)
    x = x - x.mean(0)
    size = x.square().sum(1).mean().sqrt()
    # Coinciding points are at distance 0 of each other, or at that of rounding: keep one of each.
    x = torch.unique((x / size.clamp_min(torch.finfo(torch.float64).tiny) / _SAME).round(), dim=0) * _SAME
    if len(x) < k + 1:
        raise ValueError(
            f"points must hold more than {k} different points, got {len(x)}; give more points or a smaller k"
        )
    return torch.cat([_nearest(x, rows, k) for rows in torch.arange(len(x), device=x.device).split(_ROWS)])


def _nearest(x: Tensor, rows: Tensor, k: int) -> Tensor:
    distances = torch.cdist(x[rows], x)
    distances[torch.arange(len(rows), device=x.device), rows] = torch.inf  # a point is no neighbour of its own
    near = distances.topk(k, dim=1, largest=False)
    # These distances come from products, whose rounding is as long as the shortest gaps: those are taken again.
    at = (near.values < _DOUBTFUL).nonzero(as_tuple=True)
    again = (x[rows[at[0]]] - x[near.indices[at]]).norm(dim=1)
    return near.values.index_put(at, again).sort(dim=1).values
