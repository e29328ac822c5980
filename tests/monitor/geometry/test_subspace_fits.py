"""The plain fitters on planted Gaussian subspaces, spheres and circles, against scikit-learn, and on pure noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA, FactorAnalysis

from monitor.geometry.subspace_fits import (
    diff_mean,
    diff_mean_pairs,
    entity_centroids,
    factor_analysis,
    isotropic,
    linear_probe,
    pca,
)
from monitor.geometry.subspaces import Subspace, principal_angles

D, N = 64, 400


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(d: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.linalg.qr(draw(d, k, seed=seed)).Q


def degrees(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest principal angle."""
    return math.degrees(float(principal_angles(a, b)[-1]))


def planted(shape: str, *, noise: float = 0.1, seed: int = 0):
    """x, labels, basis, offset and points of 20 entities on a Gaussian blob, sphere or circle, 20 texts each."""
    k = {"gaussian": 4, "sphere": 3, "circle": 2}[shape]
    basis, offset = orthonormal(D, k, seed=seed), 2 * draw(D, seed=seed + 1)
    labels = torch.arange(20).repeat_interleave(N // 20)
    steps = torch.arange(20, dtype=torch.float64)
    if shape == "circle":
        angle = 2 * math.pi * steps / 20
        points = torch.stack([angle.cos(), angle.sin()], 1)
    elif shape == "sphere":  # a Fibonacci lattice: evenly spread
        height, angle = 1 - (2 * steps + 1) / 20, math.pi * (3 - math.sqrt(5)) * steps
        radius = (1 - height.square()).sqrt()
        points = torch.stack([radius * angle.cos(), radius * angle.sin(), height], 1)
    else:
        points = draw(20, k, seed=seed + 2)
    points = 3 * points
    return points[labels] @ basis.mT + offset + noise * draw(N, D, seed=seed + 3), labels, basis, offset, points


FITS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], Subspace]] = {
    "pca": lambda x, labels, rank: pca(x, rank),
    "factor_analysis": lambda x, labels, rank: factor_analysis(x, rank),
    "diff_mean_pairs": diff_mean_pairs,
    "linear_probe": linear_probe,
}


@pytest.mark.parametrize("shape", ["gaussian", "sphere", "circle"])
@pytest.mark.parametrize("method", FITS)
def test_planted_subspaces_are_recovered(method: str, shape: str):
    x, labels, basis, offset, points = planted(shape)
    found = FITS[method](x.float(), labels, basis.shape[1])
    assert found.method == method
    assert degrees(found.basis, basis) <= 5
    # The mean of the rows: the planted offset and the mean of the planted points.
    centre = offset + points.mean(0) @ basis.mT
    assert float((found.offset - centre).norm()) < 5 * 0.1 * math.sqrt(D / N)
    assert found.basis.dtype == found.offset.dtype == torch.float32


@pytest.mark.parametrize("method", FITS)
def test_signs_and_bits_are_the_same_every_time(method: str):
    x, labels, basis, _, _ = planted("gaussian")
    first, again = (FITS[method](x, labels, 4) for _ in range(2))
    assert torch.equal(first.basis, again.basis)
    assert (first.basis.gather(0, first.basis.abs().argmax(0, keepdim=True)) > 0).all()


def test_pca_agrees_with_sklearn():
    x = planted("gaussian")[0]
    for rows in (x, x[:30]):  # more rows than columns, and fewer
        theirs = PCA(4, svd_solver="full").fit(rows.numpy())
        ours = pca(rows, 4)
        cosines = (ours.basis.double() * torch.from_numpy(theirs.components_).mT).sum(0).abs()
        torch.testing.assert_close(cosines, torch.ones(4, dtype=torch.float64), atol=1e-6, rtol=0)
        np.testing.assert_allclose(ours.offset.numpy(), theirs.mean_, atol=1e-5)


