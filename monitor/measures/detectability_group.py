"""The readings of one group: separation, probes and geometry, before any verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from monitor.geometry.auc import auc, auc_interval, auc_standard_error
from monitor.geometry.clusters import clustered_p
from monitor.geometry.concentration import concentration_index, separation_from_concentration
from monitor.geometry.detection import CV_INFLATION, detection_p, purity_threshold
from monitor.geometry.intrinsic_dimension import mle_dimension, two_nn_dimension
from monitor.geometry.nonlinear_probes import nonlinear_probes
from monitor.geometry.probes import fit_probe, logistic_probes
from monitor.geometry.purity import auc_max
from monitor.geometry.sagitta import sagitta_curvature
from monitor.geometry.separation import crossfit
from monitor.geometry.separation_change import separation_change
from monitor.measures.detectability_design import Design, Regime
from monitor.readings import Reading

# What the estimators raise for features they cannot read: an invalid reading with the reason, not the end of the run.
_UNREADABLE = (ValueError, RuntimeError, torch.linalg.LinAlgError)

_HIGHER = {  # metric without its regime -> what a higher value says, and its range
    "s_hat": ("the groups lie further apart", (0.0, math.inf)),
    "s_change": ("further apart than in the reference", (-math.inf, math.inf)),
    "auc": ("the probe tells the groups apart better; 1/2 is chance", (0.0, 1.0)),
    "auc_svm": ("the RBF-SVM tells the groups apart better; 1/2 is chance", (0.0, 1.0)),
    "auc_mlp": ("the MLP tells the groups apart better; 1/2 is chance", (0.0, 1.0)),
    "auc_change": ("the probe tells the groups apart better than in the reference", (-1.0, 1.0)),
    "auc_p": ("more like chance", (0.0, 1.0)),
    "auc_p_adjusted": ("more like chance, for all that is tested at once", (0.0, 1.0)),
    "predicted_auc": ("the purity law allows a better probe", (0.5, 1.0)),
    "purity_gap": ("the probe falls further short of the purity law", (-1.0, 1.0)),
    "offset": ("neutral texts lie nearer to the positive group", (-math.inf, math.inf)),
    "alpha_star": ("a larger share of marked texts is needed to be detected", (0.0, 1.0)),
    "planted_power": ("the probe would more surely have found the smallest effect", (0.0, 1.0)),
    "verdict": ("1 detected, 0 not detected, -1 underpowered", (-1.0, 1.0)),
    "n_detected": ("more groups are detected", (0.0, math.inf)),
    "grouped_minus_random": ("contexts leak less into random folds", (-1.0, 1.0)),
    "intrinsic_dimension": ("the marked texts vary in more directions", (0.0, math.inf)),
    "two_nn_dimension": ("the marked texts vary in more directions", (0.0, math.inf)),
    "curvature": ("the marked texts lie on a more curved manifold", (0.0, math.inf)),
    "concentration_index": ("one direction carries more of the variance", (0.0, 1.0)),
    "s_from_concentration": ("one direction carries more of the variance", (0.0, math.inf)),
    "neutral_leakage": ("neutral texts lean towards their stereotyped group; 1/2 is not at all", (0.0, 1.0)),
}


@dataclass(frozen=True, eq=False)
class DetectionTest:
    """One test: its regime, the layer's position (0 the headline), AUC and p, and the states [n, d] it was made on.

    standard_error : of the AUC over cells where these hold several pairs, else None
    """

    regime: Regime
    layer: int
    auc: float
    p: float
    states: Tensor
    standard_error: float | None


class GroupReadings:
    """Collects the readings of one group."""

    def __init__(self, measure: str, group: str, layers: Sequence[int]) -> None:
        self.measure, self.group, self.layers = measure, group, list(layers)
        self.readings: list[Reading] = []
        self.tests: list[DetectionTest] = []
        self.values: dict[str, float] = {}  # at the headline layer
        self.verdicts: dict[str, str] = {}

    def add(
        self, metric: str, value: float | None, suffix: str = "", *, layer: int = 0, low: float | None = None,
        high: float | None = None, note: str = "",
    ) -> None:  # fmt: skip
        higher_means, limits = _HIGHER[metric.removesuffix("_mixed")]
        if value is not None and layer == 0 and math.isfinite(value):
            self.values[metric + suffix] = value
        self.readings.append(
            Reading(
                self.measure, metric + suffix, value, group=self.group, layer=self.layers[layer], low=low, high=high,
                higher_means=higher_means, range=limits, valid=value is not None, note=note,
            )
        )  # fmt: skip

    def attempt(self, metric: str, suffix: str, compute: Callable):
        """What `compute` returns, or None and an invalid reading that says why there is nothing."""
        try:
            return compute()
        except torch.OutOfMemoryError:
            raise
        except _UNREADABLE as error:
            self.add(metric, None, suffix, note=str(error))
            return None


def read_group(
    out: GroupReadings, design: Design, states: Tensor, before: Tensor, nonlinear: Sequence[str], power: float,
    level: float, seed: int,
) -> None:  # fmt: skip
    """All of a group's readings but the verdicts. states [n_texts, L, d], headline first; before [n_texts, d]."""
    problem = _not_finite(states[:, :1], design, "the model") or _not_finite(before[:, None], design, "the reference")
    if problem:
        for metric in ("s_hat", "s_change", "auc", "verdict"):
            out.add(metric, None, note=problem)
        return
    states = _readable_layers(out, design, states)
    full = design.regimes[0]
    marked, neutral = states[full.rows], states[2 * design.n_pairs :]
    fit = out.attempt(
        "s_hat", "",
        lambda: crossfit(marked, full.labels, full.groups, neutral if len(neutral) else None, seed=seed),
    )  # fmt: skip
    separation = offset = None
    if fit is not None:
        separation, offset = fit.separation.tolist(), None if fit.offset is None else fit.offset.tolist()
        change = out.attempt(
            "s_change", "",
            lambda: separation_change(marked[:, 0], before[full.rows], full.labels, full.groups, seed=seed),
        )  # fmt: skip
        for i, value in enumerate(separation):
            low, high = change.now[1:] if change is not None and i == 0 else (None, None)
            out.add("s_hat", value, layer=i, low=low, high=high)
        if change is not None:
            value, low, high = change.change
            out.add("s_change", value, low=low, high=high, note=f"{change.before[0]:.4g} in the reference")
        for i, value in enumerate(offset or ()):
            far = abs(value) > separation[i] / 2
            out.add(
                "offset", value, layer=i, note=f"beyond the groups' centres, ±{separation[i] / 2:.3g}" if far else ""
            )
    for regime in design.regimes:
        _probe(out, regime, states[regime.rows], before[regime.rows], separation, offset, nonlinear, power, level)
    _geometry(out, marked[:, 0])
    if design.stereotypes is not None:
        _neutral_leakage(out, design, marked[:, :1], states[:, :1])


