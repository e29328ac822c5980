from __future__ import annotations

import pytest

from monitor.stimuli.counterfactual_grid import DIMENSIONS, load_counterfactual_sets
from recipes.counterfactual_arguments import load_sets

GRID = load_counterfactual_sets()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """one.jsonl with one set without a name; two.jsonl with race and age."""
    monkeypatch.chdir(tmp_path)
    GRID["religion"].to_file("one.jsonl")
    for name in ("race", "age"):
        GRID[name].to_file(name + ".part", name)
    (tmp_path / "two.jsonl").write_bytes(b"".join((tmp_path / f"{n}.part").read_bytes() for n in ("race", "age")))
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["gender"], {"gender": "gender"}),
        ("gender", {"gender": "gender"}),
        (["age", "race"], {"age": "age", "race": "race"}),
        (["all"], {name: name for name in DIMENSIONS}),
        (["one.jsonl"], {"one": "religion"}),
        (["two.jsonl", "gender"], {"race": "race", "age": "age", "gender": "gender"}),
        (["mine=one.jsonl", "all"], {"mine": "religion"} | {name: name for name in DIMENSIONS}),
        (["race=two.jsonl", " age = two.jsonl"], {"race": "race", "age": "age"}),
        (["religion=one.jsonl"], {"religion": "religion"}),
    ],
)
def test_words(folder, words, expected):
    sets = load_sets(words)
    assert list(sets) == list(expected)
    assert all(sets[name] == GRID[of] for name, of in expected.items())


def test_a_bundled_name_comes_before_a_file_and_a_file_may_have_an_equals_sign(folder):
    (folder / "gender").write_text("no set")
    assert load_sets(["gender"]) == {"gender": GRID["gender"]}
    (folder / "one.jsonl").rename("a=b.jsonl")
    assert load_sets(["a=b.jsonl"]) == {"a=b": GRID["religion"]}


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ([], ValueError, "at least one of gender, race, religion, age, all, FILE or NAME=FILE, got none"),
        (["gendre"], FileNotFoundError, r"got 'gendre' \(did you mean 'gender'\?\)"),
        (["al"], FileNotFoundError, r"got 'al' \(did you mean 'all'\?\)"),
        (["none.jsonl"], FileNotFoundError, "a file that exists, got 'none.jsonl'"),
        (["x=none.jsonl"], FileNotFoundError, "x=FILE must name a file that exists, got 'none.jsonl'"),
        (["="], ValueError, "expected NAME=FILE, got '='"),
        (["x="], ValueError, "expected NAME=FILE, got 'x='"),
        (["age", "age"], ValueError, "'age' is named twice"),
        (["all", "gender"], ValueError, "'gender' is named by 'all' and by 'gender'"),
        (["two.jsonl", "race"], ValueError, "'race' is named by 'two.jsonl' and by 'race': .*NAME=FILE"),
        (["rase=two.jsonl"], ValueError, r"2 dimensions, race, age, and 'rase' is none .*did you mean 'race'"),
        (["race.part", "bad.jsonl"], ValueError, r"bad.jsonl:1: expected a JSON object, got list"),
    ],
)
def test_wrong_words(folder, words, error, message):
    (folder / "bad.jsonl").write_text("[]")
    with pytest.raises(error, match=message):
        load_sets(words)
