"""Random folds see through contexts only where labels follow them; the features are what the study says."""

from __future__ import annotations

import pytest
import torch

from monitor.stimuli.counterfactual_grid import load_counterfactual_sets
from recipes.studies import e8


@pytest.fixture(scope="module")
def grid():
    return load_counterfactual_sets(("gender",))["gender"]


def test_texts_of_a_cell_share_their_context_and_pairs_differ_by_the_marker(grid):
    x = e8.features(grid, seed=0).double()
    p = grid.n_pairs
    difference = x[:p] - x[p : 2 * p]
    assert float(difference[..., 0].mean()) == pytest.approx(e8.SEPARATION, abs=0.1)
    assert float(difference[..., 1:].var()) == pytest.approx(2.0, rel=0.02)  # noise alone: the context cancels
    neutral = x[2 * p :: 2, :, 1]
    marked = x[:p, :, 1]
    shared = float((neutral * marked).mean()), float((neutral * marked.roll(1, 0)).mean())
    assert shared[0] == pytest.approx(e8.CONTEXT_VARIANCE, rel=0.15) and abs(shared[1]) < 0.3


@pytest.mark.parametrize("purity", [0.0, 0.3])
def test_labels_that_follow_contexts(grid, purity):
    rows, labels, groups = e8.labels_by_context(grid, 300, purity, seed=0)
    assert len(rows.unique()) == 300 and abs(int(labels.sum()) - 150) <= 1  # 105 cells have one label each
    assert torch.equal(groups, torch.tensor(grid.groups)[rows])
    neutral = rows >= 2 * grid.n_pairs
    assert int(neutral.sum()) == 300 - round(purity * 300)
    for cell in groups.unique():
        of_cell = groups == cell
        assert int(of_cell.sum()) == 2
        same = bool((labels[of_cell][0] == labels[of_cell][1]).item())
        assert same == bool(neutral[of_cell].all())


def test_only_random_folds_see_the_context_and_only_where_labels_follow_it(grid):
    followed = torch.stack([e8.fold_aucs(grid, "labels follow contexts", 300, 0.0, 5 * k) for k in range(3)])
    grouped, random = followed.mean((0, 2)).tolist()
    assert grouped == pytest.approx(0.5, abs=0.03) and random > 0.6
    crossed = torch.stack([e8.fold_aucs(grid, "crossed", 300, 0.3, 5 * k) for k in range(3)])
    grouped, random = crossed.mean((0, 2)).tolist()
    assert abs(random - grouped) < 0.03 and grouped > 0.58


def test_quick_run_reports_the_difference_of_its_own_aucs(monkeypatch):
    monkeypatch.setattr(e8, "SETTINGS", e8.SETTINGS[:1])
    monkeypatch.setattr(e8, "SAME_DRAW", 3)
    found = {row["metric"]: row for row in e8.run(quick=True)}
    difference = found["auc_random"]["value"] - found["auc_grouped"]["value"]
    assert found["random_minus_grouped"]["value"] == pytest.approx(difference)
    assert found["random_minus_grouped"]["paper"] == 0.011
