"""How much of a text says the same over again."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")


def word_spans(text: str) -> list[tuple[str, int, int]]:
    """The words of a text, lower-cased, with where they begin and end; "lion's" and "well-known" are one word each."""
    return [(match.group().lower(), match.start(), match.end()) for match in _WORD.finditer(text)]


def looped(words: Sequence[str]) -> list[bool]:
    """Which words stand in a loop: the same words over and over without anything between.

    A loop is a word said three times in a row, a pair said three times in a row, or three or more words said twice in
    a row; all its words stand in it, the first round too, and a last round that breaks off. English says a word twice
    ("that that is"), and seldom more.
    """
    inside = [False] * len(words)
    for period in range(1, len(words) // 2 + 1):
        shortest = (3 if period <= 2 else 2) * period
        start = 0
        for i in range(len(words) - period + 1):
            if i + period < len(words) and words[i] == words[i + period]:
                continue
            # words[start : i + period] repeats itself with this period.
            if i + period - start >= shortest:
                inside[start : i + period] = [True] * (i + period - start)
            start = i + 1
    return inside


def repetition(words: Sequence[str]) -> float:
    """Share of a text that is repetition, in [0, 1]; higher: more of it.

    The larger of the share of words in a loop (`looped`) and the share of trigrams that the text has had before, 1 −
    distinct / all (Li et al., arXiv 1510.03055, count distinct n-grams so); 0 for no words.
    """
    if not words:
        return 0.0
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    again = 1 - len(set(trigrams)) / len(trigrams) if trigrams else 0.0
    return max(sum(looped(words)) / len(words), again)
