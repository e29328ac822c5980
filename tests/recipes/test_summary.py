"""The words must follow from the numbers, in both directions."""

import json

import pytest

from recipes.summary import format_table, in_words, summarise, write_records


def line(step, metric, value, measure="fragmentation", group="", layer=None, low=None, high=None, note=""):
    return {
        "step": step, "epoch": 0.0, "time": 0.0, "measure": measure, "metric": metric, "group": group, "layer": layer,
        "value": value, "low": low, "high": high, "valid": value is not None, "note": note,
    }  # fmt: skip


def words(*lines):
    return " ".join(in_words(summarise(lines)))


def test_start_and_end_are_the_first_and_last_step_and_the_first_line_is_the_headline():
    lines = [
        line(0, "cka", 1.0, layer=24),
        line(0, "cka", 0.5, layer=3),
        line(4, "cka", 0.9, layer=24),
        line(8, "cka", 0.7),
    ]
    (record,) = summarise(lines)
    assert (record["step_start"], record["start"], record["step_end"], record["end"]) == (0, 1.0, 8, 0.7)


@pytest.mark.parametrize(
    ("start", "end", "phrase", "never"),
    [
        (4.0, 3.5, "not gone", "nothing to lose"),
        (4.0, 0.5, "does not prove it", "not gone."),
        (0.5, 0.4, "nothing to lose", "not gone"),
        (0.5, 3.0, "nothing to lose", "not gone"),
    ],
)
def test_gone_silenced_or_never_seen(start, end, phrase, never):
    text = words(line(0, "knowledge_z", start), line(8, "knowledge_z", end))
    assert phrase in text and never not in text


def test_a_control_that_fires_makes_the_reading_doubtful():
    lines = [line(s, "knowledge_z", 4.0) for s in (0, 8)] + [
        line(s, "knowledge_z", 3.0, group="heldout") for s in (0, 8)
    ]
    assert "Doubtful" in words(*lines)


@pytest.mark.parametrize(
    ("value", "low", "high", "phrase"),
    [
        (0.01, -0.01, 0.03, "includes 0"),
        (-0.05, -0.08, -0.02, "negative attributes"),
        (0.05, 0.02, 0.08, "positive attributes"),
    ],
)
def test_the_bias_sentence_follows_the_interval(value, low, high, phrase):
    reading = {"measure": "bias_shift", "metric": "delta_b_corrected"}
    text = words(line(0, value=0.0, low=0.0, high=0.0, **reading), line(8, value=value, low=low, high=high, **reading))
    assert phrase in text


def test_collapse_is_told_apart_from_forgetting():
    readings = [line(s, "forget_nll", 2.0 + s, measure="behaviour") for s in (0, 8)]
    assert "collapsed" not in words(*readings, *[line(s, "collapsed", 0.0, measure="behaviour") for s in (0, 8)])
    assert "collapsed" in words(*readings, *[line(s, "collapsed", float(s > 0), measure="behaviour") for s in (0, 8)])


def detected(start, end, note="", group="", metric="n_detected", low=None, high=None):
    of = {"measure": "detectability", "group": group, "note": note, "low": low, "high": high}
    return [line(0, metric, start, **of), line(8, metric, end, **of)]


def test_detected_groups_and_their_separation_are_told_from_start_to_end():
    text = words(*detected(5.0, 3.0, note="3 detected, 2 not detected"), *detected(9.0, 4.5, metric="s_hat"))
    assert "5 groups apart at the start and 3 at the end (3 detected, 2 not detected)" in text
    assert "9.00 to 4.50" in text and "underpowered" not in text and "concept" not in text
    assert "no null result" in words(*detected(5.0, 3.0, note="3 detected, 2 underpowered"))


@pytest.mark.parametrize(
    ("value", "low", "high", "phrase"),
    [(-4.0, -6.0, -2.0, "closer together"), (4.0, 2.0, 6.0, "further apart"), (-1.0, -3.0, 1.0, "no change beyond")],
)
def test_the_concepts_separation_is_told_by_the_interval_of_its_change(value, low, high, phrase):
    separation = detected(9.0, 9.0 + value, metric="s_hat", group="concept")
    change = detected(0.0, value, metric="s_change", group="concept", low=low, high=high)
    text = words(*detected(5.0, 5.0), *separation, *change)
    assert phrase in text and f"s 9.00 -> {9 + value:.2f}" in text and "only the change counts" in text
    assert "separation s, concept" in format_table(summarise([*separation, *change]))


def test_invalid_readings_are_shown_as_such():
    lines = [line(0, "knowledge_z", 3.0), line(8, "knowledge_z", None, note="states are not finite")]
    assert "not valid" in format_table(summarise(lines))
    assert "states are not finite" in words(*lines)


def test_an_empty_journal_is_no_error():
    assert summarise([]) == [] and in_words([]) == [] and "No readings" in format_table([])


def test_records_are_a_flat_json_list(tmp_path, capsys):
    records = summarise([line(0, "cka", 1.0), line(8, "cka", None)])
    write_records(records, str(tmp_path / "r.json"))
    assert json.loads((tmp_path / "r.json").read_text()) == records
    write_records(records, "-")
    assert json.loads(capsys.readouterr().out) == records
    write_records(records, None)
