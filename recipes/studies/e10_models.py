"""E10-R: kernel and MLP probes against the linear one on a model's states (arXiv 2609.22337, section VI-K)."""

from __future__ import annotations

import numpy as np
from tqdm import tqdm

from monitor.geometry.auc import auc
from monitor.geometry.detection import CV_INFLATION
from monitor.geometry.nonlinear_probes import KINDS, nonlinear_probes
from monitor.geometry.probes import grouped_folds, logistic_probes
from monitor.stimuli.mixture import draw_mixture
from recipes.studies.features import GridStates, read_grids
from recipes.studies.protocol import p_value
from recipes.studies.record import record

TITLE = "kernel and MLP probes against the linear one on a model's states"

SIZES = {0.1: 300, 0.3: 300, 1.0: 300}  # purity: n
QUICK_SIZES = {0.3: 200}
LEVEL, GAIN = 0.05, 0.005
_PAPER = {
    "median_minus_linear": {"svm": -0.068, "mlp": -0.015},
    "share_gaining": {"svm": 0.0, "mlp": 4 / 72},
    "share_detected": {"linear": 69 / 72, "svm": 46 / 72, "mlp": 53 / 72},
}
Found = dict[str, tuple[float, float]]  # probe -> mean AUC over five splits, p


def run(quick: bool = False, seed: int = 42, model: str = "smollm2-135m") -> list[dict]:
    """AUC of the three probes on the same mixtures and folds, at mid-depth.

    Parameters
    ----------
    quick : bool
        120 cells of two dimensions, at purity 0.3 alone.
    seed : int
    model : str
        A folder, a Hub id or an embedded name.

    Returns
    -------
    records : list of dict
    """
    sizes = QUICK_SIZES if quick else SIZES
    grids = read_grids(model, quick)
    records = []
    total = sum(map(len, grids.values())) * len(sizes)
    with tqdm(total=total, desc="E10-R", unit="setting", disable=None) as progress:
        for pooling, of_pooling in grids.items():
            all_found = []
            for dimension, grid in of_pooling.items():
                for purity, n in sizes.items():
                    found = three_probes(grid, n, purity, seed)
                    at = f"R: {model}, {pooling}, {dimension}, purity {purity:g}"
                    records += [record("e10", at, f"auc_{name}", value) for name, (value, _) in found.items()]
                    all_found.append(found)
                    progress.update()
            records += summarise(f"R: {model}, {pooling}", all_found)
    return records


def three_probes(grid: GridStates, n: int, purity: float, seed: int) -> Found:
    """Mean AUC and p of every probe on one mixture, all with the same folds."""
    mixture = draw_mixture(grid.stimuli, n, purity, seed)
    states, folds = grid.states[mixture.rows][:, [grid.middle]], grouped_folds(mixture.groups, seed=seed)
    scores = {"linear": logistic_probes(states, mixture.labels, folds)}
    scores |= {kind: nonlinear_probes(states, mixture.labels, folds, kind, seed=seed) for kind in KINDS}
    aucs = {name: auc(score, mixture.labels).cpu() for name, score in scores.items()}
    return {name: (float(found.mean()), p_value(found, mixture.labels)) for name, found in aucs.items()}


def summarise(group: str, found: list[Found]) -> list[dict]:
    """Paired differences from the linear probe, and detections."""
    note = f"of {len(found)} mixtures; detections against {CV_INFLATION:g} sigma_0. Paper: of 72."
    records = []
    for name in ("linear", *KINDS):
        rows = {"share_detected": np.mean([of[name][1] <= LEVEL for of in found])}
        if name != "linear":
            gains = np.array([of[name][0] - of["linear"][0] for of in found])
            rows |= {"median_minus_linear": np.median(gains), "largest_minus_linear": gains.max(),
                     "share_gaining": (gains > GAIN).mean()}  # fmt: skip
        for metric, value in rows.items():
            published = 0.035 if (metric, name) == ("largest_minus_linear", "mlp") else _PAPER.get(metric, {}).get(name)
            records.append(record("e10", group, f"{metric}_{name}", value, published, note))
    return records
