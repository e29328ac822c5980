"""Concept recovery: is a concept of many values still where it was, does its geometry still hold values it was not
fitted on, and can they still be told apart?"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from monitor.activations import Activations, States, resolve_layer
from monitor.geometry.concept_coverage import angle_summary, coverage, entity_probe, exclusion, offset_drift
from monitor.geometry.statistics import mean_interval, share_interval
from monitor.geometry.subspace_fits import diff_mean_pairs, entity_centroids
from monitor.geometry.subspaces import effective_rank
from monitor.readings import Reading
from monitor.requests import POOLINGS
from monitor.stimuli.concepts import CONTROL, ConceptSet, load_concept_sets

# With fewer, a fold would fit a subspace to the differences of one or two values.
MIN_ENTITIES = 5
_HELD_OUT = ("coverage", "coverage_reference", "exclusion", "exclusion_reference")
_MOVED = ("angle_mean", "angle_max", "offset_drift")
_PROBE = ("probe_accuracy", "probe_null", "probe_p")
_ABOUT = {
    "coverage": ("more of the values it was not fitted on lies in the concept's subspace", (0.0, 1.0)),
    "coverage_reference": ("the values differ along the directions of the reference", (0.0, 1.0)),
    "exclusion": ("the subspace keeps other texts further away than the concept's", (0.0, 1.0)),
    "exclusion_reference": ("the reference's subspace keeps other texts further away", (0.0, 1.0)),
    "angle_mean": ("the subspace turned further from the reference's", (0.0, 90.0)),
    "angle_max": ("a direction of the subspace turned further from the reference's", (0.0, 90.0)),
    "offset_drift": ("the concept's centre moved further", (0.0, math.inf)),
    "effective_rank": ("the values spread over more dimensions", (1.0, math.inf)),
    "probe_accuracy": ("more values are told apart by a linear probe", (0.0, 1.0)),
    "probe_null": ("accuracy of the same probe on shuffled values", (0.0, 1.0)),
    "probe_p": ("a smaller p: the values are told apart", (0.0, 1.0)),
}


class ConceptRecovery:
    """Geometry of multinomial concepts: animals, countries, ... and what it still holds.

    Parameters
    ----------
    concepts : mapping of str to ConceptSet, optional
        The groups of readings; all bundled concepts by default. Each needs at least five entities, and two clues an
        entity.
    negatives : sequence of str, optional
        Texts that belong to none of the concepts. By default the contexts of the bundled control, unrelated nouns. The
        other concepts' contexts are negatives of a concept as well.
    layer : int or float
        Hidden-state index or fraction of the depth.
    rank : int
        Dimensions of the subspace; fewer where a fold has too few entities.
    pooling : str
        One of the activation pass's poolings. Contexts end just before the entity, so that ``"last"`` reads the state
        that is about to say it: the published choice, and the state that sampled points are injected into.
    n_folds : int
        Of the cross-validation over entities: each is held out once.
    n_permutations : int
        Of the probe's null.
    n_bootstrap : int
        Resamples of each interval.
    seed : int
        Of folds, permutations and resamples; the same at every checkpoint: changes compare like with like.
    name : str
        First part of every reading's name.

    Raises
    ------
    ValueError
        For parameters out of range, and concepts with too few entities or clues.

    Notes
    -----
    x is the state of a context, c_e the mean state of entity e's contexts. The subspace {Lq + b} is DiffMean-pairs
    (`monitor.geometry.subspace_fits.diff_mean_pairs`), fitted without the fold's entities. Readings of each concept:

    - ``coverage``: |LLᵀ(c_e - b)|²/|c_e - b|² for entities e that L and b were not fitted on, mean over entities. A
      random subspace has rank/d. ``coverage_reference``: the same with L of the reference, also fitted without e, and b
      as it is now: do the values still differ along the directions they differed along? (With the reference's b, a
      common shift of all values would count.)
    - ``exclusion``: AUC, P(a negative is further from {Lq + b} than a held-out context); 0.5 is none.
      ``exclusion_reference``: of the reference's subspace, for the states as they are now.
    - ``angle_mean``, ``angle_max``: principal angles between the reference's subspace and the one now, degrees, each
      fitted to all entities; ``offset_drift``: |b_now - b_ref| / |b_ref - mean of the negatives in the reference|.
    - ``effective_rank``: exp of the entropy of the normalised singular values of the c_e, centred (Roy and Vetterli).
    - ``probe_accuracy``: which entity? A linear probe, tested on clues it was not trained on; ``probe_null`` its
      mean on shuffled entities and ``probe_p`` the permutation p-value.

    Intervals are percentile bootstraps over entities. For group ``""``: means over the concepts of coverage,
    exclusion and accuracy.

    A concept that is gone shows as a probe at its null and a coverage at chance, under either subspace. Readings that
    fall under the reference's subspace alone say that the concept has moved: it is not gone.

    Source: arXiv 2609 MAxBench, Sec. 3 (geometry, completeness and exclusivity); its use on checkpoints, held-out
    coverage, drift and the null are additions.
    """

    headline = ("probe_accuracy", "coverage", "coverage_reference", "exclusion")

    def __init__(
        self,
        concepts: Mapping[str, ConceptSet] | None = None,
        *,
        negatives: Sequence[str] | None = None,
        layer: int | float = 0.8,
        rank: int = 8,
        pooling: str = "last",
        n_folds: int = 5,
        n_permutations: int = 200,
        n_bootstrap: int = 1000,
        seed: int = 0,
        name: str = "concept_recovery",
    ) -> None:
        concepts = load_concept_sets() if concepts is None else concepts
        if not isinstance(concepts, Mapping) or not all(isinstance(c, ConceptSet) for c in concepts.values()):
            raise ValueError(
                "`concepts` must be a mapping of names to ConceptSets, as load_concept_sets(['animals', 'my.jsonl']) "
                f"returns it, got {concepts!r:.80}."
            )
        if not concepts:
            raise ValueError(
                "`concepts` is empty: give at least one concept set, or leave it out for the bundled ones."
            )
        for group, concept in concepts.items():
            _check_concept(group, concept)
        for parameter, number, least in (
            ("rank", rank, 1), ("n_folds", n_folds, 2), ("n_permutations", n_permutations, 20),
            ("n_bootstrap", n_bootstrap, 100), ("seed", seed, 0),
        ):  # fmt: skip
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"`{parameter}` must be a whole number of at least {least}, got {number!r}.")
        if seed >= 2**32:
            raise ValueError(f"`seed` must be below 2**32, got {seed}.")
        if pooling not in POOLINGS:
            raise ValueError(f"`pooling` must be one of {', '.join(POOLINGS)}, got {pooling!r}.")
        if negatives is None:
            negatives = load_concept_sets((CONTROL,))[CONTROL].texts
        if isinstance(negatives, str):
            raise ValueError("`negatives` must be a sequence of texts, got one string: put it in a list.")
        if len(set(negatives)) < 2:
            raise ValueError(f"`negatives` must hold at least two different texts, got {len(set(negatives))}.")
        self.name = name
        self.layer, self.rank, self.n_folds = layer, rank, n_folds
        self.n_permutations, self.n_bootstrap, self.seed = n_permutations, n_bootstrap, seed
        self.settings = {
            "concepts": list(concepts), "layer": layer, "rank": rank, "pooling": pooling, "n_folds": n_folds,
            "n_permutations": n_permutations, "n_bootstrap": n_bootstrap, "seed": seed,
        }  # fmt: skip
        self._concepts = dict(concepts)
        self._requests = {
            group: States(concept.texts, layers=(layer,), pooling=pooling) for group, concept in concepts.items()
        }
        self._negatives = States(tuple(negatives), layers=(layer,), pooling=pooling)

    @property
    def stimuli(self) -> Sequence[States]:
        """One request a concept, and the negatives."""
        return (*self._requests.values(), self._negatives)

    def read(self, now: Activations, reference: Activations) -> list[Reading]:
        """Means over the concepts, then each concept's readings; those that states do not allow are invalid.

        Raises
        ------
        ValueError
            For a reference of another width or depth: subspaces of two architectures cannot be compared.
        """
        layer = resolve_layer(self.layer, now.n_layers)
        width, before = (side.states(self._negatives).shape[-1] for side in (now, reference))
        if (width, now.n_layers) != (before, reference.n_layers):
            raise ValueError(
                f"`reference` has {reference.n_layers} layers of width {before} and the model {now.n_layers} of width "
                f"{width}: their subspaces cannot be compared. Compare with a model of the same architecture, or leave "
                f"{self.name} out."
            )
        readings: list[Reading] = []
        for group in self._concepts:
            readings += self._read_concept(group, now, reference, layer)
        return [*self._means(readings, layer), *readings]

    def _read_concept(self, group: str, now: Activations, reference: Activations, layer: int) -> list[Reading]:
        concept = self._concepts[group]
        states = [side.states(self._requests[group])[:, 0] for side in (now, reference)]
        others = [self._others(group, side) for side in (now, reference)]
        if bad := sum(int((~torch.isfinite(x)).any(-1).sum()) for x in (*states, *others)):
            note = f"the states of {bad} texts are not finite"
            return [self._reading(group, metric, layer, None, note=note) for metric in _ABOUT]
        labels, clues = torch.tensor(concept.labels), torch.tensor(concept.clues)
        rank = min(self.rank, _smallest_fit(len(concept.entities), self.n_folds) - 1, states[0].shape[1])
        note = "" if rank == self.rank else f"rank {rank}: {len(concept.entities)} entities allow no more"
        parts: tuple[tuple[tuple[str, ...], str, Callable[[], list[tuple]]], ...] = (
            (_HELD_OUT, note, lambda: self._held_out(states, others[0], labels, rank)),
            (_MOVED, note, lambda: _moved(*states, others[1], labels, rank)),
            (("effective_rank",), "", lambda: [(float(effective_rank(_spread(states[0], labels))), None, None)]),
            (_PROBE, "", lambda: self._probe(states[0], labels, clues)),
        )
        readings = []
        for metrics, why, part in parts:
            try:
                values = part()
            except ValueError as error:  # states without any spread, as of a collapsed model, have no geometry
                values, why = [(None, None, None)] * len(metrics), str(error)
            readings += [self._reading(group, m, layer, *value, why) for m, value in zip(metrics, values, strict=True)]
        return readings

    def _held_out(self, states: Sequence[Tensor], others: Tensor, labels: Tensor, rank: int) -> list[tuple]:
        _check_spread(*states, labels)
        held = held_out_values(*states, others, labels, rank, self.n_folds, self.seed)
        values = [getattr(held, metric) for metric in _HELD_OUT]
        return [(float(v.mean()), *mean_interval(v, n_bootstrap=self.n_bootstrap, seed=self.seed)) for v in values]

    def _probe(self, states: Tensor, labels: Tensor, clues: Tensor) -> list[tuple]:
        probe = entity_probe(states, labels, clues, self.n_permutations, self.seed)
        if probe.accuracy in (0.0, 1.0):  # nothing for a bootstrap to vary, and no certainty
            n = len(probe.by_entity)
            low, high = share_interval(round(probe.accuracy) * n, n)
        else:
            low, high = mean_interval(probe.by_entity, n_bootstrap=self.n_bootstrap, seed=self.seed)
        return [(probe.accuracy, low, high), (probe.null_mean, None, None), (probe.p, None, None)]

    def _others(self, group: str, side: Activations) -> Tensor:
        """States of every text that is not the concept's, [n, d]."""
        requests = [self._negatives, *(request for other, request in self._requests.items() if other != group)]
        return torch.cat([side.states(request)[:, 0] for request in requests])

    def _reading(self, group, metric, layer, value, low=None, high=None, note="") -> Reading:
        higher_means, limits = _ABOUT[metric]
        return Reading(
            self.name, metric, value, group=group, layer=layer, low=low, high=high, higher_means=higher_means,
            range=limits, valid=value is not None, note=note,
        )  # fmt: skip

    def _means(self, readings: Sequence[Reading], layer: int) -> list[Reading]:
        means = []
        for metric in self.headline:
            of_metric = [r for r in readings if r.metric == metric]
            valid = [r.value for r in of_metric if r.valid]
            left = [r.group for r in of_metric if not r.valid]
            note = f"without {', '.join(left)}, which could not be read" if left else ""
            means.append(self._reading("", metric, layer, sum(valid) / len(valid) if valid else None, note=note))
        return means


