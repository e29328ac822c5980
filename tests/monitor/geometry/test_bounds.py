from __future__ import annotations

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
from scipy import stats

from monitor.geometry.bounds import (
    MINIMAX_CONSTANT,
    entangled_auc,
    extrinsic_radius_cap,
    generalization_bound,
    max_curvature,
    max_entanglement,
    minimax_excess_risk,
    rademacher_complexity_bound,
    samples_for_generalization,
    sphere_radius,
)
from monitor.geometry.curvature import auc_ceiling


def on_sphere(rng, n, d, radius):
    x = rng.normal(size=(n, d))
    return radius * x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize(("n", "d"), [(20, 3), (100, 50), (200, 1000)])
def test_rademacher_bound_covers_the_simulated_complexity_in_every_dimension(n, d):
    rng = np.random.default_rng(n)
    x, norm, radius = on_sphere(rng, n, d, 2.0), 1.5, 2.0
    signs = rng.choice([-1.0, 1.0], size=(4_000, n))
    complexity = norm / n * np.linalg.norm(signs @ x, axis=1).mean()  # the supremum over the ball, in closed form
    bound = rademacher_complexity_bound(norm, radius, n)
    assert 0.85 * bound < complexity <= bound * (1 + 1e-12)  # and close: in high dimension it is nearly reached


def test_generalization_bound_by_hand():
    # 2·1·2/sqrt(400) = .2; 3 sqrt(log(40)/800) = .2037
    assert generalization_bound(0.1, 1.0, 2.0, 400) == pytest.approx(0.1 + 0.2 + 0.20371, abs=1e-5)
    assert generalization_bound(0.1, 1.0, 2.0, 1600) - 0.1 == pytest.approx(
        (generalization_bound(0.1, 1.0, 2.0, 400) - 0.1) / 2
    )
    assert generalization_bound(0.1, 1.0, 2.0, 400, confidence=0.99) > generalization_bound(0.1, 1.0, 2.0, 400)


def test_generalization_bound_holds_for_probes_chosen_on_the_training_set():
    rng = np.random.default_rng(7)
    n, d, norm = 200, 20, 1.0
    violations = []
    for _ in range(200):
        y = rng.choice([-1.0, 1.0], size=n)
        x = on_sphere(rng, n, d, 1.0)
        x[:, 0] = np.abs(x[:, 0]) * np.where(
            rng.uniform(size=n) < 0.7, y, -y
        )  # a direction that is right 7 in 10 times
        w = norm * (y @ x) / np.linalg.norm(y @ x)
        ramp = np.clip(1 - y * (x @ w), 0, 1).mean()
        y_new = rng.choice([-1.0, 1.0], size=2_000)
        x_new = on_sphere(rng, 2_000, d, 1.0)
        x_new[:, 0] = np.abs(x_new[:, 0]) * np.where(rng.uniform(size=2_000) < 0.7, y_new, -y_new)
        violations.append((np.sign(x_new @ w) != y_new).mean() > generalization_bound(ramp, norm, 1.0, n))
    assert np.mean(violations) <= 0.05


def test_samples_for_generalization_is_the_smallest_number_that_does():
    n = samples_for_generalization(0.05, 1.0, 3.0)
    assert isinstance(n, int)
    assert generalization_bound(0.2, 1.0, 3.0, n) <= 0.25 < generalization_bound(0.2, 1.0, 3.0, n - 1)


def test_radius_cap_covers_spheres_and_the_thin_spindle():
    for curvature in (0.25, 1.0, 4.0):
        assert sphere_radius(curvature) == curvature**-0.5 < extrinsic_radius_cap(curvature)
        # Appendix A-A: a spindle of curvature >= .995 κ with a chord of 3.138/√κ between its poles.
        assert 3.138 / 2 / math.sqrt(curvature) < extrinsic_radius_cap(0.995 * curvature)
    assert extrinsic_radius_cap(2.0) == pytest.approx(math.pi / 2)


def excess_of_the_best_rule(rng, s, d, n, runs=20_000):
    """Average excess error of the direction m = μ/2 + N(0, I/n), which is the best rule there is."""
    m = rng.normal(size=(runs, 1)) / math.sqrt(n) + s / 2
    across = rng.chisquare(d - 1, size=(runs, 1)) / n if d > 1 else 0.0
    cosine = m / np.sqrt(m**2 + across)
    return (stats.norm.cdf(-s / 2 * cosine) - stats.norm.cdf(-s / 2)).mean()


@pytest.mark.parametrize(("d", "n"), list(product([1, 2, 3, 10, 100, 3000], [1, 10, 100, 3000])))
def test_not_even_the_best_rule_beats_the_minimax_bound(d, n):
    # At the distance the proof takes; the largest excess over all distances is what the problem really costs.
    rng = np.random.default_rng(d + n)
    bound = minimax_excess_risk(d, n)
    assert excess_of_the_best_rule(rng, min(1.0, math.sqrt(d / n)), d, n) > bound
    worst = max(excess_of_the_best_rule(rng, s, d, n, 2_000) for s in np.geomspace(0.01, 8, 25))
    assert bound < worst < (4 if d <= n else 12.6) * bound  # an excess of 1/2 is 12.6 times c₀


