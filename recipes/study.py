"""`latentwatch study`: re-run an experiment of a paper and set it beside the published numbers where there are some."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.outputs import check_writable
from recipes.summary import aligned, number, write_records

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_MODEL = "smollm2-135m"
_MAXBENCH = "maxbench"  # has a config and arguments of its own; the experiments e1, e2, ... have a few in common
_FEW = 3  # settings that a note names; more would drown it


def main(argv: Sequence[str] | None = None) -> None:
    """List the studies, or run one and print it.

    Exit status 0 if it ran, 2 for a wrong command.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    named = bool(given) and given[0].lower() == _MAXBENCH
    if named or any(word.split("=")[0] == "--config" for word in given):
        from recipes.studies import maxbench  # brings torch and transformers with it

        return maxbench.main(given[named:])
    parser = _parser()
    arguments = parser.parse_args(argv)
    titles = study_titles()
    if arguments.name is None:
        _refuse_options(parser, argv)
        _list(titles)
        return
    name = arguments.name.lower()  # the paper writes E9
    if name not in titles:
        parser.error(f"NAME: expected one of {', '.join([*titles, _MAXBENCH])}, got {arguments.name!r}")
    if arguments.json not in (None, "-"):  # better known before the work than after it
        check_writable(Path(arguments.json).parent, "json")
    run = importlib.import_module(f"recipes.studies.{name}").run
    options = {"quick": arguments.quick, "seed": arguments.seed}
    parameters = inspect.signature(run).parameters
    if "model" in parameters:  # None by default: the study has a part on a model, and does without
        options["model"] = arguments.model or (None if parameters["model"].default is None else _MODEL)
    elif arguments.model is not None:
        parser.error(f"--model: {name} makes its own data and reads no model; leave it out")
    records = [found | options for found in run(**options)]
    if arguments.json != "-":  # standard output holds either the table or the JSON, so that it can be piped
        print(f"{name.upper()}: {titles[name]}" + (" (quick)" if arguments.quick else ""))
        print()
        print(format_records(records))
    write_records(records, arguments.json)


def study_titles() -> dict[str, str]:
    """Name and title of every experiment of the detectability paper, in its order.

    Notes
    -----
    Read from the source: importing all of them takes seconds, and some need packages that the others do not.
    """
    sources = [file for file in files("recipes.studies").iterdir() if re.fullmatch(r"e\d+\.py", file.name)]
    return {source.name[:-3]: _title(source) for source in sorted(sources, key=lambda file: int(file.name[1:-3]))}


def _title(source: Traversable) -> str:
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["TITLE"]:
            return ast.literal_eval(node.value)
    raise ValueError(f"{source.name} has no TITLE")


def format_records(records: Sequence[Mapping]) -> str:
    """The records as a table, ours beside the paper's, and their notes below it."""
    table = [("setting", "metric", "ours", "paper")]
    for found in records:
        paper = "" if found["paper"] is None else f"{found['paper']:g}"
        table.append((found["group"], found["metric"], number(found["value"], None, None), paper))
    return "\n".join([aligned(table), *_notes(records)])


def _notes(records: Sequence[Mapping]) -> list[str]:
    """Every note once, with the settings it belongs to where these are few."""
    groups: dict[str, list[str]] = {}
    for found in records:
        if found["note"]:
            of_note = groups.setdefault(found["note"], [])
            if found["group"] not in of_note:
                of_note.append(found["group"])
    all_groups = {found["group"] for found in records}
    lines = []
    for note, of_note in groups.items():
        named = len(of_note) <= _FEW and len(of_note) < len(all_groups)
        lines.append(f"- {'; '.join(of_note)}: {note}" if named else f"- {note}")
    return ["", *lines] if lines else []


def _list(titles: Mapping[str, str]) -> None:
    maxbench = _title(files("recipes.studies").joinpath(f"{_MAXBENCH}.py"))
    shown = {**titles, _MAXBENCH: maxbench}
    width = max(map(len, shown))
    for name, title in shown.items():
        print(f"{name.ljust(width)}  {title}")
    print()
    print("latentwatch study NAME runs one; --quick in seconds (maxbench: minutes), on less data.")
    print(
        "latentwatch study --config recipes/configs/maxbench.yaml, and the arguments of latentwatch study maxbench -h"
    )


def _refuse_options(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> None:
    given = sys.argv[1:] if argv is None else argv
    if given:
        parser.error(f"NAME is missing: {' '.join(given)} says how to run a study, not which")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="latentwatch study",
        description="Re-run an experiment of the detectability paper (arXiv 2609.22337) and set it beside the "
        "published numbers. Without a name: list the experiments. `maxbench` has arguments of its own: "
        "latentwatch study maxbench --help.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="e1, e2, ...; left out: list them")
    parser.add_argument("--quick", action="store_true", help="fewer replicates: seconds instead of minutes")
    parser.add_argument("--seed", type=int, default=42, help="of everything drawn at random (default: 42)")
    parser.add_argument(
        "--model",
        help=f"of the studies that read one: a folder, a Hub id or an embedded name (default: {_MODEL}; e10: none)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the numbers as JSON records; - for standard output")
    return parser


if __name__ == "__main__":
    from recipes.cli import main as command

    sys.exit(command(["study", *sys.argv[1:]]))
