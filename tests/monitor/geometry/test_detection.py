from __future__ import annotations

import math
from functools import partial
from itertools import combinations, product

import numpy as np
import pytest
from scipy import stats

from monitor.geometry import detection
from monitor.geometry.detection import (
    CV_INFLATION,
    DETECTED,
    NOT_DETECTED,
    UNDERPOWERED,
    asymptotic_purity_threshold,
    asymptotic_sample_budget,
    detectable_auc,
    detection_p,
    detection_power,
    detection_z,
    learned_separation,
    null_std,
    purity_threshold,
    sample_budget,
    verdict,
)
from monitor.geometry.purity import auc_max

Z = stats.norm.ppf(0.95) + stats.norm.ppf(0.8)


def aucs(positive, negative):
    """AUC of every row."""
    ranks = stats.rankdata(np.concatenate([positive, negative], axis=1), axis=1)[:, : positive.shape[1]]
    n, m = positive.shape[1], negative.shape[1]
    return (ranks.sum(1) - n * (n + 1) / 2) / (n * m)


@pytest.mark.parametrize(("n_positive", "n_negative"), [(1, 1), (1, 6), (3, 4), (5, 5), (2, 9)])
def test_null_std_is_the_permutation_one_by_brute_force(n_positive, n_negative):
    n = n_positive + n_negative
    scores = np.random.default_rng(0).normal(size=n) ** 3  # any distribution without ties
    values = []
    for chosen in combinations(range(n), n_positive):
        rest = np.setdiff1d(np.arange(n), chosen)
        values.append((scores[list(chosen)][:, None] > scores[rest]).mean())
    assert np.mean(values) == pytest.approx(0.5)
    assert null_std(n_positive, n_negative) == pytest.approx(np.std(values), rel=1e-12)


@pytest.mark.parametrize("sizes", [(8, 8), (30, 70), (150, 150)])
def test_p_is_the_normal_mann_whitney_test(sizes):
    rng = np.random.default_rng(1)
    for shift in (-0.5, 0.0, 0.5, 2.0):
        positive, negative = rng.normal(shift, size=sizes[0]), rng.normal(size=sizes[1])
        test = stats.mannwhitneyu(positive, negative, use_continuity=False, alternative="greater", method="asymptotic")
        auc = test.statistic / (sizes[0] * sizes[1])
        assert detection_p(auc, *sizes, inflation=1.0) == pytest.approx(test.pvalue, rel=1e-9, abs=0)


def test_p_has_its_level_on_held_out_noise():
    rng = np.random.default_rng(2)
    p = detection_p(aucs(rng.normal(size=(20_000, 40)), rng.normal(size=(20_000, 60))), 40, 60, inflation=1.0)
    for level in (0.01, 0.05, 0.2):
        assert (p <= level).mean() == pytest.approx(level, abs=3.5 * math.sqrt(level / 20_000))


def test_p_stays_exact_far_out():
    # 1 - Φ(z) is 0 from z = 8.3 on.
    n = 4_000
    for z in (1.0, 10.0, 37.0):
        auc = 0.5 + z * null_std(n, n)
        assert detection_z(auc, n, n, inflation=1.0) == pytest.approx(z, rel=1e-12)
        assert detection_p(auc, n, n, inflation=1.0) == pytest.approx(stats.norm.sf(z), rel=1e-9, abs=0)
    far = detection_p(0.5 + np.array([37.0, 38.0, 40.0]) * null_std(n, n), n, n, inflation=1.0)
    assert far[0] == pytest.approx(5.726e-300, rel=1e-3, abs=0)
    assert far[1:].tolist() == [0.0, 0.0]  # true values below the smallest normal double: 0, never negative or NaN
    assert detection_p(0.0, n, n) == 1.0


def test_inflation_divides_z_and_is_the_calibrated_default():
    assert CV_INFLATION == 1.4
    assert detection_z(0.6, 150, 150) == pytest.approx(0.1 / (1.4 * math.sqrt(301 / (12 * 150 * 150))))
    assert detection_z(0.6, 150, 150, inflation=1.0) == pytest.approx(1.4 * detection_z(0.6, 150, 150))
    assert detection_z(0.5, 20, 30) == 0.0 and detection_z(0.4, 20, 30) < 0


def test_detectable_auc_is_where_the_power_is_the_wanted_one():
    auc = detectable_auc(150, 150, level=0.01, power=0.9, inflation=1.4)
    z = detection_z(auc, 150, 150, 1.4)
    assert stats.norm.sf(stats.norm.isf(0.01) - z) == pytest.approx(0.9)
    assert detectable_auc(1, 1) > 1.0  # nothing can be told from one pair


