"""How many of a concept's entities and categories a set of generations says, and how evenly."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

OTHER = "other"  # the category of what belongs to the concept and to none of its categories


class _Entity(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def category(self) -> str: ...


class Concept(Protocol):
    """What is read of a `monitor.stimuli.concepts.ConceptSet`."""

    @property
    def entities(self) -> Sequence[_Entity]: ...
    @property
    def cyclic(self) -> bool: ...


@dataclass(frozen=True)
class DiversityScore:
    """How evenly mentions are spread; higher: over more entities and categories.

    Attributes
    ----------
    entity, category : float in [0, 1]
        Normalised entropies.
    """

    entity: float
    category: float

    @property
    def total(self) -> float:
        """Their sum, in [0, 2]."""
        return self.entity + self.category


def diversity(
    mentions: Sequence[tuple[str, str]], concept: Concept, *, other: bool = False, closed: bool | None = None
) -> DiversityScore:
    """Normalised Shannon entropy of the entities and of the categories that were mentioned.

    Parameters
    ----------
    mentions : sequence of (entity, category)
        Of all outputs, in any order; an entity once an output, as judges give them.
    concept : ConceptSet
    other : bool
        Whether the judge can name entities that the concept does not list, some of the category ``"other"``.
    closed : bool, optional
        The listed entities are all there are. By default this is ``concept.cyclic``: a cycle is complete.

    Returns
    -------
    DiversityScore
        0 for mentions of one and the same entity, and for none.

    Raises
    ------
    ValueError
        A mention that the concept does not list, without `other`; a category that is neither one of the concept's nor
        ``"other"``.

    Notes
    -----
    H = −Σ p ln p over the mentions, divided by the largest value it can have:

    - category: ln C, C the concept's categories, and one more, ``"other"``, if `other`. Where every entity is a
      category of its own (days, years) the two entropies are one and the same.
    - entity, closed: ln K, K the listed entities. What a judge names beside these is no member and is left out.
    - entity, open: the support is unknown. n mentions are of n different entities at most, and of K at most for a
      judge that knows no others: ln n with `other`, ln min(n, K) without.

    MAxBench, Section 4.3 and Appendix H, whose formulas for the two supports its text does not carry; this is our
    choice. With few mentions an open entity entropy says little: two mentions of two entities reach 1.
    """
    entities, categories = _count(mentions, concept, other, is_closed(concept, closed))
    support = Support(concept, other, is_closed(concept, closed))
    entity, category = support.normalised(entities, categories)
    return DiversityScore(float(entity), float(category))


@dataclass(frozen=True)
class UnseenInstances:
    """Mentions of entities that the geometry was not recovered from.

    Attributes
    ----------
    mentions : int
        Mentions of such entities (MAxBench, Section 5.3, counts instances).
    entities : tuple of str
        Which, each once, in the order of their first mention.
    """

    mentions: int
    entities: tuple[str, ...]


def unseen_instances(mentions: Sequence[tuple[str, str]], seen: Collection[str]) -> UnseenInstances:
    """Count the mentions of entities that are not among those `seen`, by their names.

    Parameters
    ----------
    mentions : sequence of (entity, category)
    seen : collection of str
        Names of the entities that a geometry was recovered from, as in
        ``[concept.entities[i].name for i in split.seen]``.
    """
    if isinstance(seen, str):
        raise ValueError(f"`seen` must be a collection of names, got one string: {seen!r}; put it in a list")
    unseen = [entity for entity, _ in mentions if entity not in seen]
    return UnseenInstances(len(unseen), tuple(dict.fromkeys(unseen)))


def is_closed(concept: Concept, closed: bool | None) -> bool:
    """Whether the listed entities are all there are."""
    return bool(concept.cyclic) if closed is None else closed


class Support:
    """What entropies of a concept are divided by: see the Notes of `diversity`."""

    def __init__(self, concept: Concept, other: bool, closed: bool) -> None:
        self.other, self.closed, self.known = other, closed, len(concept.entities)
        self.categories = _n_categories(concept) + (other and not closed)
        self.alone = _n_categories(concept) == self.known  # every entity is its own category

    def normalised(self, entities: Tensor, categories: Tensor) -> tuple[Tensor, Tensor]:
        """Counts [..., entities] and [..., categories] -> the two entropies [...] in [0, 1]."""
        n = entities.sum(-1)
        if self.closed:
            support = torch.full_like(n, self.known)
        else:
            support = n if self.other else n.clamp(max=self.known)
        spread = _entropy(entities, support)
        return spread, spread if self.alone else _entropy(categories, torch.full_like(n, self.categories))


def _n_categories(concept: Concept) -> int:
    return len({entity.category for entity in concept.entities})


def _entropy(counts: Tensor, support: Tensor) -> Tensor:
    """Entropy of counts [..., m] over its greatest value, ln support [...]; 0 where there is nothing to spread over."""
    p = counts / counts.sum(-1, keepdim=True).clamp(min=torch.finfo(counts.dtype).tiny)
    share = -torch.special.xlogy(p, p).sum(-1) / support.clamp(min=2).log()
    return torch.where(support > 1, share, torch.zeros_like(share)).clamp(0, 1) + 0.0  # no -0.0


def _count(mentions: Sequence[tuple[str, str]], concept: Concept, other: bool, closed: bool) -> tuple[Tensor, Tensor]:
    """How often each entity and each category is mentioned, both [m] float64, in a fixed order."""
    kept = counted_mentions(mentions, concept, other, closed)
    return tuple(
        torch.tensor([names.count(name) for name in sorted(set(names))], dtype=torch.float64)
        for names in ([entity for entity, _ in kept], [category for _, category in kept])
    )


def counted_mentions(
    mentions: Sequence[tuple[str, str]], concept: Concept, other: bool, closed: bool
) -> list[tuple[str, str]]:
    """The mentions that count, a listed entity with its own category whatever the judge says."""
    known = {entity.name: entity.category for entity in concept.entities}
    kept = []
    for entity, category in mentions:
        if entity in known:
            kept.append((entity, known[entity]))
        elif closed:
            continue
        elif not other:
            raise ValueError(
                f"`mentions` must be of entities that the concept lists, got {entity!r}: pass `other=True` if the "
                "judge names others too"
            )
        elif category != OTHER and category not in known.values():
            raise ValueError(
                f"`mentions` must have the concept's categories or {OTHER!r}, got {category!r} for {entity!r}"
            )
        else:
            kept.append((entity, category))
    return kept
