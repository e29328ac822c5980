"""Mixtures of a given purity: a share of marked pairs, the rest neutral texts that carry no label."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from monitor.stimuli.counterfactual import CounterfactualSet


@dataclass(frozen=True, eq=False)
class Mixture:
    """A drawn mixture of n rows.

    rows : int64 [n]; rows of ``stimuli.texts``, all different: positive members, their negatives in the same order,
        neutral texts.
    labels : int64 [n]; n/2 ones. Of the group for marked rows, random for neutral ones.
    groups : int64 [n]; the cells, ``stimuli.groups`` of the rows.
    purity : float, in [0, 1]; the realised one, n_marked/n.
    n_marked : int; the first ``n_marked`` rows are the marked ones.
    """

    rows: Tensor
    labels: Tensor
    groups: Tensor
    purity: float
    n_marked: int


def draw_mixture(stimuli: CounterfactualSet, n: int, purity: float, seed: int = 0) -> Mixture:
    """Draw n texts, of which a share `purity` is marked.

    Parameters
    ----------
    stimuli : CounterfactualSet
    n : int, even, >= 2
        How many texts, half of them labelled 1.
    purity : float, in [0, 1]
        The marked share α.
    seed : int
        Of an own generator on the CPU; the global random state is neither used nor changed.

    Returns
    -------
    Mixture
        Tensors on the CPU.

    Raises
    ------
    ValueError
        `n` is odd, `purity` outside [0, 1], or the pool has not enough pairs or neutral texts; the message says the
        largest n at this purity and the purities at this n that it has.

    Notes
    -----
    round(αn/2) whole pairs and n minus twice as many neutral texts, both without replacement: resampling past the
    pool makes ties that inflate the null spread of the AUC (arXiv:2609.22337, V-E, measured there at 1.9 σ₀ against
    at most 1.31 σ₀). The purity is therefore a multiple of 2/n, and zero where αn/2 is below one half: use
    ``Mixture.purity``.

    Neutral labels are a random half ones. They are drawn by text, not by cell, as are the neutral texts, so a pair
    and a neutral text of its cell may both be in: folds must be grouped by ``groups``. With one seed and pool, the
    pairs at a lower purity or n are among those at a higher one, which makes differences along a curve less noisy.
    """
    _check(stimuli, purity)
    if not _is_int(n) or n < 2 or n % 2:
        raise ValueError(f"n must be an even int of at least 2, so that both labels are as many; got {n!r}.")
    if not _is_int(seed):
        raise ValueError(f"seed must be an int, got {seed!r}.")
    n, pairs = int(n), _pairs(n, purity)
    if not _fits(stimuli, n, pairs):
        raise ValueError(_what_fits(stimuli, n, purity, pairs))
    generator = torch.Generator().manual_seed(int(seed))
    chosen = torch.randperm(stimuli.n_pairs, generator=generator)[:pairs]
    neutral = torch.randperm(stimuli.n_neutral, generator=generator)[: n - 2 * pairs]
    rows = torch.cat([chosen, chosen + stimuli.n_pairs, neutral + 2 * stimuli.n_pairs])
    positive = torch.randperm(len(neutral), generator=generator) < len(neutral) // 2
    labels = torch.cat([torch.ones_like(chosen), torch.zeros_like(chosen), positive.long()])
    return Mixture(rows, labels, torch.tensor(stimuli.groups)[rows], 2 * pairs / n, 2 * pairs)


def largest_mixture(stimuli: CounterfactualSet, purity: float) -> int:
    """The largest n that `draw_mixture` can draw at this purity without resampling.

    Returns
    -------
    int
        Even; 0 where there is none (purity below one half and no neutral texts). Every smaller even n fits too.

    Raises
    ------
    ValueError
        `purity` is outside [0, 1].
    """
    _check(stimuli, purity)
    # Both parts of a mixture grow with n, by whole pairs of texts: the sizes that fit are those up to the largest.
    top = stimuli.n_pairs + stimuli.n_neutral // 2
    return 2 * _largest(lambda half: _fits(stimuli, 2 * half, _pairs(2 * half, purity)), top)


def _pairs(n: int, purity: float) -> int:
    return round(purity * n / 2)


def _fits(stimuli: CounterfactualSet, n: int, pairs: int) -> bool:
    return pairs <= stimuli.n_pairs and n - 2 * pairs <= stimuli.n_neutral


def _largest(fits: Callable[[int], bool], top: int) -> int:
    """The largest number in 0..top that fits, where 0 does and so does all below one that does."""
    low = 0
    while low < top:
        middle = (low + top + 1) // 2
        low, top = (middle, top) if fits(middle) else (low, middle - 1)
    return low


def _what_fits(stimuli: CounterfactualSet, n: int, purity: float, pairs: int) -> str:
    most = 2 * (stimuli.n_pairs + stimuli.n_neutral // 2)
    least_pairs, most_pairs = max(0, n - stimuli.n_neutral + 1) // 2, min(stimuli.n_pairs, n // 2)
    at_n = (
        f"at n={n} the purity may be from {2 * least_pairs / n:.6g} to {2 * most_pairs / n:.6g}"
        if least_pairs <= most_pairs
        else f"at no purity does n={n} fit, n={most} at most"
    )
    return (
        f"n={n} at purity={purity} needs {pairs} pairs and {n - 2 * pairs} neutral texts, the pool has "
        f"{stimuli.n_pairs} and {stimuli.n_neutral}, and drawing a text twice would make false ties. The largest n at "
        f"this purity is {largest_mixture(stimuli, purity)}; {at_n}. Or give more stimuli."
    )


def _check(stimuli: CounterfactualSet, purity: float) -> None:
    if not isinstance(stimuli, CounterfactualSet):
        raise ValueError(f"stimuli must be a CounterfactualSet, got {type(stimuli).__name__}; see from_file.")
    if isinstance(purity, bool) or not isinstance(purity, Real) or not 0 <= purity <= 1:
        raise ValueError(f"purity must be a share from 0 to 1, got {purity!r}.")


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
