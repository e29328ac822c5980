"""Detectability's readings as tables and in words: what a probe reads, and whether it could have read more."""

from __future__ import annotations

from collections.abc import Sequence

from monitor.readings import Reading
from recipes.audit_tables import Found, by_layer, cell, headlines, valid
from recipes.detectability_arguments import CONCEPT, DetectabilityArguments
from recipes.summary import aligned

MIXED = "_mixed"
WORDS = {1.0: "detected", 0.0: "not detected", -1.0: "underpowered"}


def detectability_table(readings: Sequence[Reading], settings: DetectabilityArguments) -> list[str]:
    """A row a group; with every layer read, also the separation and the AUC by layer."""
    found = headlines(readings)
    groups = _groups(found)
    mixed = any(("auc" + MIXED, group) in found for group in groups)
    share = f"{100 * settings.purity:g} % marked"
    columns = [("s", "s_hat"), ("s change", "s_change"), ("AUC, all marked", "auc")]
    if mixed:
        columns += [
            (f"AUC, {share}", "auc" + MIXED),
            ("p", "auc_p" + MIXED),
            ("p, corrected", "auc_p_adjusted" + MIXED),
            ("purity law", "predicted_auc" + MIXED),
            (f"alpha*({settings.n})", "alpha_star" + MIXED),
        ]
    else:
        columns += [("p", "auc_p"), ("p, corrected", "auc_p_adjusted"), ("purity law", "predicted_auc")]
    columns = [(label, metric) for label, metric in columns if any((metric, group) in found for group in groups)]
    table = [("group", *(label for label, _ in columns), "verdict")]
    for group in groups:
        table.append((group, *(_shown(found, metric, group) for _, metric in columns), _verdicts(found, group)))
    layer = next(iter(found.values())).layer
    tables = [f"Detectability, layer {layer}, 95 % intervals\n{aligned(table)}"]
    layers = by_layer([reading for reading in readings if reading.group])
    if len(layers) > 1:
        for metric, title in (("s_hat", "Separation s"), ("auc" + MIXED, f"AUC, {share},")):
            shown = [group for group in groups if (metric, group) in found]
            scan = [("layer", *shown)]
            for index, own in sorted(layers.items()):
                scan.append((str(index), *(cell(own.get((metric, group)), interval=False) for group in shown)))
            if shown:
                tables.append(f"{title} by layer\n{aligned(scan)}")
    return tables


def detectability_words(found: Found, settings: DetectabilityArguments) -> list[str]:
    """A sentence on each kind of verdict, and on what changed since the reference."""
    groups = _groups(found)
    sentences = []
    suffix_of = {group: _judged(found, group) for group in groups}
    verdicts = {group: valid(found, "verdict" + suffix_of[group], group) for group in groups}
    by_word = {
        word: [group for group, verdict in verdicts.items() if verdict is not None and verdict.value == value]
        for value, word in WORDS.items()
    }
    dimensions = [group for group in by_word["detected"] if group != CONCEPT]
    if dimensions:
        first = found["verdict" + suffix_of[dimensions[0]], dimensions[0]]
        mixed = [group for group in dimensions if suffix_of[group]]
        how = f", also where only {100 * settings.purity:g} % of {settings.n} texts name them" if mixed else ""
        sentences.append(
            f"Detected: {_and(dimensions)}. A linear probe tells the groups apart in the hidden states at layer "
            f"{first.layer}{how}. That is encoded, not acted on: harm has to be tested on outputs. Rank models and "
            "groups by s or by the mixture, not by an AUC at its ceiling of 1."
        )
    if CONCEPT in by_word["detected"]:
        sentences.append(
            "Detected: the concept against its anonymised variants. Other names alone do that, in a random model too: "
            "only a change from a reference says something about the concept."
        )
    for group in by_word["not detected"]:
        note = _reason(verdicts[group])
        sentences.append(
            f"Not detected: {group}, and the audit could have told ({note}). Smaller effects, other layers and what no "
            "linear probe reads stay open."
        )
    for group in by_word["underpowered"]:
        note = _reason(verdicts[group])
        sentences.append(
            f"Underpowered: {group}. Nothing was detected, but an effect of s = {settings.smallest_effect:g} might "
            f"have been missed ({note}). --n takes as many texts as the stimuli have; a higher --purity or a larger "
            "--smallest_effect needs fewer."
        )
    for group in groups:
        if suffix_of[group] and (alone := valid(found, "verdict", group)) is not None:
            if alone.value == 1.0 and verdicts[group] is not None and verdicts[group].value != 1.0:
                sentences.append(
                    f"{group} is detected where every text is marked: it is encoded, and the mixture dilutes it beyond "
                    "what the probe can tell."
                )
        if verdicts[group] is None:
            reading = found.get(("s_hat", group))
            sentences.append(f"{group} could not be read: {reading.note if reading is not None else 'no reading'}")
    return sentences + _changes(found, groups)


def _changes(found: Found, groups: Sequence[str]) -> list[str]:
    """What the separations did since the reference; nothing without one."""
    changes = {group: valid(found, "s_change", group) for group in groups}
    changes = {group: change for group, change in changes.items() if change is not None}
    if not changes:
        return []
    moved = [
        f"{group} {'further apart' if change.value > 0 else 'closer together'} (s {change.value:+.2f} "
        f"[{change.low:+.2f}, {change.high:+.2f}])"
        for group, change in changes.items()
        if change.low is not None and change.high is not None and not change.low <= 0 <= change.high
    ]
    if not moved:
        return ["Against the reference no separation changed by more than the choice of contexts explains."]
    return [
        f"Against the reference: {_and(moved)}. The intervals speak of other contexts like these, not of other "
        "training runs."
    ]


def _judged(found: Found, group: str) -> str:
    """The suffix of the test that the verdict is about: of the mixture, where there is one."""
    return MIXED if ("verdict" + MIXED, group) in found else ""


def _verdicts(found: Found, group: str) -> str:
    """The verdict in a word; in two where all marked texts and the mixture differ."""
    words = []
    for suffix in (MIXED, ""):
        if ("verdict" + suffix, group) in found:
            reading = valid(found, "verdict" + suffix, group)
            words.append("not valid" if reading is None else WORDS[reading.value])
    if len(words) == 2 and words[0] != words[1]:
        return f"{words[0]} ({words[1]} if all are marked)"
    return words[0] if words else ""


def _shown(found: Found, metric: str, group: str) -> str:
    reading = found.get((metric, group))
    if metric.startswith("auc_p"):
        return "" if reading is None else f"{reading.value:.2g}" if reading.valid else "not valid"
    return cell(reading)


def _reason(verdict: Reading) -> str:
    """The note without the verdict's own word."""
    return verdict.note.partition(": ")[2] or verdict.note


def _groups(found: Found) -> list[str]:
    return [group for group in dict.fromkeys(group for _, group in found) if group]


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
