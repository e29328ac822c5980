"""Which checkpoint a run continues from, whether it may, and whether there is anything left to do."""

from __future__ import annotations

import json
import logging
from dataclasses import fields
from pathlib import Path

from transformers import TrainingArguments
from trl import ModelConfig

from trainers.checkpoints import last_complete_checkpoint
from trainers.unlearning_config import UnlearningConfig

logger = logging.getLogger(__name__)

RECORD = "unlearn.json"  # in the output directory: what the run was started with


def run_record(method: str, training: UnlearningConfig, model_arguments: ModelConfig) -> dict:
    """What a checkpoint cannot be continued with other values of: the method, its own settings, the model."""
    own = {field.name for field in fields(training)} - {field.name for field in fields(TrainingArguments)}
    own -= {"reference_max_bytes"}  # where the reference is kept, not what it says
    settings = {name: getattr(training, name) for name in sorted(own)}
    model = model_arguments.model_name_or_path
    return {"method": method, "model": str(model), "use_peft": model_arguments.use_peft, **settings}


def write_record(training: UnlearningConfig, record: dict) -> None:
    path = Path(training.output_dir) / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def check_same_run(checkpoint: str | None, record: dict) -> None:
    """Refuse to continue a run with another method, model or loss: its journal would mix two runs."""
    path = Path(checkpoint).parent / RECORD if checkpoint is not None else None
    if path is None or not path.is_file():
        return
    stored = json.loads(path.read_text(encoding="utf-8"))
    other = [
        f"{name} {stored[name]!r}, now {value!r}" for name, value in record.items() if stored.get(name, value) != value
    ]
    if other:
        raise ValueError(
            f"`resume_from_checkpoint`: the run in {path.parent} has {'; '.join(other)}. Continue it with what it "
            "started with, or start another in a folder of its own."
        )


def is_finished(checkpoint: str | None, training: UnlearningConfig) -> bool:
    """Whether the checkpoint is the last one of a run of this length: the Trainer would train a step beyond its end."""
    if checkpoint is None:
        return False
    state = json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))
    if training.max_steps > 0:
        return state["global_step"] >= training.max_steps
    return state["num_train_epochs"] == training.num_train_epochs and state["global_step"] >= state["max_steps"]


def find_checkpoint(training: UnlearningConfig) -> str | None:
    """The checkpoint to resume from: a path, or the newest complete one of the output directory for "true".

    A run that was stopped before its first checkpoint starts anew, so that one command always continues.
    """
    wanted = training.resume_from_checkpoint
    if wanted is None or str(wanted).lower() in ("false", "none", ""):
        return None
    if str(wanted).lower() != "true":
        if not Path(wanted).is_dir():
            raise ValueError(f"`resume_from_checkpoint`: no such folder: {wanted}. Give a checkpoint folder, or true.")
        if Path(wanted).resolve().parent != Path(training.output_dir).resolve():
            raise ValueError(
                f"`resume_from_checkpoint` {wanted} is of another run than `output_dir` {training.output_dir}, where "
                f"its journal and reference are not. Pass --output_dir {Path(wanted).parent}."
            )
        return str(wanted)
    newest = last_complete_checkpoint(training.output_dir)
    if newest is None:
        logger.warning("No complete checkpoint in %s yet: the run starts at its first step.", training.output_dir)
    return newest
