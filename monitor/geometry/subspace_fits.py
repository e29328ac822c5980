"""The plain concept geometries: affine subspaces {L q + b} fitted to activations that precede a concept's words.

Rows x [n, d] are activations in float32 or float64 on any device, labels [n] the entity of each. Names and definitions
are those of MAxBench, Sec. 3.1 and App. B: b is the mean of all rows for affine methods and 0 for single directions.
Everything is computed in float64 and returned in float32 on the device of x; signs of directions are fixed, so that
equal inputs give equal results. `Subspace.linear` gives the form through the origin.
"""

from __future__ import annotations

import torch
from sklearn.decomposition import FactorAnalysis
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from monitor.geometry.subspaces import (
    Isotropic,
    Subspace,
    check_activations,
    check_entities,
    check_rank,
    leading_directions,
)

# Exact SVDs in every step of factor analysis below this size; above it scikit-learn's randomised ones, far cheaper.
_EXACT_SVD = 256


def pca(x: Tensor, rank: int) -> Subspace:
    """Leading principal directions of the rows around their mean.

    Parameters
    ----------
    x : Tensor [n, d]
    rank : int, 1 to min(n - 1, d)

    Returns
    -------
    Subspace
        Columns by falling variance.

    Raises
    ------
    ValueError
        For x of another shape or not finite, a rank out of range, or rows that span fewer directions.
    """
    x = check_activations(x)
    check_rank(rank, min(len(x) - 1, x.shape[1]), f"min(n - 1, d) of x [{len(x)}, {x.shape[1]}]")
    mean = x.mean(0)
    return Subspace(leading_directions(x - mean, rank), mean, "pca")


def factor_analysis(x: Tensor, rank: int) -> Subspace:
    """Span of the loadings of a factor model x = b + L z + e, e with a variance of its own in each coordinate.

    Parameters
    ----------
    x : Tensor [n, d]
    rank : int, 1 to min(n - 1, d)
        Number of factors.

    Returns
    -------
    Subspace
        The loadings' span; columns are its principal directions, by falling size of the loadings.

    Raises
    ------
    ValueError
        As `pca`.

    Notes
    -----
    scikit-learn's `FactorAnalysis` (maximum likelihood by EM), on one copy of x in the host's memory, at unit mean
    variance: it adds a small fixed number to variances, which would drown those of x in other units. With more than 256
    rows and columns its inner SVDs are randomised (seven power iterations, fixed seed).
    """
    rows = check_activations(x)
    n, d = rows.shape
    check_rank(rank, min(n - 1, d), f"min(n - 1, d) of x [{n}, {d}]")
    if bool((rows == rows[0]).all()):
        raise ValueError("x must vary over its rows; all are equal")
    if min(n, d) <= _EXACT_SVD:
        model = FactorAnalysis(rank, svd_method="lapack")
    else:
        model = FactorAnalysis(rank, svd_method="randomized", iterated_power=7, random_state=0)
    scale = rows.var(0).mean().sqrt()
    loadings = torch.from_numpy(model.fit((rows / scale).cpu().numpy()).components_).to(rows)
    return Subspace(leading_directions(loadings, rank, "the factor loadings"), rows.mean(0), "factor_analysis")


def diff_mean(x: Tensor, negatives: Tensor) -> Subspace:
    """DiffMean-r1: the direction from the mean of activations without the concept to the mean of those with it.

    Parameters
    ----------
    x : Tensor [n, d]
        Positives.
    negatives : Tensor [m, d]

    Returns
    -------
    Subspace
        Rank 1, offset 0. Its sign is the method's own: it points towards the concept.

    Raises
    ------
    ValueError
        For shapes that do not fit, entries that are not finite, or equal means.
    """
    x, negatives = check_activations(x, at_least=1), check_activations(negatives, "negatives", at_least=1)
    if x.shape[1] != negatives.shape[1]:
        raise ValueError(f"x and negatives must have the same width; got {x.shape[1]} and {negatives.shape[1]}")
    difference = x.mean(0) - negatives.mean(0)
    length = difference.norm()
    if length == 0:
        raise ValueError("x and negatives must differ in their means: the difference is zero and has no direction")
    return Subspace((difference / length)[:, None], torch.zeros_like(difference), "diff_mean")


