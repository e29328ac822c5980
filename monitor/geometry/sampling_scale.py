"""The spread of points sampled from a concept's geometry: the one whose points have norms that activations have."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from monitor.geometry.subspaces import Isotropic, Subspace, check_activations


def norm_range(x: Tensor) -> tuple[float, float]:
    """Smallest and largest norm of the rows of activations [n, d], in their units."""
    norms = check_activations(x, at_least=1).norm(dim=1)
    return float(norms.min()), float(norms.max())


def calibrate_sigma(
    subspace: Subspace | Isotropic,
    low: float,
    high: float,
    *,
    generator: torch.Generator,
    n: int = 500,
    n_values: int = 10,
    lowest: float | None = None,
) -> tuple[float, float]:
    """The standard deviation at which most sampled points have a norm within [low, high].

    Parameters
    ----------
    subspace : Subspace or Isotropic
    low, high : float, 0 < low < high
        Range of norms of real activations, from `norm_range` of unrelated prompts.
    generator : torch.Generator
        Of the samples.
    n : int, >= 1
        Points sampled for each candidate.
    n_values : int, >= 2
        Candidates, spaced evenly in their logarithm from `lowest` to `high`.
    lowest : float, 0 < lowest < high, optional
        Smallest candidate; by default `low`, the published choice.

    Returns
    -------
    sigma : float
        The candidate with the largest fraction of points in range; of several, the largest.
    fraction : float in [0, 1]

    Raises
    ------
    ValueError
        For numbers out of their range.

    Notes
    -----
    MAxBench, App. I: ten candidates, 500 samples each. Points b + sigma L z have norms of about
    sqrt(‖b‖² + k sigma²). From `low` on, that is above 4 `low` at rank 16; where `high` is less, *no* published
    candidate puts a point in range, the fraction is 0, and the rule for ties then takes the largest, the worst of all.
    A `lowest` of, say, `low` / 100 (with more candidates) does not have this fault.
    """
    if not 0 < low < high < float("inf"):
        raise ValueError(f"low and high must be finite norms with 0 < low < high; got {low} and {high}")
    lowest = low if lowest is None else lowest
    if not 0 < lowest < high:
        raise ValueError(f"lowest must lie between 0 and high, {high}; got {lowest}")
    if n_values < 2:
        raise ValueError(f"n_values must be at least 2 candidates; got {n_values}")
    candidates = np.geomspace(lowest, high, n_values).tolist()
    norms = torch.stack([subspace.sample(n, sigma, generator).norm(dim=1) for sigma in candidates])
    inside = ((norms >= low) & (norms <= high)).sum(1).tolist()
    count, sigma = max(zip(inside, candidates, strict=True))  # of equal counts the larger sigma
    return sigma, count / n
