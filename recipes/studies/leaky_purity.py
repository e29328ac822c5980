"""E11, part C: purity curves where the labels of neutral texts follow stereotypes (arXiv 2609.22337, section VI-L).

Appendix F-E of the paper gives the label "equal to the stereotype with probability pi and uniform otherwise" and says
that pi = 1/2 is its main protocol; that holds only if it is the opposite otherwise, which is what is drawn here.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from monitor.stimuli.counterfactual import CounterfactualSet
from recipes.studies.features import GridStates
from recipes.studies.protocol import probe_aucs
from recipes.studies.record import record
from recipes.studies.stereotypes import contents, stereotyped

PURITIES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
AGREEMENTS = (0.5, 0.75, 1.0)  # pi: chance that a neutral text's label is its stereotype
_FLOORS = {0.5: 0.5, 0.75: 0.665, 1.0: 1.0}
_DIPS = {0.5: 0.043, 0.75: 0.081}
_FLOOR = (
    "AUC without any marked text; paper: 0.64 to 0.69 at pi = 0.75, here its middle, and about 1 at pi = 1. The best "
    "possible is pi, where stereotypes are balanced."
)
_DIP = "largest fall of the mean curve; paper: of a single draw."


def leaky_mixture(stimuli: CounterfactualSet, purity: float, agreement: float, seed: int) -> tuple[Tensor, Tensor]:
    """Rows and labels [m]: pairs, and neutral texts whose labels follow their stereotypes.

    m is the number of neutral texts with a stereotype, so that none is drawn twice at any purity.
    """
    generator = torch.Generator().manual_seed(seed)
    known = stereotyped(stimuli)
    m = len(known.rows)
    n_pairs = round(purity * m / 2)
    pairs = torch.randperm(stimuli.n_pairs, generator=generator)[:n_pairs]
    chosen = torch.randperm(m, generator=generator)[: m - 2 * n_pairs]
    follows = torch.rand(m, generator=generator)[: len(chosen)] < agreement
    neutral = torch.where(follows, known.labels[chosen], 1 - known.labels[chosen])
    rows = torch.cat([pairs, pairs + stimuli.n_pairs, known.rows[chosen]])
    return rows, torch.cat([torch.ones_like(pairs), torch.zeros_like(pairs), neutral])


def leaky_purity(grid: GridStates, group: str, draws: int, seed: int, progress: tqdm) -> list[dict]:
    """Purity curves where neutral labels agree with stereotypes by chance, often, or always; by two kinds of folds."""
    known = stereotyped(grid.stimuli)
    groupings = {"folds by cell": torch.tensor(grid.stimuli.groups), "folds by occupation": contents(grid.stimuli)}
    about = (
        f"n = {len(known.rows)}, neutral texts of {known.n_occupations} occupations, labels equal to the stereotype "
        f"with probability pi and to its opposite otherwise; mean of {draws} draws."
    )
    records = []
    for agreement in AGREEMENTS:
        curves: dict[str, list[float]] = {name: [] for name in groupings}
        for purity in PURITIES:
            found: dict[str, list[float]] = {name: [] for name in groupings}
            for k in range(draws):
                rows, labels = leaky_mixture(grid.stimuli, purity, agreement, seed + 5 * k)
                states = grid.states[rows, grid.middle]
                for name, groups in groupings.items():
                    found[name].append(float(probe_aucs(states, labels, groups[rows], seed + 5 * k).mean()))
            for name in groupings:
                curves[name].append(float(np.mean(found[name])))
            progress.update()
        for name, curve in curves.items():
            at = f"{group}, pi {agreement:g}, {name}"
            for purity, area in zip(PURITIES, curve, strict=True):
                records.append(record("e11", f"{at}, purity {purity:g}", "auc", area, note=about))
            as_published = name == "folds by cell"
            floor, dip = (_FLOORS[agreement], _DIPS.get(agreement)) if as_published else (None, None)
            records.append(record("e11", at, "floor", curve[0], floor, _FLOOR))
            fall = max(0.0, max(low - high for low, high in zip(curve, curve[1:], strict=False)))
            records.append(record("e11", at, "largest_dip", fall, dip, _DIP))
    return records
