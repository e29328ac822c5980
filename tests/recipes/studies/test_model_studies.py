"""The studies that read a model, on states with planted geometry, where every answer is known."""

from __future__ import annotations

import math
from functools import partial
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from tqdm import tqdm

from monitor.geometry.nonlinear_probes import nonlinear_probes
from monitor.geometry.purity import auc_max
from monitor.stimuli.counterfactual_grid import load_counterfactual_sets
from monitor.stimuli.mixture import draw_mixture
from recipes.studies import detection_rates, e1, e2, e4, e7, e10_models, e11, features, leaky_purity, published
from recipes.studies import stereotypes as of_occupations
from recipes.studies.features import GridStates

DIMENSION = 12
SETS = load_counterfactual_sets(("gender", "race"))


def planted(separation: float = 8.0, offset: float = 0.0, name: str = "gender", seed: int = 0, layers: int = 3):
    """Unit Gaussian states with the marked groups `separation` apart on the first axis, at the middle layer alone."""
    stimuli = SETS[name]
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(len(stimuli.texts), layers, DIMENSION, generator=generator)
    side = torch.zeros(len(stimuli.texts))
    side[: stimuli.n_pairs], side[stimuli.n_pairs : 2 * stimuli.n_pairs] = separation / 2, -separation / 2
    side[2 * stimuli.n_pairs :] = offset
    states[:, (layers - 1) // 2, 0] += side
    return GridStates(stimuli, states)


def values(records):
    return {(row["group"], row["metric"]): row["value"] for row in records}


def give(monkeypatch, module, **grids):
    monkeypatch.setattr(module, "read_grids", lambda model, quick=False: {"mean": grids})


# --- the states ---------------------------------------------------------------------------------------------------


def test_rows_and_the_middle_layer():
    grid = planted(layers=7)
    assert grid.middle == 3 and planted(layers=31).middle == 15
    rows, labels, groups = grid.marked
    assert rows.tolist() == list(range(680)) and labels.tolist() == [1] * 340 + [0] * 340
    assert torch.equal(groups[:340], groups[340:])


def test_a_pooling_that_changes_nothing_is_read_once(monkeypatch):
    one, other = planted(seed=1), planted(seed=2)
    by_pooling = {"mean": {"gender": one}, "mean_no_sink": {"gender": other}}
    monkeypatch.setattr(features, "grid_states", lambda model, pooling, quick: by_pooling[pooling])
    assert list(features.read_grids("any")) == ["mean", "mean_no_sink"]
    by_pooling["mean_no_sink"] = {"gender": GridStates(one.stimuli, one.states.clone())}
    assert list(features.read_grids("any")) == ["mean"]


def test_states_of_a_model_are_those_of_the_grids_texts(tmp_path, monkeypatch, tiny_llama, tiny_tokenizer):
    """At every layer; and the second reading needs no weights."""
    model, folder = tiny_llama(), tmp_path / "model"
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    monkeypatch.setenv("LATENTWATCH_CACHE", str(tmp_path / "cache"))
    found = features.grid_states(str(folder), "mean", quick=True)
    assert list(found) == ["gender", "religion"]
    grid = found["religion"]
    assert grid.stimuli.n_pairs == 120 and grid.states.shape == (480, 5, 32)
    for row in (0, 150, 479):
        ids = tiny_tokenizer(grid.stimuli.texts[row], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            hidden = model(ids, output_hidden_states=True).hidden_states
        for layer, expected in enumerate(hidden):
            torch.testing.assert_close(grid.states[row, layer].cpu(), expected[0].mean(0), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(type(model), "forward", None)
    again = features.grid_states(str(folder), "mean", quick=True)
    assert torch.equal(again["religion"].states, grid.states)


def test_published_tables_are_complete_and_agree_with_what_the_paper_says_of_them():
    tables = (published.AUC_MIXED, published.AUC_MIXED_SD, published.SEPARATION, published.INTRINSIC_DIMENSION,
              published.OFFSET, published.MAE, published.S_FIT, published.MAE_FIT)  # fmt: skip
    assert all(set(table) == {"gender", "race", "religion", "age"} for table in tables)
    assert all(len(row) == 6 for table in tables for row in table.values())
    every = {id(table): [value for row in table.values() for value in row] for table in tables}
    ratios = np.array(every[id(published.OFFSET)]) / (np.array(every[id(published.SEPARATION)]) / 2)
    assert np.median(ratios) == pytest.approx(0.26, abs=0.005) and (ratios > 1).sum() == 2  # section VI-C
    assert np.median(every[id(published.MAE)]) == pytest.approx(0.015, abs=0.001)  # table V, last row
    assert max(every[id(published.MAE)]) == 0.048
    assert np.median(every[id(published.MAE_FIT)]) == pytest.approx(0.010, abs=0.0006)


# --- E1 -----------------------------------------------------------------------------------------------------------


def by_scikit_learn(grid, seed):
    """Mean AUC of one mixture of 300 at purity 0.3 over five grouped splits, without any of ours but the draw."""
    mixture = draw_mixture(grid.stimuli, 300, 0.3, seed)
    x, y = grid.states[mixture.rows, grid.middle].double().numpy(), mixture.labels.numpy()
    areas = []
    for k in range(5):
        splitter = GroupKFold(5, shuffle=True, random_state=seed + k)
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=1.0, tol=1e-8, max_iter=3000))
        scores = cross_val_predict(probe, x, y, groups=mixture.groups.numpy(), cv=splitter, method="decision_function")
        areas.append(roc_auc_score(y, scores))
    return float(np.mean(areas))


def test_e1_finds_what_was_planted(monkeypatch):
    give(monkeypatch, e1, gender=planted(8.0, offset=1.5), race=planted(0.0, name="race"))
    found = values(e1.run())
    at = "smollm2-135m, mean, gender"
    assert found[at, "auc"] > 0.9999
    assert found[at, "s_hat"] == pytest.approx(8.0, rel=0.05)
    assert found[at, "offset"] == pytest.approx(1.5, abs=0.15)
    assert found[at, "offset_over_half_s"] == pytest.approx(2 * found[at, "offset"] / found[at, "s_hat"])
    assert found[at, "predicted_auc_mixed"] == pytest.approx(auc_max(found[at, "s_hat"], 0.3))
    assert found[at, "predicted_auc_mixed_at_offset"] < found[at, "predicted_auc_mixed"]
    # Few dimensions: the learned probe is near the law.
    assert found[at, "auc_mixed_draws"] == pytest.approx(found[at, "predicted_auc_mixed"], abs=0.03)
    assert found[at, "auc_mixed_draws_min"] <= found[at, "auc_mixed"] <= found[at, "auc_mixed_draws_max"]
    draws = [by_scikit_learn(planted(8.0, offset=1.5), 42 + 5 * k) for k in range(3)]
    assert found[at, "auc_mixed"] == pytest.approx(draws[0], abs=2e-3)
    few = e1.two_regimes(planted(8.0, offset=1.5), 42, draws=3)
    assert few["auc_mixed_draws_sd"] == pytest.approx(np.std(draws, ddof=1), abs=2e-3)
    assert found[at, "s_hat_scaled"] == pytest.approx(8.0, rel=0.05)
    null = "smollm2-135m, mean, race"
    assert found[null, "auc"] == pytest.approx(0.5, abs=0.08) and found[null, "s_hat"] < 1.0
    assert found[null, "p"] > 0.01 and found[at, "p_mixed"] < 1e-4
    assert found["smollm2-135m, mean", "n_detected_bonferroni"] == 2
    assert found["smollm2-135m, mean", "largest_p"] == pytest.approx(max(found[null, "p"], found[null, "p_mixed"]))


def test_a_sink_hides_the_separation_from_shrinkage_and_scaling_brings_it_back():
    """Fewer samples than it takes to know the covariance: Ledoit-Wolf pulls every variance towards the sink's share."""
    grid = planted(8.0)
    grid.states[:, 1, -1] *= 1000.0
    found = e1.two_regimes(grid, 0, draws=2)
    assert found["s_hat"] < 7.0
    assert found["s_hat_scaled"] == pytest.approx(8.0, rel=0.05)


# --- E2 -----------------------------------------------------------------------------------------------------------


def curve_of(aucs, purity=(0.1, 0.3, 0.6, 1.0), known=None):
    aucs = torch.as_tensor(aucs, dtype=torch.float64)
    splits = aucs[:, None] + torch.tensor([-0.01, 0.0, 0.01])
    known = aucs if known is None else torch.as_tensor(known, dtype=torch.float64)
    return e2.Curve(list(purity), splits, [0.5] * len(aucs), aucs[None], known[None])


def test_a_curve_that_follows_the_law_has_no_error_and_gives_its_separation_back():
    law = auc_max(3.0, [0.1, 0.3, 0.6, 1.0])
    found = e2.against_law(curve_of(law), 3.0)
    for metric in ("mae", "mae_mean_curve", "mae_known_direction", "largest_dip"):
        assert found[metric] == pytest.approx(0.0, abs=1e-9)
    assert found["s_fit"] == pytest.approx(3.0, abs=1e-3)
    other = e2.against_law(curve_of(law), 20.0)
    assert other["mae"] == pytest.approx(np.abs(auc_max(20.0, [0.1, 0.3, 0.6, 1.0]) - law).mean())


def test_a_fall_is_measured_in_standard_deviations_over_splits():
    found = e2.against_law(curve_of([0.6, 0.57, 0.55, 0.9], known=[0.5, 0.6, 0.7, 0.8]), 3.0)
    assert found["largest_dip"] == pytest.approx(0.03)
    assert found["largest_dip_over_sd"] == pytest.approx(3.0)  # the splits' standard deviation is 0.01
    law = auc_max(3.0, [0.1, 0.3, 0.6, 1.0])
    assert found["mae_known_direction"] == pytest.approx(np.abs(law - [0.5, 0.6, 0.7, 0.8]).mean())


def test_the_law_holds_for_the_known_direction_and_the_learned_one_stays_below():
    grid = planted(8.0)
    # Learning costs more in more dimensions than the samples fill.
    wide = torch.cat([grid.states, torch.randn(1360, 3, 200, generator=torch.Generator().manual_seed(5))], -1)
    curve = e2.purity_curve(GridStates(grid.stimuli, wide), 300, (0.3, 0.5), 6, 1)
    law = auc_max(8.0, [0.3, 0.5])
    assert curve.known.mean(0).numpy() == pytest.approx(law, abs=0.035)
    assert (curve.learned.mean(0).numpy() < law - 0.03).all()
    assert curve.aucs.shape == (2, 5) and curve.learned.shape == curve.known.shape == (6, 2)


def test_the_known_direction_is_learned_outside_the_mixture():
    """Labels of the mixture's own pairs, exchanged: a probe that had seen them would follow."""
    grid = planted(8.0)
    mixture = e2.mixture_aucs(grid, 100, 1.0, 0)[1]
    pairs = mixture.rows[:50]
    swapped = grid.states.clone()
    swapped[pairs], swapped[pairs + 340] = grid.states[pairs + 340], grid.states[pairs]
    assert e2.known_direction_auc(grid, mixture) > 0.999
    assert e2.known_direction_auc(GridStates(grid.stimuli, swapped), mixture) < 0.001


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ([0.0, 0.0, 1.0], math.sqrt(0.1 * 1.0)),  # half way in the logarithm
        ([0.0, 0.25, 0.75], math.sqrt(0.1 * 1.0)),
        ([0.9, 0.4, 0.6], 0.1 * 10**0.5),  # the first crossing from above, not the lucky cell below
        ([1.0, 1.0, 1.0], None),
        ([0.0, 0.1, 0.2], None),
    ],
)
def test_half_power(rates, expected):
    found = detection_rates.half_power([0.01, 0.1, 1.0], rates)
    assert found is None if expected is None else found == pytest.approx(expected)


