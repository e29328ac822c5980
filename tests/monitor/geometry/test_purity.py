from __future__ import annotations

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
from scipy.special import ndtr
from scipy.stats import mannwhitneyu

from monitor.geometry.purity import (
    auc_excess,
    auc_max,
    fit_separation,
    saturated_auc,
    separation_from_auc,
    weak_signal_auc,
)

SEPARATIONS = np.array([1e-3, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 40.0, math.inf])
OFFSETS = np.array([0.0, 0.3, 1.0, -1.0, 2.5, -6.0, 20.0, 100.0])
PURITIES = np.linspace(0.0, 1.0, 201)


def as_printed(s, a, b=0.0):
    middle = ndtr((s / 2 - b) / math.sqrt(2)) + ndtr((s / 2 + b) / math.sqrt(2))
    return a**2 * ndtr(s / math.sqrt(2)) + a * (1 - a) * middle + (1 - a) ** 2 / 2


def draw(rng, n, s, a, b, sign):
    """Scores along the discriminant, in within-class standard deviations, of n texts of one group."""
    centre = np.where(rng.uniform(size=n) < a, sign * s / 2, b)
    return centre + rng.normal(size=n)


def measured_auc(positive, negative):
    return mannwhitneyu(positive, negative).statistic / (positive.size * negative.size)


def test_is_the_printed_equation():
    s, a, b = np.meshgrid(SEPARATIONS, PURITIES, OFFSETS)
    assert np.allclose(auc_max(s, a, b), as_printed(s, a, b), rtol=0, atol=1e-15)


@pytest.mark.parametrize("offset", OFFSETS)
def test_strictly_increasing_in_the_purity_for_every_offset(offset):
    # Corollary 2. In double precision steps at enormous offsets are small but there: the excess keeps them.
    excess = auc_excess(SEPARATIONS[:, None], PURITIES, offset)
    assert (np.diff(excess, axis=1) > 0).all()
    assert np.allclose(excess[:, 0], 0.0)


def test_increasing_in_the_separation_and_decreasing_in_the_size_of_the_offset():
    grid = auc_max(SEPARATIONS[:7, None, None], PURITIES[1:, None], np.array([0.0, 0.3, 1.0, 2.5, 6.0]))
    assert (np.diff(grid, axis=0) > 0).all()
    assert (np.diff(auc_max(2.0, 0.3, np.linspace(0, 6, 50))) < 0).all()
    assert np.array_equal(auc_max(2.0, PURITIES, 1.3), auc_max(2.0, PURITIES, -1.3))


def test_ends_of_the_law():
    assert auc_max(3.0, 1.0) == pytest.approx(ndtr(3.0 / math.sqrt(2)), abs=1e-15)  # Lemma 1
    assert auc_max(3.0, 1.0, 50.0) == auc_max(3.0, 1.0)  # nothing neutral is left
    assert np.array_equal(auc_max(0.0, PURITIES), np.full(201, 0.5))
    assert auc_max(4.0, 1.0) > 0.997  # section IV-D (ii)


def test_saturated_limit():
    assert np.allclose(auc_max(math.inf, PURITIES), saturated_auc(PURITIES), atol=1e-15)
    gap = [np.abs(auc_max(s, PURITIES) - saturated_auc(PURITIES)).max() for s in (6.6, 6.0)]
    assert gap[0] < 0.005 < gap[1]  # section IV-D (ii): within .005 from s = 6.6 on


@pytest.mark.parametrize("purity", [0.05, 0.3, 1.0])
def test_weak_signal_limit_has_an_error_of_third_order(purity):
    errors = [weak_signal_auc(s, purity) - auc_max(s, purity) for s in (0.4, 0.2, 0.1)]
    assert errors[0] > 0
    assert errors[0] / errors[1] == pytest.approx(8, rel=0.02) and errors[1] / errors[2] == pytest.approx(8, rel=0.02)


def test_excess_keeps_its_precision_where_the_auc_has_none_left():
    assert auc_excess(1e-9, 1e-9) == pytest.approx(1e-18 / (2 * math.sqrt(math.pi)), rel=1e-9)
    assert auc_max(1e-9, 1e-9) == 0.5


@pytest.mark.parametrize(("s", "a"), list(product([0.5, 1.0, 2.0, 4.0, 8.0], [0.05, 0.3, 0.5, 1.0])))
@pytest.mark.parametrize("offset", [0.0, 1.5])
def test_simulated_mixtures_with_the_true_direction(s, a, offset):
    # E3-A: within .006 of the law. Here n = 20,000 a group: a standard error below .0029.
    rng = np.random.default_rng(round(100 * s + 1000 * a))
    positive, negative = (draw(rng, 20_000, s, a, offset, sign) for sign in (1, -1))
    assert measured_auc(positive, negative) == pytest.approx(auc_max(s, a, offset), abs=0.009)


