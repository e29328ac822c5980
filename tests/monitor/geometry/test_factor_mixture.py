"""Mixture of factor analysers: its likelihood against dense Gaussians, EM's monotony, and planted components found."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from sklearn.decomposition import FactorAnalysis

from monitor.geometry import factor_mixture
from monitor.geometry.factor_mixture import MixtureOfFactorAnalysers, mixture_of_factor_analysers
from monitor.geometry.subspaces import principal_angles

D = 64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def degrees(a: torch.Tensor, b: torch.Tensor) -> float:
    return math.degrees(float(principal_angles(a, b)[-1]))


def planted(n_components: int = 4, k: int = 3, each: int = 150, noise: float = 0.2):
    """Rows, component of each, bases [K, D, k] and centres [K, D]."""
    bases = torch.stack([torch.linalg.qr(draw(D, k, seed=10 + j)).Q for j in range(n_components)])
    centres = draw(n_components, D, seed=5)
    member = torch.arange(n_components).repeat_interleave(each)
    z = 2 * draw(len(member), k, seed=6)
    x = centres[member] + (bases[member] @ z[..., None])[..., 0] + noise * draw(len(member), D, seed=7)
    return x, member, bases, centres


def test_likelihood_and_responsibilities_are_those_of_dense_gaussians(monkeypatch):
    monkeypatch.setattr(factor_mixture, "_MAX_LATENTS", 100)  # several blocks of rows
    weights, means, loadings = torch.tensor([0.2, 0.5, 0.3]).double(), draw(3, 6), draw(3, 6, 2, seed=1)
    noise = draw(6, seed=2).square() + 0.1
    mixture = MixtureOfFactorAnalysers(weights, means, loadings, noise)
    x = 2 * draw(40, 6, seed=3)
    joint = np.stack(
        [
            math.log(w) + multivariate_normal(m.numpy(), (a @ a.mT + noise.diag()).numpy()).logpdf(x.numpy())
            for w, m, a in zip(weights.tolist(), means, loadings, strict=True)
        ],
        axis=1,
    )
    expected = np.logaddexp.reduce(joint, axis=1)
    np.testing.assert_allclose(mixture.log_likelihood(x).numpy(), expected, rtol=1e-10)
    np.testing.assert_allclose(mixture.responsibilities(x).numpy(), np.exp(joint - expected[:, None]), atol=1e-10)


def test_planted_components_are_found():
    x, member, bases, centres = planted()
    mixture = mixture_of_factor_analysers(x.float(), 4, 3)
    torch.testing.assert_close(mixture.weights, torch.full((4,), 0.25, dtype=torch.float64), atol=0.02, rtol=0)
    for j in range(4):
        found = mixture.component_for(x[member == j], x[member != j])
        assert degrees(found.basis, bases[j]) <= 5
        # The centre is known to the spread of the latents over sqrt(150); across the subspace to that of the noise.
        assert float((found.offset.double() - centres[j]).norm()) < 3 * 2 * math.sqrt(3 / 150)
        assert float((mixture.component_scores(x[member == j], x[member != j])).max()) > 0.95
        assert found.method == "mixture_of_factor_analysers" and found.rank == 3
    assert float(mixture.noise.sqrt().mean()) == pytest.approx(0.2, rel=0.1)


def test_one_component_is_factor_analysis():
    x, member, *_ = planted()
    x = x[member == 0]
    x = x + torch.linspace(0, 0.5, D) * draw(len(x), D, seed=8)
    mixture = mixture_of_factor_analysers(x, 1, 3, tolerance=1e-9, max_iterations=2000)
    theirs = FactorAnalysis(3, svd_method="lapack", tol=1e-8, max_iter=5000).fit(x.numpy())
    assert mixture.trace[-1] == pytest.approx(theirs.score(x.numpy()), abs=1e-3)
    np.testing.assert_allclose(mixture.noise.numpy(), theirs.noise_variance_, rtol=0.02)
    assert degrees(mixture.loadings[0], torch.from_numpy(theirs.components_).mT) < 0.5


@pytest.mark.parametrize(("n_components", "rank", "each"), [(4, 3, 150), (6, 2, 40), (9, 5, 8)])
def test_the_likelihood_never_falls(n_components: int, rank: int, each: int):
    x, *_ = planted(each=each)
    mixture = mixture_of_factor_analysers(50 * x + 7, n_components, rank, tolerance=0.0, max_iterations=60)
    steps = np.diff(mixture.trace)
    assert len(steps) > 10 and steps.min() > -1e-9 * abs(mixture.trace[-1])
    # The trace is in the units of the activations, whatever the fit was done in.
    assert mixture.trace[-1] == pytest.approx(float(mixture.log_likelihood(50 * x + 7).mean()), abs=1e-6)


def test_noise_has_no_component_of_its_own():
    """Negative control: positives and negatives of one Gaussian, no component tells them apart."""
    x = draw(600, D)
    mixture = mixture_of_factor_analysers(x, 3, 2)
    assert float(mixture.component_scores(draw(300, D, seed=1), draw(300, D, seed=2)).abs().max()) < 0.15


def test_components_without_rows_do_no_harm():
    far = torch.tensor([0.5, 0.5, 0.0]).double()
    x, member, *_ = planted(n_components=2)
    start = factor_mixture._initial(x, 3, 2, 0)
    means = torch.cat([start.means[:2], 1e6 * torch.ones(1, D, dtype=torch.float64)])
    emptied = MixtureOfFactorAnalysers(far, means, start.loadings, start.noise)
    for _ in range(5):
        emptied, total = factor_mixture._step(emptied, x)
    assert math.isfinite(float(total)) and float(emptied.weights[2]) == 0
    assert float(emptied.weights.sum()) == pytest.approx(1)


def test_the_same_seed_gives_the_same_mixture_and_global_generators_stay():
    x, *_ = planted(each=40)
    state = torch.random.get_rng_state()
    first, again = (mixture_of_factor_analysers(x, 4, 3, 3) for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(first.loadings, again.loadings) and first.trace == again.trace


def test_wide_activations_need_no_dense_covariance():
    """At d = 4096 a covariance for each of 8 components would take a gigabyte."""
    d = 4096
    basis = torch.linalg.qr(draw(d, 3)).Q
    centres = draw(2, d, seed=1)
    member = torch.arange(80) % 2
    x = centres[member] + 10 * draw(80, 3, seed=2) @ basis.mT + 0.05 * draw(80, d, seed=3)
    mixture = mixture_of_factor_analysers(x, 2, 3, max_iterations=20)
    found = mixture.component_for(x[member == 0], x[member == 1])
    assert degrees(found.basis, basis) <= 5


def test_bad_input():
    x, *_ = planted(each=10)
    for count in (0, 41):
        with pytest.raises(ValueError, match=f"n_components must be from 1 to 40, the rows of x; got {count}"):
            mixture_of_factor_analysers(x, count, 2)
    for rank in (0, 40):
        with pytest.raises(ValueError, match=rf"rank must be from 1 to 39, min\(n - 1, d\).*got {rank}"):
            mixture_of_factor_analysers(x, 2, rank)
    with pytest.raises(ValueError, match="x must be finite"):
        mixture_of_factor_analysers(x / 0, 2, 2)
    with pytest.raises(ValueError, match="x must vary"):
        mixture_of_factor_analysers(torch.ones(9, 4), 2, 2)
    with pytest.raises(ValueError, match="max_iterations must be at least 1"):
        mixture_of_factor_analysers(x, 2, 2, max_iterations=0)
    with pytest.raises(ValueError, match="tolerance must be at least 0"):
        mixture_of_factor_analysers(x, 2, 2, tolerance=-1.0)
    mixture = mixture_of_factor_analysers(x, 2, 2, max_iterations=3)
    with pytest.raises(ValueError, match="negatives must be as wide as the components, 64; got 3"):
        mixture.component_for(x, x[:, :3])
