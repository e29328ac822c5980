"""Splits cover a concept without overlap, keep what they promise to keep, and come again from their seed."""

from __future__ import annotations

import random

import pytest
import torch

from monitor.stimuli.concept_splits import category_splits, entity_splits, value_splits
from monitor.stimuli.concepts import CONCEPTS, CONTROL, ConceptSet, Context, Entity, load_concept_sets

SETS = load_concept_sets((*CONCEPTS, CONTROL))
HIERARCHICAL = ("animals", "countries", "vehicles", "plants")
CASES = [
    *((splits, name) for splits in (category_splits, entity_splits) for name in HIERARCHICAL),
    *((value_splits, name) for name in ("days", "years", CONTROL)),
]


def concept(*sizes: int, ordered: bool = False) -> ConceptSet:
    """Categories of these sizes."""
    made = []
    for k, size in enumerate(sizes):
        for i in range(size):
            name = f"e{k}_{i}"
            made.append(Entity(name, f"c{k}", (name,), (Context(f"Number {i} of {k} is", 0),)))
    return ConceptSet("made up", tuple(made), ordered)


@pytest.mark.parametrize(("splits", "name"), CASES)
def test_seen_and_held_out_are_disjoint_and_all(splits, name):
    found = splits(SETS[name])
    assert len(found) == len({split.heldout for split in found}) == 5
    for split in found:
        assert sorted(split.seen + split.heldout) == list(range(len(SETS[name].entities)))
        assert split.seen and split.heldout
        assert list(split.seen) == sorted(split.seen) and list(split.heldout) == sorted(split.heldout)


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_a_category_is_held_out_whole_and_each_at_most_once(name):
    entities = SETS[name].entities
    held = []
    for split in category_splits(SETS[name], n=6):
        assert split.kind == "category"
        (category,) = {entities[i].category for i in split.heldout}
        assert category not in {entities[i].category for i in split.seen}
        held.append(category)
    assert sorted(held) == sorted(SETS[name].categories)


@pytest.mark.parametrize("name", HIERARCHICAL)
def test_entities_are_held_out_of_all_categories_and_none_is_emptied(name):
    entities = SETS[name].entities
    for split in entity_splits(SETS[name], n=20):
        assert split.kind == "entity" and len(split.heldout) == round(0.2 * len(entities))
        assert {entities[i].category for i in split.seen} == set(SETS[name].categories)
        counts = [sum(entities[i].category == c for i in split.heldout) for c in SETS[name].categories]
        assert set(counts) <= {1, 2}


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 3), (1, 9), (30, 2)])
def test_small_categories_are_never_emptied(sizes):
    made = concept(*sizes)
    for seed in range(20):
        for split in entity_splits(made, n=2, seed=seed):
            assert {made.entities[i].category for i in split.seen} == set(made.categories)


def test_every_entity_can_be_held_out():
    for splits, name in ((entity_splits, "animals"), (value_splits, "years")):
        held = {i for split in splits(SETS[name], n=60) for i in split.heldout}
        assert held == set(range(len(SETS[name].entities)))


def test_a_day_at_a_time():
    assert {len(split.heldout) for split in value_splits(SETS["days"], n=7)} == {1}


@pytest.mark.parametrize(("splits", "name"), CASES)
def test_the_seed_decides_and_global_generators_do_not_move(splits, name):
    before, torch_before = random.getstate(), torch.random.get_rng_state()
    first = splits(SETS[name], seed=3)
    assert random.getstate() == before and torch.equal(torch.random.get_rng_state(), torch_before)
    random.seed(99)
    assert splits(SETS[name], seed=3) == first
    assert any(splits(SETS[name], seed=seed) != first for seed in range(4, 8))


def test_an_ordered_concept_with_categories_has_all_kinds():
    decades = concept(5, 5, ordered=True)
    assert {
        split.kind for splits in (category_splits, entity_splits, value_splits) for split in splits(decades, n=1)
    } == {
        "category",
        "entity",
        "value",
    }


@pytest.mark.parametrize(
    ("splits", "made", "n", "message"),
    [
        (category_splits, SETS["animals"], 7, "number of categories of 'animals', 6, got 7"),
        (category_splits, SETS["days"], 5, "use value_splits"),
        (entity_splits, SETS["years"], 5, "use value_splits"),
        (entity_splits, concept(9), 5, "at least two categories"),
        (value_splits, SETS["animals"], 5, "use category_splits or entity_splits"),
        (value_splits, SETS["days"], 8, "entities 7 were found, got n=8"),
        (entity_splits, concept(2, 2), 5, "entities 4 were found, got n=5"),
        (entity_splits, SETS["animals"], 0, "n must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_split_is_refused(splits, made, n, message):
    with pytest.raises(ValueError, match=message):
        splits(made, n=n)
