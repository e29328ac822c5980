"""Verdicts on planted signals, and the readings of a group against what they are defined as."""

from __future__ import annotations

import math

import pytest
import torch

from monitor.activations import States
from monitor.geometry.auc import auc
from monitor.geometry.detection import detection_p
from monitor.geometry.probes import logistic_probes
from monitor.geometry.purity import auc_max
from monitor.geometry.separation import crossfitted_separation
from monitor.measures.detectability import Detectability
from monitor.stimuli.counterfactual import CounterfactualSet

D, CELLS, LAYERS = 24, 200, 4


def stimuli(name="group", cells=CELLS, **changes):
    parts = {
        "positive": tuple(f"{name} a {i}" for i in range(cells)),
        "negative": tuple(f"{name} b {i}" for i in range(cells)),
        "cells": tuple(f"context {i % 20}/{i}" for i in range(cells)),
        "neutral": tuple(f"neutral {h} {i}" for h in "xy" for i in range(cells)),
        "neutral_cells": tuple(f"context {i % 20}/{i}" for h in "xy" for i in range(cells)),
    }
    return CounterfactualSet(**(parts | changes))


class FakeActivations:
    """The interface of Activations over a table text -> [layers, d], at hidden states 0..LAYERS."""

    n_layers, hidden_size = LAYERS, D

    def __init__(self, table):
        self.table = table

    def layers(self, request: States):
        return tuple(range(LAYERS + 1)) if request.layers == "all" else (2,)

    def states(self, request: States):
        states = torch.stack([self.table[text] for text in request.texts])
        return states if request.layers == "all" else states[:, 2:3]


def table(*sets, separation=0.0, seed=0, context=0.5, layers=LAYERS + 1):
    """Unit within-class noise, cell effects, and classes `separation` apart along one direction, at every layer."""
    generator = torch.Generator().manual_seed(seed)
    states = {}
    for s in sets:
        direction = torch.randn(D, generator=generator)
        direction = direction / direction.norm()
        of_cell = {c: torch.randn(layers, D, generator=generator) for c in dict.fromkeys((*s.cells, *s.neutral_cells))}
        sides = [(s.positive, s.cells, 0.5), (s.negative, s.cells, -0.5), (s.neutral, s.neutral_cells, 0.0)]
        for texts, cells, side in sides:
            for text, cell in zip(texts, cells, strict=True):
                noise = torch.randn(layers, D, generator=generator)
                mixed = context * of_cell[cell] + math.sqrt(1 - context**2) * noise
                states.setdefault(text, mixed + side * separation * direction)
    return states


def read(measure, now, reference=None):
    readings = measure.read(FakeActivations(now), FakeActivations(now if reference is None else reference))
    by_name = {}
    for r in readings:
        by_name.setdefault((r.metric, r.group), r)  # the first is the headline
    return by_name


def word(reading):
    return reading.note.split(":")[0]


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_signal_above_the_frontier_is_detected():
    s = stimuli()
    measure = Detectability({"group": s}, smallest_effect=1.5)
    found = [read(measure, table(s, separation=1.5, seed=seed)) for seed in range(40)]
    assert sum(word(f["verdict", "group"]) == "detected" for f in found) >= 38


@pytest.mark.slow
def test_no_signal_with_enough_texts_is_not_detected():
    s = stimuli()
    measure = Detectability({"group": s}, smallest_effect=1.5)
    found = [read(measure, table(s, separation=0.0, seed=seed)) for seed in range(40)]
    assert sum(word(f["verdict", "group"]) == "not detected" for f in found) >= 38
    assert all(f["planted_power", "group"].value >= 0.8 for f in found if f["planted_power", "group"].valid)


@pytest.mark.slow
def test_signal_below_the_frontier_is_underpowered_and_never_a_null_result():
    s = stimuli(cells=60)
    measure = Detectability({"group": s}, smallest_effect=0.8, purity=0.1, n=100)
    found = [read(measure, table(s, separation=0.8, seed=seed)) for seed in range(40)]
    words = [word(f["verdict_mixed", "group"]) for f in found]
    assert words.count("underpowered") >= 38
    assert "not detected" not in words
    note = next(f["verdict_mixed", "group"].note for f in found if word(f["verdict_mixed", "group"]) == "underpowered")
    assert "n = " in note and "no null result" in note


