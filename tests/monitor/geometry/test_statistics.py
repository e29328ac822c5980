from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from monitor.geometry.statistics import (
    bootstrap_means,
    mean_interval,
    percentile_interval,
    share_gain,
    share_gain_interval,
    share_interval,
)


def coverage(draw, n_runs=400, truth=0.0):
    """Share of intervals that hold the truth, and its binomial standard error at 95 %."""
    hits = 0
    for run in range(n_runs):
        values, clusters = draw(np.random.default_rng(run))
        low, high = mean_interval(torch.tensor(values), clusters=clusters, n_bootstrap=400, seed=run)
        hits += low <= truth <= high
    return hits / n_runs, np.sqrt(0.95 * 0.05 / n_runs)


def test_intervals_of_independent_values_hold_the_mean_95_times_in_100():
    rate, error = coverage(lambda rng: (rng.exponential(size=60) - 1.0, None))
    # 93-95 % is what theory promises the percentile interval at n = 60 and some skew.
    assert 0.94 - 3 * error < rate < 0.95 + 3 * error


def clustered(rng, n_clusters=40, size=6):
    # Nine tenths of the variance is shared within a cluster.
    values = rng.normal(size=(n_clusters, 1)) * 3 + rng.normal(size=(n_clusters, size))
    return values.ravel(), torch.arange(n_clusters).repeat_interleave(size)


def test_cluster_intervals_hold_the_mean_of_clustered_values_and_plain_ones_do_not():
    rate, error = coverage(clustered)
    plain, _ = coverage(lambda rng: (clustered(rng)[0], None))
    assert 0.94 - 3 * error < rate < 0.95 + 3 * error
    assert plain < 0.75


def test_agrees_with_scipy_bootstrap():
    values = np.random.default_rng(0).gamma(2.0, size=50)
    ours = mean_interval(torch.tensor(values), n_bootstrap=20_000)
    theirs = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    # Both carry the resampling error of a percentile from 20,000 draws, about 1 % of the width.
    assert np.allclose(ours, (theirs.low, theirs.high), atol=0.03 * (theirs.high - theirs.low))


def test_a_resample_draws_whole_clusters():
    # Two clusters of unequal size: the only possible means are those of {A, A}, {A, B}, {B, B}.
    values, clusters = torch.tensor([0.0, 0.0, 0.0, 4.0]), torch.tensor([7, 7, 7, -1])
    means = bootstrap_means(values, clusters=clusters, n_bootstrap=500)
    assert set(means.tolist()) == {0.0, 1.0, 4.0}
    shares = [float((means == m).double().mean()) for m in (0.0, 1.0, 4.0)]
    assert np.allclose(shares, [0.25, 0.5, 0.25], atol=0.08)


def test_singleton_clusters_are_the_plain_bootstrap():
    values = torch.randn(30, generator=torch.Generator().manual_seed(1))
    assert torch.equal(bootstrap_means(values, seed=3), bootstrap_means(values, clusters=torch.arange(30), seed=3))


def test_own_generator():
    values = torch.randn(30, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    np.random.seed(0)
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = bootstrap_means(values, seed=5)
    assert torch.equal(before, torch.get_rng_state()) and (before_numpy == np.random.get_state()[1]).all()
    torch.manual_seed(1)
    assert torch.equal(first, bootstrap_means(values, seed=5))
    assert not torch.equal(first, bootstrap_means(values, seed=6))


def test_the_result_does_not_depend_on_how_many_resamples_are_drawn_at_once(monkeypatch):
    values = torch.randn(30, generator=torch.Generator().manual_seed(1))
    whole = bootstrap_means(values, n_bootstrap=100)
    monkeypatch.setattr("monitor.geometry.statistics._MAX_INDICES", 70)
    assert torch.allclose(whole, bootstrap_means(values, n_bootstrap=100), atol=1e-12)


def test_equal_values_have_a_zero_width_and_a_single_one_has_no_interval():
    assert mean_interval(torch.zeros(20)) == (0.0, 0.0)
    assert np.isnan(mean_interval(torch.tensor([1.0]))).all()
    assert np.isnan(mean_interval(torch.ones(4), clusters=torch.zeros(4, dtype=torch.long))).all()


def test_percentiles_are_numpys():
    samples = torch.randn(137, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert np.allclose(percentile_interval(samples, 0.9), np.quantile(samples.numpy(), [0.05, 0.95]))
    assert np.isnan(percentile_interval(torch.tensor([0.0, float("nan")]))).all()


def test_shares_have_wilsons_interval_and_their_difference_newcombes():
    assert share_interval(7, 20) == pytest.approx(stats.binomtest(7, 20).proportion_ci(method="wilson"))
    assert share_interval(0, 10)[0] == 0.0 and share_interval(10, 10)[1] == 1.0
    # Newcombe 1998, table II, example (a) is of 56/70 and 48/80; with equal sizes: 9/10 less 3/10.
    low, high = share_gain_interval(9, 3, 10)
    assert (low, high) == (pytest.approx(0.1705, abs=2e-3), pytest.approx(0.8091, abs=2e-3))
    assert share_gain_interval(3, 9, 10) == (pytest.approx(-high), pytest.approx(-low))


def test_a_gain_of_trials_that_all_agree_is_not_certain():
    none, all_right = torch.zeros(10), torch.ones(10)
    gain, low, high = share_gain(none, none)
    assert gain == 0.0 and low == -high and high == pytest.approx(share_interval(0, 10)[1])
    gain, low, high = share_gain(all_right, none)
    assert gain == 1.0 and 0.5 < low < 1.0 and high == pytest.approx(1.0)
    mixed = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 0, 0, 1])
    assert share_gain(mixed, none, 3)[1:] == mean_interval(mixed, seed=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_means(torch.zeros(0)), "values must be one-dimensional and not empty"),
        (lambda: bootstrap_means(torch.zeros(2, 2)), "values must be one-dimensional and not empty"),
        (lambda: bootstrap_means(torch.zeros(3), n_bootstrap=0), "n_bootstrap must be at least 1, got 0"),
        (lambda: bootstrap_means(torch.zeros(3), clusters=torch.zeros(2)), "one label per value"),
        (lambda: percentile_interval(torch.zeros(3), 1.0), "level must lie strictly between 0 and 1, got 1.0"),
        (lambda: percentile_interval(torch.zeros(0)), "samples must be one-dimensional and not empty"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