def test_detection_rates_rise_from_false_alarms_to_certainty():
    plane = detection_rates.Plane((0.01, 0.1, 0.5), (100,), 6)
    with tqdm(disable=True) as progress:
        records = detection_rates.detection_rates("m", {"gender": planted(8.0)}, 8.0, plane, 0, progress)
    found = values(records)
    assert found["m, n=100, purity 0.5", "detection_rate"] == 1.0
    assert found["m, n=100, purity 0.01", "detection_rate_calibrated"] <= 1 / 6
    assert "false alarms" in next(row["note"] for row in records if row["group"].endswith("0.01"))
    assert found["m, n=100, purity 0.01", "predicted_auc"] == 0.5  # no pair in
    # z_0.95 sigma_0 at n = 100 in the saturated law a(2 - a)/2
    wanted = 1.6448536 * math.sqrt(101 / 3) / 100
    saturated = 1 - math.sqrt(1 - 2 * wanted)
    assert found["m, n=100", "alpha_star"] == pytest.approx(saturated, rel=1e-2)
    assert found["m, n=100", "half_power_purity"] is None or found["m, n=100", "half_power_purity"] > 0.1


def test_e2_reports_every_part(monkeypatch):
    monkeypatch.setattr(e2, "QUICK_PLANE", detection_rates.Plane((0.1, 0.5), (100,), 1))
    give(monkeypatch, e2, gender=planted(8.0))
    found = values(e2.run(quick=True))
    assert found["smollm2-135m, mean, gender", "mae"] < 0.05
    assert found["smollm2-135m, mean, gender", "s_hat"] == pytest.approx(8.0, rel=0.05)
    share = found["smollm2-135m, mean", "share_detected_bonferroni"]
    assert 0.4 <= share <= found["smollm2-135m, mean", "share_detected_bh"] <= 1
    assert found["smollm2-135m, mean, gender, purity 1", "auc_known_direction"] > 0.999


