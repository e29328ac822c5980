"""The working protocol of the detectability paper (arXiv 2609.22337, section V-D) on a model's states."""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.geometry.auc import auc
from monitor.geometry.detection import detection_p
from monitor.geometry.probes import grouped_folds, logistic_probes
from monitor.geometry.separation import CrossFit, crossfit
from monitor.stimuli.mixture import Mixture, draw_mixture
from recipes.studies.features import GridStates


def probe_aucs(states: Tensor, labels: Tensor, groups: Tensor, seed: int, n_seeds: int = 5) -> Tensor:
    """Pooled out-of-fold AUCs [S, L] of logistic probes on states [n, L, d], or [S] on states [n, d]."""
    scores = logistic_probes(states, labels, grouped_folds(groups, n_seeds=n_seeds, seed=seed))
    return auc(scores, labels).cpu()


def mixture_aucs(grid: GridStates, n: int, purity: float, seed: int, n_seeds: int = 5) -> tuple[Tensor, Mixture]:
    """AUCs [S] at mid-depth of one drawn mixture, and the mixture."""
    mixture = draw_mixture(grid.stimuli, n, purity, seed)
    states = grid.states[mixture.rows, grid.middle]
    return probe_aucs(states, mixture.labels, mixture.groups, seed, n_seeds), mixture


def marked_fit(grid: GridStates, layers: list[int], seed: int) -> CrossFit:
    """Cross-fitted separation and neutral offset [layers] of the marked texts."""
    rows, labels, groups = grid.marked
    layers = torch.tensor(layers)
    marked, neutral = grid.states[rows], grid.states[2 * grid.stimuli.n_pairs :]
    return crossfit(marked[:, layers], labels, groups, neutral[:, layers], seed=seed)


def p_value(aucs: Tensor, labels: Tensor, inflation: float = 1.4) -> float:
    """One-sided p of the seeds' mean AUC against inflation times sigma_0."""
    positive = int(labels.sum())
    return float(detection_p(float(aucs.mean()), positive, len(labels) - positive, inflation))
