"""What the detectability of one group is read on: rows, labels and folds, fixed before the first reading."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from monitor.activations import States
from monitor.geometry.clusters import effective_clusters
from monitor.geometry.probes import grouped_folds, random_folds
from monitor.stimuli.counterfactual import CounterfactualSet
from monitor.stimuli.counterfactual_file import MIN_CELLS
from monitor.stimuli.mixture import draw_mixture


@dataclass(frozen=True)
class Regime:
    """One data set that a probe is cross-validated on.

    suffix : "" for all pairs, "_mixed" for the mixture; purity, n, n_marked : of it
    rows, labels, groups : int64 [n]; marked pairs first, as in `Mixture`
    folds, random_folds : int64 [n_seeds, n]; the second without regard to cells
    clusters : the effective number of cells with pairs, or None where every cell has one pair
    """

    suffix: str
    purity: float
    n: int
    n_marked: int
    rows: Tensor
    labels: Tensor
    groups: Tensor
    folds: Tensor
    random_folds: Tensor
    clusters: float | None

    def to(self, device: torch.device) -> Regime:
        moved = ("rows", "labels", "groups", "folds", "random_folds")
        return replace(self, **{name: getattr(self, name).to(device) for name in moved})


@dataclass(frozen=True)
class Design:
    """A group's request and its regimes, all pairs first.

    stereotypes : (rows, labels, contents) of the neutral texts with a stereotype, or None; contents are what must be
        taken together as one observation, because it decides on the label.
    """

    request: States
    n_pairs: int
    regimes: tuple[Regime, ...]
    stereotypes: tuple[Tensor, Tensor, Tensor] | None

    def to(self, device: torch.device) -> Design:
        stereotypes = self.stereotypes and tuple(part.to(device) for part in self.stereotypes)
        return replace(self, regimes=tuple(r.to(device) for r in self.regimes), stereotypes=stereotypes)


def design(
    stimuli: CounterfactualSet, request: States, n: int, purity: float, *, n_folds: int, n_seeds: int, seed: int
) -> Design:
    """Draw the mixture and the folds.

    Raises
    ------
    ValueError
        If the pool cannot fill the mixture, or there are too few cells with a pair.
    """
    n_cells = len(set(stimuli.cells))
    if n_cells < MIN_CELLS:
        raise ValueError(f"pairs must stand in at least {MIN_CELLS} cells, got {n_cells}; give more contexts")
    if not 0 < purity <= 1:
        raise ValueError(f"purity must be a share above 0 and up to 1, got {purity!r}")
    for name, value, least in (("n_folds", n_folds, 2), ("n_seeds", n_seeds, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")

    def regime(suffix: str, rows: Tensor, labels: Tensor, groups: Tensor, n_marked: int) -> Regime:
        options = {"n_folds": n_folds, "n_seeds": n_seeds, "seed": seed}
        of_pairs = groups[: n_marked // 2]
        several = len(torch.unique(of_pairs)) < len(of_pairs)
        return Regime(
            suffix, n_marked / len(rows), len(rows), n_marked, rows, labels, groups,
            grouped_folds(groups, **options), random_folds(len(rows), **options),
            effective_clusters(of_pairs) if several else None,
        )  # fmt: skip

    marked = torch.arange(2 * stimuli.n_pairs)
    regimes = [regime("", marked, torch.tensor(stimuli.labels), torch.tensor(stimuli.groups)[marked], len(marked))]
    if stimuli.n_neutral:
        mixture = draw_mixture(stimuli, n, purity, seed)
        if mixture.n_marked == 0:
            raise ValueError(f"purity {purity} of n = {n} texts is no pair at all; give a larger n or purity")
        regimes.append(regime("_mixed", mixture.rows, mixture.labels, mixture.groups, mixture.n_marked))
    return Design(request, stimuli.n_pairs, tuple(regimes), _stereotypes(stimuli))


def _stereotypes(stimuli: CounterfactualSet) -> tuple[Tensor, Tensor, Tensor] | None:
    known = [j for j, stereotype in enumerate(stimuli.stereotypes) if stereotype >= 0]
    labels = torch.tensor([stimuli.stereotypes[j] for j in known])
    # Cells are named context/frame: texts of one profession share its stereotype, however many frames it stands in.
    contents = [stimuli.neutral_cells[j].rpartition("/")[0] or stimuli.neutral_cells[j] for j in known]
    number = {content: i for i, content in enumerate(dict.fromkeys(contents))}
    of_each = [len({c for c, label in zip(contents, labels.tolist(), strict=True) if label == k}) for k in (0, 1)]
    if min(of_each, default=0) < 2:
        return None
    rows = torch.tensor([2 * stimuli.n_pairs + j for j in known])
    return rows, labels, torch.tensor([number[content] for content in contents])
