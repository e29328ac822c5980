"""Is a concept still where it was? What held-out entities, negatives, and two subspaces side by side say about it.

Pure functions for a measure during training: a subspace fitted to some entities of a concept, then asked about others
(completeness), about texts without the concept (exclusivity), and about itself at another step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from monitor.geometry.auc import auc
from monitor.geometry.probes import grouped_folds
from monitor.geometry.subspaces import Isotropic, Subspace, check_activations, check_entities, principal_angles

# Permuted one-hot targets alive at once, in numbers: 64 MB.
_MAX_TARGETS = 1 << 23


def coverage(subspace: Subspace | Isotropic, centroids: Tensor) -> Tensor:
    """Share of each entity's squared distance from the offset that lies inside a subspace.

    Parameters
    ----------
    subspace : Subspace
    centroids : Tensor [m, d]
        Mean activation of each entity, best of entities the subspace was not fitted to.

    Returns
    -------
    Tensor [m], float64
        In [0, 1]; higher: more complete. An entity exactly at the offset is inside (1).

    Raises
    ------
    ValueError
        For centroids of another shape or width, or not finite.

    Notes
    -----
    ‖LLᵀ(c - b)‖² / ‖c - b‖². Of any point, subspaces of rank k turned at random have k/d in expectation. Activations
    crowd into few directions, and whatever lies along those covers more: compare with another concept's subspace, too.
    """
    centroids = check_activations(centroids, "centroids", at_least=1)
    total = (centroids - subspace.offset.double()).square().sum(-1)
    inside = (total - subspace.distance(centroids).square()).clamp_min(0)
    return torch.where(total > 0, inside / total.clamp_min(1e-300), 1.0)


def exclusion(positives: Tensor, negatives: Tensor) -> float:
    """Probability that an activation without the concept lies farther from its subspace than one with it.

    Parameters
    ----------
    positives : Tensor [n]
        Distances of activations of the concept, best of entities the subspace was not fitted to.
    negatives : Tensor [m]
        Distances of others.

    Returns
    -------
    float in [0, 1]
        AUC of the distance. 1/2: no exclusion; 1: every negative is farther; below 1/2: the negatives are nearer.
    """
    distances = torch.cat([positives, negatives])
    return float(auc(distances, torch.arange(len(distances), device=distances.device) >= len(positives)))


def offset_drift(now: Subspace, reference: Subspace, origin: Tensor | None = None) -> float:
    """How far the offset moved, as a share of how far the reference's lies from `origin`.

    Parameters
    ----------
    now, reference : Subspace
        Affine, of one space.
    origin : Tensor [d], optional
        The mean of activations without the concept, so that 1 is a move as long as the concept is away from them. By
        default 0: a share of the offset's own length.

    Returns
    -------
    float, >= 0
        ‖b_now - b_reference‖ / ‖b_reference - origin‖. Lower: the concept's centre stayed.

    Raises
    ------
    ValueError
        For spaces of different width, an origin of another shape, or a reference whose offset is the origin.
    """
    if now.dim != reference.dim:
        raise ValueError(f"now and reference must lie in the same space; got {now.dim} and {reference.dim} dimensions")
    start = reference.offset.double()
    origin = torch.zeros_like(start) if origin is None else origin.to(start)
    if origin.shape != start.shape:
        raise ValueError(f"origin must be [d], d = {reference.dim}; got shape {tuple(origin.shape)}")
    length = float((start - origin).norm())
    if length == 0:
        raise ValueError("reference must have an offset other than origin, a drift is a share of their distance")
    return float((now.offset.double() - start).norm()) / length


@dataclass(frozen=True)
class AngleSummary:
    """Principal angles between two subspaces in degrees, 0 to 90: `smallest`, `mean`, `largest`."""

    smallest: float
    mean: float
    largest: float


def angle_summary(a: Subspace, b: Subspace) -> AngleSummary:
    """Principal angles between the directions of two subspaces; offsets do not matter. Lower: more alike."""
    angles = principal_angles(a.basis, b.basis).rad2deg()
    return AngleSummary(float(angles[0]), float(angles.mean()), float(angles[-1]))


@dataclass(frozen=True, eq=False)
class EntityProbe:
    """How well entities can be told apart, and how well they could by chance.

    Attributes
    ----------
    accuracy : float in [0, 1]
        Share of texts whose entity a probe that has not seen their group names.
    null_mean, null_sd : float
        Of the accuracy with permuted labels.
    p : float in (0, 1]
        (1 + permutations at least as accurate) / (1 + permutations).
    by_entity : Tensor [C], float64
        The accuracy on each entity's own texts, in the order of the labels' values.
    """

    accuracy: float
    null_mean: float
    null_sd: float
    p: float
    by_entity: Tensor


def entity_probe(
    x: Tensor,
    labels: Tensor,
    groups: Tensor,
    n_permutations: int = 200,
    seed: int = 0,
    *,
    n_folds: int = 5,
    ridge: float = 10.0,
) -> EntityProbe:
    """Cross-validated accuracy of a linear classifier of entities, with its permutation null.

    Parameters
    ----------
    x : Tensor [n, d]
    labels : Tensor [n], int64
        Entity of each row, each in at least two groups.
    groups : Tensor [n], int64
        Rows that share words (contexts of one clue): never on both sides of a split.
    n_permutations : int, >= 2
    seed : int
        Of the folds and of the permutations; global generators are neither read nor moved.
    n_folds : int, >= 2
    ridge : float, > 0
        Penalty alpha as a multiple of d, the mean squared length of a standardised row.

    Returns
    -------
    EntityProbe
        Higher accuracy: the entities are told apart better. `null_mean` is near 1/C for balanced entities.

    Raises
    ------
    ValueError
        For shapes that do not fit, x not finite, fewer than two entities, an entity in a single group, fewer groups
        than folds, counts or penalties out of range.

    Notes
    -----
    Nearest centroid in the metric that makes all texts' covariance round: linear discriminant analysis with a ridge,

        argmin_c (z - μ_c)ᵀ A (z - μ_c),  A = (ZᵀZ + alpha I)⁻¹,

    z standardised in the training folds Z, alpha = ridge · d. (Regression on one-hot targets, which leaves μ_cᵀAμ_c
    out, cannot name the entities in the middle of few dimensions.) With the kernel K = ZZᵀ, the held-out rows' kernel k
    and P [n, C] the averages over the rows of each entity, the scores are

        T P - diag(Pᵀ R P)/2,  T = k (K + alpha I)⁻¹,  R = K (K + alpha I)⁻¹,

    and T and R do not depend on the labels: a permutation costs two matrix products. All rows of an (entity, group)
    cell are relabelled together, as they are no independent witnesses; so relabelled, an entity still comes in whole
    cells.
    """
    rows = check_activations(x)
    n = len(rows)
    index, count = check_entities(labels, n, rows.device)
    _check_probe(index, groups, count, n_permutations, ridge)
    folds = grouped_folds(groups, n_folds=n_folds, n_seeds=1, seed=seed)[0].to(rows.device)
    # One column a labelling, the true one first.
    labellings = torch.cat([index[:, None], _relabelled(index, groups, n_permutations, seed)], dim=1)
    hits = torch.zeros(n_permutations + 1, dtype=torch.float64, device=rows.device)
    right = torch.zeros(n, dtype=torch.float64, device=rows.device)  # of the true labels
    of_entity = torch.zeros(count, dtype=torch.float64, device=rows.device)
    for fold in range(n_folds):
        held_out = folds == fold
        test, train = _smoothers(rows, held_out, ridge)
        width = max(1, _MAX_TARGETS // (count * n))
        for start in range(0, n_permutations + 1, width):
            some = labellings[:, start : start + width]
            members = torch.nn.functional.one_hot(some[~held_out], count).to(rows.dtype)  # [train, some, C]
            sizes = members.sum(0)
            averages = members / sizes.clamp_min(1)
            lengths = (averages * (train @ averages.flatten(1)).view_as(averages)).sum(0)
            scores = (test @ averages.flatten(1)).unflatten(1, sizes.shape) - lengths / 2
            # An entity whose texts are all held out cannot be named.
            named = scores.masked_fill(sizes == 0, -torch.inf).argmax(-1)
            right = named == some[held_out]
            hits[start : start + width] += right.sum(0)
            if start == 0:
                of_entity.index_add_(0, index[held_out], right[:, 0].double())
    accuracies = hits / n
    null = accuracies[1:]
    # Equal counts divided alike are equal numbers: no tolerance needed.
    p = (1 + int((null >= accuracies[0]).sum())) / (1 + n_permutations)
    by_entity = of_entity / torch.bincount(index, minlength=count)
    return EntityProbe(float(accuracies[0]), float(null.mean()), float(null.std()), p, by_entity)


def _check_probe(index: Tensor, groups: Tensor, count: int, n_permutations: int, ridge: float) -> None:
    if groups.shape != index.shape or groups.is_floating_point():
        raise ValueError(
            f"groups must be integers [n], one group a row of x: expected shape {tuple(index.shape)}, "
            f"got {groups.dtype} of shape {tuple(groups.shape)}"
        )
    cells = torch.unique(torch.stack([index, groups.to(index.device)]), dim=1)
    alone = (torch.bincount(cells[0], minlength=count) < 2).nonzero()[:, 0].tolist()
    if alone:
        raise ValueError(
            f"labels must give each entity at least two groups, one to train on and one to hold out; entities number "
            f"{alone[:8]} (in the order of their labels) have one"
        )
    if n_permutations < 2:
        raise ValueError(f"n_permutations must be at least 2, their spread is reported; got {n_permutations}")
    if not 0 < ridge < math.inf:
        raise ValueError(f"ridge must be positive and finite; got {ridge}")


def _relabelled(index: Tensor, groups: Tensor, n_permutations: int, seed: int) -> Tensor:
    """Labels [n, n_permutations] with those of whole (entity, group) cells exchanged at random."""
    cells, cell_of = torch.unique(torch.stack([index.cpu(), groups.cpu()]), dim=1, return_inverse=True)
    generator = torch.Generator().manual_seed(seed)
    orders = torch.stack([torch.randperm(cells.shape[1], generator=generator) for _ in range(n_permutations)], dim=1)
    return cells[0][orders][cell_of].to(index.device)


def _smoothers(rows: Tensor, held_out: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """k (K + alpha I)⁻¹ [held out, training] and K (K + alpha I)⁻¹ [training, training], float64."""
    training = rows[~held_out]
    mean, scale = training.mean(0), training.std(0, correction=0)
    scale = torch.where(scale > 1e-9 * rows.abs().amax(0), scale, torch.inf)  # constant features say nothing
    train, test = (training - mean) / scale, (rows[held_out] - mean) / scale
    kernel = train @ train.mT
    penalised = kernel.clone()
    penalised.diagonal().add_(ridge * rows.shape[1])
    both = torch.cat([test @ train.mT, kernel])
    smoothed = torch.cholesky_solve(both.mT, torch.linalg.cholesky(penalised)).mT
    return smoothed[: len(test)], smoothed[len(test) :]
