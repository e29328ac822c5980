"""Could this probe have told? A known effect planted in a model's own activations, and how often the probe finds it."""

from __future__ import annotations

import math

import torch
from scipy import stats
from torch import Tensor

from monitor.geometry.auc import auc
from monitor.geometry.probes import check_protocol, logistic_probes
from monitor.geometry.separation import ledoit_wolf_shrinkage


def planted_power(
    features: Tensor,
    labels: Tensor,
    folds: Tensor,
    n_marked: int,
    *,
    separation: float,
    threshold: float,
    groups: Tensor | None = None,
    n_replicates: int = 16,
    seed: int = 0,
) -> float:
    """Share of planted effects that the cross-validated logistic probe detects.

    Parameters
    ----------
    features : Tensor [n, d], floating
        Marked pairs first: row i is the positive and row n_marked/2 + i the negative member; then neutral rows.
    labels : Tensor [n]
        1 and 0; the marked rows' are n_marked/2 ones, then as many zeros.
    folds : LongTensor [S, n]
        As for the probe itself.
    n_marked : int, even
    separation : float
        Mahalanobis distance s of the planted classes.
    threshold : float
        The AUC, mean over seeds, from which on the test rejects.
    groups : Tensor [n], integer, optional
        Context of each row. Pairs of one context are exchanged together; without it every pair by itself.
    n_replicates : int, default 16
    seed : int
        Of an own generator; the global ones are neither read nor moved.

    Returns
    -------
    power : float in [0, 1]

    Raises
    ------
    ValueError
        For an odd or impossible `n_marked`, labels in another order, a separation below 0 or not finite, a threshold
        that is not finite, fewer than two replicates; and as `logistic_probes` does.

    Notes
    -----
    A replicate is a null with an effect added. The null exchanges the members of the pairs at random, context by
    context, and permutes the neutral rows, which leaves no label in the features and everything else as it is. The
    effect moves marked rows by +-s v/2, v = Sigma^(1/2) u with u uniform on the unit sphere and Sigma the Ledoit-Wolf
    covariance of the null, so that v' Sigma^-1 v = 1. The power is that of a normal with the replicates' mean and
    standard deviation of the AUC. Unlike the closed forms of arXiv 2609.22337 (the optimal probe's) it includes what
    training the probe on n samples costs. Where the pairs do differ, their difference stays in as noise, and the power
    is that against this noise.
    """
    check_protocol(features, labels, folds)
    _check_planting(features, labels, n_marked, separation, threshold, n_replicates)
    x = features.to(torch.float64)
    n, d = x.shape
    half = n_marked // 2
    context = torch.arange(half) if groups is None else _numbered(groups[:half])
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(n_replicates, d, generator=generator, dtype=torch.float64).to(x.device)
    directions = _root_of_covariance(x, directions / directions.norm(dim=1, keepdim=True))
    replicates = []
    for direction in directions:
        exchange = (torch.rand(int(context.max()) + 1, generator=generator) < 0.5)[context].to(x.device)[:, None]
        positive = torch.where(exchange, x[half:n_marked], x[:half])
        negative = torch.where(exchange, x[:half], x[half:n_marked])
        order = torch.randperm(n - n_marked, generator=generator).to(x.device)
        shift = separation / 2 * direction
        replicates.append(torch.cat([positive + shift, negative - shift, x[n_marked:][order]]))
    areas = auc(logistic_probes(torch.stack(replicates, dim=1), labels, folds), labels).mean(0)
    return float(stats.norm.sf(threshold, float(areas.mean()), max(float(areas.std()), 1e-6)))


def _numbered(groups: Tensor) -> Tensor:
    """Groups as 0, 1, ... in the order of their first appearance, on the CPU."""
    numbers: dict[int, int] = {}
    return torch.tensor([numbers.setdefault(group, len(numbers)) for group in groups.tolist()])


def _check_planting(
    features: Tensor, labels: Tensor, n_marked: int, separation: float, threshold: float, n_replicates: int
) -> None:
    if features.ndim != 2:
        raise ValueError(f"`features` must have the shape [n, d], got {tuple(features.shape)}.")
    if not 2 <= n_marked <= len(features) or n_marked % 2:
        raise ValueError(f"`n_marked` must be even and from 2 to {len(features)}, the rows there are; got {n_marked}.")
    half = n_marked // 2
    if not bool((labels[:half] == 1).all()) or bool((labels[half:n_marked] == 1).any()):
        raise ValueError("`labels` of the marked rows must be `n_marked` / 2 ones, then as many zeros.")
    if not 0.0 <= separation < math.inf:
        raise ValueError(f"`separation` must be at least 0 and finite, got {separation}.")
    if not math.isfinite(threshold):
        raise ValueError(f"`threshold` must be finite, got {threshold}.")
    if n_replicates < 2:
        raise ValueError(f"`n_replicates` must be at least 2, got {n_replicates}: the power is that of their spread.")


def _root_of_covariance(x: Tensor, vectors: Tensor) -> Tensor:
    """Sigma^(1/2) u for the rows u of `vectors`, Sigma = (1 - rho) S + rho mu I of the rows of x [n, d]."""
    x = x - x.mean(0)
    rho = ledoit_wolf_shrinkage(x)
    _, singular, basis = torch.linalg.svd(x, full_matrices=False)
    ridge = rho * x.square().mean()
    root = ((1 - rho) * singular.square() / len(x) + ridge).sqrt()
    return ridge.sqrt() * vectors + ((vectors @ basis.mT) * (root - ridge.sqrt())) @ basis
