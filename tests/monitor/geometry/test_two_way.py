from __future__ import annotations

import pytest
import torch

from monitor.geometry.statistics import mean_interval
from monitor.geometry.two_way import two_way_interval


def test_it_holds_the_mean_of_a_table_with_random_rows_and_columns():
    generator = torch.Generator().manual_seed(0)
    held = []
    for trial in range(200):
        rows, columns = torch.randn(12, 1, generator=generator), torch.randn(1, 30, generator=generator)
        table = rows + columns + torch.randn(12, 30, generator=generator)
        low, high = two_way_interval(table, n_bootstrap=300, seed=trial)
        held.append(low <= 0.0 <= high)
    assert 0.88 <= sum(held) / len(held) <= 0.99  # 12 rows make any bootstrap a little short


def test_outputs_of_a_prompt_are_not_independent():
    rows = torch.randn(8, 1, generator=torch.Generator().manual_seed(1))
    low, high = two_way_interval(rows.expand(8, 50))
    cluster_low, cluster_high = mean_interval(rows[:, 0])
    assert high - low == pytest.approx(cluster_high - cluster_low, rel=0.15)
    naive_low, naive_high = mean_interval(rows.expand(8, 50).reshape(-1))
    assert high - low > 4 * (naive_high - naive_low)
    assert two_way_interval(rows.expand(8, 50).mT) == pytest.approx((low, high), abs=0.15)


def test_nothing_varies_and_seeds():
    assert two_way_interval(torch.full((3, 4), 0.25)) == (0.25, 0.25)
    table = torch.rand(4, 5, generator=torch.Generator().manual_seed(2))
    before = torch.get_rng_state()
    assert two_way_interval(table, seed=1) == two_way_interval(table, seed=1) != two_way_interval(table, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    low, high = two_way_interval(table[:1])  # one prompt: points alone are drawn
    assert low < float(table[0].mean()) < high


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (torch.ones(3), {}, r"shape \[rows, columns\]"),
        (torch.ones(0, 3), {}, r"both at least 1"),
        (torch.tensor([[float("nan")]]), {}, "must be finite"),
        (torch.ones(2, 2), {"n_bootstrap": 0}, "`n_bootstrap` must be at least 1"),
    ],
)
def test_bad_input_says_what_was_expected(table, options, message):
    with pytest.raises(ValueError, match=message):
        two_way_interval(table, **options)
