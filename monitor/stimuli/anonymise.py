"""Anonymisation: every named entity of a text replaced by an invented one, without chance and without a model.

An entity table gives each entity K substitutes. Variant k takes the k-th substitute of *every* entity, so that each
variant tells of one self-consistent world: if "Harry Potter" is "Martin Hale" there, "Potter" alone is "Hale".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

# Scripts written without spaces between words: there a "whole word" cannot be told from the neighbouring characters.
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff]")


def anonymise(text: str, entities: Mapping[str, Sequence[str]], variant: int) -> str:
    """The text with every entity replaced by its substitute number `variant`.

    Parameters
    ----------
    text : str
        Brought to Unicode NFC first, as the entities are.
    entities : mapping of str to sequence of str
        Entity to substitutes, all sequences longer than `variant`.
    variant : int, >= 0
        Which substitute.

    Returns
    -------
    str
        Equal to the (NFC) text if it names no entity.

    Notes
    -----
    Longest entity first, case-insensitive, whole words; spans once taken are not searched again, so a substitute is
    never replaced in its turn. Case follows the text: CAPITALS give capitals, a lower-cased entity a lower-cased
    substitute, a capital at the start of a lower-case entity a capital.

    Source: arXiv:2611.05272, appendix B.2, procedure 3.
    """
    text = unicodedata.normalize("NFC", text)
    pieces, end = [], 0
    for start, stop, entity in find_entities(text, entities):
        substitutes = entities[entity]
        if not 0 <= variant < len(substitutes):
            raise ValueError(
                f"variant must be between 0 and {len(substitutes) - 1}, the substitutes of {entity!r}, got {variant}: "
                "give the entity more substitutes or ask for fewer variants"
            )
        pieces += [text[end:start], _in_the_case_of(text[start:stop], entity, substitutes[variant])]
        end = stop
    return "".join([*pieces, text[end:]])


def find_entities(text: str, entities: Iterable[str]) -> list[tuple[int, int, str]]:
    """Where a text names entities: (start, stop, entity), sorted by start, no two overlapping.

    `text` is taken as it is (NFC expected). Of two overlapping entities the longer is found, of two equally long ones
    the first to occur.
    """
    taken: list[tuple[int, int, str]] = []
    for entity, pattern in _longest_first(tuple(entities)):
        for match in pattern.finditer(text):
            start, stop = match.span()
            apart = all(stop <= other_start or other_stop <= start for other_start, other_stop, _ in taken)
            if apart and _is_whole(text, start, stop):
                taken.append((start, stop, entity))
    return sorted(taken)


@lru_cache(maxsize=16)
def _longest_first(entities: tuple[str, ...]) -> list[tuple[str, re.Pattern[str]]]:
    return [(entity, _pattern(entity)) for entity in sorted(entities, key=lambda e: (-len(e), e))]


def _pattern(entity: str) -> re.Pattern[str]:
    words = [re.escape(word) for word in unicodedata.normalize("NFC", entity).split()]
    if not words:
        raise ValueError(f"an entity must hold text, got {entity!r}: remove it from the entity table")
    # Any white space between the words, a straight or a typographic apostrophe in them.
    return re.compile(re.sub("['’]", "['’]", r"\s+".join(words)), re.IGNORECASE)


def _is_whole(text: str, start: int, stop: int) -> bool:
    """Whether no word runs over an edge of the span: "Potter" is whole in "Potter's", not in "Pottery"."""
    for i in (start, stop):  # the edge lies between text[i - 1] and text[i]
        if 0 < i < len(text) and _in_word(text[i - 1]) and _in_word(text[i]):
            if not (_UNSPACED.match(text[i - 1]) and _UNSPACED.match(text[i])):
                return False
    return True


def _in_word(char: str) -> bool:
    # Marks too: a combining accent or an Indic vowel sign continues its word, which \b of `re` does not know.
    return char.isalnum() or char == "_" or unicodedata.category(char).startswith("M")


def _in_the_case_of(found: str, entity: str, substitute: str) -> str:
    if sum(char.isalpha() for char in found) > 1 and found.isupper() and not entity.isupper():
        return substitute.upper()
    if found.islower() and not entity.islower():
        return substitute.lower()
    if entity.islower() and found[:1].isupper():
        return substitute[:1].upper() + substitute[1:]
    return substitute
