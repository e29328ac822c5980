"""Subspaces: angles against scipy, projections against least squares, draws against their law, and bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from monitor.geometry.subspaces import Isotropic, Subspace, effective_rank, fix_signs, leading_directions
from monitor.geometry.subspaces import principal_angles as angles


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(d: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.linalg.qr(draw(d, k, seed=seed)).Q


def test_angles_against_scipy():
    for k, m in ((3, 3), (2, 5), (5, 2), (1, 1)):
        a, b = draw(12, k), draw(12, m, seed=1)
        expected = np.sort(scipy.linalg.subspace_angles(a.numpy(), b.numpy()))
        np.testing.assert_allclose(angles(a, b).numpy(), expected, atol=1e-12)


def test_planted_angles_from_tiny_to_right():
    basis = orthonormal(10, 6)
    planted = torch.tensor([1e-9, 0.3, math.pi / 2], dtype=torch.float64)
    turned = basis[:, :3] * planted.cos() + basis[:, 3:] * planted.sin()
    mixed = turned @ orthonormal(3, 3, seed=1)  # a basis of the same span
    torch.testing.assert_close(angles(basis[:, :3], mixed), planted, atol=1e-14, rtol=1e-6)


def test_angles_see_the_span_only():
    a = orthonormal(9, 4)
    assert float(angles(a, a @ draw(4, 4, seed=1)).max()) < 1e-12
    assert float(angles(a[:, :2], a).max()) < 1e-12  # contained
    torch.testing.assert_close(angles(a[:, :2], a[:, 2:]), torch.full((2,), math.pi / 2, dtype=torch.float64))


def test_projection_is_the_nearest_point():
    space = Subspace(orthonormal(8, 3), draw(8, seed=1), "planted")
    x = draw(5, 8, seed=2)
    basis, offset = space.basis.double(), space.offset.double()
    solution = torch.linalg.lstsq(basis, (x - offset).mT).solution
    nearest = offset + (basis @ solution).mT
    torch.testing.assert_close(space.project(x), nearest, atol=1e-6, rtol=0)
    torch.testing.assert_close(space.distance(x), (x - nearest).norm(dim=1), atol=1e-6, rtol=0)
    assert space.project(x.float()).dtype == torch.float32
    assert float(space.distance(space.project(x)).max()) < 1e-6


def test_samples_lie_in_the_subspace_and_follow_their_law():
    space = Subspace(orthonormal(20, 4), 3 * draw(20, seed=1), "planted")
    points = space.sample(4000, 2.5, torch.Generator().manual_seed(0))
    assert points.shape == (4000, 20) and points.dtype == torch.float32
    assert float(space.distance(points).max()) < 1e-4
    q = (points - space.offset) @ space.basis
    torch.testing.assert_close(q.mean(0), torch.zeros(4), atol=0.2, rtol=0)
    torch.testing.assert_close(q.mT.cov(), 2.5**2 * torch.eye(4), atol=0.5, rtol=0)
    again = space.sample(4000, 2.5, torch.Generator().manual_seed(0))
    assert torch.equal(points, again)


def test_the_linear_form_keeps_the_directions_and_drops_the_offset():
    space = Subspace(orthonormal(6, 2), draw(6), "pca")
    linear = space.linear()
    assert torch.equal(linear.basis, space.basis) and not linear.offset.any() and linear.method == "pca"
    assert (space.rank, space.dim) == (2, 6)


def test_isotropic_points_have_no_preferred_direction_and_the_distance_sigma():
    centre = draw(50).float()
    points = Isotropic(centre).sample(4000, 3.0, torch.Generator().manual_seed(0)) - centre
    assert float(points.norm(dim=1).square().mean().sqrt()) == pytest.approx(3.0, rel=0.02)
    variances = torch.linalg.eigvalsh(points.mT.cov())
    # Marchenko-Pastur: of pure noise the eigenvalues lie within (1 ± sqrt(d/n))² of their mean.
    assert float(variances[-1] / variances.mean()) < (1 + math.sqrt(50 / 4000)) ** 2 * 1.05
    assert not Isotropic(centre).linear().offset.any()
    assert torch.equal(Isotropic(centre).project(points), points)
    assert not Isotropic(centre).distance(points).any()
    assert torch.equal(Isotropic(centre).basis, torch.eye(50)) and Isotropic(centre).rank == 50


def test_effective_rank_of_known_spectra():
    left, right = orthonormal(12, 5), orthonormal(9, 5, seed=1)
    assert float(effective_rank(left @ right.mT)) == pytest.approx(5)
    assert float(effective_rank(left[:, :1] @ right[:, :1].mT)) == pytest.approx(1)
    s = torch.tensor([8.0, 4, 2, 1, 1], dtype=torch.float64)
    p = s / s.sum()
    assert float(effective_rank(left * s @ right.mT)) == pytest.approx(float((-(p * p.log()).sum()).exp()))


def test_leading_directions_against_an_svd_both_ways_round():
    for m, d in ((30, 7), (7, 30)):
        rows = draw(m, d) * torch.linspace(3, 1, d, dtype=torch.float64)
        expected = fix_signs(torch.linalg.svd(rows, full_matrices=False).Vh[:4].mT)
        torch.testing.assert_close(leading_directions(rows, 4), expected, atol=1e-8, rtol=0)
        flipped = leading_directions(-rows, 4)
        torch.testing.assert_close(flipped, expected, atol=1e-8, rtol=0)
        assert (expected.gather(0, expected.abs().argmax(0, keepdim=True)) > 0).all()


def test_bad_input():
    basis, offset = orthonormal(6, 2), torch.zeros(6)
    with pytest.raises(ValueError, match=r"basis must be \[d, k\] with 1 <= k <= d; got shape \(2, 6\)"):
        Subspace(basis.mT, torch.zeros(2), "x")
    with pytest.raises(ValueError, match=r"offset must be \[d\], d = 6"):
        Subspace(basis, torch.zeros(5), "x")
    with pytest.raises(ValueError, match="orthonormal columns .*off by"):
        Subspace(2 * basis, offset, "x")
    with pytest.raises(ValueError, match="basis and offset must be finite"):
        Subspace(basis, offset / 0, "x")
    space = Subspace(basis, offset, "x")
    with pytest.raises(ValueError, match="as wide as the subspace's space, 6; got 5"):
        space.distance(draw(3, 5))
    with pytest.raises(ValueError, match="x must be finite"):
        space.project(draw(3, 6) / 0)
    with pytest.raises(ValueError, match="n must be a whole number of points, at least 1"):
        space.sample(0, 1.0, torch.Generator())
    with pytest.raises(ValueError, match="sigma must be at least 0"):
        space.sample(1, -1.0, torch.Generator())
    with pytest.raises(ValueError, match="generator must be a torch.Generator, .*; got None"):
        space.sample(1, 1.0, None)
    with pytest.raises(ValueError, match="b must have linearly independent columns"):
        angles(basis, torch.cat([basis, basis], 1))
    with pytest.raises(ValueError, match="equally many rows; got 6 and 5"):
        angles(basis, orthonormal(5, 2))
    with pytest.raises(ValueError, match="must not be all zero"):
        effective_rank(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="rank must be at most 2, the number of directions that x spans; got 3"):
        leading_directions(draw(9, 2) @ draw(2, 5), 3)
