"""What an attack found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AttackResult:
    """One attack on one model.

    Parameters
    ----------
    name : str
        The attack: "membership", "relearning", ...
    score : float
        The attack's own measure of success, higher meaning that more came back; its docstring gives unit and range.
    low, high : float or None
        95 % interval of the score over the questions (or what else was sampled); None where there is none.
    baseline : float or None
        The same measure without the attack: what the score would be if the attack did nothing.
    n : int
        Questions the score rests on.
    details : mapping
        Whatever else is worth keeping, plain JSON values only: further scores, the settings, a record a question.

    Raises
    ------
    ValueError
        For a score that is not finite, or an interval that does not hold it.
    """

    name: str
    score: float
    low: float | None
    high: float | None
    baseline: float | None
    n: int
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in ("score", "low", "high", "baseline"):
            number = getattr(self, part)
            if number is None and part != "score":
                continue
            if not math.isfinite(number):
                raise ValueError(f"`{part}` of the attack {self.name} must be finite, got {number}.")
            object.__setattr__(self, part, float(number))
        if (self.low is None) != (self.high is None):
            raise ValueError(f"`low` and `high` of the attack {self.name} must both be given or both be None.")
        if self.low is not None and not self.low - 1e-9 <= self.score <= self.high + 1e-9:
            raise ValueError(
                f"The interval of the attack {self.name} must hold its score {self.score}, got {self.low} to "
                f"{self.high}."
            )
        object.__setattr__(self, "n", int(self.n))

    def record(self) -> dict[str, Any]:
        """A flat JSON record without the details."""
        names = ("name", "score", "low", "high", "baseline", "n")
        return {name: getattr(self, name) for name in names}
