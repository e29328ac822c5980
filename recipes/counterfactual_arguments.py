"""Counterfactual sets named on the command line: bundled dimensions and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from monitor.stimuli.counterfactual import CounterfactualSet, counterfactual_sets_from_file
from monitor.stimuli.counterfactual_grid import DIMENSIONS, load_counterfactual_sets
from monitor.stimuli.pairs_file import closest

_ALL = "all"


def load_sets(names: str | Sequence[str]) -> dict[str, CounterfactualSet]:
    """The sets that command-line words name, in their order.

    Parameters
    ----------
    names : str or sequence of str
        Each a bundled dimension (``gender``, ``race``, ``religion``, ``age``), ``all`` for these four, a JSON Lines
        file, for all the dimensions that it holds (a file that names none is called by its stem), or ``NAME=FILE``,
        for its only dimension, called NAME, or, if it holds several, for the dimension NAME.

    Raises
    ------
    FileNotFoundError
        If a word is neither a bundled dimension nor a file; the closest is proposed.
    ValueError
        If there is no word, a name is there twice, a file is faulty, or ``NAME=FILE`` does not say which of several.
    """
    words = [names] if isinstance(names, str) else list(names)
    if not words:
        raise ValueError(f"expected at least one of {', '.join((*DIMENSIONS, _ALL))}, FILE or NAME=FILE, got none")
    sets: dict[str, CounterfactualSet] = {}
    source: dict[str, str] = {}
    for word in words:
        for name, stimuli in _of(word).items():
            if name in sets:
                first = "twice" if source[name] == word else f"by {source[name]!r} and by {word!r}"
                raise ValueError(f"{name!r} is named {first}: leave one out, or call a file's otherwise, NAME=FILE")
            sets[name], source[name] = stimuli, word
    return sets


def _of(word: str) -> dict[str, CounterfactualSet]:
    if word == _ALL:
        return load_counterfactual_sets()
    if word in DIMENSIONS:
        return load_counterfactual_sets([word])
    if Path(word).is_file():
        return counterfactual_sets_from_file(word)
    name, equals, file = (text.strip() for text in word.partition("="))
    if not equals:
        raise FileNotFoundError(
            f"a counterfactual set must be one of {', '.join((*DIMENSIONS, _ALL))}, or a file that exists, got {word!r}"
            f"{closest(word, (*DIMENSIONS, _ALL))}"
        )
    if not name or not file:
        raise ValueError(f"expected NAME=FILE, got {word!r}")
    return {name: _chosen(name, file)}


def _chosen(name: str, file: str) -> CounterfactualSet:
    if not Path(file).is_file():
        raise FileNotFoundError(f"{name}=FILE must name a file that exists, got {file!r}")
    found = counterfactual_sets_from_file(file)
    if len(found) > 1 and name not in found:
        raise ValueError(
            f"{file} holds {len(found)} dimensions, {', '.join(found)}, and {name!r} is none of them"
            f"{closest(name, found)}: name one, or give the file alone for all"
        )
    return found[name] if name in found else next(iter(found.values()))
