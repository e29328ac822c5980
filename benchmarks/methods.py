"""Every unlearning method on one concept, by its SmolLM2 recipe: what it does to the forget and to the retain answers.

    python -m benchmarks.methods
    python -m benchmarks.methods --methods npo rmu --measures behaviour fragmentation

Runs `latentwatch unlearn --config recipes/configs/smollm2/<method>.yaml` for each and prints one table: the answers'
NLL (token means of each pair, averaged over pairs; nats) from start to end, and whether the model collapsed. Models are
not kept. Greedy answers are left out: SmolLM2-135M does not say the forget answers to begin with.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from recipes import unlearn
from recipes.methods import METHODS
from recipes.summary import write_records

COLUMNS = (
    ("forget NLL", "behaviour", "forget_nll"),
    ("retain NLL", "behaviour", "retain_nll"),
    ("held-out NLL", "behaviour", "heldout_nll"),
    ("knowledge z", "fragmentation", "knowledge_z"),
)


def run(method: str, options: argparse.Namespace) -> dict:
    config = Path(unlearn.__file__).parent / "configs" / "smollm2" / f"{method}.yaml"
    with tempfile.TemporaryDirectory() as folder:
        command = ["--config", str(config), "--output_dir", folder, "--report_to", "none", "--save_strategy", "no"]
        command += ["--disable_tqdm", "true", "--eval_strategy", "no", "--measures", *options.measures]
        command += ["--verification", "false"]
        if options.max_steps is not None:
            command += ["--max_steps", str(options.max_steps)]
        start = time.perf_counter()
        parsed = unlearn.parse_arguments(command)
        with contextlib.redirect_stdout(sys.stderr):
            records = unlearn.run(*parsed)
        seconds = time.perf_counter() - start
    found = {(r["measure"], r["metric"]): r for r in records if not r["group"]}
    row = {"method": method, "retain_term": parsed[1].needs_retain, "seconds": seconds}
    for _, measure, metric in COLUMNS:
        if (measure, metric) in found:
            record = found[measure, metric]
            row |= {f"{metric}_start": record["start"], f"{metric}_end": record["end"]}
    row["collapsed"] = bool(found["behaviour", "collapsed"]["end"])
    row["note"] = found["behaviour", "collapsed"]["note"]
    return row


def table(rows: Sequence[dict]) -> str:
    """Markdown."""
    shown = [(title, metric) for title, _, metric in COLUMNS if any(f"{metric}_end" in row for row in rows)]
    lines = [
        "| method | retain term | " + " | ".join(title for title, _ in shown) + " | collapsed |",
        "|---|---|" + "---|" * (len(shown) + 1),
    ]
    for row in rows:
        cells = [f"`{row['method']}`", "yes" if row["retain_term"] else "no"]
        cells += [_change(row.get(f"{metric}_start"), row.get(f"{metric}_end")) for _, metric in shown]
        lines.append("| " + " | ".join([*cells, "yes" if row["collapsed"] else "no"]) + " |")
    return "\n".join(lines)


def _change(start: float | None, end: float | None) -> str:
    return "" if start is None or end is None else f"{start:.2f} → {end:.2f}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--measures", nargs="+", default=["behaviour"])
    parser.add_argument("--max_steps", type=int, help="in place of each recipe's own")
    parser.add_argument("--json", help="also write the rows to this file, - for standard output")
    options = parser.parse_args(argv)
    rows = []
    for method in options.methods:
        rows.append(run(method, options))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows), file=sys.stderr if options.json == "-" else sys.stdout)
    write_records(rows, options.json)


if __name__ == "__main__":
    main()
