"""A reading is one number with what is needed to use it; the journal is a run's readings on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Reading:
    """One measured number.

    Parameters
    ----------
    measure, metric : str
        The measure and the quantity, as in ``"bias_shift"`` and ``"delta_b"``.
    value : float or None
        The number. A value that is not finite is turned into ``None`` with ``valid=False``.
    group : str
        The part of the stimuli it was read on; ``""`` for the measure's own whole.
    layer : int or None
        Hidden-state index (0 embeddings, L after the final norm); None if it has none.
    low, high : float or None
        95 % interval, where the measure has one.
    higher_means : str
        What a higher value says, in a few words ("more coherent", "towards the positive attributes").
    range : tuple of (float, float)
        The values the metric can take; infinities allowed.
    valid : bool
        False when the value must not be used.
    note : str
        Why it is invalid, or what to know when reading it.
    """

    measure: str
    metric: str
    value: float | None
    group: str = ""
    layer: int | None = None
    low: float | None = None
    high: float | None = None
    higher_means: str = ""
    range: tuple[float, float] = (-math.inf, math.inf)
    valid: bool = True
    note: str = ""

    def __post_init__(self) -> None:
        # Only Python floats may enter the Trainer's log history: numpy scalars break the checkpoint's JSON.
        for name in ("value", "low", "high"):
            number = getattr(self, name)
            if number is not None:
                number = float(number)
                object.__setattr__(self, name, number if math.isfinite(number) else None)
                if name == "value" and not math.isfinite(number):
                    object.__setattr__(self, "valid", False)
                    object.__setattr__(self, "note", self.note or f"the value was {number}")
        if self.value is None and self.valid:
            object.__setattr__(self, "valid", False)
            object.__setattr__(self, "note", self.note or "no value")

    @property
    def name(self) -> str:
        """``measure/metric`` or ``measure/metric/group``: the name of its TensorBoard scalar."""
        return "/".join(part for part in (self.measure, self.metric, self.group) if part)