def _probe(
    out: GroupReadings, regime: Regime, states: Tensor, before: Tensor, separation: Sequence[float] | None,
    offset: Sequence[float] | None, nonlinear: Sequence[str], power: float, level: float,
) -> None:  # fmt: skip
    suffix, labels, half = regime.suffix, regime.labels, regime.n // 2
    scores = out.attempt("auc", suffix, lambda: logistic_probes(states, labels, regime.folds))
    if scores is None:
        return
    areas = auc(scores, labels).mean(0).tolist()
    low, high = (bound.mean() for bound in auc_interval(scores[:, 0], labels, regime.groups, inflation=CV_INFLATION))
    errors = [None] * len(areas)
    if regime.clusters is not None:
        errors = auc_standard_error(scores, labels, regime.groups).mean(0).tolist()
    for i, (area, error) in enumerate(zip(areas, errors, strict=True)):
        p = float(detection_p(area, half, half))
        note = ""
        if error:  # 0 where the groups are apart altogether
            p = max(p, clustered_p(area, error, regime.clusters))
            note = f"pairs share cells: as {regime.clusters:.3g} clusters"
        bounds = {"low": float(low), "high": float(high)} if i == 0 else {}
        out.add("auc", area, suffix, layer=i, **bounds)
        out.add("auc_p", p, suffix, layer=i, note=note)
        out.tests.append(DetectionTest(regime, i, area, p, states[:, i], error))
        if separation is not None:
            predicted = auc_max(separation[i], regime.purity, 0.0 if offset is None else offset[i])
            out.add("predicted_auc", predicted, suffix, layer=i)
            if suffix:
                out.add("purity_gap", predicted - area, suffix, layer=i)
    if states.shape[::2] == before.shape and torch.equal(states[:, 0], before):
        out.add("auc_change", 0.0, suffix)
    else:
        earlier = out.attempt("auc_change", suffix, lambda: logistic_probes(before, labels, regime.folds))
        if earlier is not None:
            earlier = float(auc(earlier, labels).mean())
            out.add("auc_change", areas[0] - earlier, suffix, note=f"{earlier:.4f} in the reference")
    for kind in nonlinear:
        others = out.attempt(
            f"auc_{kind}", suffix, lambda kind=kind: nonlinear_probes(states[:, :1], labels, regime.folds, kind)
        )
        if others is not None:
            out.add(f"auc_{kind}", float(auc(others, labels).mean()), suffix)
    if not suffix:
        return
    random = out.attempt(
        "grouped_minus_random", suffix, lambda: logistic_probes(states[:, 0], labels, regime.random_folds)
    )
    if random is not None:
        out.add("grouped_minus_random", areas[0] - float(auc(random, labels).mean()), suffix)
    if separation is not None:
        least = math.inf
        if separation[0] > 0:
            shift = 0.0 if offset is None else offset[0]
            least = purity_threshold(
                regime.n, separation[0], level=level, power=power, offset=shift, inflation=CV_INFLATION
            )
        note = f"at ŝ = {separation[0]:.3g}, n = {regime.n}"
        if not math.isfinite(least):
            out.add("alpha_star", None, suffix, note=f"no purity is enough {note}")
        else:
            out.add("alpha_star", least, suffix, note=f"{note}; purity was {regime.purity:.3g}")


