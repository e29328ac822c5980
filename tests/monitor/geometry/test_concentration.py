from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from monitor.geometry.concentration import (
    concentration_from_separation,
    concentration_index,
    separation_from_concentration,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


def mixture(n, d, s, a, seed=0, spread=True):
    """Texts of two groups at a purity, in isotropic noise; the signal spread over all features or on the first."""
    rng = np.random.default_rng(seed)
    u = np.full(d, d**-0.5) if spread else np.eye(d)[0]
    signal = np.where(rng.uniform(size=n) < a, rng.choice([-0.5, 0.5], size=n), 0.0)
    return torch.tensor(rng.normal(size=(n, d)) + s * np.outer(signal, u))


@pytest.mark.parametrize("shape", [(300, 80), (60, 400), (40, 30), (200, 20)])
def test_agrees_with_scikit_learn(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) @ rng.normal(size=(shape[1], shape[1])) * rng.uniform(0.1, 100, size=shape[1]) + 5
    k = min(50, shape[0] - 1, shape[1])
    variances = PCA(k).fit(StandardScaler().fit_transform(x)).explained_variance_
    wanted = (variances[0] - variances.mean()) / variances.sum()
    assert concentration_index(torch.tensor(x)).item() == pytest.approx(wanted, rel=1e-9)


def test_layers_are_read_one_by_one():
    layers = torch.stack([mixture(80, 30, s, 0.5, seed) for seed, s in enumerate((0.0, 2.0, 6.0))], dim=1)
    together = concentration_index(layers, 20)
    assert together.shape == (3,) and together.dtype == torch.float64
    assert torch.equal(together, torch.stack([concentration_index(layers[:, i], 20) for i in range(3)]))


def test_range_and_its_ends():
    line = torch.outer(torch.randn(40, generator=torch.Generator().manual_seed(0)), torch.arange(1.0, 11.0))
    assert concentration_index(line).item() == pytest.approx(1 - 1 / 10, abs=1e-6)
    corners = torch.cat([torch.eye(6), -torch.eye(6)])  # the same variance in all directions
    assert concentration_index(corners).item() == pytest.approx(0.0, abs=1e-12)
    for seed in range(5):
        assert 0 < concentration_index(mixture(100, 60, 1.0, 0.3, seed)).item() < 1 - 1 / 50


def test_index_does_not_depend_on_units_or_constant_features():
    x = mixture(200, 20, 3.0, 0.5)
    scaled = x * torch.logspace(-6, 6, 20, dtype=torch.float64) + 100 * torch.arange(20)
    assert concentration_index(scaled, 20).item() == pytest.approx(concentration_index(x, 20).item(), rel=1e-6)
    constant = torch.cat([x, torch.full((200, 1), 0.1, dtype=torch.float64)], dim=1)
    assert concentration_index(constant, 20).item() == pytest.approx(concentration_index(x, 20).item(), rel=1e-12)


def test_half_precision_features_are_read_in_double():
    x = mixture(100, 30, 2.0, 0.5).half()
    assert concentration_index(x).dtype == torch.float64
    assert concentration_index(x).item() == concentration_index(x.double()).item()


@pytest.mark.parametrize("device", DEVICES)
def test_device(device):
    x = mixture(100, 30, 2.0, 0.5).to(device)
    assert concentration_index(x).device.type == device
    assert concentration_index(x).item() == pytest.approx(concentration_index(x.cpu()).item(), rel=1e-9)


@pytest.mark.parametrize("dimension", [2, 50, 768])
@pytest.mark.parametrize("purity", [0.05, 0.3, 1.0])
def test_inversion_round_trip(dimension, purity):
    s = np.array([0.0, 0.1, 1.0, 8.0, 40.0])
    beta = concentration_from_separation(s, purity, dimension)
    assert (np.diff(beta) > 0).all() and beta[0] == 0 and beta[-1] < 1 - 1 / dimension
    assert np.allclose(separation_from_concentration(beta, purity, dimension), s, rtol=1e-9)


@pytest.mark.parametrize(("s", "a", "d"), [(2.0, 1.0, 10), (4.0, 0.3, 50), (8.0, 0.5, 50)])
def test_simulated_isotropic_mixtures(s, a, d):
    # The population index of the raw covariance, from many samples: Lemma 2.
    covariance = torch.cov(mixture(100_000, d, s, a).mT)
    values = torch.linalg.eigvalsh(covariance)
    beta = ((values[-1] - values.mean()) / values.sum()).item()
    assert beta == pytest.approx(concentration_from_separation(s, a, d), rel=0.05)
    assert separation_from_concentration(beta, a, d) == pytest.approx(s, rel=0.05)


def test_index_of_standardised_features_recovers_a_separation_spread_over_all_of_them():
    # Standardising divides every variance by about 1 + a s²/4d, which leaves shares of the variance alone.
    s, a, d = 6.0, 0.5, 50
    beta = concentration_index(mixture(20_000, d, s, a), d).item()
    assert separation_from_concentration(beta, a, d) == pytest.approx(s, rel=0.05)
    # On one feature alone the signal is standardised away: the index is blind to it.
    hidden = concentration_index(mixture(20_000, d, s, a, spread=False), d).item()
    assert separation_from_concentration(hidden, a, d) < 0.4 * s


def test_noise_reads_as_a_separation():
    n, d = 2_000, 50
    beta = concentration_index(mixture(n, d, 0.0, 1.0), d).item()
    assert beta == pytest.approx(2 / math.sqrt(n * d) + 1 / n, rel=0.1)
    assert separation_from_concentration(beta, 0.3, d) > 1.5


def test_other_directions_of_variance_make_the_index_say_nothing_about_the_signal():
    # Experiment E7's negative result: a dominant direction that carries no signal.
    rng = np.random.default_rng(2)
    nuisance = torch.tensor(5 * rng.normal(size=(2_000, 1)) @ rng.normal(size=(1, 50)))
    with_signal, without = (concentration_index(mixture(2_000, 50, s, 0.5) + nuisance, 50).item() for s in (4.0, 0.0))
    assert with_signal == pytest.approx(without, rel=0.02) and without > 0.8


def test_the_pole():
    assert separation_from_concentration(1 - 1 / 50, 0.3) == math.inf
    assert math.isfinite(separation_from_concentration(1 - 1 / 50 - 1e-6, 0.3))
    with pytest.raises(ValueError, match="beta must be at most 1 - 1/dimension"):
        separation_from_concentration(0.985, 0.3)
    assert separation_from_concentration(0.985, 0.3, 100) > 0
    assert separation_from_concentration([0.1, 0.98], 0.3).tolist()[1] == math.inf


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (partial(concentration_index, torch.ones(5)), r"\[n, d\] or \[n, L, d\]"),
        (partial(concentration_index, torch.ones(5, 4)), "must vary"),
        (partial(concentration_index, torch.full((5, 4), math.nan)), "finite"),
        (partial(concentration_index, torch.randn(2, 4)), "3 rows and 2 columns"),
        (partial(concentration_index, torch.randn(9, 4), 1), "n_components"),
        (partial(separation_from_concentration, -0.1, 0.3), "beta"),
        (partial(separation_from_concentration, 0.1, 0.0), "purity"),
        (partial(separation_from_concentration, 0.1, 0.3, 1), "dimension"),
        (partial(concentration_from_separation, math.inf, 0.3), "separation"),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
