"""A concept's clues as a forget set."""

import json

import pytest

from monitor.stimuli.concept_pairs import concept_pairs
from monitor.stimuli.concepts import CONCEPTS, ConceptSet, Context, Entity, load_concept_sets
from monitor.stimuli.forget_set import load_forget_set


@pytest.mark.filterwarnings("ignore:.*anonymisation leaves")
@pytest.mark.parametrize("name", CONCEPTS)
def test_every_clue_of_a_bundled_concept_is_a_pair_that_loads(name, tmp_path):
    sets = load_concept_sets((name, "random"))
    records = concept_pairs(sets[name], [sets["random"]])
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    forget_set = load_forget_set(file)
    assert len(forget_set.split("forget")) == len(set(sets[name].clues))
    assert {pair.answer for pair in forget_set.split("forget")} == {entity.name for entity in sets[name].entities}
    assert {pair.answer for pair in forget_set.split("retain")} == {e.name for e in sets["random"].entities}
    for pair in forget_set.pairs:
        assert pair.answer.casefold() not in pair.question.casefold().split(), pair


def test_what_makes_no_pairs_is_refused():
    animals = load_concept_sets(("animals",))["animals"]
    with pytest.raises(ValueError, match="holds 'animals', which is there already"):
        concept_pairs(animals, [animals])
    with pytest.raises(ValueError, match="`retain` must be a sequence of ConceptSets, got one ConceptSet"):
        concept_pairs(animals, animals)
    with pytest.raises(ValueError, match="`forget` must be a ConceptSet .*got str"):
        concept_pairs("animals")
    mute = ConceptSet("mute", tuple(Entity(f"e{i}", "c", (f"e{i}",), (Context(f"It is {i} the", 0),)) for i in (1, 2)))
    with pytest.raises(ValueError, match="'mute' has no questions"):
        concept_pairs(mute)
