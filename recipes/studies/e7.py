"""E7: can a number that needs no labels say how well a probe will do? (arXiv 2609.22337, section VI-I, figure 10)

The concentration index of a data set's spectrum, alone and inverted to a separation, against the AUC that a probe
reaches; beside it the cross-fitted separation, which needs labels, and the purity alone, which needs no features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import spearmanr
from tqdm import tqdm

from monitor.geometry.concentration import concentration_index, separation_from_concentration
from monitor.geometry.purity import auc_max
from recipes.embedded import EMBEDDED
from recipes.studies.features import GridStates, read_grids
from recipes.studies.protocol import marked_fit, mixture_aucs
from recipes.studies.record import record

TITLE = "the label-free concentration index and the cross-fitted separation as predictions of the AUC"

SIZES = {0.3: 300, 0.5: 300, 1.0: 600}  # purity: n
QUICK_SIZES = {0.3: 200, 0.5: 200, 1.0: 240}
COMPONENTS = 50


@dataclass(frozen=True)
class Point:
    """One setting: what would have predicted its AUC, and the AUC; beta and auc are means over draws."""

    name: str
    purity: float
    beta: float
    separation: float
    auc: float

    @property
    def separation_from_beta(self) -> float:
        return float(separation_from_concentration(self.beta, self.purity, COMPONENTS))


def run(quick: bool = False, seed: int = 42, model: str = "smollm2-135m") -> list[dict]:
    """Rank correlations of the predictors with the AUC, within a purity and over all.

    Parameters
    ----------
    quick : bool
        120 cells of two dimensions, and two draws of every data set instead of five.
    seed : int
    model : str
        A folder, a Hub id or an embedded name; the embedded models are read as well, for settings to rank.

    Returns
    -------
    records : list of dict
    """
    draws, sizes = (2, QUICK_SIZES) if quick else (5, SIZES)
    points = []
    names = list(dict.fromkeys((model, *(embedded.name for embedded in EMBEDDED))))
    for name in tqdm(names, desc="E7", unit="model", disable=None):
        for pooling, grids in read_grids(name, quick).items():
            for dimension, grid in grids.items():
                points += measured(grid, f"{name}, {pooling}, {dimension}", sizes, draws, seed)
    records = []
    for point in points:
        at = f"{point.name}, purity {point.purity:g}"
        records.append(record("e7", at, "auc", point.auc))
        records.append(record("e7", at, "concentration_index", point.beta))
        records.append(record("e7", at, "s_hat", point.separation))
        s = point.separation_from_beta
        note = "" if math.isfinite(s) else "infinite: one direction has all the variance."
        records.append(record("e7", at, "s_from_concentration", s if math.isfinite(s) else None, note=note))
    return records + correlations(points)


def measured(grid: GridStates, name: str, sizes: dict[float, int], draws: int, seed: int) -> list[Point]:
    """The points of one model, pooling and dimension, at mid-depth."""
    separation = float(marked_fit(grid, [grid.middle], seed).separation[0])
    points = []
    for purity, n in sizes.items():
        aucs, betas = [], []
        for k in range(draws):
            of_draw, mixture = mixture_aucs(grid, n, purity, seed + 5 * k)
            aucs.append(float(of_draw.mean()))
            betas.append(float(concentration_index(grid.states[mixture.rows, grid.middle], COMPONENTS)))
        points.append(Point(name, mixture.purity, float(np.mean(betas)), separation, float(np.mean(aucs))))
    return points


def correlations(points: Sequence[Point]) -> list[dict]:
    """Spearman's correlations with the AUC within each purity and over all points; mean errors of the predictions."""
    records = []
    about = f"{len(points)} settings: models, poolings and dimensions at three purities; paper: 72."
    for purity in sorted({point.purity for point in points}):
        here = [point for point in points if point.purity == purity]
        group, auc = f"purity {purity:g}", [point.auc for point in here]
        note = f"{len(here)} settings; paper: 24, between -0.34 and 0.36 at every purity."
        records += _rank(group, "beta", [point.beta for point in here], auc, 0.0, note)
        note = f"{len(here)} settings; paper: 24."
        paper = {0.3: 0.85, 0.5: 0.76}.get(purity)
        records += _rank(group, "s_hat", [point.separation for point in here], auc, paper, note)
    auc = np.array([point.auc for point in points])
    from_s = auc_max([point.separation for point in points], [point.purity for point in points])
    from_beta = auc_max([point.separation_from_beta for point in points], [point.purity for point in points])
    everything = "all purities"
    records += _rank(everything, "beta", [point.beta for point in points], auc, 0.09, about)
    records += _rank(everything, "law_at_s_hat", from_s, auc, 0.97, about)
    records += _rank(everything, "law_at_beta", from_beta, auc, 0.88, about)
    control = "control: a prediction that knows the purity of each setting and nothing else of it."
    records += _rank(everything, "purity_alone", [point.purity for point in points], auc, None, control)
    at_infinity = auc_max(np.full(len(points), math.inf), [point.purity for point in points])
    for name, law, paper, note in (
        ("law_at_s_hat", from_s, 0.033, about),
        ("law_at_beta", from_beta, None, about),
        ("purity_alone", at_infinity, None, "control: the law at infinite separation."),
    ):
        records.append(record("e7", everything, f"mae_{name}", np.abs(law - auc).mean(), paper, note))
    return records


def _rank(
    group: str, name: str, predictor: Sequence[float], auc: Sequence[float], paper: float | None, note: str
) -> list[dict]:
    """Spearman's correlation and its two-sided p; None where one of the two does not vary."""
    if len(auc) < 3:
        return [record("e7", group, f"spearman_{name}", None, paper, "fewer than three settings: nothing to rank.")]
    if len(set(predictor)) < 2 or len(set(auc)) < 2:
        why = "all AUCs are the same: nothing to rank." if len(set(auc)) < 2 else f"{name} does not vary."
        return [record("e7", group, f"spearman_{name}", None, paper, why)]
    found = spearmanr(predictor, auc)
    return [
        record("e7", group, f"spearman_{name}", found.statistic, paper, note),
        record("e7", group, f"spearman_{name}_p", found.pvalue),
    ]
