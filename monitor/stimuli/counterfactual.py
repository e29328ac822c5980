"""Counterfactual stimuli: texts that differ in one marker alone, and texts of the same contexts without a marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monitor.stimuli.counterfactual_file import (
    read_counterfactual_file,
    same_text,
    text_fault,
    write_counterfactual_file,
)
from monitor.stimuli.pairs_file import closest


@dataclass(frozen=True)
class CounterfactualSet:
    """Pairs of texts that a group's marker alone tells apart, and unmarked texts.

    Parameters
    ----------
    positive, negative : sequence of str
        Pair i is ``positive[i]`` and ``negative[i]``; label 1 and label 0.
    cells : sequence of str
        The context cell of each pair. Texts of one cell travel together in every split, so give one cell to texts
        that share more than chance would have them share (a template and its content, a question).
    neutral : sequence of str, optional
        Texts without a marker, for mixtures of low purity and for the neutral offset; best of the same contexts.
    neutral_cells : sequence of str
        The cell of each neutral text; the same name as a pair's is the same cell.
    stereotypes : sequence of int, optional
        For each neutral text the group that it is associated with: 1 positive, 0 negative, -1 none. Empty: unknown.
    positive_name, negative_name : str
        What the two groups are called in tables.

    Raises
    ------
    ValueError
        Naming the parameter: lengths do not fit, a text is blank or no text, a pair's texts are the same, a neutral
        text is a marked one too, a stereotype is none of 1, 0, -1, or the two names are the same.

    Notes
    -----
    Any sequences are accepted and stored as tuples, in the order given. Texts are compared without regard to white
    space and Unicode normal form. The design is that of arXiv:2609.22337, section V-C.
    """

    positive: tuple[str, ...]
    negative: tuple[str, ...]
    cells: tuple[str, ...]
    neutral: tuple[str, ...] = ()
    neutral_cells: tuple[str, ...] = ()
    stereotypes: tuple[int, ...] = ()
    positive_name: str = "positive"
    negative_name: str = "negative"

    def __post_init__(self) -> None:
        for name in ("positive", "negative", "cells", "neutral", "neutral_cells"):
            object.__setattr__(self, name, _checked_texts(getattr(self, name), name))
        object.__setattr__(self, "stereotypes", tuple(self.stereotypes))
        if not self.positive:
            raise ValueError("positive must hold at least one text, got none; give positive, negative and cells.")
        for name, other in (("negative", "positive"), ("cells", "positive"), ("neutral_cells", "neutral")):
            got, wanted = len(getattr(self, name)), len(getattr(self, other))
            if got != wanted:
                raise ValueError(f"{name} must be as many as {other}, {wanted}; got {got}. Give one for each.")
        self._check_stereotypes()
        self._check_markers()
        for name in ("positive_name", "negative_name"):
            if text_fault(getattr(self, name)):
                raise ValueError(f"{name} must be a name, {text_fault(getattr(self, name))}; give one.")
        if self.positive_name == self.negative_name:
            raise ValueError(f"positive_name and negative_name must differ, both are {self.positive_name!r}.")

    def _check_stereotypes(self) -> None:
        if self.stereotypes and len(self.stereotypes) != len(self.neutral):
            raise ValueError(
                f"stereotypes must be one a neutral text, {len(self.neutral)}, or none; got {len(self.stereotypes)}. "
                "Give -1 where a text has none."
            )
        wrong = [value for value in self.stereotypes if type(value) is not int or value not in (1, 0, -1)]
        if wrong:
            raise ValueError(
                f"stereotypes must be 1 (positive group), 0 (negative group) or -1 (none); got {wrong[0]!r}."
            )

    def _check_markers(self) -> None:
        for i, (one, other) in enumerate(zip(self.positive, self.negative, strict=True)):
            if same_text(one) == same_text(other):
                raise ValueError(
                    f"positive[{i}] and negative[{i}] are the same text, {one!r:.80}: a pair must differ in its "
                    "marker; correct it or leave the pair out."
                )
        marked = {same_text(text) for text in (*self.positive, *self.negative)}
        for i, text in enumerate(self.neutral):
            if same_text(text) in marked:
                raise ValueError(f"neutral[{i}] is a marked text too, {text!r:.80}; leave it out of one of the two.")

    @property
    def n_pairs(self) -> int:
        """P, the number of pairs."""
        return len(self.positive)

    @property
    def n_neutral(self) -> int:
        """M, the number of neutral texts."""
        return len(self.neutral)

    @property
    def texts(self) -> tuple[str, ...]:
        """All 2P + M texts: positive i is row i, negative i row P + i, neutral j row 2P + j."""
        return self.positive + self.negative + self.neutral

    @property
    def groups(self) -> list[int]:
        """The cell of every row of `texts` as a number from 0, in order of first appearance."""
        rows = (*self.cells, *self.cells, *self.neutral_cells)
        number = {cell: i for i, cell in enumerate(dict.fromkeys(rows))}
        return [number[cell] for cell in rows]

    @property
    def labels(self) -> list[int]:
        """1 and 0 of the 2P marked rows: P times 1, then P times 0."""
        return [1] * self.n_pairs + [0] * self.n_pairs

    @classmethod
    def from_file(cls, path: str | Path, dimension: str | None = None) -> CounterfactualSet:
        """Read one set from a JSON Lines file.

        Parameters
        ----------
        path : str or Path
            UTF-8, an object a line, as `datasets` writes and reads them (null is absent):

            - ``cell``: name or number of the context. Several lines may have one cell.
            - ``positive``, ``negative``: the pair's texts. A line with neutral texts alone leaves both out.
            - ``neutral``, optional: one text or a list of them.
            - ``stereotype``, optional: ``"positive"``, ``"negative"`` or ``"none"``, of the line's neutral texts.
            - ``dimension``, optional: the set the line belongs to, where there are several; on all lines or on none.
            - ``positive_name``, ``negative_name``, optional: what the groups are called, on one line or on all.
        dimension : str, optional
            Which set, where the file holds several. A file that names none holds one, called by the file's stem.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        ValueError
            Up to ten faults of the file at once, each as ``file:line: field: what was expected, what came``; fewer
            than 10 cells with a pair; or a dimension that the file does not hold, or has to be chosen.

        Warns
        -----
        UserWarning
            A text is there twice: in one cell it counts twice, in two cells folds cannot keep it apart.
        """
        sets = _sets_of(path)
        if dimension is None and len(sets) > 1:
            raise ValueError(
                f"dimension must be chosen, {path} holds {len(sets)}: {', '.join(sets)}. Give one, or read them all "
                "with counterfactual_sets_from_file."
            )
        name = next(iter(sets)) if dimension is None else dimension
        if name not in sets:
            raise ValueError(f"dimension must be one that {path} holds, {', '.join(sets)}; got {name!r}"
                             f"{closest(name, sets)}.")  # fmt: skip
        return sets[name]

    def to_file(self, path: str | Path, dimension: str | None = None) -> None:
        """Write the set as JSON Lines; `from_file` gives an equal one.

        Parameters
        ----------
        path : str or Path
            Overwritten if it is there.
        dimension : str, optional
            Named on every line, so that the lines of several files make one file.

        Raises
        ------
        ValueError
            The dimension is blank.
        """
        if dimension is not None and text_fault(dimension):
            raise ValueError(f"dimension must be a name or None, {text_fault(dimension)}.")
        write_counterfactual_file(path, self, dimension)


def counterfactual_sets_from_file(path: str | Path) -> dict[str, CounterfactualSet]:
    """Read all sets of a JSON Lines file, by dimension, in the file's order; see `CounterfactualSet.from_file`."""
    return _sets_of(path)


def _sets_of(path: str | Path) -> dict[str, CounterfactualSet]:
    sets = read_counterfactual_file(path, stacklevel=4)  # warnings point at who called `from_file` or its like
    return {name: CounterfactualSet(**fields) for name, fields in sets.items()}


def _checked_texts(texts: Sequence[str], name: str) -> tuple[str, ...]:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise ValueError(f"{name} must be a list or tuple of str, got {type(texts).__name__}; put it in a list.")
    for i, text in enumerate(texts):
        if text_fault(text):
            raise ValueError(f"{name}[{i}] must be text, {text_fault(text)}; correct it or leave it out.")
    return tuple(texts)
