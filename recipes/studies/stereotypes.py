"""E11, part B: what probes tell of occupations' stereotypes in neutral texts (arXiv 2609.22337, section VI-L).

A stereotype is a property of an occupation: 16 occupations are 16 observations, in however many sentences they stand.
So there is an exact permutation test over occupations beside the paper's test over sentences, and folds that keep all
sentences of an occupation together beside the paper's, which keep those of one frame together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.geometry.auc import auc
from monitor.geometry.probes import fit_probe
from monitor.stimuli.counterfactual import CounterfactualSet
from recipes.studies.features import GridStates
from recipes.studies.protocol import p_value, probe_aucs
from recipes.studies.record import record

_BY_CELL = 20  # random stereotypes read with folds by cell: their mean is all that is wanted
_NOTES = {
    "zero_shot": "the probe of all marked gender texts on {m} neutral texts of {k} occupations; paper: 0.688 to 0.873.",
    "p_sentences": "as if sentences were independent, as in the paper; paper: at most this.",
    "p_occupations": "exact: share of all ways to call as many of the {k} occupations male that reach this AUC.",
    "direct": "trained on the stereotypes of neutral texts, folds by cell: other sentences of an occupation are in the "
    "training set.",
    "random": "control: stereotypes given to occupations at random, same folds. A probe that knows occupations and "
    "nothing of gender reaches this.",
    "held_out": "all sentences of an occupation in one fold. Where labels are the occupations' own, pooled held-out "
    "scores fall below 1/2 by chance alone: compare with the control.",
    "held_out_p": "share of {permutations} random stereotypes that reach the true ones' AUC.",
}


@dataclass(frozen=True, eq=False)
class Stereotyped:
    """Neutral texts whose occupation has a stereotype: rows, labels, cells, and the occupation's number, all [m]."""

    rows: Tensor
    labels: Tensor
    cells: Tensor
    occupations: Tensor

    @property
    def n_occupations(self) -> int:
        return int(self.occupations.max()) + 1

    @property
    def of_occupation(self) -> Tensor:
        """Stereotype [k] of each occupation."""
        return torch.zeros(self.n_occupations, dtype=torch.long).index_put((self.occupations,), self.labels)


def contents(stimuli: CounterfactualSet) -> Tensor:
    """What fills the frame of each row of ``stimuli.texts``, as a number [2P + M]: the cell's name less its frame."""
    names = [cell.rpartition("/")[0] for cell in (*stimuli.cells, *stimuli.cells, *stimuli.neutral_cells)]
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([number[name] for name in names])


def stereotyped(stimuli: CounterfactualSet) -> Stereotyped:
    """The neutral texts with a stereotype."""
    of_text = torch.tensor(stimuli.stereotypes)
    known = (of_text >= 0).nonzero()[:, 0]
    rows = known + 2 * stimuli.n_pairs
    occupations = contents(stimuli)[rows].unique(return_inverse=True)[1]
    return Stereotyped(rows, of_text[known], torch.tensor(stimuli.groups)[rows], occupations)


def stereotype_leakage(grid: GridStates, group: str, permutations: int, seed: int) -> list[dict]:
    """What probes tell of stereotypes, one that has never seen a neutral text and one trained on them."""
    known = stereotyped(grid.stimuli)
    states = grid.states[known.rows, grid.middle]
    rows, labels, _ = grid.marked
    scores = fit_probe(grid.states[rows][:, [grid.middle]], labels).score(states[:, None])[0].cpu()
    zero_shot = auc(scores, known.labels)
    direct = probe_aucs(states, known.labels, known.cells, seed)
    held_out = probe_aucs(states, known.labels, known.occupations, seed)
    generator = torch.Generator().manual_seed(seed)
    by_cell, by_occupation = [], []
    for k in range(permutations):
        shuffled = known.of_occupation[torch.randperm(known.n_occupations, generator=generator)][known.occupations]
        by_occupation.append(float(probe_aucs(states, shuffled, known.occupations, seed, 1)[0]))
        if k < _BY_CELL:
            by_cell.append(float(probe_aucs(states, shuffled, known.cells, seed, 1)[0]))
    reached = sum(null >= float(held_out[0]) for null in by_occupation)  # one split of each against one split
    words = {"m": len(known.rows), "k": known.n_occupations, "permutations": permutations}
    found = (
        ("zero_shot_auc", zero_shot, None, "zero_shot"),
        ("zero_shot_p_sentences", p_value(zero_shot, known.labels, 1.0), 2.4e-5, "p_sentences"),
        ("zero_shot_p_occupations", permutation_p(scores, known), None, "p_occupations"),
        ("direct_auc", direct.mean(), 1.0, "direct"),
        ("direct_auc_random_stereotypes", np.mean(by_cell), None, "random"),
        ("held_out_auc", held_out.mean(), None, "held_out"),
        ("held_out_auc_random_stereotypes", np.mean(by_occupation), None, "random"),
        ("held_out_p", (1 + reached) / (1 + permutations), None, "held_out_p"),
    )
    return [record("e11", group, *row[:3], _NOTES[row[3]].format(**words)) for row in found]


def permutation_p(scores: Tensor, known: Stereotyped) -> float:
    """One-sided exact p of the AUC of scores [m], over all ways to give the labels to the occupations."""
    wins = torch.zeros(known.n_occupations, known.n_occupations, dtype=torch.float64)
    above = (scores[:, None] > scores).double() + 0.5 * (scores[:, None] == scores).double()
    wins.index_put_((known.occupations[:, None], known.occupations), above, accumulate=True)
    size = torch.bincount(known.occupations).double().numpy()
    positive = np.stack(list(_choices(len(size), int(known.of_occupation.sum()))))
    areas = np.einsum("ai,ij,aj->a", positive, wins.numpy(), 1 - positive, optimize=True)
    areas /= (positive @ size) * ((1 - positive) @ size)
    return float((areas >= float(auc(scores, known.labels)) - 1e-12).mean())


def _choices(n: int, k: int) -> Iterator[NDArray[np.float64]]:
    """Indicators [n] of all ways to choose k of n."""
    for chosen in combinations(range(n), k):
        indicator = np.zeros(n)
        indicator[list(chosen)] = 1.0
        yield indicator
