"""The measures a command was asked for by name, on a forget set's own texts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from monitor.measures.behaviour import Behaviour
from monitor.measures.bias_shift import BiasShift
from monitor.measures.fragmentation import Fragmentation
from monitor.stimuli.bias import load_bias_stimuli
from monitor.stimuli.concepts import CONCEPTS, load_concept_sets
from monitor.stimuli.counterfactual import CounterfactualSet
from monitor.stimuli.counterfactual_file import MIN_CELLS
from monitor.stimuli.counterfactual_pairs import counterfactual_from_pairs
from monitor.stimuli.forget_set import SPLITS, ForgetSet
from monitor.stimuli.mixture import largest_mixture
from recipes.concept_arguments import ConceptArguments
from recipes.counterfactual_arguments import load_sets
from recipes.detectability_arguments import CONCEPT, DetectabilityArguments

if TYPE_CHECKING:
    from monitor.measures.concept_recovery import ConceptRecovery
    from monitor.measures.detectability import Detectability

logger = logging.getLogger(__name__)

BATCHES = 10  # of fragmentation, as published
MEASURES = ("bias_shift", "fragmentation", "behaviour", "detectability", "concept_recovery")


def check_names(names: str | Sequence[str]) -> list[str]:
    """The measures' names as a list; an unknown one, or none at all, is a ValueError."""
    wanted = [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in wanted if name not in MEASURES]:
        raise ValueError(f"`measures` must be among {', '.join(MEASURES)}, got {', '.join(map(str, unknown))}.")
    if not wanted:
        raise ValueError(f"`measures` is empty; choose from {', '.join(MEASURES)}.")
    return wanted


def bias_shift(size: str, pooling: str | None = None) -> BiasShift:
    """Bias shift on the bundled sentences; `pooling` None is the measure's own."""
    return BiasShift(load_bias_stimuli(size), **_given(pooling=pooling))


def fragmentation(forget_set: ForgetSet, layer: str | int | float, pooling: str | None = None) -> Fragmentation:
    """Fragmentation of the forget pairs, with the held-out pairs as control where there are enough.

    Raises
    ------
    ValueError
        If anonymisation changes fewer forget pairs than there are batches.
    """
    forget, heldout = forget_set.fragmentation_pairs("forget"), forget_set.fragmentation_pairs("heldout")
    if len(forget) < BATCHES:
        raise ValueError(
            f"Fragmentation needs at least {BATCHES} forget pairs that anonymisation changes, {forget_set.name} "
            f"has {len(forget)}. Add pairs, or the names in them to its entities.json, or leave it out: --measures "
            "bias_shift behaviour."
        )
    if 0 < len(heldout) < BATCHES:
        logger.warning(
            "%s has %d held-out pairs that anonymisation changes; %d are needed to read them as a control of "
            "fragmentation, which goes without.", forget_set.name, len(heldout), BATCHES,
        )  # fmt: skip
    controls = {"heldout": heldout} if len(heldout) >= BATCHES else None
    return Fragmentation(
        forget, layer=parse_layer(layer), batches=BATCHES, controls=controls, **_given(pooling=pooling)
    )


def behaviour(forget_set: ForgetSet) -> Behaviour:
    """Behaviour on every split that has pairs."""
    splits = {split: forget_set.split(split) for split in SPLITS}
    return Behaviour({split: pairs for split, pairs in splits.items() if pairs})


def detectability(
    arguments: DetectabilityArguments, forget_set: ForgetSet | None = None, pooling: str | None = None
) -> Detectability:
    """Detectability of the dimensions and, of a forget set, of the concept against its anonymised variants.

    Raises
    ------
    FileNotFoundError
        If a dimension is neither bundled nor a file.
    ValueError
        If a file is faulty, a number out of its range, or a set too small for the mixture.
    """
    from monitor.measures.detectability import Detectability  # its probes import what no other measure needs

    sets = load_sets(arguments.dimensions)
    if forget_set is not None:
        if CONCEPT in sets:
            raise ValueError(
                f"`dimensions`: {CONCEPT!r} is the forget set's group; call the file otherwise, NAME=FILE."
            )
        sets |= _concept_set(forget_set, arguments.n, arguments.purity)
    return Detectability(
        sets, layer=parse_layer(arguments.detectability_layer), scan=arguments.scan_layers, purity=arguments.purity,
        n=arguments.n, smallest_effect=arguments.smallest_effect, level=arguments.level, power=arguments.power,
        **_given(pooling=pooling),
    )  # fmt: skip


def concept_recovery(arguments: ConceptArguments, pooling: str | None = None) -> ConceptRecovery:
    """Recovery of the concepts that were named.

    Raises
    ------
    FileNotFoundError
        If a concept is neither bundled nor a file.
    ValueError
        If a file is faulty, a number out of its range, or a concept too small.
    """
    from monitor.measures.concept_recovery import ConceptRecovery

    names = CONCEPTS if arguments.concepts is None else arguments.concepts
    names = [names] if isinstance(names, str) else names
    return ConceptRecovery(
        load_concept_sets(names), layer=parse_layer(arguments.concept_layer), rank=arguments.concept_rank,
        **_given(pooling=pooling),
    )  # fmt: skip


def _concept_set(forget_set: ForgetSet, n: int, purity: float) -> dict[str, CounterfactualSet]:
    """The concept's set by its name, with the retain pairs as neutral texts where they fill the mixture."""
    pairs, retain = forget_set.fragmentation_pairs("forget"), forget_set.split("retain")
    if len(pairs) < MIN_CELLS:
        logger.warning(
            "%s has %d forget pairs that anonymisation changes; %d are needed to read whether the concept is "
            "detectable, which is left out.", forget_set.name, len(pairs), MIN_CELLS,
        )  # fmt: skip
        return {}
    mixed = counterfactual_from_pairs(pairs, retain)
    # Too small a pool is no fault of the forget set: the concept is then read at purity 1 alone.
    fits = 0 < purity <= 1 and largest_mixture(mixed, purity) >= n
    return {CONCEPT: mixed if fits else counterfactual_from_pairs(pairs)}


def parse_layer(text: str | int | float) -> int | float | str:
    """A layer from YAML or the command line: 24 is an index, 0.8 a fraction, anything else a rule's name."""
    if not isinstance(text, str):
        return text  # YAML gives numbers as numbers, and int(0.8) is 0
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


def _given(**options) -> dict:
    return {name: value for name, value in options.items() if value is not None}
