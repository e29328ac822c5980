"""A forget set as it was read: its pairs, its entity table, and what is wrong with them.

Reading never stops at the first fault: every fault becomes a `Problem` with its place, and what can be read is read.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPLITS = ("forget", "retain", "heldout")
KEYS = ("question", "answer", "split", "anonymized", "id")
COLUMNS = (*KEYS, "anonymized_answer", "choices", *SPLITS)
MIN_SUBSTITUTES = 8


@dataclass(frozen=True)
class Problem:
    """What is wrong at one place of a forget set's files.

    line : int, 1-based; 0 where it is no single line's fault (elsewhere than in JSON Lines `field` gives the place).
    severity : "error" (the file cannot be used) or "warning" (it can; less of it may count).
    file : the file's path; for records in memory the split they were given for, or ``records``.
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
    """One pair, or one record before its columns are mapped.

    values : the record's own; once mapped, under our names, with ``unknown`` for the keys that are nobody's.
    file : name of the file it is of, as in `Problem`.
    list_of : the split whose list it stands in, in a ``.json`` file of lists.
    file_of : the split its whole file was given for.
    place : what goes before a field's name to say where it is, as in ``forget_pairs[2].``.
    sound : False once an error is reported on it.
    variants : the anonymised variants, given or made.
    """

    line: int
    place: str
    values: dict[str, Any]
    file: str
    list_of: str = ""
    file_of: str = ""
    sound: bool = True
    variants: list[tuple[str, str]] = field(default_factory=list)

    def where(self, other: Row) -> str:
        """Its place, said in a message about `other`."""
        place = self.place.rstrip(".")
        line = f"line {self.line}" if self.line else ""
        text = f"{line} ({place})" if line and place else line or place
        return text if self.file == other.file else f"{text} of {self.file}"


@dataclass
class PairsFile:
    """All files as read.

    sources : names of the files or records that the pairs are of, as in `Problem`.
    table_path : the entity table's, None where there is no place to look for one.
    table : entity to substitutes, None without an entity table.
    unread : whether a record with faults gave no pair, so that what seems to be missing may be in it.
    """

    sources: tuple[str, ...]
    table_path: Path | None
    rows: list[Row] = field(default_factory=list)
    table: dict[str, tuple[str, ...]] | None = None
    table_lines: dict[str, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unread: bool = False

    def report(self, message: str, line: int = 0, field: str = "", severity: str = "error", file: str = "") -> None:
        self.problems.append(Problem(line, field, message, severity, file or self.sources[0]))

    def report_row(self, row: Row, field: str, message: str, severity: str = "error") -> None:
        self.report(message, row.line, f"{row.place}{field}", severity, row.file)
        if severity == "error":
            row.sound = False

    def report_entity(self, entity: str, message: str, severity: str = "error") -> None:
        field = repr(entity) if entity else ""
        line = self.table_lines.get(entity, 0)
        self.problems.append(Problem(line, field, message, severity, str(self.table_path)))


def closest(name: Any, among: Iterable[Any]) -> str:
    """A hint at the name that was probably meant, or nothing."""
    close = difflib.get_close_matches(str(name), [str(other) for other in among], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)