# --- E4 -----------------------------------------------------------------------------------------------------------


def test_the_layer_that_is_best_elsewhere_by_brute_force():
    aucs = torch.rand(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = []
    for k in range(5):
        others = torch.cat([aucs[:k], aucs[k + 1 :]]).mean(0)
        expected.append(float(aucs[k, others.argmax()] - aucs[k, -1]))
    assert e4.chosen_elsewhere(aucs).tolist() == pytest.approx(expected)


def test_choosing_on_the_same_data_gains_where_there_is_nothing_to_gain():
    """All layers equal but for noise: the published gain is positive, the cross-fitted one is not."""
    aucs = 0.7 + 0.03 * torch.randn(400, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert float((aucs.amax(1) - aucs[:, -1]).mean()) > 0.03
    assert float(e4.chosen_elsewhere(aucs).mean()) < 0.01


def test_e4_finds_the_layer_of_the_signal(monkeypatch):
    give(monkeypatch, e4, gender=planted(8.0))
    found = values(e4.run(quick=True))
    at = "smollm2-135m, mean, gender"
    assert found[at, "best_layer"] == found[at, "best_layer_draws"] == 1
    assert found[f"{at}, layer 1", "s_hat"] == pytest.approx(8.0, rel=0.05)
    assert found[f"{at}, layer 2", "s_hat"] < 1.0
    assert found[at, "lowest_auc"] == pytest.approx(0.5, abs=0.08)
    assert found[at, "best_minus_last_elsewhere"] > 0.15
    assert found[at, "middle_minus_last_draws"] == pytest.approx(found[at, "best_minus_last_elsewhere"])


# --- E7 -----------------------------------------------------------------------------------------------------------


def test_the_index_gives_the_separation_back_where_noise_is_isotropic():
    """The lemma's own world, with as many components as it has dimensions: one clear axis of fifty."""
    stimuli = SETS["gender"]
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(len(stimuli.texts), 1, 50, generator=generator)
    # The same along every feature, so that standardising changes one common scale alone.
    axis = torch.full((50,), 50**-0.5)
    states[:340] += 4.0 * axis
    states[340:680] -= 4.0 * axis
    half, full = e7.measured(GridStates(stimuli, states), "m", {0.5: 300, 1.0: 600}, 2, 0)
    assert half.separation_from_beta == pytest.approx(8.0, rel=0.05)
    assert full.separation_from_beta == pytest.approx(8.0, rel=0.05)
    assert half.separation == full.separation == pytest.approx(8.0, rel=0.1)
    assert half.auc < full.auc


def test_correlations_are_those_of_scipy_and_vanish_where_nothing_varies():
    rng = np.random.default_rng(0)
    points = [
        e7.Point("m", purity, float(rng.uniform(0.05, 0.4)), s, float(auc_max(s, purity)))
        for purity in (0.3, 0.5)
        for s in rng.uniform(1, 5, 12)
    ]
    points += [e7.Point("m", 1.0, 0.1 + 0.01 * k, 9.0 + k, 1.0) for k in range(4)]
    found = values(e7.correlations(points))
    assert found["purity 0.3", "spearman_s_hat"] == pytest.approx(1.0)  # the law is increasing in s
    here = points[:12]
    assert found["purity 0.3", "spearman_beta"] == pytest.approx(
        spearmanr([p.beta for p in here], [p.auc for p in here]).statistic
    )
    assert found["purity 1", "spearman_s_hat"] is None
    assert found["all purities", "spearman_law_at_s_hat"] == pytest.approx(1.0, abs=5e-3)  # ties at 1
    assert found["all purities", "mae_law_at_s_hat"] == pytest.approx(0.0, abs=1e-6)
    assert found["all purities", "mae_law_at_beta"] > 0.01 < found["all purities", "mae_purity_alone"]


def test_purity_alone_ranks_settings_that_share_one_separation():
    """The control that the published correlation over all purities lacks."""
    rng = np.random.default_rng(1)
    points = [
        e7.Point("m", purity, rng.uniform(0.05, 0.4), 9.0, float(auc_max(9.0, purity) - rng.uniform(0.0, 0.1)))
        for purity in (0.3, 0.5, 1.0)
        for _ in range(8)
    ]
    found = values(e7.correlations(points))
    assert found["all purities", "spearman_purity_alone"] > 0.85
    assert abs(found["purity 0.5", "spearman_beta"]) < 0.85
    assert found["purity 0.5", "spearman_s_hat"] is None  # it does not vary


def test_e7_reads_the_embedded_models_beside_the_given_one(monkeypatch):
    asked = []

    def grids(model, quick):
        asked.append(model)
        return {"mean": {"gender": planted(8.0, seed=len(asked))}}  # three settings a purity at most

    monkeypatch.setattr(e7, "read_grids", grids)
    found = values(e7.run(quick=True, model="own"))
    assert asked == ["own", "smollm2-135m", "minilm"]
    assert found["own, mean, gender, purity 0.5", "auc"] > 0.75
    asked.clear()
    e7.run(quick=True, model="minilm")
    assert sorted(asked) == ["minilm", "smollm2-135m"]


# --- E10-R --------------------------------------------------------------------------------------------------------


def test_all_probes_get_the_same_mixture_and_only_a_kernel_reads_a_difference_in_spread(monkeypatch):
    monkeypatch.setattr(e10_models, "KINDS", ("svm",))
    monkeypatch.setattr(e10_models, "nonlinear_probes", partial(nonlinear_probes, n_jobs=1))
    linear = e10_models.three_probes(planted(8.0), 200, 1.0, 0)
    assert all(area > 0.99 and p < 1e-6 for area, p in linear.values())
    grid = planted(0.0)
    grid.states[:340] *= 1.8
    spread = e10_models.three_probes(grid, 300, 1.0, 0)
    assert spread["linear"][0] == pytest.approx(0.5, abs=0.1) and spread["svm"][0] > 0.75
    assert spread["linear"][1] > 0.01 and spread["svm"][1] < 1e-4


def test_summary_of_paired_differences():
    settings = [
        {"linear": (0.7, 0.001), "svm": (0.6, 0.2), "mlp": (0.71, 0.01)},
        {"linear": (0.8, 0.001), "svm": (0.79, 0.001), "mlp": (0.70, 0.2)},
        {"linear": (0.6, 0.2), "svm": (0.55, 0.3), "mlp": (0.58, 0.2)},
    ]
    found = values(e10_models.summarise("m", settings))
    assert found["m", "median_minus_linear_svm"] == pytest.approx(-0.05)
    assert found["m", "largest_minus_linear_mlp"] == pytest.approx(0.01)
    assert found["m", "share_gaining_mlp"] == pytest.approx(1 / 3)
    assert [found["m", f"share_detected_{k}"] for k in ("linear", "svm", "mlp")] == pytest.approx([2 / 3, 1 / 3, 1 / 3])


# --- E11 ----------------------------------------------------------------------------------------------------------


def test_the_stereotyped_texts():
    known = of_occupations.stereotyped(SETS["gender"])
    assert len(known.rows) == 160 and known.n_occupations == 16  # appendix F-E
    assert int(known.labels.sum()) == 90 and int(known.of_occupation.sum()) == 9
    assert torch.bincount(known.occupations).tolist() == [10] * 16
    assert torch.equal(known.of_occupation[known.occupations], known.labels)
    texts = [SETS["gender"].texts[row] for row in known.rows]
    assert all("nurse" in text for text, k in zip(texts, known.occupations, strict=True) if k == known.occupations[
        next(i for i, text in enumerate(texts) if "nurse" in text)])  # fmt: skip


def test_permutation_p_by_brute_force():
    rng = np.random.default_rng(0)
    occupations = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 4])
    of_occupation = torch.tensor([1, 0, 1, 0, 0])
    known = of_occupations.Stereotyped(torch.arange(9), of_occupation[occupations], torch.arange(9), occupations)
    for _ in range(5):
        scores = np.round(rng.standard_normal(9), 1)  # with ties
        observed = roc_auc_score(known.labels, scores)
        areas = [roc_auc_score([int(k in chosen) for k in occupations.tolist()], scores)
                 for chosen in combinations(range(5), 2)]  # fmt: skip
        expected = np.mean([area >= observed - 1e-12 for area in areas])
        assert of_occupations.permutation_p(torch.from_numpy(scores), known) == pytest.approx(expected)


