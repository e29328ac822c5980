"""Judgements on disk: one a line, with the response and all that the judge went by."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from monitor.judges.judgement import SCORES, Judgement

_EVIDENCE = "evidence_"


def judgement_records(
    judge: str,
    concept: str,
    instruction: Sequence[str],
    responses: Sequence[str],
    judgements: Sequence[Judgement],
    **about: str | float | None,
) -> list[dict]:
    """Flat records of judgements.

    Parameters
    ----------
    judge, concept : str
        Names.
    instruction, responses : sequence of n str
    judgements : sequence of n Judgement
    **about : str, float or None
        What else tells the run: ``method="pca"``, ``rank=4``, ``split="category-0"``; in every record.

    Returns
    -------
    list of n dict
        ``judge, concept_name, …about, index, instruction_text, response, concept, fluency, instruction, entities,
        categories, evidence_…``. ``entities`` and ``categories`` are JSON lists in text, of one length, so that a
        record has no value but text, numbers and null.
    """
    fixed = {"judge": judge, "concept_name": concept, **about}
    clash = sorted(set(about) & {"index", "instruction_text", "response", *SCORES, "entities", "categories"})
    if clash:
        raise ValueError(f"`about` must not be named like a field of the record, got {', '.join(clash)}: rename it")
    records = []
    for i, (asked, response, judgement) in enumerate(zip(instruction, responses, judgements, strict=True)):
        records.append(
            fixed
            | {"index": i, "instruction_text": asked, "response": response}
            | {score: getattr(judgement, score) for score in SCORES}
            | {
                "entities": json.dumps([entity for entity, _ in judgement.mentions], ensure_ascii=False),
                "categories": json.dumps([category for _, category in judgement.mentions], ensure_ascii=False),
            }
            | {f"{_EVIDENCE}{name}": value for name, value in judgement.evidence}
        )
    return records


def judgement_of(record: dict) -> Judgement:
    """The judgement that a record was made of."""
    return Judgement(
        *(record[score] for score in SCORES),
        tuple(zip(json.loads(record["entities"]), json.loads(record["categories"]), strict=True)),
        tuple((key.removeprefix(_EVIDENCE), value) for key, value in record.items() if key.startswith(_EVIDENCE)),
    )


def append_records(path: str | os.PathLike, records: Iterable[dict]) -> None:
    """Add records to a JSON Lines file; its folder is made. Nothing is written if one of them cannot be."""
    path = Path(path)
    data = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_records(path: str | os.PathLike) -> list[dict]:
    """All records of a file that `append_records` wrote."""
    # Not splitlines(): that would also cut at U+2028, which may stand inside a response.
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line]
