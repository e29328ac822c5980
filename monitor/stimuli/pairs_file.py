"""A forget set's files as they lie on disk: pairs under any layout and the entity table, and what is wrong with them.

Reading never stops at the first fault: every fault becomes a `Problem` with its place, and what can be read is read.
"""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monitor.stimuli.anonymise import find_entities

SPLITS = ("forget", "retain", "heldout")
KEYS = ("question", "answer", "split", "anonymized", "id")
COLUMNS = (*KEYS, "anonymized_answer", *SPLITS)
MIN_SUBSTITUTES = 8


@dataclass(frozen=True)
class Problem:
    """What is wrong at one place of a forget set's files.

    line : int, 1-based; 0 where it is no single line's fault (in a ``.json`` file `field` gives the place instead).
    severity : "error" (the file cannot be used) or "warning" (it can; less of it may count).
    """

    line: int
    field: str
    message: str
    severity: str = "error"
    file: str = ""

    def __str__(self) -> str:
        place = ":".join([self.file, str(self.line)] if self.line else [self.file])
        return ": ".join(part for part in (place, self.field, self.message) if part)


@dataclass
class Row:
    """One pair as read.

    values : under our names; ``unknown`` holds the keys that are nobody's.
    list_of : the split whose list it stands in, in a ``.json`` file of lists.
    place : what goes before a field's name to say where it is in a ``.json`` file, as in ``forget_pairs[2].``.
    sound : False once an error is reported on it.
    variants : the anonymised variants, given or made.
    """

    line: int
    place: str
    values: dict[str, Any]
    list_of: str = ""
    sound: bool = True
    variants: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class PairsFile:
    """Both files as read. table: entity to substitutes, None without an entity table."""

    path: Path
    table_path: Path
    rows: list[Row] = field(default_factory=list)
    table: dict[str, tuple[str, ...]] | None = None
    table_lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def report(self, message: str, line: int = 0, field: str = "", severity: str = "error") -> None:
        self.problems.append(Problem(line, field, message, severity, str(self.path)))

    def report_row(self, row: Row, field: str, message: str, severity: str = "error") -> None:
        self.report(message, row.line, f"{row.place}{field}", severity)
        if severity == "error":
            row.sound = False

    def report_entity(self, entity: str, message: str, severity: str = "error") -> None:
        field = repr(entity) if entity else ""
        line = self.table_lines.get(entity, 0)
        self.problems.append(Problem(line, field, message, severity, str(self.table_path)))


def read_pairs_file(
    path: Path, variants: int, columns: Mapping[str, str] | None, entities: str | Path | None
) -> PairsFile:
    """Read the pairs and the entity table; parameters as in `monitor.stimuli.forget_set.load_forget_set`."""
    for ours in columns or ():
        if ours not in COLUMNS:
            raise ValueError(f"columns must map from {', '.join(COLUMNS)}, got {ours!r}{closest(ours, COLUMNS)}")
    if not path.is_file():
        raise FileNotFoundError(f"forget set must be a file that exists, got {str(path)!r}")
    file = PairsFile(path, Path(entities) if entities is not None else path.with_name("entities.json"))
    if file.table_path.is_file():
        _read_table(file, variants)
    elif entities is not None:
        raise FileNotFoundError(f"entities must be a file that exists, got {str(entities)!r}")
    _read_rows(file, dict(columns or {}))
    return file


