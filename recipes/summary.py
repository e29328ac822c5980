"""A run's journal as a table from start to end, and in words: what the readings show and what they do not."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from monitor.journal import ATTACKS, RULES

# What the table shows of each measure, in order: (measure, metric, group, label).
ROWS = (
    ("behaviour", "forget_nll", "", "forget NLL (nats)"),
    ("behaviour", "retain_nll", "", "retain NLL (nats)"),
    ("behaviour", "heldout_nll", "", "held-out NLL (nats)"),
    ("behaviour", "forget_exact_memorisation", "", "forget exact memorisation"),
    ("behaviour", "forget_rouge_l", "", "forget ROUGE-L of greedy answers"),
    ("behaviour", "retain_rouge_l", "", "retain ROUGE-L of greedy answers"),
    ("fragmentation", "knowledge_z", "", "knowledge z, concept"),
    ("fragmentation", "knowledge_z", "heldout", "knowledge z, invented"),
    ("fragmentation", "auss_l2", "", "AUSS L2 (dispersion)"),
    ("fragmentation", "norm_anon_diff_s2", "", "entropy S2 of anon-vectors (bits)"),
    ("fragmentation", "cka", "", "CKA with the start"),
    ("bias_shift", "delta_b", "", "bias shift dB"),
    ("bias_shift", "delta_b_corrected", "", "bias shift dB, control-corrected"),
    ("detectability", "s_hat", "", "separation s, mean of groups"),
    ("detectability", "auc_mixed", "", "AUC of a probe in the mixture, mean"),
    ("detectability", "n_detected", "", "groups detected"),
    ("detectability", "s_hat", "concept", "separation s, concept"),
    ("detectability", "verdict", "concept", "verdict, concept (1 detected, -1 underpowered)"),
    ("concept_recovery", "probe_accuracy", "", "concept values told apart, mean of concepts"),
    ("concept_recovery", "coverage", "", "held-out values in the subspace, mean"),
    ("concept_recovery", "coverage_reference", "", "held-out values in the start's subspace, mean"),
    ("concept_recovery", "exclusion", "", "other texts outside the subspace, AUC, mean"),
)
KNOWN_Z = 2.0  # a |z| this large is rare under the null


def summarise(lines: Sequence[Mapping]) -> list[dict]:
    """First and last headline readings of a journal.

    Parameters
    ----------
    lines : sequence of journal lines

    Returns
    -------
    records : list of dict
        Per reading: ``measure, metric, group, layer, step_start, start, start_low, start_high, step_end, end, end_low,
        end_high, note``; the values are None where a reading was not valid.
    """
    if not lines:
        return []
    # An attack may come at a step without a measurement, where nothing else has a value.
    steps = [line["step"] for line in lines if line["measure"] not in (RULES, ATTACKS)] or [lines[0]["step"]]
    first, last = min(steps), max(steps)
    headline: dict[tuple, dict[int, Mapping]] = {}
    for line in lines:
        # A metric's first line of a step is its headline; scanned layers follow it.
        headline.setdefault((line["measure"], line["metric"], line["group"]), {}).setdefault(line["step"], line)
    records = []
    for (measure, metric, group), by_step in headline.items():
        start, end = by_step.get(first, {}), by_step.get(last, {})
        records.append(
            {
                "measure": measure, "metric": metric, "group": group, "layer": (end or start).get("layer"),
                "step_start": first, "start": start.get("value"), "start_low": start.get("low"),
                "start_high": start.get("high"), "step_end": last, "end": end.get("value"), "end_low": end.get("low"),
                "end_high": end.get("high"), "note": (end or start).get("note", ""),
            }
        )  # fmt: skip
    return records


def write_records(records: Sequence[Mapping], path: str | None) -> None:
    """Write records as one JSON list; "-" is standard output, None nowhere."""
    if path is None:
        return
    text = json.dumps(list(records), indent=2, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")


def print_summary(records: Sequence[Mapping], output_dir: str, words: Sequence[str] = ()) -> None:
    """The table, the words that follow from it and those given, and where the rest is."""
    print(format_table(records))
    print()
    for sentence in (*in_words(records), *words):
        print(f"- {sentence}")
    print()
    print(f"Every reading: {output_dir}/monitor/journal.jsonl")
    print(f"Curves:        tensorboard --logdir {output_dir}")


def format_table(records: Sequence[Mapping]) -> str:
    """The rows of `ROWS` that were read, start -> end, with 95 % intervals."""
    found = {(r["measure"], r["metric"], r["group"]): r for r in records}
    shown = [(label, found[tuple(key)]) for *key, label in ROWS if tuple(key) in found]
    if not shown:
        return "No readings were taken."
    table = [("", f"start (step {shown[0][1]['step_start']})", f"end (step {shown[0][1]['step_end']})", "layer")]
    for label, r in shown:
        layer = "" if r["layer"] is None else str(r["layer"])
        start = number(r["start"], r["start_low"], r["start_high"])
        table.append((label, start, number(r["end"], r["end_low"], r["end_high"]), layer))
    return aligned(table)


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells as lines of aligned columns, the first one being the header."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def events(lines: Sequence[Mapping]) -> list[str]:
    """Sentences on what rules decided and attacks found, in the journal's order."""
    found = {(line["step"], line["metric"]): line for line in lines if line["measure"] == ATTACKS}
    sentences = []
    for line in lines:
        if line["measure"] == RULES and line["metric"] == "stop":
            sentences.append(f"Stopped at step {line['step']} by the rule {line['group']}: {line['note']}.")
        elif line["measure"] == ATTACKS and not line["metric"].endswith("_baseline"):
            without = found.get((line["step"], f"{line['metric']}_baseline"))
            score = number(line["value"], line["low"], line["high"])
            told = score if line["valid"] else f"failed, {line['note']}"
            # Of the attack by questions the best of many points counts, and points of no concept are what it is beside.
            beside = "with points of no concept" if line["metric"] == "sampling" else "without it"
            told += f", {number(without['value'], None, None)} {beside}" if line["valid"] and without else ""
            sentences.append(f"Attack at step {line['step']}, {line['metric']}: {told}.")
    return sentences


