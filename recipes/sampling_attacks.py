"""`sampling` as a command asks for it: one attack a concept, or one on the forget set's own questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from monitor.attacks.concept_geometry import concept_geometry
from monitor.attacks.forget_set_geometry import distinct_questions, forget_set_geometry
from monitor.attacks.sampling import SamplingConfig, sampling
from monitor.stimuli.concepts import ConceptSet, load_concept_sets
from monitor.stimuli.forget_set import ForgetSet
from recipes.attacks import ATTACKS, SAMPLING, Attack
from recipes.concept_arguments import ConceptArguments
from recipes.measures import parse_layer


def sampled_concepts(names: str | Sequence[str] | None, forget_set: ForgetSet) -> dict[str, ConceptSet]:
    """The concepts of these names or files; none is the forget set's questions, which must then be enough.

    Raises
    ------
    FileNotFoundError, ValueError
        As `monitor.stimuli.concepts.load_concept_sets`; for a forget set with fewer than four different questions.
    """
    if names is None:
        distinct_questions(forget_set)
        return {}
    return load_concept_sets([names] if isinstance(names, str) else names)


def check_concept_numbers(arguments: ConceptArguments) -> None:
    """Refuse a layer and a rank that no model has, before one is loaded."""
    if isinstance(parse_layer(arguments.concept_layer), str):
        raise ValueError(
            f"`concept_layer` must be a hidden-state index or a fraction of the depth, got {arguments.concept_layer!r}."
        )
    if arguments.concept_rank < 1:
        raise ValueError(f"`concept_rank` must be at least 1, got {arguments.concept_rank}.")


def sampled_names(concepts: Mapping[str, ConceptSet]) -> list[str]:
    """What the attacks by sampling will be called: see `monitor.attacks.sampling.SamplingConfig.name`."""
    return [f"{SAMPLING}_{concept.name}" for concept in concepts.values()] or [SAMPLING]


def sampling_attacks(
    model,
    tokenizer,
    forget_set: ForgetSet,
    concepts: Mapping[str, ConceptSet],
    *,
    layer: int | float,
    rank: int,
    quick: bool = False,
    seed: int = 42,
    progress: bool = False,
) -> list[Attack]:
    """Read the reference's geometries, and make the attacks.

    Parameters
    ----------
    model, tokenizer
        The reference: the model before it forgot. Not needed any more afterwards.
    forget_set : ForgetSet
    concepts : mapping of str to ConceptSet
        Empty for the forget set's own questions. Of several, each is the control of the one before it.
    layer, rank
        As for `monitor.attacks.concept_geometry.concept_geometry`.
    quick, seed
        As for `recipes.attacks.chosen`.
    progress : bool
    """
    options = {"layer": layer, "rank": rank, "seed": seed, "progress": progress}
    if quick:
        options |= {"n_points": 3, "max_new_tokens": 12}
    make = SamplingConfig.quick if quick else SamplingConfig
    if not concepts:
        configs = [make(forget_set_geometry(model, tokenizer, forget_set, **options))]
    else:
        geometries = [concept_geometry(model, tokenizer, concept, **options) for concept in concepts.values()]
        following = [*geometries[1:], geometries[0]] if len(geometries) > 1 else [None]
        configs = [make(*parts) for parts in zip(geometries, concepts.values(), following, strict=True)]
    return [Attack(sampling, replace(config, seed=seed), ATTACKS[SAMPLING][2]) for config in configs]
