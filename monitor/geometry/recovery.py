"""What became of answers' likelihood, and by how much more than that of a control's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from monitor.geometry.statistics import bootstrap_means, mean_interval, percentile_interval


def before_and_after(before: Tensor, after: Tensor, seed: int) -> dict[str, Any]:
    """What became of answers' likelihood.

    Parameters
    ----------
    before, after : Tensors of shape (n,), n >= 2
        Token-mean NLL of the same answers, nats.
    seed : int
        Of the bootstrap.

    Returns
    -------
    dict
        ``n``; means ``nll_before``, ``nll_after``, ``probability_before``, ``probability_after``, of exp(−NLL), the
        last with interval ``low``, ``high``; ``recovered``, ``recovered_low``, ``recovered_high``: the mean change of
        the probability over the pairs, positive where answers became likelier.
    """
    p_before, p_after = torch.exp(-before), torch.exp(-after)
    low, high = mean_interval(p_after, seed=seed)
    change_low, change_high = mean_interval(p_after - p_before, seed=seed)
    return {
        "n": len(before),
        "nll_before": float(before.mean()),
        "nll_after": float(after.mean()),
        "probability_before": float(p_before.mean()),
        "probability_after": float(p_after.mean()),
        "low": low,
        "high": high,
        "recovered": float((p_after - p_before).mean()),
        "recovered_low": change_low,
        "recovered_high": change_high,
    }


def excess(forget: tuple[Tensor, Tensor], control: tuple[Tensor, Tensor], seed: int) -> dict[str, float]:
    """By how much more the forget answers' probability rose than the control's.

    Parameters
    ----------
    forget, control : pairs of Tensors (before, after)
        As in :func:`before_and_after`; the control of other answers, of any number.
    seed : int

    Returns
    -------
    dict
        ``value``, in [-2, 2], and its 95 % interval ``low``, ``high``, both sides resampled on their own.
    """
    changes = [torch.exp(-after) - torch.exp(-before) for before, after in (forget, control)]
    samples = [bootstrap_means(change, seed=seed + i) for i, change in enumerate(changes)]
    low, high = percentile_interval(samples[0] - samples[1])
    return {"value": float(changes[0].mean() - changes[1].mean()), "low": low, "high": high}
