"""Dispersion of batch directions (AUSS, "activation uniformity scatter score"): do disjoint batches point one way?

N difference vectors are cut into B disjoint batches; each batch gives the unit vector d_b of its mean. With
C = ‖mean_b d_b‖ (centroid norm) four published numbers are one:

    auss_l2 = 2B (1 - C²) / (B - 1),     auss_cos = auss_l2 / 2,     trace of the covariance = 1 - C².

Functions take directions ``[..., B, d]`` and return ``[...]`` float64. Source: arXiv 2611.05272, Sec. 3.1 and App. C.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monitor.geometry.gram import check_vectors, unit

JACCARD_COORDINATES = 32


def partition(n: int, batches: int = 10, seed: int = 42) -> list[Tensor]:
    """Cut 0..n-1 into disjoint random batches.

    Parameters
    ----------
    n : int
        Number of pairs; at least `batches`.
    batches : int
        Batches wanted, >= 2. ``torch.chunk`` makes all but the last one of size ceil(n / batches), which can come out
        at *fewer* batches than wanted (n = 25, batches = 10: nine). Kept, so that values equal published ones; take
        the number of batches from the result.
    seed : int
        Of the generator that draws ``torch.randperm(n)``; 42 is the published one.

    Returns
    -------
    list of Tensor, int64
        The indices of each batch, on the CPU (the draw must not depend on the device).
    """
    if batches < 2:
        raise ValueError(f"batches must be at least 2, directions are compared with each other; got {batches}")
    if n < batches:
        raise ValueError(f"n (pairs) must be at least the number of batches, {batches}; got {n}. Use fewer batches")
    return list(torch.randperm(n, generator=torch.Generator().manual_seed(seed)).chunk(batches))


def batch_means(vectors: Tensor, batches: Sequence[Tensor]) -> Tensor:
    """Means over each batch's rows: ``[..., n, d]`` -> ``[..., B, d]`` in the dtype of `vectors`."""
    n = vectors.shape[-2]
    weights = torch.zeros(len(batches), n, dtype=vectors.dtype)
    for row, batch in enumerate(batches):
        if len(batch) == 0:
            raise ValueError(f"batches must not be empty; batch {row} is")
        weights[row, batch] = 1 / len(batch)
    return weights.to(vectors.device) @ vectors


def batch_directions(vectors: Tensor, batches: Sequence[Tensor]) -> Tensor:
    """Unit vectors of the batch means: ``[..., n, d]`` -> ``[..., B, d]`` float64.

    Raises
    ------
    ValueError
        For non-finite vectors, an empty batch, or a batch whose mean is zero (query and anonymised text equal).
    """
    return unit(batch_means(check_vectors(vectors), batches), "batch means")


def centroid_norm(directions: Tensor) -> Tensor:
    """C = ‖mean_b d_b‖, 0 (scattered) to 1 (one direction)."""
    return check_vectors(directions, "directions").mean(-2).norm(dim=-1)


def auss_l2(directions: Tensor) -> Tensor:
    """Mean squared distance over pairs of directions, 0 (one direction) to 2B/(B-1); 2 if orthogonal.

    Notes
    -----
    mean_{b != b'} ‖d_b - d_b'‖² = 2B (1 - C²) / (B - 1).
    """
    batches = directions.shape[-2]
    return 2 * batches * (1 - centroid_norm(directions).square()) / (batches - 1)


def auss_cos(directions: Tensor) -> Tensor:
    """1 - mean cosine over pairs of directions = auss_l2 / 2; 0 to B/(B-1)."""
    return auss_l2(directions) / 2


def auss_cos2(directions: Tensor) -> Tensor:
    """1 - mean squared cosine over pairs of directions, 0 (one line, whatever the signs) to 1 (orthogonal)."""
    cosines = _cosines(directions)
    batches = cosines.shape[-1]
    return 1 - (cosines.square().sum((-2, -1)) - batches) / (batches * (batches - 1))


def auss_jac(directions: Tensor, k: int = JACCARD_COORDINATES) -> Tensor:
    """Mean Jaccard distance between the sets of the k largest |coordinates|, 0 (same sets) to 1 (disjoint)."""
    directions = check_vectors(directions, "directions")
    if not 1 <= k <= directions.shape[-1]:
        raise ValueError(f"k must be between 1 and the dimension, {directions.shape[-1]}; got {k}")
    members = torch.zeros_like(directions).scatter_(-1, directions.abs().topk(k).indices, 1.0)
    shared = members @ members.mT
    return _mean_off_diagonal(1 - shared / (2 * k - shared))


def auss_jac_soft(directions: Tensor) -> Tensor:
    """Mean soft Jaccard distance of the positive parts p = max(d, 0): 1 - Σ min(p, p') / Σ max(p, p'); 0 to 1.

    The second of the two definitions of AUSS_Jac in arXiv 2611.05272 (App. C; Sec. 3.1 has index sets, `auss_jac`).
    """
    positive = check_vectors(directions, "directions").clamp_min(0)
    first, second = torch.triu_indices(positive.shape[-2], positive.shape[-2], 1, device=positive.device)
    a, b = positive[..., first, :], positive[..., second, :]
    larger = torch.maximum(a, b).sum(-1)
    if (larger == 0).any():
        raise ValueError("directions must have a positive coordinate in each pair: the soft Jaccard distance is 0/0")
    return (1 - torch.minimum(a, b).sum(-1) / larger).mean(-1)


def second_moment_top(directions: Tensor) -> Tensor:
    """λ_max of (1/B) Σ d_b d_bᵀ, 1/B (orthogonal) to 1 (one line)."""
    cosines = _cosines(directions)  # same non-zero spectrum as the d x d matrix
    return torch.linalg.eigvalsh(cosines / cosines.shape[-1])[..., -1]


def cov_top(directions: Tensor) -> Tensor:
    """λ_max of the biased covariance (1/B) Σ (d_b - d̄)(d_b - d̄)ᵀ, 0 to 1."""
    directions = check_vectors(directions, "directions")
    centred = directions - directions.mean(-2, keepdim=True)
    return torch.linalg.eigvalsh(centred @ centred.mT / directions.shape[-2])[..., -1].clamp_min(0)


def cov_trace(directions: Tensor) -> Tensor:
    """Trace of the biased covariance of the directions = 1 - C²; 0 to 1."""
    return 1 - centroid_norm(directions).square()


def _cosines(directions: Tensor) -> Tensor:
    directions = check_vectors(directions, "directions")
    return directions @ directions.mT


def _mean_off_diagonal(matrix: Tensor) -> Tensor:
    size = matrix.shape[-1]
    return (matrix.sum((-2, -1)) - matrix.diagonal(dim1=-2, dim2=-1).sum(-1)) / (size * (size - 1))
