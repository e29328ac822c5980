"""Area under the ROC curve, P(S+ > S-) + P(S+ = S-)/2, of many score vectors at once, and how sure of it one can be."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from scipy import stats
from torch import Tensor

# Rows are ranked in chunks of at most this many scores: about 32 MB a temporary, a handful of them alive.
_MAX_SCORES = 1 << 22
# A variance this small against its upper bound is rounding, not evidence.
_ZERO_VARIANCE = 1e-12


def check_labels(labels: Tensor, n: int, device: torch.device | None = None) -> Tensor:
    """`labels` as a boolean mask of the positives on `device`, after checking that they are n times 0 or 1, both there.

    Raises
    ------
    ValueError
        For another shape, values other than 0 and 1, or a single class.
    """
    if labels.shape != (n,):
        raise ValueError(f"labels must give one label per sample: expected shape {(n,)}, got {tuple(labels.shape)}")
    labels = labels.to(device) if device is not None else labels
    positive = labels == 1
    if not bool((positive | (labels == 0)).all()):
        raise ValueError(f"labels must be 0 or 1; got {labels.unique().tolist()[:8]}")
    n_positive = int(positive.sum())
    if n_positive in (0, n):
        raise ValueError(f"labels must hold both classes; got {n_positive} positive of {n}")
    return positive


def _midranks(values: Tensor) -> Tensor:
    """Ranks 1..n along the last axis, tied values at the mean of the ranks they share; float64."""
    ordered = values.sort(dim=-1).values
    # (number below) + (number not above) + 1 is twice the mean rank of the tied run.
    below = torch.searchsorted(ordered, values, right=False)
    not_above = torch.searchsorted(ordered, values, right=True)
    return (below + not_above + 1).double() / 2


def _row_chunks(scores: Tensor) -> Iterator[Tensor]:
    """Rows of ``[..., n]`` in order, as finite float64 blocks of bounded size."""
    rows = scores.reshape(-1, scores.shape[-1])
    for block in rows.split(max(1, _MAX_SCORES // rows.shape[1])):
        block = block.double()  # exact, so ties of half precision stay ties
        if not torch.isfinite(block).all():
            broken = int((~torch.isfinite(block)).sum())
            raise ValueError(f"scores must be finite; {broken} are NaN or infinite (half-precision overflow?)")
        yield block.contiguous()


def _check_scores(scores: Tensor) -> None:
    if scores.ndim < 1 or scores.shape[-1] == 0:
        raise ValueError(f"scores must be [..., n] with n > 0; got shape {tuple(scores.shape)}")


def auc(scores: Tensor, labels: Tensor) -> Tensor:
    """Probability that a positive scores above a negative, ties counted half (Mann-Whitney).

    Parameters
    ----------
    scores : Tensor, [..., n]
        Any real dtype; each row of the last axis is one score vector.
    labels : Tensor, [n]
        0 or 1, both present; 1 is the class that should score high.

    Returns
    -------
    Tensor, [...], float64, on the device of `scores`
        0 to 1; 1/2 is chance. Higher: better separated.

    Raises
    ------
    ValueError
        For non-finite scores, labels of another shape, other labels than 0 and 1, or a single class.

    Notes
    -----
    With R+ the sum of the positives' midranks,  AUC = (R+ - n+(n+ + 1)/2) / (n+ n-):  the same number as
    `sklearn.metrics.roc_auc_score` (its trapezoids count ties half), for any number of rows in one call.
    """
    _check_scores(scores)
    positive = check_labels(labels, scores.shape[-1], scores.device)
    n_positive = int(positive.sum())
    n_negative = positive.numel() - n_positive
    rank_sums = [_midranks(block)[:, positive].sum(-1) for block in _row_chunks(scores)]
    if not rank_sums:
        return scores.new_zeros(scores.shape[:-1], dtype=torch.float64)
    wins = torch.cat(rank_sums) - n_positive * (n_positive + 1) / 2
    return (wins / (n_positive * n_negative)).reshape(scores.shape[:-1])


def _placements(block: Tensor, positive: Tensor) -> tuple[Tensor, Tensor]:
    """For each positive the share of negatives below it, for each negative the share of positives above it."""
    ranks = _midranks(block)
    n_positive = int(positive.sum())
    n_negative = positive.numel() - n_positive
    # Rank among all less rank within the own class = number of the other class below.
    of_positive = (ranks[:, positive] - _midranks(block[:, positive].contiguous())) / n_negative
    of_negative = 1 - (ranks[:, ~positive] - _midranks(block[:, ~positive].contiguous())) / n_positive
    return of_positive, of_negative


def auc_interval(
    scores: Tensor,
    labels: Tensor,
    groups: Tensor | None = None,
    level: float = 0.95,
    inflation: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Confidence interval of the AUC, for independent samples (DeLong) or samples in groups (Obuchowski).

    Parameters
    ----------
    scores : Tensor, [..., n]
    labels : Tensor, [n]
        0 or 1; at least two groups (two samples without `groups`) of each class.
    groups : Tensor, [n], optional
        Integer label of each sample's context cell. Samples of a cell are dependent in any way, cells independent.
    level : float in (0, 1)
        Coverage.
    inflation : float, > 0
        Factor on the standard error, for scores whose errors are larger than those of a fixed rule
        (`monitor.geometry.detection.CV_INFLATION` for pooled out-of-fold scores).

    Returns
    -------
    low, high : Tensor, [...], float64, on the device of `scores`
        0 <= low <= AUC <= high <= 1, never of zero width.

    Raises
    ------
    ValueError
        As in `auc`; for `level` outside (0, 1), `inflation` not positive, groups of another shape, or too few groups.

    Notes
    -----
    A positive's placement V10 is the share of negatives below it, a negative's V01 the share of positives above it;
    both average to the AUC A. With cell sums V10_c, V01_c, cell counts m_c, n_c, totals M, N, and I10, I01, I cells
    with a positive, with a negative, and in all (Obuchowski, Biometrics 53, 1997):

        S10 = I10/((I10-1) M) Σ (V10_c - m_c A)²,    S01 = I01/((I01-1) N) Σ (V01_c - n_c A)²,
        S11 = I/(I-1) Σ (V10_c - m_c A)(V01_c - n_c A),    Var A = S10/M + S01/N + 2 S11/(M N).

    One sample a cell makes S11 = 0 and gives DeLong, DeLong and Clarke-Pearson (Biometrics 44, 1988). The interval is
    symmetric in logit A, with standard error inflation · sqrt(Var A)/(A(1 - A)).

    Perfect separation has Var A = 0, which is no certainty. Take k cell pairs, all cells different, one giving a
    positive and the other a negative: k = min(cells with a positive, cells with a negative, cells / 2). They are k
    independent trials that succeed with probability AUC each (ties half), so perfect separation has probability at
    most AUC^k, and no sample excludes, at this level, an AUC as low as (1 - level)^(1/k), 1 - 3/k at 95 %. Hence `low`
    is never above (1 - level)^(inflation²/k) and `high` never below one minus that. At A = 1 this is the one-sided
    interval (low, 1), at A = 0 its mirror image. The bound holds for any distribution of scores.

    A zero variance at 0 < A < 1 (all scores tied) is replaced by its upper bound A(1 - A)/k, the variance of the mean
    of those k trials.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must lie strictly between 0 and 1; got {level}")
    if not 0.0 < inflation < float("inf"):
        raise ValueError(f"inflation must be a positive finite factor of the standard error; got {inflation}")
    area, variance, trials = _areas_and_variances(scores, labels, groups)
    reach = float(stats.norm.isf((1 - level) / 2)) * inflation * variance.sqrt() / (area * (1 - area)).clamp_min(1e-300)
    limit = (1 - level) ** (inflation**2 / trials)
    centre = torch.logit(area)  # ±inf at 0 and 1, where `limit` takes over
    inside = (area > 0) & (area < 1)
    low = torch.where(inside, torch.sigmoid(centre - reach), area).clamp_max(limit)
    high = torch.where(inside, torch.sigmoid(centre + reach), area).clamp_min(1 - limit)
    return low.reshape(scores.shape[:-1]), high.reshape(scores.shape[:-1])


def auc_standard_error(scores: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
    """Standard error of the AUC, for independent samples (DeLong) or samples in groups (Obuchowski).

    Parameters and errors as in `auc_interval`, whose interval this is the spread of.

    Returns
    -------
    Tensor, [...], float64, on the device of `scores`
        sqrt(Var A), at least 0; 0 for perfect separation only.
    """
    area, variance, _ = _areas_and_variances(scores, labels, groups)
    return torch.where((area > 0) & (area < 1), variance, 0.0).sqrt().reshape(scores.shape[:-1])


def _areas_and_variances(scores: Tensor, labels: Tensor, groups: Tensor | None) -> tuple[Tensor, Tensor, int]:
    """AUC and its variance of every row of scores, both [rows], and how many independent trials there are at least."""
    _check_scores(scores)
    n = scores.shape[-1]
    positive = check_labels(labels, n, scores.device)
    if groups is None:
        groups = torch.arange(n)
    if groups.shape != (n,):
        raise ValueError(f"groups must give one group per sample: expected shape {(n,)}, got {tuple(groups.shape)}")
    _, cell = torch.unique(groups.to(scores.device), return_inverse=True)
    cells = int(cell.max()) + 1
    m = torch.bincount(cell[positive], minlength=cells).double()  # positives, negatives in each cell
    k = torch.bincount(cell[~positive], minlength=cells).double()
    with_positive, with_negative = int((m > 0).sum()), int((k > 0).sum())
    if min(with_positive, with_negative) < 2:
        raise ValueError(
            "labels must have at least two independent samples (two groups, where groups are given) of each class; "
            f"got {with_positive} with a positive and {with_negative} with a negative"
        )
    total_m, total_k = float(m.sum()), float(k.sum())
    trials = min(with_positive, with_negative, cells // 2)

    areas, variances = [], []
    for block in _row_chunks(scores):
        of_positive, of_negative = _placements(block, positive)
        area = of_positive.mean(-1, keepdim=True)
        zeros = block.new_zeros(block.shape[0], cells)
        a = zeros.index_add(1, cell[positive], of_positive) - m * area
        b = zeros.index_add(1, cell[~positive], of_negative) - k * area
        s10 = with_positive / ((with_positive - 1) * total_m) * a.square().sum(-1)
        s01 = with_negative / ((with_negative - 1) * total_k) * b.square().sum(-1)
        s11 = cells / (cells - 1) * (a * b).sum(-1)
        areas.append(area[:, 0])
        variances.append(s10 / total_m + s01 / total_k + 2 * s11 / (total_m * total_k))
    if not areas:
        empty = torch.zeros(0, dtype=torch.float64, device=scores.device)
        return empty, empty.clone(), trials
    area, variance = torch.cat(areas), torch.cat(variances)
    bound = area * (1 - area) / trials
    return area, torch.where(variance <= _ZERO_VARIANCE * bound, bound, variance), trials