@dataclass(frozen=True)
class HeldOut:
    """Of each entity, in the subspaces that were fitted without it; tensors [E]."""

    coverage: Tensor
    coverage_reference: Tensor
    exclusion: Tensor
    exclusion_reference: Tensor


def held_out_values(
    now: Tensor, reference: Tensor, negatives: Tensor, labels: Tensor, rank: int, n_folds: int, seed: int
) -> HeldOut:
    """Coverage and exclusion of every entity by cross-validation over entities.

    Parameters
    ----------
    now, reference : Tensor [n, d]
        States of the concept's contexts now and in the reference.
    negatives : Tensor [m, d]
        States now of texts that are not the concept's.
    labels : Tensor [n], int64
        Entity of each context, 0..E-1.
    rank, n_folds, seed : int

    Returns
    -------
    HeldOut
    """
    n_entities = int(labels.max()) + 1
    order = torch.randperm(n_entities, generator=torch.Generator().manual_seed(seed))
    found = {metric: torch.empty(n_entities, dtype=torch.float64, device=now.device) for metric in _HELD_OUT}
    centres = entity_centroids(now, labels)
    for held in order.tensor_split(min(n_folds, n_entities)):
        seen = ~torch.isin(labels, held)
        here = diff_mean_pairs(now[seen], labels[seen], rank)
        there = diff_mean_pairs(reference[seen], labels[seen], rank)
        for suffix, subspace in (("", here), ("_reference", there)):
            from_here = replace(subspace, offset=here.offset)
            found[f"coverage{suffix}"][held] = coverage(from_here, centres[held])
            inside, outside = subspace.distance(now), subspace.distance(negatives)
            for entity in held.tolist():
                found[f"exclusion{suffix}"][entity] = exclusion(inside[labels == entity], outside)
    return HeldOut(**found)


