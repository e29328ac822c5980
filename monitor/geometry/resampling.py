"""Delete-a-group jackknife: an interval for any smooth statistic of pairs, at the price of few evaluations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from scipy import stats
from torch import Tensor


def spread_groups(batches: Sequence[Tensor], groups: int) -> list[Tensor]:
    """Cut the pairs into `groups` groups that take at most one pair from a batch, as far as `groups` allows.

    The pairs are listed batch after batch and dealt out in turn, so that leaving a group out thins many batches by
    one pair and does not empty one.
    """
    order = torch.cat(list(batches))
    if not 2 <= groups <= len(order):
        raise ValueError(f"groups must be between 2 and the number of pairs, {len(order)}; got {groups}")
    return [order[start::groups] for start in range(groups)]


def jackknife_interval(
    statistic: Callable[[Tensor], Tensor], value: Tensor, groups: Sequence[Tensor], *, level: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Interval value ± t · se, se from leaving each group out once.

    Parameters
    ----------
    statistic : callable
        Takes the indices that are kept (int64, sorted) and returns a Tensor of one shape: all statistics in one call.
    value : Tensor
        The statistic of all pairs; the interval's centre.
    groups : sequence of Tensor
        Disjoint index sets that together are 0..n-1, of about one size.
    level : float
        Coverage, 0.95 by default; t has len(groups) - 1 degrees of freedom.

    Returns
    -------
    low, high : Tensor
        Of the shape of `value`. They describe the choice of *pairs*; names and model are held fixed.

    Notes
    -----
    se² = (G - 1)/G Σ_g (θ_g - θ̄)², the grouped jackknife (Shao and Tu, The Jackknife and Bootstrap, 1995, Sec. 2.3).
    Smooth statistics only: not for medians.
    """
    if len(groups) < 2:
        raise ValueError(f"groups must be at least 2; got {len(groups)}")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1; got {level}")
    everything = torch.cat(list(groups)).sort().values
    replicates = torch.stack([statistic(everything[~torch.isin(everything, group)]) for group in groups]).double()
    count = len(groups)
    error = ((count - 1) / count * (replicates - replicates.mean(0)).square().sum(0)).sqrt()
    reach = float(stats.t.ppf((1 + level) / 2, count - 1)) * error
    return value - reach, value + reach
