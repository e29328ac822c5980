"""Counterfactual sets as JSON Lines: reading that finds every fault of a file, and writing."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monitor.stimuli.pairs_file import Problem, closest, nfc

if TYPE_CHECKING:
    from monitor.stimuli.counterfactual import CounterfactualSet

# 5 grouped folds of two cells each, and halves of five cells for cross-fitting: with less, both are of single cells.
MIN_CELLS = 10
KEYS = ("cell", "positive", "negative", "neutral", "stereotype", "dimension", "positive_name", "negative_name")
_LEANS = {"positive": 1, "negative": 0, "none": -1}
_SHOWN = 10


def text_fault(value: object) -> str:
    """Why a value is no text, or nothing."""
    if not isinstance(value, str):
        return f"got {type(value).__name__} {value!r:.40}"
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return f"got half of a surrogate pair in {value!r:.40}"
    if not any(character.isprintable() and not character.isspace() for character in value):
        return f"got the blank {value!r:.40}"
    return ""


def same_text(text: str) -> str:
    """What two texts have in common if they are the same but for white space and normal form."""
    return " ".join(nfc(text).split())


@dataclass
class _Row:
    """One line. Faulty fields are left as they are here."""

    line: int
    cell: str = ""
    positive: str = ""
    negative: str = ""
    neutral: tuple[str, ...] = ()
    stereotype: str = ""
    dimension: str = ""
    names: dict[str, str] = field(default_factory=dict)


@dataclass
class _File:
    path: Path
    problems: list[Problem] = field(default_factory=list)

    def report(self, line: int, name: str, message: str, severity: str = "error") -> None:
        self.problems.append(Problem(line, name, message, severity, str(self.path)))

    def of(self, severity: str) -> list[Problem]:
        return sorted((p for p in self.problems if p.severity == severity), key=lambda problem: problem.line)


def read_counterfactual_file(path: str | Path, stacklevel: int = 2) -> dict[str, dict[str, Any]]:
    """The fields of the `CounterfactualSet` of each dimension, in order; by the file's stem where it names none.

    For the format, errors and warnings see `monitor.stimuli.counterfactual.CounterfactualSet.from_file`.
    """
    file = _File(Path(path))
    if not file.path.is_file():
        raise FileNotFoundError(f"counterfactual file must be a file that exists, got {str(path)!r}")
    rows = [_row_of(file, number, record) for number, record in _records(file)]
    if not rows and not file.problems:
        file.report(
            0, "", 'expected a JSON object a line, {"cell": ..., "positive": ..., "negative": ...}, got no line'
        )
    by_dimension = _by_dimension(file, rows)
    for name, part in by_dimension.items():
        _check_names(file, part)
        _check_texts(file, part)
        if not file.of("error"):  # what seems to be missing may stand in a faulty line
            _check_cells(file, name, part)
    errors = file.of("error")
    if errors:
        raise ValueError(f"{path} is not a usable counterfactual file; {len(errors)} error(s):\n{_list(errors)}")
    doubtful = file.of("warning")
    if doubtful:
        warnings.warn(f"{path}: {len(doubtful)} warning(s):\n{_list(doubtful)}", stacklevel=stacklevel)
    return {name: _fields(part) for name, part in by_dimension.items()}


def _list(problems: list[Problem]) -> str:
    more = [f"  and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    return "\n".join([f"  {problem}" for problem in problems[:_SHOWN]] + more)


# --- lines ------------------------------------------------------------------------------------------------------------


def _records(file: _File) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        text = file.path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        file.report(line, "", f"expected UTF-8, got the byte {error.object[error.start]:#04x}: save the file as UTF-8")
        return
    # Not splitlines(): that would also cut at U+2028, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_pairs_hook=_unique_keys)
        except json.JSONDecodeError as error:
            file.report(number, "", f"expected a JSON object, got invalid JSON at column {error.colno}: {error.msg}")
        except (ValueError, RecursionError) as error:
            file.report(number, "", f"expected a JSON object, got one that cannot be read: {error}")
        else:
            if isinstance(record, dict):
                yield number, {key: value for key, value in record.items() if value is not None}
            else:
                file.report(number, "", f"expected a JSON object, got {type(record).__name__}: write one a line")


def _unique_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of two equal keys and says nothing.
    repeated = [key for key, n in Counter(key for key, _ in items).items() if n > 1]
    if repeated:
        raise ValueError(f"the key {repeated[0]!r} is there twice: keep one")
    return dict(items)


def _row_of(file: _File, line: int, record: dict[str, Any]) -> _Row:
    row = _Row(line)
    for key in record:
        if key not in KEYS:
            hint = closest(key, KEYS) or ": remove it"
            file.report(line, key, f"expected one of {', '.join(KEYS)}, got {key!r}{hint}")
    if type(record.get("cell")) is int:
        record["cell"] = str(record["cell"])
    if "cell" not in record:
        file.report(line, "cell", "expected the context's name, got none: texts of one cell stay in one fold")
    for key in ("cell", "positive", "negative", "dimension", "positive_name", "negative_name"):
        if key in record and text_fault(record[key]):
            file.report(line, key, f"expected text, {text_fault(record[key])}: correct it or remove the line")
    row.cell, row.dimension = (_text(record.get(key)) for key in ("cell", "dimension"))
    row.positive, row.negative = (_text(record.get(key)) for key in ("positive", "negative"))
    row.names = {key: _text(record[key]) for key in ("positive_name", "negative_name") if _text(record.get(key))}
    row.neutral = _neutral(file, line, record.get("neutral", []))
    _check_sides(file, row, record)
    _check_stereotype(file, row, record)
    return row


def _text(value: object) -> str:
    return "" if text_fault(value) else str(value)


def _neutral(file: _File, line: int, given: object) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list):
        file.report(line, "neutral", f"expected a text or a list of texts, got {type(given).__name__}: write one")
        return ()
    for i, text in enumerate(texts):
        if text_fault(text):
            name = "neutral" if isinstance(given, str) else f"neutral[{i}]"
            file.report(line, name, f"expected text, {text_fault(text)}: correct it or remove it")
    return tuple(filter(None, map(_text, texts)))


def _check_sides(file: _File, row: _Row, record: dict[str, Any]) -> None:
    given = [key for key in ("positive", "negative") if key in record]
    if len(given) == 1:
        other = "negative" if given == ["positive"] else "positive"
        file.report(row.line, other, f"expected the counterpart of {given[0]}, got none: give it")
    elif not given and not record.get("neutral"):
        file.report(row.line, "positive", "expected positive and negative, or neutral, got none: give the texts")
    if row.positive and same_text(row.positive) == same_text(row.negative):
        message = f"expected a text that differs in its marker, got the text of positive, {row.negative!r:.80}: "
        file.report(row.line, "negative", message + "correct it or remove the line")


def _check_stereotype(file: _File, row: _Row, record: dict[str, Any]) -> None:
    given = record.get("stereotype")
    if given is None:
        return
    if not isinstance(given, str) or given not in _LEANS:
        hint = closest(given, _LEANS) or ": write the group that the context is associated with"
        file.report(row.line, "stereotype", f"expected one of {', '.join(_LEANS)}, got {given!r:.40}{hint}")
        return
    row.stereotype = given
    if not record.get("neutral"):
        message = "it is of neutral texts, and the line has none: it counts for nothing"
        file.report(row.line, "stereotype", message, "warning")


# --- dimensions -------------------------------------------------------------------------------------------------------


def _by_dimension(file: _File, rows: list[_Row]) -> dict[str, list[_Row]]:
    named = next((row for row in rows if row.dimension), None)
    faulty = {problem.line for problem in file.problems if problem.field == "dimension"}
    without = [row.line for row in rows if named and not row.dimension and row.line not in faulty]
    if without:  # one fault of the file, however many lines have it
        message = f"expected a dimension, as on line {named.line} ({named.dimension!r}), got none"
        more = f" here and on {len(without) - 1} more lines" if len(without) > 1 else ""
        file.report(without[0], "dimension", f"{message}{more}: name it on every line or on none")
    dimensions: dict[str, list[_Row]] = {}
    for row in rows:
        dimensions.setdefault(row.dimension or file.path.stem, []).append(row)
    return dimensions


def _check_names(file: _File, rows: list[_Row]) -> None:
    first: dict[str, _Row] = {}
    for row in rows:
        for key, name in row.names.items():
            known = first.setdefault(key, row)
            if known.names[key] != name:
                message = f"expected {known.names[key]!r}, as on line {known.line}, got {name!r}: write one of the two"
                file.report(row.line, key, message)
    positive, negative = _names_of(rows)
    if positive == negative:
        line = max(row.line for row in first.values())
        file.report(line, "negative_name", f"expected another name than the positive group's, got {negative!r}")


def _names_of(rows: Iterable[_Row]) -> tuple[str, str]:
    names = {"positive_name": "positive", "negative_name": "negative"}
    for row in reversed(list(rows)):
        names |= row.names
    return names["positive_name"], names["negative_name"]


def _check_texts(file: _File, rows: list[_Row]) -> None:
    marked: dict[str, tuple[_Row, str]] = {}
    pairs: dict[tuple[str, ...], _Row] = {}
    for row in rows:
        if not (row.positive and row.negative):
            continue
        sides = {"positive": same_text(row.positive), "negative": same_text(row.negative)}
        first = pairs.setdefault((row.cell, *sides.values()), row)
        if first is not row:
            message = f"duplicate: line {first.line} is the same pair in this cell; it counts twice"
            file.report(row.line, "positive", message, "warning")
            continue
        for side, text in sides.items():
            other, other_side = marked.setdefault(text, (row, side))
            if other_side != side:
                message = f"line {other.line} has it as {other_side}: it carries both labels"
                file.report(row.line, side, message, "warning")
            else:
                _check_cell_of(file, row, other, side)
    _check_neutral(file, rows, marked)


def _check_neutral(file: _File, rows: list[_Row], marked: dict[str, tuple[_Row, str]]) -> None:
    seen: dict[str, _Row] = {}
    for row in rows:
        for text in map(same_text, row.neutral):
            if text in marked:
                other, side = marked[text]
                message = f"expected a text without a marker, got {side} of line {other.line}, {text!r:.80}: "
                file.report(row.line, "neutral", message + "leave it out of one of the two")
            elif seen.setdefault(text, row) is not row and seen[text].cell == row.cell:
                message = f"duplicate: line {seen[text].line} has {text!r:.80} in this cell; it counts twice"
                file.report(row.line, "neutral", message, "warning")
            else:
                _check_cell_of(file, row, seen[text], "neutral")
        repeated = [text for text, n in Counter(map(same_text, row.neutral)).items() if n > 1]
        for text in repeated:
            file.report(row.line, "neutral", f"duplicate: {text!r:.80} is there twice; it counts twice", "warning")


def _check_cell_of(file: _File, row: _Row, other: _Row, name: str) -> None:
    if other.cell != row.cell:
        message = f"line {other.line} has it in the cell {other.cell!r}: folds cannot keep the two apart, give both one"
        file.report(row.line, name, message + " cell", "warning")


def _check_cells(file: _File, dimension: str, rows: list[_Row]) -> None:
    cells = {row.cell for row in rows if row.positive}
    if len(cells) < MIN_CELLS:
        of = f" of {dimension!r}" if rows[0].dimension else ""
        message = f"expected pairs{of} in at least {MIN_CELLS} cells, got {len(cells)}: 5-fold grouped "
        file.report(0, "cell", message + "cross-validation keeps a cell in one fold and needs more; give more contexts")


def _fields(rows: list[_Row]) -> dict[str, Any]:
    pairs = [row for row in rows if row.positive]
    texts = [(text, row) for row in rows for text in row.neutral]
    known = any(row.stereotype and row.neutral for row in rows)
    positive_name, negative_name = _names_of(rows)
    return {
        "positive": tuple(row.positive for row in pairs),
        "negative": tuple(row.negative for row in pairs),
        "cells": tuple(row.cell for row in pairs),
        "neutral": tuple(text for text, _ in texts),
        "neutral_cells": tuple(row.cell for _, row in texts),
        "stereotypes": tuple(_LEANS.get(row.stereotype, -1) for _, row in texts) if known else (),
        "positive_name": positive_name,
        "negative_name": negative_name,
    }


# --- writing ----------------------------------------------------------------------------------------------------------


def write_counterfactual_file(path: str | Path, stimuli: CounterfactualSet, dimension: str | None) -> None:
    """One pair a line, with the neutral texts of its cell where their order allows; the rest on lines of their own."""
    leans = stimuli.stereotypes or (None,) * stimuli.n_neutral
    rows = zip(stimuli.neutral_cells, leans, stimuli.neutral, strict=True)
    runs = [(*key, [text for *_, text in run]) for key, run in groupby(rows, key=lambda row: row[:2])]
    common = {"positive_name": stimuli.positive_name, "negative_name": stimuli.negative_name}
    if dimension is not None:
        common = {"dimension": dimension, **common}
    word = {value: name for name, value in _LEANS.items()}

    def line(cell: str, pair: dict[str, str], texts: list[str], lean: int | None) -> str:
        record = {"cell": cell, **pair}
        if texts:
            record["neutral"] = texts
        if lean is not None:
            record["stereotype"] = word[lean]
        return json.dumps(record | common, ensure_ascii=False) + "\n"

    lines, next_run = [], 0
    for cell, positive, negative in zip(stimuli.cells, stimuli.positive, stimuli.negative, strict=True):
        texts, lean = [], None
        if next_run < len(runs) and runs[next_run][0] == cell:
            _, lean, texts = runs[next_run]
            next_run += 1
        lines.append(line(cell, {"positive": positive, "negative": negative}, texts, lean))
    lines += [line(cell, {}, texts, lean) for cell, lean, texts in runs[next_run:]]
    Path(path).write_text("".join(lines), encoding="utf-8", newline="")
