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
from dataclasses import dataclass, field
from pathlib import Path

from monitor.geometry.detection import (
    CV_INFLATION,
    DETECTED,
    NOT_DETECTED,
    UNDERPOWERED,
    asymptotic_purity_threshold,
    asymptotic_sample_budget,
    detection_p,
    detection_power,
    detection_z,
    null_std,
    purity_threshold,
    sample_budget,
    verdict,
)
from monitor.geometry.purity import auc_max, separation_from_auc
from recipes import phase_diagram
from recipes.arguments import parse
from recipes.outputs import check_writable
from recipes.phase_diagram import Frontier, Point
from recipes.summary import write_records

SEPARATIONS = (0.5, 1.0, 2.0, 4.0, 8.0)  # what is tabulated when no effect is given
CROSS_VALIDATED, HELD_OUT = "cross_validated", "held_out"
TRAIN_FRACTION = {CROSS_VALIDATED: 0.8, HELD_OUT: 4.0}  # training texts a scored one: five folds; one fold of five
NAMES = {CROSS_VALIDATED: "pooled cross-validation", HELD_OUT: "one held-out split"}
LARGEST_N = 10**12
VERDICTS = {DETECTED: 1, NOT_DETECTED: 0, UNDERPOWERED: -1}
COLOURS = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08306b")  # hardest effect first


@dataclass
class PowerArguments:
    """What is known of the audit, and which test it ends in.

    Parameters
    ----------
    separation : list of float, optional
        Effect sizes s: Mahalanobis distance of the two groups' marked texts, in within-class standard deviations.
        0.5 1 2 4 8 by default.
    auc : list of float, optional
        The same given as AUC of the best probe where every text is marked, in (0.5, 1); instead of `separation`.
    purity : float, optional
        Share of texts that carry a marker, in (0, 1].
    n : int, optional
        Scored texts of both groups together, at least 4.
    n_positive, n_negative : int, optional
        Scored texts of each group, where they differ; one of them and `n` are enough.
    observed_auc : float, optional
        An AUC that was measured: what does it say? Needs `n`, `purity` and one effect.
    evaluation : str
        How the AUC is measured: "cross_validated" (out-of-fold scores pooled) or "held_out" (one split, not re-used).
        Plans give both.
    tests : int
        Number of tests in the family, corrected by Bonferroni: each has level / tests.
    level, power : float
        Chance of a false detection, and of a true one, in (0, 1).
    offset : float
        Distance of the neutral texts' centre from the midpoint of the groups, in within-class standard deviations.
    inflation : float
        Null scale of a cross-validated AUC over that of a held-out one.
    dimension : int, optional
        Dimensions that a learned direction is searched in: adds its frontier to that of the best direction.
    train_fraction : float, optional
        Training texts a scored one of the held-out split (4: one fold of five is scored). Cross-validation has 0.8.
    figure : str, optional
        Draw the phase diagram to this .svg file.
    json : str, optional
        Also write the numbers to this file, as a list of flat records; "-" is standard output.
    """

    separation: list[float] | None = field(
        default=None, metadata={"help": "Effect sizes s, in within-class standard deviations (default: 0.5 1 2 4 8)."}
    )
    auc: list[float] | None = field(
        default=None, metadata={"help": "Effect sizes as AUC where every text is marked, instead of --separation."}
    )
    purity: float | None = field(default=None, metadata={"help": "Share of texts that carry a marker, in (0, 1]."})
    n: int | None = field(default=None, metadata={"help": "Scored texts of both groups together."})
    n_positive: int | None = field(default=None, metadata={"help": "Scored texts of the positive group."})
    n_negative: int | None = field(default=None, metadata={"help": "Scored texts of the negative group."})
    observed_auc: float | None = field(default=None, metadata={"help": "A measured AUC: what does it say?"})
    evaluation: str = field(
        default=CROSS_VALIDATED,
        metadata={"help": "How the AUC is measured; plans give both.", "choices": [CROSS_VALIDATED, HELD_OUT]},
    )
    tests: int = field(default=1, metadata={"help": "Tests in the family (Bonferroni): each has level / tests."})
    level: float = field(default=0.05, metadata={"help": "Chance of a false detection."})
    power: float = field(default=0.8, metadata={"help": "Wanted chance of a true detection."})
    offset: float = field(default=0.0, metadata={"help": "Neutral centre's distance from the midpoint, in s.d."})
    inflation: float = field(
        default=CV_INFLATION, metadata={"help": "Null scale of a cross-validated AUC over a held-out one's."}
    )
    dimension: int | None = field(
        default=None, metadata={"help": "Dimensions a learned direction is searched in: its frontier as well."}
    )
    train_fraction: float | None = field(
        default=None,
        metadata={"help": "Training texts a scored one of the held-out split (default: 4). Needs --dimension."},
    )
    figure: str | None = field(default=None, metadata={"help": "Draw the phase diagram to this .svg file."})
    json: str | None = field(
        default=None, metadata={"help": "Also write the numbers to this file as records; '-' is standard output."}
    )

    def __post_init__(self) -> None:
        for name in ("separation", "auc"):  # a config file may hold a single number
            value = getattr(self, name)
            if value is not None and not isinstance(value, list):
                setattr(self, name, [value])


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


