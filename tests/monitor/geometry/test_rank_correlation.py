"""Rank correlations of score columns, against scipy."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from monitor.geometry.rank_correlation import rank_correlations


def test_rank_correlations_are_scipys_and_tell_a_constant_column():
    numbers = random.Random(0)
    x = [numbers.random() for _ in range(20)]
    columns = {"x": x, "cubed": [v**3 for v in x], "down": [-v for v in x], "same": [1.0] * 20}
    found = {(one.first, one.second): one for one in rank_correlations(columns)}
    assert len(found) == 6
    assert found["x", "cubed"].rho == pytest.approx(1.0) and found["x", "down"].rho == pytest.approx(-1.0)
    assert found["x", "same"].rho is None
    noise = [numbers.random() for _ in range(20)]
    (one,) = rank_correlations({"x": [*x, None, 1.0], "noise": [*noise, 1.0, math.nan]})
    assert one.n == 20 and one.rho == pytest.approx(stats.spearmanr(x, noise).statistic)
    assert one.p == pytest.approx(stats.spearmanr(x, noise).pvalue)