def test_factor_analysis_agrees_with_sklearn_and_does_what_pca_cannot():
    x, _, basis, _, _ = planted("gaussian")
    loud = torch.zeros(D, dtype=torch.float64)
    loud[:6] = 20.0  # coordinates with large noise of their own: variance, but not shared
    x = x + loud * draw(N, D, seed=9)
    theirs = FactorAnalysis(4, svd_method="lapack").fit(x.numpy()).components_
    ours = factor_analysis(x, 4)
    assert degrees(ours.basis, torch.from_numpy(theirs).mT) < 1e-3
    quiet = torch.linalg.qr(basis[6:]).Q  # what the loud coordinates leave to be seen
    assert degrees(torch.linalg.qr(ours.basis[6:].double()).Q, quiet) < 5
    assert degrees(pca(x, 4).basis, basis) > 60


@pytest.mark.parametrize("unit", [1e-8, 1e8])
def test_factor_analysis_does_not_depend_on_units(unit):
    x, *_ = planted("gaussian", noise=1.0)
    assert degrees(factor_analysis(unit * x, 4).basis, factor_analysis(x, 4).basis) < 1e-3


def test_factor_analysis_of_wide_activations_by_randomised_svds():
    basis = orthonormal(300, 3)
    x = 3 * draw(280, 3, seed=1) @ basis.mT + 0.3 * draw(280, 300, seed=2)
    found = factor_analysis(x, 3)
    exact = FactorAnalysis(3, svd_method="lapack").fit(x.numpy()).components_
    assert degrees(found.basis, torch.from_numpy(exact).mT) < 0.1
    assert degrees(found.basis, basis) < 10


def test_pair_differences_are_those_of_the_stacked_matrix():
    x, labels, *_ = planted("gaussian", noise=1.0)
    centroids = entity_centroids(x, labels)
    pairs = torch.stack([a - b for a, b in itertools.combinations(centroids, 2)], 1)  # [d, C(C-1)/2]
    left = torch.linalg.svd(pairs, full_matrices=False).U[:, :3]
    cosines = (diff_mean_pairs(x, labels, 3).basis.double() * left).sum(0).abs()
    torch.testing.assert_close(cosines, torch.ones(3, dtype=torch.float64), atol=1e-6, rtol=0)


def test_centroids_of_any_labels_in_the_order_of_their_values():
    x = draw(6, 3)
    labels = torch.tensor([7, -2, 7, 7, -2, 5])
    expected = torch.stack([x[labels == value].mean(0) for value in (-2, 5, 7)])
    torch.testing.assert_close(entity_centroids(x, labels), expected)


def test_diff_mean_points_from_the_negatives_to_the_concept():
    direction = orthonormal(D, 1)[:, 0]
    x, negatives = draw(300, D, seed=1) + 4 * direction, draw(250, D, seed=2) - 2 * direction
    found = diff_mean(x, negatives)
    assert found.rank == 1 and not found.offset.any()
    torch.testing.assert_close(
        found.basis[:, 0].double(), torch.nn.functional.normalize(x.mean(0) - negatives.mean(0), dim=0)
    )
    assert math.degrees(math.acos(float(found.basis[:, 0].double() @ direction))) < 10  # and with its sign
    torch.testing.assert_close(diff_mean(negatives, x).basis, -found.basis)


@pytest.mark.parametrize("method", ["pca", "diff_mean_pairs", "linear_probe"])
def test_turned_scaled_and_moved_activations_have_the_turned_subspace(method: str):
    """A geometry may not depend on the coordinates; standardising features one by one would make it."""
    x, labels, *_ = planted("gaussian", noise=1.0)
    turn = orthonormal(D, D, seed=7)
    found, turned = FITS[method](x, labels, 3), FITS[method](50 * x @ turn.mT + 3, labels, 3)
    assert degrees(turned.basis, turn @ found.basis.double()) < 0.2
    torch.testing.assert_close(turned.offset.double(), 50 * turn @ found.offset.double() + 3, atol=1e-3, rtol=0)


