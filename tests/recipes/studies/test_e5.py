"""Probes under a confound: the two closed forms, and the price of labels that go along with the context."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from monitor.geometry.bounds import entangled_auc
from monitor.geometry.purity import auc_max
from recipes.studies import e5


def test_probes_follow_the_two_closed_forms_and_not_each_other():
    learned, aligned = e5.entangled_aucs(3.0, 6_000, 20_000, torch.Generator().manual_seed(0))
    best = entangled_auc(e5.SEPARATION, e5.ENTANGLEMENTS, 3.0)
    fixed = entangled_auc(e5.SEPARATION, e5.ENTANGLEMENTS, 3.0, aligned=True)
    assert np.abs(learned - best).max() < 0.015
    assert np.abs(aligned - fixed).max() < 0.012
    assert (best - fixed)[5:].min() > 0.07  # either would be seen in the other's place


@pytest.mark.parametrize(("n", "correlation", "purity"), [(300, 0.0, 0.3), (300, 0.8, 0.3), (2000, 0.4, 1.0)])
def test_samples_are_composed_as_asked(n, correlation, purity):
    y, k, m = e5._composition(n, correlation, purity)
    assert len(y) == n and float(y.sum()) == 0 and float(k.sum()) == 0
    assert float((y * k).mean()) == pytest.approx(correlation, abs=2 / n)
    assert float(m.mean()) == pytest.approx(purity, abs=2 / n)
    assert float((m * y).sum()) == 0  # markers tell nothing of the label's frequency


def test_limit_without_correlation_is_the_purity_law():
    for purity in (0.1, 0.3, 0.7):
        assert e5.limit_auc(purity, 0.0) == pytest.approx(auc_max(e5.MARKED_SEPARATION, purity), abs=1e-6)
    limits = [e5.limit_auc(0.3, c) for c in e5.LABEL_CORRELATIONS]
    assert limits == sorted(limits, reverse=True)


def test_probes_reach_the_limit_with_many_samples(monkeypatch):
    monkeypatch.setattr(e5, "N_TRAIN", 20_000)
    found = e5.resampled_aucs(0.3, 0.6, 4, 4_000, torch.Generator().manual_seed(0))
    assert float(found.mean()) == pytest.approx(e5.limit_auc(0.3, 0.6), abs=0.015)


def test_confounded_labels_cost_where_few_texts_are_marked_and_nothing_where_all_are():
    generator = torch.Generator().manual_seed(0)
    aucs = {
        (purity, correlation): float(e5.resampled_aucs(purity, correlation, 8, 1_000, generator).mean())
        for purity in (0.3, 1.0)
        for correlation in (0.0, 0.8)
    }
    assert aucs[0.3, 0.0] - aucs[0.3, 0.8] > 0.05
    assert aucs[1.0, 0.0] > 0.999 and aucs[1.0, 0.8] > 0.995
    assert aucs[0.3, 0.0] < auc_max(e5.MARKED_SEPARATION, 0.3) + 0.01


def test_quick_run_has_both_parts(monkeypatch):
    monkeypatch.setattr(e5, "entangled_aucs", lambda ratio, *_: (entangled_auc(2.0, e5.ENTANGLEMENTS, ratio),) * 2)
    records = e5.run(quick=True)
    found = {(row["group"], row["metric"]): row for row in records}
    fall = found["purity 0.3", "fall_from_0_to_0.8"]
    assert fall["paper"] == 0.084 and fall["value"] > 0.05
    exact = [row["value"] for row in records if row["metric"] == "max_error_learned"]
    assert exact == [0.0, 0.0]
    assert all(
        row["value"] > 0.1 for row in records if row["metric"] == "max_error_aligned" and "ratio 3" in row["group"]
    )
