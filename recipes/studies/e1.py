"""E1: every text marked against 30 % marked (arXiv 2609.22337, section VI-C, table III), and what its bars leave out.

The paper's standard deviations are over five splits of one drawn mixture. Another draw of texts from the same grid is
another audit of the same model: ten draws show how far such audits differ.
"""

from __future__ import annotations

import torch
from tqdm import tqdm

from monitor.geometry.detection import CV_INFLATION
from monitor.geometry.intrinsic_dimension import mle_dimension
from monitor.geometry.multiplicity import bonferroni
from monitor.geometry.purity import auc_max
from recipes.studies import published
from recipes.studies.features import GridStates, read_grids
from recipes.studies.protocol import marked_fit, mixture_aucs, p_value, probe_aucs
from recipes.studies.record import record

TITLE = "two regimes: every text marked, and 30 % marked"

N, PURITY, LEVEL = 300, 0.3, 0.05
Found = dict[str, float]  # metric -> value

_TYPICAL = "paper: median of its six models"
_NOTES = {
    "auc": f"n = 680, all marked texts; {_TYPICAL}.",
    "auc_mixed": f"n = 300, purity 0.3, mean of five splits of one draw; {_TYPICAL}, all {{span}}.",
    "auc_mixed_draws_sd": "over ten draws of the mixture, each with its own splits; draws overlap in the pool, so that "
    "audits on other sentences differ by more.",
    "s_hat": f"{_TYPICAL}; all {{span}}.",
    "s_hat_scaled": "every feature scaled to unit variance within the classes first. Shrinkage is towards equal "
    "variances: one feature with nearly all of it, an attention sink's, hides the rest.",
    "predicted_auc_mixed": f"the purity law at s_hat, neutral texts at the midpoint; {_TYPICAL}.",
    "intrinsic_dimension": f"{_TYPICAL}; all {{span}}.",
    "offset": f"signed, ours positive towards label 1; {_TYPICAL}, which it gives without sign.",
    "offset_over_half_s": "size of the offset over s_hat/2; paper: median of all 24 pairs, two of them above 1.",
}
_TABLES = {
    "auc_mixed": published.AUC_MIXED,
    "auc_mixed_sd": published.AUC_MIXED_SD,
    "s_hat": published.SEPARATION,
    "intrinsic_dimension": published.INTRINSIC_DIMENSION,
    "offset": published.OFFSET,
}
_EVERYWHERE = {"auc": 1.0, "auc_sd": 0.0, "predicted_auc_mixed": 0.755, "offset_over_half_s": 0.26}


def run(quick: bool = False, seed: int = 42, model: str = "smollm2-135m") -> list[dict]:
    """Both regimes at mid-depth, for every dimension and pooling.

    Parameters
    ----------
    quick : bool
        120 cells of two dimensions, and three draws of the mixture.
    seed : int
    model : str
        A folder, a Hub id or an embedded name.

    Returns
    -------
    records : list of dict
    """
    grids = read_grids(model, quick)
    records = []
    with tqdm(total=sum(map(len, grids.values())), desc="E1", unit="dimension", disable=None) as progress:
        for pooling, of_pooling in grids.items():
            p_values = []
            for dimension, grid in of_pooling.items():
                found = two_regimes(grid, seed, draws=3 if quick else 10)
                records += [_record(f"{model}, {pooling}, {dimension}", dimension, *item) for item in found.items()]
                p_values += [found["p"], found["p_mixed"]]
                progress.update()
            records += _family(f"{model}, {pooling}", p_values)
    return records


def two_regimes(grid: GridStates, seed: int, draws: int) -> Found:
    """What table III holds of one dimension, and the spread over draws."""
    rows, labels, groups = grid.marked
    full = probe_aucs(grid.states[rows, grid.middle], labels, groups, seed)
    fit = marked_fit(grid, [grid.middle], seed)
    separation, offset = float(fit.separation[0]), float(fit.offset[0])
    scaled = marked_fit(at_unit_variance(grid), [0], seed).separation
    # Seeds 5 apart: the splits of one draw use seed to seed + 4.
    mixtures = [mixture_aucs(grid, N, PURITY, seed + 5 * k) for k in range(draws)]
    mixed, mixture = mixtures[0]
    of_draws = torch.stack([aucs.mean() for aucs, _ in mixtures])
    return {
        "auc": float(full.mean()),
        "auc_sd": float(full.std()),
        "p": p_value(full, labels),
        "s_hat": separation,
        "s_hat_scaled": float(scaled[0]),
        "auc_mixed": float(mixed.mean()),
        "auc_mixed_sd": float(mixed.std()),
        "p_mixed": p_value(mixed, mixture.labels),
        "predicted_auc_mixed": auc_max(separation, mixture.purity),
        "predicted_auc_mixed_at_offset": auc_max(separation, mixture.purity, offset),
        "auc_mixed_draws": float(of_draws.mean()),
        "auc_mixed_draws_sd": float(of_draws.std()),
        "auc_mixed_draws_min": float(of_draws.min()),
        "auc_mixed_draws_max": float(of_draws.max()),
        "intrinsic_dimension": float(mle_dimension(grid.states[rows, grid.middle])),
        "offset": offset,
        "offset_over_half_s": 2 * abs(offset) / separation,
    }


def at_unit_variance(grid: GridStates) -> GridStates:
    """The middle layer alone, every feature of unit variance within the two classes."""
    middle = grid.states[:, [grid.middle]]
    classes = middle[: 2 * grid.stimuli.n_pairs].unflatten(0, (2, grid.stimuli.n_pairs))
    deviation = (classes - classes.mean(1, keepdim=True)).flatten(0, 1).square().mean(0).sqrt()
    return GridStates(grid.stimuli, middle / torch.where(deviation > 0, deviation, 1.0))


def _record(group: str, dimension: str, metric: str, value: float) -> dict:
    table = _TABLES.get(metric)
    paper = _EVERYWHERE.get(metric) if table is None else published.typical(table, dimension)
    note = _NOTES.get(metric, "").format(span="" if table is None else published.span(table))
    return record("e1", group, metric, value, paper, note)


def _family(group: str, p_values: list[float]) -> list[dict]:
    """How many of a family's tests are detections: by themselves, and corrected for being many."""
    adjusted = bonferroni(p_values)
    note = f"of {len(p_values)} tests, against {CV_INFLATION:g} sigma_0 at level {LEVEL:g}; in the paper all 48 are."
    return [
        record("e1", group, "n_detected", sum(p <= LEVEL for p in p_values), note=note),
        record("e1", group, "n_detected_bonferroni", int((adjusted <= LEVEL).sum()), note=note),
        record("e1", group, "largest_p", max(p_values), 1.3e-4, "paper: the largest of its family of 60."),
    ]
