"""Instructions answered with and without a concept: what ReFT-r1 learns from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

from monitor.stimuli.concepts import CONCEPTS


@dataclass(frozen=True)
class PairedResponse:
    """One instruction with two answers of one sentence.

    Parameters
    ----------
    instruction : str
        Does not ask for the concept.
    positive : str
        Mentions an entity of the concept.
    negative : str
        The same sentence without one.
    """

    instruction: str
    positive: str
    negative: str


def load_paired_responses(concept: str) -> tuple[PairedResponse, ...]:
    """The bundled pairs of a concept.

    Parameters
    ----------
    concept : str
        One of `monitor.stimuli.concepts.CONCEPTS`.

    Returns
    -------
    tuple of PairedResponse
        14 pairs, after MAxBench, Appendix B (ReFT-r1); this project's own.

    Raises
    ------
    ValueError
        For another concept; pairs of one's own are a tuple of `PairedResponse`.
    """
    if concept not in CONCEPTS:
        raise ValueError(
            f"concept must be one of {', '.join(CONCEPTS)}, got {concept!r}: for another concept write PairedResponse "
            "objects yourself"
        )
    text = files("monitor.stimuli").joinpath("concept_data", "paired_responses.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    return tuple(
        PairedResponse(row["instruction"], row["positive"], row["negative"])
        for row in rows
        if row["concept"] == concept
    )
