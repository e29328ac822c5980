"""Open-ended instructions: what a model is asked while it is steered."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Instructions:
    """Instructions by what they are for; no text is in two of them, and none mentions an entity of a bundled concept.

    Parameters
    ----------
    validation : tuple of str
        Five, for choosing the strength of steering.
    test : tuple of str
        Five, for what is reported.
    norms : tuple of str
        72 others, for the usual range of activation norms.
    """

    validation: tuple[str, ...]
    test: tuple[str, ...]
    norms: tuple[str, ...]


def load_instructions() -> Instructions:
    """The bundled instructions: this project's own, of the kind and in the numbers of MAxBench, Section 4.2."""
    text = files("monitor.stimuli").joinpath("concept_data", "instructions.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return Instructions(
        **{
            split: tuple(row["instruction"] for row in rows if row["split"] == split)
            for split in ("validation", "test", "norms")
        }
    )
