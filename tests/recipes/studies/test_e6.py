"""The gap's slope: -1/2 and steeper with many samples a dimension, flat with few; norms and separations as asked."""

from __future__ import annotations

import math

import pytest
import torch

from monitor.geometry.probes import fit_probe
from recipes.studies import e6


def test_slope_of_a_power_law():
    assert e6.slope((50, 100, 400), [n**-0.5 for n in (50, 100, 400)]) == (pytest.approx(-0.5), pytest.approx(1.0))
    assert e6.slope((10, 20), [0.4, 0.1])[0] == pytest.approx(-2.0)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_features_have_the_spectrum_and_the_separation(exponent):
    features = e6.power_law(30, exponent, torch.Generator().manual_seed(0))
    covariance = features.root.double() @ features.root.double().T
    eigenvalues = torch.linalg.eigvalsh(covariance).flip(0)
    expected = torch.arange(1, 31, dtype=torch.float64) ** -exponent
    assert torch.allclose(eigenvalues, expected / expected.mean(), rtol=1e-3)
    delta = features.delta.double()
    assert float(delta @ torch.linalg.solve(covariance, delta)) == pytest.approx(e6.SEPARATION**2, rel=1e-3)


def test_samples_have_the_purity_and_the_covariance():
    features = e6.power_law(5, 1.0, torch.Generator().manual_seed(0))
    x, labels = features.draw(40_000, 1, torch.Generator().manual_seed(1))
    means = [x[labels == k, 0].double().mean(0) for k in (0, 1)]
    assert torch.allclose(means[1] - means[0], e6.PURITY * features.delta.double(), atol=0.1)
    unmarked = x[round(e6.PURITY * 40_000) :, 0].double()
    covariance = features.root.double() @ features.root.double().T
    assert torch.allclose(torch.cov(unmarked.T), covariance, atol=0.05 * float(covariance.max()))


def test_probes_of_a_given_norm():
    features = e6.power_law(40, 1.0, torch.Generator().manual_seed(0))
    x, labels = features.draw(100, 2, torch.Generator().manual_seed(1))
    probe = fit_probe(x, labels, C=e6.c_of_norm(x, labels, 0.3))
    standardised = (probe.weight * x.double().std(0, correction=0)).norm(dim=-1)
    assert float(standardised.mean()) == pytest.approx(0.3, rel=0.01)


def test_quick_run_shows_both_regimes_and_the_bound_holds():
    records = e6.run(quick=True)
    found = {(row["group"], row["metric"]): row["value"] for row in records}
    few = {metric: value for (group, metric), value in found.items() if group == "d=512, isotropic, C=1"}
    many = {metric: value for (group, metric), value in found.items() if group == "d=16, isotropic, C=1"}
    # More dimensions than samples: every training set is separable, the gap cannot fall below what purity leaves.
    assert few["train_auc_n400"] == pytest.approx(1.0) and abs(few["slope"]) < 0.15
    assert few["gap_n400"] > 0.2
    assert -0.9 < many["slope"] < -0.35 and many["gap_n400"] < 0.5 * many["gap_n50"]
    for group in {group for group, metric in found if metric == "error_bound"}:
        assert found[group, "error_rate"] <= found[group, "error_bound"]
    assert all(math.isfinite(value) for value in found.values())