def diff_mean_pairs(x: Tensor, labels: Tensor, rank: int) -> Subspace:
    """Leading directions among the differences between the entities' centroids.

    Parameters
    ----------
    x : Tensor [n, d]
    labels : Tensor [n], int64, or sequence of int
        Entity of each row, at least two entities.
    rank : int, 1 to min(C - 1, d)
        C entities have C - 1 independent differences.

    Returns
    -------
    Subspace

    Raises
    ------
    ValueError
        For shapes that do not fit, x not finite, one entity only, a rank out of range, or centroids that span fewer
        directions.

    Notes
    -----
    MAxBench stacks all C(C-1)/2 differences m_i - m_j and takes the leading singular vectors. As
    Σ_{i<j} (m_i - m_j)(m_i - m_j)ᵀ = C Σ_i (m_i - m)(m_i - m)ᵀ with m the mean of the centroids, these are the
    principal directions of the centroids, and nothing is stacked.
    """
    x = check_activations(x)
    centroids = entity_centroids(x, labels)
    limit = min(len(centroids) - 1, x.shape[1])
    check_rank(rank, limit, f"min(C - 1, d) of C = {len(centroids)} entities in {x.shape[1]} dimensions")
    directions = leading_directions(centroids - centroids.mean(0), rank, "the differences of the entities' centroids")
    return Subspace(directions, x.mean(0), "diff_mean_pairs")


def entity_centroids(x: Tensor, labels: Tensor) -> Tensor:
    """Mean row of each entity, [C, d] float64, in the order of the labels' values."""
    x = check_activations(x)
    index, count = check_entities(labels, len(x), x.device)
    sums = x.new_zeros(count, x.shape[1]).index_add_(0, index, x)
    return sums / torch.bincount(index, minlength=count)[:, None]


def linear_probe(x: Tensor, labels: Tensor, rank: int, *, C: float = 1.0) -> Subspace:
    """Leading left singular vectors of the weights of a linear classifier of the entities.

    Parameters
    ----------
    x : Tensor [n, d]
    labels : Tensor [n], int64, or sequence of int
    rank : int, 1 to min(C - 1, d) for C entities
        The weights of a softmax add up to zero over the entities, so that they span one direction less.
    C : float, > 0
        Inverse strength of the l2 penalty, as in scikit-learn.

    Returns
    -------
    Subspace
        The offset is the mean of the rows: the classifier's bias lives in the space of its outputs.

    Raises
    ------
    ValueError
        As `diff_mean_pairs`; for C that is not positive.

    Notes
    -----
    scikit-learn's multinomial `LogisticRegression`, on one copy of x in the host's memory, centred and divided by one
    number, the root-mean-square of its entries, so that C means the same for activations of any size. Not standardised
    one by one: a penalised W is a combination of the rows it was trained on. In standardised coordinates it lies in the
    span of D⁻¹x for the scales D, hence in that of D⁻²x in the units of x, which is another subspace than theirs.
    """
    if not C > 0:
        raise ValueError(f"C must be positive; got {C}")
    rows = check_activations(x)
    index, count = check_entities(labels, len(rows), rows.device)
    limit = min(count - 1, rows.shape[1])
    check_rank(rank, limit, f"min(C - 1, d) of C = {count} entities in {rows.shape[1]} dimensions")
    probe = LogisticRegression(C=C, max_iter=2000).fit(of_unit_size(rows).cpu().numpy(), index.cpu().numpy())
    weights = torch.from_numpy(probe.coef_).to(rows)
    return Subspace(leading_directions(weights, rank, "the probe's weights"), rows.mean(0), "linear_probe")


def of_unit_size(rows: Tensor) -> Tensor:
    """Float64 rows less their mean, divided by the root-mean-square of what is left over all entries."""
    centred = rows - rows.mean(0)
    scale = centred.square().mean().sqrt()
    if scale <= 1e-12 * rows.abs().max():  # no more than rounding
        raise ValueError("x must vary over its rows; all are equal")
    return centred / scale


def isotropic(x: Tensor) -> Isotropic:
    """The baseline without directions: points around the mean of the rows, alike in all of them (MAxBench Sec. 5.1)."""
    return Isotropic(check_activations(x, at_least=1).mean(0).float())
