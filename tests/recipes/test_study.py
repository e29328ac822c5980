"""`latentwatch study` finds the studies, runs one as asked, and shows ours beside the paper's."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
import types

import pytest

from recipes.cli import main as command
from recipes.studies.record import record
from recipes.study import format_records, main, study_titles


@pytest.fixture
def study(monkeypatch):
    """Put a function in the place of e9's `run`."""

    def put(run) -> None:
        module = types.ModuleType("recipes.studies.e9")
        module.run = run
        monkeypatch.setitem(sys.modules, "recipes.studies.e9", module)

    return put


def two_records(quick: bool = False, seed: int = 42) -> list[dict]:
    return [
        record("e9", "n=100", "rate", 0.25, 0.247, "a note of all"),
        record("e9", "n=300", "rate", None, note="nothing was drawn"),
        record("e9", "n=300", "inflation", 1.2, 1.31, "a note of all"),
    ]


def test_without_a_name_every_study_is_listed_with_its_title(capsys):
    assert command(["study"]) == 0
    out = capsys.readouterr().out
    titles = study_titles()
    assert {"e5", "e6", "e8", "e9", "e10"} <= set(titles)
    assert list(titles) == sorted(titles, key=lambda name: int(name[1:]))  # e10 after e9
    assert all(f"{name.ljust(3)}" in out and title in out for name, title in titles.items())


@pytest.mark.parametrize("name", study_titles())
def test_a_study_is_what_the_command_expects(name):
    module = importlib.import_module(f"recipes.studies.{name}")
    assert study_titles()[name] == module.TITLE and "\n" not in module.TITLE
    parameters = inspect.signature(module.run).parameters
    assert parameters["quick"].default is False and parameters["seed"].default == 42
    assert set(parameters) <= {"quick", "seed", "model"}


def test_arguments_reach_the_study(study, capsys):
    got = []

    def run(quick: bool = False, seed: int = 42) -> list[dict]:
        got.append((quick, seed))
        return two_records()

    study(run)
    main(["e9"])
    main(["E9", "--quick", "--seed", "7"])  # as the paper writes it
    assert got == [(False, 42), (True, 7)]
    assert "(quick)" in capsys.readouterr().out


def test_model_goes_to_the_studies_that_read_one_and_to_no_other(study, capsys):
    got = []

    def run(quick: bool = False, seed: int = 42, model: str = "") -> list[dict]:
        got.append(model)
        return two_records()

    study(run)
    main(["e9"])
    main(["e9", "--model", "gpt2"])
    assert got == ["smollm2-135m", "gpt2"]

    def with_a_part_on_a_model(quick: bool = False, seed: int = 42, model: str | None = None) -> list[dict]:
        got.append(model)
        return two_records()

    study(with_a_part_on_a_model)
    main(["e9"])
    main(["e9", "--model", "gpt2"])
    assert got[2:] == [None, "gpt2"]
    study(two_records)
    with pytest.raises(SystemExit) as stopped:
        main(["e9", "--model", "gpt2"])
    assert stopped.value.code == 2 and "e9 makes its own data" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["e99"], "NAME: expected one of .*e9.* got 'e99'"),
        (["--quick"], "NAME is missing"),
        (["e9", "--seed", "x"], "--seed"),
    ],
)
def test_wrong_commands(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_table_holds_ours_beside_the_papers_and_every_note_once(study, capsys):
    study(two_records)
    main(["e9"])
    out = capsys.readouterr().out
    lines = out.splitlines()
    header = next(line for line in lines if line.startswith("setting"))
    row = next(line for line in lines if line.startswith("n=100"))
    assert row.split() == ["n=100", "rate", "0.250", "0.247"]
    assert row.index("0.250") == header.index("ours") and row.index("0.247") == header.index("paper")
    assert any(line.split() == ["n=300", "rate", "not", "valid"] for line in lines)
    assert out.count("a note of all") == 1 and "- n=300: nothing was drawn" in lines


def test_json_holds_the_records_and_how_they_were_made(study, capsys, tmp_path):
    study(two_records)
    path = tmp_path / "new" / "e9.json"
    main(["e9", "--seed", "3", "--json", str(path)])
    assert "setting" in capsys.readouterr().out
    written = json.loads(path.read_text())
    assert written == [found | {"quick": False, "seed": 3} for found in two_records()]
    main(["e9", "--seed", "3", "--json", "-"])
    assert json.loads(capsys.readouterr().out) == written  # nothing else on standard output


def test_a_file_that_cannot_be_written_is_refused_before_the_work(study, tmp_path, capsys):
    def run(quick: bool = False, seed: int = 42) -> list[dict]:
        raise AssertionError("the study ran")

    study(run)
    (tmp_path / "file").write_text("")
    assert command(["study", "e9", "--json", str(tmp_path / "file" / "e9.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_nothing_that_is_not_finite_becomes_a_record():
    with pytest.raises(ValueError, match="e9, n=100: rate must be finite, got nan"):
        record("e9", "n=100", "rate", float("nan"))


def test_a_note_of_many_settings_names_none():
    of_all = [record("e9", f"n={n}", "rate", 0.1, note="of all") for n in (1, 2)]
    assert "- of all" in format_records(of_all).splitlines()
    of_some = [*of_all, record("e9", "n=3", "rate", 0.1, note="of one")]
    lines = format_records(of_some).splitlines()
    assert "- n=1; n=2: of all" in lines and "- n=3: of one" in lines
