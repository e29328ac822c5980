"""The jackknife interval: the textbook interval of a mean, coverage, and groups that empty no batch."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from monitor.geometry.dispersion import partition
from monitor.geometry.gram import gram_entropy, unit
from monitor.geometry.resampling import jackknife_interval, spread_groups


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_one_a_group_is_the_textbook_interval_of_a_mean():
    x = draw(17)
    low, high = jackknife_interval(lambda kept: x[kept].mean(), x.mean(), [torch.tensor([i]) for i in range(17)])
    expected = stats.t.interval(0.95, 16, x.mean(), stats.sem(x.numpy()))
    assert (float(low), float(high)) == pytest.approx(expected)


def test_many_statistics_at_once():
    x = draw(20, 3)
    groups = spread_groups(partition(20, 5), 10)
    low, high = jackknife_interval(lambda kept: x[kept].mean(0), x.mean(0), groups)
    for column in range(3):
        one = jackknife_interval(lambda kept, c=column: x[kept, c].mean(), x[:, column].mean(), groups)
        assert (float(low[column]), float(high[column])) == pytest.approx((float(one[0]), float(one[1])))


def test_coverage_of_a_mean_in_groups():
    batches = partition(60)
    groups = spread_groups(batches, 20)
    samples = draw(1000, 60).exp()[:, :, None]  # skewed
    means = samples.mean(1)[:, 0]
    low, high = jackknife_interval(lambda kept: samples[:, kept].mean(1)[:, 0], means, groups)
    covered = ((low <= torch.e**0.5) & (torch.e**0.5 <= high)).double().mean()
    assert 0.87 < float(covered) < 0.98


def test_the_error_of_an_entropy_is_about_its_true_spread():
    def sample(seed: int) -> torch.Tensor:
        return unit(draw(60, 20, seed=seed) + 0.7)

    spread = torch.stack([gram_entropy(sample(seed)) for seed in range(200)]).std()
    groups = spread_groups(partition(60), 20)
    widths = []
    for seed in range(20):
        x = sample(seed)
        low, high = jackknife_interval(lambda kept, x=x: gram_entropy(x[kept]), gram_entropy(x), groups)
        widths.append((high - low) / 2 / stats.t.ppf(0.975, 19))
    assert float(torch.stack(widths).mean() / spread) == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(("n", "count"), [(64, 20), (60, 20), (96, 20), (25, 20)])
def test_a_group_takes_at_most_one_pair_of_a_batch(n, count):
    batches = partition(n)
    groups = spread_groups(batches, count)
    assert torch.cat(groups).sort().values.tolist() == list(range(n))
    for group in groups:
        assert max(int(torch.isin(batch, group).sum()) for batch in batches) == 1


def test_bad_input():
    batches = partition(10, 5)
    with pytest.raises(ValueError, match="between 2 and the number of pairs, 10; got 11"):
        spread_groups(batches, 11)
    with pytest.raises(ValueError, match="groups must be at least 2"):
        jackknife_interval(lambda kept: kept.double().mean(), torch.tensor(1.0), batches[:1])
    with pytest.raises(ValueError, match="level"):
        jackknife_interval(lambda kept: kept.double().mean(), torch.tensor(1.0), batches, level=95)