@dataclass(frozen=True)
class Question:
    """The arguments, checked, with what follows from them."""

    given: PowerArguments
    separations: tuple[float, ...]
    n_positive: int | None
    n_negative: int | None

    @classmethod
    def of(cls, given: PowerArguments) -> Question:
        """Check everything that can be wrong with the input.

        Raises
        ------
        ValueError
            For a value outside its range, arguments that contradict each other, and where nothing is asked.
        """
        _check_test(given)
        separations = _separations(given)
        n_positive, n_negative = _sizes(given)
        if given.purity is not None and not 0.0 < given.purity <= 1.0:
            raise ValueError(f"`purity` must lie in (0, 1], the share of marked texts; got {given.purity}")
        _check_observed(given, n_positive)
        if given.purity is None and n_positive is None and given.figure is None:
            raise ValueError(
                "nothing to compute: give --purity (how many texts?), --n (from which purity on?), both (which "
                "power?), or --figure FILE.svg"
            )
        if given.figure is not None:
            if Path(given.figure).suffix.lower() != ".svg":
                raise ValueError(
                    f"`figure` must end in .svg, the one format that is drawn (browsers and editors open it, and "
                    f"converters make .png or .pdf of it); got {given.figure!r}"
                )
            _check_file(given.figure, "figure")
        if given.json not in (None, "-"):
            _check_file(given.json, "json")
        return cls(given, separations, n_positive, n_negative)

    @property
    def level(self) -> float:
        """Of each test of the family."""
        return self.given.level / self.given.tests

    @property
    def n(self) -> int | None:
        return None if self.n_positive is None else self.n_positive + self.n_negative

    @property
    def balanced_n(self) -> float:
        """The size of a balanced sample whose null has the same spread; `n` itself where the groups are equal."""
        if self.n_positive == self.n_negative:
            return self.n
        variance = 3.0 * null_std(self.n_positive, self.n_negative) ** 2  # = (n + 1)/n² when balanced
        return (1.0 + math.sqrt(1.0 + 4.0 * variance)) / (2.0 * variance)

    def inflation(self, test: str) -> float:
        return self.given.inflation if test == CROSS_VALIDATED else 1.0

    def options(self, test: str, learned: bool = False) -> dict:
        """Keywords of the functions in `monitor.geometry.detection`, the power left out."""
        options = {"level": self.level, "offset": self.given.offset, "inflation": self.inflation(test)}
        if learned:
            fraction = TRAIN_FRACTION[test]
            if test == HELD_OUT and self.given.train_fraction is not None:
                fraction = self.given.train_fraction
            options |= {"dimension": self.given.dimension, "train_fraction": fraction}
        return options

    def planned(self, test: str, learned: bool = False) -> dict:
        return self.options(test, learned) | {"power": self.given.power}

    def power_there(self, separation: float, test: str, learned: bool = False) -> float:
        """Of the audit as it is: with its purity, its size, its imbalance."""
        options = self.options(test, learned)
        if learned:  # trained on what there is, whatever the balance
            options["train_fraction"] *= self.n / self.balanced_n
        return detection_power(self.balanced_n, self.given.purity, separation, **options)


