"""Readings in TensorBoard, through the writer the Trainer already has."""

from __future__ import annotations

from collections.abc import Sequence

from transformers.integrations import TensorBoardCallback

from monitor.readings import Reading

INTERVALS = "intervals"


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


def write_layout(writer, readings: Sequence[Reading]) -> None:
    """Group the scalars by measure on the Custom Scalars page: headline curves with their intervals as margins."""
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
    writer.add_custom_scalars(layout)
