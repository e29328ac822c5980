"""Concept recovery's readings as an audit's table and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monitor.readings import Reading
from recipes.audit_tables import Found, cell, headlines, valid, where
from recipes.summary import aligned

ROWS = (
    ("probe_accuracy", "values told apart (accuracy)"),
    ("probe_null", "the same, values shuffled"),
    ("probe_p", "p"),
    ("coverage", "held-out values in the subspace"),
    ("coverage_reference", "the same, reference's directions"),
    ("exclusion", "other texts outside (AUC)"),
    ("exclusion_reference", "the same, reference's subspace"),
    ("angle_mean", "turned from the reference (degrees)"),
    ("offset_drift", "centre moved from the reference"),
    ("effective_rank", "effective rank of the values"),
)
LEVEL = 0.05
_TURNED = 1.0  # degrees; below that a subspace has turned by rounding or by next to nothing


def concepts_table(readings: Sequence[Reading]) -> list[str]:
    found = headlines(readings)
    groups = [group for group in dict.fromkeys(group for _, group in found) if group]
    table = [("", *groups)]
    for metric, label in ROWS:
        if any((metric, group) in found for group in groups):
            table.append((label, *(cell(found.get((metric, group))) for group in groups)))
    return [f"Concept recovery, {where(found)}\n{aligned(table)}"]


def concepts_words(found: Found) -> list[str]:
    groups = [group for group in dict.fromkeys(group for _, group in found) if group]
    read = [group for group in groups if valid(found, "probe_p", group) is not None]
    told = [group for group in read if found["probe_p", group].value <= LEVEL]
    sentences = []
    if read:
        text = f"Concepts: a linear probe tells the values of {_named(told)} apart at this layer"
        rest = [group for group in read if group not in told]
        text += f", not those of {', '.join(rest)} (other layers may)" if rest else ""
        sentences.append(f"{text}. What is told apart is encoded; whether it can be steered, the sampling attack says.")
    turned = {group: r.value for group in read if (r := valid(found, "angle_mean", group)) and r.value >= _TURNED}
    if turned:
        most = ", ".join(f"{group} {angle:.1f}" for group, angle in sorted(turned.items(), key=lambda item: -item[1]))
        sentences.append(f"Subspaces turned against the reference's by (degrees, mean): {most}.")
    return sentences


def recovery_sentence(records: Sequence[Mapping]) -> str | None:
    """What a run did to its concepts, from start to end; None where none was read.

    Parameters
    ----------
    records : sequence of mappings
        As `recipes.summary.summarise` makes them.
    """
    found = {(r["metric"], r["group"]): r for r in records if r["measure"] == "concept_recovery" and r["group"]}
    parts = []
    for group in dict.fromkeys(group for _, group in found):
        accuracy, p, angle = (found[metric, group] for metric in ("probe_accuracy", "probe_p", "angle_mean"))
        if None in (accuracy["start"], accuracy["end"], p["start"], p["end"], angle["end"]):
            continue
        state = (
            "told apart" if p["end"] <= LEVEL else "no longer told apart" if p["start"] <= LEVEL else "never told apart"
        )
        parts.append(
            f"{group} {state} (accuracy {accuracy['start']:.2f} -> {accuracy['end']:.2f}, subspace turned "
            f"{angle['end']:.0f} degrees)"
        )
    if not parts:
        return None
    return (
        f"Concepts, by their values at one layer: {'; '.join(parts)}. Values that are told apart are still encoded, "
        "whatever the outputs say; that they are not is no proof of removal."
    )


def _named(groups: Sequence[str]) -> str:
    return ", ".join(groups) if groups else "no concept"
