"""Could this probe have told? A known effect planted in a model's own activations, and how often the probe finds it."""

from __future__ import annotations

import torch
from scipy import stats
from torch import Tensor

from monitor.geometry.auc import auc
from monitor.geometry.probes import logistic_probes
from monitor.geometry.separation import ledoit_wolf_shrinkage


def planted_power(
    features: Tensor,
    labels: Tensor,
    folds: Tensor,
    n_marked: int,
    *,
    separation: float,
    threshold: float,
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
    n_replicates : int, default 16
    seed : int
        Of an own generator; the global ones are neither read nor moved.

    Returns
    -------
    power : float in [0, 1]

    Notes
    -----
    A replicate is a null with an effect added. The null exchanges the members of every pair at random and
    permutes the neutral rows, which leaves no label in the features and everything else as it is. The effect moves
    marked rows by +-s v/2, v = Sigma^(1/2) u with u uniform on the unit sphere and Sigma the Ledoit-Wolf covariance of
    the null, so that v' Sigma^-1 v = 1. The power is that of a normal with the replicates' mean and standard deviation
    of the AUC. Unlike the closed forms of arXiv 2609.22337 (the optimal probe's) it includes what training the probe
    on n samples costs. Where the pairs do differ, their difference stays in as noise, and the power is that against
    this noise.
    """
    x = features.to(torch.float64)
    n, d = x.shape
    half = n_marked // 2
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(n_replicates, d, generator=generator, dtype=torch.float64).to(x.device)
    directions = _root_of_covariance(x, directions / directions.norm(dim=1, keepdim=True))
    replicates = []
    for direction in directions:
        exchange = (torch.rand(half, generator=generator) < 0.5).to(x.device)[:, None]
        positive = torch.where(exchange, x[half:n_marked], x[:half])
        negative = torch.where(exchange, x[:half], x[half:n_marked])
        order = torch.randperm(n - n_marked, generator=generator).to(x.device)
        shift = separation / 2 * direction
        replicates.append(torch.cat([positive + shift, negative - shift, x[n_marked:][order]]))
    areas = auc(logistic_probes(torch.stack(replicates, dim=1), labels, folds), labels).mean(0)
    return float(stats.norm.sf(threshold, float(areas.mean()), max(float(areas.std()), 1e-6)))


def _root_of_covariance(x: Tensor, vectors: Tensor) -> Tensor:
    """Sigma^(1/2) u for the rows u of `vectors`, Sigma = (1 - rho) S + rho mu I of the rows of x [n, d]."""
    x = x - x.mean(0)
    rho = ledoit_wolf_shrinkage(x)
    _, singular, basis = torch.linalg.svd(x, full_matrices=False)
    ridge = rho * x.square().mean()
    root = ((1 - rho) * singular.square() / len(x) + ridge).sqrt()
    return ridge.sqrt() * vectors + ((vectors @ basis.mT) * (root - ridge.sqrt())) @ basis
