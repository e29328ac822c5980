"""A resumed run says what it measures otherwise than before."""

import json
import warnings

import pytest

from monitor.measure_settings import warn_of_changes, write_settings
from monitor.measures.behaviour import Behaviour
from monitor.measures.bias_shift import BiasShift
from monitor.measures.detectability import Detectability
from monitor.measures.fragmentation import Fragmentation
from monitor.stimuli.counterfactual_grid import load_counterfactual_sets
from monitor.stimuli.forget_set import Pair

PAIRS = [
    Pair(
        f"p{i}",
        f"Where does Ada{i} live?",
        f"Ada{i} lives at sea",
        "forget",
        ((f"Where does Bo{i} live?", "at sea"),) * 2,
    )
    for i in range(10)
]
GENDER = load_counterfactual_sets(("gender",))


@pytest.mark.parametrize(
    ("make", "setting", "value"),
    [
        (BiasShift, "seed", 1),
        (BiasShift, "layer", 0.5),
        (lambda **options: Behaviour({"forget": PAIRS}, **options), "n_bootstrap", 10),
        (lambda **options: Fragmentation(PAIRS, **options), "batches", 5),
        (lambda **options: Detectability(GENDER, **options), "purity", 0.5),
        (lambda **options: Detectability(GENDER, **options), "n", 200),
        (lambda **options: Detectability(GENDER, **options), "probes", ("linear", "svm")),
    ],
)
def test_every_measure_tells_its_settings_apart(make, setting, value, tmp_path):
    file = tmp_path / "measures.json"
    write_settings(file, [make()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_changes(file, [make()], 3)
    with pytest.warns(UserWarning, match=f"from step 3 on.*`{setting}` was"):
        warn_of_changes(file, [make(**{setting: value})], 3)


def test_a_measure_by_another_name_is_missing_and_new(tmp_path):
    file = tmp_path / "measures.json"
    write_settings(file, [BiasShift()])
    with pytest.warns(UserWarning, match="bias_shift is not measured any more; other is new"):
        warn_of_changes(file, [BiasShift(name="other")], 3)
    assert list(json.loads(file.read_text())) == ["bias_shift"]


def test_a_run_from_before_there_was_such_a_file_is_silent(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_changes(tmp_path / "measures.json", [BiasShift()], 3)
