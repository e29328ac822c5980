"""An audit's readings as tables and in words: what they show of one model, and what they leave open."""

from __future__ import annotations

from collections.abc import Sequence

from monitor.readings import Reading
from recipes.audit_concepts import concepts_table, concepts_words
from recipes.audit_detectability import detectability_table, detectability_words
from recipes.audit_tables import Found, by_layer, cell, headlines, valid, where
from recipes.detectability_arguments import DetectabilityArguments
from recipes.summary import KNOWN_Z, aligned, bias_in_words

# metric, label (and what heads its column in a scan of layers); in the tables' order.
BIAS = (("b", "b"), ("delta_b", "dB"), ("delta_b_corrected", "dB, control-corrected"))
BIAS_WHOLE = (("seat", "SEAT shift"), ("procrustes_seat", "Procrustes-SEAT shift"), ("cka_drift", "CKA drift"))
FRAGMENTATION = (
    ("knowledge_z", "knowledge z", "knowledge z"),
    ("knowledge_p", "knowledge p", "p"),
    ("auss_l2", "AUSS L2 (dispersion)", "AUSS L2"),
    ("norm_anon_diff_s2", "entropy S2 of anon-vectors (bits)", "S2 anon"),
    ("reg_s2", "entropy S2 of query states (bits)", "S2 query"),
    ("cka", "CKA with the reference", "CKA"),
    ("pca_similarity", "PCA similarity with the reference", "PCA sim."),
    ("pca_shift", "PCA shift from the reference", "PCA shift"),
)
BEHAVIOUR = (
    ("nll", "NLL (nats a token)"),
    ("probability", "probability of a token"),
    ("exact_memorisation", "exact memorisation"),
    ("extraction_strength", "extraction strength"),
    ("nll_change", "NLL change from the reference (nats)"),
)
SPLITS = ("forget", "retain", "heldout")


def audit_report(
    readings: Sequence[Reading], about: str, settings: DetectabilityArguments, lines: Sequence[str], *, compared: bool
) -> str:
    """The whole text: what was read, a table a measure, the words that follow, and the given lines.

    Parameters
    ----------
    readings : sequence of Reading
    about : str
        First line.
    settings : DetectabilityArguments
        What detectability was read with.
    lines : sequence of str
        What else there is to say, last.
    compared : bool
        Whether the readings are against a reference.
    """
    measures = dict.fromkeys(reading.measure for reading in readings)
    parts = [about]
    for measure in measures:
        own = [reading for reading in readings if reading.measure == measure]
        parts += detectability_table(own, settings) if measure == "detectability" else TABLES[measure](own)
        parts += invalid_lines(own)
    sentences = [] if compared else [
        "No reference: what compares two models (shift, drift, change) is left out. --reference MODEL reads it."
    ]  # fmt: skip
    for measure in measures:
        found = headlines([reading for reading in readings if reading.measure == measure])
        sentences += detectability_words(found, settings) if measure == "detectability" else WORDS[measure](found)
    return "\n\n".join([*parts, "\n".join(f"- {sentence}" for sentence in (*sentences, *lines))])


# --- tables -----------------------------------------------------------------------------------------------------------


def bias_table(readings: Sequence[Reading]) -> list[str]:
    found = headlines(readings)
    columns = [(metric, label) for metric, label in BIAS if (metric, "") in found]
    groups = list(dict.fromkeys(group for _, group in found))
    table = [("group", *(label for _, label in columns))]
    for group in groups:
        table.append((group or "all groups", *(cell(found.get((metric, group))) for metric, _ in columns)))
    tables = [f"Bias shift, {where(found)}\n{aligned(table)}"]
    whole = [(label, cell(found[metric, ""])) for metric, label in BIAS_WHOLE if (metric, "") in found]
    return [*tables, aligned([("all groups", ""), *whole])] if whole else tables


def fragmentation_table(readings: Sequence[Reading]) -> list[str]:
    found = headlines(readings)
    groups = list(dict.fromkeys(group for _, group in found))
    table = [("", *(group or "concept" for group in groups))]
    for metric, label, _ in FRAGMENTATION:
        if (metric, "") in found:
            table.append((label, *(cell(found.get((metric, group))) for group in groups)))
    tables = [f"Fragmentation, {where(found)}\n{aligned(table)}"]
    layers = by_layer([reading for reading in readings if not reading.group])
    if len(layers) > 1:
        shown = [(metric, short) for metric, _, short in FRAGMENTATION if (metric, "") in found]
        scan = [("layer", *(label for _, label in shown))]
        for layer, own in sorted(layers.items()):
            scan.append((str(layer), *(cell(own.get((metric, "")), interval=False) for metric, _ in shown)))
        tables.append(f"Fragmentation of the concept by layer\n{aligned(scan)}")
    return tables


