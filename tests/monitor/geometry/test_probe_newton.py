from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from monitor.geometry import probe_newton as module
from monitor.geometry import probes
from monitor.geometry.probe_newton import Problem, solve, solve_alone
from monitor.geometry.probes import grouped_folds, logistic_probes


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(n=80, d=60, layers=2, marked=0.3, C=1.0):
    """Fits of three folds and one on everything, with scales that differ as standardisations do."""
    x = draw(layers, n, d)
    positive = (torch.arange(n) % 2).double()
    carries = torch.arange(n) < marked * n
    x[:, :, :5] += 2 * (carries * (2 * positive - 1))[:, None]
    x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True, unbiased=False)
    train = torch.stack([torch.arange(n) % 3 != k for k in range(4)], dim=1).double()
    scale = torch.exp(0.1 * draw(layers, d, 4, seed=1))
    return Problem(x, positive, train, scale, C)


def gradient(p, theta, scores):
    """Of the objective in theta and in the intercept, one a column."""
    residual = p.C * (p.positive[:, None] - torch.sigmoid(scores)) * p.train
    return theta / p.scale - p.features.mT @ residual, residual.sum(-2)


@pytest.mark.parametrize("C", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("d", [12, 60, 150], ids=["primal", "dual", "dual, d > n"])
def test_gradient_vanishes(d, C):
    p = problem(d=d, C=C)
    theta, scores, converged = solve(p, 1e-4)
    assert bool(converged.all()) and converged.shape == (2, 4)
    of_theta, of_intercept = gradient(p, theta, scores)
    at_zero, _ = gradient(p, torch.zeros_like(theta), torch.zeros_like(scores))
    assert float(of_theta.norm()) < 1e-4 * float(at_zero.norm())
    assert float(of_intercept.abs().max()) < 1e-4 * C * len(p.positive)
    # What is left of the scores is the intercept, the same for all rows.
    intercept = scores - p.features @ theta
    assert float((intercept - intercept.mean(-2, keepdim=True)).abs().max()) < 1e-9


@pytest.mark.parametrize("d", [12, 60, 150])
def test_tolerance_bounds_the_error(d):
    p = problem(d=d)
    _, optimum, _ = solve(p, 1e-8)
    errors = [float((solve(p, tolerance)[1] - optimum).abs().max()) for tolerance in (1.0, 0.1, 0.01)]
    assert errors[0] < 1.0 and errors[1] < 0.1 and errors[2] < 0.01
    assert errors[0] > errors[2]


@pytest.mark.parametrize("d", [12, 60])
def test_primal_and_dual_agree(d, monkeypatch):
    p = problem(d=d)
    found = []
    for up_to in (0.0, 10.0):
        monkeypatch.setattr(module, "_PRIMAL_UP_TO", up_to)
        found.append(solve(p, 1e-6))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-5)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-5)


@pytest.mark.parametrize("rank", [1, 4, 96])
def test_the_approximation_steers_only_the_speed(rank, monkeypatch):
    p = problem()
    _, expected, _ = solve(p, 1e-5)
    monkeypatch.setattr(module, "_SKETCH", max(8, rank))
    monkeypatch.setattr(module, "_RANK", rank)
    monkeypatch.setattr(module, "_SMALLEST_RANK", 1)
    assert torch.allclose(solve(p, 1e-5)[1], expected, atol=1e-4)


def test_approximation_is_one():
    """Of a matrix of low rank it is exact; of another it misses some times what is beyond its rank."""
    low = draw(1, 90, 20).float()
    basis, coefficients = module._nystroem(low @ low.mT)
    assert torch.allclose(basis @ basis.mT, low @ low.mT, atol=2e-2)
    spectrum = torch.arange(1, 301) ** -1.0
    x = draw(1, 300, 300).float() * spectrum
    gram = x @ x.mT
    basis, coefficients = module._nystroem(gram)
    assert torch.allclose(gram @ coefficients, basis, atol=1e-3)
    lengths = basis.norm(dim=-2)
    assert bool((lengths.diff() <= 1e-4).all())
    beyond = torch.linalg.eigvalsh(gram)[0, -module._RANK - 1]
    assert float(torch.linalg.matrix_norm(gram - basis @ basis.mT, ord=2)) < 10 * float(beyond)


@pytest.mark.parametrize("d", [5, 79, 300])
def test_alone_is_the_same_fit(d):
    p = problem(d=d, layers=1)
    everything = Problem(
        p.features, p.positive, torch.ones_like(p.train[:, :1]), torch.ones_like(p.scale[..., :1]), p.C
    )  # fmt: skip
    theta, scores, _ = solve(everything, 1e-6)
    weights, intercept = solve_alone(p.features[0], p.positive, p.C, 1e-6)
    assert torch.allclose(weights, theta[0, :, 0], atol=1e-4)
    assert torch.allclose(p.features[0] @ weights + intercept, scores[0, :, 0], atol=1e-4)


def test_columns_that_do_not_converge_are_fitted_alone(monkeypatch):
    x, labels = problem(layers=3).features.transpose(0, 1), torch.arange(80) % 2
    folds = grouped_folds(torch.arange(80) // 2, n_seeds=2)
    expected = logistic_probes(x, labels, folds)
    calls = []

    def lame(p, tolerance):
        theta, scores, converged = solve(p, tolerance)
        lost = torch.rand(converged.shape, generator=torch.Generator().manual_seed(len(calls))) < 0.3
        calls.append(int(lost.sum()))
        return theta, torch.where(lost[:, None], torch.nan, scores), ~lost

    monkeypatch.setattr(probes, "solve", lame)
    assert torch.allclose(logistic_probes(x, labels, folds), expected, atol=2e-2)
    assert sum(calls) > 0


def test_unfinished_columns_are_said_to_be(monkeypatch):
    monkeypatch.setattr(module, "_MAX_NEWTON", 1)
    monkeypatch.setattr(module, "_MAX_ROUGH", 1)
    assert not bool(solve(problem(), 1e-6)[2].any())
    with pytest.raises(RuntimeError, match="did not converge"):
        solve_alone(problem().features[0], problem().positive, 1.0, 1e-6)


class Denormals(TorchDispatchMode):
    """Counts denormal numbers, which are slow, among the results of all operations."""

    def __init__(self):
        super().__init__()
        self.count = self.total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        if "empty" not in str(function):  # which hands out memory as it finds it
            for result in results if isinstance(results, tuple | list) else (results,):
                if isinstance(result, torch.Tensor) and result.is_floating_point():
                    size = result.abs()
                    self.count += int(((size > 0) & (size < torch.finfo(size.dtype).tiny)).sum())
                    self.total += size.numel()
        return results


@pytest.mark.parametrize("marked", [1.0, 0.3])
@pytest.mark.parametrize("C", [1.0, 1e4])
@pytest.mark.parametrize("d", [12, 150])
def test_numbers_stay_normal(d, C, marked):
    p = problem(d=d, C=C, marked=marked)
    p.features.add_(0.0)
    with Denormals() as denormals:
        solve(p, 1e-2)
    assert denormals.count < 1e-4 * denormals.total
