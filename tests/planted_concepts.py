"""Concepts of a few entities for the tests of scores."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Thing:
    name: str
    category: str


@dataclass(frozen=True)
class Things:
    entities: tuple[Thing, ...]
    cyclic: bool = False


ANIMALS = Things(tuple(Thing(f"{kind}{i}", kind) for kind in ("mammal", "bird", "fish") for i in range(4)))
UNEVEN = Things(tuple(Thing(f"m{i}", "mammal") for i in range(6)) + (Thing("owl", "bird"), Thing("tuna", "fish")))
DAYS = Things(tuple(Thing(f"day{i}", f"day{i}") for i in range(7)), cyclic=True)
YEARS = Things(tuple(Thing(str(year), str(year)) for year in range(1990, 2020)))


def once_each(concept):
    return [(entity.name, entity.category) for entity in concept.entities]