def in_words(records: Sequence[Mapping]) -> list[str]:
    """Sentences that follow from the readings, and what they leave open."""
    found = {(r["measure"], r["metric"], r["group"]): r for r in records}

    def get(measure: str, metric: str, group: str = "") -> Mapping | None:
        record = found.get((measure, metric, group))
        return None if record is None or record["start"] is None or record["end"] is None else record

    sentences = []
    if (forget := get("behaviour", "forget_nll")) is not None:
        sentences.append(_forgetting(forget, get("behaviour", "retain_nll"), get("behaviour", "heldout_nll")))
    if (collapsed := get("behaviour", "collapsed")) is not None and collapsed["end"] > collapsed["start"]:
        sentences.append(
            f"The model has collapsed ({collapsed['note']}): the other readings describe a broken model, not "
            "forgetting."
        )
    concept = get("fragmentation", "knowledge_z")
    if concept is not None:
        sentences.append(_knowledge(concept, get("fragmentation", "knowledge_z", "heldout")))
    elif ("fragmentation", "knowledge_z", "") in found:
        sentences.append("knowledge z could not be read: " + found["fragmentation", "knowledge_z", ""]["note"])
    corrected = get("bias_shift", "delta_b_corrected") or get("bias_shift", "delta_b")
    if corrected is not None:
        sentences.append(bias_in_words(corrected))
    if (detected := get("detectability", "n_detected")) is not None:
        concept, change = get("detectability", "s_hat", "concept"), get("detectability", "s_change", "concept")
        sentences.append(_detected(detected, get("detectability", "s_hat"), concept, change))
    return sentences


def _forgetting(forget: Mapping, retain: Mapping | None, heldout: Mapping | None) -> str:
    rise = forget["end"] - forget["start"]
    how = "stayed as likely as they were" if abs(rise) < 0.005 else f"became {_more_or_less(rise)} likely"
    text = f"Output: the forget answers {how} ({rise:+.2f} nats a token)"
    if retain is not None:
        change = retain["end"] - retain["start"]
        text += f"; general knowledge changed by {change:+.2f} nats"
    if heldout is not None:
        change = heldout["end"] - heldout["start"]
        text += f", answers nobody can know by {change:+.2f}"
    text += ". This is what the model says. It does not tell whether the knowledge is gone or only not said."
    return text