def test_a_probe_that_could_not_have_told_makes_a_null_underpowered_though_the_closed_form_has_power():
    # 60 pairs, s = 0.9: an optimal probe would see it with power above 0.8, one trained in 24 dimensions would not.
    s = stimuli(cells=60, neutral=(), neutral_cells=())
    found = read(Detectability({"group": s}, smallest_effect=0.9), table(s, seed=3))
    assert word(found["verdict", "group"]) == "underpowered"
    assert found["planted_power", "group"].value < 0.8
    assert "planted" in found["verdict", "group"].note


def test_the_verdict_is_a_number_with_its_word():
    s = stimuli()
    found = read(Detectability({"group": s}), table(s, separation=3.0))
    assert found["verdict", "group"].value == 1.0 and word(found["verdict", "group"]) == "detected"
    assert found["n_detected", ""].value == 1.0
    assert ("planted_power", "group") not in found  # nothing to excuse


# --- what the readings are --------------------------------------------------------------------------------------------


def test_readings_are_what_they_are_defined_as():
    s = stimuli()
    states = table(s, separation=2.0)
    measure = Detectability({"group": s}, n=200, purity=0.4, seed=5)
    found = read(measure, states)
    (plan,) = measure._designs.values()
    x = torch.stack([states[text][2] for text in s.texts])
    full, mixed = plan.regimes
    expected = float(crossfitted_separation(x[full.rows], full.labels, full.groups, seed=5))
    assert found["s_hat", "group"].value == pytest.approx(expected, rel=1e-9)
    for regime, suffix in ((full, ""), (mixed, "_mixed")):
        area = float(auc(logistic_probes(x[regime.rows], regime.labels, regime.folds), regime.labels).mean())
        assert found["auc" + suffix, "group"].value == pytest.approx(area, abs=1e-9)
        p = float(detection_p(area, regime.n // 2, regime.n // 2))
        assert found["auc_p" + suffix, "group"].value == pytest.approx(p, rel=1e-6)
    offset = found["offset", "group"].value
    assert found["predicted_auc_mixed", "group"].value == pytest.approx(auc_max(expected, 0.4, offset))
    gap = found["predicted_auc_mixed", "group"].value - found["auc_mixed", "group"].value
    assert found["purity_gap_mixed", "group"].value == pytest.approx(gap)
    assert mixed.n == 200 and mixed.purity == pytest.approx(0.4)


def test_separation_interval_holds_the_truth_and_the_estimate():
    s = stimuli(cells=400)
    covered = 0
    for seed in range(20):
        found = read(Detectability({"group": s}, n=200), table(s, separation=2.0, seed=seed, context=0.0))[
            "s_hat", "group"
        ]
        assert found.low <= found.value <= found.high
        covered += found.low <= 2.0 <= found.high
    assert covered >= 17


def test_a_fall_in_separation_shows_as_a_change_with_its_interval():
    s = stimuli()
    before, now = table(s, separation=4.0), table(s, separation=1.0)
    change = read(Detectability({"group": s}), now, before)
    assert change["s_change", "group"].high < 0
    assert change["auc_change", "group"].value < 0
    assert change["s_change", ""].value == pytest.approx(change["s_change", "group"].value)


def test_against_itself_every_change_is_exactly_zero():
    s = stimuli()
    found = read(Detectability({"group": s}), table(s, separation=1.0))
    reading = found["s_change", "group"]
    assert (reading.value, reading.low, reading.high) == (0.0, 0.0, 0.0)
    assert found["auc_change", "group"].value == 0.0 and found["auc_change_mixed", "group"].value == 0.0


def test_family_correction_covers_all_groups_and_regimes_of_a_checkpoint():
    sets = {name: stimuli(name) for name in ("one", "two")}
    states = table(*sets.values(), separation=0.3)
    corrected = read(Detectability(sets), states)
    for name in sets:
        for suffix in ("", "_mixed"):
            raw = corrected["auc_p" + suffix, name].value
            assert corrected["auc_p_adjusted" + suffix, name].value == pytest.approx(min(1.0, 4 * raw))
    plain = read(Detectability(sets, correction="none"), states)
    assert plain["auc_p_adjusted", "one"].value == plain["auc_p", "one"].value
    assert corrected["s_hat", ""].value == pytest.approx(
        (corrected["s_hat", "one"].value + corrected["s_hat", "two"].value) / 2
    )


def test_scan_reads_every_layer_after_the_headline_one():
    s = stimuli()
    states = table(s, separation=1.0)
    for text in s.positive:  # layer 4 carries more
        states[text][4] += 3.0
    readings = Detectability({"group": s}, scan=True).read(FakeActivations(states), FakeActivations(states))
    layers = [r.layer for r in readings if (r.metric, r.group) == ("s_hat", "group")]
    assert layers == [2, 0, 1, 3, 4]
    values = {r.layer: r.value for r in readings if (r.metric, r.group) == ("s_hat", "group")}
    assert values[4] > values[2] + 1
    notes = {r.layer: r.note for r in readings if (r.metric, r.group) == ("auc_p_adjusted", "group")}
    assert notes[2] == "bonferroni, 2 tests" and notes[4] == "bonferroni, 8 tests"
    assert sum(r.metric == "verdict" for r in readings) == 1


def test_set_without_neutral_texts_is_read_on_its_pairs_alone():
    s = stimuli(neutral=(), neutral_cells=())
    found = read(Detectability({"group": s}), table(s, separation=2.0))
    assert found["n_detected", ""].value == 1.0
    assert not any(metric.endswith("_mixed") or metric == "offset" for metric, _ in found)


def test_means_are_over_the_groups_that_have_a_mixture():
    sets = {"with": stimuli("with"), "without": stimuli("without", neutral=(), neutral_cells=())}
    found = read(Detectability(sets), table(*sets.values(), separation=2.0))
    assert found["auc_mixed", ""].value == pytest.approx(found["auc_mixed", "with"].value)
    assert "1 of 2 groups" in found["auc_mixed", ""].note and "2 of 2 groups" in found["s_hat", ""].note


def test_stereotypes_of_neutral_texts_are_read_by_the_probe_of_the_marked_ones():
    s = stimuli()
    s = stimuli(stereotypes=tuple(1 if int(c.split()[1].split("/")[0]) < 10 else 0 for c in s.neutral_cells))
    states = table(s, separation=3.0)
    direction = torch.stack([states[t][2] for t in s.positive]).mean(0) - torch.stack(
        [states[t][2] for t in s.negative]
    ).mean(0)
    neutral = read(Detectability({"group": s}), states)["neutral_leakage", "group"]
    assert neutral.low < 0.5 < neutral.high
    for text, stereotype in zip(s.neutral, s.stereotypes, strict=True):
        states[text] = states[text] + (stereotype - 0.5) * direction
    leaning = read(Detectability({"group": s}), states)["neutral_leakage", "group"]
    assert leaning.value > 0.9 and leaning.low > 0.5
    assert "20 contents" in leaning.note


def test_nonlinear_probes_are_read_at_the_headline_layer():
    s = stimuli(cells=40)
    found = read(Detectability({"group": s}, n=60, probes=("linear", "svm")), table(s, separation=4.0))
    assert found["auc_svm", "group"].value > 0.9 and ("auc_mlp", "group") not in found


# --- bad input and bad states -----------------------------------------------------------------------------------------


def test_states_that_are_not_finite_are_invalid_readings_that_name_the_text():
    sets = {name: stimuli(name) for name in ("one", "two")}
    states = table(*sets.values(), separation=3.0)
    broken = dict(states)
    broken["one a 7"] = torch.full((LAYERS + 1, D), math.nan)
    found = read(Detectability(sets), broken, states)
    assert not found["verdict", "one"].valid and "one a 7" in found["verdict", "one"].note
    assert found["verdict", "two"].value == 1.0
    assert not found["n_detected", ""].valid and "one" in found["n_detected", ""].note


def test_a_scan_reads_the_layers_that_are_finite():
    s = stimuli()
    states = table(s, separation=3.0)
    broken = {text: value.clone() for text, value in states.items()}
    broken["group a 7"][3] = math.inf
    readings = Detectability({"group": s}, scan=True).read(FakeActivations(broken), FakeActivations(states))
    found = {(r.metric, r.layer): r for r in readings if r.group == "group"}
    assert found["verdict", 2].value == 1.0
    assert not found["s_hat", 3].valid and "group a 7" in found["auc", 3].note
    alone = Detectability({"group": s}, scan=True).read(FakeActivations(states), FakeActivations(states))
    for reading in alone:
        if reading.group == "group" and reading.layer != 3 and reading.metric in ("s_hat", "auc", "auc_mixed"):
            assert found[reading.metric, reading.layer].value == pytest.approx(reading.value)
    assert {r.layer for r in readings if r.metric == "auc" and r.valid and r.group} == {0, 1, 2, 4}


def test_an_effect_too_small_for_any_number_of_texts_is_said_to_be():
    s = stimuli(cells=40)
    found = read(Detectability({"group": s}, n=60, smallest_effect=1e-9), table(s))
    assert found["verdict", "group"].value == -1.0 and "samples" in found["verdict", "group"].note


# --- cells of several pairs -------------------------------------------------------------------------------------------


def shared_contrasts(n_cells, pairs, tau, seed, effect=0.0):
    """Pairs of a cell differ by the same random vector, whose mean over cells is the effect along one axis."""
    texts = [(f"{side} {c} {i}", c) for side in ("p", "n") for c in range(n_cells) for i in range(pairs)]
    positive, negative = ([text for text, _ in texts if text[0] == side] for side in ("p", "n"))
    s = CounterfactualSet(positive, negative, [str(c) for text, c in texts if text[0] == "p"])
    generator = torch.Generator().manual_seed(seed)
    contrast = tau * torch.randn(n_cells, D, generator=generator)
    contrast[:, 0] += effect
    states = {}
    for text, c in texts:
        sign = 0.5 if text[0] == "p" else -0.5
        states[text] = (sign * contrast[c] + torch.randn(D, generator=generator)).expand(LAYERS + 1, D)
    return s, states


def verdicts(n_cells, pairs, tau, effect=0.0, draws=40):
    found = []
    for seed in range(draws):
        s, states = shared_contrasts(n_cells, pairs, tau, seed, effect)
        found.append(read(Detectability({"group": s}, n_seeds=2), states)["verdict", "group"].value)
    return found


@pytest.mark.slow
def test_repeating_a_contrast_proves_nothing():
    """Twenty cells, ten pairs each, that differ by what their cell has drawn: the groups do not differ."""
    repeated = verdicts(20, 10, tau=1.0)
    assert repeated.count(1.0) <= 4  # at a level of .05; without regard to cells 14 of these 40
    assert repeated.count(-1.0) >= 28  # nor is it evidence of absence: there are but twenty contrasts


def test_an_effect_that_cells_share_is_found():
    assert verdicts(20, 10, tau=0.3, effect=3.0, draws=5).count(1.0) == 5


def test_states_that_do_not_vary_are_invalid_readings():
    s = stimuli()
    states = {text: torch.ones(LAYERS + 1, D) for text in s.texts}
    found = read(Detectability({"group": s}), states)
    assert all(math.isfinite(r.value) for r in found.values() if r.valid)
    assert found["verdict", "group"].value != 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sets": {}}, "sets must name at least one"),
        ({"sets": {"a/b": stimuli()}}, "'/'"),
        ({"sets": {"a": ["text"]}}, "CounterfactualSet"),
        ({"purity": 0.0}, "purity"),
        ({"purity": 1.5}, "purity"),
        ({"n": 5000}, "largest n at this purity"),
        ({"n": 301}, "even"),
        ({"smallest_effect": 0.0}, "smallest_effect"),
        ({"level": 1.0}, "level"),
        ({"level": 0.9}, "power must be above level"),
        ({"layer": 1.5}, "layer as a fraction"),
        ({"layer": math.nan}, "layer as a fraction"),
        ({"device": "tpu9"}, "device must be one that this machine has"),
        ({"sets": [stimuli()]}, "must be a mapping of group names"),
        ({"sets": "gender"}, "must be a mapping of group names"),
        ({"sets": {"few": stimuli(cells=9)}}, "at least 10 cells, got 9"),
        ({"power": 0.0}, "power"),
        ({"correction": "holm"}, "correction must be one of"),
        ({"probes": ("linear", "tree")}, "probes"),
        ({"layer": "all"}, "scan=True"),
        ({"pooling": "median"}, "pooling"),
        ({"n_folds": 1}, "n_folds"),
        ({"n_seeds": 0}, "n_seeds"),
    ],
)
def test_bad_parameters(options, message):
    options = {"sets": {"group": stimuli()}} | options
    with pytest.raises(ValueError, match=message):
        Detectability(options.pop("sets"), **options)


def test_global_random_state_is_left_alone():
    s = stimuli(cells=40)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    read(Detectability({"group": s}, n=60), table(s))
    assert torch.equal(torch.get_rng_state(), before)
