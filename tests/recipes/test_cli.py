"""The command finds its recipes, and says what went wrong without a traceback unless it is a defect."""

from __future__ import annotations

import sys
import types

import pytest

from recipes.cli import COMMANDS, main
from recipes.embedded import ModelError


@pytest.fixture
def recipe(monkeypatch):
    """Put a function in the place of the recipe `demo`."""

    def put(function) -> None:
        module = types.ModuleType("recipes.demo")
        module.main = function
        monkeypatch.setitem(sys.modules, "recipes.demo", module)

    return put


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_every_command(flag, capsys):
    assert main([flag]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("latentwatch ")


def test_no_command_and_unknown_command(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage:")
    assert main(["dmeo"]) == 2
    err = capsys.readouterr().err
    assert "unknown command 'dmeo'" in err and all(name in err for name in COMMANDS)
    assert len(err.splitlines()) == 1


def test_arguments_reach_the_recipe(recipe):
    got = []
    recipe(got.extend)
    assert main(["demo", "--steps", "3"]) == 0
    assert got == ["--steps", "3"]


@pytest.mark.parametrize("error", [ValueError("bad input"), ModelError("bad input"), FileNotFoundError("bad input")])
def test_expected_errors_are_a_message(recipe, capsys, monkeypatch, error):
    def fail(argv):
        raise error

    recipe(fail)
    monkeypatch.delenv("LATENTWATCH_DEBUG", raising=False)
    assert main(["demo"]) == 1
    err = capsys.readouterr().err
    assert err.splitlines()[0] == "latentwatch demo: error: bad input" and "Traceback" not in err
    monkeypatch.setenv("LATENTWATCH_DEBUG", "1")
    with pytest.raises(type(error)):
        main(["demo"])


def test_defects_keep_their_traceback(recipe):
    def fail(argv):
        raise RuntimeError("a defect")

    recipe(fail)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["demo"])


def test_exit_status_of_a_recipe_is_kept(recipe):
    recipe(lambda argv: sys.exit(2))
    with pytest.raises(SystemExit, match="2"):
        main(["demo"])


def test_interrupt(recipe, capsys):
    def stop(argv):
        raise KeyboardInterrupt

    recipe(stop)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err
