import math

import pytest
import torch

from monitor.geometry.auc import auc
from monitor.geometry.detection import detectable_auc
from monitor.geometry.planted import _root_of_covariance, planted_power
from monitor.geometry.probes import grouped_folds, logistic_probes
from monitor.geometry.separation import ledoit_wolf_shrinkage


def sample(pairs, neutral=0, d=16, signal=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.2, 3.0, d)
    x = torch.randn(2 * pairs + neutral, d, generator=generator) * spread
    x[:pairs, 0] += signal
    labels = torch.cat([torch.ones(pairs), torch.zeros(pairs), (torch.arange(neutral) % 2).float()]).long()
    cells = torch.cat([torch.arange(pairs).repeat(2), torch.arange(neutral) % max(pairs, 1)])
    return x, labels, cells


def power_of(x, labels, cells, n_marked, separation, **options):
    folds = grouped_folds(cells, n_seeds=2)
    threshold = detectable_auc(len(x) // 2, len(x) // 2, power=0.5)
    return planted_power(x, labels, folds, n_marked, separation=separation, threshold=threshold, **options)


def test_power_rises_with_the_effect_from_the_tests_level_to_one():
    x, labels, cells = sample(150)
    powers = [power_of(x, labels, cells, 300, s) for s in (0.0, 0.5, 1.0, 2.0)]
    assert powers == sorted(powers)
    assert powers[0] < 0.15 and powers[-1] > 0.99


def test_power_falls_with_purity_and_with_dimension():
    marked = power_of(*sample(100), 200, 1.0)
    diluted = power_of(*sample(20, neutral=160), 40, 1.0)
    assert diluted < 0.5 < marked
    assert power_of(*sample(100, d=150), 200, 1.0) < marked


def test_what_was_there_is_taken_out_before_the_effect_is_planted():
    # A strong signal of their own must not make a null look powerful.
    assert power_of(*sample(150, signal=0.5), 300, 0.0) < 0.15


@pytest.mark.slow
def test_power_is_the_rate_at_which_fresh_samples_with_the_effect_are_detected():
    pairs, s = 80, 0.9
    hits, planted = [], []
    threshold = detectable_auc(pairs, pairs, power=0.5)
    for seed in range(60):
        x, labels, cells = sample(pairs, seed=seed)
        generator = torch.Generator().manual_seed(1000 + seed)
        u = torch.randn(16, generator=generator)
        v = torch.linspace(0.2, 3.0, 16) * u / u.norm()
        with_effect = x + (labels[:, None] - 0.5) * s * v
        folds = grouped_folds(cells, n_seeds=2)
        hits.append(bool(auc(logistic_probes(with_effect, labels, folds), labels).mean() >= threshold))
        if seed < 6:
            planted.append(power_of(x, labels, cells, 2 * pairs, s, n_replicates=24, seed=seed))
    rate = sum(hits) / len(hits)
    assert 0.1 < rate < 0.95, "the check is of a rate that is neither 0 nor 1"
    assert sum(planted) / len(planted) == pytest.approx(rate, abs=3 * math.sqrt(rate * (1 - rate) / 60) + 0.05)


@pytest.mark.parametrize(("n", "d"), [(60, 12), (30, 80)])
def test_planted_directions_have_unit_mahalanobis_norm(n, d):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64) * torch.linspace(0.1, 2, d)
    u = torch.randn(5, d, generator=generator, dtype=torch.float64)
    v = _root_of_covariance(x, u / u.norm(dim=1, keepdim=True))
    centred = x - x.mean(0)
    rho = ledoit_wolf_shrinkage(centred)
    s = centred.T @ centred / n
    sigma = (1 - rho) * s + rho * s.trace() / d * torch.eye(d, dtype=torch.float64)
    assert torch.einsum("id,de,ie->i", v, torch.linalg.inv(sigma), v) == pytest.approx([1.0] * 5)


def test_equal_calls_are_equal_and_global_randomness_is_left_alone():
    data = sample(40)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert power_of(*data, 80, 1.0, seed=7) == power_of(*data, 80, 1.0, seed=7)
    assert torch.equal(torch.get_rng_state(), before)


def test_pairs_of_a_context_are_exchanged_together():
    """Where pairs of a context differ alike, exchanging them one by one makes a null of noise that is not there."""
    generator = torch.Generator().manual_seed(0)
    contrast = 3 * torch.randn(15, 16, generator=generator).repeat_interleave(10, dim=0)
    noise = torch.randn(300, 16, generator=generator)
    x = noise + torch.cat([contrast / 2, -contrast / 2])
    labels, cells = (
        torch.cat([torch.ones(150), torch.zeros(150)]).long(),
        torch.arange(15).repeat_interleave(10).repeat(2),
    )
    together = power_of(x, labels, cells, 300, 1.0, groups=cells)
    apart = power_of(x, labels, cells, 300, 1.0)
    assert together != apart
    # One pair a context: the same draws, whatever the contexts are called.
    x, labels, cells = sample(60)
    assert power_of(x, labels, cells, 120, 0.8, groups=cells + 7) == power_of(x, labels, cells, 120, 0.8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_marked": 31}, "`n_marked` must be even"),
        ({"n_marked": 400}, "`n_marked` must be even and from 2 to 120"),
        ({"separation": -1.0}, "`separation` must be"),
        ({"separation": math.inf}, "`separation` must be"),
        ({"threshold": math.nan}, "`threshold` must be finite"),
        ({"n_replicates": 1}, "`n_replicates` must be at least 2"),
        ({"labels": torch.arange(120) % 2}, "`labels` of the marked rows"),
        ({"features": torch.zeros(120, 2, 3)}, r"\[n, d\]"),
    ],
)
def test_bad_parameters(change, message):
    x, labels, cells = sample(60)
    options = {"features": x, "labels": labels, "n_marked": 120, "separation": 1.0, "threshold": 0.6} | change
    folds = grouped_folds(cells, n_seeds=1)
    with pytest.raises(ValueError, match=message):
        planted_power(options.pop("features"), options.pop("labels"), folds, options.pop("n_marked"), **options)
