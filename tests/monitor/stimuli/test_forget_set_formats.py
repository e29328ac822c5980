"""Benchmarks' layouts, each from a fixture of invented records: what comes in is what their authors pair."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from monitor.stimuli.forget_set import ForgetSet, load_forget_set, validate_forget_set

pytestmark = pytest.mark.filterwarnings("ignore:.*anonymisation leaves")  # no fixture names an entity

FORMATS = Path(__file__).parents[2] / "fixtures" / "formats"
TEXTS = {"question": "question", "answer": "answer"}
COMPLETIONS = {"question": "text_completion.First_half", "answer": "text_completion.Second_half", "split": "Concept"}


def records(name: str) -> list[dict]:
    text = (FORMATS / name).read_text(encoding="utf-8")
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]


def texts(forget_set: ForgetSet, split: str) -> list[tuple[str, str]]:
    return [(pair.question, pair.answer) for pair in forget_set.split(split)]


def as_stored(name: str) -> list[tuple[str, str]]:
    return [(record["question"], record["answer"]) for record in records(name)]


def parquet(folder: Path, name: str) -> Path:
    path = folder / f"{name}.parquet"
    datasets.Dataset.from_list(records(f"{name}.json")).to_parquet(path)
    return path


def messages(source, **options) -> list[str]:
    return [str(problem) for problem in validate_forget_set(source, **options) if problem.severity == "error"]


# --- TOFU --------------------------------------------------------------------------------------------------------


def test_tofu_a_file_a_split_json_lines_by_the_name_of_json():
    files = {"retain": FORMATS / "tofu_retain.json", "forget": FORMATS / "tofu_forget.json"}
    forget_set = load_forget_set(files)
    assert forget_set.name == "tofu_forget"
    assert texts(forget_set, "forget") == as_stored("tofu_forget.json")
    assert texts(forget_set, "retain") == as_stored("tofu_retain.json")
    assert [pair.id for pair in forget_set.pairs] == [
        *("forget-001", "forget-002"),
        *("retain-001", "retain-002", "retain-003"),
    ]


def test_tofu_perturbed_has_further_columns_that_a_mapping_leaves_out():
    files = {"forget": FORMATS / "tofu_forget.json", "heldout": FORMATS / "tofu_perturbed.json"}
    assert len(messages(files)) == 3  # three keys are nobody's
    assert texts(load_forget_set(files, columns=TEXTS), "heldout") == as_stored("tofu_perturbed.json")
    paraphrased = load_forget_set(
        files["heldout"], columns={"question": "paraphrased_question", "answer": "paraphrased_answer"}
    )
    assert texts(paraphrased, "forget") == [("What is Ilse Tarn's home?", "Her home is a barge.")]


def test_json_lines_of_one_record_and_a_broken_line_in_json_lines(tmp_path):
    path = tmp_path / "forget01.json"
    path.write_text('{"question": "Who?", "answer": "she"}\n')
    assert texts(load_forget_set(path), "forget") == [("Who?", "she")]
    path.write_text('{"question": "Who?", "answer": "she"}\n{"question": "Where?"\n{"question": "Why?", "answer": ""}')
    assert [(p.line, p.field) for p in validate_forget_set(path) if p.severity == "error"] == [(2, ""), (3, "answer")]


# --- MUSE --------------------------------------------------------------------------------------------------------


def test_muse_knowmem_as_json_as_parquet_and_in_memory(tmp_path):
    names = {"forget": "muse_forget_qa", "retain": "muse_retain_qa"}
    expected = load_forget_set({split: FORMATS / f"{name}.json" for split, name in names.items()}).pairs
    assert [(pair.question, pair.answer) for pair in expected] == as_stored("muse_forget_qa.json") + as_stored(
        "muse_retain_qa.json"
    )
    assert load_forget_set({split: parquet(tmp_path, name) for split, name in names.items()}).pairs == expected
    in_memory = {split: records(f"{name}.json") for split, name in names.items()}
    assert load_forget_set(in_memory).pairs == expected
    parts = datasets.DatasetDict({split: datasets.Dataset.from_list(part) for split, part in in_memory.items()})
    assert load_forget_set(parts).pairs == expected
    assert load_forget_set(parts.with_format("torch")).pairs == expected


# --- WMDP --------------------------------------------------------------------------------------------------------


def test_wmdp_the_answer_is_the_choice_of_its_number(tmp_path):
    files = {"forget": FORMATS / "wmdp.json", "retain": FORMATS / "wmdp_retain.json"}
    forget_set = load_forget_set(files, columns={"choices": "choices"})
    assert [pair.answer for pair in forget_set.pairs] == ["a stone jar", "It is a fungus", "It sleeps in the cold"]
    binary = {split: parquet(tmp_path, path.stem) for split, path in files.items()}
    assert load_forget_set(binary, columns={"choices": "choices"}).pairs == forget_set.pairs
    # As tensors the answers would be no ints.
    tensors = datasets.Dataset.from_list(records("wmdp.json")).with_format("torch")
    assert load_forget_set(tensors, columns={"choices": "choices"}).pairs == forget_set.split("forget")


def test_one_wording_with_other_choices_is_another_question():
    files = {"forget": FORMATS / "wmdp.json", "retain": FORMATS / "wmdp_retain.json"}
    shared = {r["question"] for r in records("wmdp.json")} & {r["question"] for r in records("wmdp_retain.json")}
    assert len(shared) == 1
    assert messages(files, columns={"choices": "choices"}) == []
    without = {split: [{"question": q, "answer": "x"} for q in shared] for split in files}
    assert "asks it too, for the split forget" in messages(without)[0]


@pytest.mark.parametrize(
    "answer, expected", [(0, "ash"), (2, "elm"), ("A", "ash"), ("C", "elm"), ("oak", "oak"), ("elm", "elm")]
)
def test_a_choice_by_number_by_letter_and_by_its_text(answer, expected):
    record = {"q": "Which burns best?", "of": ["ash", "oak", "elm"], "right": answer}
    forget_set = load_forget_set([record], columns={"question": "q", "choices": "of", "answer": "right"})
    assert texts(forget_set, "forget") == [("Which burns best?", expected)]


@pytest.mark.parametrize(
    "change, field, message",
    [
        ({"answer": 3}, "answer", "expected a number from 0 to 2, a letter from A to C, or one of the choices, got 3"),
        ({"answer": -1}, "answer", "expected a number from 0 to 2"),
        ({"answer": True}, "answer", "expected a number from 0 to 2"),
        ({"answer": "D"}, "answer", "expected a number from 0 to 2"),
        ({"answer": "2"}, "answer", "expected a number from 0 to 2"),
        ({"answer": None}, "answer", "expected a number from 0 to 2"),
        ({"choices": ["C", "A", "B"], "answer": "A"}, "answer", "'A' is one of the choices and the letter of another"),
        ({"choices": "ash"}, "choices", "expected a list of texts, none of them empty, got 'ash'"),
        ({"choices": []}, "choices", "expected a list of texts"),
        ({"choices": ["ash", ""]}, "choices", "expected a list of texts"),
        ({"choices": None}, "answer", "expected text, got int 0"),
    ],
)
def test_a_wrong_choice_is_one_error_at_its_place(tmp_path, change, field, message):
    good = {"question": "Which burns worst?", "choices": ["ash", "oak", "elm"], "answer": 1}
    path = tmp_path / "mcq.jsonl"
    bad = {"question": "Which burns best?", "choices": ["ash", "oak", "elm"], "answer": 0, **change}
    path.write_text("".join(json.dumps(record) + "\n" for record in (good, bad)))
    problems = validate_forget_set(path, columns={"choices": "choices"})
    assert [(p.line, p.field) for p in problems] == [(2, field)] and message in problems[0].message
    good_again = validate_forget_set([good], columns={"choices": "choices"})
    assert good_again == []


# --- ConceptVectors ----------------------------------------------------------------------------------------------


def test_concept_vectors_completions_of_one_concept_against_the_others():
    path = FORMATS / "concept_vectors.json"
    forget_set = load_forget_set(path, columns={**COMPLETIONS, "forget": "Lighthouse", "retain": "*"})
    expected = {
        record["Concept"]: [(half["First_half"], half["Second_half"]) for half in record["text_completion"]]
        for record in records("concept_vectors.json")
    }
    assert texts(forget_set, "forget") == expected["Lighthouse"] and len(expected["Lighthouse"]) == 2
    assert texts(forget_set, "retain") == expected["Beehive"] + expected["Windmill"]
    one = load_forget_set(path, columns={**COMPLETIONS, "forget": "Windmill", "retain": "Beehive"})
    assert [texts(one, s) for s in ("forget", "retain")] == [expected["Windmill"], expected["Beehive"]]
    in_memory = datasets.Dataset.from_list(records("concept_vectors.json"))
    assert (
        load_forget_set(in_memory, columns={**COMPLETIONS, "forget": "Lighthouse", "retain": "*"}).pairs
        == forget_set.pairs
    )


def test_concept_vectors_questions_beside_their_generated_answers():
    columns = {"question": "QA", "answer": "gpt_gold_answer", "split": "Concept", "id": "Concept"}
    path = FORMATS / "concept_vectors.json"
    forget_set = load_forget_set(path, columns={**columns, "forget": "Lighthouse", "heldout": "Windmill"})
    assert texts(forget_set, "forget") == [
        ("What is a lighthouse for?", "It warns ships of rocks."),
        ("Who keeps a lighthouse?", "A keeper does."),
    ]
    assert [pair.id for pair in forget_set.pairs] == ["Lighthouse-1", "Lighthouse-2", "Windmill-1"]


def test_a_file_of_one_concept(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps(records("concept_vectors.json")[0], indent=4))
    columns = {"question": "QA", "answer": "gpt_gold_answer"}
    assert len(load_forget_set(path, columns=columns).split("forget")) == 2
    assert (
        len(load_forget_set(path, columns={**columns, "split": "Concept", "forget": "Lighthouse"}).split("forget")) == 2
    )


def test_questions_without_answers_are_one_error_that_says_so():
    path = FORMATS / "concept_vectors.json"
    columns = {"question": "QA", "split": "Concept", "forget": "Lighthouse", "retain": "*"}
    (message,) = messages(path, columns=columns)
    assert "no pair has 'answer'" in message and "questions alone can be neither forgotten nor retained" in message
    assert "gpt_gold_answer, text_completion.First_half" in message  # where answers may be
    with pytest.raises(ValueError, match="1 error"):
        load_forget_set(path, columns=columns)
    (message,) = messages(path, columns={**columns, "answer": "unrelated_QA", "retain": "Beehive"})
    assert message.endswith("[0].unrelated_QA: expected a list of 2, one for each question of 'QA', got 1")
    (message,) = messages(path, columns={**columns, "answer": "gpt_gold_answer", "retain": "Nothing"})
    assert "no pair has 'Nothing' in 'Concept'" in message
