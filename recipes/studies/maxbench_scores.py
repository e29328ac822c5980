"""Scores of the stored cases of the MAxBench study, and resamples of them that keep what cases share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from monitor.geometry.concept_scores import SCORES, resampled_scores
from monitor.geometry.diversity import unseen_instances
from monitor.geometry.statistics import percentile_interval
from monitor.stimuli.concepts import ConceptSet
from recipes.studies.maxbench_steering import test_grid

Key = tuple[str, str, int | None]  # method, form, rank


@dataclass(frozen=True, eq=False)
class Scored:
    """A case's scores on the test instructions.

    Attributes
    ----------
    values : dict of str to float or None
        By `monitor.geometry.concept_scores.SCORES`.
    draws : Tensor [B], float64
        MAxBench of resampled outputs. Prompts are drawn alike in all cases, and points alike in all with equally many.
    unseen, unseen_entities : int or None
        Mentions of entities that the geometry was not recovered from, and how many different ones; None where nothing
        was recovered.
    strength, sigma, in_range : float or None
    """

    values: Mapping[str, float | None]
    draws: Tensor
    unseen: int | None
    unseen_entities: int | None
    strength: float
    sigma: float | None
    in_range: float | None
    dimension: int | None


def score_case(
    records: Sequence[dict], concept: ConceptSet, seen: Sequence[int] | None, n_bootstrap: int, seed: int
) -> Scored:
    """The scores of a case from its records; `seen` are the entities that its geometry was recovered from."""
    grid = test_grid(records)
    first = records[-1]
    other = bool(first["names_others"])
    outputs = [judgement for row in grid for judgement in row]
    mentions = [mention for judgement in outputs for mention in judgement.mentions]
    resampled = resampled_scores(grid, concept, other=other, n_bootstrap=n_bootstrap, seed=seed)
    of = {
        name: None if math.isnan(value) else value
        for name, value in zip(SCORES, resampled.values.tolist(), strict=True)
    }
    draws = resampled.draws[:, SCORES.index("maxbench")]
    value = of["maxbench"]
    draws = torch.full_like(draws, math.nan) if value is None else draws.nan_to_num(value)
    unseen = None if seen is None else unseen_instances(mentions, [concept.entities[i].name for i in seen])
    return Scored(
        of, draws,
        None if unseen is None else unseen.mentions, None if unseen is None else len(unseen.entities),
        first["strength"], first["sigma"], first["in_range"], first["dimension"],
    )  # fmt: skip


class Results:
    """All scored cases of a study.

    Parameters
    ----------
    cells : mapping of (concept, split, key) to Scored
        Cases without a split have the split ``"none"``; they count for every split of their concept.
    n_bootstrap, seed : int
        Of the resamples of splits.
    """

    def __init__(self, cells: Mapping[tuple[str, str, Key], Scored], n_bootstrap: int, seed: int) -> None:
        self.cells = cells
        self.concepts = tuple(dict.fromkeys(concept for concept, _, _ in cells))
        self.splits = {
            name: tuple(dict.fromkeys(s for c, s, _ in cells if c == name and s != "none")) or ("none",)
            for name in self.concepts
        }
        generator = torch.Generator().manual_seed(seed)
        self.n_bootstrap = n_bootstrap
        self._weights = {
            name: torch.stack(
                [
                    torch.bincount(torch.randint(n, (n,), generator=generator), minlength=n).double() / n
                    for _ in range(n_bootstrap)
                ]
            )
            for name, n in ((name, len(splits)) for name, splits in self.splits.items())
        }

    def keys(self, concept: str | None = None) -> list[Key]:
        """Cases in their order; of one concept, or of any."""
        return list(dict.fromkeys(key for c, _, key in self.cells if concept in (None, c)))

    def over_splits(self, concept: str, key: Key) -> list[Scored]:
        """A case on every split that has it, one each."""
        found = [self.cells.get((concept, split, key)) or self.cells.get((concept, "none", key))
                 for split in self.splits[concept]]  # fmt: skip
        return [cell for cell in found if cell is not None]

    def complete(self, concept: str, key: Key) -> bool:
        """Whether the case was run and has a score on all of the concept's splits."""
        found = self.over_splits(concept, key)
        return len(found) == len(self.splits[concept]) and all(c.values["maxbench"] is not None for c in found)

    def mean(self, concept: str, key: Key) -> tuple[float, Tensor]:
        """MAxBench over splits, and its resamples [B]: of splits, and of the outputs in each."""
        cells = self.over_splits(concept, key)
        value = sum(cell.values["maxbench"] for cell in cells) / len(cells)
        draws = (self._weights[concept] * torch.stack([cell.draws for cell in cells], dim=1)).sum(1)
        return value, draws

    def best(self, concept: str, keys: Iterable[Key]) -> tuple[Key, float, Tensor]:
        """The case with the highest MAxBench over splits; in each resample the best one is chosen anew."""
        means = {key: self.mean(concept, key) for key in keys}
        key = max(means, key=lambda name: means[name][0])
        return key, means[key][0], torch.stack([draws for _, draws in means.values()]).amax(0)


def interval(value: float, draws: Tensor) -> tuple[float | None, float | None]:
    """95 % of the resamples, as they are and moved to have the value as their mean, whichever reaches further.

    Outputs drawn with replacement are less diverse than those they are drawn from, and the best of several drawn anew
    is better: unmoved, resamples may not even hold the value. Moved, those of a score that hangs on a few mentions no
    longer hold the 0 that they often are. A score that is the same in every resample, as 0 where no output has the
    concept, has no interval: there is nothing to draw anew, and that is no certainty.
    """
    if bool((draws == value).all()):
        return None, None
    low, high = percentile_interval(draws)
    shift = value - float(draws.mean())
    return min(low, low + shift), max(high, high + shift)


def grouped(keys: Iterable[Key], by: Callable[[Key], object]) -> dict:
    groups: dict = {}
    for key in keys:
        groups.setdefault(by(key), []).append(key)
    return groups
