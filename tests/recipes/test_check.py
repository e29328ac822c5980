from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes.check import main

TABLE = {"Mara": [f"Nell{k}" for k in range(8)]}
ROWS = [
    {"question": "Who is Mara?", "answer": "a sailor", "split": "forget"},
    {"question": "What is the capital of France?", "answer": "Paris", "split": "retain"},
]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "entities.json").write_text(json.dumps(TABLE))
    return path


@pytest.fixture
def bad(good: Path) -> Iterator[Path]:
    with good.open("a") as file:
        file.write('{"question": "Where is Mara?", "answer": ""}\n{"question": "Who rows?"')
    return good


def status(*arguments: object) -> int:
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_good_file(good, capsys):
    assert status(good) == 0
    out = capsys.readouterr().out
    assert f"{good}: 0 error(s), 0 warning(s)" in out
    assert "forget       1 pairs, 1 usable for fragmentation" in out
    assert "8 anonymised variants a pair" in out


def test_a_bad_file_says_every_place_and_exits_with_1(bad, capsys):
    assert status(bad) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{bad}:3: answer: empty: give the answer, or remove the pair"
    assert lines[1].startswith(f"{bad}:3: split: missing")
    assert lines[2].startswith(f"{bad}:4: invalid JSON at column")
    assert lines[-1] == f"{bad}: 3 error(s), 0 warning(s)"


def test_warnings_are_marked_and_do_not_fail(good, capsys):
    with good.open("a") as file:
        file.write(json.dumps({"question": "Who rows?", "answer": "Tom", "split": "heldout"}) + "\n")
    assert status(good) == 0
    captured = capsys.readouterr()
    assert f"{good}:3: question: warning: names no entity" in captured.out
    assert "heldout      1 pairs, 0 usable" in captured.out
    assert captured.err == ""


def test_json_to_standard_output_is_json_alone(bad, capsys):
    assert status(bad, "--json", "-") == 1
    records = json.loads(capsys.readouterr().out)
    assert [(r["metric"], r["line"], r["field"]) for r in records] == [
        ("error", 3, "answer"),
        ("error", 3, "split"),
        ("error", 4, ""),
    ]


def test_json_to_a_file_holds_the_counts(good, tmp_path, capsys):
    target = tmp_path / "out.json"
    assert status(good, "--json", target) == 0
    assert "0 error(s)" in capsys.readouterr().out
    counts = {(r["metric"], r["group"]): r["value"] for r in json.loads(target.read_text())}
    assert counts == {
        ("pairs", "forget"): 1,
        ("usable_pairs", "forget"): 1,
        ("pairs", "retain"): 1,
        ("usable_pairs", "retain"): 0,
        ("pairs", "heldout"): 0,
        ("usable_pairs", "heldout"): 0,
    }
    assert status(good, "--json", tmp_path / "none" / "out.json") == 2


def test_columns_entities_and_variants(tmp_path, capsys):
    path, table = tmp_path / "x.jsonl", tmp_path / "names.json"
    path.write_text(json.dumps({"prompt": "Who is Mara?", "reply": "a sailor"}) + "\n")
    table.write_text(json.dumps({"Mara": ["A1", "B1", "C1"]}))
    options = ["--columns", "question=prompt, answer=reply", "--entities", table]
    assert status(path, *options) == 1  # 8 variants from 3 substitutes
    assert status(path, *options, "--variants", 3) == 0
    assert "3 anonymised variants a pair" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["harry_poter"], "did you mean 'harry_potter'"),
        (["harry_potter", "--columns", "question"], "expected name=column"),
        (["harry_potter", "--columns", "answer=a,answer=b"], "'answer' is mapped twice"),
        (["harry_potter", "--columns", "anwser=a"], "did you mean 'answer'"),
        (["harry_potter", "--variants", "0"], "variants must be an int of at least 1"),
        (["harry_potter", "--entities", "none.json"], "entities must be a file that exists"),
        (["harry_potter", "--unknown"], "unrecognized arguments"),
    ],
)
def test_a_wrong_command_exits_with_2_and_says_why(arguments, message, capsys):
    assert status(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


def test_the_bundled_concept_is_clean_and_the_module_runs():
    run = subprocess.run([sys.executable, "-m", "recipes.check", "harry_potter"], capture_output=True, text=True)
    assert run.returncode == 0
    assert "0 error(s), 0 warning(s)" in run.stdout


def test_a_file_a_split_and_columns_by_themselves(tmp_path, capsys):
    forget, retain = tmp_path / "f.json", tmp_path / "r.jsonl"
    forget.write_text(json.dumps([{"q": "Which?", "choices": ["a boat", "a cart"], "answer": 1}]))
    retain.write_text(json.dumps({"q": "Where?", "choices": ["here", "there"], "answer": 2}) + "\n")
    arguments = [f"forget={forget}", f"retain={retain}", "--columns", "question=q", "choices=choices"]
    assert status(*arguments) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{retain}:1: answer: expected a number from 0 to 1")
    assert lines[1] == f"{forget}, {retain}: 1 error(s), 0 warning(s)"
    assert status(f"forget={forget}", "--columns", "question=q", "choices=choices") == 0
    assert "forget       1 pairs" in capsys.readouterr().out
    assert status(f"forget={forget}", f"retian={retain}") == 2
    assert "did you mean 'retain'" in capsys.readouterr().err
