"""E3: laws hold along the true direction, learned probes pay for learning, estimators know the planted truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from monitor.geometry.curvature import chordal_auc
from recipes.studies import e3, e3_contour, e3_estimators, e3_laws
from recipes.studies.e10 import Sphere


@pytest.fixture(scope="module")
def found():
    records = e3.run(quick=True)
    assert len({(row["group"], row["metric"]) for row in records}) == len(records)
    return {(row["group"], row["metric"]): row["value"] for row in records}


def values(found, part, metric):
    return [value for (group, name), value in found.items() if group.startswith(part) and name == metric]


def test_laws_hold_along_the_true_direction(found):
    (error,), (noise,) = values(found, "A", "max_error"), values(found, "A", "null_std_of_an_auc")
    assert 0 < error < 3 * noise
    assert values(found, "A", "max_over_best_direction_learned")[0] < noise
    assert values(found, "A", "max_below_law_learned")[0] > noise  # they do have something to learn
    assert values(found, "B: chordal", "max_error")[0] < 0.013
    assert values(found, "B: chordal", "max_error_mean_inside")[0] < 3 * noise


def test_curved_saturates_and_flat_does_not(found):
    get = {metric: value for (group, metric), value in found.items() if group.startswith("B: from")}
    assert get["auc_curved"] < get["auc_ceiling"] < get["auc_flat"]
    assert get["rise_curved"] < get["rise_flat"]
    assert get["auc_flat"] == pytest.approx(get["auc_flat_formula"], abs=0.003)


def test_learned_contour_lies_above_the_threshold_by_what_learning_costs(found):
    assert 1.4 < values(found, "C", "factor_over_alpha_star")[0] < 2.6
    assert values(found, "C", "factor_over_learned_frontier")[0] == pytest.approx(1.0, abs=0.3)
    assert values(found, "C", "factor_over_alpha_star_calibrated") > values(found, "C", "factor_over_alpha_star")
    assert values(found, "C", "level_at_purity_0")[0] < 0.25


def test_estimators_know_the_truth(found):
    assert max(values(found, "D: curvature", "max_relative_error")) < 0.4
    assert set(values(found, "D: curvature", "share_in_order")) == {1.0}
    assert max(values(found, "D: dimension", "median_relative_error")) < 0.25
    zero, planted = "D: separation, true s=0,", "D: separation, true s>0,"
    assert values(found, zero, "median_crossfitted")[0] <= 0.6 < 3 <= values(found, zero, "median_naive")[0]
    crossed, naive = (values(found, planted, f"median_relative_error_{name}")[0] for name in ("crossfitted", "naive"))
    assert crossed < 0.15 and naive > 3 * crossed


def test_mean_of_a_class_lies_inside_the_sphere():
    sphere = Sphere(4.0, 1.0, 10, 0.1, 0.45)
    x, labels = sphere.draw(200_000, np.random.default_rng(0))
    shrunk = np.linalg.norm(x[labels == 1].mean(0) - x[labels == 0].mean(0))
    chord = np.linalg.norm(sphere.centres[1] - sphere.centres[0])
    assert shrunk / chord == pytest.approx(1 - 10 * 0.1**2 * 4 / 2, abs=0.02)  # 0.8, and terms of higher order
    measured = e3_laws.along_chord(sphere, 200_000, np.random.default_rng(1))
    assert e3_laws.mean_inside_auc(sphere) == pytest.approx(measured, abs=0.004)
    assert chordal_auc(4.0, 1.0, 0.1, 0.45) > measured + 0.02  # eq. 6 without it


def test_contour_is_where_half_detect():
    purities = np.array([0.1, 0.2, 0.4])
    z = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [3.0, 3.0, 3.0]])
    assert e3_contour.contour(purities, z, 2.0) == pytest.approx(0.2 * math.sqrt(2))
    assert e3_contour.contour(purities, z, 4.0) is None  # never reached
    assert e3_contour.contour(purities, z, -1.0) is None  # reached from the first on: the grid starts too high


def test_draws_are_as_far_apart_as_planted():
    generator = torch.Generator().manual_seed(0)
    crossed, naive = e3_estimators.separations(6.0, 2, generator)
    assert crossed.tolist() == pytest.approx([6.0, 6.0], rel=0.1)
    assert (naive > crossed).all()


def test_no_signal_is_detected_at_the_level_of_cross_validation():
    z = e3_contour.z_scores(e3_contour.Setting(2.0, 20), 100, 0.0, 8, torch.Generator().manual_seed(0))
    assert float(z.mean()) == pytest.approx(0.0, abs=4 * 1.3 / math.sqrt(len(z)))
    assert 1.0 < float(z.std()) < 1.5  # table VIII: the null is wider than sigma_0
    strong = e3_contour.z_scores(e3_contour.Setting(2.0, 20), 100, 1.0, 2, torch.Generator().manual_seed(0))
    assert float(strong.min()) > 3
