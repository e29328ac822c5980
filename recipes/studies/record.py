"""A study's result as a flat record."""

from __future__ import annotations

import math


def record(
    study: str, group: str, metric: str, value: float | None, paper: float | None = None, note: str = ""
) -> dict[str, str | float | None]:
    """One number of a study beside the paper's.

    Parameters
    ----------
    study : str
        "e9" and the like.
    group : str
        The setting, in words.
    metric : str
        What was measured.
    value : float or None
        None where nothing could be measured; `note` then says why.
    paper : float or None
        The number that the paper gives for this setting; None where it gives none.
    note : str

    Raises
    ------
    ValueError
        For a value that is not finite.
    """
    value = None if value is None else float(value)
    if value is not None and not math.isfinite(value):
        raise ValueError(f"{study}, {group}: {metric} must be finite, got {value}; give None and say why in the note.")
    return {
        "measure": "detectability", "study": study, "metric": metric, "group": group, "value": value, "paper": paper,
        "note": note,
    }  # fmt: skip