def test_noise_has_no_preferred_subspace():
    """On isotropic noise two halves of the data agree no better than subspaces drawn at random."""
    x, labels = draw(N, D), torch.arange(20).repeat_interleave(N // 20)
    half = torch.arange(N) % 2 == 0
    chance = [degrees(orthonormal(D, 2, seed=100 + s), orthonormal(D, 2, seed=500 + s)) for s in range(200)]
    low = float(np.quantile(chance, 0.01))
    for method, fit in FITS.items():
        angle = degrees(fit(x[half], labels[half], 2).basis, fit(x[~half], labels[~half], 2).basis)
        assert angle > low, method


@pytest.mark.parametrize("method", ["diff_mean_pairs", "linear_probe"])
def test_shuffled_labels_find_nothing(method: str):
    """Labels that say nothing: in whitened activations a supervised basis is at the angle of a random one."""
    x, labels, basis, _, _ = planted("circle")
    x = x - x.mean(0)
    white = x @ torch.linalg.inv(torch.linalg.cholesky(x.mT.cov())).mT
    target = FITS[method](white, labels, 2).basis
    chance = [degrees(orthonormal(D, 2, seed=100 + s), target) for s in range(200)]
    shuffled = labels[torch.randperm(N, generator=torch.Generator().manual_seed(0))]
    assert degrees(FITS[method](white, shuffled, 2).basis, target) > float(np.quantile(chance, 0.01))


def test_isotropic_sits_at_the_mean():
    x = planted("gaussian")[0]
    torch.testing.assert_close(isotropic(x).offset, x.mean(0).float())
    assert isotropic(x).method == "isotropic"


def test_bad_input():
    x, labels, *_ = planted("circle")
    for fit in (pca, factor_analysis):
        for rank in (0, 65):
            with pytest.raises(ValueError, match=rf"rank must be from 1 to 64, min\(n - 1, d\).*got {rank}"):
                fit(x, rank)
        with pytest.raises(ValueError, match="rank must be from 1 to 9"):
            fit(x[:10], 10)
        with pytest.raises(ValueError, match="x must be finite"):
            fit(x / 0, 2)
        with pytest.raises(ValueError, match=r"x must have the shape \[n, d\].*got \(64,\)"):
            fit(x[0], 2)
        with pytest.raises(ValueError, match="x must be of a floating dtype, got torch.int64"):
            fit(x.long(), 2)
        with pytest.raises(ValueError, match="x must be a Tensor.*ndarray"):
            fit(x.numpy(), 2)
        with pytest.raises(ValueError, match="must vary"):
            fit(torch.ones_like(x), 2)
        for rank in (2.0, True):
            with pytest.raises(ValueError, match=f"rank must be a whole number, got {rank}"):
                fit(x, rank)
    for fit in (diff_mean_pairs, linear_probe):
        for rank in (0, 20):
            with pytest.raises(ValueError, match=rf"rank must be from 1 to 19, min\(C - 1, d\).*got {rank}"):
                fit(x, labels, rank)
        with pytest.raises(ValueError, match="labels must hold at least two entities"):
            fit(x, torch.zeros_like(labels), 1)
        with pytest.raises(ValueError, match=r"labels must be integers \[n\]"):
            fit(x, labels.double(), 1)
        for wrong in (None, ["a"] * N):
            with pytest.raises(ValueError, match=r"labels must be integers \[n\].*got (NoneType|list)"):
                fit(x, wrong, 1)
        assert torch.equal(fit(x, tuple(labels.tolist()), 2).basis, fit(x, labels, 2).basis)
        with pytest.raises(ValueError, match="x must be finite"):
            fit(x / 0, labels, 1)
    with pytest.raises(ValueError, match="number of directions that x spans; got 3"):
        pca(draw(9, 2) @ draw(2, 5), 3)
    with pytest.raises(ValueError, match="x must vary over its rows"):
        factor_analysis(torch.ones(5, 3), 1)
    with pytest.raises(ValueError, match="x must vary over its rows"):
        linear_probe(torch.ones(N, 3), labels, 1)
    with pytest.raises(ValueError, match="C must be positive"):
        linear_probe(x, labels, 1, C=0.0)
    with pytest.raises(ValueError, match="same width; got 64 and 3"):
        diff_mean(x, x[:, :3])
    with pytest.raises(ValueError, match="differ in their means"):
        diff_mean(x, x)