def _knowledge(concept: Mapping, control: Mapping | None) -> str:
    start, end = concept["start"], concept["end"]
    if start < KNOWN_Z:
        return (
            f"Hidden states: at the start the concept's names were not told apart from invented ones (z {start:.1f}), "
            "so this reading cannot show whether the concept was removed: the measure had nothing to lose here."
        )
    if end >= KNOWN_Z:
        text = (
            f"Hidden states: the concept's names are still told apart from invented ones (z {start:.1f} -> {end:.1f}): "
            "what the outputs no longer say is still encoded. Silenced, as far as this layer shows, not gone."
        )
    else:
        text = (
            f"Hidden states: at this layer the concept's names are no longer told apart from invented ones "
            f"(z {start:.1f} -> {end:.1f}). That is what removal would look like; it does not prove it: other layers "
            "may still hold the concept, and attacks may bring it back."
        )
    if control is not None and abs(control["end"]) >= KNOWN_Z:
        text += f" Doubtful: invented names score z {control['end']:.1f} themselves, where about 0 is expected."
    return text


def bias_in_words(record: Mapping) -> str:
    """A bias shift (`metric`, `end`, `end_low`, `end_high`) as a sentence."""
    name = "control-corrected dB" if record["metric"] == "delta_b_corrected" else "dB"
    low, high, value = record["end_low"], record["end_high"], record["end"]
    if low is None or high is None:
        return f"Bias: {name} {value:+.4f}, without an interval; no conclusion."
    interval = f"{name} {value:+.4f}, 95 % interval [{low:+.4f}, {high:+.4f}]"
    if low <= 0 <= high:
        return (
            f"Bias: {interval} includes 0: no shift of the groups towards positive or negative attributes beyond what "
            "other words show. A single group may still have moved: see the journal."
        )
    side = "negative" if value < 0 else "positive"
    return (
        f"Bias: {interval}: the groups moved towards the {side} attributes, beyond what words for things show. It is a "
        "shift of representations; whether outputs follow has to be tested on outputs."
    )


def _detected(detected: Mapping, separation: Mapping | None, concept: Mapping | None, change: Mapping | None) -> str:
    counts = f" ({detected['note']})" if detected["note"] else ""
    text = f"Detectability: a linear probe tells {detected['start']:.0f} groups apart at the start and "
    text += f"{detected['end']:.0f} at the end{counts}"
    if separation is not None:
        text += f"; their mean separation s went from {separation['start']:.2f} to {separation['end']:.2f}"
    text += ". What a probe reads is encoded; whether the model uses it is another question."
    if "underpowered" in detected["note"]:
        text += " An underpowered test is no null result: it might have missed the smallest effect."
    if concept is not None:
        text += f" The concept's names against invented ones: s {concept['start']:.2f} -> {concept['end']:.2f}"
        if change is not None and change["end_low"] is not None and change["end_high"] is not None:
            if change["end_low"] <= 0 <= change["end_high"]:
                text += ", no change beyond what the choice of pairs explains"
            else:
                text += ", closer together" if change["end"] < 0 else ", further apart"
        text += "; other names alone are told apart in a model that knows nothing, so only the change counts."
    return text


def _more_or_less(change: float) -> str:
    return "less" if change > 0 else "more"


def number(value: float | None, low: float | None, high: float | None) -> str:
    """A value with its interval, as a table shows it."""
    if value is None or not math.isfinite(value):
        return "not valid"
    if 0 < abs(value) < 5e-4:  # four decimals would not tell it from 0
        return f"{value:.1e}" if low is None or high is None else f"{value:.1e} [{low:.1e}, {high:.1e}]"
    digits = 4 if abs(value) < 0.1 else 2 if abs(value) >= 10 else 3
    text = f"{value:.{digits}f}"
    return text if low is None or high is None else f"{text} [{low:.{digits}f}, {high:.{digits}f}]"
