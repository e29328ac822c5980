"""Diversity of mentions: exact at the extremes, against scipy, and indifferent to their order."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from planted_concepts import ANIMALS, DAYS, UNEVEN, YEARS, once_each
from scipy import stats

from monitor.geometry.diversity import OTHER, diversity, unseen_instances


def say(concept, *names):
    category = {entity.name: entity.category for entity in concept.entities}
    return [(name, category.get(name, OTHER)) for name in names]


@pytest.mark.parametrize("concept", [ANIMALS, DAYS, YEARS])
def test_every_entity_once_is_perfectly_diverse(concept):
    score = diversity(once_each(concept), concept)
    assert score.entity == pytest.approx(1.0) and score.category == pytest.approx(1.0)
    assert score.total == pytest.approx(2.0)
    # And so is every entity n times, as long as no other could be named.
    assert diversity(once_each(concept) * 5, concept).total == pytest.approx(2.0)


def test_uneven_categories_have_an_exact_maximum_below_one():
    score = diversity(once_each(UNEVEN), UNEVEN)
    assert score.entity == pytest.approx(1.0)
    assert score.category == pytest.approx(stats.entropy([6, 1, 1]) / math.log(3))


@pytest.mark.parametrize("concept", [ANIMALS, DAYS, YEARS])
@pytest.mark.parametrize("n", [0, 1, 30])
def test_one_entity_however_often_is_not_diverse(concept, n):
    assert diversity(once_each(concept)[:1] * n, concept).total == 0.0


def test_entities_of_one_category_are_diverse_as_entities_only():
    score = diversity(say(ANIMALS, "bird0", "bird1", "bird2", "bird3"), ANIMALS)
    assert (score.entity, score.category) == (pytest.approx(1.0), 0.0)


def test_entropies_are_scipys_over_what_they_are_divided_by():
    names = ["mammal0"] * 5 + ["bird0"] * 2 + ["bird1", "fish0"]
    score = diversity(say(ANIMALS, *names), ANIMALS)
    assert score.entity == pytest.approx(stats.entropy([5, 2, 1, 1]) / math.log(9))  # 9 mentions, 12 entities
    assert score.category == pytest.approx(stats.entropy([5, 3, 1]) / math.log(3))
    score = diversity(say(ANIMALS, *names * 4), ANIMALS)
    assert score.entity == pytest.approx(stats.entropy([5, 2, 1, 1]) / math.log(12))  # 36 mentions, 12 entities
    score = diversity(say(ANIMALS, *names * 4), ANIMALS, other=True)
    assert score.entity == pytest.approx(stats.entropy([5, 2, 1, 1]) / math.log(36))
    assert score.category == pytest.approx(stats.entropy([5, 3, 1]) / math.log(4))
    score = diversity(say(DAYS, "day0", "day0", "day3"), DAYS)
    assert score.entity == score.category == pytest.approx(stats.entropy([2, 1]) / math.log(7))


def test_a_closed_concept_has_no_others_and_an_open_one_may():
    said = say(ANIMALS, "dragon", "bird0")
    with pytest.raises(ValueError, match="other=True"):
        diversity(said, ANIMALS)
    assert diversity(said, ANIMALS, other=True).category == pytest.approx(math.log(2) / math.log(4))
    days = once_each(DAYS)
    assert diversity([*days, ("funday", OTHER)], DAYS, other=True) == diversity(days, DAYS)
    # Years of no category: one that is not listed is as good as one that is.
    years = once_each(YEARS)
    more = diversity([*years, ("1850", OTHER), ("1860", OTHER)], YEARS, other=True)
    assert (more.entity, more.category) == (pytest.approx(1.0), more.entity)
    with pytest.raises(ValueError, match="insect"):
        diversity([("gnat", "insect")], ANIMALS, other=True)


def test_more_even_is_more_diverse_and_order_does_not_matter():
    totals = [
        diversity(say(DAYS, *["day0"] * (12 - k), *["day1"] * k), DAYS).total for k in range(7)
    ]  # fmt: skip
    assert totals == sorted(totals) and len(set(totals)) == 7
    said = once_each(ANIMALS) + once_each(ANIMALS)[:5]
    score = diversity(said, ANIMALS)
    random.Random(1).shuffle(said)
    assert dataclasses.astuple(diversity(said, ANIMALS)) == pytest.approx(dataclasses.astuple(score))


def test_unseen_instances_are_mentions_and_entities():
    said = say(ANIMALS, "bird0", "dragon", "fish1", "dragon", "mammal0")
    unseen = unseen_instances(said, ["bird0", "mammal0"])
    assert (unseen.mentions, unseen.entities) == (3, ("dragon", "fish1"))
    assert unseen_instances(said, [name for name, _ in said]).mentions == 0
    with pytest.raises(ValueError, match="one string"):
        unseen_instances(said, "bird0")
