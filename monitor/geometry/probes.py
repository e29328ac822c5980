"""Linear probes: grouped cross-validation of l2 logistic regression over all layers, exact and fast."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.model_selection import GroupKFold, KFold
from torch import Tensor

from monitor.geometry.probe_newton import Problem, solve, solve_alone

# No training score moves by more in the last Newton step; what is left is about a tenth of it, often far less.
_TOLERANCE = 0.03
# A fit shares nothing with the others where a feature's variance over all rows is so many times that in training.
_ALIKE = 1e4
# Numbers in the largest intermediate of a chunk of layers: it should stay near the cache of a CPU, and fill a GPU.
_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}


def grouped_folds(groups: Tensor, *, n_folds: int = 5, n_seeds: int = 5, seed: int = 0) -> Tensor:
    """Fold of each sample, with all samples of a group in the same fold.

    Parameters
    ----------
    groups : Tensor [n], integer
        Samples that share a context (a cell of the grid, both members of a pair) share a label here.
    n_folds : int, default 5
    n_seeds : int, default 5
        Independent assignments of groups to folds.
    seed : int, default 0
        Assignment k uses seed + k.

    Returns
    -------
    folds : LongTensor [n_seeds, n], values 0..n_folds-1, on the device of `groups`

    Raises
    ------
    ValueError
        For groups that are not integers [n], fewer groups than folds, fewer than 2 folds, no seed.

    Notes
    -----
    scikit-learn's ``GroupKFold(n_folds, shuffle=True, random_state=seed + k)``.
    """
    _check_counts(n_folds, n_seeds)
    if groups.ndim != 1 or groups.is_floating_point():
        raise ValueError(f"`groups` must be integers [n], got {groups.dtype} {tuple(groups.shape)}.")
    labels = groups.cpu().numpy()
    n_groups = len(np.unique(labels))
    if n_groups < n_folds:
        raise ValueError(
            f"`groups` must hold at least as many groups as there are folds, got {n_groups} groups for {n_folds} "
            "folds; give more contexts or fewer folds."
        )
    splitters = (GroupKFold(n_folds, shuffle=True, random_state=seed + k) for k in range(n_seeds))
    return _fold_ids([s.split(labels, groups=labels) for s in splitters], len(labels)).to(groups.device)


def random_folds(n: int, *, n_folds: int = 5, n_seeds: int = 5, seed: int = 0) -> Tensor:
    """Fold of each sample without regard to groups, to measure what grouping prevents; as `grouped_folds`."""
    _check_counts(n_folds, n_seeds)
    if n < n_folds:
        raise ValueError(f"`n` must be at least `n_folds`, got {n} samples for {n_folds} folds.")
    splitters = (KFold(n_folds, shuffle=True, random_state=seed + k) for k in range(n_seeds))
    return _fold_ids([s.split(np.zeros(n)) for s in splitters], n)


def _check_counts(n_folds: int, n_seeds: int) -> None:
    if n_folds < 2:
        raise ValueError(f"`n_folds` must be at least 2, one to train on and one to hold out, got {n_folds}.")
    if n_seeds < 1:
        raise ValueError(f"`n_seeds` must be at least 1, got {n_seeds}.")


def _fold_ids(splits, n: int) -> Tensor:
    folds = torch.zeros(len(splits), n, dtype=torch.long)
    for k, split in enumerate(splits):
        for fold, (_, test) in enumerate(split):
            folds[k, torch.from_numpy(test)] = fold
    return folds


def logistic_probes(features: Tensor, labels: Tensor, folds: Tensor, *, C: float = 1.0) -> Tensor:
    """Out-of-fold scores of l2-regularised logistic regressions, one a layer, fold and seed.

    Parameters
    ----------
    features : Tensor [n, L, d] or [n, d], floating
        Layers are independent of one another: anything that shares samples and labels can stand there.
    labels : Tensor [n]
        1 for the positive class, 0 for the other.
    folds : LongTensor [S, n]
        From `grouped_folds`. Each sample is scored by the probe that was trained on the other folds of its row.
    C : float, default 1.0
        Inverse strength of the penalty, as in scikit-learn.

    Returns
    -------
    scores : Tensor [S, L, n] ([S, n] for features without layers), float64, on the device of `features`
        Decision values w'x + b. The published statistic is the AUC of a row, over all folds together ("pooled"), mean
        over the S seeds.

    Raises
    ------
    ValueError
        For shapes that do not fit, features that are not finite, labels that are not 0 and 1, a fold without which one
        of the classes is missing.

    Notes
    -----
    The optimum of 1/2 |w|^2 + C sum_i log(1 + exp(-y_i (w'x_i + b))) on features standardised in the training folds
    (arXiv 2609.22337, Sec. V-D: scikit-learn's ``LogisticRegression(C=1)`` after ``StandardScaler``), to about 1e-3 of
    the largest score. scikit-learn's default tolerance stops 0.1 to 1 away from it. See `monitor.geometry.probe_newton`
    for how.
    """
    layered = features if features.ndim == 3 else features[:, None]
    _check_penalty(C)
    check_protocol(features, labels, folds)
    n, n_layers, _ = layered.shape
    device = features.device
    folds, positive = folds.to(device), labels.to(device, torch.float64)
    train, n_folds = _training_rows(folds), int(folds.max()) + 1
    # [S, n]: the column that held a sample out.
    column = torch.arange(len(folds), device=device)[:, None] * n_folds + folds
    chunk = _layers_at_once(layered)
    scores = torch.empty(len(folds), n_layers, n, dtype=torch.float64, device=device)

    @torch.no_grad()
    def fit(first: int) -> None:
        z, scale, _, _ = _standardised(layered[:, first : first + chunk].transpose(0, 1), train)
        alike = scale.amax(1) <= _ALIKE  # [B, T]
        scale = torch.where(alike[:, None], scale, 1.0)
        _, of_all, converged = solve(Problem(z, positive, train, scale, float(C)), _TOLERANCE)
        scores[:, first : first + chunk] = of_all.gather(2, column.T.expand(len(z), -1, -1)).permute(2, 0, 1)
        for i, t in (~(alike & converged)).nonzero().tolist():
            x, kept = layered[:, first + i].to(torch.float64), train[:, t] == 1
            weight, bias = _fit_alone(x[kept], positive[kept], C)
            scores[t // n_folds, first + i, ~kept] = x[~kept] @ weight + bias

    _run_chunks(fit, range(0, n_layers, chunk), device)
    return scores if features.ndim == 3 else scores[:, 0]


@dataclass(frozen=True)
class LinearProbe:
    """A fitted probe of each layer, on raw features.

    weight : Tensor [L, d], bias : Tensor [L], float64.
    """

    weight: Tensor
    bias: Tensor

    def score(self, features: Tensor) -> Tensor:
        """Decision values [L, m] of features [m, L, d]."""
        return torch.einsum("mld,ld->lm", features.to(self.weight), self.weight) + self.bias[:, None]


def fit_probe(features: Tensor, labels: Tensor, *, C: float = 1.0) -> LinearProbe:
    """Fit one logistic regression a layer on all samples; parameters and optimum as in `logistic_probes`.

    Parameters
    ----------
    features : Tensor [n, L, d], floating
    labels : Tensor [n]
    C : float, default 1.0

    Returns
    -------
    LinearProbe
        For scoring other samples: held-out ones, or neutral texts.
    """
    _check_penalty(C)
    _check(features, labels)
    if features.ndim != 3:
        raise ValueError(f"`features` must have the shape [n, L, d], got {tuple(features.shape)}; add a layer axis.")
    positive = labels.to(features.device, torch.float64)
    everything = torch.ones(len(positive), 1, dtype=torch.float64, device=features.device)
    _check_classes(positive, everything, 1)
    chunk = _layers_at_once(features)
    weights, biases = [], []
    for first in range(0, features.shape[1], chunk):
        z, scale, mean, std = _standardised(features[:, first : first + chunk].transpose(0, 1), everything)
        theta, scores, converged = solve(Problem(z, positive, everything, scale, float(C)), _TOLERANCE)
        weight = theta[:, :, 0] / std[:, 0]
        # The intercept on raw features, from any row: its score less w'x.
        bias = (scores[:, :, 0] - (z @ theta)[:, :, 0]).mean(1) - (weight * mean[:, 0]).sum(1)
        for i in (~converged[:, 0]).nonzero().flatten().tolist():
            weight[i], bias[i] = _fit_alone(features[:, first + i].to(torch.float64), positive, C)
        weights.append(weight)
        biases.append(bias)
    return LinearProbe(torch.cat(weights), torch.cat(biases))


def _fit_alone(x: Tensor, positive: Tensor, C: float) -> tuple[Tensor, Tensor]:
    """Weights [d] and intercept [] on raw features [n, d] of the fit on all their rows."""
    z, _, mean, std = _standardised(x[None], torch.ones_like(positive)[:, None])
    weight, intercept = solve_alone(z[0], positive, float(C), _TOLERANCE)
    weight = weight / std[0, 0]
    return weight, intercept - weight @ mean[0, 0]


def _standardised(x: Tensor, train: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features [B, n, d] centred and scaled over all rows; r^2 [B, d, T] against the scale over each training set."""
    z = x.to(torch.float64, copy=True)
    mean = z.mean(1, keepdim=True)
    z -= mean
    square = z.square()
    std = square.mean(1, keepdim=True).sqrt()
    # What is left of a constant feature after centring is rounding; scikit-learn leaves it unscaled as well.
    std = torch.where(std <= 1e-12 * mean.abs(), 1.0, std)
    std = torch.where(std == 0, 1.0, std)
    count = train.sum(0)
    variance = (square.mT @ train / count - (z.mT @ train / count).square()) / std.mT.square()
    z /= std
    for t in (variance * _ALIKE < 1).any(dim=0).any(dim=0).nonzero().flatten().tolist():
        variance[..., t] = _variance_in(z[:, train[:, t] == 1], mean / std)
    scale = 1 / variance
    return z, scale, mean, std


def _variance_in(z: Tensor, offset: Tensor) -> Tensor:
    """Variance [B, d] of rows [B, n, d] by two passes; 1 for a feature that is constant in them."""
    mean = z.mean(1, keepdim=True)
    variance = (z - mean).square().mean(1)
    # A constant takes no weight from the intercept, which is free, however it is scaled.
    rounding = 1e-12 * (mean + offset).abs()[:, 0]
    return torch.where(variance.sqrt() <= rounding, 1.0, torch.where(variance == 0, 1.0, variance))


def _layers_at_once(features: Tensor) -> int:
    n, _, d = features.shape
    budget = _CHUNK.get(features.device.type, _CHUNK["cpu"])
    return max(1, budget // (n * (d if 4 * d <= n else max(n, d))))


def _run_chunks(fit: Callable[[int], None], chunks: range, device: torch.device) -> None:
    """One after another, or on a CPU several at once with a thread each: a fit's products are too small to be split."""
    n_threads = torch.get_num_threads()
    workers = min(n_threads, len(chunks)) if device.type == "cpu" else 1
    if workers == 1:
        for first in chunks:
            fit(first)
        return
    try:
        # PyTorch's number of threads is a thread's own, but that of the library behind its products is the process's.
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(fit, chunks))
    finally:
        torch.set_num_threads(n_threads)


def _training_rows(folds: Tensor) -> Tensor:
    """1 where a row trains, [n, S * n_folds]: column s * n_folds + f leaves out fold f of seed s."""
    fold = torch.arange(int(folds.max()) + 1, device=folds.device)
    return (folds[:, None] != fold[:, None]).flatten(0, 1).T.to(torch.float64)


def check_protocol(features: Tensor, labels: Tensor, folds: Tensor) -> None:
    """Raise ValueError for features, labels and folds that do not fit, as `logistic_probes` describes."""
    _check(features, labels)
    if folds.ndim != 2 or folds.shape[1] != len(features) or len(folds) == 0:
        raise ValueError(f"`folds` must have the shape [S, {len(features)}], got {tuple(folds.shape)}.")
    if folds.dtype != torch.long or bool((folds < 0).any()):
        raise ValueError(f"`folds` must be a LongTensor of folds 0, 1, ...; got {folds.dtype}, least {folds.min()}.")
    _check_classes(labels, _training_rows(folds), int(folds.max()) + 1)


def _check(features: Tensor, labels: Tensor) -> None:
    if features.ndim not in (2, 3) or not features.is_floating_point() or 0 in features.shape:
        raise ValueError(
            f"`features` must be floating with the shape [n, L, d] or [n, d], got {features.dtype} "
            f"{tuple(features.shape)}."
        )
    if labels.shape != (len(features),):
        raise ValueError(f"`labels` must have the shape ({len(features)},), got {tuple(labels.shape)}.")
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError("`labels` must be 0 and 1 only.")
    if not bool(torch.isfinite(torch.stack(features.aminmax())).all()):
        raise ValueError("`features` must be finite; some are inf or nan.")


def _check_penalty(C: float) -> None:
    if not 0 < C < math.inf:
        raise ValueError(f"`C` must be positive and finite, got {C}.")


def _check_classes(labels: Tensor, train: Tensor, n_folds: int) -> None:
    count = train.sum(0)
    ones = labels.to(train) @ train
    bad = ((ones == 0) | (ones == count)).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"`labels` must have both classes in every training set; without fold {bad[0] % n_folds} of seed "
            f"{bad[0] // n_folds} one is missing. Give more samples or fewer folds."
        )
