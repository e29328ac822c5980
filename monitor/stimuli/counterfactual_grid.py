"""The bundled counterfactual stimuli: a grid of contexts, crossed with the markers of each dimension."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from numbers import Integral

from monitor.stimuli.counterfactual import CounterfactualSet
from monitor.stimuli.counterfactual_file import MIN_CELLS
from monitor.stimuli.pairs_file import closest

DIMENSIONS = ("gender", "race", "religion", "age")

# kind of context -> file of what fills it, in the grid's order
_CONTENTS = {"profession": "professions.txt", "trait": "traits.txt", "activity": "activities.txt"}
_GOLDEN = (5**0.5 - 1) / 2


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
