"""Instructions ask for no concept, and paired responses differ by one."""

from __future__ import annotations

import pytest

from monitor.stimuli.concepts import CONCEPTS, CONTROL, load_concept_sets, mentions
from monitor.stimuli.instructions import load_instructions
from monitor.stimuli.paired_responses import load_paired_responses

SETS = load_concept_sets((*CONCEPTS, CONTROL))
INSTRUCTIONS = load_instructions()


def named(text: str, concept: str) -> set[str]:
    return {entity.name for entity in SETS[concept].entities if mentions(text, entity.forms)}


def test_numbers_and_no_instruction_twice():
    assert len(INSTRUCTIONS.validation) == len(INSTRUCTIONS.test) == 5 and len(INSTRUCTIONS.norms) >= 60
    everything = INSTRUCTIONS.validation + INSTRUCTIONS.test + INSTRUCTIONS.norms
    assert len(set(everything)) == len(everything)
    for text in everything:
        assert text == " ".join(text.split()) and text.endswith((".", "?")) and text[0].isupper()


@pytest.mark.parametrize("concept", SETS)
def test_instructions_mention_no_entity_and_no_concept(concept):
    words = [concept, concept.removesuffix("s"), concept.removesuffix("ies") + "y"]
    for text in INSTRUCTIONS.validation + INSTRUCTIONS.test + INSTRUCTIONS.norms:
        assert not named(text, concept), text
        assert not mentions(text, words), text


@pytest.mark.parametrize("concept", CONCEPTS)
def test_the_positive_response_has_the_concept_and_the_negative_has_not(concept):
    pairs = load_paired_responses(concept)
    assert len(pairs) >= 12
    assert len({pair.instruction for pair in pairs}) == len(pairs)
    covered = set()
    for pair in pairs:
        assert not named(pair.instruction, concept) and not named(pair.negative, concept), pair
        (entity,) = named(pair.positive, concept)
        covered.add(entity)
    assert len(covered) == min(len(pairs), len(SETS[concept].entities)), "an entity again while others are left"


@pytest.mark.parametrize("concept", CONCEPTS)
def test_the_two_responses_are_one_sentence_and_alike_otherwise(concept):
    for pair in load_paired_responses(concept):
        for text in (pair.positive, pair.negative):
            assert text.endswith(".") and text.count(".") == 1, text
        first, second = pair.positive.split(), pair.negative.split()
        shared = set(first) & set(second)
        assert len(shared) >= 0.4 * len(set(first)) and abs(len(first) - len(second)) <= 4, pair


def test_training_instructions_are_not_those_that_are_tested():
    tested = {*INSTRUCTIONS.validation, *INSTRUCTIONS.test, *INSTRUCTIONS.norms}
    assert not tested & {pair.instruction for concept in CONCEPTS for pair in load_paired_responses(concept)}


def test_a_concept_without_pairs_is_refused():
    with pytest.raises(ValueError, match="animals, countries, .*got 'random'"):
        load_paired_responses("random")
