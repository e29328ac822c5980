"""What is read from the reference alike for a concept and for a forget set, before points are sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from monitor.activations import States, measure_activations
from monitor.anatomy import find_anatomy
from monitor.generation import Decoder
from monitor.geometry.sampling_scale import calibrate_sigma
from monitor.geometry.subspaces import Subspace
from monitor.steered_generation import steerable_layer
from monitor.stimuli.concepts import ConceptSet

# Of the norm of a point, which is that of a hidden state: from a nudge to a shove.
STRENGTHS = (0.5, 0.7, 1.0, 1.4, 2.0)
_SIGMAS = 20


def check_concept(concept: ConceptSet) -> None:
    """Refuse what is no ConceptSet, a bundled one's name above all."""
    if not isinstance(concept, ConceptSet):
        raise ValueError(
            f"`concept` must be a ConceptSet, as load_concept_sets(['animals'])['animals'], got {concept!r}"
        )


def checked_layer(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, layer: int | float, rank: int, strengths: Sequence[float],
    decay: float,
) -> int:  # fmt: skip
    """The hidden state's index, after checking that the model can speak and be pushed there, and the numbers."""
    anatomy = find_anatomy(model)
    Decoder(anatomy, tokenizer)  # says what is missing for it to speak
    index = steerable_layer(anatomy, layer)
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"`rank` must be a whole number of at least 1, got {rank!r}")
    if not 0 <= decay <= 1:
        raise ValueError(f"`decay` must be in [0, 1], got {decay}: it is what a step leaves of the strength")
    if not strengths or not all(0 < strength < math.inf for strength in strengths):
        raise ValueError(f"`strengths` must hold at least one positive, finite number, got {list(strengths)}")
    return index


def last_states(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], index: int, title: str | None
) -> Tensor:
    """The hidden state of each text's last token, [n, d] float32."""
    request = States(tuple(texts), layers=(index,), pooling="last")
    states = measure_activations(model, tokenizer, [request], progress=title).states(request)[:, 0]
    if not bool(torch.isfinite(states).all()):
        raise ValueError(
            f"`model` has hidden states at layer {index} that are not finite, so they have no geometry: it has "
            "diverged, or its dtype overflows (float16 does on models with massive activations): load it in bfloat16 "
            "or float32"
        )
    return states


def spread_along(points: Tensor, subspace: Subspace) -> float:
    """Root-mean-square distance of points [n, d] from their mean, a direction of the subspace."""
    points = points.double()
    along = (points - points.mean(0)) @ subspace.basis.double()
    return float(along.square().mean().sqrt())


def sampling_sigma(subspace: Subspace, low: float, high: float, spread: float, seed: int) -> float:
    """The calibrated sigma; `spread` where nothing can be calibrated: see the Notes of `concept_geometry`."""
    if not low < high:
        return spread
    generator = torch.Generator().manual_seed(seed)
    sigma, fraction = calibrate_sigma(subspace, low, high, generator=generator, n_values=_SIGMAS, lowest=low / 100)
    return sigma if fraction > 0 else spread