def answer(question: Question) -> tuple[list[dict], list[str]]:
    """The numbers as flat records, and the lines to print."""
    given = question.given
    if given.observed_auc is not None:
        records, lines = _judge(question)
    elif given.purity is not None and question.n is not None:
        records, lines = _plan(question, f"Power with n = {question.n:,} at purity {given.purity:g}", _powers)
    elif given.purity is not None:
        records, lines = _plan(question, f"Scored texts needed at purity {given.purity:g}", _budgets)
    elif question.n is not None:
        records, lines = _plan(question, f"Smallest detectable purity with n = {question.n:,}", _thresholds)
    else:
        records, lines = [], [_test_in_words(question)]
    several = len(question.separations) > 1
    which = NAMES[given.evaluation] if several else f"s = {question.separations[0]:.3g}"
    lines += ["", f"Where an audit can tell, and where not ({which}):", "", diagram(question)]
    if given.figure is not None:
        lines += ["", f"Figure: {given.figure}"]
    return records, lines


# What is planned: columns of a table, one row an effect.

Column = tuple[str, str, str, str, Callable[[float], float]]  # heading, metric, test, probe, value of the separation


def _plan(question: Question, title: str, columns: Callable[[Question], list[Column]]) -> tuple[list[dict], list[str]]:
    table = [["s", "AUC, all marked"]]
    cells = columns(question)
    table[0] += [heading for heading, *_ in cells]
    records = []
    for separation in question.separations:
        row = [f"{separation:.3g}", f"{auc_max(separation, 1.0):.3f}"]
        for _, metric, test, probe, compute in cells:
            value = compute(separation)
            records.append(_record(question, metric, test, value, separation, probe))
            row.append(_cell(metric, value))
        table.append(row)
    lines = [title, _test_in_words(question), "", *_table(table), "", *_wrapped(_remarks(question))]
    return records, lines


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
        if not learned:
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
    return columns + _budgets(question)[:-1]


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
    if given.purity is None or question.n is None:
        remarks.append("The small-s form promises too much where s is large: from s = 6 on only purity counts.")
    if question.n is not None and round(question.balanced_n) != question.n:
        remarks.append(
            f"{question.n_positive:,} + {question.n_negative:,} texts tell as much as {question.balanced_n:.0f} "
            "in equal groups."
        )
    return remarks


# What a result says.


def _judge(question: Question) -> tuple[list[dict], list[str]]:
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
    probe = _probe(learned)
    records = [
        _record(question, metric, test, value, separation, probe, note=word if metric == "verdict" else "")
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
    lines = [_test_in_words(question), ""]
    lines += [f"{a.ljust(widths[0])}  {b.rjust(widths[1])}  {c}".rstrip() for a, b, c in rows]
    return records, [*lines, "", *_wrapped(_reasons(question, word, z, power, needed, smallest))]


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


# Words, cells, records.


def _test_in_words(question: Question) -> str:
    given = question.given
    text = f"One-sided test of the AUC at level {given.level:g}, power {given.power:g}"
    if given.tests > 1:
        text += f"; {given.tests} tests, each at level {question.level:.2g}"
    if given.offset:
        text += f"; neutral texts off the midpoint by {given.offset:g}"
    if given.evaluation == CROSS_VALIDATED or given.observed_auc is None:
        text += f"; cross-validation widens the null {given.inflation:g} times"
    return f"{text}."


def _wrapped(sentences: Sequence[str]) -> list[str]:
    return [textwrap.fill(sentence, 100, initial_indent="- ", subsequent_indent="  ") for sentence in sentences]


def _p_value(p: float) -> str:
    return f"{p:.2g}" if p > 0.0 else "< 1e-300"


def _cell(metric: str, value: float) -> str:
    if math.isinf(value):
        return "none"
    return f"{value:,}" if metric in ("n", "n_asymptotic") else f"{value:.2f}" if metric == "power" else f"{value:.3g}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def _record(
    question: Question, metric: str, test: str, value: float, separation: float, probe: str, note: str = ""
) -> dict:
    """One flat record: the journal's names, and the parameters the number belongs to."""
    given = question.given
    if not math.isfinite(value):
        value, note = None, "none: not even the largest possible is enough"
    learned = probe == "learned"
    return {
        "measure": "power",
        "metric": metric,
        "group": test,
        "probe": probe,
        "value": value,
        "note": note,
        "separation": separation,
        "purity": given.purity,
        "n_positive": question.n_positive,
        "n_negative": question.n_negative,
        "level": given.level,
        "wanted_power": given.power,
        "tests": given.tests,
        "inflation": question.inflation(test),
        "offset": given.offset,
        "dimension": given.dimension if learned else None,
        "train_fraction": question.options(test, True)["train_fraction"] if learned else None,
    }


# Checks.


