import math

import pytest
import torch

from monitor.geometry.separation import crossfitted_separation
from monitor.geometry.separation_change import separation_change


def classes(separation, cells=150, d=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.ones(cells), torch.zeros(cells)]).long()
    x = torch.randn(2 * cells, d, generator=generator)
    x[:, 0] += (labels - 0.5) * separation
    return x, labels, torch.arange(cells).repeat(2)


def test_equal_states_have_no_change_and_no_width():
    x, labels, cells = classes(2.0)
    found = separation_change(x, x.clone(), labels, cells)
    assert found.change == (0.0, 0.0, 0.0)
    assert found.now == found.before
    assert found.now[0] == pytest.approx(float(crossfitted_separation(x, labels, cells)))


def test_values_are_those_of_each_model_alone():
    (now, labels, cells), (before, _, _) = classes(1.0), classes(3.0, seed=1)
    found = separation_change(now, before, labels, cells, seed=2)
    s_now, s_before = (float(crossfitted_separation(x, labels, cells, seed=2)) for x in (now, before))
    assert (found.now[0], found.before[0]) == pytest.approx((s_now, s_before))
    assert found.change[0] == pytest.approx(s_now - s_before)
    assert found.change[2] < 0


def test_models_of_different_width_compare():
    (now, labels, cells), (before, _, _) = classes(2.0, d=6), classes(2.0, d=14, seed=1)
    found = separation_change(now, before, labels, cells)
    assert found.change[1] < found.change[0] < found.change[2]


def test_intervals_cover_and_pairing_narrows_the_change():
    covered, narrower = 0, 0
    for seed in range(30):
        now, labels, cells = classes(2.0, seed=seed)
        before = now.clone()
        before[:, 0] += (labels - 0.5) * 1.0  # s = 3 with the same noise
        found = separation_change(now, before, labels, cells)
        covered += found.now[1] <= 2.0 <= found.now[2]
        narrower += found.change[2] - found.change[1] < found.before[2] - found.before[1]
    assert covered >= 26 and narrower >= 25


def test_lower_end_of_a_separation_is_not_below_zero():
    x, labels, cells = classes(0.0)
    found = separation_change(x, classes(0.0, seed=5)[0], labels, cells)
    assert found.now[1] >= 0 and found.before[1] >= 0


def test_too_few_cells_have_no_interval():
    x, labels, cells = classes(3.0, cells=6, d=2)
    found = separation_change(x, x + 1.0 * torch.randn_like(x), labels, cells)
    assert math.isnan(found.now[1]) and math.isnan(found.change[2]) and math.isfinite(found.change[0])
