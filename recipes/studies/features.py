"""Hidden states of the counterfactual grid, read from a model once and kept for all studies."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from monitor.activations import States
from monitor.reference import other_reference
from monitor.stimuli.counterfactual import CounterfactualSet
from monitor.stimuli.counterfactual_grid import DIMENSIONS, load_counterfactual_sets
from recipes.models import resolve_model

POOLINGS = ("mean", "mean_no_sink")  # the paper's, and the one that leaves the attention sink out
QUICK_DIMENSIONS, QUICK_CELLS = ("gender", "religion"), 120


@dataclass(frozen=True, eq=False)
class GridStates:
    """One dimension of the grid as a model encodes it.

    stimuli : CounterfactualSet; states : float32 [2P + M, L + 1, d], rows as in ``stimuli.texts``.
    """

    stimuli: CounterfactualSet
    states: Tensor

    @property
    def middle(self) -> int:
        """Index of the mid-depth hidden state, floor(L/2)."""
        return (self.states.shape[1] - 1) // 2

    @property
    def marked(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, labels and groups [2P] of all marked texts."""
        rows = torch.arange(2 * self.stimuli.n_pairs)
        return rows, torch.tensor(self.stimuli.labels), torch.tensor(self.stimuli.groups)[rows]


def grid_states(model: str, pooling: str, quick: bool = False) -> dict[str, GridStates]:
    """Pooled hidden states of every text of the grid at every layer, by dimension.

    Parameters
    ----------
    model : str
        A folder, a Hub id or an embedded name.
    pooling : str
        See `monitor.requests.States`.
    quick : bool
        120 cells of two dimensions instead of 340 of four: 720 texts instead of 3,400.

    Returns
    -------
    dict of str to GridStates
        On the GPU where there is one. Read in one pass, and cached by the content of the model: the next study of the
        same model and pooling starts at once.
    """
    cells = {"dimensions": QUICK_DIMENSIONS, "cells": QUICK_CELLS} if quick else {"dimensions": DIMENSIONS}
    sets = load_counterfactual_sets(**cells)
    requests = {name: States(stimuli.texts, "all", pooling) for name, stimuli in sets.items()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    activations = other_reference(
        resolve_model(model), list(requests.values()), None, dtype=torch.float32, device=device,
        progress=f"hidden states of {model}",
    )  # fmt: skip
    return {name: GridStates(sets[name], activations.states(request).to(device)) for name, request in requests.items()}


def read_grids(model: str, quick: bool = False) -> dict[str, dict[str, GridStates]]:
    """The grid by pooling; only the first of two poolings that a model does not tell apart."""
    found = {}
    for pooling in POOLINGS:
        with warnings.catch_warnings():  # a tokenizer without a BOS token: then the poolings are the same
            warnings.filterwarnings("ignore", message=".*leaves the BOS token out of the mean")
            grids = grid_states(model, pooling, quick)
        if not any(_same(grids, other) for other in found.values()):
            found[pooling] = grids
    return found


def _same(grids: dict[str, GridStates], others: dict[str, GridStates]) -> bool:
    return all(torch.equal(grids[name].states, others[name].states) for name in grids)