def _moved(now: Tensor, reference: Tensor, negatives: Tensor, labels: Tensor, rank: int) -> list[tuple]:
    """Values of `_MOVED`; `negatives` are states of the reference."""
    _check_spread(now, reference, labels)
    here, there = (diff_mean_pairs(x, labels, rank) for x in (now, reference))
    angles = angle_summary(here, there)
    drift = offset_drift(here, there, negatives.mean(0))
    return [(value, None, None) for value in (angles.mean, angles.largest, drift)]


def _check_spread(now: Tensor, reference: Tensor, labels: Tensor) -> None:
    """Refuse states of a collapsed model."""
    _spread(now, labels)
    _spread(reference, labels, "in the reference ")


def _spread(states: Tensor, labels: Tensor, where: str = "") -> Tensor:
    """Mean state of each entity around the mean of these, [E, d]; raises where they differ by rounding alone."""
    centres = entity_centroids(states, labels)
    around = centres - centres.mean(0)
    if float(around.norm()) <= 1e-6 * float(centres.norm()):
        raise ValueError(f"the values' mean states must vary, {where}they are all equal or next to it")
    return around


def _smallest_fit(n_entities: int, n_folds: int) -> int:
    """Entities left in the largest fold's fit."""
    return n_entities - math.ceil(n_entities / min(n_folds, n_entities))


def _check_concept(group: str, concept: ConceptSet) -> None:
    if not group.strip() or "/" in group:
        raise ValueError(f"`concepts` must have names without '/', got {group!r}: it becomes part of readings' names.")
    if len(concept.entities) < MIN_ENTITIES:
        raise ValueError(
            f"`concepts`: {group} has {len(concept.entities)} entities; at least {MIN_ENTITIES} are needed to hold "
            "some out. Add entities, or leave it out."
        )
    single = [entity.name for entity in concept.entities if len({context.clue for context in entity.contexts}) < 2]
    if single:
        raise ValueError(
            f"`concepts`: the probe is tested on clues it was not trained on, and {', '.join(single[:3])} of {group} "
            "have one. Give every entity contexts of at least two clues."
        )
