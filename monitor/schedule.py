"""When a monitor measures."""

from __future__ import annotations

from collections.abc import Mapping


def every_steps(every: str | Mapping[str, int]) -> int | None:
    """The n of ``{"steps": n}``, None for the Trainer's own events.

    Raises
    ------
    ValueError
        For anything else than "eval", "save", "epoch" or ``{"steps": n}`` with n > 0.
    """
    if isinstance(every, str) and every in ("eval", "save", "epoch"):
        return None
    if isinstance(every, Mapping) and set(every) == {"steps"}:
        steps = every["steps"]
        if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
            return steps
    raise ValueError(f"`every` must be 'eval', 'save', 'epoch' or {{'steps': n}} with n > 0, got {every!r}.")


def measured_after_checkpoint(every: str, args, state) -> bool:
    """Whether the measurement of the present step comes after its checkpoint, so that a kill can fall between them.

    That is where `on_save` measures, and where the epoch's end does while steps decide on checkpoints.
    """
    at_epoch = every == "epoch" or (every == "eval" and args.eval_strategy == "epoch")
    return every == "save" or (at_epoch and bool(state.epoch) and float(state.epoch).is_integer())
