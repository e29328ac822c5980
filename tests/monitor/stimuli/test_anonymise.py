from __future__ import annotations

import random

import pytest

from monitor.stimuli.anonymise import anonymise, find_entities

TABLE = {
    "Harry Potter": ["Adrian Hale", "Oscar Lund"],
    "Harry": ["Adrian", "Oscar"],
    "Potter": ["Hale", "Lund"],
    "Marauder's Map": ["Drifter's Chart", "Tinkerer's Globe"],
    "muggle": ["tessler", "falder"],
}


def test_longest_entity_wins_and_the_rest_stays():
    assert anonymise("Is Harry Potter Harry?", TABLE, 0) == "Is Adrian Hale Adrian?"
    assert anonymise("Is Harry Potter Harry?", TABLE, 1) == "Is Oscar Lund Oscar?"


def test_longest_first_holds_over_leftmost_first():
    table = {"Order of": ["x"], "of the Phoenix": ["y"]}
    assert anonymise("Order of the Phoenix", table, 0) == "Order y"


def test_whole_words_only():
    text = "Pottery by Potters, Harrys and _Harry; Potter-like"
    assert anonymise(text, TABLE, 0) == "Pottery by Potters, Harrys and _Harry; Hale-like"


@pytest.mark.parametrize("apostrophe", ["'", "’"])
def test_possessives_are_kept(apostrophe):
    assert anonymise(f"Harry{apostrophe}s owl", TABLE, 0) == f"Adrian{apostrophe}s owl"
    assert anonymise(f"the Marauder{apostrophe}s Map", TABLE, 0) == "the Drifter's Chart"


def test_white_space_in_an_entity_is_any_white_space():
    assert anonymise("Harry\n  Potter's", TABLE, 0) == "Adrian Hale's"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("HARRY POTTER", "ADRIAN HALE"),
        ("harry potter", "adrian hale"),
        ("hArRy", "Adrian"),
        ("Muggle", "Tessler"),
        ("MUGGLE", "TESSLER"),
        ("muggle", "tessler"),
    ],
)
def test_case_follows_the_text(text, expected):
    assert anonymise(text, TABLE, 0) == expected


def test_an_entity_in_capitals_does_not_turn_its_substitute_into_capitals():
    assert anonymise("the BBC", {"BBC": ["Rundfunk"]}, 0) == "the Rundfunk"
    assert anonymise("agent M says", {"M": ["Bo"]}, 0) == "agent Bo says"


def test_a_substitute_is_never_replaced_again():
    swap = {"Ron": ["Harry"], "Harry": ["Ron"]}
    assert anonymise("Ron and Harry", swap, 0) == "Harry and Ron"


def test_regular_expression_characters_are_letters_here():
    table = {"J.K. Rowling": ["M.T. Falk"], "C++ (old)": ["D"], "a\\1": ["b\\g<0>"]}
    assert anonymise("JxK. Rowling, J.K. Rowling, C++ (old), a\\1", table, 0) == "JxK. Rowling, M.T. Falk, D, b\\g<0>"


def test_unicode_words():
    table = {"Émile": ["Kurt"], "José": ["Hans"], "Zoe": ["Ada"], "राम": ["क"], "Ольга": ["Вера"]}
    assert anonymise("émile, ÉMILE, Émilée", table, 0) == "kurt, KURT, Émilée"
    assert anonymise("Jose\u0301 came", table, 0) == "Hans came"  # decomposed text, composed entity
    assert anonymise("Zoe\u0308", table, 0) == "Zoë"  # the accent continues the word: not Zoe
    assert anonymise("रामा राम", table, 0) == "रामा क"  # so does a vowel sign
    assert anonymise("Ольга и Ольгам", table, 0) == "Вера и Ольгам"


def test_scripts_without_spaces_have_no_whole_words_to_respect():
    assert anonymise("哈利在学校", {"哈利": ["小明"]}, 0) == "小明在学校"


def test_text_without_entities_and_empty_table():
    assert anonymise("Who is Ada?", TABLE, 0) == "Who is Ada?"
    assert anonymise("Who is Harry?", {}, 0) == "Who is Harry?"
    assert anonymise("", TABLE, 0) == ""


@pytest.mark.parametrize("variant", [2, -1])
def test_a_variant_that_is_not_there_is_an_error(variant):
    with pytest.raises(ValueError, match="variant must be between 0 and 1.*'Harry'"):
        anonymise("Harry", TABLE, variant)


def test_empty_entity_is_an_error():
    with pytest.raises(ValueError, match="an entity must hold text"):
        find_entities("Harry", [" "])


def random_case(seed: int) -> tuple[str, dict[str, list[str]]]:
    """A text of words and a table of runs of such words."""
    rng = random.Random(seed)
    words = ["ab", "abc", "Bc", "CA", "d'e", "é", "Zz"]
    entities = {" ".join(rng.choices(words, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 5))}
    # No two entities may differ in case only; substitutes use letters that no word has.
    unique = {entity.casefold(): entity for entity in sorted(entities)}.values()
    table = {entity: [f"Q{i}v{k}" for k in range(3)] for i, entity in enumerate(unique)}
    text = rng.choices(words + [word.upper() for word in words], k=rng.randint(0, 12))
    return " ".join(text), table


@pytest.mark.parametrize("seed", range(200))
def test_properties_on_random_texts(seed):
    text, table = random_case(seed)
    spans = find_entities(text, table)
    # Spans are sorted, apart, whole words, and what they say they are.
    end = -1
    for start, stop, entity in spans:
        assert text[start:stop].casefold() == entity.casefold()
        assert end < start
        assert text[:start][-1:] in ("", " ") and text[stop:][:1] in ("", " ")
        end = stop
    outputs = [anonymise(text, table, k) for k in range(3)]
    for k, output in enumerate(outputs):
        assert find_entities(output, table) == []  # nothing is left, and a second pass changes nothing
        assert anonymise(output, table, k) == output
        # Undoing each substitute gives the text back, up to case: nothing else was touched.
        undone = output
        for entity, substitutes in table.items():
            for written in (substitutes[k], substitutes[k].upper(), substitutes[k].lower()):
                undone = " ".join(entity if word == written else word for word in undone.split(" "))
        assert undone.casefold() == text.casefold()
    assert len(set(outputs)) == (3 if spans else 1)
    # The order of the table does not matter.
    assert anonymise(text, dict(reversed(table.items())), 0) == outputs[0]
