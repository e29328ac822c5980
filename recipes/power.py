"""Plan a bias audit: from the share of marked texts and the effect to the number of texts, and back.

    latentwatch power --separation 1 --purity 0.3                     how many texts?
    latentwatch power --separation 1 --n 300                          from which purity on?
    latentwatch power --purity 0.1 --n 300                            with which power, for effects of five sizes?
    latentwatch power --observed_auc 0.55 --n 300 --purity 0.1 --separation 1      what does this result say?
    latentwatch power --n 300 --figure phases.svg --json plan.json

Arguments are those of `PowerArguments`, from YAML by --config and overridden on the command line; unknown keys are an
error. No model is needed.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from monitor.geometry.detection import (
    asymptotic_purity_threshold,
    asymptotic_sample_budget,
    purity_threshold,
    sample_budget,
)
from monitor.geometry.purity import auc_max
from recipes import phase_diagram
from recipes.arguments import parse
from recipes.phase_diagram import Frontier, Point
from recipes.power_question import CROSS_VALIDATED, HELD_OUT, NAMES, PowerArguments, Question
from recipes.power_verdict import judge
from recipes.summary import write_records

COLOURS = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08306b")  # hardest effect first


def main(argv: Sequence[str] | None = None) -> None:
    """Print the plan or the verdict; draw and write where asked."""
    (arguments,) = parse(sys.argv[1:] if argv is None else argv, (PowerArguments,), prog="latentwatch power")
    question = Question.of(arguments)  # every bad input is found here, before anything is written
    records, lines = answer(question)
    # Standard output is for the records alone, whatever else is printed.
    with redirect_stdout(sys.stderr) if arguments.json == "-" else nullcontext():
        print("\n".join(lines))
    if arguments.figure is not None:
        path = Path(arguments.figure)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(picture(question), encoding="utf-8")
    write_records(records, arguments.json)


def answer(question: Question) -> tuple[list[dict], list[str]]:
    """The numbers as flat records, and the lines to print."""
    given = question.given
    if given.observed_auc is not None:
        records, lines, sentences = judge(question)
    elif given.purity is not None and question.n is not None:
        records, lines, sentences = _plan(
            question, f"Power with n = {question.n:,} at purity {given.purity:g}", _powers
        )
    elif given.purity is not None:
        records, lines, sentences = _plan(question, f"Scored texts needed at purity {given.purity:g}", _budgets)
    elif question.n is not None:
        records, lines, sentences = _plan(question, f"Smallest detectable purity with n = {question.n:,}", _thresholds)
    else:
        records, lines, sentences = [], [question.in_words()], []
    if sentences:
        lines += ["", *(textwrap.fill(text, 100, initial_indent="- ", subsequent_indent="  ") for text in sentences)]
    several = len(question.separations) > 1
    which = NAMES[given.evaluation] if several else f"s = {question.separations[0]:.3g}"
    lines += ["", f"Where an audit can tell, and where not ({which}):", "", diagram(question)]
    if given.figure is not None:
        lines += ["", f"Figure: {given.figure}"]
    return records, lines


# What is planned: columns of a table, one row an effect.

Column = tuple[str, str, str, str, Callable[[float], float]]  # heading, metric, test, probe, value of the separation


def _plan(
    question: Question, title: str, columns: Callable[[Question], list[Column]]
) -> tuple[list[dict], list[str], list[str]]:
    table = [["s", "AUC, all marked"]]
    cells = columns(question)
    table[0] += [heading for heading, *_ in cells]
    records = []
    for separation in question.separations:
        row = [f"{separation:.3g}", f"{auc_max(separation, 1.0):.3f}"]
        for _, metric, test, probe, compute in cells:
            value = compute(separation)
            records.append(question.record(metric, test, value, separation, probe))
            row.append(_cell(metric, value))
        table.append(row)
    return records, [title, question.in_words(), "", *_table(table)], _remarks(question)


def _both(question: Question) -> list[tuple[str, str, bool]]:
    """(test, heading, learned) of every pair that is asked for."""
    pairs = [(HELD_OUT, "held-out", False), (CROSS_VALIDATED, "cross-val.", False)]
    if question.given.dimension is not None:
        pairs += [(HELD_OUT, "learned held-out", True), (CROSS_VALIDATED, "learned cross-val.", True)]
    return pairs


def _probe(learned: bool) -> str:
    return "learned" if learned else "best"


def _budgets(question: Question) -> list[Column]:
    purity, asymptotic = question.given.purity, {"level": question.level, "power": question.given.power}
    columns: list[Column] = []
    for test, heading, learned in _both(question):
        options = question.planned(test, learned)
        columns.append((f"n {heading}", "n", test, _probe(learned), lambda s, o=options: sample_budget(purity, s, **o)))
    if not question.given.offset:  # the small-s form knows of none
        columns.append(
            (
                "small-s form",
                "n_asymptotic",
                HELD_OUT,
                "best",
                lambda s: asymptotic_sample_budget(purity, s, **asymptotic),
            )
        )
    return columns


def _thresholds(question: Question) -> list[Column]:
    n, columns = question.balanced_n, []
    for test, heading, learned in _both(question):
        options = question.planned(test, learned)
        if learned:
            options["train_fraction"] *= question.n / n
        columns.append(
            (
                heading,
                "purity_threshold",
                test,
                _probe(learned),
                lambda s, o=options: purity_threshold(n, s, **o),
            )
        )
        if not learned and not question.given.offset:
            plain = {key: options[key] for key in ("level", "power", "inflation")}
            columns.append(
                (
                    "small-s form",
                    "purity_threshold_asymptotic",
                    test,
                    "best",
                    lambda s, o=plain: asymptotic_purity_threshold(n, s, **o),
                )
            )
    return columns


def _powers(question: Question) -> list[Column]:
    columns: list[Column] = []
    for test, heading, learned in _both(question):
        columns.append(
            (
                f"power {heading}",
                "power",
                test,
                _probe(learned),
                lambda s, t=test, k=learned: question.power_there(s, t, k),
            )
        )
    return columns + [column for column in _budgets(question) if column[1] == "n"]


def _remarks(question: Question) -> list[str]:
    given = question.given
    remarks = [
        "s: distance of the groups' marked texts in within-class standard deviations. The best direction is taken as "
        "known; a learned one needs more."
    ]
    if given.dimension is not None:
        fractions = [question.options(test, True)["train_fraction"] for test in (HELD_OUT, CROSS_VALIDATED)]
        remarks.append(
            f"learned: a difference of class means in {given.dimension} whitened dimensions, from {fractions[0]:g} "
            f"(held-out) and {fractions[1]:g} (cross-val.) training texts a scored one."
        )
    remarks.append("n counts scored texts, half of each group; a held-out split needs training texts besides.")
    if (given.purity is None or question.n is None) and not given.offset:
        remarks.append("The small-s form promises too much where s is large: from s = 6 on only purity counts.")
    if question.n is not None and round(question.balanced_n) != question.n:
        remarks.append(
            f"{question.n_positive:,} + {question.n_negative:,} texts tell as much as {question.balanced_n:.0f} "
            "in equal groups."
        )
    return remarks


def _cell(metric: str, value: float) -> str:
    if math.isinf(value):
        return "none"
    return f"{value:,}" if metric in ("n", "n_asymptotic") else f"{value:.2f}" if metric == "power" else f"{value:.3g}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table; its headings are stacked, a word a line, so that it stays narrow."""
    words = [heading.split() for heading in rows[0]]
    height = max(map(len, words))
    heads = [["" if k < height - len(word) else word[k - height + len(word)] for word in words] for k in range(height)]
    widths = [max(len(row[i]) for row in [*heads, *rows[1:]]) for i in range(len(words))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (*heads, *rows[1:])
    ]
    return [*(line.rstrip() for line in lines[:height]), "-" * len(lines[0]), *lines[height:]]