def behaviour_table(readings: Sequence[Reading]) -> list[str]:
    found = headlines(readings)
    splits = [split for split in SPLITS if (f"{split}_nll", "") in found]
    table = [("", *splits)]
    for metric, label in BEHAVIOUR:
        if (f"{splits[0]}_{metric}", "") in found:
            table.append((label, *(cell(found.get((f"{split}_{metric}", ""))) for split in splits)))
    return [f"Behaviour, 95 % intervals\n{aligned(table)}"]


# --- words ------------------------------------------------------------------------------------------------------------


def bias_words(found: Found) -> list[str]:
    shift = valid(found, "delta_b_corrected") or valid(found, "delta_b")
    if shift is not None:
        return [
            bias_in_words({"metric": shift.metric, "end": shift.value, "end_low": shift.low, "end_high": shift.high})
        ]
    whole = valid(found, "b")
    if whole is None:
        return []
    groups = sorted((r.value, group) for (metric, group), r in found.items() if metric == "b" and group and r.valid)
    side = "negative" if whole.value < 0 else "positive"
    text = f"Bias: b {whole.value:+.4f}: the group sentences lie nearer to the {side} attributes. "
    if len(groups) > 1:
        (low, first), (high, last) = groups[0], groups[-1]
        text += f"On the same templates {first} lie lowest ({low:+.4f}) and {last} highest ({high:+.4f}). "
    return [
        text
        + "The templates' own tone is in every b and its size differs from model to model: it is no verdict, and to "
        "be compared with this model alone. A shift takes a reference."
    ]


def fragmentation_words(found: Found) -> list[str]:
    concept, control = found.get(("knowledge_z", "")), valid(found, "knowledge_z", "heldout")
    if concept is None:
        return []
    if not concept.valid:
        return [f"knowledge z could not be read: {concept.note}"]
    if concept.value >= KNOWN_Z:
        text = (
            f"Hidden states: the concept's names are told apart from invented ones at layer {concept.layer} (z "
            f"{concept.value:.1f}): something of the concept is encoded. Whether the model says it is another question."
        )
    else:
        text = (
            f"Hidden states: the concept's names are not told apart from invented ones at layer {concept.layer} (z "
            f"{concept.value:.1f}). That is no proof of absence: other layers may hold the concept (--scan_layers), "
            "and attacks may bring it out."
        )
    if control is not None and abs(control.value) >= KNOWN_Z:
        text += f" Doubtful: invented names score z {control.value:.1f} themselves, where about 0 is expected."
    return [text]


def behaviour_words(found: Found) -> list[str]:
    sentences = []
    forget, heldout = valid(found, "forget_nll"), valid(found, "heldout_nll")
    if forget is not None:
        text = f"Output: the forget answers cost {forget.value:.2f} nats a token"
        if heldout is not None:
            text += f", answers that nobody can know {heldout.value:.2f}"
        if (change := valid(found, "forget_nll_change")) is not None:
            interval = "" if change.low is None else f" [{change.low:+.2f}, {change.high:+.2f}]"
            text += f"; {change.value:+.2f}{interval} against the reference"
        sentences.append(f"{text}. This is what the model says, not what it knows.")
    collapsed = valid(found, "collapsed")
    if collapsed is not None and collapsed.value > 0:
        sentences.append(f"The model has collapsed ({collapsed.note}): the other readings describe a broken model.")
    return sentences


TABLES = {
    "bias_shift": bias_table,
    "fragmentation": fragmentation_table,
    "behaviour": behaviour_table,
    "concept_recovery": concepts_table,
}
WORDS = {
    "bias_shift": bias_words,
    "fragmentation": fragmentation_words,
    "behaviour": behaviour_words,
    "concept_recovery": concepts_words,
}


def invalid_lines(readings: Sequence[Reading]) -> list[str]:
    """Why readings are not valid: one line a reason, with the names that have it."""
    reasons: dict[str, list[str]] = {}
    for reading in headlines(readings).values():
        if not reading.valid:
            name = f"{reading.metric} ({reading.group or 'whole'})"
            reasons.setdefault(reading.note, []).append(name)
    lines = [f"not valid: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return ["\n".join(lines)] if lines else []
