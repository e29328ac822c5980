"""Which of a concept's entities a geometry is fitted on, and which are held out to see whether it reaches them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from monitor.stimuli.concepts import ConceptSet

# Of the entities, in splits that hold out single ones; MAxBench, Section 4.2, says "randomly" and names no share.
HELD_OUT = 0.2


@dataclass(frozen=True)
class Split:
    """Entities to fit on and entities held out; together they are all of the concept's, and none is in both.

    Parameters
    ----------
    kind : {"category", "entity", "value"}
        What was held out: a whole category, entities of every category, values of a concept without categories.
    seen, heldout : tuple of int
        Indices into ``ConceptSet.entities``, ascending; never empty.
    """

    kind: Literal["category", "entity", "value"]
    seen: tuple[int, ...]
    heldout: tuple[int, ...]


def category_splits(concept: ConceptSet, n: int = 5, seed: int = 0) -> tuple[Split, ...]:
    """Hold out one whole category, another in each split.

    Parameters
    ----------
    concept : ConceptSet
    n : int, >= 1
        Splits; at most the number of categories. The paper's five.
    seed : int
        Of the order of the categories; the global generators are neither read nor moved.

    Raises
    ------
    ValueError
        The concept has no categories (every entity is its own) or fewer than ``n``.
    """
    _check(concept, n, categorical=True)
    if n > len(concept.categories):
        raise ValueError(
            f"n must be at most the number of categories of {concept.name!r}, {len(concept.categories)}, got {n}: each "
            "is held out once"
        )
    chosen = random.Random(seed).sample(concept.categories, n)
    return tuple(
        _split("category", concept, {i for i, entity in enumerate(concept.entities) if entity.category == category})
        for category in chosen
    )


def entity_splits(concept: ConceptSet, n: int = 5, seed: int = 0) -> tuple[Split, ...]:
    """Hold out a fifth of the entities, spread over the categories; of every category at least one entity stays.

    Parameters
    ----------
    concept : ConceptSet
    n : int, >= 1
        Splits, no two alike. The paper's five.
    seed : int
        Of the draws; the global generators are neither read nor moved.

    Raises
    ------
    ValueError
        The concept has no categories (every entity is its own), or too few entities for ``n`` different splits.

    Notes
    -----
    A category of m entities gives ⌊m/5⌋ or one more; which give one more is drawn, so that the total is the fifth of
    all entities, rounded.
    """
    _check(concept, n, categorical=True)
    members = [
        [i for i, entity in enumerate(concept.entities) if entity.category == name] for name in concept.categories
    ]
    total = max(1, round(HELD_OUT * len(concept.entities)))

    def draw(generator: random.Random) -> set[int]:
        counts = [int(HELD_OUT * len(category)) for category in members]
        room = [k for k, category in enumerate(members) if counts[k] + 1 < len(category)]
        for k in generator.sample(room, min(len(room), max(0, total - sum(counts)))):
            counts[k] += 1
        return {i for category, count in zip(members, counts, strict=True) for i in generator.sample(category, count)}

    return _different("entity", concept, draw, n, seed)


def value_splits(concept: ConceptSet, n: int = 5, seed: int = 0) -> tuple[Split, ...]:
    """Hold out a fifth of the values of an ordered concept, or of one without categories.

    Parameters
    ----------
    concept : ConceptSet
    n : int, >= 1
        Splits, no two alike.
    seed : int
        Of the draws; the global generators are neither read nor moved.

    Raises
    ------
    ValueError
        The concept is not ordered and has categories, or has too few values for ``n`` different splits.
    """
    _check(concept, n, categorical=False)
    count = max(1, round(HELD_OUT * len(concept.entities)))
    values = range(len(concept.entities))
    return _different("value", concept, lambda generator: set(generator.sample(values, count)), n, seed)


def _check(concept: ConceptSet, n: int, categorical: bool) -> None:
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}: it is the number of splits")
    bare = len(concept.categories) == len(concept.entities)
    if categorical and (bare or len(concept.categories) < 2):
        raise ValueError(
            f"concept {concept.name!r} must have at least two categories, one of them of more than one entity, got "
            f"{len(concept.categories)} for {len(concept.entities)} entities: use value_splits"
        )
    if not categorical and not concept.ordered and not bare:
        raise ValueError(
            f"concept {concept.name!r} must be ordered, or have no categories, got {len(concept.categories)} "
            "categories: use category_splits or entity_splits"
        )


def _different(kind, concept: ConceptSet, draw: Callable[[random.Random], set[int]], n: int, seed: int):
    generator = random.Random(seed)
    found: dict[frozenset[int], Split] = {}
    for _ in range(1000 * n):
        if len(found) == n:
            break
        held = frozenset(draw(generator))
        if held:
            found.setdefault(held, _split(kind, concept, held))
    if len(found) < n:
        raise ValueError(
            f"n must be at most the number of different splits of {concept.name!r}; with its {len(concept.entities)} "
            f"entities {len(found)} were found, got n={n}: ask for fewer, or add entities"
        )
    return tuple(found.values())


def _split(kind, concept: ConceptSet, held: set[int] | frozenset[int]) -> Split:
    indices = range(len(concept.entities))
    return Split(kind, tuple(i for i in indices if i not in held), tuple(sorted(held)))
