"""The methods of the MAxBench study: from a concept's states to a geometry that points are sampled from."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from monitor.geometry.factor_mixture import mixture_of_factor_analysers
from monitor.geometry.sae import SparseAutoencoder, sae_top_k
from monitor.geometry.schatten_probe import schatten_probe
from monitor.geometry.splines import Spline, spline
from monitor.geometry.subspace_fits import diff_mean, diff_mean_pairs, factor_analysis, isotropic, linear_probe, pca
from monitor.geometry.subspaces import Isotropic, Subspace
from monitor.stimuli.concept_splits import Split, category_splits, entity_splits, value_splits
from monitor.stimuli.concepts import ConceptSet
from monitor.stimuli.paired_responses import PairedResponse, load_paired_responses

Geometry = Subspace | Isotropic | Spline

METHODS = {
    "diff_mean": "difference of means with the concept and without, one direction",
    "reft_r1": "rank-one representation finetuning, one direction",
    "pca": "principal directions",
    "factor_analysis": "span of the factor loadings",
    "linear_probe": "singular vectors of a classifier of entities",
    "schatten_probe": "the same of a classifier of low rank",
    "diff_mean_pairs": "directions between the entities' means",
    "sae": "decoder directions of a sparse autoencoder's best features",
    "factor_mixture": "the best component of a mixture of factor analysers, fitted to the contexts of all concepts and "
    "to instructions; the paper fits it to the Pile",
    "spline": "curve through the seen values of an ordered concept",
    "spline_all": "curve through all values, held-out ones too",
    "isotropic": "baseline: all directions around the mean",
    "embedding": "baseline: principal directions of the entities' input embeddings, no context",
    "prompting": "baseline: the instruction asks for the concept, no steering",
    "unsteered": "baseline: the instruction alone",
}
ORDERED = ("spline", "spline_all")
SPLIT_FREE = ("prompting", "unsteered")  # nothing is fitted
BASELINES = ("isotropic", "embedding", "prompting", "unsteered")
SINGLE = ("diff_mean", "reft_r1")
KINDS = ("category", "entity")
_LINEAR_ONLY = (*SINGLE, "sae")
_AFFINE_ONLY = (*ORDERED, "isotropic")
_OF_ENTITIES = ("linear_probe", "schatten_probe", "diff_mean_pairs", *ORDERED)
# The first k columns of the fit at a high rank are the fit at rank k: one fit does for all ranks.
_NESTED = ("pca", "linear_probe", "schatten_probe", "diff_mean_pairs", "sae", "embedding")
_REFT_LEAST = 4  # pairs


@dataclass(frozen=True)
class Case:
    """One geometry of one method.

    Attributes
    ----------
    method : str
        Of `METHODS`.
    form : {"linear", "affine", "none"}
        Offset 0, or the method's own; "none" where there is no geometry.
    rank : int or None
        As asked for; None where a method has no choice of it (`isotropic`, prompting, unsteered).
    """

    method: str
    form: str
    rank: int | None

    @property
    def name(self) -> str:
        return f"{self.method}-{self.form}" + ("" if self.rank is None else f"-{self.rank}")


@dataclass(frozen=True, eq=False)
class Material:
    """What a split's geometries are fitted to.

    Attributes
    ----------
    x : Tensor [n, d], labels : Tensor [n]
        States at the contexts of the seen entities, and which these are.
    every, every_label : Tensor [m, d] and [m]
        The same of all entities.
    negatives : Tensor [q, d]
        States at the control's contexts.
    embedding : Tensor [f, d]
        Input embeddings of the seen entities' forms; empty if not asked for.
    mixed : Tensor [N, d]
        States of all concepts' contexts and of instructions; empty if not asked for.
    """

    concept: ConceptSet
    split: Split
    x: Tensor
    labels: Tensor
    every: Tensor
    every_label: Tensor
    negatives: Tensor
    embedding: Tensor
    mixed: Tensor


def splits_of(concept: ConceptSet, n: int, kinds: Sequence[str], seed: int) -> dict[str, Split]:
    """Splits by name: n of each kind, the kinds taking turns; as many value splits where there are no categories."""
    if concept.ordered or len(concept.categories) == len(concept.entities):
        count = min(n * len(kinds), len(concept.entities))  # of the seven days one is held out: there are no more
        return {f"value-{i}": split for i, split in enumerate(value_splits(concept, count, seed))}
    found: dict[str, list[tuple[str, Split]]] = {}
    if "category" in kinds:
        # All categories are drawn before n of them are taken, so that a study can be extended to more splits.
        held = category_splits(concept, len(concept.categories), seed)[:n]
        found["category"] = [(f"category-{concept.entities[split.heldout[0]].category}", split) for split in held]
    if "entity" in kinds:
        found["entity"] = [(f"entity-{i}", split) for i, split in enumerate(entity_splits(concept, n, seed))]
    in_turn = itertools.zip_longest(*(found[kind] for kind in kinds))
    return dict(pair for turn in in_turn for pair in turn if pair is not None)


def cases(
    concept: ConceptSet, split: Split, methods: Sequence[str], forms: Sequence[str], ranks: Sequence[int]
) -> list[Case]:
    """The geometries of a split: methods x forms x ranks, as far as they exist. A rank is lowered to what can be."""
    found: list[Case] = []
    n_rows = sum(len(concept.entities[i].contexts) for i in split.seen)
    n_forms = sum(len(concept.entities[i].forms) for i in split.seen)
    for method in methods:
        if method in SPLIT_FREE or (method in ORDERED and not concept.ordered):
            continue
        if method == "isotropic":
            found.append(Case(method, "affine", None))
            continue
        values = len(concept.entities) if method == "spline_all" else len(split.seen)
        most = values if method in _OF_ENTITIES else n_forms if method == "embedding" else n_rows
        limit = 1 if method in SINGLE else most - 1
        # A curve in one dimension is a line: ranks from 2 on.
        asked = [rank for rank in ranks if rank > 1] or [2] if method in ORDERED else ranks
        if limit < 1 or (method in ORDERED and limit < 2):
            continue
        for form in forms:
            if (form == "affine" and method in _LINEAR_ONLY) or (form == "linear" and method in _AFFINE_ONLY):
                continue
            found += [Case(method, form, rank) for rank in sorted({min(rank, limit) for rank in asked})]
    return found


class Fits:
    """Geometries of one split, each fitted once, however many ranks and forms ask for it."""

    def __init__(
        self, material: Material, cases_of_split: Sequence[Case], sae: SparseAutoencoder | None, components: int,
        seed: int, reft,
    ) -> None:  # fmt: skip
        self.material, self.sae, self.components, self.seed, self.reft = material, sae, components, seed, reft
        self._top: dict[str, int] = {}
        for case in cases_of_split:
            self._top[case.method] = max(case.rank or 0, self._top.get(case.method, 0))
        self._fitted: dict[tuple[str, int | None], Geometry] = {}

    def geometry(self, case: Case) -> Geometry:
        nested = case.method in _NESTED
        key = case.method, self._top[case.method] if nested else case.rank
        if key not in self._fitted:
            self._fitted[key] = self._fit(*key)
        found = self._fitted[key]
        if nested:
            found = replace(found, basis=found.basis[:, : case.rank])
        return found.linear() if case.form == "linear" and not isinstance(found, Spline) else found

    def _fit(self, method: str, rank: int | None) -> Geometry:
        m = self.material
        if method == "isotropic":
            return isotropic(m.x)
        if method == "diff_mean":
            return diff_mean(m.x, m.negatives)
        if method == "reft_r1":
            return self.reft(seen_pairs(m.concept, m.split))
        if method in ("pca", "embedding"):
            return pca(m.x if method == "pca" else m.embedding, rank)
        if method == "factor_analysis":
            return factor_analysis(m.x, rank)
        if method == "sae":
            return sae_top_k(self.sae, m.x, m.negatives, rank)
        if method == "factor_mixture":
            return _mixture(m.mixed, self.components, rank, self.seed).component_for(m.x, m.negatives)
        if method in ORDERED:
            x, labels = (m.every, m.every_label) if method == "spline_all" else (m.x, m.labels)
            return spline(x, labels, m.concept.cyclic, rank, n_values=len(m.concept.entities))
        of_entities = {
            "linear_probe": linear_probe, "schatten_probe": schatten_probe, "diff_mean_pairs": diff_mean_pairs,
        }  # fmt: skip
        return of_entities[method](m.x, m.labels, rank)


# The tensor is hashed as an object: the same states, however many concepts and splits ask for their mixture.
@lru_cache(maxsize=8)
def _mixture(x: Tensor, components: int, rank: int, seed: int):
    return mixture_of_factor_analysers(x, min(components, len(x)), rank, seed)


def seen_pairs(concept: ConceptSet, split: Split) -> tuple[PairedResponse, ...]:
    """The paired responses whose positive does not name a held-out entity.

    Raises
    ------
    ValueError
        For a concept that has no pairs, or fewer than four that are left.
    """
    from monitor.stimuli.concepts import mentions

    heldout = [form for i in split.heldout for form in concept.entities[i].forms]
    pairs = tuple(pair for pair in load_paired_responses(concept.name) if not mentions(pair.positive, heldout))
    if len(pairs) < _REFT_LEAST:
        raise ValueError(f"{concept.name}: {len(pairs)} paired responses are left without the held-out entities")
    return pairs


def material_of(concept: ConceptSet, split: Split, states: Mapping[str, Tensor], control: str) -> Material:
    """A split's share of the states that `recipes.studies.maxbench_states` read."""
    every, every_label = states[concept.name], torch.tensor(concept.labels)
    seen = torch.isin(every_label, torch.tensor(split.seen))
    nothing = every[:0]
    embedding = states.get(f"{concept.name}.embedding", nothing)
    if len(embedding):
        owner = torch.tensor([i for i, entity in enumerate(concept.entities) for _ in entity.forms])
        embedding = embedding[torch.isin(owner, torch.tensor(split.seen))]
    return Material(
        concept, split, every[seen], every_label[seen], every, every_label, states[control], embedding,
        states.get("mixed", nothing),
    )  # fmt: skip
