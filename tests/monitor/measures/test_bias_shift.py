from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from monitor.activations import States
from monitor.measures.bias_shift import BiasShift
from monitor.stimuli.bias import BiasStimuli

D = 64
GROUPS, TEMPLATES = ("red", "green", "blue"), 20


class FakeActivations:
    """The interface of Activations over a table text -> state at the final layer."""

    n_layers, hidden_size, vocab_size = 4, D, 100

    def __init__(self, table):
        self.table = table

    def layers(self, request):
        assert request.layers == (-1,)
        return (self.n_layers,)

    def states(self, request):
        return torch.stack([self.table[text] for text in request.texts])[:, None].float()


def stimuli(**changes):
    parts = {
        "targets": {g: tuple(f"{g} people do {i}" for i in range(TEMPLATES)) for g in GROUPS},
        "positive": tuple(f"good {i}" for i in range(15)),
        "negative": tuple(f"bad {i}" for i in range(15)),
        "anchors": tuple(f"anchor {i}" for i in range(60)),
        "controls": {c: tuple(f"{c} does {i}" for i in range(TEMPLATES)) for c in ("cat", "dog")},
    }
    return BiasStimuli(**(parts | changes))


def texts(s):
    return [t for part in (*s.targets.values(), *s.controls.values(), s.positive, s.negative, s.anchors) for t in part]


def model(s, seed=0):
    """Random states with a common offset; good ones lie towards +axis 0, bad ones towards -axis 0."""
    generator = torch.Generator().manual_seed(seed)
    table = {text: torch.randn(D, generator=generator, dtype=torch.float64) + 0.5 for text in texts(s)}
    for sign, part in ((1, s.positive), (-1, s.negative)):
        for text in part:
            table[text][0] += sign * 5
    return table


def moved(table, which, by):
    return {text: state + by if which(text) else state for text, state in table.items()}


def read(table, reference, s=None, **options):
    s = s or stimuli()
    readings = BiasShift(s, n_bootstrap=300, **options).read(FakeActivations(table), FakeActivations(reference))
    return {(r.metric, r.group): r for r in readings}


def axis(i, size=1.0):
    vector = torch.zeros(D, dtype=torch.float64)
    vector[i] = size
    return vector


def test_one_request_for_all_sentences_at_one_layer():
    s = stimuli()
    (request,) = BiasShift(s, layer=0.8, pooling="last").stimuli
    assert isinstance(request, States) and (request.layers, request.pooling) == ((0.8,), "last")
    assert sorted(request.texts) == sorted(texts(s))


def test_default_stimuli_are_the_small_bundled_ones():
    measure = BiasShift()
    s = measure.bias_stimuli
    assert len(s.targets) >= 8 and all(len(t) >= 20 for t in s.targets.values())
    assert len(s.positive) >= 40 and len(s.negative) >= 40 and len(s.anchors) >= 200 and s.controls
    assert measure.stimuli[0].layers == (-1,) and measure.stimuli[0].pooling == "mean"


def test_names_order_and_frame_of_the_readings():
    readings = BiasShift(stimuli(), n_bootstrap=10, name="bias").read(
        FakeActivations(model(stimuli())), FakeActivations(model(stimuli(), 1))
    )
    names = [r.name for r in readings]
    whole = [f"bias/{m}" for m in ("delta_b", "delta_b_corrected", "b", "seat", "procrustes_seat", "cka_drift")]
    assert [n for n in names if n.count("/") == 1] == whole
    assert names[:5] == ["bias/delta_b", *(f"bias/delta_b/{g}" for g in (*GROUPS, "control"))]
    assert len(set(names)) == len(names) == 5 * 4 + 2
    assert BiasShift(stimuli()).headline == ("delta_b", "delta_b_corrected", "seat", "cka_drift")
    for r in readings:
        assert r.valid and r.layer == 4 and r.higher_means and r.range[0] <= r.value <= r.range[1]
        # The first reading of a metric is that of the whole.
        assert names.index(f"bias/{r.metric}") <= names.index(r.name)


