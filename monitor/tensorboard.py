"""Readings in TensorBoard, through the writer the Trainer already has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from torch.utils.tensorboard.summary import hparams
from transformers import TrainingArguments
from transformers.integrations import TensorBoardCallback

from monitor.journal import ATTACKS
from monitor.readings import Reading

INTERVALS = "intervals"
# Of the Trainer's hundred-odd arguments, those that runs are compared by; what a subclass adds comes on top.
_SETTINGS = (
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "weight_decay",
    "lr_scheduler_type",
    "warmup_steps",
    "optim",
    "seed",
)


def find_writer(trainer):
    """The Trainer's own SummaryWriter, or None while there is none.

    A second writer in the same directory would hide the first: TensorBoard reads only the newest event file of a
    directory.
    """
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback):
            return callback.tb_writer
    return None


def write_scalars(writer, readings: Sequence[Reading], step: int) -> None:
    """One scalar a valid reading: ``measure/metric[/group]``, and ``.../layer_<i>`` for the layers scanned beside the
    headline one (the first of its name)."""
    seen: set[str] = set()
    for reading in readings:
        first = reading.name not in seen
        seen.add(reading.name)
        if not reading.valid or (not first and reading.layer is None):
            continue
        writer.add_scalar(reading.name if first else f"{reading.name}/layer_{reading.layer:02d}", reading.value, step)
        if first and reading.low is not None and reading.high is not None:
            # A family of their own: beside the values they would triple the cards of every measure.
            writer.add_scalar(f"{INTERVALS}/{reading.name}/low", reading.low, step)
            writer.add_scalar(f"{INTERVALS}/{reading.name}/high", reading.high, step)


def write_layout(writer, readings: Sequence[Reading], attacks: Sequence[str] = ()) -> None:
    """Group the scalars by measure on the Custom Scalars page: headline curves with their intervals as margins.

    `attacks` are names: each gets a chart of its score and of its baseline, which is the score without the attack.
    """
    layout: dict[str, dict] = {}
    for reading in readings:
        family = layout.setdefault(reading.measure, {})
        if reading.name in family:
            continue
        if reading.low is not None:
            bounds = [f"{INTERVALS}/{reading.name}/{bound}" for bound in ("low", "high")]
            family[reading.name] = ["Margin", [reading.name, *bounds]]
        else:
            family[reading.name] = ["Multiline", [f"^{reading.name}$"]]
    for name in attacks:
        tag = f"{ATTACKS}/{name}"
        layout.setdefault(ATTACKS, {})[tag] = ["Multiline", [f"^{tag}$", f"^{tag}_baseline$"]]
    writer.add_custom_scalars(layout)


def write_hparams(writer, args: TrainingArguments, model, tags: Sequence[str]) -> None:
    """The run's settings for the HParams page, with the last values of the scalars `tags` as its metrics.

    Not by `SummaryWriter.add_hparams`, which opens a second writer.
    """
    own = {f.name for f in fields(args)} - {f.name for f in fields(TrainingArguments)}
    values = args.to_sanitized_dict()
    settings = {name: values[name] for name in (*_SETTINGS, *sorted(own)) if values.get(name) is not None}
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    if name:
        settings["model"] = name
    for part in hparams(settings, dict.fromkeys(tags, 0.0)):  # the page takes the values from the scalars
        writer.file_writer.add_summary(part)
