"""What an AUC that was measured says, given what the audit could have shown."""

from __future__ import annotations

import math

from monitor.geometry.detection import (
    DETECTED,
    NOT_DETECTED,
    UNDERPOWERED,
    detection_p,
    detection_z,
    null_std,
    purity_threshold,
    sample_budget,
    verdict,
)
from monitor.geometry.purity import auc_max, separation_from_auc
from recipes.power_question import NAMES, Question

VERDICTS = {DETECTED: 1, NOT_DETECTED: 0, UNDERPOWERED: -1}


def judge(question: Question) -> tuple[list[dict], list[str], list[str]]:
    """The verdict on the observed AUC: flat records, a table's lines, and the reasons as sentences.

    Power is that for the one effect given, at the level each test of the family has; for a learned direction where a
    dimension is given.
    """
    given, test = question.given, question.given.evaluation
    separation, sizes = question.separations[0], (question.n_positive, question.n_negative)
    learned = given.dimension is not None
    inflation = question.inflation(test)
    z = detection_z(given.observed_auc, *sizes, inflation)
    p = detection_p(given.observed_auc, *sizes, inflation)
    adjusted = min(1.0, given.tests * p)
    power = question.power_there(separation, test, learned)
    word = verdict(adjusted, power, level=given.level, wanted_power=given.power)
    needed = sample_budget(given.purity, separation, **question.planned(test, learned))
    smallest = _smallest_effect(question, test, learned)
    values = {
        "auc": given.observed_auc,
        "z": z,
        "p": p,
        "p_adjusted": adjusted,
        "power": power,
        "n_needed": needed,
        "smallest_detectable_separation": smallest,
        "verdict": VERDICTS[word],
    }
    probe = "learned" if learned else "best"
    records = [
        question.record(metric, test, value, separation, probe, note=word if metric == "verdict" else "")
        for metric, value in values.items()
    ]
    rows = [
        ["observed AUC", f"{given.observed_auc:.3f}", f"{sizes[0]:,} + {sizes[1]:,} texts, {NAMES[test]}"],
        ["z", f"{z:.2f}", f"against chance with a standard deviation of {inflation * null_std(*sizes):.4f}"],
        ["p", _p_value(p), "one-sided"],
    ]
    if given.tests > 1:
        rows.append(["p, corrected", _p_value(adjusted), f"Bonferroni, {given.tests} tests"])
    rows += [
        ["power", f"{power:.2f}", f"there was for s = {separation:.3g} at purity {given.purity:g}"],
        ["n needed", f"{needed:,}", f"for a power of {given.power:g}, half of each group"],
        ["verdict", word, ""],
    ]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    lines = [question.in_words(), ""]
    lines += [f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c}".rstrip() for a, b, c in rows]
    return records, lines, _reasons(question, word, z, power, needed, smallest)


def _reasons(question: Question, word: str, z: float, power: float, needed: int, smallest: float) -> list[str]:
    given, separation = question.given, question.separations[0]
    effect = f"s = {separation:.3g} (AUC {auc_max(separation, 1.0):.3f} where every text is marked)"
    if word == DETECTED:
        implied = separation_from_auc(given.observed_auc, given.purity, given.offset)
        size = f"s of at least {implied:.2g}" if math.isfinite(implied) else "a separation beyond all bounds"
        reasons = [
            f"Detected: the scores know the labels. At purity {given.purity:g} an AUC of {given.observed_auc:.3f} "
            f"takes {size}."
        ]
        if math.isinf(implied):
            reasons.append(
                f"Doubtful: at this purity no probe exceeds {auc_max(math.inf, given.purity, given.offset):.3f}. More "
                "texts carry the signal than were counted, neutral ones correlate with the labels, or the folds leak."
            )
        if power < given.power:
            reasons.append(
                f"There was little power for {effect}: a result that was detected all the same overstates the effect."
            )
        return reasons
    if word == NOT_DETECTED:
        reasons = [
            f"Not detected, and the power was there: {effect} at purity {given.purity:g} would have shown with "
            f"probability {power:.2f}."
        ]
    else:
        options = question.planned(given.evaluation, given.dimension is not None)
        if given.dimension is not None:
            options["train_fraction"] *= question.n / question.balanced_n
        purity = purity_threshold(question.balanced_n, separation, **options)
        other = f", or a purity of {purity:.2g} with this n" if math.isfinite(purity) else ""
        reasons = [
            f"Underpowered: {effect} at purity {given.purity:g} shows with probability {power:.2f} only, so that this "
            "result does not tell a clean model from a blind probe. Report it as underpowered, not as unbiased.",
            f"It takes n = {needed:,}{other}.",
        ]
    if math.isfinite(smallest):
        reasons.append(f"What would have shown with probability {given.power:g} here: s from {smallest:.2g} on.")
    else:
        reasons.append(f"At this purity and n no effect shows with probability {given.power:g}, however large.")
    if z < -1.645:
        reasons.append(
            f"Doubtful: z = {z:.2f} is further below chance than noise goes, as a rule. Are the labels swapped, or do "
            "the members of a pair fall into different folds?"
        )
    return reasons


def _smallest_effect(question: Question, test: str, learned: bool) -> float:
    """The separation that has the wanted power in the audit as it is; inf where none has."""
    low, high = 0.0, 64.0  # Φ is 1 in double precision well before
    wanted = question.given.power
    high += 4.0 * abs(question.given.offset)
    if question.power_there(high, test, learned) < wanted:
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (low, middle) if question.power_there(middle, test, learned) >= wanted else (middle, high)
    return high


def _p_value(p: float) -> str:
    return f"{p:.2g}" if p > 0.0 else "< 1e-300"
