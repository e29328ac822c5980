"""Counterfactual stimuli: texts that differ in one marker alone, and texts of the same contexts without a marker."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING

from monitor.stimuli.counterfactual_file import (
    MIN_CELLS,
    read_counterfactual_file,
    same_text,
    text_fault,
    write_counterfactual_file,
)
from monitor.stimuli.pairs_file import closest

if TYPE_CHECKING:
    from monitor.stimuli.forget_set import Pair

DIMENSIONS = ("gender", "race", "religion", "age")

# kind of context -> file of what fills it, in the grid's order
_CONTENTS = {"profession": "professions.txt", "trait": "traits.txt", "activity": "activities.txt"}
_GOLDEN = (5**0.5 - 1) / 2


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


# --- the bundled grid -------------------------------------------------------------------------------------------------


def load_counterfactual_sets(
    dimensions: Sequence[str] = DIMENSIONS, *, cells: int | None = None
) -> dict[str, CounterfactualSet]:
    """Load the bundled grid of contexts, crossed with the markers of each dimension.

    Parameters
    ----------
    dimensions : sequence of str
        Any of ``"gender"``, ``"race"``, ``"religion"``, ``"age"``.
    cells : int, optional
        From 10 to 340: a part of the grid for quick use, the same for every dimension. Professions, traits and
        activities keep their proportion, markers, frames and contents are used about equally often, and a smaller
        part is contained in every larger one. Default: all 340.

    Returns
    -------
    dict of str to CounterfactualSet
        340 pairs (or `cells`) and twice as many neutral texts each. Row i is of the same cell in every dimension, and
        the neutral texts are the same, so the texts of all four are 4 · 680 + 680 = 3,400 different ones.
        ``stereotypes`` is given for gender alone.

    Raises
    ------
    ValueError
        A dimension that does not exist or is named twice; a number of cells outside the range.

    Notes
    -----
    Cells are 44 professions × 5 frames, 20 traits × 3 and 20 activities × 3, content by content; cell i takes marker
    pair i mod 8. As 5 and 3 are coprime to 8, every frame meets every marker. Neutral heads are "person" and
    "individual". Each sentence names its marker by "the", so nothing else in it depends on the marker.

    The marker opens the sentence in some frames, stands inside in others and closes it in others. In a causal model
    only tokens from the marker on can carry it: a mean over tokens sees a marker at the end in one or two tokens,
    and a marker at the start in all, so separations are averages over these positions.

    Design, counts and marker pairs: arXiv:2609.22337, sections V-C and F-A; stereotypes of the 16 professions: F-E,
    after WinoBias (arXiv:1804.06876). The paper quotes two frames, the first two for professions; the others, the
    other 28 professions, traits and activities are this project's own, and no further profession is in WinoBias.
    """
    markers = _json("markers.json")
    chosen = _chosen(dimensions, tuple(markers))
    grid = _grid() if cells is None else _spread(_grid(), cells)
    heads = _lines("neutral_heads.txt")
    names = tuple(cell.name for cell in grid)
    neutral = tuple(cell.sentence(head) for cell in grid for head in heads)
    neutral_cells = tuple(cell.name for cell in grid for _ in heads)
    sets = {}
    for dimension in chosen:
        groups, pairs = markers[dimension], markers[dimension]["pairs"]
        lean = _stereotypes(dimension, groups["positive_name"])
        sets[dimension] = CounterfactualSet(
            positive=tuple(cell.sentence(pairs[cell.index % len(pairs)][0]) for cell in grid),
            negative=tuple(cell.sentence(pairs[cell.index % len(pairs)][1]) for cell in grid),
            cells=names,
            neutral=neutral,
            neutral_cells=neutral_cells,
            stereotypes=tuple(lean.get(cell.content, -1) for cell in grid for _ in heads) if lean else (),
            positive_name=groups["positive_name"],
            negative_name=groups["negative_name"],
        )
    return sets


@dataclass(frozen=True)
class _Cell:
    """One frame filled with one content; index: its place in the grid, from 0."""

    index: int
    kind: str
    content: str
    frame: int
    template: str

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.content}/{self.frame + 1}"

    def sentence(self, head: str) -> str:
        article = "an" if self.content[0] in "aeiou" else "a"
        return self.template.format(marker=head, content=self.content, a_content=f"{article} {self.content}")


@cache
def _grid() -> tuple[_Cell, ...]:
    frames = _json("frames.json")
    contexts = [
        (kind, content, frame, template)
        for kind, source in _CONTENTS.items()
        for content in _lines(source)
        for frame, template in enumerate(frames[kind])
    ]
    return tuple(_Cell(i, *context) for i, context in enumerate(contexts))


def _spread(grid: Sequence[_Cell], n: int) -> list[_Cell]:
    """`n` cells of the grid, in its order: each next one is of the kind, marker, frame and content used least.

    A fixed stride would not do: a stride of 10 meets one frame of 5 and four markers of 8.
    """
    if not isinstance(n, Integral) or isinstance(n, bool) or not MIN_CELLS <= n <= len(grid):
        raise ValueError(
            f"cells must be an int from {MIN_CELLS} to {len(grid)}, or None for all; got {n!r}. Below {MIN_CELLS} "
            "grouped folds are too small."
        )
    pairs = len(_json("markers.json")[DIMENSIONS[0]]["pairs"])
    wanted = Counter(cell.kind for cell in grid)
    left = {kind: [cell for cell in grid if cell.kind == kind] for kind in wanted}
    used: Counter[object] = Counter()
    taken = []
    for k in range(1, n + 1):
        kind = max(wanted, key=lambda kind: k * wanted[kind] / len(grid) - used[kind])

        def use(cell: _Cell) -> tuple[float, ...]:
            # Ties go by the golden ratio's multiples, which are spread evenly, and not to the first in the alphabet.
            spread = cell.index * _GOLDEN % 1
            return used[cell.index % pairs], used[cell.kind, cell.frame], used[cell.kind, cell.content], spread

        cell = min(left[kind], key=use)
        left[kind].remove(cell)
        taken.append(cell)
        used.update([kind, cell.index % pairs, (kind, cell.frame), (kind, cell.content)])
    return sorted(taken, key=lambda cell: cell.index)


def _stereotypes(dimension: str, positive_name: str) -> dict[str, int]:
    """Content to 1 or 0, the group it is associated with."""
    groups = _json("stereotypes.json").get(dimension, {})
    return {content: int(group == positive_name) for group, contents in groups.items() for content in contents}


def _chosen(dimensions: Sequence[str], known: Sequence[str]) -> list[str]:
    if isinstance(dimensions, str):
        raise ValueError(f"dimensions must be a sequence of names, got the str {dimensions!r}; write [{dimensions!r}].")
    chosen = list(dimensions)
    if not chosen:
        raise ValueError(f"dimensions must name at least one of {', '.join(known)}; got none.")
    for name in chosen:
        if name not in known:
            raise ValueError(f"dimensions must be of {', '.join(known)}; got {name!r}{closest(name, known)}.")
        if chosen.count(name) > 1:
            raise ValueError(f"dimensions must name each once; {name!r} is there {chosen.count(name)} times.")
    return chosen


def _lines(name: str) -> list[str]:
    return _data(name).splitlines()


def _json(name: str) -> dict:
    return json.loads(_data(name))


def _data(name: str) -> str:
    return files("monitor.stimuli").joinpath("counterfactual_data", name).read_text(encoding="utf-8")


# --- forget sets ------------------------------------------------------------------------------------------------------


def counterfactual_from_pairs(pairs: Sequence[Pair], neutral: Sequence[Pair] = ()) -> CounterfactualSet:
    """A forget set as counterfactual pairs: each question with its answer against the same told of invented names.

    Parameters
    ----------
    pairs : sequence of Pair
        With anonymised variants, as in ``load_forget_set(...).split("forget")``. Those of which a variant equals the
        original are left out.
    neutral : sequence of Pair, optional
        Pairs that do not name the concept, such as the retain split; read as they stand.

    Returns
    -------
    CounterfactualSet
        Positive i (``"original"``) is ``"{question}\\nAnswer: {answer}"`` of the i-th pair that is left, negative i
        (``"anonymised"``) the same of its variant number i mod K; the cell is the pair's id.

    Raises
    ------
    ValueError
        A pair has no variants, or fewer than 10 are left.

    Warns
    -----
    UserWarning
        Naming the pairs that are left out.

    Notes
    -----
    Taking the variants in turn lets no invented name stand for "anonymised" by itself. The concept's own names do
    recur from cell to cell, though: folds grouped by cell do not hide them, and a probe that only reads names can
    separate these pairs. What it detects is "this concept's names or others", in a random model too: compare with
    the model's own reference.
    """
    # Here, because it imports transformers, which nothing else of this module needs.
    from monitor.stimuli.encoding import qa_answer, qa_prompt

    def text(question: str, answer: str) -> str:
        return qa_prompt(question) + qa_answer(answer)

    bare = [pair.id for pair in pairs if not pair.anonymized]
    if bare:
        raise ValueError(
            f"pairs must have anonymised variants; none for {_some(bare)}. Add `anonymized` or an entity table, or "
            "leave them out."
        )
    kept, same = [], []
    for pair in pairs:
        original = same_text(text(pair.question, pair.answer))
        unchanged = any(same_text(text(*variant)) == original for variant in pair.anonymized)
        (same if unchanged else kept).append(pair)
    left_out = f"{len(same)} of {len(pairs)} left out, a variant equals the original: {_some([p.id for p in same])}"
    if len(kept) < MIN_CELLS:
        raise ValueError(
            f"pairs must be at least {MIN_CELLS} that anonymisation changes, for grouped folds; got {len(kept)}"
            + (f" ({left_out})" if same else "") + ". Give more pairs."
        )  # fmt: skip
    if same:
        warnings.warn(f"pairs: {left_out}", stacklevel=2)
    return CounterfactualSet(
        positive=tuple(text(pair.question, pair.answer) for pair in kept),
        negative=tuple(text(*pair.anonymized[i % len(pair.anonymized)]) for i, pair in enumerate(kept)),
        cells=tuple(pair.id for pair in kept),
        neutral=tuple(text(pair.question, pair.answer) for pair in neutral),
        neutral_cells=tuple(pair.id for pair in neutral),
        positive_name="original",
        negative_name="anonymised",
    )


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
