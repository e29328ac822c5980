"""`latentwatch check`: say what is wrong with a forget set's files, line by line."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from monitor.stimuli.forget_set import SPLITS, ForgetSet, Problem, load_forget_set, validate_forget_set
from recipes.concepts import concept_names
from recipes.forget_set_arguments import column_mapping, forget_set_source

FRAGMENTATION_PAIRS = 10  # as many as its batches


def main(argv: Sequence[str] | None = None) -> None:
    """Print every problem as ``file:line: field: message`` and what the file holds.

    Exit status 0 if the file can be used (warnings allowed), 1 if it cannot, 2 for a wrong command.
    """
    arguments = _parser().parse_args(argv)
    options = {"variants": arguments.variants, "entities": arguments.entities}
    try:
        source = forget_set_source(arguments.file)
        options["columns"] = column_mapping(arguments.columns)
        problems = validate_forget_set(source, **options)
    except (FileNotFoundError, ValueError) as error:  # a wrong path or option, not a fault in the file
        print(f"latentwatch check: {error}", file=sys.stderr)
        sys.exit(2)
    n_errors = sum(problem.severity == "error" for problem in problems)
    forget_set = None
    if not n_errors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # every unchanged pair is among the problems already
            forget_set = load_forget_set(source, **options)
    if arguments.json is not None:
        _write_json(arguments.json, _records(problems, forget_set))
    if arguments.json != "-":
        files = source.values() if isinstance(source, dict) else [source]
        _print(", ".join(map(str, files)), problems, forget_set)
    if n_errors:
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="latentwatch check", description="Say what is wrong with a forget set.")
    parser.add_argument(
        "file",
        nargs="+",
        help="JSONL, .json or .parquet file, or a file a split, forget=FILE retain=FILE heldout=FILE; or a bundled "
        f"concept: {', '.join(concept_names())}",
    )
    parser.add_argument("--entities", help="entity table (default: entities.json beside the file)")
    parser.add_argument(
        "--columns",
        nargs="+",
        metavar="NAME=COLUMN",
        help="our names to the file's, after the file: question=prompt answer=response forget=qa_pairs",
    )
    parser.add_argument("--variants", type=int, default=8, help="anonymised variants a pair (default: 8)")
    parser.add_argument("--json", metavar="FILE", help="write the findings as JSON records; - for standard output")
    return parser


def _print(files: str, problems: list[Problem], forget_set: ForgetSet | None) -> None:
    for problem in problems:
        message = "warning: " + problem.message if problem.severity == "warning" else problem.message
        print(Problem(problem.line, problem.field, message, problem.severity, problem.file))
    n_errors = sum(problem.severity == "error" for problem in problems)
    print(f"{files}: {n_errors} error(s), {len(problems) - n_errors} warning(s)")
    if forget_set is not None:
        for split in SPLITS:
            usable = len(forget_set.fragmentation_pairs(split))
            print(f"  {split:<8} {len(forget_set.split(split)):>5} pairs, {usable} usable for fragmentation")
        if len(forget_set.fragmentation_pairs("forget")) < FRAGMENTATION_PAIRS:
            print(
                f"  warning: fragmentation needs {FRAGMENTATION_PAIRS} usable forget pairs: pairs that name an entity "
                "of entities.json, or bring their own anonymized variants"
            )
        print(f"  {forget_set.n_variants} anonymised variants a pair")


def _records(problems: list[Problem], forget_set: ForgetSet | None) -> list[dict]:
    """Flat records: counts under the journal's names, problems with their place."""
    records: list[dict] = []
    if forget_set is not None:
        for split in SPLITS:
            counts = {
                "pairs": len(forget_set.split(split)),
                "usable_pairs": len(forget_set.fragmentation_pairs(split)),
            }
            for metric, value in counts.items():
                records.append({"measure": "forget_set", "metric": metric, "group": split, "value": value})
    for problem in problems:
        records.append(
            {
                "measure": "forget_set",
                "metric": problem.severity,
                "file": problem.file,
                "line": problem.line or None,
                "field": problem.field,
                "note": problem.message,
            }
        )
    return records


def _write_json(target: str, records: list[dict]) -> None:
    text = json.dumps(records, ensure_ascii=False, indent=1)
    if target == "-":
        print(text)
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        print(f"latentwatch check: --json {target}: {error.strerror}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