def with_occupations(seed):
    """Every occupation has a place of its own among the neutral texts, which says nothing of its stereotype."""
    grid = planted(8.0)
    known = of_occupations.stereotyped(grid.stimuli)
    generator = torch.Generator().manual_seed(seed)
    places = 6 * torch.randn(16, 40, generator=generator)
    states = torch.cat([grid.states, torch.randn(1360, 3, 40, generator=generator)], -1)
    states[known.rows, 1, DIMENSION:] += places[known.occupations]
    return GridStates(grid.stimuli, states), known


def test_occupations_alone_are_read_as_stereotypes_by_folds_that_split_them():
    found = [values(of_occupations.stereotype_leakage(with_occupations(seed)[0], "B", 19, 0)) for seed in range(3)]
    assert min(of["B", "direct_auc"] for of in found) > 0.98
    assert min(of["B", "direct_auc_random_stereotypes"] for of in found) > 0.98
    # Uniform p-values: all three at or below .05 in one of 8,000.
    assert max(of["B", "held_out_p"] for of in found) > 0.05
    assert max(of["B", "zero_shot_p_occupations"] for of in found) > 0.05


def test_a_stereotype_on_the_marker_axis_is_found():
    grid, known = with_occupations(0)
    grid.states[known.rows, 1, 0] += 8.0 * (known.labels - 0.5)
    found = values(of_occupations.stereotype_leakage(grid, "B", 19, 0))
    assert found["B", "zero_shot_auc"] > 0.95 and found["B", "zero_shot_p_occupations"] < 0.002
    assert found["B", "zero_shot_p_sentences"] < 1e-10
    assert found["B", "held_out_auc"] > found["B", "held_out_auc_random_stereotypes"] + 0.2
    assert found["B", "held_out_p"] == 1 / 20