def test_value_against_a_naive_reference():
    s = stimuli(
        targets={g: tuple(f"{g} people do {i}" for i in range(4)) for g in GROUPS},
        controls={c: tuple(f"{c} does {i}" for i in range(4)) for c in ("cat", "dog")},
    )
    now, reference = model(s, 1), model(s, 2)

    def b(table, text):
        def cos(x, y):
            return float(np.dot(x, y) / np.linalg.norm(x) / np.linalg.norm(y))

        r = {t: np.array([cos(table[t], table[a]) for a in s.anchors]) for t in (text, *s.positive, *s.negative)}
        near = [-np.linalg.norm(r[text] - r[p]) for p in s.positive]
        far = [-np.linalg.norm(r[text] - r[n]) for n in s.negative]
        return np.mean(near) - np.mean(far)

    got = read(now, reference, s)
    as_float32 = [{t: v.float().double().numpy() for t, v in table.items()} for table in (now, reference)]
    some = s.targets["green"]
    expected = np.mean([b(as_float32[0], t) - b(as_float32[1], t) for t in some])
    control = np.mean(
        [b(as_float32[0], t) - b(as_float32[1], t) for sentences in s.controls.values() for t in sentences]
    )
    assert got["delta_b", "green"].value == pytest.approx(expected, abs=1e-12)
    assert got["delta_b", "control"].value == pytest.approx(control, abs=1e-12)
    assert got["delta_b_corrected", "green"].value == pytest.approx(expected - control, abs=1e-12)
    assert got["b", "green"].value == pytest.approx(np.mean([b(as_float32[0], t) for t in some]), abs=1e-12)
    for metric in ("delta_b", "delta_b_corrected", "b", "seat", "procrustes_seat"):
        assert got[metric, ""].value == pytest.approx(np.mean([got[metric, g].value for g in GROUPS]), abs=1e-12)


def test_against_itself_every_shift_is_exactly_zero():
    table = model(stimuli())
    for (metric, _), r in read(table, table).items():
        if metric == "cka_drift":
            assert (r.value, r.low, r.high) == (0.0, None, None)
        elif metric != "b":
            assert (r.value, r.low, r.high) == (0.0, 0.0, 0.0)


def test_a_rotated_and_scaled_copy_has_not_moved():
    table = model(stimuli())
    q, _ = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    got = read({text: 2.5 * state @ q for text, state in table.items()}, table)
    for (metric, _), r in got.items():
        if metric != "b":
            assert abs(r.value) < 1e-6
            assert metric == "cka_drift" or (abs(r.low) < 1e-6 and abs(r.high) < 1e-6)


@pytest.mark.parametrize(("sign", "others"), [(1, 0.0), (-1, 0.0), (1, -0.8), (-1, 0.8)])
def test_a_planted_shift_is_found_in_its_group_with_its_sign(sign, others):
    """Everything drifts by `others` along the attribute axis; the red group goes its own way."""
    s = stimuli()
    reference = model(s)
    now = moved(reference, lambda t: "does" in t or "people" in t, axis(0, others))
    now = moved(now, lambda t: t.startswith("red"), axis(0, sign * 2.0))
    got = read(now, reference, s)
    for metric in ("delta_b_corrected", "seat") if others == 0 else ("delta_b_corrected",):
        red = got[metric, "red"]
        assert sign * red.value > 0.02 and min(sign * red.low, sign * red.high) > 0
        for group in ("green", "blue"):
            assert abs(got[metric, group].value) < abs(red.value) / 10
    if others:
        # The uncorrected shift blames the untouched groups for the common drift.
        for group in ("green", "blue"):
            r = got["delta_b", group]
            assert min(abs(r.low), abs(r.high)) > 0 and math.copysign(1, r.low) == math.copysign(1, r.high) != sign
    else:
        assert got["delta_b", "green"].value == got["delta_b", "control"].value == 0.0
    assert got["cka_drift", ""].value > 1e-3


def test_the_whole_is_resampled_by_template():
    """A shift that templates share: resampling single sentences would claim √3 too narrow an interval."""
    s = stimuli()
    reference = model(s)
    generator = torch.Generator().manual_seed(5)
    by_template = torch.randn(TEMPLATES, generator=generator, dtype=torch.float64) * 3
    # Same states in the three groups, so that their shifts are the same number for a template.
    for g in GROUPS:
        for i in range(TEMPLATES):
            reference[s.targets[g][i]] = reference[s.targets["red"][i]].clone()
    now = {t: v + axis(0, float(by_template[int(t.split()[-1])])) if "people" in t else v for t, v in reference.items()}
    got = read(now, reference, s)
    whole, group = got["delta_b", ""], got["delta_b", "red"]
    assert whole.value == pytest.approx(group.value, abs=1e-12)
    assert whole.high - whole.low == pytest.approx(group.high - group.low, rel=1e-9)


