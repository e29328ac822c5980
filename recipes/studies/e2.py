"""E2: the AUC against purity, predicted from one number (arXiv 2609.22337, sections VI-D and VI-E, table V, figure 6).

The separation is measured once, where every text is marked. The purity law then says the whole curve of a probe that
knows the direction; a probe that learns it from the mixture, with neutral texts labelled at random, stays below. Both
are read: the second as in the paper, the first with a probe of the marked pairs that the mixture left over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from monitor.geometry.auc import auc
from monitor.geometry.detection import CV_INFLATION
from monitor.geometry.multiplicity import benjamini_hochberg, bonferroni
from monitor.geometry.probes import fit_probe
from monitor.geometry.purity import auc_max, fit_separation
from monitor.stimuli.mixture import Mixture
from recipes.studies import published
from recipes.studies.detection_rates import LEVEL, Plane, detection_rates
from recipes.studies.features import GridStates, read_grids
from recipes.studies.protocol import marked_fit, mixture_aucs, p_value
from recipes.studies.record import record

TITLE = "the AUC against purity, predicted from one separation; the detectability phase diagram"

N, DRAWS = 300, 8
PURITIES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)  # nine; the paper does not list its own
PLANE = Plane((0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0), (100, 300, 680), 8)
# What 120 cells hold.
QUICK_N, QUICK_DRAWS, QUICK_PURITIES = 200, 2, (0.1, 0.2, 0.3, 0.5, 1.0)
QUICK_PLANE = Plane((0.05, 0.1, 0.2, 0.5), (100, 200), 2)

_SPAN = "paper: median of its six models; all {span}."
_NOTES = {
    "mae": f"mean absolute error of the law at s_hat, nothing fitted, on one draw. {_SPAN}",
    "mae_fit": f"of the law at s_fit, the one separation that fits the curve best, sought up to 20. {_SPAN}",
    "s_hat": _SPAN,
    "s_fit": _SPAN,
    "largest_dip": "largest fall of the AUC from one purity to the next; paper: the largest of 24 curves.",
    "largest_dip_over_sd": "in standard deviations over splits at the two purities; paper: all within one. Splits "
    "leave out what the draw of the texts adds.",
    "mae_mean_curve": "of the mean curve over draws: without their luck, what is left is what learning costs.",
    "largest_dip_mean_curve": "of the mean curve over draws.",
    "mae_known_direction": "of the mean curve over draws of a probe trained on the marked pairs outside the mixture.",
}
_TABLES = {
    "s_hat": published.SEPARATION,
    "mae": published.MAE,
    "s_fit": published.S_FIT,
    "mae_fit": published.MAE_FIT,
}
_EVERYWHERE = {"largest_dip": 0.010, "largest_dip_over_sd": 1.0}


def run(quick: bool = False, seed: int = 42, model: str = "smollm2-135m") -> list[dict]:
    """Purity curves, their predictions, and detection rates over purities and sample sizes.

    Parameters
    ----------
    quick : bool
        120 cells of two dimensions, five purities at n = 200, fewer draws, a thinner plane.
    seed : int
    model : str
        A folder, a Hub id or an embedded name.

    Returns
    -------
    records : list of dict
    """
    n, purities, draws, plane = (
        (QUICK_N, QUICK_PURITIES, QUICK_DRAWS, QUICK_PLANE) if quick else (N, PURITIES, DRAWS, PLANE)
    )
    grids = read_grids(model, quick)
    records = []
    steps = sum(len(of_pooling) + len(plane.purities) * len(plane.sizes) for of_pooling in grids.values())
    with tqdm(total=steps, desc="E2", unit="step", disable=None) as progress:
        for pooling, of_pooling in grids.items():
            p_values, separations = [], []
            for dimension, grid in of_pooling.items():
                separation = float(marked_fit(grid, [grid.middle], seed).separation[0])
                curve = purity_curve(grid, n, purities, draws, seed)
                records += _curve_records(f"{model}, {pooling}, {dimension}", dimension, curve, separation)
                p_values += curve.p
                separations.append(separation)
                progress.update()
            records += _family(f"{model}, {pooling}", p_values)
            separation = float(np.median(separations))
            records += detection_rates(f"{model}, {pooling}", of_pooling, separation, plane, seed, progress)
    return records


@dataclass(frozen=True, eq=False)
class Curve:
    """AUCs of one dimension by purity.

    purity : realised purities, increasing
    aucs : Tensor [purities, 5]; of the splits of one draw, as in the paper
    p : p-values of their means
    learned, known : Tensor [draws, purities]; of probes cross-validated in the mixture (one split) and of probes of the
        marked pairs outside it
    """

    purity: list[float]
    aucs: Tensor
    p: list[float]
    learned: Tensor
    known: Tensor


def purity_curve(grid: GridStates, n: int, purities: Sequence[float], draws: int, seed: int) -> Curve:
    """One mixture a purity and draw. With one seed, the pairs of a lower purity are among those of a higher one."""
    realised, aucs, p_values, learned, known = [], [], [], [], []
    for purity in purities:
        of_splits, mixture = mixture_aucs(grid, n, purity, seed)
        realised.append(mixture.purity)
        aucs.append(of_splits)
        p_values.append(p_value(of_splits, mixture.labels))
        found = [mixture_aucs(grid, n, purity, seed + 5 * k, 1) for k in range(draws)]
        learned.append([float(of_split[0]) for of_split, _ in found])
        known.append([known_direction_auc(grid, drawn) for _, drawn in found])
    return Curve(realised, torch.stack(aucs), p_values, torch.tensor(learned).T, torch.tensor(known).T)


def known_direction_auc(grid: GridStates, mixture: Mixture) -> float:
    """AUC in a mixture of a probe trained on the marked pairs that are not in it."""
    pairs = grid.stimuli.n_pairs
    left = torch.ones(pairs, dtype=torch.bool)
    left[mixture.rows[: mixture.n_marked // 2]] = False
    rest = left.nonzero()[:, 0]
    labels = torch.cat([torch.ones_like(rest), torch.zeros_like(rest)])
    probe = fit_probe(grid.states[torch.cat([rest, rest + pairs])][:, [grid.middle]], labels)
    return float(auc(probe.score(grid.states[mixture.rows][:, [grid.middle]])[0].cpu(), mixture.labels))


def against_law(curve: Curve, separation: float) -> dict[str, float]:
    """Errors of the law without and with a fit, and how far the curve is from never falling."""
    means, sds = curve.aucs.mean(1).numpy(), curve.aucs.std(1).numpy()
    law = auc_max(separation, curve.purity)
    fitted = fit_separation(curve.purity, means)
    where = int((means[:-1] - means[1:]).argmax())
    dip, sd = largest_fall(means), float(max(sds[where], sds[where + 1]))
    learned, known = curve.learned.mean(0).numpy(), curve.known.mean(0).numpy()
    return {
        "s_hat": separation,
        "mae": float(np.abs(law - means).mean()),
        "s_fit": fitted,
        "mae_fit": float(np.abs(auc_max(fitted, curve.purity) - means).mean()),
        "largest_dip": dip,
        "largest_dip_over_sd": 0.0 if dip == 0 else dip / sd,
        "mae_mean_curve": float(np.abs(law - learned).mean()),
        "largest_dip_mean_curve": largest_fall(learned),
        "mae_known_direction": float(np.abs(law - known).mean()),
    }


def largest_fall(values: Sequence[float]) -> float:
    """Largest fall from one value to the next, 0 where there is none."""
    return max(0.0, *(float(now - after) for now, after in zip(values, values[1:], strict=False)))


def _curve_records(group: str, dimension: str, curve: Curve, separation: float) -> list[dict]:
    records = []
    for i, purity in enumerate(curve.purity):
        at = f"{group}, purity {purity:.3g}"
        rows = {
            "auc": curve.aucs[i].mean(),
            "auc_sd": curve.aucs[i].std(),
            "p": curve.p[i],
            "predicted_auc": auc_max(separation, purity),
            "auc_draws": curve.learned[:, i].mean(),
            "auc_known_direction": curve.known[:, i].mean(),
        }
        records += [record("e2", at, metric, value) for metric, value in rows.items()]
    for metric, value in against_law(curve, separation).items():
        table = _TABLES.get(metric)
        paper = _EVERYWHERE.get(metric) if table is None else published.typical(table, dimension)
        note = _NOTES[metric].format(span="" if table is None else published.span(table))
        records.append(record("e2", group, metric, value, paper, note))
    return records


def _family(group: str, p_values: list[float]) -> list[dict]:
    note = f"of {len(p_values)} points of the curves, at {CV_INFLATION:g} sigma_0; paper: of 216."
    kinds = {
        "share_detected": (np.asarray(p_values), 162 / 216),
        "share_detected_bh": (benjamini_hochberg(p_values), 159 / 216),
        "share_detected_bonferroni": (bonferroni(p_values), 109 / 216),
    }
    return [record("e2", group, name, (p <= LEVEL).mean(), paper, note) for name, (p, paper) in kinds.items()]
