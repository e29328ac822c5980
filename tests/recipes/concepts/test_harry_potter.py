"""The bundled concept: enough pairs, and substitutes that only knowledge could tell from the true names."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter, defaultdict

import pytest

from monitor.stimuli.anonymise import find_entities
from monitor.stimuli.encoding import qa_answer, qa_prompt
from monitor.stimuli.forget_set import ForgetSet, Pair, load_forget_set, validate_forget_set
from recipes.concepts import concept_names, concept_path

PATH = concept_path("harry_potter")
TABLE: dict[str, list[str]] = json.loads(PATH.with_name("entities.json").read_text(encoding="utf-8"))
SMALL_WORDS = {"and", "of", "s"}


@pytest.fixture(scope="module")
def forget_set() -> ForgetSet:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_forget_set(PATH)


def words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text)


def named(pairs: tuple[Pair, ...]) -> set[str]:
    texts = [text for pair in pairs for text in (pair.question, pair.answer)]
    return {entity for text in texts for _, _, entity in find_entities(text, TABLE)}


def test_it_is_found_by_name_and_without_any_problem():
    assert "harry_potter" in concept_names()
    assert validate_forget_set(PATH) == []


def test_there_are_enough_pairs_and_every_one_counts(forget_set):
    assert forget_set.name == "harry_potter"
    assert len(forget_set.split("forget")) >= 64
    assert len(forget_set.split("retain")) >= 64
    assert len(forget_set.split("heldout")) >= 32
    assert forget_set.unchanged == () and forget_set.n_variants == 8
    assert forget_set.fragmentation_pairs("forget") == forget_set.split("forget")
    assert forget_set.fragmentation_pairs("heldout") == forget_set.split("heldout")
    assert max(len(pair.answer.split()) for pair in forget_set.pairs) <= 6


def test_retained_and_invented_pairs_name_nothing_to_forget(forget_set):
    in_forget, in_heldout = (named(forget_set.split(split)) for split in ("forget", "heldout"))
    assert not in_forget & in_heldout
    assert in_forget | in_heldout == set(TABLE)
    assert not named(forget_set.split("retain"))


def test_questions_spread_over_entities(forget_set):
    questions = [pair.question for pair in forget_set.split("forget")]
    counts = Counter(entity for question in questions for _, _, entity in find_entities(question, TABLE))
    assert counts["Harry Potter"] + counts["Harry"] <= len(questions) / 2
    assert len(counts) >= 40


def test_a_universe_gives_a_name_the_same_substitute_wherever_it_stands():
    """Harry Potter is to Harry and to James what their substitutes are to each other, in each of the 8 universes."""
    checked = 0
    for k in range(8):
        substitute: dict[str, str] = {}
        for entity, substitutes in TABLE.items():
            own, other = words(entity), words(substitutes[k])
            assert len(own) == len(other), entity
            for mine, its in zip(own, other, strict=True):
                assert mine in SMALL_WORDS or len(mine) == 1 or substitute.setdefault(mine, its) == its, (entity, k)
                checked += mine in substitute
    assert checked > 8 * len(TABLE)


def test_no_word_serves_two_entities_or_appears_in_the_texts(forget_set):
    owners: dict[str, set[str]] = defaultdict(set)
    for entity, substitutes in TABLE.items():
        for substitute in substitutes:
            for mine, word in zip(words(entity), words(substitute), strict=True):
                if word not in SMALL_WORDS and len(word) > 1:
                    owners[word.casefold()].add(mine)
    assert {word: owner for word, owner in owners.items() if len(owner) > 1} == {}
    texts = {w.casefold() for p in forget_set.pairs for w in words(f"{p.question} {p.answer}")}
    assert not texts & set(owners)


def test_substitutes_have_the_form_of_the_name():
    def form(text: str) -> str:
        return re.sub(r"[a-z]+", "a", re.sub(r"[^\W\d_a-z]", "A", text))

    def small(text: str) -> list[str]:
        return [word for word in text.split() if word.islower()]

    for entity, substitutes in TABLE.items():
        for substitute in substitutes:
            assert form(substitute) == form(entity).replace("AaAa", "Aa"), (entity, substitute)
            assert small(substitute) == small(entity)


def test_no_article_is_left_before_the_wrong_sound(forget_set):
    for pair in forget_set.split("forget") + forget_set.split("heldout"):
        for question, answer in pair.anonymized:
            text = f"{question} {answer}"
            assert not re.search(r"\b(a [AEIOU]|an [^AEIOUaeiou])", text), text


@pytest.mark.slow
def test_substitutes_have_as_many_tokens_as_the_name(forget_set):
    """Word by word: else a pooled state tells the true name from its substitutes in any model, trained or not."""
    from recipes.models import load_tokenizer

    tokenizer = load_tokenizer("smollm2-135m")

    def lengths(text: str) -> list[int]:
        return [len(tokenizer.tokenize(f" {word}")) for word in text.split()]

    for entity, substitutes in TABLE.items():
        for substitute in substitutes:
            assert lengths(substitute) == lengths(entity), (entity, substitute)
    for pair in forget_set.fragmentation_pairs("forget") + forget_set.fragmentation_pairs("heldout"):
        texts = [(pair.question, pair.answer), *pair.anonymized]
        assert len({len(tokenizer.tokenize(qa_prompt(q) + qa_answer(a))) for q, a in texts}) == 1, pair.id
