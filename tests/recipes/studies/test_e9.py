"""The null study draws what it says, and its rates are those of the test it is about."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import norm

from monitor.geometry.detection import detection_p, null_std
from monitor.stimuli.counterfactual_grid import load_counterfactual_sets
from monitor.stimuli.mixture import draw_mixture
from recipes.studies import e9
from recipes.studies.e9 import CELLS, Cell, draw_texts, family_rate, null_aucs, null_z, rejection_rate

MIXED = Cell(64, 300, 0.3)
BROKEN = next(cell for cell in CELLS if cell.replacement == "marked")


@pytest.fixture(scope="module")
def grid():
    return load_counterfactual_sets(("gender",))["gender"]


def test_the_table_is_the_papers():
    paper = [cell for cell in CELLS if cell.paper]
    assert len(paper) == 12 and len({(c.dimension, c.n, c.purity) for c in paper}) == 12
    assert all(root > plain > calibrated for _, root, plain, calibrated in (cell.paper for cell in paper))


def test_cells_that_are_not_resampled_fit_the_pool_and_the_others_do_not(grid):
    for cell in CELLS:
        if cell.replacement:
            with pytest.raises(ValueError, match="largest n"):
                draw_mixture(grid, cell.n, cell.purity)
        else:
            assert len(draw_mixture(grid, cell.n, cell.purity).rows) == cell.n


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.replacement], ids=lambda cell: cell.name)
def test_resampled_cells_keep_the_design(cell, grid):
    rows, labels, groups = draw_texts(cell, grid, seed=1)
    assert len(rows) == cell.n and int(labels.sum()) == cell.n // 2
    assert torch.equal(groups, torch.tensor(grid.groups)[rows])
    marked = rows < 2 * grid.n_pairs
    assert int(marked.sum()) == round(cell.purity * cell.n)
    assert torch.equal(labels[marked] == 1, rows[marked] < grid.n_pairs)  # of its group
    drawn_twice = (rows.bincount() > 1).nonzero().flatten()
    of_marked = drawn_twice < 2 * grid.n_pairs
    assert bool(of_marked.all()) if cell.replacement == "marked" else not bool(of_marked.any())


def test_broken_cell_draws_with_replacement(grid):
    rows, labels, _ = draw_texts(BROKEN, grid, seed=0)
    different = 2 * 340 * (1 - (1 - 1 / 340) ** 500)  # expected; 1,000 rows would need as many texts
    assert len(rows.unique()) == pytest.approx(different, abs=40)
    pairs = rows % grid.n_pairs
    assert torch.equal(pairs[labels == 1], pairs[labels == 0])  # both members of a pair, as often


def test_rates_are_those_of_the_detection_test():
    generator = torch.Generator().manual_seed(0)
    aucs = 0.5 + 0.05 * torch.randn(4000, generator=generator, dtype=torch.float64)
    z = null_z(MIXED, aucs)
    by_p = (detection_p(aucs.clamp(0, 1).numpy(), 150, 150) <= 0.05).mean()
    assert rejection_rate(z, 1.4) == pytest.approx(by_p)
    # Normal statistics of a spread: the rate is known.
    expected = norm.sf(1.4 * norm.isf(0.05) * null_std(150, 150) / 0.05)
    assert rejection_rate(z, 1.4) == pytest.approx(expected, abs=0.015)


def test_a_family_of_24():
    assert family_rate(0.0) == 0.0
    assert family_rate(0.05) == pytest.approx(0.708, abs=1e-3)
    assert family_rate(0.07) == pytest.approx(0.825, abs=1e-3)  # the paper's 0.83 to 0.95


def test_blocks_share_no_seed():
    seeds = [e9._block_seed(42, cell, block) + k for cell in range(16) for block in range(40) for k in range(5)]
    assert len(set(seeds)) == len(seeds)


def test_calibrated_test_keeps_its_level_and_the_naive_one_does_not(grid):
    blocks = torch.stack([null_aucs(MIXED, grid, 25, seed=5 * k) for k in range(8)])
    found = {row["metric"]: row["value"] for row in e9.summarise(MIXED, blocks)}
    assert found["rate_calibrated"] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 200)
    assert found["rate_sigma_0_over_root_5"] > 0.12
    assert 1.0 < found["inflation"] < 1.5
    assert found["mean_auc"] == pytest.approx(0.5, abs=0.015)
    assert torch.equal(blocks[0], null_aucs(MIXED, grid, 25, seed=0))


def test_resampling_past_the_pool_spreads_the_null(grid):
    blocks = torch.stack([null_aucs(BROKEN, grid, 20, seed=5 * k) for k in range(4)])
    found = {row["metric"]: row["value"] for row in e9.summarise(BROKEN, blocks)}
    # sqrt(1 + 499/340) = 1.57 times what a cell that fits shows.
    assert found["inflation"] > 1.5


def test_quick_run_summarises_every_cell_and_all_that_fit(monkeypatch):
    monkeypatch.setattr(e9, "CELLS", (MIXED, Cell(64, 300, 1.0, context=4.0)))
    monkeypatch.setattr(e9, "BLOCK", 50)
    records = e9.run(quick=True)
    by_group = {}
    for found in records:
        by_group.setdefault(found["group"], {})[found["metric"]] = found["value"]
    assert len(by_group) == 3
    fitting = by_group["all that fit the pool, without context variance"]
    assert fitting["rate_calibrated"] == by_group[MIXED.name]["rate_calibrated"]
    # What two texts of a cell share moves both scores alike, and one of the two is positive: the null is narrower.
    assert by_group["d=64, n=300, purity 1, context variance 4"]["inflation"] < 0.8
