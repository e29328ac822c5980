"""Forget sets: question-answer pairs to forget, to retain and never seen, with their anonymised variants.

The file is JSONL, one pair a line::

    {"id": "forget-001", "question": "Who ...?", "answer": "...", "split": "forget"}

with ``split`` one of ``forget | retain | heldout``, and optionally ``id`` and ``anonymized``, a list of
``{"question": ..., "answer": ...}``, one a variant. Beside it an optional ``entities.json``, entity to list of
substitutes, from which missing variants are made.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from monitor.stimuli.pairs_check import check_pairs
from monitor.stimuli.pairs_file import MIN_SUBSTITUTES, SPLITS, PairsFile, Problem, closest, read_pairs_file

__all__ = ["SPLITS", "ForgetSet", "Pair", "Problem", "load_forget_set", "validate_forget_set"]


@dataclass(frozen=True)
class Pair:
    """A question, its answer, and the same pair told of invented entities, once a variant.

    anonymized : tuple of (question, answer); empty where there is nothing to anonymise.
    """

    id: str
    question: str
    answer: str
    split: str
    anonymized: tuple[tuple[str, str], ...] = ()

    @property
    def changed(self) -> bool:
        """Whether there are variants and every one differs from the pair."""
        return bool(self.anonymized) and (self.question, self.answer) not in self.anonymized


@dataclass(frozen=True)
class ForgetSet:
    """The pairs of one concept, in the file's order."""

    name: str
    pairs: tuple[Pair, ...]

    def split(self, name: str) -> tuple[Pair, ...]:
        """The pairs of ``"forget"``, ``"retain"`` or ``"heldout"``."""
        if name not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {name!r}{closest(name, SPLITS)}")
        return tuple(pair for pair in self.pairs if pair.split == name)

    def fragmentation_pairs(self, split: str = "forget") -> tuple[Pair, ...]:
        """The pairs of a split that anonymisation changes; each with `n_variants` variants."""
        return tuple(pair for pair in self.split(split) if pair.changed)

    @property
    def unchanged(self) -> tuple[str, ...]:
        """Ids of forget and held-out pairs that anonymisation leaves as they are: zero vectors in a difference.

        Retain pairs have nothing to anonymise and are not counted.
        """
        return tuple(pair.id for pair in self.pairs if pair.split != "retain" and not pair.changed)

    @property
    def n_variants(self) -> int:
        """K, the same for every pair that has variants; 0 if none has."""
        return max((len(pair.anonymized) for pair in self.pairs), default=0)


def load_forget_set(
    path: str | Path,
    *,
    variants: int = MIN_SUBSTITUTES,
    columns: Mapping[str, str] | None = None,
    entities: str | Path | None = None,
    name: str | None = None,
) -> ForgetSet:
    """Read a forget set and make the anonymised variants that it does not bring.

    Parameters
    ----------
    path : path
        JSONL, or a ``.json`` file holding a list of pairs or an object of such lists.
    variants : int, >= 1
        K, how many variants a pair gets. Of given variants the first K are taken; where a file gives fewer, all of its
        pairs have as many as it gives.
    columns : mapping, optional
        Our name to the file's, for other layouts: ``{"question": "prompt", "answer": "response"}``. Keys that are not
        mapped are then ignored. In an object of lists, split names map to the lists' names
        (``{"forget": "qa_eval_pairs"}``) and other lists are left out. A file that names no split is all to forget.
    entities : path, optional
        The entity table; by default ``entities.json`` beside the file, if there.
    name : str, optional
        By default the folder's name for ``pairs.jsonl``, else the file's stem.

    Raises
    ------
    FileNotFoundError
        If a file is not there.
    ValueError
        One error that lists everything wrong, each with its line.

    Warns
    -----
    UserWarning
        If anonymisation leaves pairs unchanged: they are in `ForgetSet.unchanged`, out of its `fragmentation_pairs`.

    Notes
    -----
    A variant given as a bare string is an anonymised *question*. Its answer comes from the column
    ``anonymized_answer`` if there is one mapped; else the k-th is the answer anonymised with the entity table's k-th
    substitutes; else, without a table, it is the answer as it stands.
    """
    file = _checked_file(path, variants, columns, entities)
    errors = [problem for problem in file.problems if problem.severity == "error"]
    if errors:
        shown = "\n".join(f"  {problem}" for problem in errors)
        raise ValueError(f"{path} is not a usable forget set; {len(errors)} error(s):\n{shown}")
    default_name = file.path.resolve().parent.name if file.path.name == "pairs.jsonl" else file.path.stem
    forget_set = ForgetSet(name or default_name, _pairs_of(file))
    unchanged = forget_set.unchanged
    if unchanged:
        ids = ", ".join(unchanged[:10]) + (", ..." if len(unchanged) > 10 else "")
        warnings.warn(
            f"{path}: anonymisation leaves {len(unchanged)} forget or held-out pair(s) unchanged ({ids}); they are "
            "left out of the fragmentation stimuli. Add their entities to the entity table, or give `anonymized`.",
            stacklevel=2,
        )
    return forget_set


def validate_forget_set(
    path: str | Path,
    *,
    variants: int = MIN_SUBSTITUTES,
    columns: Mapping[str, str] | None = None,
    entities: str | Path | None = None,
) -> list[Problem]:
    """Everything wrong with a forget set's files; parameters as in `load_forget_set`.

    Returns
    -------
    list of Problem
        By line, the pairs' file before the entity table; empty if all is well.

    Raises
    ------
    FileNotFoundError
        If a file is not there.
    """
    return _checked_file(path, variants, columns, entities).problems


def _checked_file(
    path: str | Path, variants: int, columns: Mapping[str, str] | None, entities: str | Path | None
) -> PairsFile:
    if not isinstance(variants, int) or variants < 1:
        raise ValueError(f"variants must be an int of at least 1, got {variants!r}")
    file = read_pairs_file(Path(path), variants, columns, entities)
    check_pairs(file, variants)
    return file


def _pairs_of(file: PairsFile) -> tuple[Pair, ...]:
    taken = {row.values["id"] for row in file.rows if "id" in row.values}
    counts: Counter[str] = Counter()
    pairs = []
    for row in file.rows:
        values, split = row.values, row.values["split"]
        counts[split] += 1
        while "id" not in values and f"{split}-{counts[split]:03d}" in taken:
            counts[split] += 1
        identity = values.get("id", f"{split}-{counts[split]:03d}")
        pairs.append(Pair(identity, values["question"], values["answer"], split, tuple(row.variants)))
    return tuple(pairs)
