"""Schatten probe: the surrogate's theorem, planted subspaces with their rank, optimality, and noise."""

from __future__ import annotations

import math

import pytest
import torch

from monitor.geometry.schatten_probe import low_rank_weights, schatten_probe, schatten_surrogate
from monitor.geometry.subspace_fits import of_unit_size
from monitor.geometry.subspaces import effective_rank, principal_angles

D, N, C = 64, 400, 20


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def degrees(a: torch.Tensor, b: torch.Tensor) -> float:
    return math.degrees(float(principal_angles(a, b)[-1]))


def planted(k: int, *, d: int = D, n: int = N, noise: float = 0.1, on_sphere: bool = False):
    """Entities spread over k directions; for k = 2 on a circle, for k = 3 on a sphere where asked.

    Returns x, labels, basis and offset.
    """
    basis, offset = torch.linalg.qr(draw(d, k)).Q, 2 * draw(d, seed=1)
    labels = torch.arange(n) % C
    steps = torch.arange(C, dtype=torch.float64)
    if k == 2:
        angle = 2 * math.pi * steps / C
        points = torch.stack([angle.cos(), angle.sin()], 1)
    elif on_sphere:  # a Fibonacci lattice: evenly spread
        height, angle = 1 - (2 * steps + 1) / C, math.pi * (3 - math.sqrt(5)) * steps
        radius = (1 - height.square()).sqrt()
        points = torch.stack([radius * angle.cos(), radius * angle.sin(), height], 1)
    else:
        points = draw(C, k, seed=2)
    points = 3 * (points - points.mean(0))
    return points[labels] @ basis.mT + offset + noise * draw(n, d, seed=3), labels, basis, offset


@pytest.mark.parametrize("p", [0.3, 0.5, 1.0])
def test_the_surrogate_is_the_quasi_norm_at_its_least(p: float):
    w = draw(9, 7)
    left, values, right = torch.linalg.svd(w, full_matrices=False)
    a, b = left * values.sqrt(), right.mT * values.sqrt()
    least = float(values.pow(p).sum())
    assert float(schatten_surrogate(a, b, p)) == pytest.approx(least)
    for seed in range(50):  # any other factors of the same product cost at least as much
        mix = draw(7, 7, seed=seed)
        other = schatten_surrogate(a @ mix, b @ torch.linalg.inv(mix).mT, p)
        assert float(other) > least


@pytest.mark.parametrize(("k", "on_sphere"), [(2, False), (3, True), (4, False)])
def test_planted_subspaces_are_recovered_with_their_rank(k: int, on_sphere: bool):
    x, labels, basis, offset = planted(k, on_sphere=on_sphere)
    found = schatten_probe(x.float(), labels)
    assert found.rank == k and found.method == "schatten_probe"
    assert degrees(found.basis, basis) <= 5
    assert float((found.offset.double() - offset).norm()) < 5 * 0.1 * math.sqrt(D / N)
    assert (found.basis.gather(0, found.basis.abs().argmax(0, keepdim=True)) > 0).all()


def test_the_given_rank_only_caps():
    x, labels, basis, _ = planted(4, d=32, n=200)
    three, sixteen = schatten_probe(x, labels, 3), schatten_probe(x, labels, 16)
    assert (three.rank, sixteen.rank) == (3, 4)
    torch.testing.assert_close(three.basis, sixteen.basis[:, :3])
    assert degrees(three.basis, basis) <= 5


def test_the_minimum_is_one():
    """No step away from the found weights, large or small, makes the objective better by more than rounding."""
    x, labels, *_ = planted(3, d=24, n=200)
    features = of_unit_size(x)
    weights = low_rank_weights(features, labels, C, 0.5, 0.1)

    def objective(w: torch.Tensor) -> float:
        bias = torch.zeros(C, dtype=torch.float64, requires_grad=True)
        optimiser = torch.optim.LBFGS([bias], max_iter=100, line_search_fn="strong_wolfe")

        def error():
            optimiser.zero_grad()
            value = torch.nn.functional.cross_entropy(features @ w + bias, labels)
            value.backward()
            return value

        optimiser.step(error)
        # What is numerically zero counts as zero: its root would not.
        values = torch.linalg.svdvals(w)
        values = values[values > 1e-3 * values[0]]
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(features @ w + bias, labels) + 0.1 * values.sqrt().sum())

    least = objective(weights)
    left, values, right = torch.linalg.svd(weights, full_matrices=False)
    for factor in (0.8, 0.95, 1.05, 1.2):
        assert objective(factor * weights) > least
        for i in range(3):
            scaled = values.clone()
            scaled[i] *= factor
            assert objective(left * scaled @ right) > least
    two = values.clone()
    two[2:] = 0
    assert objective(left * two @ right) > least  # nor does giving up a direction pay


def test_a_stronger_penalty_keeps_fewer_directions():
    x, labels, *_ = planted(8, d=32, n=200, noise=0.5)
    ranks = [
        float(effective_rank(low_rank_weights(of_unit_size(x), labels, C, 1.0, weight))) for weight in (0.001, 0.1, 0.4)
    ]
    assert ranks[0] > ranks[1] > ranks[2]


def test_the_span_of_few_wide_rows_is_enough():
    """With fewer rows than columns the search runs in their span and finds the same weights."""
    x, labels, basis, _ = planted(2, d=300, n=120, noise=0.03)
    found = schatten_probe(x, labels)
    assert found.rank == 2 and degrees(found.basis, basis) <= 5


def test_two_entities_give_one_direction():
    direction = torch.linalg.qr(draw(D, 1)).Q[:, 0]
    labels = torch.arange(200) % 2
    x = 3 * labels[:, None] * direction + 0.1 * draw(200, D, seed=1)
    found = schatten_probe(x, labels, 1)
    assert found.rank == 1 and degrees(found.basis, direction[:, None]) <= 5


def test_shuffled_labels_find_the_planted_subspace_no_better_than_chance():
    x, labels, _, _ = planted(2, d=32)
    x = x - x.mean(0)
    white = x @ torch.linalg.inv(torch.linalg.cholesky(x.mT.cov())).mT
    target = schatten_probe(white, labels, 2).basis
    shuffled = labels[torch.randperm(N, generator=torch.Generator().manual_seed(0))]
    found = schatten_probe(white, shuffled, 2, p=1.0, penalty=0.01).basis
    chance = torch.tensor([degrees(torch.linalg.qr(draw(32, 2, seed=100 + s)).Q, target) for s in range(200)])
    assert degrees(found, target) > float(chance.quantile(0.01))


def test_bad_input():
    x, labels, *_ = planted(2)
    for rank in (0, 20):
        with pytest.raises(ValueError, match=rf"rank must be from 1 to 19, min\(C - 1, d\).*got {rank}"):
            schatten_probe(x, labels, rank)
    with pytest.raises(ValueError, match="labels must hold at least two entities"):
        schatten_probe(x, torch.zeros_like(labels))
    with pytest.raises(ValueError, match="x must be finite"):
        schatten_probe(x / 0, labels)
    with pytest.raises(ValueError, match="x must vary"):
        schatten_probe(torch.ones(N, 3), labels)
    for p in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"p must lie in \(0, 1\]"):
            schatten_probe(x, labels, p=p)
    with pytest.raises(ValueError, match="penalty must be positive"):
        schatten_probe(x, labels, penalty=0.0)
