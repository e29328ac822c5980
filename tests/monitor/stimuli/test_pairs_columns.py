from __future__ import annotations

import json

import pytest

from monitor.stimuli.forget_set import load_forget_set, validate_forget_set
from monitor.stimuli.pairs_columns import MISSING, value_at

pytestmark = pytest.mark.filterwarnings("ignore:.*anonymisation leaves")  # no record here names an entity

RECORD = {"a": 1, "b": {"c": 2}, "d.e": 3, "l": [{"m": 4}, {"m": 5, "n": 6}, 7], "t": (8, 9)}


@pytest.mark.parametrize(
    "path, expected",
    [
        ("a", 1),
        ("b.c", 2),
        ("d.e", 3),  # a key with a dot in it is found before a path
        ("l.m", [4, 5, MISSING]),
        ("l.n", [MISSING, 6, MISSING]),
        ("t", [8, 9]),
        ("x", MISSING),
        ("a.x", MISSING),
        ("b.x", MISSING),
    ],
)
def test_value_at_a_path(path, expected):
    assert value_at(RECORD, path) == expected


def errors(source, **columns: str) -> list[str]:
    problems = validate_forget_set(source, columns=columns)
    return [str(problem) for problem in problems if problem.severity == "error"]


def test_an_item_without_an_answer_is_named_by_its_place(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"qa": [{"q": "Who?", "a": "she"}, {"q": "Where?"}, {"q": "Why?", "a": " "}]}))
    assert errors(path, question="qa.q", answer="qa.a") == [
        f"{path}:1: qa[1].answer: missing: give the answer",
        f"{path}:1: qa[2].answer: empty: give the answer, or remove the pair",
    ]
    assert errors(path, question="qa.q", answer="qa.answer") == [
        f"{path}: columns: no pair has 'qa.answer', mapped to 'answer' (did you mean 'qa.a'?)"
    ]


def test_variants_in_lists_of_objects_and_a_variant_list_a_question():
    record = {"q": "Who?", "a": "Mara", "others": [{"q": "Who now?", "a": "Nell"}, {"q": "Who else?", "a": "Jo"}]}
    columns = {"question": "q", "answer": "a", "anonymized": "others.q", "anonymized_answer": "others.a"}
    expected = (("Who now?", "Nell"), ("Who else?", "Jo"))
    assert load_forget_set([record], columns=columns).pairs[0].anonymized == expected
    several = {"pairs": [record, {**record, "q": "Where?", "a": "here"}]}
    columns = {ours: f"pairs.{theirs}" for ours, theirs in columns.items()}
    assert [pair.anonymized for pair in load_forget_set([several], columns=columns).pairs] == [expected] * 2


def test_a_list_is_no_question_unless_it_is_mapped():
    record = {"question": ["Who?", "Where?"], "answer": ["she", "here"]}
    problems = validate_forget_set([record])
    assert [p.message[:23] for p in problems] == ["expected text, got list"] * 2
    pairs = load_forget_set([record], columns={"question": "question"}).pairs
    assert [(pair.question, pair.answer) for pair in pairs] == [("Who?", "she"), ("Where?", "here")]


def test_one_split_and_one_id_stand_for_all_pairs_of_a_record_and_nothing_else_does():
    record = {"qs": ["Who?", "Where?"], "as": ["she", "here"], "part": "forget", "n": 7}
    columns = {"question": "qs", "answer": "as", "split": "part", "id": "n"}
    forget_set = load_forget_set([record], columns=columns)
    assert [(pair.id, pair.split) for pair in forget_set.pairs] == [("7-1", "forget"), ("7-2", "forget")]
    (message,) = errors([{**record, "as": "she"}], **columns)
    assert message == "records: [0].as: expected a list of 2, one for each question of 'qs', got str 'she'"


def test_a_record_with_an_empty_list_is_a_warning():
    found = [{"qs": ["Who?"], "as": ["she"]}, {"qs": [], "as": []}]
    problems = validate_forget_set(found, columns={"question": "qs", "answer": "as"})
    assert [(p.field, p.severity) for p in problems] == [("[1].qs", "warning")]


# --- splits ------------------------------------------------------------------------------------------------------

OF_TOPICS = [
    {"question": "Who?", "answer": "she", "topic": "sea"},
    {"question": "Where?", "answer": "here", "topic": 3},
    {"question": "Why?", "answer": "so", "topic": "moor"},
]


def splits(**columns: str) -> list[str]:
    return [pair.split for pair in load_forget_set(OF_TOPICS, columns={"split": "topic", **columns}).pairs]


def test_values_of_a_column_become_splits_and_others_are_left_out():
    assert splits(forget="moor") == ["forget"]
    assert splits(forget="3", retain="sea") == ["retain", "forget"]
    assert splits(forget="sea", heldout="*") == ["forget", "heldout", "heldout"]
    assert splits(forget="*", retain="sea") == ["retain", "forget", "forget"]


def test_a_value_or_a_column_that_is_not_there():
    assert errors(OF_TOPICS, split="topic", forget="see", retain="*") == [
        "records: columns: no pair has 'see' in 'topic' (did you mean 'sea'?)"
    ]
    (message,) = errors(OF_TOPICS, forget="sea")
    assert "'forget' is mapped to 'sea', and there is neither a list of that name nor a column 'split'" in message
    (message,) = errors([*OF_TOPICS, {"question": "What?", "answer": "that"}], split="topic", forget="sea", retain="*")
    assert message.startswith("records: [3].split: missing")


@pytest.mark.parametrize(
    "source, columns, message",
    [
        (OF_TOPICS, {"forget": "sea", "retain": "sea"}, "each split to another name, got sea, sea"),
        (OF_TOPICS, {"answer": 3}, "columns must map 'answer' to a name, not empty, got 3"),
        (OF_TOPICS, {"answer": ""}, "columns must map 'answer' to a name, not empty, got ''"),
        ({"forget": OF_TOPICS}, {"split": "topic"}, "must not map 'split' where every split has a file of its own"),
        ({"forget": OF_TOPICS}, {"forget": "sea"}, "must not map 'forget' where every split has a file"),
    ],
)
def test_a_mapping_that_fits_no_file(source, columns, message):
    with pytest.raises(ValueError, match=message):
        load_forget_set(source, columns=columns)
