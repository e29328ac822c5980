"""Curvature of a cloud of points: how far neighbours fall from the tangent plane, against how far along it they are."""

from __future__ import annotations

import torch
from torch import Tensor


def sagitta_curvature(
    points: Tensor, dimension: int, n_neighbours: int | None = None, *, against: str = "chord"
) -> Tensor:
    """Mean sectional curvature, as if the cloud lay on spheres of its intrinsic dimension.

    Parameters
    ----------
    points : Tensor, [n, d]
        Any float dtype, different points.
    dimension : int
        Intrinsic dimension, at least 1 and below d.
    n_neighbours : int, optional
        Neighbours of a point that are looked at; by default 8 for each of its directions, at least 40, and no more
        than n - 1.
    against : {"chord", "tangent"}
        What the fall of a neighbour is regressed on: its squared distance, or, as published, the tangential part of it.

    Returns
    -------
    Tensor, scalar, float64, on the device of `points`
        κ in 1 / (unit of the points)²: 1/R² on a sphere of radius R. 0 where the halves of the neighbours disagree.

    Raises
    ------
    ValueError
        For other shapes, points that are not finite, a dimension out of range, too few points.

    Notes
    -----
    On a sphere of radius R a point at distance c, and at distance t along the tangent plane, has fallen from that plane
    by h = R - sqrt(R² - t²): about t²/(2R), and exactly c²/(2R). About each point, with a tangent plane by PCA, the
    normal residuals of its neighbours are regressed on the squared distance, intercept included: a slope vector a with
    |a| = 1/(2R) in the direction of the fall.

    Two halves of the neighbours are crossed twice. Each half is regressed against the plane of the other, since a plane
    bends towards the points it is fitted to and hides a part of their fall; and κ = 4 a_A·a_B, averaged over points,
    since the noise of all normal directions would inflate |a|².

    arXiv 2609.22337, Sec. V-F, regresses on t². That is too large by a share of about t²/(2R²): by 5 to 17 % on spheres
    of 2 to 5 dimensions with 1,000 points, and by more with more neighbours, where c² is off by 5 % at most. Either way
    noise must stay below the fall. Where it does not, the curvature of strongly curved clouds comes out too small; more
    neighbours help.
    """
    if points.ndim != 2 or 0 in points.shape:
        raise ValueError(f"points must be [n, d] and not empty; got shape {tuple(points.shape)}")
    if not bool(torch.isfinite(points).all()):
        raise ValueError("points must be finite; some are inf or nan")
    if against not in ("chord", "tangent"):
        raise ValueError(f'against must be "chord" or "tangent"; got {against!r}')
    n, d = points.shape
    if isinstance(dimension, bool) or not isinstance(dimension, int) or not 1 <= dimension < d:
        raise ValueError(
            f"dimension must be a whole number from 1 to {d - 1}, below the width of the points; got {dimension!r}"
        )
    if n_neighbours is None:
        n_neighbours = min(max(40, 8 * dimension), n - 1)
    if not 2 * dimension + 4 <= n_neighbours <= n - 1:
        raise ValueError(
            f"n_neighbours must be from {2 * dimension + 4} (for dimension {dimension}) to {n - 1} (one less than "
            f"there are points), got {n_neighbours}"
        )
    x = points.to(torch.float64)
    x = x - x.mean(0)
    generator = torch.Generator().manual_seed(0)
    half = torch.randperm(n_neighbours, generator=generator).to(x.device) < n_neighbours // 2
    products = []
    for rows in torch.arange(n, device=x.device).split(max(1, (1 << 24) // max(n_neighbours * d, n))):
        nearest = torch.cdist(x[rows], x).topk(n_neighbours + 1, dim=1, largest=False).indices[:, 1:]
        around = x[nearest] - x[rows, None]  # [b, k, d]
        slopes = [_slope(around[:, part], around[:, ~part], dimension, against) for part in (half, ~half)]
        products.append((slopes[0] * slopes[1]).sum(-1))
    return 4 * torch.cat(products).mean().clamp_min(0)


def _slope(around: Tensor, others: Tensor, dimension: int, against: str) -> Tensor:
    """Slopes [b, d] of the normal residuals of `around` [b, k, d] on squared distance, plane from `others`.

    A plane fitted to the same points would bend towards their residuals and hide part of the fall.
    """
    centred = others - others.mean(1, keepdim=True)
    basis = torch.linalg.svd(centred, full_matrices=False).Vh[:, :dimension]
    along = around @ basis.mT
    off = around - along @ basis
    x = (around if against == "chord" else along).square().sum(-1, keepdim=True)
    x = x - x.mean(1, keepdim=True)
    return (x * off).sum(1) / x.square().sum(1).clamp_min(torch.finfo(x.dtype).tiny)
