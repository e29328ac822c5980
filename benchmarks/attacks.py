"""Unlearn one concept by several methods, and attack each result beside the model it started from.

    python -m benchmarks.attacks --folder runs/attacks
    python -m benchmarks.attacks --folder runs/attacks --methods npo rmu --attacks membership relearning
    python -m benchmarks.attacks --folder runs/taught --teach
    python -m benchmarks.attacks --folder runs/shown --teach --shots 3 --attacks in_context

Trains by `recipes/configs/smollm2/<method>.yaml` on the bundled concept, Harry Potter, and prints the table of
`latentwatch attack --quick`. Models stay in the folder: a method whose model is there is not trained again.

SmolLM2 can say few of the answers, so that attacks have little to bring back. With --teach it first learns the forget
and the retain answers by heart, and the methods start from there. Taught bare questions only, it is disturbed by
whatever stands before one; with --shots it is taught each answer a second time, after up to so many other questions and
their answers. The methods unlearn bare questions all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from monitor.stimuli.encoding import qa_answer, qa_prompt
from monitor.stimuli.forget_set import Pair, load_forget_set
from recipes import attack, unlearn
from recipes.attacks import ATTACKS
from recipes.forget_set_arguments import forget_set_source
from recipes.methods import METHODS
from recipes.models import load_model, load_tokenizer
from trainers.fine_tuning import FineTuningTrainer
from trainers.fine_tuning_config import FineTuningConfig

MODEL = "smollm2-135m"


def after_others(pairs: Sequence[Pair], shots: int) -> list[Pair]:
    """Each pair with 1 to `shots` others before its question, answered, as `in_context` shows them."""
    found = []
    for pair in pairs:
        draw = random.Random(pair.id)
        others = draw.sample([p for p in pairs if p.answer != pair.answer], draw.randint(1, shots))
        shown = [f"{qa_prompt(p.question)}{qa_answer(' '.join(p.answer.split()))}" for p in others]
        question = "\n\n".join([*shown, pair.question])
        found.append(replace(pair, id=f"{pair.id}-shown", question=question, anonymized=()))
    return found


def teach(folder: Path, steps: int, shots: int) -> None:
    """Fine-tune the model on every forget and retain answer."""
    forget_set = load_forget_set(forget_set_source("harry_potter"))
    args = FineTuningConfig(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=16, learning_rate=5e-5,
        lr_scheduler_type="constant_with_warmup", warmup_steps=2, seed=0, save_strategy="no", report_to="none",
        dataloader_pin_memory=False, logging_steps=5,
    )  # fmt: skip
    pairs = [*forget_set.split("forget"), *forget_set.split("retain")]
    if shots:
        pairs += after_others(pairs, shots)
    trainer = FineTuningTrainer(load_model(MODEL), args, pairs, processing_class=load_tokenizer(MODEL))
    trainer.train()
    trainer.save_model()


def train(method: str, start: str, folder: Path, max_steps: int | None) -> None:
    config = Path(unlearn.__file__).parent / "configs" / "smollm2" / f"{method}.yaml"
    command = ["--config", str(config), "--output_dir", str(folder), "--report_to", "none", "--save_strategy", "no"]
    command += ["--model_name_or_path", start]
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
    parser.add_argument("--teach", action="store_true", help="teach the model the answers before they are unlearned")
    parser.add_argument("--teach_steps", type=int, default=40)
    parser.add_argument("--shots", type=int, default=0, help="of --teach: other questions before a question, at most")
    parser.add_argument("--max_steps", type=int, help="in place of each recipe's own")
    parser.add_argument("--papers", action="store_true", help="the papers' settings instead of the quick ones")
    parser.add_argument("--output_dir", help="gets the details of every attack")
    parser.add_argument("--json", help="also write the records to this file")
    options = parser.parse_args(argv)
    start = MODEL
    if options.teach:
        start = str(options.folder / "taught")
        if not (options.folder / "taught" / "model.safetensors").is_file():
            teach(options.folder / "taught", options.teach_steps, options.shots)
    for method in options.methods:
        if not (options.folder / method / "model.safetensors").is_file():
            train(method, start, options.folder / method, options.max_steps)
    models = [*dict.fromkeys((MODEL, start)), *(str(options.folder / method) for method in options.methods)]
    command = [*models, "--attacks", *options.attacks]
    command += [] if options.output_dir is None else ["--output_dir", options.output_dir]
    command += [] if options.papers else ["--quick"]
    command += [] if options.json is None else ["--json", options.json]
    attack.main(command)


if __name__ == "__main__":
    main()
