"""Unlearn one concept by several methods, and attack each result beside the model it started from.

    python -m benchmarks.attacks --folder runs/attacks
    python -m benchmarks.attacks --folder runs/attacks --methods npo rmu --attacks membership relearning

Trains by `recipes/configs/smollm2/<method>.yaml` on the bundled concept, Harry Potter, and prints the table of
`latentwatch attack --quick`. Models stay in the folder: a method whose model is there is not trained again.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from recipes import attack, unlearn
from recipes.attacks import ATTACKS
from recipes.methods import METHODS

MODEL = "smollm2-135m"


def train(method: str, folder: Path, max_steps: int | None) -> None:
    config = Path(unlearn.__file__).parent / "configs" / "smollm2" / f"{method}.yaml"
    command = ["--config", str(config), "--output_dir", str(folder), "--report_to", "none", "--save_strategy", "no"]
    command += ["--eval_strategy", "no", "--measures", "behaviour", "--verification", "false"]
    if max_steps is not None:
        command += ["--max_steps", str(max_steps)]
    with contextlib.redirect_stdout(sys.stderr):
        unlearn.main(command)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the models go, or are")
    parser.add_argument("--methods", nargs="+", default=["gradient_ascent", "npo", "rmu", "whp"], choices=list(METHODS))
    parser.add_argument("--attacks", nargs="+", default=["all"], choices=[*ATTACKS, "all"])
    parser.add_argument("--max_steps", type=int, help="in place of each recipe's own")
    parser.add_argument("--papers", action="store_true", help="the papers' settings instead of the quick ones")
    parser.add_argument("--json", help="also write the records to this file")
    options = parser.parse_args(argv)
    for method in options.methods:
        if not (options.folder / method / "model.safetensors").is_file():
            train(method, options.folder / method, options.max_steps)
    command = [MODEL, *(str(options.folder / method) for method in options.methods), "--attacks", *options.attacks]
    command += [] if options.papers else ["--quick"]
    command += [] if options.json is None else ["--json", options.json]
    attack.main(command)


if __name__ == "__main__":
    main()
