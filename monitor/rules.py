"""Rules: conditions on readings, parsed by a small grammar, and what stops a run because of them."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from monitor.readings import Reading

_OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
_UNSIGNED = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_NUMBER = re.compile(rf"[+-]?{_UNSIGNED}")
_RELATIVE = re.compile(
    rf"(?:(?P<factor>[+-]?{_UNSIGNED})\s*\*\s*)?start(?:\s*(?P<sign>[+-])\s*(?P<offset>{_UNSIGNED}))?"
)
FORMS = (
    'Forms: "<measure>/<metric> < 0.5" or "<measure>/<metric>/<group> < 0.5", with one of <, <=, >, >=, and in place '
    'of the number also "start", "1.2 * start", "start + 0.5" or "start - 0.1".'
)


@dataclass(frozen=True)
class Condition:
    """A comparison of one reading with a number, or with the same reading at the start of the run.

    ``measure/metric[/group] <op> factor * start + offset``; made by `Condition.parse`, and `str` gives a text that
    parses to the same condition.

    Parameters
    ----------
    measure, metric, group : str
        The reading's name, as in the journal; the group is ``""`` for the measure's own whole. Where several layers
        are scanned the headline reading is meant, the first of its name. ``attacks/<name>`` is the score of an attack
        that another rule starts.
    op : {"<", "<=", ">", ">="}
    factor, offset : float
        Of the threshold; the factor is 0 for a plain number.
    """

    measure: str
    metric: str
    group: str
    op: str
    factor: float = 0.0
    offset: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition such as ``"bias_shift/delta_b < -0.02"`` or ``"behaviour/retain_nll > 1.2 * start"``.

        Raises
        ------
        ValueError
            If the text has not this form; the message says which part is wrong.
        """
        if not isinstance(text, str):
            raise ValueError(f"A condition must be a string, got {text!r}. {FORMS}")
        signs = re.findall("[<>=!]+", text)
        if not signs:
            raise ValueError(f"The condition {text!r} compares nothing: it has none of <, <=, >, >=. {FORMS}")
        if len(signs) > 1:
            raise ValueError(f"The condition {text!r} compares more than once; give one rule for each. {FORMS}")
        (op,) = signs
        if op not in _OPERATORS:
            raise ValueError(f"The condition {text!r} compares by {op!r}, which is none of <, <=, >, >=. {FORMS}")
        left, right = (side.strip() for side in text.split(op))
        return cls(*_parse_name(left, text), op, *_parse_threshold(right, text))

    @property
    def name(self) -> str:
        """The reading's name: ``measure/metric`` or ``measure/metric/group``."""
        return "/".join(part for part in (self.measure, self.metric, self.group) if part)

    def threshold(self, start: float | None) -> float | None:
        """What the reading is compared with; None as long as it is relative to a start that has not been read."""
        if self.factor == 0.0:
            return self.offset
        return None if start is None else self.factor * start + self.offset

    def holds(self, value: float, start: float | None) -> bool:
        threshold = self.threshold(start)
        return threshold is not None and _OPERATORS[self.op](value, threshold)

    def decided(self, least: float, most: float) -> bool | None:
        """Whether it holds, or not, for every value from `least` to `most`; None where that depends on the value."""
        if self.factor != 0.0:
            return None
        ends = {self.holds(least, None), self.holds(most, None)}
        return ends.pop() if len(ends) == 1 else None

    def __str__(self) -> str:
        if self.factor == 0.0:
            return f"{self.name} {self.op} {_plain(self.offset)}"
        start = "start" if self.factor == 1.0 else f"{_plain(self.factor)} * start"
        sign = "-" if self.offset < 0 else "+"
        offset = f" {sign} {_plain(abs(self.offset))}" if self.offset else ""
        return f"{self.name} {self.op} {start}{offset}"