def scored_mixtures(rng, runs, n, s, a, b=0.0):
    marked = rng.uniform(size=(2, runs, n // 2)) < a
    centres = np.where(marked, np.array([s / 2, -s / 2])[:, None, None], b)
    positive, negative = centres + rng.normal(size=marked.shape)
    return aucs(positive, negative)


@pytest.mark.parametrize(
    ("n", "s", "b", "power"), [(100, 2.0, 0.0, 0.8), (300, 1.0, 0.0, 0.5), (300, 6.0, 0.0, 0.8), (400, 1.5, 1.0, 0.9)]
)
def test_at_the_threshold_the_best_score_is_detected_with_the_wanted_power(n, s, b, power):
    # Theorem 4, simulated. The theorem takes the null's spread for the alternative's: a few points of power.
    a = purity_threshold(n, s, power=power, offset=b)
    p = detection_p(scored_mixtures(np.random.default_rng(n), 4_000, n, s, a, b), n // 2, n // 2, inflation=1.0)
    assert (p <= 0.05).mean() == pytest.approx(power, abs=0.035)
    below = scored_mixtures(np.random.default_rng(n), 4_000, n, s, a / 2, b)
    assert (detection_p(below, n // 2, n // 2, inflation=1.0) <= 0.05).mean() < power - 0.2


GRID = list(product([20, 100, 1000, 100_000], [0.5, 1.0, 4.0, 9.0, math.inf], [0.0, 2.0], [1.0, 1.4]))


@pytest.mark.parametrize(("n", "s", "b", "inflation"), GRID)
def test_threshold_is_the_exact_root(n, s, b, inflation):
    a = purity_threshold(n, s, offset=b, inflation=inflation)
    wanted = Z * inflation * null_std(n / 2, n / 2)
    if math.isinf(a):
        assert auc_max(s, 1.0, b) - 0.5 < wanted
    else:
        assert 0 < a <= 1
        assert auc_max(s, a, b) - 0.5 == pytest.approx(wanted, abs=5e-16)


def test_threshold_against_the_quadratic_formula():
    s, b, n = 3.0, 0.7, 500
    both = stats.norm.cdf(s / math.sqrt(2)) - 0.5
    one = stats.norm.cdf((s / 2 - b) / math.sqrt(2)) + stats.norm.cdf((s / 2 + b) / math.sqrt(2)) - 1
    root = max(np.roots([both - one, one, -Z * null_std(n / 2, n / 2)]), key=lambda x: -abs(x - 0.1))
    assert purity_threshold(n, s, offset=b) == pytest.approx(root, rel=1e-12)


def test_threshold_is_infinite_exactly_where_purity_one_is_not_enough():
    assert purity_threshold(20, 0.5) == math.inf
    assert purity_threshold(100, 0.0) == math.inf
    n = sample_budget(1.0, 0.5)
    assert purity_threshold(n, 0.5) <= 1.0 and purity_threshold(n - 2, 0.5) == math.inf


def test_threshold_moves_the_right_way():
    base = purity_threshold(300, 1.0)
    assert purity_threshold(600, 1.0) < base > purity_threshold(300, 2.0)
    assert purity_threshold(300, 1.0, level=0.1) < base > purity_threshold(300, 1.0, power=0.5)
    for harder in ({"offset": 1.0}, {"inflation": 1.4}, {"dimension": 5}):
        assert purity_threshold(300, 1.0, **harder) > base


def test_asymptotic_constant_and_slope():
    # Eq. 11: 2√π/√3 = 2.046..., boundary slope -1/2 on logarithmic axes.
    constant = asymptotic_purity_threshold(10_000, 1.0) * 100 / Z
    assert math.floor(constant * 1000) == 2046 and round(constant, 2) == 2.05
    n = np.array([1e4, 1e6, 1e8])
    for s in (0.5, 1.0, 2.0):
        exact = np.array([purity_threshold(m, s) for m in n])
        slopes = np.diff(np.log(exact)) / np.diff(np.log(n))
        assert np.allclose(slopes, -0.5, atol=[0.02, 0.002])
    # With s -> 0 both agree (s² n kept large).
    for s, tolerance in ((0.5, 0.03), (0.05, 2e-3)):
        m = 1e6 / s**2
        assert purity_threshold(m, s) == pytest.approx(asymptotic_purity_threshold(m, s), rel=tolerance)


def test_asymptotic_is_never_above_the_exact_one():
    for n, s in product([100, 1000, 10_000], [0.2, 1.0, 3.0, 6.0, 20.0]):
        assert asymptotic_purity_threshold(n, s) < purity_threshold(n, s)
    assert asymptotic_purity_threshold(300, 6.0) / purity_threshold(300, 6.0) < 0.56


def test_large_separations_are_limited_by_purity_alone_as_published():
    # Section VI-E: "with s >= 6 ... α* ≈ z_.95/sqrt(3n) ... detection at n = 300 requires α of 0.05-0.06": level .05
    # and a power of one half (z = 0), one held-out test.
    for s in (6.0, 8.0, 40.0):
        assert 0.05 < purity_threshold(300, s, power=0.5) < 0.06
    assert stats.norm.ppf(0.95) / math.sqrt(900) == pytest.approx(0.0548, abs=1e-4)
    # At a power of .8, or with the calibrated null, more is needed.
    assert purity_threshold(300, 8.0) == pytest.approx(0.0872, abs=1e-4)
    assert purity_threshold(300, 8.0, power=0.5, inflation=1.4) == pytest.approx(0.0805, abs=1e-4)
    # Without any limit of separation a(2 - a)/2 = T is solved by hand.
    for options, multiple in (({}, Z), ({"power": 0.5, "inflation": 1.4}, 1.4 * stats.norm.ppf(0.95))):
        wanted = multiple * math.sqrt(301 / 3) / 300
        assert purity_threshold(300, math.inf, **options) == pytest.approx(1 - math.sqrt(1 - 2 * wanted), rel=1e-12)


@pytest.mark.parametrize(
    ("a", "s", "options"),
    [
        (0.3, 1.0, {}),
        (1.0, 8.0, {}),
        (0.05, 0.5, {"power": 0.95, "level": 0.01}),
        (0.1, 3.0, {"offset": 2.0, "inflation": 1.4}),
        (0.3, 1.0, {"dimension": 20}),
        (0.02, 6.0, {"dimension": 768, "train_fraction": 4.0}),
        (1.0, math.inf, {"level": 0.4, "power": 0.5}),
    ],
)
def test_budget_is_the_smallest_even_number_and_the_inverse_of_the_threshold(a, s, options):
    n = sample_budget(a, s, **options)
    assert isinstance(n, int) and n % 2 == 0 and n >= 2
    assert purity_threshold(n, s, **options) <= a
    assert n == 2 or purity_threshold(n - 2, s, **options) > a
    wanted = options.pop("power", 0.8)
    assert detection_power(n, a, s, **options) >= wanted
    assert n == 2 or detection_power(n - 2, a, s, **options) < wanted


def test_budget_by_hand():
    # Section VII-A with σ₀ ≈ 1/sqrt(3n): n >= Z²/(3 excess²), exact to one sample more.
    excess = auc_max(1.0, 0.3) - 0.5
    assert sample_budget(0.3, 1.0) == pytest.approx(Z**2 / (3 * excess**2), abs=3)


@pytest.mark.parametrize(("a", "s"), [(0.05, 0.5), (0.05, 4.0), (0.3, 0.5), (0.3, 1.0)])
def test_the_calibrated_null_costs_a_factor_of_1_96(a, s):
    assert sample_budget(a, s, inflation=1.4) / sample_budget(a, s) == pytest.approx(1.96, rel=0.02)
    assert asymptotic_sample_budget(a, s, inflation=1.4) / asymptotic_sample_budget(a, s) == pytest.approx(
        1.96, rel=0.05
    )


def test_halving_the_purity_or_the_effect_quadruples_the_budget():
    n = sample_budget(0.02, 0.1)
    assert sample_budget(0.01, 0.1) / n == pytest.approx(4, rel=0.05)
    assert sample_budget(0.02, 0.05) / n == pytest.approx(4, rel=0.01)
    assert asymptotic_sample_budget(0.02, 0.1) == pytest.approx(n, rel=0.05)
    assert asymptotic_sample_budget(0.3, 1.0) == pytest.approx((2.0466534 * Z / 0.3) ** 2, abs=2)


def test_power_at_its_ends():
    assert detection_power(300, 0.0, 1.0) == pytest.approx(0.05)
    assert detection_power(300, 0.4, 0.0, level=0.01) == pytest.approx(0.01)
    assert detection_power(300, 1.0, 8.0) == pytest.approx(1.0)
    assert detection_power(300, purity_threshold(300, 1.0), 1.0) == pytest.approx(0.8)
    assert np.all(np.diff([detection_power(n, 0.2, 1.0) for n in (50, 100, 200, 400)]) > 0)


def learned_directions(rng, runs, n, d, s, a):
    """s_w of differences of class means, drawn as the derivation's setting has it."""
    half = n // 2
    centre = np.zeros((2, runs, d))
    for i, sign in enumerate((0.5, -0.5)):
        centre[i, :, 0] = sign * s * rng.binomial(half, a, size=runs) / half
    means = centre + rng.normal(size=centre.shape) / math.sqrt(half)
    w = means[0] - means[1]
    return s * w[:, 0] / np.linalg.norm(w, axis=1)


@pytest.mark.parametrize(
    ("n", "d", "s", "a"), [(200, 50, 2.0, 0.3), (1000, 50, 1.0, 0.2), (300, 400, 6.0, 0.1), (2000, 10, 1.0, 1.0)]
)
def test_learned_separation_against_simulation(n, d, s, a):
    drawn = learned_directions(np.random.default_rng(n + d), 2_000, n, d, s, a)
    assert learned_separation(s, a, n, d) == pytest.approx(drawn.mean(), rel=0.03)
    assert learned_separation(s, a, n, d) < 0.97 * s or d == 10  # the loss is there


def test_learned_auc_against_simulated_training_and_test_sets():
    rng = np.random.default_rng(9)
    n, d, s, a = 400, 60, 3.0, 0.25
    got = []
    for s_w in learned_directions(rng, 400, n, d, s, a):
        got.append(scored_mixtures(rng, 1, 4_000, s_w, a)[0])
    assert auc_max(learned_separation(s, a, n, d), a) == pytest.approx(np.mean(got), abs=0.004)
    assert auc_max(s, a) - np.mean(got) > 0.02


def test_learned_separation_at_its_ends():
    assert learned_separation(2.0, 0.0, 100, 10) == 0.0 == learned_separation(0.0, 0.5, 100, 10)
    assert learned_separation(2.0, 0.5, 1e12, 10) == pytest.approx(2.0)
    a = np.linspace(0, 1, 50)
    assert (np.diff(learned_separation(2.0, a, 100, 10)) > 0).all()
    # Far below what can be learned it is linear in the purity.
    assert learned_separation(1.0, 2e-4, 100, 500) / learned_separation(1.0, 1e-4, 100, 500) == pytest.approx(2)


def test_learned_frontier_lies_above_by_a_factor_that_grows_with_the_dimension():
    # Section VI-E: 2-2.5 times α* for the published probe.
    best = purity_threshold(300, 2.0, power=0.5)
    ratios = [purity_threshold(300, 2.0, power=0.5, dimension=d) / best for d in (1, 5, 20, 64)]
    assert ratios[0] > 1 and (np.diff(ratios) > 0).all() and ratios[-1] > 2
    # One training sample a scored one or four: more to learn from is better.
    assert purity_threshold(300, 2.0, dimension=20, train_fraction=4) < purity_threshold(300, 2.0, dimension=20)


def test_verdict():
    assert verdict(0.05, 0.0) == DETECTED  # at the level: detected, with whatever power
    assert verdict(0.051, 0.8) == NOT_DETECTED
    assert verdict(0.051, 0.79) == UNDERPOWERED
    assert verdict(0.02, 0.9, level=0.01) == NOT_DETECTED
    assert verdict(0.5, 0.85, wanted_power=0.9) == UNDERPOWERED
    assert verdict(1.0, 1.0) == NOT_DETECTED


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (partial(null_std, 0, 5), "n_positive"),
        (partial(null_std, 5, math.nan), "n_negative"),
        (partial(detection_z, 1.1, 5, 5), "auc"),
        (partial(detection_z, 0.7, 5, 5, inflation=0.9), "inflation"),
        (partial(detection_p, math.nan, 5, 5), "auc"),
        (partial(detectable_auc, 5, 5, level=0.0), "level"),
        (partial(detectable_auc, 5, 5, power=1.0), "power"),
        (partial(detectable_auc, 5, 5, level=0.3, power=0.3), "power must be above level"),
        (partial(learned_separation, 1.0, 0.3, 0, 5), "n_train"),
        (partial(learned_separation, 1.0, 0.3, 100, 0), "dimension"),
        (partial(learned_separation, math.inf, 0.3, 100, 5), "separation"),
        (partial(purity_threshold, 1, 1.0), "n must"),
        (partial(purity_threshold, 100, -1.0), "separation"),
        (partial(purity_threshold, [100, 200], 1.0), "n must be one number"),
        (partial(purity_threshold, 100, 1.0, offset=math.nan), "offset"),
        (partial(purity_threshold, 100, 1.0, dimension=0), "dimension"),
        (partial(purity_threshold, 100, 1.0, dimension=5, train_fraction=0.0), "train_fraction"),
        (partial(asymptotic_purity_threshold, 100, 0.0), "separation"),
        (partial(sample_budget, 0.0, 1.0), "purity"),
        (partial(sample_budget, 0.3, 0.0), "separation must be above 0"),
        (partial(sample_budget, 1e-9, 1e-9), "more than"),
        (partial(asymptotic_sample_budget, 1.5, 1.0), "purity"),
        (partial(detection_power, 100, 0.3, 1.0, level=1.0), "level"),
        (partial(verdict, math.nan, 0.5), "p must"),
        (partial(verdict, 0.5, 1.5), "power"),
        (partial(verdict, 0.5, 0.5, wanted_power=1.0), "wanted_power"),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_words_are_the_contract():
    assert (detection.DETECTED, detection.NOT_DETECTED, detection.UNDERPOWERED) == (
        "detected",
        "not detected",
        "underpowered",
    )