def test_learned_rules_on_drawn_data_do_not_beat_the_minimax_bound():
    # The argument that the mean of y x is the best direction, and its law, from data: other rules are not better.
    rng = np.random.default_rng(4)
    d, n, runs = 8, 40, 3_000
    s = math.sqrt(d / n)
    y = rng.choice([-1.0, 1.0], size=(runs, n))
    x = rng.normal(size=(runs, n, d))
    x[:, :, 0] += y * s / 2
    mean = np.einsum("rn,rnd->rd", y, x)
    rules = {
        "mean": mean,
        "regression": np.linalg.solve(np.einsum("rni,rnj->rij", x, x), mean[..., None])[..., 0],
        "signs": np.sign(mean),
    }
    excess = {}
    for name, w in rules.items():
        cosine = w[:, 0] / np.linalg.norm(w, axis=1)
        excess[name] = (stats.norm.cdf(-s / 2 * cosine) - stats.norm.cdf(-s / 2)).mean()
    assert excess["mean"] == pytest.approx(excess_of_the_best_rule(rng, s, d, n), rel=0.05)
    assert min(excess.values()) == excess["mean"] > minimax_excess_risk(d, n)


def test_minimax_rate():
    assert MINIMAX_CONSTANT == pytest.approx(stats.norm.pdf(0.5) / 2 * (1 - math.sqrt(0.6)), rel=1e-14)
    assert minimax_excess_risk(10, 1000) == pytest.approx(MINIMAX_CONSTANT / 10)
    assert minimax_excess_risk(1000, 10) == MINIMAX_CONSTANT
    assert MINIMAX_CONSTANT > 0.64 * stats.norm.pdf(0.5) / (16 * math.sqrt(2))  # what the printed steps give


def test_curvature_limit_is_the_ceiling_solved():
    for epsilon, within in product([0.01, 0.1, 0.4], [0.2, 1.0]):
        limit = max_curvature(epsilon, within)
        assert auc_ceiling(limit, within) == pytest.approx(1 - epsilon, abs=1e-12)
        assert auc_ceiling(1.1 * limit, within) < 1 - epsilon < auc_ceiling(0.9 * limit, within)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(("s", "rho", "eta"), [(2.0, 0.6, 1.0), (3.0, -0.9, 3.0), (1.5, 0.3, 0.5)])
def test_entangled_auc_against_drawn_clusters(s, rho, eta, aligned):
    rng = np.random.default_rng(11)
    u, v = np.array([1.0, 0.0]), np.array([rho, math.sqrt(1 - rho**2)])
    noise = rng.normal(size=(2, 40_000, 2)) + eta * rng.normal(size=(2, 40_000, 1)) * v
    covariance = np.eye(2) + eta**2 * np.outer(v, v)
    w = u if aligned else np.linalg.solve(covariance, s * u)
    positive, negative = noise[0] @ w + s * u @ w, noise[1] @ w
    drawn = stats.mannwhitneyu(positive, negative).statistic / 40_000**2
    assert entangled_auc(s, rho, eta, aligned) == pytest.approx(drawn, abs=0.007)


def test_entangled_auc_at_its_ends():
    clean = stats.norm.cdf(2 / math.sqrt(2))
    for aligned in (False, True):
        assert entangled_auc(2.0, 0.0, 5.0, aligned) == pytest.approx(clean)
        assert entangled_auc(2.0, 0.0, math.inf, aligned) == pytest.approx(clean)
        assert entangled_auc(2.0, 0.7, 0.0, aligned) == pytest.approx(clean)
        assert entangled_auc(2.0, 1.0, math.inf, aligned) == 0.5
        assert entangled_auc(2.0, 0.5, 1e9, aligned) == pytest.approx(
            entangled_auc(2.0, 0.5, math.inf, aligned), abs=1e-8
        )
    assert entangled_auc(2.0, 0.6, math.inf) == pytest.approx(stats.norm.cdf(2 * 0.8 / math.sqrt(2)))
    assert entangled_auc(2.0, 0.6, math.inf, aligned=True) == 0.5
    rho, eta = np.meshgrid(np.linspace(0, 1, 21), np.linspace(0, 5, 21))
    assert (entangled_auc(2.0, rho, eta, aligned=True) <= entangled_auc(2.0, rho, eta) + 1e-15).all()


def test_entanglement_limit_is_the_best_auc_solved():
    for epsilon, s, eta in product([0.05, 0.1], [2.6, 3.0], [1.0, 3.0, math.inf]):
        limit = max_entanglement(epsilon, s, eta)
        if 0 < limit < 1:
            assert entangled_auc(s, math.sqrt(limit), eta) == pytest.approx(1 - epsilon, abs=1e-12)
        elif limit == 1:
            assert entangled_auc(s, 1.0, eta) >= 1 - epsilon
    assert max_entanglement(0.1, 3.0) == pytest.approx(1 - 2 * stats.norm.isf(0.1) ** 2 / 9)
    assert max_entanglement(0.01, 1.0) == 0.0  # AUC .76 without any entanglement
    assert max_entanglement(0.1, 100.0, 0.5) == 1.0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (partial(rademacher_complexity_bound, -1.0, 1.0, 10), "norm"),
        (partial(rademacher_complexity_bound, 1.0, 1.0, 0), "n must"),
        (partial(generalization_bound, 1.2, 1.0, 1.0, 10), "empirical_risk"),
        (partial(generalization_bound, 0.2, 1.0, 1.0, 10, confidence=1.0), "confidence"),
        (partial(extrinsic_radius_cap, 0.0), "min_curvature"),
        (partial(sphere_radius, -1.0), "curvature"),
        (partial(minimax_excess_risk, 0, 10), "dimension"),
        (partial(samples_for_generalization, 0.0, 1.0, 1.0), "epsilon"),
        (partial(max_curvature, 0.5, 1.0), "epsilon"),
        (partial(max_curvature, 0.1, 0.0), "within_std"),
        (partial(max_entanglement, 0.1, 0.0), "separation"),
        (partial(entangled_auc, 1.0, 1.1, 1.0), "entanglement"),
        (partial(entangled_auc, 1.0, 0.5, math.nan), "confound_ratio"),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
