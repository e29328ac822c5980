from __future__ import annotations

import pytest

from recipes.concepts import concept_path
from recipes.forget_set_arguments import column_mapping, forget_set_source


def test_one_file_a_bundled_concept_and_a_name_that_looks_like_a_split(tmp_path, monkeypatch):
    assert forget_set_source("harry_potter") == forget_set_source(["harry_potter"]) == concept_path("harry_potter")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forget=1.jsonl").touch()
    assert str(forget_set_source("forget=1.jsonl")) == "forget=1.jsonl"


@pytest.mark.parametrize("items", [["forget=f.json", "retain=r.json"], "forget=f.json,retain=r.json"])
def test_a_file_a_split(items, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("f.json", "r.json"):
        (tmp_path / name).touch()
    assert {split: str(path) for split, path in forget_set_source(items).items()} == {
        "forget": "f.json",
        "retain": "r.json",
    }


@pytest.mark.parametrize(
    "items, error, message",
    [
        (["a.json", "b.json"], ValueError, "expected split=FILE ..., got 'a.json'"),
        (["forget=harry_potter", "retian=harry_potter"], ValueError, "got 'retian' .did you mean 'retain'"),
        (["forget=harry_potter", "forget=harry_potter"], ValueError, "'forget' is mapped twice"),
        (["forget=none.json"], FileNotFoundError, "got 'none.json'"),
        ("harry_poter", FileNotFoundError, "did you mean 'harry_potter'"),
    ],
)
def test_wrong_files(items, error, message):
    with pytest.raises(error, match=message):
        forget_set_source(items)


@pytest.mark.parametrize(
    "items, expected",
    [
        (None, None),
        ([], None),
        ("question=q,answer=a", {"question": "q", "answer": "a"}),
        (["question=q", "answer=a.b, id = n"], {"question": "q", "answer": "a.b", "id": "n"}),
        (["forget=Nice, a town", "retain=*"], {"forget": "Nice, a town", "retain": "*"}),
        (["forget=a=b"], {"forget": "a=b"}),
    ],
)
def test_columns(items, expected):
    assert column_mapping(items) == expected


@pytest.mark.parametrize("items", ["question", ["question="], ["=q"], ["question=q", "question=p"]])
def test_wrong_columns(items):
    with pytest.raises(ValueError, match="expected name=column ..., got|mapped twice"):
        column_mapping(items)