def closest(name: Any, among: Iterable[Any]) -> str:
    """A hint at the name that was probably meant, or nothing."""
    close = difflib.get_close_matches(str(name), [str(other) for other in among], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


# --- pairs -------------------------------------------------------------------------------------------------------


def _read_rows(file: PairsFile, columns: dict[str, str]) -> None:
    text = _text_of(file, file.path)
    if text is None:
        return
    n_problems = len(file.problems)
    rows_of = _rows_of_json if file.path.suffix == ".json" else _rows_of_jsonl
    found = list(rows_of(file, text, columns))
    if not found and len(file.problems) == n_problems:
        file.report("the file holds no pair: write one JSON object a line")
    names = {ours: columns.get(ours, ours) for ours in COLUMNS if ours not in SPLITS}
    keys = {key for row in found for key in row.values}
    absent = [(ours, theirs) for ours, theirs in columns.items() if ours not in SPLITS and theirs not in keys]
    if found and absent:  # a wrong mapping would else make every pair wrong
        for ours, theirs in absent:
            file.report(f"no pair has {theirs!r}, mapped to {ours!r}{closest(theirs, keys)}", field="columns")
        return
    has_split = names["split"] in keys
    for row in found:
        record = row.values
        row.values = {ours: record[theirs] for ours, theirs in names.items() if theirs in record}
        if not columns:
            row.values.pop("anonymized_answer", None)
            row.values["unknown"] = [key for key in record if key not in KEYS]
        if row.list_of or not has_split:  # a file that names no split at all is all there is to forget
            row.values.setdefault("split", row.list_of or "forget")
        file.rows.append(row)


def _rows_of_jsonl(file: PairsFile, text: str, columns: dict[str, str]) -> Iterator[Row]:
    # Not splitlines(): that would also cut at U+2028, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record, fault = _json_of(line)
        if fault is not None:
            file.report(fault[1], number)
        elif not isinstance(record, dict):
            file.report(f'expected an object a line, {{"question": ...}}, got {type(record).__name__}', number)
        else:
            yield Row(number, "", record)


def _rows_of_json(file: PairsFile, text: str, columns: dict[str, str]) -> Iterator[Row]:
    data, fault = _json_of(text)
    if fault is not None:
        file.report(fault[1], fault[0])
        return
    if isinstance(data, list):
        lists = [("", "", data)]
    elif isinstance(data, dict):
        # Once one split is mapped only mapped lists are read: the file's others may be anything.
        wanted = {split: columns[split] for split in SPLITS if split in columns} or {s: s for s in SPLITS if s in data}
        absent = [theirs for theirs in wanted.values() if theirs not in data]
        if absent or not wanted:
            fault = f"no list {absent[0]!r}{closest(absent[0], data)}" if absent else "no list named for a split"
            has = ", ".join(map(str, data)) or "nothing"
            file.report(f"{fault}; the file has {has}: map the lists, as in forget=qa_pairs", field="columns")
        lists = [(theirs, split, data[theirs]) for split, theirs in wanted.items() if theirs in data]
    else:
        file.report(f"expected a list of pairs or an object of such lists, got {type(data).__name__}")
        return
    for name, split, records in lists:
        if not isinstance(records, list):
            file.report(f"expected a list of pairs, got {type(records).__name__}", field=name)
            continue
        for i, record in enumerate(records):
            if isinstance(record, dict):
                yield Row(0, f"{name}[{i}].", record, split)
            else:
                file.report(f"expected an object, got {type(record).__name__}", field=f"{name}[{i}]")


# --- entity table ------------------------------------------------------------------------------------------------


def _read_table(file: PairsFile, variants: int) -> None:
    text = _text_of(file, file.table_path)
    if text is None:
        return
    data, fault = _json_of(text)
    if fault is not None:
        file.problems.append(Problem(fault[0], "", fault[1], file=str(file.table_path)))
        return
    if not isinstance(data, dict):
        file.report_entity("", f"expected an object of entity to list of substitutes, got {type(data).__name__}")
        return
    file.table_lines = {entity: _line_of_key(text, entity) for entity in data}
    file.table = {}
    seen: dict[str, str] = {}
    for entity, substitutes in data.items():
        if not entity.strip():
            file.report_entity(entity, "the entity is empty: remove it")
        elif nfc(entity).casefold() in seen:
            other = seen[nfc(entity).casefold()]
            file.report_entity(entity, f"the same entity as {other!r}, case does not count: keep one")
        elif not isinstance(substitutes, list) or not all(isinstance(s, str) and s.strip() for s in substitutes):
            file.report_entity(entity, f"expected a list of substitutes, none of them empty, got {substitutes!r:.60}")
        else:
            seen[nfc(entity).casefold()] = entity
            file.table[nfc(entity)] = tuple(nfc(substitute) for substitute in substitutes)
            file.table_lines[nfc(entity)] = file.table_lines[entity]
    for entity, substitutes in file.table.items():
        _check_substitutes(file, entity, substitutes, variants)


def _check_substitutes(file: PairsFile, entity: str, substitutes: tuple[str, ...], variants: int) -> None:
    wanted = max(variants, MIN_SUBSTITUTES)
    if len(substitutes) < wanted:
        message = f"{len(substitutes)} substitute(s), expected at least {wanted}: add {wanted - len(substitutes)}"
        file.report_entity(entity, message, "error" if len(substitutes) < variants else "warning")
    repeated = [s for s, n in Counter(s.casefold() for s in substitutes).items() if n > 1]
    if repeated:
        file.report_entity(entity, f"the substitute {repeated[0]!r} is there twice: variants must differ")
    for substitute in substitutes:
        named = find_entities(substitute, file.table or ())
        if named:
            file.report_entity(entity, f"the substitute {substitute!r} names the entity {named[0][2]!r}: use another")


def _line_of_key(text: str, key: str) -> int:
    for written in (json.dumps(key, ensure_ascii=False), json.dumps(key)):
        match = re.search(re.escape(written) + r"\s*:", text)
        if match:
            return text.count("\n", 0, match.start()) + 1
    return 0


# --- JSON --------------------------------------------------------------------------------------------------------


def _text_of(file: PairsFile, path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        line = error.object.count(b"\n", 0, error.start) + 1
        message = f"expected UTF-8, got the byte {byte:#04x}: save the file as UTF-8"
        file.problems.append(Problem(line, "", message, file=str(path)))
        return None


def _json_of(text: str) -> tuple[Any, tuple[int, str] | None]:
    """The value and no fault, or nothing and the fault: its line in the text and what it is."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys), None
    except json.JSONDecodeError as error:
        return None, (error.lineno, f"invalid JSON at column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:
        return None, (0, f"invalid JSON: {error}")


def _unique_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of two equal keys and says nothing.
    repeated = [key for key, n in Counter(key for key, _ in items).items() if n > 1]
    if repeated:
        raise ValueError(f"the key {repeated[0]!r} is there twice in one object: keep one")
    return dict(items)
