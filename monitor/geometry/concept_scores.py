"""How completely and how exclusively a set of generations says a concept: scores of MAxBench from judged outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from monitor.geometry.diversity import Concept, Support, counted_mentions, is_closed
from monitor.geometry.statistics import percentile_interval
from monitor.geometry.two_way import draws

SCORES = (
    "concept",
    "fluency",
    "instruction",
    "entity_diversity",
    "category_diversity",
    "diversity",
    "axbench",
    "axbench_of_means",
    "maxbench",
)
# Resamples weighed at once are bounded by this many numbers.
_MAX_WEIGHTS = 4_000_000


class Judged(Protocol):
    """What is read of a `monitor.judges.judgement.Judgement`; a score that could not be had is None."""

    @property
    def concept(self) -> float | None: ...
    @property
    def fluency(self) -> float | None: ...
    @property
    def instruction(self) -> float | None: ...
    @property
    def mentions(self) -> Sequence[tuple[str, str]]: ...


def harmonic_mean(*scores: float | Tensor) -> float | Tensor:
    """Harmonic mean of scores, n / Σ 1/x; zero where one of them is zero.

    Parameters
    ----------
    *scores : float or Tensor, >= 0
        At least one; Tensors are taken element by element and must broadcast.

    Returns
    -------
    float, or Tensor float64 where a score is one
        Between the smallest and the largest score. NaN where one is.

    Raises
    ------
    ValueError
        Without scores, or for a negative one.
    """
    if not scores:
        raise ValueError("`scores` must hold at least one score, got none")
    device = next((score.device for score in scores if isinstance(score, Tensor)), None)
    values = [torch.as_tensor(score, dtype=torch.float64, device=device) for score in scores]
    stacked = torch.stack(torch.broadcast_tensors(*values))
    if bool((stacked < 0).any()):
        raise ValueError(f"`scores` must be at least 0, got {float(stacked[stacked < 0][0])}")
    # -0.0 + 0.0 is 0.0: of an infinity each way the sum would be NaN.
    mean = len(scores) / (stacked + 0.0).reciprocal().sum(0)
    return float(mean) if device is None else mean


def axbench_score(concept: float | Tensor, fluency: float | Tensor, instruction: float | Tensor) -> float | Tensor:
    """Harmonic mean of the three scores, each in [0, 2]; of one output, or of the means over outputs.

    Notes
    -----
    MAxBench, Section 3.3, after AxBench (arXiv 2501.17148). AxBench's published code takes it output by output and then
    the mean: an output that is fluent and one that is on the concept do not make up for each other there.
    `score_outputs` reports both.
    """
    return harmonic_mean(concept, fluency, instruction)


def maxbench_score(
    concept: float | Tensor, fluency: float | Tensor, instruction: float | Tensor, diversity: float | Tensor
) -> float | Tensor:
    """Harmonic mean of four scores, each in [0, 2] (MAxBench, Section 3.3).

    Notes
    -----
    Diversity is a property of all outputs together, so the other three are their means over outputs.
    """
    return harmonic_mean(concept, fluency, instruction, diversity)


@dataclass(frozen=True)
class Estimate:
    """A score over outputs, with its interval.

    Attributes
    ----------
    value, low, high : float or None
        None where there is nothing to have it from; an interval also where every resample scores alike: of outputs
        without a mention none can be drawn that has one, and that is no certainty.
    n : int
        Outputs it is from; those without the score are left out.
    """

    value: float | None
    low: float | None
    high: float | None
    n: int


def score_outputs(
    judgements: Sequence[Sequence[Judged]],
    concept: Concept,
    *,
    other: bool = False,
    closed: bool | None = None,
    n_bootstrap: int = 1000,
    seed: int = 0,
) -> dict[str, Estimate]:
    """All scores of one method's outputs.

    Parameters
    ----------
    judgements : sequence (prompts) of equally long sequences (sampled points) of Judgement
    concept : ConceptSet
    other, closed
        As in `diversity`.
    n_bootstrap : int
        Resamples of the intervals.
    seed : int
        Of the function's own generator.

    Returns
    -------
    dict of str to Estimate
        By `SCORES`: ``concept``, ``fluency``, ``instruction`` (means, [0, 2]), ``entity_diversity``,
        ``category_diversity`` ([0, 1]), ``diversity`` (their sum), ``axbench`` (output by output, then the mean, as in
        AxBench's code), ``axbench_of_means`` (of the three means), ``maxbench`` (of the three means and the diversity).

    Raises
    ------
    ValueError
        Without outputs, or for prompts with unequally many.

    Notes
    -----
    Outputs of one prompt share the prompt, those of one point the point. The 95 % intervals are of a bootstrap that
    draws prompts and points independently, each with replacement (the pigeonhole bootstrap, Owen, Annals of Applied
    Statistics 2007), and only points if there is a single prompt; it is on the long side. Drawing with replacement
    lowers entropies, so each interval is moved by the difference of the value and the mean of its resamples, and then
    cut to the score's range.
    """
    resampled = resampled_scores(judgements, concept, other=other, closed=closed, n_bootstrap=n_bootstrap, seed=seed)
    shape = len(judgements), len(judgements[0])
    return {
        name: _estimate(
            float(resampled.values[i]),
            resampled.draws[:, i],
            resampled.n[i],
            1.0 if "_diversity" in name else 2.0,
            shape,
        )
        for i, name in enumerate(SCORES)
    }


@dataclass(frozen=True, eq=False)
class ResampledScores:
    """Scores of one method's outputs, and of resamples of these.

    Attributes
    ----------
    values : Tensor [len(SCORES)], float64
        NaN where no output has the score.
    draws : Tensor [n_bootstrap, len(SCORES)], float64
        For one seed, prompts are drawn alike whatever the outputs, and so are points where there are equally many:
        differences of two methods' draws are paired.
    n : tuple of int
        Outputs behind each score.
    """

    values: Tensor
    draws: Tensor
    n: tuple[int, ...]


def resampled_scores(
    judgements: Sequence[Sequence[Judged]],
    concept: Concept,
    *,
    other: bool = False,
    closed: bool | None = None,
    n_bootstrap: int = 1000,
    seed: int = 0,
) -> ResampledScores:
    """What `score_outputs` makes its intervals from, for comparing methods; parameters and errors as there."""
    n_points = {len(row) for row in judgements}
    if len(n_points) != 1 or 0 in n_points:
        raise ValueError(
            "`judgements` must hold at least one prompt and equally many outputs of each, at least one, got "
            f"{[len(row) for row in judgements]}"
        )
    if n_bootstrap < 1:
        raise ValueError(f"`n_bootstrap` must be at least 1, got {n_bootstrap}")
    shape = len(judgements), n_points.pop()
    table = _Table([judged for row in judgements for judged in row], concept, other, is_closed(concept, closed))
    return ResampledScores(
        table.scores(torch.ones(1, shape[0] * shape[1], dtype=torch.float64))[0],
        torch.cat([table.scores(weights) for weights in _weights(shape, n_bootstrap, seed)]),
        tuple(table.n()),
    )


class _Table:
    """Outputs as columns of numbers, so that every resample is a weighted sum."""

    def __init__(self, judged: Sequence[Judged], concept: Concept, other: bool, closed: bool) -> None:
        raw = [[one.concept, one.fluency, one.instruction] for one in judged]
        scores = torch.tensor([[math.nan if x is None else float(x) for x in row] for row in raw], dtype=torch.float64)
        per_output = axbench_score(*scores.unbind(1))
        columns = torch.cat([scores, per_output.unsqueeze(1)], dim=1)
        self.present = (~columns.isnan()).to(torch.float64)  # [outputs, 4]
        self.columns = columns.nan_to_num(0.0)
        mentions = [counted_mentions(one.mentions, concept, other, closed) for one in judged]
        self.entities = _incidence([[entity for entity, _ in said] for said in mentions])
        self.categories = _incidence([[category for _, category in said] for said in mentions])
        self.support = Support(concept, other, closed)

    def scores(self, weights: Tensor) -> Tensor:
        """How often each output counts [resamples, outputs] -> its scores [resamples, len(SCORES)], NaN for none."""
        means = (weights @ self.columns) / (weights @ self.present)  # 0 / 0 is NaN: no output has the score
        concept, fluency, instruction, per_output = means.unbind(1)
        entity, category = self.support.normalised(weights @ self.entities, weights @ self.categories)
        both = entity + category
        of_means = axbench_score(concept, fluency, instruction)
        whole = maxbench_score(concept, fluency, instruction, both)
        return torch.stack([concept, fluency, instruction, entity, category, both, per_output, of_means, whole], dim=1)

    def n(self) -> list[int]:
        """Outputs behind each of `SCORES`."""
        concept, fluency, instruction, all_three = self.present.sum(0).to(torch.int64).tolist()
        everything = len(self.present)
        fewest = min(concept, fluency, instruction)
        return [concept, fluency, instruction, everything, everything, everything, all_three, fewest, fewest]


def _incidence(names: Sequence[Sequence[str]]) -> Tensor:
    """How often each output says each name, [outputs, distinct names] float64."""
    columns = {name: i for i, name in enumerate(sorted({name for said in names for name in said}))}
    counts = torch.zeros(len(names), len(columns), dtype=torch.float64)
    for row, said in enumerate(names):
        for name in said:
            counts[row, columns[name]] += 1
    return counts


def _weights(shape: tuple[int, int], n_bootstrap: int, seed: int):
    """How often each output is drawn, in blocks [resamples, prompts · points]."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(1, _MAX_WEIGHTS // (shape[0] * shape[1]))
    for start in range(0, n_bootstrap, rows):
        n = min(rows, n_bootstrap - start)
        prompts, points = (draws(n, size, generator) for size in shape)
        yield (prompts.unsqueeze(2) * points.unsqueeze(1)).flatten(1)


def _estimate(value: float, resampled: Tensor, n: int, top: float, shape: tuple[int, int]) -> Estimate:
    if math.isnan(value):
        return Estimate(None, None, None, n)
    low, high = percentile_interval(resampled)
    if max(shape) < 2 or math.isnan(low) or bool((resampled == value).all()):
        return Estimate(value, None, None, n)
    shift = value - float(resampled.mean())
    return Estimate(value, min(max(low + shift, 0.0), top), min(max(high + shift, 0.0), top), n)
