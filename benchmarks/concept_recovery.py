"""Unlearn one concept by several methods, and ask whether it, and one that nobody touched, can still be recovered.

    python -m benchmarks.concept_recovery --folder runs/concepts
    python -m benchmarks.concept_recovery --folder runs/concepts --forget plants --retain vehicles --control animals

Trains by `recipes/configs/smollm2/<method>.yaml` on the clues of one concept as questions, with another to be retained,
and reads `ConceptRecovery` of these and of the control before and after; then the sampling attack, with points of the
subspaces that the first model had. Models stay in the folder: a method whose model is there is not trained again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from monitor.callback import FOLDER
from monitor.journal import Journal
from monitor.stimuli.concept_pairs import concept_pairs
from monitor.stimuli.concepts import CONCEPTS, load_concept_sets
from recipes import attack, unlearn
from recipes.methods import METHODS
from recipes.summary import aligned, number, summarise

MODEL = "smollm2-135m"
SHOWN = ("probe_accuracy", "coverage", "coverage_reference", "exclusion", "exclusion_reference", "angle_mean",
         "offset_drift", "effective_rank")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where pairs and models go, or are")
    parser.add_argument("--methods", nargs="+", default=["npo", "rmu"], choices=list(METHODS))
    parser.add_argument("--forget", default="animals", choices=CONCEPTS)
    parser.add_argument("--retain", default="vehicles", choices=CONCEPTS)
    parser.add_argument("--control", default="countries", choices=CONCEPTS)
    parser.add_argument("--max_steps", type=int, help="in place of each recipe's own")
    parser.add_argument("--no_attack", action="store_true", help="leave the sampling attack out")
    parser.add_argument("--attacked", nargs="+", help="concepts of the sampling attack; by default all three")
    parser.add_argument("--output_dir", help="gets the details of every attack")
    options = parser.parse_args(argv)
    names = (options.forget, options.retain, options.control)
    if len(set(names)) < 3:
        parser.error("--forget, --retain and --control must be three concepts")

    sets = load_concept_sets(names)
    options.folder.mkdir(parents=True, exist_ok=True)
    pairs = options.folder / "pairs.jsonl"
    records = concept_pairs(sets[options.forget], [sets[options.retain]])
    pairs.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    for method in options.methods:
        if not (options.folder / method / "model.safetensors").is_file():
            train(method, pairs, names, options)
    roles = dict(zip(names, ("forget", "retain", "untouched"), strict=True))
    for method in options.methods:
        print(f"\n{method}, start -> end")
        print(table(options.folder / method, roles))
    if not options.no_attack:
        models = [MODEL, *(str(options.folder / method) for method in options.methods)]
        command = [*models, "--reference", MODEL, "--attacks", "sampling", "--concepts", *(options.attacked or names)]
        attack.main([*command, *(["--output_dir", options.output_dir] if options.output_dir else [])])


def train(method: str, pairs: Path, concepts: Sequence[str], options) -> None:
    config = Path(unlearn.__file__).parent / "configs" / "smollm2" / f"{method}.yaml"
    command = ["--config", str(config), "--output_dir", str(options.folder / method), "--forget_set", str(pairs)]
    command += ["--report_to", "none", "--save_strategy", "no", "--eval_strategy", "no", "--verification", "false"]
    command += ["--measures", "behaviour", "concept_recovery", "--concepts", *concepts]
    if options.max_steps is not None:
        command += ["--max_steps", str(options.max_steps)]
    with contextlib.redirect_stdout(sys.stderr):
        unlearn.main(command)


def table(folder: Path, roles: dict[str, str]) -> str:
    found = {(r["metric"], r["group"]): r for r in summarise(Journal(folder / FOLDER / "journal.jsonl").lines)}
    rows = [("", *(f"{concept} ({role})" for concept, role in roles.items()))]
    for metric in SHOWN:
        cells = []
        for concept in roles:
            r = found[metric, concept]
            cells.append(f"{number(r['start'], None, None)} -> {number(r['end'], r['end_low'], r['end_high'])}")
        rows.append((metric, *cells))
    for split in ("forget", "retain"):
        r = found[f"{split}_nll", ""]
        rows.append((f"{split} NLL", f"{r['start']:.2f} -> {r['end']:.2f}", "", ""))
    return aligned(rows)


if __name__ == "__main__":
    main()
