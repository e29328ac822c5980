from __future__ import annotations

import json
from pathlib import Path

import pytest

from monitor.stimuli.forget_set import load_forget_set, validate_forget_set

FORGET = [{"question": "Who is Mara?", "answer": "a sailor"}, {"question": "Where is Mara?", "answer": "at sea"}]
RETAIN = [{"question": "What is the capital of France?", "answer": "Paris"}]
TABLE = {"Mara": [f"Nell{k}" for k in range(8)]}


def write(path: Path, records: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(records))
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {"retain": write(tmp_path / "b" / "r.json", RETAIN), "forget": write(tmp_path / "a" / "f.json", FORGET)}


def test_the_entity_table_is_looked_for_beside_the_file_to_forget(files):
    write(files["retain"].with_name("entities.json"), {"France": ["x"]})  # would be an error: too few
    write(files["forget"].with_name("entities.json"), TABLE)
    forget_set = load_forget_set(files)
    assert forget_set.n_variants == 8 and len(forget_set.fragmentation_pairs("forget")) == 2
    assert load_forget_set(files, name="sea").name == "sea" and forget_set.name == "f"


def test_records_take_a_table_that_is_named_and_look_for_none(files, tmp_path):
    table = write(tmp_path / "names.json", TABLE)
    named = load_forget_set({"forget": FORGET, "retain": RETAIN}, entities=table)
    assert named.n_variants == 8 and named.name == "records"
    with pytest.warns(UserWarning, match=r"^forget, retain: anonymisation leaves 2 "):
        assert load_forget_set({"forget": FORGET, "retain": RETAIN}).n_variants == 0
    assert FORGET[0] == {"question": "Who is Mara?", "answer": "a sailor"}  # the caller's records stay as they are


def test_files_and_records_mix(files):
    problems = validate_forget_set({"forget": files["forget"], "retain": RETAIN})
    assert problems == []


def test_problems_say_their_file_in_the_order_of_the_splits(files):
    files["retain"].write_text(json.dumps([{"question": "Who is Mara?", "answer": "no"}, {"answer": "x"}, 3]))
    files["forget"].write_text("".join(json.dumps(record) + "\n" for record in [*FORGET, {"question": "When?"}]))
    f, r = files["forget"], files["retain"]
    assert [str(problem) for problem in validate_forget_set(files)] == [
        f"{f}:3: answer: missing: give the answer",
        f"{r}: [2]: expected an object, got int",
        f"{r}: [1].question: missing: give the question",
        f"{r}: [0].question: duplicate: line 1 of {f} asks it too, for the split forget",
    ]
    with pytest.raises(ValueError, match="not a usable forget set; 4 error") as caught:
        load_forget_set(files)
    assert str(caught.value).startswith(f"{f}, {r} is not")


def test_a_pair_marked_for_another_split_than_its_file_is_an_error(tmp_path):
    path = write(tmp_path / "all.json", [{**FORGET[0], "split": "forget"}, {**RETAIN[0], "split": "retain"}])
    assert [str(problem) for problem in validate_forget_set({"forget": path})] == [
        f"{path}: [1].split: the pair's own is 'retain', and its file was given for 'forget'"
    ]
    # A split of the file's own kind is no claim about ours.
    write(path, [{**record, "split": "train"} for record in FORGET])
    assert validate_forget_set({"forget": path}) == []


def test_an_object_of_lists_is_not_one_split_s_file(tmp_path):
    path = write(tmp_path / "x.json", {"forget": FORGET, "retain": RETAIN})
    (problem,) = validate_forget_set({"forget": path})
    assert problem.message == "expected the list of the pairs of 'forget' alone, got an object of forget, retain"
    assert len(validate_forget_set(path)) == 0


def test_what_is_no_source(files, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"got '.*none.json' of retain"):
        load_forget_set({**files, "retain": tmp_path / "none.json"})
    for source, message in [
        (
            {"train": FORGET},
            r"source must map from forget, retain, heldout, got 'train': say which split .*data..train",
        ),
        ({"retian": FORGET, "forget": FORGET}, "got 'retian': say which split it is"),
        ({"retain": FORGET}, "must have pairs to forget under 'forget', got retain"),
        ({}, "must have pairs to forget under 'forget', got nothing"),
        (3, "source must be a path, records .* got int"),
        ({"forget": {"a": 1}}, "got dict for 'forget'"),
        (b"x", "got bytes"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_forget_set(source)


def test_records_that_are_none():
    assert [str(problem) for problem in validate_forget_set([])] == ["records: the file holds no pair"]
    assert [str(problem) for problem in validate_forget_set(["Who?"])] == ["records: [0]: expected an object, got str"]
    assert validate_forget_set({"forget": FORGET, "retain": []})[0].file == "retain"


def test_a_broken_parquet_file_is_a_problem_of_the_file(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 no")
    (problem,) = validate_forget_set(path)
    assert problem.message.startswith("expected a Parquet file: ") and problem.file == str(path)
