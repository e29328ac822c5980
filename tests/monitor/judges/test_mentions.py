"""Word lists: whole words, inflection, case where it matters, the longest of overlapping mentions, loops."""

from __future__ import annotations

import pytest

from monitor.judges.mentions import MentionFinder, named, plurals
from monitor.judges.repetition import looped, repetition, word_spans
from monitor.stimuli.concepts import ConceptSet, Context, Entity


def concept_of(*entities: tuple[str, ...] | str) -> ConceptSet:
    """Entities by their forms; the category is the first letter."""
    forms = [(entity,) if isinstance(entity, str) else entity for entity in entities]
    entities = [Entity(f[0], f[0][0], f, (Context(f"It, {n}, is the", 0),)) for n, f in enumerate(forms)]
    return ConceptSet("things", tuple(entities))


def found(text: str, *entities: tuple[str, ...] | str) -> list[str]:
    return [mention.entity for mention in MentionFinder(concept_of(*entities, "zzz")).find(text)]


@pytest.mark.parametrize(
    ("text", "entity"),
    [
        ("two lions", "lion"),
        ("the foxes", "fox"),
        ("daisies", "daisy"),
        ("donkeys", "donkey"),
        ("the wolves and the leaves", "wolf"),
        ("knives", "knife"),
        ("giraffes", "giraffe"),
        ("tomatoes", "tomato"),
        ("flamingos", "flamingo"),
        ("Ostriches run", "ostrich"),
        ("three buses", "bus"),
        ("on Mondays", "Monday"),
        ("both Germanys", "Germany"),
        ("the lion's mane", "lion"),
        ("the lion\u2019s mane", "lion"),
        ("the lions' den", "lion"),
        ("LION!", "lion"),
        ("in egypt", "Egypt"),
        ("A polar-bear", "polar bear"),
        ("a polar\n bear", "polar bear"),
        ("In 1990, rain", "1990"),
        ("since 1990.", "1990"),
        ("Cote d'Ivoire", "Cote d'Ivoire"),
    ],
)
def test_a_mention_is_found(text, entity):
    assert found(text, entity) == [entity]


@pytest.mark.parametrize(
    ("text", "entity"),
    [
        ("a stallion of antelopes, and dandelions", "lion"),
        ("a category", "cat"),
        ("the 1990s", "1990"),
        ("the 1990's", "1990"),
        ("1,990 and 21990 and 3.1990", "1990"),
        ("fine china on the table", "China"),
        ("tell us", "US"),
        ("he sat down", "Sat"),
        ("Turkey borders Greece", "turkey"),
        ("", "lion"),
    ],
)
def test_what_is_no_mention_is_not_found(text, entity):
    assert found(text, entity) == []


def test_case_counts_where_it_makes_another_word():
    assert found("China, CHINA and the US in May", "China", "US") == ["China", "China", "US"]
    assert found("turkeys gobble", "turkey") == ["turkey"]


def test_irregular_plurals_and_synonyms_come_by_the_forms():
    assert found("geese and a gander", ("goose", "geese", "gander")) == ["goose", "goose"]


def test_the_longest_of_overlapping_mentions_counts():
    assert found("a sea star", "star", "sea star") == ["sea star"]
    assert found("a star, a sea star", "star", "sea star") == ["star", "sea star"]
    # Neither from the left nor the shorter first: the longer one takes the shared word.
    assert found("sea lion tamarin", "sea lion", "lion tamarin") == ["lion tamarin"]
    assert found("sea lion tamarin", "sea lion", "lion tamarin", "sea") == ["sea", "lion tamarin"]


def test_of_years_those_that_are_not_listed_count_as_others():
    years = MentionFinder(concept_of("1990", "1941"))
    text = "In 1990 and 1995, not in the 1980s, 1,995 or 3000; in 2010."
    assert named(years.find(text)) == (("1990", "1"), ("1995", "other"), ("2010", "other"))
    assert years.names_others and not MentionFinder(concept_of("1990", "lion")).names_others
    assert found("In 1995", "1990", "lion") == []


def test_a_listed_form_beats_an_inflected_one():
    assert found("glasses", "glass", ("spectacles", "glasses")) == ["spectacles"]


def test_positions_are_the_mentions_and_each_entity_is_named_once():
    text = "Lions hunt; a lion sleeps by the foxes."
    mentions = MentionFinder(concept_of("lion", "fox")).find(text)
    assert [text[m.start : m.end] for m in mentions] == ["Lions", "lion", "foxes"]
    assert named(mentions) == (("lion", "l"), ("fox", "f"))


def test_plurals_of_what_is_no_word_are_none():
    assert plurals("1990") == () and plurals("U.S.") == ()


def words(text):
    return [word for word, _, _ in word_spans(text)]


def test_words_keep_genitives_and_hyphens_together():
    assert words("The lion's well-known 'den', in 1990.") == ["the", "lion's", "well-known", "den", "in", "1990"]


@pytest.mark.parametrize(
    ("text", "in_loop"),
    [
        ("dog dog dog", "111"),
        ("a dog dog dog barks", "01110"),
        ("that that is", "000"),
        ("a dog a dog", "0000"),
        ("a dog a dog a dog a", "1111111"),  # the round that breaks off, too
        ("I like dogs. I like dogs. But cats", "11111100"),
        ("I like dogs and you like dogs and cats", "000000000"),
        ("so very very very cold and dog dog dog", "011100111"),
        ("", ""),
    ],
)
def test_loops(text, in_loop):
    assert "".join(str(int(inside)) for inside in looped(words(text))) == in_loop


def test_loops_are_what_a_check_of_every_stretch_finds():
    import random

    for seed in range(200):
        text = random.Random(seed).choices("ab", k=12)
        expected = [False] * 12
        for period in range(1, 7):
            for start in range(12):
                for end in range(start + (3 if period < 3 else 2) * period, 13):
                    if all(text[i] == text[i + period] for i in range(start, end - period)):
                        expected[start:end] = [True] * (end - start)
        assert looped(text) == expected, text


def test_repetition_is_none_in_english_and_all_in_a_loop():
    english = "The lion is the king of beasts, and the lion cub is a beast of the savanna."
    assert repetition(words(english)) == 0.0
    assert repetition(words("the dog " * 8)) == 1.0
    assert repetition([]) == 0.0
    # No loop, as something always comes between, but trigrams that were there before.
    text = words("the cat sat here, the cat sat there, the cat sat now, the cat sat")
    assert not any(looped(text)) and repetition(text) == pytest.approx(3 / 13)
