from __future__ import annotations

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, norm

from monitor.geometry.curvature import (
    auc_ceiling,
    chord_length,
    chord_ratio,
    chordal_auc,
    geodesic_auc,
    within_class_std,
)


def centres(curvature, distance, d):
    """Two points of the sphere at a geodesic distance, and the direction of their chord."""
    angle = math.sqrt(curvature) * distance
    points = np.zeros((2, d + 1))
    points[:, 0] = math.cos(angle / 2)
    points[:, 1] = [math.sin(angle / 2), -math.sin(angle / 2)]
    return points / math.sqrt(curvature)


def clusters(rng, curvature, distance, tau, sigma, n=20_000, d=5):
    """Two classes spread along the sphere by the exponential map of tangent Gaussians, and around it by noise."""
    radius, drawn = 1 / math.sqrt(curvature), []
    for centre in centres(curvature, distance, d):
        tangent = tau * rng.normal(size=(n, d + 1))
        tangent -= np.outer(tangent @ centre, centre) / radius**2
        length = np.linalg.norm(tangent, axis=1, keepdims=True)
        angle = length / radius
        points = np.cos(angle) * centre + radius * np.sin(angle) * tangent / np.where(length > 0, length, 1)
        drawn.append(points + sigma * rng.normal(size=(n, d + 1)))
    return drawn


def test_chord_is_the_straight_distance_of_two_points_of_the_sphere():
    for curvature, share in product([0.25, 1.0, 4.0], [0.1, 0.5, 0.9, 1.0]):
        distance = share * math.pi / math.sqrt(curvature)
        a, b = centres(curvature, distance, 3)
        assert chord_length(curvature, distance) == pytest.approx(np.linalg.norm(a - b), rel=1e-12)
        assert math.acos(np.clip(a @ b * curvature, -1, 1)) / math.sqrt(curvature) == pytest.approx(distance, rel=1e-6)


def test_chord_saturates_at_the_diameter_and_is_never_longer_than_the_arc():
    curvature = np.array([0.0, 1e-12, 0.25, 1.0, 4.0])[:, None]
    distance = np.linspace(0, 1.5, 40)
    chord = chord_length(curvature, distance)
    assert (chord <= distance + 1e-15).all()
    assert (chord[1:] <= 2 / np.sqrt(curvature[1:])).all()
    assert (np.diff(chord, axis=1) > 0).all() and (np.diff(chord[:, 1:], axis=0) <= 0).all()
    assert chord_ratio(0.0, 3.0) == 1.0 == chord_ratio(2.0, 0.0)
    assert chord_ratio(1.0, math.pi) == pytest.approx(2 / math.pi)


@pytest.mark.parametrize(("curvature", "tau", "sigma"), list(product([0.25, 1.0, 4.0], [0.0, 0.03], [0.1, 0.4])))
@pytest.mark.parametrize("share", [0.15, 0.5, 0.9])
def test_simulated_spheres(curvature, tau, sigma, share):
    # E3-B: eq. 6 within .013 of the AUC along the chord; the standard error here is below .003.
    rng = np.random.default_rng(1)
    distance = share * math.pi / math.sqrt(curvature)
    positive, negative = clusters(rng, curvature, distance, tau, sigma)
    a, b = centres(curvature, distance, 5)
    u = (a - b) / np.linalg.norm(a - b)
    auc = mannwhitneyu(positive @ u, negative @ u).statistic / len(positive) ** 2
    assert chordal_auc(curvature, distance, tau, sigma) == pytest.approx(auc, abs=0.013)
    spread = within_class_std(curvature, distance, tau, sigma)
    assert spread == pytest.approx((positive @ u).std(), rel=0.02)
    assert auc <= auc_ceiling(curvature, sigma) + 0.01


def test_wide_classes_on_a_sphere_of_many_dimensions_are_closer_than_the_first_order_says():
    # dτ²κ/2 = .1: the means lie that much inside the sphere, and eq. 6 is off by more than its published .013.
    curvature, tau, sigma, d = 4.0, 0.1, 0.4, 5
    distance = 0.5 * math.pi / math.sqrt(curvature)
    positive, negative = clusters(np.random.default_rng(1), curvature, distance, tau, sigma, d=d)
    a, b = centres(curvature, distance, d)
    u = (a - b) / np.linalg.norm(a - b)
    auc = mannwhitneyu(positive @ u, negative @ u).statistic / len(positive) ** 2
    spread = within_class_std(curvature, distance, tau, sigma)
    shorter = (1 - d * tau**2 * curvature / 2) * chord_length(curvature, distance)
    assert chordal_auc(curvature, distance, tau, sigma) - auc > 0.02
    assert norm.cdf(shorter / (math.sqrt(2) * spread)) == pytest.approx(auc, abs=0.006)


def test_the_ceiling_binds_curved_spaces_and_not_the_flat_one():
    r = np.linspace(0.05, math.pi / 2, 60)  # κ = 4: half the way around
    curved, flat = chordal_auc(4.0, r, 0.0, 0.5), geodesic_auc(r, 0.0, 0.5)
    assert (curved <= auc_ceiling(4.0, 0.5) + 1e-15).all()
    assert curved[-1] == pytest.approx(auc_ceiling(4.0, 0.5))
    assert flat[-1] > auc_ceiling(4.0, 0.5) + 0.02
    assert curved[-1] - curved[-10] < 0.01 < flat[-1] - flat[-10]


def test_ceiling_by_hand_and_at_its_ends():
    assert auc_ceiling(4.0, 0.5) == pytest.approx(norm.cdf(math.sqrt(2)))
    assert auc_ceiling(0.0, 1.0) == 1.0 and auc_ceiling(math.inf, 1.0) == 0.5
    assert auc_ceiling(1e12, 1.0) == pytest.approx(0.5, abs=1e-5)
    assert (np.diff(auc_ceiling(np.geomspace(0.05, 1e4, 50), 1.0)) < 0).all()


def test_flat_space_is_the_geodesic_case():
    r = np.linspace(0, 5, 20)
    assert np.array_equal(chordal_auc(0.0, r, 0.3, 0.4), geodesic_auc(r, 0.3, 0.4))
    assert geodesic_auc(2.0, 0.6, 0.8) == pytest.approx(norm.cdf(2 / math.sqrt(2)))
    assert np.allclose(chordal_auc(1e-10, r, 0.3, 0.4), geodesic_auc(r, 0.3, 0.4), atol=1e-9)


def test_which_of_chord_and_arc_sees_more_depends_on_where_the_noise_lies():
    r = np.linspace(0.1, 3.1, 40)
    assert (chordal_auc(1.0, r, 0.0, 0.5) <= geodesic_auc(r, 0.0, 0.5)).all()
    assert (chordal_auc(1.0, r, 0.5, 0.0) >= geodesic_auc(r, 0.5, 0.0)).all()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (partial(chord_ratio, -1.0, 1.0), "curvature"),
        (partial(chord_length, 1.0, -1.0), "distance"),
        (partial(chord_length, 1.0, 3.2), "distance must be at most"),
        (partial(within_class_std, 1.0, 1.0, -0.1, 0.1), "intrinsic_std"),
        (partial(chordal_auc, 1.0, 1.0, 0.0, 0.0), "must not both be 0"),
        (partial(chordal_auc, 1.0, math.nan, 0.1, 0.1), "distance"),
        (partial(geodesic_auc, 1.0, 0.0, math.nan), "ambient_std"),
        (partial(auc_ceiling, 1.0, 0.0), "within_std"),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