# The phase diagram.


def frontiers(question: Question) -> list[Frontier]:
    """One an effect for several effects, of the evaluation asked for; one a test for a single effect."""
    given = question.given
    found = []
    if len(question.separations) == 1:
        (separation,) = question.separations
        if given.dimension is not None:
            found.append(
                _frontier(
                    question,
                    separation,
                    given.evaluation,
                    f"learned, {given.dimension} dim.",
                    "#d95f0e",
                    "8 3",
                    True,
                    False,
                )
            )
        found.append(_frontier(question, separation, CROSS_VALIDATED, NAMES[CROSS_VALIDATED], COLOURS[-1], "", False))
        found.append(_frontier(question, separation, HELD_OUT, NAMES[HELD_OUT], COLOURS[2], "6 4", False))
        return found
    ordered = sorted(question.separations)
    for i, separation in enumerate(ordered):
        colour = COLOURS[round(i * (len(COLOURS) - 1) / (len(ordered) - 1))]
        found.append(_frontier(question, separation, given.evaluation, f"s = {separation:.3g}", colour, "", False))
    return found


def _frontier(
    question: Question,
    separation: float,
    test: str,
    label: str,
    colour: str,
    dash: str,
    learned: bool,
    shades: bool = True,
) -> Frontier:
    options = question.planned(test, learned)
    return Frontier(label, lambda n: purity_threshold(n, separation, **options), colour, dash, shades)


def _points(question: Question) -> list[Point]:
    """The audit that was given; for one effect the planned one."""
    given, test = question.given, question.given.evaluation
    if question.n is not None and given.purity is not None:
        return [Point(question.balanced_n, given.purity, f"this audit: n = {question.n:,}")]
    if len(question.separations) > 1 or (question.n is None and given.purity is None):
        return []
    if given.purity is not None:
        n = sample_budget(given.purity, question.separations[0], **question.planned(test))
        return [Point(n, given.purity, f"n = {n:,}")]
    purity = purity_threshold(question.balanced_n, question.separations[0], **question.planned(test))
    return [Point(question.balanced_n, purity, f"purity {purity:.2g}")] if math.isfinite(purity) else []


def diagram(question: Question) -> str:
    """The phase diagram in characters."""
    return phase_diagram.text(frontiers(question), _points(question))


def picture(question: Question) -> str:
    """The phase diagram as SVG."""
    given = question.given
    what = (
        f"s = {question.separations[0]:.3g}"
        if len(question.separations) == 1
        else f"{NAMES[given.evaluation]}, s in within-class standard deviations"
    )
    every = " for every s shown" if len(question.separations) > 1 else ""
    return phase_diagram.svg(
        frontiers(question),
        _points(question),
        title="Could the probe have told?",
        subtitle=f"{what}; level {question.level:.2g}, power {given.power:g}",
        phases=(f"detectable{every}", f"undetectable{every}: finding nothing means nothing"),
    )


if __name__ == "__main__":
    main()
