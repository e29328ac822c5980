"""E4: every layer in both regimes (arXiv 2609.22337, section VI-F, figure 7).

The best of many layers on one data set is in part the luckiest: what it gains over the last is read once as in the
paper, from the data set it was chosen on, and once with the layer chosen on other draws.
"""

from __future__ import annotations

import torch
from torch import Tensor
from tqdm import tqdm

from monitor.stimuli.mixture import draw_mixture
from recipes.studies.features import GridStates, read_grids
from recipes.studies.protocol import marked_fit, probe_aucs
from recipes.studies.record import record

TITLE = "every layer in both regimes: the best against the last"

N, PURITY = 300, 0.3
_RANGE = (
    "paper: 0.009 to 0.060 over two models and four dimensions, here its middle; all layers were scanned there too."
)


def run(quick: bool = False, seed: int = 42, model: str = "smollm2-135m") -> list[dict]:
    """AUC of every layer with all texts marked and in the mixture, and what the best layer gains over the last.

    Parameters
    ----------
    quick : bool
        120 cells of two dimensions, and three draws of the mixture instead of ten.
    seed : int
    model : str
        A folder, a Hub id or an embedded name.

    Returns
    -------
    records : list of dict
    """
    draws = 3 if quick else 10
    grids = read_grids(model, quick)
    records = []
    with tqdm(total=sum(map(len, grids.values())) * draws, desc="E4", unit="draw", disable=None) as progress:
        for pooling, of_pooling in grids.items():
            for dimension, grid in of_pooling.items():
                mixed = []
                for k in range(draws):
                    mixed.append(layer_aucs(grid, N, PURITY, seed + 5 * k))
                    progress.update()
                records += _summary(f"{model}, {pooling}, {dimension}", grid, torch.stack(mixed), seed)
    return records


def layer_aucs(grid: GridStates, n: int, purity: float, seed: int) -> Tensor:
    """AUC [L + 1] of one mixture at every layer, mean over five splits."""
    mixture = draw_mixture(grid.stimuli, n, purity, seed)
    return probe_aucs(grid.states[mixture.rows], mixture.labels, mixture.groups, seed).mean(0)


def chosen_elsewhere(aucs: Tensor) -> Tensor:
    """Gain [draws] over the last layer of the layer that is best on the other draws, of AUCs [draws, L + 1]."""
    best = ((aucs.sum(0) - aucs) / (len(aucs) - 1)).argmax(1)
    return aucs[torch.arange(len(aucs)), best] - aucs[:, -1]


def _summary(group: str, grid: GridStates, mixed: Tensor, seed: int) -> list[dict]:
    rows, labels, groups = grid.marked
    full = probe_aucs(grid.states[rows], labels, groups, seed).mean(0)
    separation = marked_fit(grid, list(range(grid.states.shape[1])), seed).separation
    mean, first = mixed.mean(0), mixed[0]
    records = []
    for layer in range(len(mean)):
        at = f"{group}, layer {layer}"
        records.append(record("e4", at, "auc", full[layer]))
        records.append(record("e4", at, "auc_mixed", first[layer]))
        records.append(record("e4", at, "auc_mixed_draws", mean[layer]))
        records.append(record("e4", at, "s_hat", separation[layer]))
    gain = chosen_elsewhere(mixed)
    n_draws = f"over {len(mixed)} draws of the mixture"
    rows = (
        ("lowest_auc", full.min(), 1.0, "of all layers, every text marked; paper: about 1 at every depth."),
        ("best_layer", first.argmax(), None, f"0 is the embeddings, {len(mean) - 1} the last; one draw."),
        ("best_layer_draws", mean.argmax(), None, f"{n_draws}."),
        ("best_minus_last", first.max() - first[-1], 0.0345, f"one draw, layer chosen on the same. {_RANGE}"),
        ("best_minus_last_elsewhere", gain.mean(), None, f"layer chosen on the other draws; mean {n_draws}."),
        ("best_minus_last_elsewhere_sd", gain.std(), None, f"{n_draws}."),
        ("middle_minus_last_draws", mean[grid.middle] - mean[-1], None, f"{n_draws}."),
    )
    return records + [record("e4", group, *row) for row in rows]
