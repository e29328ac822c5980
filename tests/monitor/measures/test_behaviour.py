from __future__ import annotations

import math
import re

import pytest
import torch

from monitor.activations import Answers, AnswerScores
from monitor.measures.behaviour import Behaviour
from monitor.stimuli.forget_set import Pair

V = 100
LN_V = math.log(V)


class FakeActivations:
    """The interface of Activations over a table answer -> per-token log-probabilities (and hits)."""

    n_layers, hidden_size, vocab_size = 4, 8, V

    def __init__(self, log_probs, greedy=None):
        self.log_probs = log_probs
        self.greedy = greedy or {}

    def answers(self, request):
        rows = [torch.tensor(self.log_probs[a], dtype=torch.float32) for a in request.answers]
        hits = [
            torch.tensor(self.greedy.get(a, [lp > math.log(0.5) for lp in self.log_probs[a]])) for a in request.answers
        ]
        return AnswerScores(log_probs=rows, greedy=hits)


def pairs(split, n):
    return [Pair(f"{split}-{i}", f"{split} q{i}?", f"{split}{i}", split) for i in range(n)]


PAIRS = {"forget": pairs("forget", 6), "retain": pairs("retain", 6), "heldout": pairs("heldout", 3)}


def nlls(forget=1.0, retain=1.0, heldout=3.0, spread=0.1):
    """Two tokens an answer; the i-th pair of a split has the mean NLL given plus spread times (i mod 3 - 1)."""
    return {
        f" {split}{i}": [-(value + spread * (i % 3 - 1))] * 2
        for split, value in (("forget", forget), ("retain", retain), ("heldout", heldout))
        for i in range(6)
    }


def read(now, reference, which=PAIRS, **options):
    as_activations = [a if isinstance(a, FakeActivations) else FakeActivations(a) for a in (now, reference)]
    readings = Behaviour(which, n_bootstrap=300, **options).read(*as_activations)
    return {r.metric: r for r in readings}


def test_one_request_a_split_with_the_question_format():
    forget, retain, heldout = Behaviour(PAIRS).stimuli
    assert all(isinstance(r, Answers) and not r.distribution for r in (forget, retain, heldout))
    assert forget.prompts[0] == "forget q0?\nAnswer:" and forget.answers[0] == " forget0"
    assert (len(retain.prompts), len(heldout.answers)) == (6, 3)


def test_readings_by_hand():
    which = {"forget": [Pair("1", "a?", "x", "forget"), Pair("2", "b?", "y", "forget")]}
    now = FakeActivations(
        {" x": [math.log(0.5), math.log(0.125)], " y": [math.log(0.25)] * 3},
        {" x": [False, True], " y": [True, True, False]},
    )
    reference = FakeActivations({" x": [math.log(0.5)] * 2, " y": [math.log(0.5)] * 3})
    got = read(now, reference, which)
    ln2 = math.log(2)
    # ℓ = (1 + 3)/2 ln 2 and 2 ln 2; the mean is over pairs, not over tokens.
    assert got["forget_nll"].value == pytest.approx(2 * ln2, rel=1e-6)
    assert got["forget_probability"].value == pytest.approx(0.25, rel=1e-6)
    assert got["forget_exact_memorisation"].value == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert got["forget_extraction_strength"].value == pytest.approx((1 / 2 + 0) / 2)
    assert got["forget_nll_change"].value == pytest.approx(ln2, rel=1e-6)
    assert got["collapsed"].value == 0.0
    assert set(got) == {
        "forget_nll",
        "forget_probability",
        "forget_exact_memorisation",
        "forget_extraction_strength",
        "forget_nll_change",
        "collapsed",
    }


def test_names_frames_and_headline():
    readings = Behaviour(PAIRS, n_bootstrap=50, name="says").read(FakeActivations(nlls()), FakeActivations(nlls()))
    assert len({r.name for r in readings}) == len(readings) == 3 * 5 + 1
    assert Behaviour(PAIRS).headline == ("forget_nll", "retain_nll", "heldout_nll", "collapsed")
    for r in readings:
        assert r.name == f"says/{r.metric}" and r.layer is None and r.valid and r.higher_means
        assert r.range[0] <= r.value <= r.range[1]
        if r.metric != "collapsed":
            assert r.low <= r.value <= r.high


def test_nothing_has_changed_against_itself():
    got = read(nlls(), nlls())
    for split in PAIRS:
        r = got[f"{split}_nll_change"]
        assert (r.value, r.low, r.high) == (0.0, 0.0, 0.0)


