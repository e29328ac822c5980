"""What the Trainer's metrics, its trackers and TensorBoard are told of readings."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

from monitor.readings import Reading
from monitor.undisturbed import evaluation_mode


def headlines(readings: Sequence[Reading], wanted: Mapping[str, Collection[str]]) -> dict[str, float]:
    """Valid headline readings as metrics ``eval_<measure>_<metric>``; `wanted` maps measures to their metrics."""
    metrics: dict[str, float | None] = {}
    for reading in readings:
        if not reading.group and reading.metric in wanted[reading.measure]:
            # The first is the headline. Where it is not valid, no other layer's value may take its place.
            metrics.setdefault(f"eval_{reading.measure}_{reading.metric}", reading.value if reading.valid else None)
    return {name: value for name, value in metrics.items() if value is not None}


def stand_in_for_best(args, metrics: dict, wanted: Mapping[str, Collection[str]]) -> None:
    """A reading that decides on the best model and is not there counts as the worst; missing, it would end the run."""
    chosen = args.metric_for_best_model
    if chosen is None:
        return
    key = chosen if chosen.startswith("eval_") else f"eval_{chosen}"
    ours = {f"eval_{measure}_{metric}" for measure, names in wanted.items() for metric in names}
    if key in ours and key not in metrics:
        warnings.warn(
            f"`metric_for_best_model` is {chosen}, and that reading is not valid at this step, or was not taken: it "
            "counts as the worst. The journal says why.",
            stacklevel=2,
        )
        metrics[key] = float("-inf") if args.greater_is_better else float("inf")


def log(trainer, model, metrics: dict[str, float]) -> None:
    """To every tracker, through the Trainer's own log."""
    with evaluation_mode(model):
        # TRL's `log` empties its own metrics of the current mode: the training metrics are not ours to take. And the
        # Trainer takes any log for the one that is due at this step, which would lose its training loss.
        due = trainer.control.should_log
        trainer.log(metrics)
        trainer.control.should_log = due