def test_no_direction_beats_the_law_and_other_directions_lose():
    rng = np.random.default_rng(3)
    n, d, s, a = 20_000, 5, 2.0, 0.4
    delta = rng.normal(size=d)
    delta *= s / np.linalg.norm(delta)
    marked = rng.uniform(size=(2, n, 1)) < a
    points = rng.normal(size=(2, n, d)) + marked * np.stack([delta, -delta])[:, None, :] / 2
    cap = auc_max(s, a)
    for angle in np.linspace(0, np.pi / 2, 7):
        other = np.linalg.svd(delta[None])[2][1]
        w = np.cos(angle) * delta / s + np.sin(angle) * other
        got = measured_auc(points[0] @ w, points[1] @ w)
        assert got == pytest.approx(auc_max(s * np.cos(angle), a), abs=0.009)
        assert got < cap + 0.009


def test_no_threshold_rule_beats_the_linear_score():
    # Remark 1: the likelihood ratio increases in the score, so that the score's ROC is the best of all.
    u = np.linspace(-30, 30, 20_001)
    for s, a in product([0.1, 1.0, 4.0, 12.0], [0.01, 0.3, 0.9]):
        density = [a * np.exp(-((u - sign * s / 2) ** 2) / 2) + (1 - a) * np.exp(-(u**2) / 2) for sign in (1.0, -1.0)]
        assert (np.diff(np.log(density[0]) - np.log(density[1])) > -1e-12).all()


@pytest.mark.parametrize("purity", [0.05, 0.3, 1.0])
@pytest.mark.parametrize("offset", [0.0, -1.5, 30.0])
def test_inverse_in_the_separation(purity, offset):
    s = np.array([0.02, 0.5, 2.0, 5.0, 8.0])
    auc = auc_max(s, purity, offset)
    known = (auc > 0.5 + 1e-9) & (auc < auc_max(math.inf, purity) - 1e-9)
    assert known.sum() >= (3 if offset != 30.0 else 1)
    assert np.allclose(separation_from_auc(auc, purity, offset)[known], s[known], rtol=1e-6)


def test_inverse_at_purity_one_is_the_binormal_one():
    assert separation_from_auc(0.984) == pytest.approx(math.sqrt(2) * 2.144410621, rel=1e-8)
    assert auc_max(separation_from_auc(0.7), 1.0) == pytest.approx(0.7, abs=1e-15)


def test_inverse_outside_what_the_law_can_give():
    assert separation_from_auc(0.5) == separation_from_auc(0.3) == 0.0
    assert separation_from_auc(1.0) == math.inf
    assert separation_from_auc(0.76, 0.3) == math.inf  # saturated: .755
    assert math.isfinite(separation_from_auc(0.754, 0.3))


def test_broadcasting_and_scalars():
    assert type(auc_max(1, 0.3)) is float and type(separation_from_auc(0.7)) is float
    assert auc_max([[1.0], [2.0]], [0.1, 0.2, 0.3]).shape == (2, 3)
    assert separation_from_auc([[0.6], [0.7]], [0.5, 0.9, 1.0]).shape == (2, 3)


def test_fit_recovers_the_separation_of_its_own_curve():
    a = np.array([0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0])
    for s in (0.05, 0.7, 3.0, 6.0):
        assert fit_separation(a, auc_max(s, a)) == pytest.approx(s, rel=1e-6)
    assert fit_separation(a, saturated_auc(a)) == pytest.approx(20.0)  # the bound, as in table V
    assert fit_separation(a, np.full(9, 0.5)) == pytest.approx(0.01)


def test_fit_is_no_worse_than_any_point_of_a_fine_grid():
    rng = np.random.default_rng(5)
    a = np.array([0.02, 0.05, 0.1, 0.3, 0.5, 1.0])
    for _ in range(20):
        aucs = np.clip(auc_max(rng.uniform(0.1, 8), a) + 0.05 * rng.normal(size=6), 0, 1)
        grid = np.geomspace(0.01, 20, 20_000)
        losses = ((aucs - auc_max(grid[:, None], a)) ** 2).sum(1)
        fitted = fit_separation(a, aucs)
        assert ((aucs - auc_max(fitted, a)) ** 2).sum() <= losses.min() + 1e-12


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (partial(auc_max, -1.0, 0.3), "separation"),
        (partial(auc_max, math.nan, 0.3), "separation"),
        (partial(auc_max, 1.0, 1.1), "purity"),
        (partial(auc_max, 1.0, [0.3, math.nan]), "purity"),
        (partial(auc_max, 1.0, 0.3, math.inf), "offset"),
        (partial(saturated_auc, -0.1), "purity"),
        (partial(weak_signal_auc, math.inf, 0.1), "separation"),
        (partial(separation_from_auc, 1.2), "auc"),
        (partial(separation_from_auc, 0.7, 0.0), "purity"),
        (partial(fit_separation, [0.1, 0.2], [0.5]), "purities and aucs"),
        (partial(fit_separation, [], []), "purities and aucs"),
        (partial(fit_separation, [0.0], [0.5]), "purities"),
        (partial(fit_separation, [0.1], [0.5], low=2.0, high=1.0), "low and high"),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
