"""How far two judges agree on the same responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats
from sklearn.metrics import cohen_kappa_score

from monitor.judges.judgement import SCORES, Judgement


@dataclass(frozen=True)
class Agreement:
    """Agreement of two judges on one score.

    Attributes
    ----------
    score : str
        ``"concept"``, ``"fluency"`` or ``"instruction"``.
    exact : float or None
        Share of responses with the same score, rounded to 0, 1 or 2, in [0, 1].
    kappa : float or None
        Cohen's kappa of the rounded scores with quadratic weights, in [-1, 1], 0 at chance; None where a judge gives
        one and the same to all: then chance explains everything.
    spearman : float or None
        Rank correlation of the scores as they are; None where a judge gives one and the same to all, or for fewer than
        three responses.
    n : int
        Responses that both scored.
    left_out : int
        Responses that one of them could not score.
    """

    score: str
    exact: float | None
    kappa: float | None
    spearman: float | None
    n: int
    left_out: int


def agreement(first: Sequence[Judgement], second: Sequence[Judgement]) -> list[Agreement]:
    """Agreement on each score of two judges' judgements of the same responses, in the same order.

    Raises
    ------
    ValueError
        If they judged differently many.
    """
    if len(first) != len(second):
        raise ValueError(f"`first` and `second` must judge the same responses, got {len(first)} and {len(second)}")
    return [_agreement(score, first, second) for score in SCORES]


def _agreement(score: str, first: Sequence[Judgement], second: Sequence[Judgement]) -> Agreement:
    pairs = [(getattr(a, score), getattr(b, score)) for a, b in zip(first, second, strict=True)]
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    left_out = len(pairs) - len(both)
    if not both:
        return Agreement(score, None, None, None, 0, left_out)
    a, b = zip(*both, strict=True)
    grades = [[math.floor(value + 0.5) for value in side] for side in (a, b)]
    exact = sum(x == y for x, y in zip(*grades, strict=True)) / len(both)
    vary = all(len(set(side)) > 1 for side in grades)
    kappa = float(cohen_kappa_score(*grades, labels=[0, 1, 2], weights="quadratic")) if vary else None
    ranked = len(both) >= 3 and len(set(a)) > 1 and len(set(b)) > 1
    spearman = float(stats.spearmanr(a, b).statistic) if ranked else None
    return Agreement(score, exact, kappa, spearman, len(both), left_out)
