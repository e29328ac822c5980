"""Forget sets: question-answer pairs to forget, to retain and never seen, with their anonymised variants.

The file is JSONL, one pair a line::

    {"id": "forget-001", "question": "Who ...?", "answer": "...", "split": "forget"}

with ``split`` one of ``forget | retain | heldout``, and optionally ``id`` and ``anonymized``, a list of
``{"question": ..., "answer": ...}``, one a variant. Beside it an optional ``entities.json``, entity to list of
substitutes, from which missing variants are made.

Other layouts come in by column mapping. Of four benchmarks' own files, as their authors lay them out:

TOFU (arXiv 2401.06121), one file a split, JSON Lines by the name of .json; nothing to map::

    load_forget_set({"forget": "forget10.json", "retain": "retain90.json"})

with ``columns={"question": "question", "answer": "answer"}`` for files with further columns, as ``*_perturbed.json``
and ``real_authors.json`` are.

MUSE knowmem (arXiv 2407.06460), one Parquet file a split; nothing to map::

    load_forget_set({"forget": "forget_qa.parquet", "retain": "retain_qa.parquet"})

WMDP (arXiv 2403.03218), the answer being a number in a list of choices (MMLU, to retain, is laid out alike)::

    load_forget_set({"forget": "bio.parquet", "retain": "mmlu.parquet"}, columns={"choices": "choices"})

ConceptVectors (arXiv 2406.11614), a record a concept, of which the completions have answers::

    load_forget_set("llama2-7b_concepts_test.json", columns={
        "question": "text_completion.First_half", "answer": "text_completion.Second_half",
        "split": "Concept", "forget": "Harry Potter", "retain": "*"})

Its ``QA`` and ``unrelated_QA`` are questions without answers, and refused as such; where generated answers stand in a
list beside them, ``{"question": "QA", "answer": "gpt_gold_answer"}`` pairs the two lists.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from monitor.stimuli.pairs_check import check_pairs
from monitor.stimuli.pairs_file import MIN_SUBSTITUTES, SPLITS, PairsFile, Problem, closest
from monitor.stimuli.pairs_read import read_pairs_file

__all__ = ["SPLITS", "ForgetSet", "Pair", "Problem", "load_forget_set", "validate_forget_set"]

Records: TypeAlias = Iterable[Mapping[str, Any]]
Source: TypeAlias = str | Path | Records | Mapping[str, str | Path | Records]


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
    source: Source,
    *,
    variants: int = MIN_SUBSTITUTES,
    columns: Mapping[str, str] | None = None,
    entities: str | Path | None = None,
    name: str | None = None,
) -> ForgetSet:
    """Read a forget set and make the anonymised variants that it does not bring.

    Parameters
    ----------
    source : path, records, or mapping of split to either
        A file: JSON Lines; ``.json``, which holds a list of pairs, an object of such lists, one record, or JSON Lines
        all the same; or ``.parquet``. Records in memory: a `datasets.Dataset`, a list of dicts. By split,
        ``{"forget": ..., "retain": ..., "heldout": ...}``, of which the first must be there.
    variants : int, >= 1
        K, how many variants a pair gets. Of given variants the first K are taken; where a file gives fewer, all of its
        pairs have as many as it gives.
    columns : mapping, optional
        Our name to the file's, for other layouts: ``{"question": "prompt", "answer": "response"}``. Keys that are not
        mapped are then ignored. Our names are ``question, answer, split, id, anonymized, anonymized_answer``, and:

        - ``choices``, a list of texts: the answer is then a number from 0 or a letter from A in it, or one of them.
        - ``forget, retain, heldout``: the names of lists in an object of lists (``{"forget": "qa_eval_pairs"}``),
          else values of the column mapped to ``split``, ``"*"`` being every value not named. Others are left out.

        A dotted path leads into objects, and into each object of a list. Where the mapped question is a list, the
        record is as many pairs: the other columns are lists of that length, or one split or id for all. A file that
        names no split is all to forget. Several files have one mapping.
    entities : path, optional
        The entity table; by default ``entities.json`` beside the file (the one to forget, of several), if there.
    name : str, optional
        By default the folder's name for ``pairs.jsonl``, else the file's stem (the one to forget), or ``"records"``.

    Raises
    ------
    FileNotFoundError
        If a file is not there.
    ValueError
        One error that lists everything wrong, each with its line; or a source or a mapping that fits no file.

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
    file = _checked_file(source, variants, columns, entities)
    title = ", ".join(file.sources)
    errors = [problem for problem in file.problems if problem.severity == "error"]
    if errors:
        shown = "\n".join(f"  {problem}" for problem in errors)
        raise ValueError(f"{title} is not a usable forget set; {len(errors)} error(s):\n{shown}")
    forget_set = ForgetSet(name or _default_name(source), _pairs_of(file))
    unchanged = forget_set.unchanged
    if unchanged:
        ids = ", ".join(unchanged[:10]) + (", ..." if len(unchanged) > 10 else "")
        warnings.warn(
            f"{title}: anonymisation leaves {len(unchanged)} forget or held-out pair(s) unchanged ({ids}); they are "
            "left out of the fragmentation stimuli. Add their entities to the entity table, or give `anonymized`.",
            stacklevel=2,
        )
    return forget_set


def validate_forget_set(
    source: Source,
    *,
    variants: int = MIN_SUBSTITUTES,
    columns: Mapping[str, str] | None = None,
    entities: str | Path | None = None,
) -> list[Problem]:
    """Everything wrong with a forget set's files; parameters as in `load_forget_set`.

    Returns
    -------
    list of Problem
        By line, the pairs' files before the entity table; empty if all is well.

    Raises
    ------
    FileNotFoundError
        If a file is not there.
    ValueError
        For a source or a mapping that fits no file.
    """
    return _checked_file(source, variants, columns, entities).problems


def _checked_file(
    source: Source, variants: int, columns: Mapping[str, str] | None, entities: str | Path | None
) -> PairsFile:
    if not isinstance(variants, int) or variants < 1:
        raise ValueError(f"variants must be an int of at least 1, got {variants!r}")
    file = read_pairs_file(source, variants, columns, entities)
    check_pairs(file, variants)
    return file


def _default_name(source: Source) -> str:
    first = source["forget"] if isinstance(source, Mapping) else source
    if not isinstance(first, (str, os.PathLike)):
        return "records"
    path = Path(first)
    return path.resolve().parent.name if path.name == "pairs.jsonl" else path.stem


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