def _parse_name(name: str, text: str) -> tuple[str, str, str]:
    parts = [part.strip() for part in name.split("/", 2)]
    if len(parts) < 2 or not all(parts) or any(re.search(r"\s", part) for part in parts[:2]):
        raise ValueError(f"The condition {text!r} must begin with a reading's name, got {name!r}. {FORMS}")
    measure, metric, *group = parts
    return measure, metric, *(group or [""])


def _parse_threshold(right: str, text: str) -> tuple[float, float]:
    """Factor of the start, and offset."""
    if _NUMBER.fullmatch(right):
        factor, offset = 0.0, float(right)
    elif found := _RELATIVE.fullmatch(right):
        factor = float(found["factor"] or 1.0)
        offset = float((found["sign"] or "") + (found["offset"] or "0"))
        if factor == 0.0:
            raise ValueError(f"The condition {text!r} multiplies the start by 0; write the number alone. {FORMS}")
    else:
        raise ValueError(
            f"The condition {text!r} must end with a number or a threshold relative to the start, got {right!r}. "
            f"{FORMS}"
        )
    if not math.isfinite(factor) or not math.isfinite(offset):
        raise ValueError(f"The condition {text!r} has a number that is not finite, in {right!r}. {FORMS}")
    return factor, offset


def _plain(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


@dataclass(frozen=True)
class StopWhen:
    """Stop training when a condition has held for `patience` measurements in a row.

    Parameters
    ----------
    condition : str or Condition
        As in `Condition.parse`.
    patience : int, default 1
        Measurements in a row at which the condition must hold.
    after_step : int, default 0
        Only measurements after this step count; the one before training never does.

    Notes
    -----
    A measurement at which the reading is invalid or missing says nothing: it neither adds to the measurements in a row
    nor ends them. The same holds where the condition is relative and the start has not been read yet; the start is the
    first valid reading of that name in the run. For a condition on an attack's score each attack is a measurement.
    """

    condition: Condition
    patience: int = field(default=1, kw_only=True)
    after_step: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_counts(self.patience, self.after_step)
        if not isinstance(self.condition, Condition):
            object.__setattr__(self, "condition", Condition.parse(self.condition))


def check_counts(patience: int, after_step: int) -> None:
    for name, value, least in (("patience", patience, 1), ("after_step", after_step, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")


class Streak:
    """The measurements in a row at which a condition has held.

    Attributes
    ----------
    held : list of (step, value)
        The measurements in a row up to now.
    start : (step, value) or None
        The first valid reading.
    """

    def __init__(self, condition: Condition, patience: int, after_step: int) -> None:
        self.condition = condition
        self.patience = patience
        self.after_step = after_step
        self.held: list[tuple[int, float]] = []
        self.start: tuple[int, float] | None = None

    def update(self, step: int, values: Mapping[str, float | None]) -> bool:
        """Take one measurement, values by name as from `values_by_name`; whether the condition has held for long
        enough, and holds now."""
        value = values.get(self.condition.name)
        if value is None:
            return False
        if self.start is None:
            self.start = (step, value)
        if step <= self.after_step:
            return False
        if not self.condition.holds(value, self.start[1]):
            self.held = []
            return False
        self.held.append((step, value))
        return len(self.held) >= self.patience

    def evidence(self) -> str:
        """In words: the readings that make the streak, and what they were compared with."""
        readings = ", ".join(f"{value:.6g} at step {step}" for step, value in self.held)
        if self.condition.factor == 0.0 or self.start is None:
            return readings
        step, value = self.start
        return f"{readings}; start {value:.6g} at step {step}, threshold {self.condition.threshold(value):.6g}"


def values_by_name(readings: Iterable[Reading]) -> dict[str, float | None]:
    """The headline value of each name, None where it is not valid."""
    values: dict[str, float | None] = {}
    for reading in readings:
        # The first of its name is the headline; no other layer may take its place where it is not valid.
        values.setdefault(reading.name, reading.value if reading.valid else None)
    return values
