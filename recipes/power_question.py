"""What `latentwatch power` is asked: its arguments, checked, and what follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from monitor.geometry.detection import CV_INFLATION, detection_power, null_std
from monitor.geometry.purity import separation_from_auc
from recipes.outputs import check_writable

SEPARATIONS = (0.5, 1.0, 2.0, 4.0, 8.0)  # what is tabulated when no effect is given
CROSS_VALIDATED, HELD_OUT = "cross_validated", "held_out"
TRAIN_FRACTION = {CROSS_VALIDATED: 0.8, HELD_OUT: 4.0}  # training texts a scored one: five folds; one fold of five
NAMES = {CROSS_VALIDATED: "pooled cross-validation", HELD_OUT: "one held-out split"}
LARGEST_N = 10**12


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

    def in_words(self) -> str:
        """The test, as a line to print."""
        given = self.given
        text = f"One-sided test of the AUC at level {given.level:g}, power {given.power:g}"
        if given.tests > 1:
            text += f"; {given.tests} tests, each at level {self.level:.2g}"
        if given.offset:
            text += f"; neutral texts off the midpoint by {given.offset:g}"
        if given.evaluation == CROSS_VALIDATED or given.observed_auc is None:
            text += f"; cross-validation widens the null {given.inflation:g} times"
        return f"{text}."

    def record(
        self, metric: str, test: str, value: float, separation: float, probe: str = "best", note: str = ""
    ) -> dict:
        """One flat record: the journal's names, and the parameters the number belongs to."""
        given = self.given
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
            "n_positive": self.n_positive,
            "n_negative": self.n_negative,
            "level": given.level,
            "wanted_power": given.power,
            "tests": given.tests,
            "inflation": self.inflation(test),
            "offset": given.offset,
            "dimension": given.dimension if learned else None,
            "train_fraction": self.options(test, True)["train_fraction"] if learned else None,
        }


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
    effects = given.separation or given.auc or ()
    if len(effects) > 1:
        raise ValueError(
            f"`observed_auc` is judged against one effect, the smallest that must not be missed; got {len(effects)}: "
            f"{', '.join(f'{effect:g}' for effect in effects)}"
        )
    if not effects:
        missing.append("separation (one: the smallest effect that must not be missed)")
    if missing:
        raise ValueError(
            f"what `observed_auc` says depends on {', '.join(f'--{name}' for name in missing)}: give it too"
        )


def _check_file(target: str, name: str) -> None:
    if not target or Path(target).is_dir():
        raise ValueError(f"`{name}` must be a file, got {target!r}")
    check_writable(Path(target).parent, name)