def test_the_change_is_paired():
    """Pairs differ by nats, all of them rose by 0.2: the paired interval has no width, the levels' overlap."""
    got = read(nlls(forget=2.2, spread=1.0), nlls(forget=2.0, spread=1.0))
    change, level = got["forget_nll_change"], got["forget_nll"]
    assert change.value == pytest.approx(0.2, abs=1e-6)
    assert change.high - change.low < 1e-6 and level.high - level.low > 0.5


@pytest.mark.parametrize(
    ("now", "collapsed", "note"),
    [
        (nlls(), 0.0, ""),
        (nlls(forget=LN_V - 0.01), 0.0, ""),
        (nlls(forget=LN_V + 0.01), 1.0, "forget NLL"),
        (nlls(retain=1.99), 0.0, ""),
        (nlls(retain=2.01), 1.0, "retain NLL"),
        (nlls(forget=LN_V + 1, retain=9), 1.0, "forget NLL .* retain NLL"),
        (nlls(heldout=50), 0.0, ""),  # never seen: says nothing about collapse
    ],
)
def test_collapse(now, collapsed, note):
    r = read(now, nlls())["collapsed"]
    assert r.value == collapsed and r.valid and (r.low, r.high) == (None, None)
    if note:
        assert re.search(note, r.note)
    else:
        assert r.note == ""


@pytest.mark.parametrize(("retain", "collapsed"), [(0.0064, 0.0), (0.69, 0.0), (0.70, 1.0)])
def test_answers_known_by_heart_have_to_become_half_as_likely(retain, collapsed):
    """0.0064 is four times 0.0015 nats, and next to nothing: the answer is as certain as it was."""
    assert read(nlls(retain=retain, spread=0.0), nlls(retain=0.0015, spread=0.0))["collapsed"].value == collapsed


def test_a_retain_nll_of_zero_that_stays_is_no_collapse():
    certain = nlls(retain=0.0, spread=0.0)
    assert read(certain, certain)["collapsed"].value == 0.0


def test_a_model_whose_numbers_are_not_finite_has_collapsed():
    broken = nlls() | {" forget2": [float("nan"), -1.0]}
    got = read(broken, nlls())
    for metric in ("nll", "probability", "exact_memorisation", "extraction_strength", "nll_change"):
        r = got[f"forget_{metric}"]
        assert r.value is None and not r.valid and "1 of 6 pairs are not finite, the first at 2" in r.note
    assert got["collapsed"].value == 1.0 and "forget NLL is not finite" in got["collapsed"].note
    assert got["retain_nll"].valid


def test_a_broken_reference_spoils_changes_only():
    got = read(nlls(), nlls() | {" retain1": [float("nan"), -1.0]})
    assert got["retain_nll"].valid and not got["retain_nll_change"].valid
    assert got["collapsed"].value == 0.0 and "reference's retain NLL is not finite" in got["collapsed"].note


def test_a_single_pair_has_no_interval():
    got = read(nlls(), nlls(), {"forget": PAIRS["forget"][:1]})
    assert got["forget_nll"].valid and got["forget_nll"].low is None


def test_held_out_pairs_alone_cannot_show_collapse():
    measure = Behaviour({"heldout": PAIRS["heldout"]})
    assert measure.headline == ("heldout_nll",)
    assert "collapsed" not in read(nlls(), nlls(), {"heldout": PAIRS["heldout"]})


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    read(nlls(), nlls(2.0))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ({}, "keys among forget, retain, heldout, got none"),
        ({"forgotten": PAIRS["forget"]}, r"got \['forgotten'\]"),
        ({"forget": []}, r"pairs\['forget'\] must hold at least one pair"),
        (
            {"forget": [Pair(f"p{i}", "a?", answer, "forget") for i, answer in enumerate(("b", " ", ""))]},
            r"pairs\['forget'\] must not have blank answers, got 2: p1, p2",
        ),
        ({"retain": [Pair("r1", "", "b", "retain")]}, r"pairs\['retain'\] must not have blank questions, got 1: r1"),
    ],
)
def test_bad_pairs(which, message):
    with pytest.raises(ValueError, match=message):
        Behaviour(which)


def test_bad_options():
    with pytest.raises(ValueError, match="n_bootstrap must be at least 1, got 0"):
        Behaviour(PAIRS, n_bootstrap=0)
