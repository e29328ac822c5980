"""The separation of two classes in a model and in its reference, and how far the change is from chance."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from monitor.geometry.resampling import jackknife_interval
from monitor.geometry.separation import crossfitted_separation

_GROUPS = 20
_LEAST_PER_HALF = 4  # cells a jackknife group must leave room for: two in each half of a split


class SeparationChange(NamedTuple):
    """(value, low, high) each; nan bounds where there are too few cells for an interval."""

    now: tuple[float, float, float]
    before: tuple[float, float, float]
    change: tuple[float, float, float]


def separation_change(
    now: Tensor, before: Tensor, labels: Tensor, groups: Tensor, *, seed: int = 0
) -> SeparationChange:
    """Cross-fitted separation now, in the reference, and now minus the reference, with 95 % intervals.

    Parameters
    ----------
    now, before : Tensor [n, d] and [n, d']
        The same texts in the same order.
    labels, groups : Tensor [n]
        As in `crossfitted_separation`.
    seed : int
        Of the splits, the same ones in both models.

    Returns
    -------
    SeparationChange
        For equal inputs the change is exactly 0 with the interval [0, 0].

    Notes
    -----
    Intervals: delete-a-group jackknife over cells, the same cells left out in both models, 20 groups. They
    speak of other cells like these. The lower end of a separation is cut at 0, where the estimate itself is cut, and
    near 0 the jackknife is rough.
    """
    cells, cell = torch.unique(groups, return_inverse=True)
    same = now.shape == before.shape and torch.equal(now, before)

    def statistic(kept: Tensor) -> Tensor:
        rows = torch.isin(cell, kept.to(cell.device))
        options = {"labels": labels[rows], "groups": groups[rows], "seed": seed}
        if same:
            value = crossfitted_separation(now[rows], **options)
            values = torch.stack([value, value])
        elif now.shape == before.shape:
            values = crossfitted_separation(torch.stack([now[rows], before[rows]], dim=1), **options)
        else:
            values = torch.stack([crossfitted_separation(states[rows], **options) for states in (now, before)])
        return torch.stack([values[0], values[1], values[0] - values[1]])

    everything = torch.arange(len(cells))
    value = statistic(everything)
    n_groups = min(_GROUPS, len(cells) // _LEAST_PER_HALF)
    if n_groups < 2:
        low = high = torch.full_like(value, math.nan)
    else:
        # Every n_groups-th cell: neighbours in the grid share a content or a frame, and are left out in different
        # groups.
        low, high = jackknife_interval(statistic, value, [everything[i::n_groups] for i in range(n_groups)])
    low = torch.cat([low[:2].clamp_min(0), low[2:]])
    return SeparationChange(*zip(value.tolist(), low.tolist(), high.tolist(), strict=True))
