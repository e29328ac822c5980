"""E11: how neutral are the neutral texts? (arXiv 2609.22337, section VI-L and appendix F-E)

(A) The protocol gives neutral texts random labels: no classifier may find them. (B) Occupations carry a stereotype, and
probes may find that. (C) Where labels follow stereotypes the purity curve has a floor.
"""

from __future__ import annotations

import numpy as np
from tqdm import tqdm

from monitor.geometry.auc import auc
from monitor.geometry.nonlinear_probes import KINDS, nonlinear_probes
from monitor.geometry.probes import grouped_folds, logistic_probes
from monitor.stimuli.mixture import draw_mixture
from recipes.studies.features import GridStates, read_grids
from recipes.studies.leaky_purity import AGREEMENTS, PURITIES, leaky_purity
from recipes.studies.protocol import p_value
from recipes.studies.record import record
from recipes.studies.stereotypes import stereotype_leakage

TITLE = "how neutral the neutral texts are: random labels, stereotypes, and labels that follow stereotypes"

N, LEVEL = 300, 0.05
DRAWS, PERMUTATIONS, SWEEPS = 8, 100, 5  # of random labels, random stereotypes, and leaky mixtures
QUICK_N, QUICK_DRAWS, QUICK_PERMUTATIONS, QUICK_SWEEPS = 200, 1, 10, 1


def run(quick: bool = False, seed: int = 42, model: str = "smollm2-135m") -> list[dict]:
    """All three parts at mid-depth, by pooling.

    Parameters
    ----------
    quick : bool
        120 cells, and fewer draws.
    seed : int
    model : str
        A folder, a Hub id or an embedded name.

    Returns
    -------
    records : list of dict
    """
    n, draws, permutations, sweeps = (
        (QUICK_N, QUICK_DRAWS, QUICK_PERMUTATIONS, QUICK_SWEEPS) if quick else (N, DRAWS, PERMUTATIONS, SWEEPS)
    )
    grids = read_grids(model, quick)
    records = []
    steps = draws + 1 + len(AGREEMENTS) * len(PURITIES)
    with tqdm(total=len(grids) * steps, desc="E11", unit="step", disable=None) as progress:
        for pooling, of_pooling in grids.items():
            grid, group = of_pooling["gender"], f"{model}, {pooling}"
            records += random_labels(grid, f"A: {group}", n, draws, seed, progress)
            records += stereotype_leakage(grid, f"B: {group}", permutations, seed)
            progress.update()
            records += leaky_purity(grid, f"C: {group}", sweeps, seed, progress)
    return records


def random_labels(grid: GridStates, group: str, n: int, draws: int, seed: int, progress: tqdm) -> list[dict]:
    """Strong classifiers on neutral texts with the protocol's labels."""
    found: dict[str, list[tuple[float, float]]] = {}
    for k in range(draws):
        mixture = draw_mixture(grid.stimuli, n, 0.0, seed + 5 * k)
        states = grid.states[mixture.rows][:, [grid.middle]]
        folds = grouped_folds(mixture.groups, seed=seed + 5 * k)
        scores = {"linear": logistic_probes(states, mixture.labels, folds)}
        scores |= {kind: nonlinear_probes(states, mixture.labels, folds, kind, seed=seed + 5 * k) for kind in KINDS}
        for name, score in scores.items():
            aucs = auc(score, mixture.labels).cpu()
            found.setdefault(name, []).append((float(aucs.mean()), p_value(aucs, mixture.labels)))
        progress.update()
    tests = [test for of_probe in found.values() for test in of_probe]
    note = f"neutral texts alone with random labels, {len(tests)} tests; paper: none of 72 is a detection."
    rows = [(f"mean_auc_{name}", np.mean([area for area, _ in of_probe]), 0.5) for name, of_probe in found.items()]
    rows.append(("n_detected", sum(p <= LEVEL for _, p in tests), 0.0))
    rows.append(("largest_distance_from_chance", max(abs(area - 0.5) for area, _ in tests), 0.069))
    return [record("e11", group, *row, note) for row in rows]