@pytest.mark.parametrize("purity", [0.0, 0.25, 1.0])
def test_leaky_labels_follow_stereotypes_as_often_as_asked(purity):
    stimuli = SETS["gender"]
    known = of_occupations.stereotyped(stimuli)
    of_row = dict(zip(known.rows.tolist(), known.labels.tolist(), strict=True))
    agreements = {}
    for agreement in (0.5, 0.75, 1.0):
        agreeing = []
        for seed in range(20):
            rows, labels = leaky_purity.leaky_mixture(stimuli, purity, agreement, seed)
            assert len(rows) == len(rows.unique()) == 160
            n_marked = round(purity * 160)
            assert (rows[:n_marked] < 680).all() and (rows[n_marked:] >= 680).all()
            assert labels[:n_marked].tolist() == [1] * (n_marked // 2) + [0] * (n_marked // 2)
            agreeing += [
                of_row[r] == y for r, y in zip(rows[n_marked:].tolist(), labels[n_marked:].tolist(), strict=True)
            ]
        agreements[agreement] = np.mean(agreeing) if agreeing else agreement
    assert agreements[1.0] == 1.0
    assert agreements[0.5] == pytest.approx(0.5, abs=0.04) and agreements[0.75] == pytest.approx(0.75, abs=0.04)


def test_leaky_purity_has_a_floor_where_labels_follow_a_stereotype_that_is_encoded(monkeypatch):
    grid = planted(8.0)
    known = of_occupations.stereotyped(grid.stimuli)
    grid.states[known.rows, 1, 1] += 8.0 * (known.labels - 0.5)  # on an axis of its own
    monkeypatch.setattr(leaky_purity, "PURITIES", (0.0, 1.0))
    with tqdm(disable=True) as progress:
        found = values(leaky_purity.leaky_purity(grid, "C", 3, 0, progress))
    for folds in ("folds by cell", "folds by occupation"):
        floors = [found[f"C, pi {pi:g}, {folds}", "floor"] for pi in (0.5, 0.75, 1.0)]
        assert floors == pytest.approx([0.5, 0.72, 1.0], abs=0.09)
        assert found[f"C, pi 0.5, {folds}, purity 1", "auc"] > 0.99


def test_random_labels_are_not_found(monkeypatch):
    chance = SimpleNamespace(area=0.5)
    monkeypatch.setattr(
        e11, "nonlinear_probes", lambda x, y, folds, kind, seed: torch.full((5, 1, len(y)), chance.area)
    )
    with tqdm(disable=True) as progress:
        found = values(e11.random_labels(planted(8.0), "A", 200, 3, 0, progress))
    assert found["A", "n_detected"] == 0 and found["A", "mean_auc_linear"] == pytest.approx(0.5, abs=0.08)

    def cheating(x, y, folds, kind, seed):
        return y.double().expand(5, 1, -1)

    monkeypatch.setattr(e11, "nonlinear_probes", cheating)
    with tqdm(disable=True) as progress:
        found = values(e11.random_labels(planted(8.0), "A", 200, 1, 0, progress))
    assert found["A", "n_detected"] == 2 and found["A", "largest_distance_from_chance"] == 0.5


# --- a real model -------------------------------------------------------------------------------------------------


@pytest.mark.slow  # loads SmolLM2-135M and reads 360 texts
def test_e1_on_a_real_model(monkeypatch):
    monkeypatch.setattr(features, "POOLINGS", ("mean_no_sink",))
    monkeypatch.setattr(features, "QUICK_DIMENSIONS", ("gender",))
    found = values(e1.run(quick=True))
    for dimension in features.QUICK_DIMENSIONS:
        at = f"smollm2-135m, mean_no_sink, {dimension}"
        assert found[at, "auc"] > 0.99  # 120 pairs; 0.999 is for all 340
        assert 0.55 < found[at, "auc_mixed_draws"] < 0.77
        assert found[at, "s_hat"] > 4 and found[at, "offset_over_half_s"] < 1
