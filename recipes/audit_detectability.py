"""Detectability's readings as tables and in words: what a probe reads, and whether it could have read more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    share = f"{100 * settings.purity:g} % marked"
    rows = []
    for group in groups:
        judged = _judged(found, group)
        shown = {
            "s": "s_hat",
            "s change": "s_change",
            "AUC, all marked": "auc",
            f"AUC, {share}": "auc" + MIXED,
            "p": "auc_p" + judged,
            "p, corrected": "auc_p_adjusted" + judged,
            "purity law": "predicted_auc" + judged,
            f"alpha*({settings.n})": "alpha_star" + MIXED,
        }
        row = {label: _shown(found, metric, group) for label, metric in shown.items()}
        rows.append({"group": group, **row, "verdict": _verdicts(found, group)})
    columns = [label for label in rows[0] if any(row[label] for row in rows)]  # there may be no reference, no mixture
    table = [columns, *([row[label] for label in columns] for row in rows)]
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
    if clear := by_word["not detected"]:
        sentences.append(
            f"Not detected: {_and(clear)}, and the audit could have told ({_reasons(verdicts, clear)}). Smaller "
            "effects, other layers and what no linear probe reads stay open."
        )
    if blind := by_word["underpowered"]:
        sentences.append(
            f"Underpowered: {_and(blind)}. Nothing was detected, but an effect of s = {settings.smallest_effect:g} "
            f"might have been missed ({_reasons(verdicts, blind)}). --n takes as many texts as the stimuli have; a "
            "higher --purity or a larger --smallest_effect needs fewer."
        )
    alone = {group: valid(found, "verdict", group) for group in (*clear, *blind)}
    if diluted := [group for group, one in alone.items() if one is not None and WORDS[one.value] == "detected"]:
        sentences.append(
            f"Where every text is marked, {_and(diluted)} {'is' if len(diluted) == 1 else 'are'} detected: encoded, "
            "and diluted by the mixture beyond what the probe can tell."
        )
    for group in groups:
        if verdicts[group] is None:
            reading = found.get(("s_hat", group))
            sentences.append(f"{group} could not be read: {reading.note if reading is not None else 'no reading'}")
    return sentences + _leakage(found, groups) + _changes(found, groups)


def _leakage(found: Found, groups: Sequence[str]) -> list[str]:
    """Whether texts without a marker lean towards a group."""
    sentences = []
    for group in groups:
        reading = valid(found, "neutral_leakage", group)
        if reading is not None and reading.low is not None and reading.low > 0.5:
            sentences.append(
                f"Texts without a marker are not free of {group}: the probe of the marked ones tells the stereotype of "
                f"neutral ones with AUC {reading.value:.2f} [{reading.low:.2f}, {reading.high:.2f}]. In natural text a "
                "null result then says less than the purity law allows."
            )
    return sentences


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


def _reasons(verdicts: Mapping[str, Reading], groups: Sequence[str]) -> str:
    """The verdicts' notes without the verdict's own word, each with its group where there are several."""
    notes = {group: verdicts[group].note.partition(": ")[2] or verdicts[group].note for group in groups}
    return "; ".join(f"{group}: {note}" if len(groups) > 1 else note for group, note in notes.items())


def _groups(found: Found) -> list[str]:
    return [group for group in dict.fromkeys(group for _, group in found) if group]


def _and(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
