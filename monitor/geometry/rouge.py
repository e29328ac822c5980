"""ROUGE-L: how much of an answer's word sequence a text says, by the longest common subsequence."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RougeL(NamedTuple):
    """Scores of n texts; three Tensors of shape (n,), float64, on the CPU, in [0, 1]; higher means more is said."""

    precision: Tensor
    recall: Tensor
    f1: Tensor


def rouge_l(candidates: Sequence[str], references: Sequence[str]) -> Tensor:
    """ROUGE-L F1 of each candidate against its reference.

    Parameters
    ----------
    candidates, references : sequence of n str
        What was said, and what was to be said.

    Returns
    -------
    Tensor of shape (n,), float64, on the CPU
        In [0, 1]: 1 for the same words in the same order, 0 for no word in common or nothing said.

    Raises
    ------
    ValueError
        If the two differ in length or are single strings, or if a reference has no word: nothing could match it.

    Notes
    -----
    With LCS the length of the longest common subsequence of words (Lin 2004, "ROUGE: a package for automatic
    evaluation of summaries", Sec. 3.1, eqs. 2-4 at β = 1): P = LCS / |candidate|, R = LCS / |reference|,
    F = 2PR / (P + R) = 2 LCS / (|candidate| + |reference|), which is symmetric.

    Words are runs of letters, digits and the marks that belong to letters, lower-cased, after Unicode NFC; not
    stemmed. For ASCII texts these are the words of the ``rouge_score`` package (its default, no stemmer). That one
    takes every other letter for a space: it breaks "Dvořák" in two and finds no word in Cyrillic. A script that puts
    no spaces between words (Chinese, Thai) gives one word a run, so its scores are close to all or nothing.
    """
    return rouge_l_scores(candidates, references).f1


def rouge_l_scores(candidates: Sequence[str], references: Sequence[str]) -> RougeL:
    """ROUGE-L precision, recall and F1; parameters, errors and definitions as in :func:`rouge_l`."""
    for name, texts in (("candidates", candidates), ("references", references)):
        if isinstance(texts, str):
            raise ValueError(f"`{name}` must be a sequence of texts, got one string: put it in a list")
    if len(candidates) != len(references):
        raise ValueError(
            f"`candidates` and `references` must be as many, got {len(candidates)} and {len(references)}: give each "
            "candidate its reference"
        )
    wanted = [words(text) for text in references]
    for i, (text, reference) in enumerate(zip(references, wanted, strict=True)):
        if not reference:
            raise ValueError(
                f"`references` must hold words, got {text!r} at {i}: ROUGE-L compares words, and no text has one in "
                "common with it; leave it out"
            )
    counts = []
    for candidate, reference in zip(map(words, candidates), wanted, strict=True):
        counts.append((_lcs_length(candidate, reference), len(candidate), len(reference)))
    common, n_candidate, n_reference = torch.tensor(counts, dtype=torch.float64).reshape(-1, 3).unbind(1)
    # No words said: nothing in common either, and 0 / 1 is the 0 it is defined to be.
    precision = common / n_candidate.clamp(min=1)
    return RougeL(precision, common / n_reference, 2 * common / (n_candidate + n_reference))


def words(text: str) -> list[str]:
    """The words that ROUGE-L compares: lower-cased runs of letters, digits and their combining marks."""
    text = unicodedata.normalize("NFC", text).lower()
    # A vowel sign of Devanagari or a Hebrew point is no letter by itself, and yet no end of a word.
    return "".join(c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text).split()


def _lcs_length(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, a row of the table at a time in the bits of an integer.

    Bit j of `row` is 0 where the table's row rises from column j to j + 1 (Hyyrö 2004, "Bit-parallel LCS-length
    computation revisited").
    """
    places: dict[str, int] = {}
    for j, word in enumerate(b):
        places[word] = places.get(word, 0) | 1 << j
    full = (1 << len(b)) - 1
    row = full
    for word in a:
        matched = row & places.get(word, 0)
        row = (row + matched | row - matched) & full
    return len(b) - row.bit_count()
