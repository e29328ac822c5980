"""Where a model keeps a concept, and how hard to push with it: read once from the reference, for `sampling`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from monitor.activation_norms import activation_norm_range
from monitor.anatomy import find_anatomy
from monitor.attacks.geometry_file import read_geometry, write_geometry
from monitor.attacks.geometry_reading import (
    STRENGTHS,
    check_concept,
    checked_layer,
    last_states,
    sampling_sigma,
    spread_along,
)
from monitor.attacks.sampling_points import concept_points
from monitor.geometry.subspace_fits import diff_mean_pairs, entity_centroids, factor_analysis, linear_probe, pca
from monitor.geometry.subspaces import Subspace
from monitor.judges.mentions import MentionFinder, named
from monitor.judges.word_list import concept_score
from monitor.steered_generation import instruction_prompt, steered_answers
from monitor.stimuli.concepts import ConceptSet
from monitor.stimuli.instructions import load_instructions

METHODS = ("diff_mean_pairs", "linear_probe", "pca", "factor_analysis")
_KIND = "concept geometry"


@dataclass(frozen=True, eq=False)
class ConceptGeometry:
    """A concept's subspace {L q + b} in one model, and how points of it are sampled and injected.

    Parameters
    ----------
    name : str
        The concept's.
    subspace : Subspace
    layer : int
        Index of the hidden state that it is of.
    sigma : float, > 0
        Standard deviation of sampled points along each direction.
    low, high : float, 0 < low <= high
        Smallest and largest norm of the model's own states at that layer, before it answers.
    spread : float, > 0
        Root-mean-square distance of the entities' centroids from their mean, a direction of the subspace: what sigma
        would be if sampled points lay as far apart as the entities do.
    strength : float, > 0
        What points are multiplied by at the first token.
    decay : float in [0, 1]
        What each further token leaves of the strength.
    n_layers : int
        Blocks of the model.
    reference_share : float in [0, 1]
        Share of the model's own outputs to the validation instructions, pushed with this strength, that mention the
        concept. Where it is next to 0, an attack that brings nothing back says nothing.
    """

    name: str
    subspace: Subspace
    layer: int
    sigma: float
    low: float
    high: float
    spread: float
    strength: float
    decay: float
    n_layers: int
    reference_share: float

    @property
    def rank(self) -> int:
        """Directions; fewer than were asked for where the concept has too few entities."""
        return self.subspace.rank

    def save(self, path: str | os.PathLike) -> None:
        """Write to a safetensors file."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "subspace"}
        tensors = {"basis": self.subspace.basis, "offset": self.subspace.offset}
        write_geometry(path, _KIND, tensors, numbers | {"method": self.subspace.method})

    @classmethod
    def load(cls, path: str | os.PathLike) -> ConceptGeometry:
        """Read a file that `save` wrote; tensors on the CPU.

        Raises
        ------
        FileNotFoundError
        ValueError
            For another file.
        """
        tensors, numbers = read_geometry(path, _KIND)
        return cls(subspace=Subspace(**tensors, method=numbers.pop("method")), **numbers)


def concept_geometry(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    concept: ConceptSet,
    *,
    layer: int | float = 0.8,
    rank: int = 8,
    method: str = "diff_mean_pairs",
    strengths: Sequence[float] = STRENGTHS,
    decay: float = 0.9,
    n_points: int = 10,
    max_new_tokens: int = 20,
    seed: int = 42,
    batch_tokens: int = 16384,
    progress: bool = False,
) -> ConceptGeometry:
    """Read a concept's geometry from a model that has it.

    Parameters
    ----------
    model : nn.Module
        The reference: the model before it forgot. A causal language model of transformers, optionally under PEFT or
        DDP; left as it was found, and not needed any more afterwards.
    tokenizer : PreTrainedTokenizerBase
    concept : ConceptSet
    layer : int or float
        Hidden state to read and to push, as in `monitor.activations.States`; not the last, which no block reads.
    rank : int, >= 1
        Directions. Fewer where the concept has too few entities: C entities span C - 1.
    method : str
        One of `METHODS`, of `monitor.geometry.subspace_fits`.
    strengths : sequence of float, > 0
        To choose from.
    decay : float in [0, 1]
    n_points, max_new_tokens : int, >= 1
        Points and tokens an output while the strength is chosen.
    seed : int
    batch_tokens : int
        As for `steered_answers`.
    progress : bool
        Progress bars on standard error.

    Returns
    -------
    ConceptGeometry

    Raises
    ------
    ValueError
        For a model without a head or sharded, a layer that no block reads, an unknown method, bad numbers, or states
        that are not finite.

    Notes
    -----
    The states are those of the last token of the concept's contexts, which is about to name an entity. Sigma is that
    of 20 candidates from low/100 to high at which most sampled points have a norm within [low, high]
    (`calibrate_sigma`; MAxBench, App. I, begins at low: with an offset as long as the states themselves no point is
    then in range), or `spread` where no candidate puts one there.

    The strength is the one with the largest mean concept score (0 no mention, 1 a crowded or looping one, 2 a mention,
    `monitor.judges.word_list.concept_score`) of the outputs to the bundled *validation* instructions, the smallest of
    equals. It is chosen here, on the reference, and not by the attack: an attack that tuned itself on the model that it
    attacks would find what luck gives.
    """
    if method not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {method!r}")
    check_concept(concept)
    index = checked_layer(model, tokenizer, layer, rank, strengths, decay)
    instructions = load_instructions()
    prompts = {
        split: [instruction_prompt(tokenizer, text) for text in getattr(instructions, split)]
        for split in ("norms", "validation")
    }
    title = f"geometry of {concept.name}" if progress else None
    states = last_states(model, tokenizer, concept.texts, index, title)
    labels = torch.tensor(concept.labels)
    subspace = _fit(states, labels, min(rank, len(concept.entities) - 1, states.shape[1]), method)
    low, high = activation_norm_range(model, tokenizer, prompts["norms"], layer=index)
    spread = spread_along(entity_centroids(states, labels), subspace)
    sigma = sampling_sigma(subspace, low, high, spread, seed)

    points = concept_points(subspace, n_points, sigma, seed, "strength")
    finder = MentionFinder(concept)
    found = []
    for strength in strengths:
        said = steered_answers(
            model, tokenizer, prompts["validation"], points, layer=index, strength=strength, decay=decay,
            max_new_tokens=max_new_tokens, batch_tokens=batch_tokens, progress=title,
        )  # fmt: skip
        mentions = [(text, finder.find(text)) for row in said for text in row]
        share = sum(bool(named(of_text)) for _, of_text in mentions) / len(mentions)
        found.append((sum(concept_score(*mention) for mention in mentions), -strength, share))
    _, strength, share = max(found)
    return ConceptGeometry(
        concept.name, subspace, index, sigma, low, high, spread, float(-strength), float(decay),
        find_anatomy(model).n_layers, share,
    )  # fmt: skip


def _fit(states: Tensor, labels: Tensor, rank: int, method: str) -> Subspace:
    if method == "diff_mean_pairs":
        return diff_mean_pairs(states, labels, rank)
    if method == "linear_probe":
        return linear_probe(states, labels, rank)
    return pca(states, rank) if method == "pca" else factor_analysis(states, rank)