def _geometry(out: GroupReadings, marked: Tensor) -> None:
    """Geometry of the marked texts [n, d] at the headline layer."""
    dimension = out.attempt("intrinsic_dimension", "", lambda: float(mle_dimension(marked)))
    if dimension is not None:
        out.add("intrinsic_dimension", dimension)
        curvature = out.attempt("curvature", "", lambda: float(sagitta_curvature(marked, max(1, round(dimension)))))
        if curvature is not None:
            flat = "; 0: no bend is told from noise, the halves of the neighbours disagree" if curvature == 0 else ""
            out.add("curvature", curvature, note=f"per squared unit of the states{flat}")
    two_nn = out.attempt("two_nn_dimension", "", lambda: float(two_nn_dimension(marked)))
    if two_nn is not None:
        out.add("two_nn_dimension", two_nn)
    components = min(50, len(marked) - 1, marked.shape[1])
    beta = out.attempt("concentration_index", "", lambda: float(concentration_index(marked, components)))
    if beta is not None:
        out.add("concentration_index", beta)
        implied = out.attempt(
            "s_from_concentration", "", lambda: float(separation_from_concentration(beta, 1.0, components))
        )
        if implied is not None:
            out.add("s_from_concentration", implied, note="without labels, as if all other variance were isotropic")


def _neutral_leakage(out: GroupReadings, design: Design, marked: Tensor, states: Tensor) -> None:
    full, (rows, labels, contents) = design.regimes[0], design.stereotypes

    def leakage() -> tuple[float, float, float]:
        scores = fit_probe(marked, full.labels).score(states[rows])[0]
        return float(auc(scores, labels)), *map(float, auc_interval(scores, labels, contents))

    found = out.attempt("neutral_leakage", "", leakage)
    if found is not None:
        value, low, high = found
        n_contents = len(torch.unique(contents))
        out.add("neutral_leakage", value, low=low, high=high, note=f"{len(rows)} texts of {n_contents} contents")


def _readable_layers(out: GroupReadings, design: Design, states: Tensor) -> Tensor:
    """The layers whose states are finite; the others get invalid readings with the reason, and `out` forgets them."""
    problems = [_not_finite(states[:, i : i + 1], design, "the model") for i in range(states.shape[1])]
    for i, problem in enumerate(problems):
        if problem:
            out.add("s_hat", None, layer=i, note=problem)
            out.add("auc", None, layer=i, note=problem)
    kept = [i for i, problem in enumerate(problems) if not problem]
    out.layers = [out.layers[i] for i in kept]
    return states[:, kept]


def _not_finite(states: Tensor, design: Design, whose: str) -> str:
    bad = (~torch.isfinite(states).all(dim=(1, 2))).nonzero().flatten().tolist() if not bool(
        torch.isfinite(states.sum(dtype=torch.float64))
    ) else []  # fmt: skip
    if not bad:
        return ""
    return f"{len(bad)} states of {whose} are not finite, the first of {design.request.texts[bad[0]]!r}"
