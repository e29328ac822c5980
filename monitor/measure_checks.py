"""A monitor's measures, before a run spends anything on them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from monitor.journal import ATTACKS, RULES
from monitor.measures.measure import Measure


def check_measures(measures: Measure | Sequence[Measure]) -> tuple[Measure, ...]:
    """The measures of a monitor, one or several.

    Raises
    ------
    ValueError
        For none, for what is no measure, and for names that are no names, are there twice or are taken by the journal.
    """
    given = tuple(measures) if isinstance(measures, (list, tuple)) else (measures,)
    if not given:
        raise ValueError("`measures` is empty; give the monitor at least one measure.")
    for measure in given:
        if isinstance(measure, type) or not all(hasattr(measure, part) for part in ("name", "stimuli", "read")):
            # The repr of what is no measure may be pages of texts.
            raise ValueError(
                "`measures` must be measures such as BiasShift() or a list of them, got "
                f"{repr(measure) if isinstance(measure, (type, str)) else type(measure).__name__}."
            )
        if not isinstance(measure.name, str) or not re.fullmatch(r"[^\s/]+", measure.name):
            raise ValueError(
                f"A measure's `name` is the first part of its readings' names: it must be a word without '/', got "
                f"{measure.name!r}."
            )
    names = [measure.name for measure in given]
    if len(set(names)) < len(names):
        raise ValueError(f"`measures` must have distinct names, got {names}; pass `name=...` to one of them.")
    if taken := {RULES, ATTACKS} & set(names):
        raise ValueError(f"A measure may not be named {taken.pop()!r}, as lines of the journal are; rename it.")
    return given