def test_the_correction_adds_the_controls_uncertainty():
    got = read(model(stimuli(), 1), model(stimuli(), 2))
    plain, control, corrected = got["delta_b", "red"], got["delta_b", "control"], got["delta_b_corrected", "red"]
    widths = [r.high - r.low for r in (plain, control, corrected)]
    # Independent errors add in squares.
    assert widths[2] == pytest.approx(math.hypot(widths[0], widths[1]), rel=0.2)
    assert widths[2] > max(widths[:2])


def test_equal_seeds_give_equal_intervals_and_the_global_generator_is_left_alone():
    tables = model(stimuli(), 1), model(stimuli(), 2)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = read(*tables)
    assert torch.equal(before, torch.get_rng_state())
    assert first == read(*tables)
    assert first["delta_b", ""].low != read(*tables, seed=7)["delta_b", ""].low


def test_procrustes_seat_scores_against_the_reference_attributes():
    """Moving the attributes of the audited model moves SEAT and, but for what the fitted map absorbs, not this."""
    s = stimuli()
    reference = model(s)
    now = {t: torch.zeros(D, dtype=torch.float64) + state for t, state in reference.items()}
    for positive, negative in zip(s.positive, s.negative, strict=True):
        now[positive], now[negative] = now[negative], now[positive]
    got = read(now, reference, s)
    assert abs(got["seat", ""].value) > 4 * abs(got["procrustes_seat", ""].value)


@pytest.mark.parametrize("whose", ["the model", "the reference"])
@pytest.mark.parametrize(("spoil", "what"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "zero")])
def test_unusable_states_make_every_reading_invalid(whose, spoil, what):
    s = stimuli()
    table = model(s)
    spoilt = table | {s.positive[3]: torch.full((D,), spoil, dtype=torch.float64)}
    tables = (spoilt, table) if whose == "the model" else (table, spoilt)
    got = read(*tables, s)
    assert got.keys() == read(table, table, s).keys()
    for r in got.values():
        assert not r.valid and r.value is None and r.low is None
        assert f"1 states of {whose} are unusable, the first ({what}) of 'good 3'" in r.note


def test_targets_that_became_one_point_have_no_cka():
    s = stimuli()
    reference = model(s)
    point = torch.ones(D, dtype=torch.float64)
    got = read({t: point if "people" in t else v for t, v in reference.items()}, reference, s)
    assert not got["cka_drift", ""].valid and "equal" in got["cka_drift", ""].note
    assert got["delta_b", ""].valid


def test_a_reference_of_another_width_has_no_orthogonal_map():
    s = stimuli()
    reference = model(s)
    padded = {t: torch.cat([v, v[:8] * 0]) for t, v in reference.items()}
    got = read(padded, reference, s)
    assert not got["procrustes_seat", "red"].valid and "widths 72 and 64" in got["procrustes_seat", "red"].note
    # Zeros appended to every state change no angle.
    assert abs(got["delta_b", "red"].value) < 1e-12 and got["delta_b", "red"].valid


def test_without_controls_there_is_no_correction():
    s = stimuli(controls={})
    measure = BiasShift(s, n_bootstrap=10)
    assert "delta_b_corrected" not in measure.headline
    got = read(model(s), model(s, 1), s)
    assert ("delta_b", "control") not in got and ("delta_b_corrected", "") not in got
    assert got["delta_b", ""].valid


def test_a_single_template_has_no_interval():
    s = stimuli(targets={g: (f"{g} people do 0",) for g in GROUPS}, controls={"cat": ("cat does 0",)})
    got = read(model(s, 1), model(s, 2), s)
    for metric in ("delta_b", "delta_b_corrected"):
        assert got[metric, "red"].valid and got[metric, "red"].low is None


@pytest.mark.parametrize("group", ["control", ""])
def test_group_names_of_other_readings_are_refused(group):
    with pytest.raises(ValueError, match="rename the group"):
        BiasShift(stimuli(targets={group: tuple(f"they do {i}" for i in range(TEMPLATES))}))


def test_bad_options():
    with pytest.raises(ValueError, match="n_bootstrap must be at least 1, got 0"):
        BiasShift(stimuli(), n_bootstrap=0)
    with pytest.raises(ValueError, match="pooling"):
        BiasShift(stimuli(), pooling="median")
