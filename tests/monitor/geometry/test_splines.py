"""Splines through planted circles and arcs, their nearest points against brute force, and bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.interpolate import CubicSpline

from monitor.geometry.splines import spline

D = 40


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def circle(n_values: int, *, noise: float = 0.0, each: int = 5, radius: float = 3.0):
    """Texts of values around a circle in D dimensions; its plane and centre."""
    plane, centre = torch.linalg.qr(draw(D, 2)).Q, 4 * draw(D, seed=1)
    labels = torch.arange(n_values).repeat_interleave(each)
    angle = 2 * math.pi * labels.double() / n_values
    points = radius * torch.stack([angle.cos(), angle.sin()], 1)
    return points @ plane.mT + centre + noise * draw(len(labels), D, seed=2), labels, plane, centre


def off_circle(points: torch.Tensor, plane: torch.Tensor, centre: torch.Tensor, radius: float = 3.0) -> torch.Tensor:
    """Distance of points from the planted circle."""
    q = (points.double() - centre) @ plane
    away = points.double() - centre - q @ plane.mT
    return torch.hypot(q.norm(dim=1) - radius, away.norm(dim=1))


@pytest.mark.parametrize(("n_values", "tolerance"), [(7, 0.01), (12, 0.001)])
def test_a_planted_circle_is_recovered_all_around(n_values: int, tolerance: float):
    x, labels, plane, centre = circle(n_values)
    curve = spline(x.float(), labels, True, 2)
    around = curve.at(torch.linspace(0, n_values, 1000))
    assert float(off_circle(around, plane, centre).max()) < tolerance * 3
    # And all of it: no point of the circle is far from the curve.
    angle = torch.linspace(0, 2 * math.pi, 500, dtype=torch.float64)
    truth = 3 * torch.stack([angle.cos(), angle.sin()], 1) @ plane.mT + centre
    assert float(curve.distance(truth).max()) < tolerance * 3


def test_noise_moves_the_circle_no_more_than_its_centroids():
    x, labels, plane, centre = circle(12, noise=0.1, each=20)
    curve = spline(x, labels, True, 2)
    samples = curve.sample(500, torch.Generator().manual_seed(0))
    assert samples.shape == (500, D) and samples.dtype == torch.float32
    assert float(off_circle(samples, plane, centre).max()) < 0.1 / math.sqrt(20) * math.sqrt(D) * 1.5


def test_samples_go_round_evenly():
    x, labels, plane, centre = circle(8)
    samples = spline(x, labels, True, 2).sample(4000, torch.Generator().manual_seed(0)).double()
    q = (samples - centre) @ plane
    sector = ((torch.atan2(q[:, 1], q[:, 0]) / (2 * math.pi) * 8) % 8).long()
    counts = torch.bincount(sector, minlength=8)
    assert counts.min() > 400 and counts.max() < 600  # 500 expected, standard deviation 21


def test_it_passes_through_the_centroids_and_is_scipys_curve():
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 4, 4, 5, 5])  # three is held out and keeps its place
    x = draw(10, D)
    centroids = torch.stack([x[labels == value].mean(0) for value in (0, 1, 2, 4, 5)])
    curve = spline(x, labels, False, 4)
    torch.testing.assert_close(curve.at(torch.tensor([0, 1, 2, 4, 5])).double(), centroids, atol=1e-5, rtol=0)
    s = np.linspace(0, 5, 77)
    theirs = CubicSpline([0, 1, 2, 4, 5], centroids.numpy(), bc_type="natural")(s)
    np.testing.assert_allclose(curve.at(torch.from_numpy(s)).numpy(), theirs, atol=1e-5)
    torch.testing.assert_close(curve.at(torch.tensor([-3.0, 9.0])), curve.at(torch.tensor([0.0, 5.0])))


def test_a_closed_curve_is_smooth_where_it_closes_and_wraps():
    x, labels, *_ = circle(7)
    curve = spline(x, labels, True, 2)
    s = torch.tensor([-1e-6, 0.0, 1e-6], dtype=torch.float64)
    before, at, after = curve._embed(curve._derivatives(s)[0])
    torch.testing.assert_close((at - before) / 1e-6, (after - at) / 1e-6, atol=1e-3, rtol=0)
    torch.testing.assert_close(curve.at(torch.tensor([8.5])), curve.at(torch.tensor([1.5])))


def test_a_held_out_day_has_its_place_on_the_circle():
    x, labels, plane, centre = circle(12)
    seen = (labels != 5) & (labels != 11)
    curve = spline(x[seen], labels[seen], True, 2, n_values=12)
    for value in (5, 11):
        truth = x[labels == value].mean(0)
        assert float((curve.at(torch.tensor([value]))[0].double() - truth).norm()) < 0.1  # neighbours are 1.55 away


@pytest.mark.parametrize("cyclic", [True, False])
def test_nearest_points_against_brute_force(cyclic: bool):
    x, labels = draw(36, D), torch.arange(9).repeat_interleave(4)
    curve = spline(x, labels, cyclic, 3)
    y = 2 * draw(50, D, seed=3)
    fine = curve.at(torch.linspace(0, float(curve.knots[-1]), 200_001))
    brute = torch.cdist(y.float(), fine).min(1).values.double()
    found = curve.distance(y)
    assert float((found - brute).max()) < 1e-3  # never farther
    torch.testing.assert_close(found, brute, atol=1e-3, rtol=0)
    torch.testing.assert_close((y - curve.project(y)).norm(dim=1), found)
    assert float(curve.distance(curve.sample(200, torch.Generator().manual_seed(0))).max()) < 1e-5
    torch.testing.assert_close(curve.project(curve.project(y)), curve.project(y), atol=1e-6, rtol=0)


def test_bad_input():
    x, labels, *_ = circle(5)
    with pytest.raises(ValueError, match="at least three values of a cycle"):
        spline(x[:10], labels[:10], True, 1)
    with pytest.raises(ValueError, match="labels must hold at least two entities"):
        spline(x[:5], labels[:5], False, 1)
    for rank in (0, 5):
        with pytest.raises(ValueError, match=r"rank must be from 1 to 4, min\(values - 1, d\).*got"):
            spline(x, labels, True, rank)
    with pytest.raises(ValueError, match="rank must be at most 2, the number of directions that the values' centroids"):
        spline(x, labels, True, 3)
    with pytest.raises(ValueError, match="n_values must be more than the labels reach over, from 0 to 4; got 3"):
        spline(x, labels, True, 2, n_values=3)
    curve = spline(x, labels, True, 2)
    with pytest.raises(ValueError, match="as wide as the spline's space, 40; got 3"):
        curve.project(x[:, :3])
    with pytest.raises(ValueError, match="n must be a whole number of points, at least 1"):
        curve.sample(0, torch.Generator())
    with pytest.raises(ValueError, match="generator must be a torch.Generator"):
        curve.sample(3, 7)
    assert torch.equal(spline(x, labels.tolist(), True, 2).knots, curve.knots)
