"""Nonlinear probes see what they can see, and nothing beats the purity law or the linear probe on a sphere."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from monitor.geometry.curvature import chord_length, chordal_auc
from monitor.geometry.detection import null_std
from monitor.geometry.purity import auc_max
from recipes.studies import e10
from recipes.studies.e10 import FlatMixture, Shells, Sphere


@pytest.mark.parametrize("task", [FlatMixture(1.5, 0.3), FlatMixture(3.0, 1.0)])
def test_best_direction_of_a_mixture_has_the_auc_of_the_law(task):
    x, labels = task.draw(100_000, np.random.default_rng(0))
    assert roc_auc_score(labels, task.oracle(x)) == pytest.approx(auc_max(task.separation, task.purity), abs=0.006)


def test_clusters_lie_on_the_sphere_at_their_distance():
    task = Sphere(4.0, 1.2, 3, 0.1, 0.0)
    low, high = task.centres
    assert np.linalg.norm(high) == pytest.approx(0.5)
    assert 0.5 * np.arccos(low @ high / 0.25) == pytest.approx(1.2)
    assert np.linalg.norm(high - low) == pytest.approx(chord_length(4.0, 1.2))
    x, labels = task.draw(20_000, np.random.default_rng(0))
    assert np.allclose(np.linalg.norm(x, axis=1), 0.5)  # no ambient noise
    to_own_centre = 0.5 * np.arccos(np.clip((x[:, :4] * task.centres[labels]).sum(1) / 0.25, -1, 1))
    assert np.mean(to_own_centre**2) == pytest.approx(3 * 0.1**2, rel=0.05)  # three directions of spread 0.1
    assert roc_auc_score(labels, task.oracle(x)) > 0.999


def test_oracle_is_the_difference_of_arcs():
    task = Sphere(1.0, 1.0, 2, 0.1, 0.1)
    for point, expected in ((task.centres[1], 1.0), (task.centres[0], -1.0), (2.0 * task.centres.mean(0), 0.0)):
        x = np.zeros((1, e10.DIMENSION))
        x[0, :3] = point
        assert task.oracle(x)[0] == pytest.approx(expected, abs=1e-7)


def test_chord_direction_has_the_chordal_auc():
    task = Sphere(4.0, 0.6, 2, 0.05, 0.25)
    x, labels = task.draw(100_000, np.random.default_rng(0))
    along_chord = x[:, :3] @ (task.centres[1] - task.centres[0])
    assert roc_auc_score(labels, along_chord) == pytest.approx(chordal_auc(4.0, 0.6, 0.05, 0.25), abs=0.008)


def test_nonlinear_probes_see_what_a_linear_one_cannot():
    aucs = e10.held_out_aucs(Shells(1.5), 1_200, np.random.default_rng(0))
    assert aucs["linear"] < 0.6 and aucs["svm"] > 0.9 and aucs["oracle"] > 0.95


def test_quick_run_no_probe_beats_the_laws():
    records = e10.run(quick=True)
    found = {(row["group"], row["metric"]): row["value"] for row in records}
    noise = null_std(300, 300)
    for probe in e10.PROBES:
        assert found["S1: 4 settings", f"max_over_law_{probe}"] < 3 * noise
        assert found["S1: 4 settings", f"max_over_best_direction_{probe}"] < 1.5 * noise
    sphere = next(group for group, _ in found if group.startswith("S2: curvature 4, r=1.5"))
    assert found[sphere, "auc_linear"] == pytest.approx(found[sphere, "auc_chordal_formula"], abs=0.04)
    # None recovers what the flat formula promises, on either kind of noise.
    for group in (sphere, next(group for group, _ in found if group.startswith("S2: curvature 4, r=1,"))):
        best = max(found[group, f"auc_{name}"] for name in (*e10.PROBES, "oracle"))
        assert best < found[group, "auc_flat_formula"] - 0.03


def test_a_model_adds_its_own_part(monkeypatch):
    from recipes.studies import e10_models

    monkeypatch.setattr(e10, "held_out_aucs", lambda *_: dict.fromkeys((*e10.PROBES, "oracle"), 0.5))
    monkeypatch.setattr(e10_models, "run", lambda **options: [options])
    without = e10.run(quick=True)
    assert e10.run(quick=True, seed=3, model="m") == [*without, {"quick": True, "seed": 3, "model": "m"}]