def _check_test(given: PowerArguments) -> None:
    if given.evaluation not in NAMES:
        raise ValueError(f"`evaluation` must be one of {', '.join(NAMES)}; got {given.evaluation!r}")
    if not 0.0 < given.level < 1.0:
        raise ValueError(f"`level` must lie strictly between 0 and 1, got {given.level}")
    if given.tests < 1:
        raise ValueError(f"`tests` must be at least 1, the number of tests in the family; got {given.tests}")
    if not given.level < given.power < 1.0:
        raise ValueError(f"`power` must lie between level ({given.level:g}) and 1, got {given.power}")
    if not math.isfinite(given.offset):
        raise ValueError(f"`offset` must be finite, got {given.offset}")
    if not 1.0 <= given.inflation < math.inf:
        raise ValueError(f"`inflation` must be at least 1: nothing is more exact than one held-out split; "
                         f"got {given.inflation}")  # fmt: skip
    if given.dimension is not None and given.dimension < 1:
        raise ValueError(f"`dimension` must be at least 1, got {given.dimension}")
    if given.train_fraction is not None:
        if given.dimension is None:
            raise ValueError("`train_fraction` is for a learned direction: give --dimension too, or leave it out")
        if not 0.0 < given.train_fraction < math.inf:
            raise ValueError(f"`train_fraction` must be above 0, got {given.train_fraction}")


def _separations(given: PowerArguments) -> tuple[float, ...]:
    if given.auc is not None:
        if given.separation is not None:
            raise ValueError("`auc` and `separation` both give the effect: give one of them")
        for auc in given.auc:
            if not 0.5 < auc < 1.0:
                raise ValueError(
                    f"`auc` must lie strictly between 0.5 (no effect) and 1 (any effect from s = 4 on); got {auc}"
                )
        found = [separation_from_auc(auc) for auc in given.auc]
    elif given.separation is not None:
        found = given.separation
        for separation in found:
            if not 0.0 < separation < math.inf:
                raise ValueError(f"`separation` must be above 0 and finite, got {separation}")
    else:
        found = list(SEPARATIONS)
    if not 1 <= len(found) <= 26:
        raise ValueError(f"give 1 to 26 effects, got {len(found)}")
    return tuple(dict.fromkeys(found))


def _sizes(given: PowerArguments) -> tuple[int | None, int | None]:
    n, sizes = given.n, {"n_positive": given.n_positive, "n_negative": given.n_negative}
    if n is not None and not 4 <= n <= LARGEST_N:
        raise ValueError(f"`n` must be from 4 to {LARGEST_N:.0e}, the scored texts of both groups together; got {n}")
    for name, size in sizes.items():
        if size is not None and not 1 <= size <= LARGEST_N:
            raise ValueError(f"`{name}` must be from 1 to {LARGEST_N:.0e}, got {size}")
    known = [size for size in sizes.values() if size is not None]
    if not known:
        return (None, None) if n is None else (n - n // 2, n // 2)
    if len(known) == 1:
        if n is None:
            raise ValueError("one of `n_positive` and `n_negative` is not enough: give the other, or `n`")
        if known[0] >= n:
            raise ValueError(f"the groups have `n` = {n} texts together, and one alone was given {known[0]}")
        return (known[0], n - known[0]) if given.n_positive is not None else (n - known[0], known[0])
    if n is not None and sum(known) != n:
        raise ValueError(f"`n` = {n} contradicts `n_positive` + `n_negative` = {sum(known)}: leave one out")
    if sum(known) < 4:
        raise ValueError(f"`n_positive` + `n_negative` must be at least 4, got {sum(known)}")
    return known[0], known[1]


def _check_observed(given: PowerArguments, n_positive: int | None) -> None:
    if given.observed_auc is None:
        return
    if not 0.0 <= given.observed_auc <= 1.0:
        raise ValueError(f"`observed_auc` must lie in [0, 1], got {given.observed_auc}")
    missing = [name for name, value in (("n", n_positive), ("purity", given.purity)) if value is None]
    effects = given.separation or given.auc
    if effects is None or len(effects) != 1:
        missing.append("separation (one: the smallest effect that must not be missed)")
    if missing:
        raise ValueError(
            f"what `observed_auc` says depends on {', '.join(f'--{name}' for name in missing)}: give it too"
        )


def _check_file(target: str, name: str) -> None:
    if not target or Path(target).is_dir():
        raise ValueError(f"`{name}` must be a file, got {target!r}")
    check_writable(Path(target).parent, name)


if __name__ == "__main__":
    main()
