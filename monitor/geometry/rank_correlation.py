"""Rank correlation of every two scores over runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman correlation of two scores over n runs; None where a column is constant or n < 3."""

    first: str
    second: str
    rho: float | None
    p: float | None
    n: int


def rank_correlations(columns: Mapping[str, Sequence[float | None]]) -> list[RankCorrelation]:
    """Spearman correlation of every two score columns (MAxBench, Section 5.4).

    Parameters
    ----------
    columns : mapping of str to equally long sequences
        A row is a run: method, concept, rank, split. Rows that lack one of the two scores (None, NaN) are left out.

    Returns
    -------
    list of RankCorrelation
        In the columns' order, each pair once; p of the two-sided test that takes the rows for independent.
    """
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"`columns` must be equally long, got {lengths}")
    return [_rank_correlation(a, b, columns[a], columns[b]) for a, b in itertools.combinations(columns, 2)]


def _rank_correlation(a: str, b: str, x: Sequence[float | None], y: Sequence[float | None]) -> RankCorrelation:
    pairs = [(u, v) for u, v in zip(x, y, strict=True) if u is not None and v is not None]
    pairs = [(u, v) for u, v in pairs if not (math.isnan(u) or math.isnan(v))]
    if len(pairs) < 3 or any(len(set(side)) == 1 for side in zip(*pairs, strict=True)):
        return RankCorrelation(a, b, None, None, len(pairs))
    found = stats.spearmanr(*zip(*pairs, strict=True))
    return RankCorrelation(a, b, float(found.statistic), float(found.pvalue), len(pairs))
