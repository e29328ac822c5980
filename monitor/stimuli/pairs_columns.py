"""Other layouts' records under our names: columns by path, several pairs a record, splits by value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from monitor.stimuli.pairs_file import COLUMNS, KEYS, SPLITS, PairsFile, Row, closest

REST = "*"
MISSING = type("Missing", (), {"__repr__": lambda self: "<missing>"})()


def check_columns(columns: Mapping[str, str], by_split: bool) -> None:
    """Raise for a mapping that can fit no file. by_split: whether each split has a file of its own."""
    for ours, theirs in columns.items():
        if ours not in COLUMNS:
            raise ValueError(f"columns must map from {', '.join(COLUMNS)}, got {ours!r}{closest(ours, COLUMNS)}")
        if not isinstance(theirs, str) or not theirs:
            raise ValueError(f"columns must map {ours!r} to a name, not empty, got {theirs!r}")
        if by_split and ours in ("split", *SPLITS):
            raise ValueError(f"columns must not map {ours!r} where every split has a file of its own: leave it out")
    of_splits = [columns[split] for split in SPLITS if split in columns]
    if len(set(of_splits)) < len(of_splits):
        raise ValueError(f"columns must map each split to another name, got {', '.join(of_splits)}")


def map_columns(file: PairsFile, found: list[Row], columns: Mapping[str, str]) -> None:
    """Put the pairs of the records `found` into ``file.rows``, each value under our name for it."""
    names = {ours: columns.get(ours, ours) for ours in COLUMNS if ours not in SPLITS}
    if columns and _report_absent(file, found, columns, names):
        return
    plain = [row for row in found if not row.list_of and not row.file_of]
    values_of = {split: columns[split] for split in SPLITS if split in columns} if plain else {}
    has_split = _any_has(found, names["split"])
    if values_of and _report_absent_splits(file, plain, names["split"], values_of, has_split):
        return
    for record in found:
        selecting = values_of and not record.list_of
        split = value_at(record.values, names["split"])
        if selecting and _is_scalar(split) and not _split_named(split, values_of):
            continue
        for row in _pairs_of(file, record, names, "question" in columns):
            if not columns:
                row.values.pop("anonymized_answer", None)
                row.values.pop("choices", None)
                row.values["unknown"] = [key for key in record.values if key not in KEYS]
            if selecting and "split" in row.values:
                row.values["split"] = _split_named(row.values["split"], values_of)
                if not row.values["split"]:
                    continue
            _settle_split(file, row, has_split)
            file.rows.append(row)


def value_at(record: Any, path: str) -> Any:
    """The value under a key, or under a dotted path; through a list it is the list of its items' values."""
    if isinstance(record, (list, tuple)):
        return [value_at(item, path) for item in record]
    if not isinstance(record, Mapping):
        return MISSING
    if path in record:
        value = record[path]
        return list(value) if isinstance(value, tuple) else value
    head, dot, rest = path.partition(".")
    return value_at(record[head], rest) if dot and head in record else MISSING


def _pairs_of(file: PairsFile, record: Row, names: Mapping[str, str], may_hold_several: bool) -> Iterator[Row]:
    """One row, or one for each item where the question is a list and the other columns are lists beside it."""
    values = {ours: value_at(record.values, theirs) for ours, theirs in names.items()}
    values = {ours: value for ours, value in values.items() if value is not MISSING}
    questions = values.get("question")
    if not may_hold_several or not isinstance(questions, list):
        yield replace(record, values=values)
        return
    n = len(questions)
    if not n:
        file.report_row(record, names["question"], "the list is empty: the record gives no pair", "warning")
    for ours, value in values.items():
        if ours in ("split", "id") and _is_scalar(value):
            continue
        if not isinstance(value, list) or len(value) != n:
            got = f"{len(value)}" if isinstance(value, list) else f"{type(value).__name__} {value!r:.40}"
            message = f"expected a list of {n}, one for each question of {names['question']!r}, got {got}"
            file.report_row(record, names[ours], message)
    if not record.sound:
        file.unread = True
        return
    name = names["question"] if names["question"] in record.values else names["question"].partition(".")[0]
    for k in range(n):
        of_pair = {ours: value[k] if isinstance(value, list) else value for ours, value in values.items()}
        of_pair = {ours: value for ours, value in of_pair.items() if value is not MISSING}
        if "id" in of_pair and isinstance(values["id"], (str, int)) and str(values["id"]).strip():
            of_pair["id"] = f"{values['id']}-{k + 1}"
        yield replace(record, values=of_pair, place=f"{record.place}{name}[{k}].", variants=[])


def _settle_split(file: PairsFile, row: Row, has_split: bool) -> None:
    if row.file_of:
        own = row.values.get("split")
        if own in SPLITS and own != row.file_of:
            file.report_row(row, "split", f"the pair's own is {own!r}, and its file was given for {row.file_of!r}")
        row.values["split"] = row.file_of
    elif row.list_of or not has_split:  # a file that names no split at all is all there is to forget
        row.values.setdefault("split", row.list_of or "forget")


def _report_absent(file: PairsFile, found: list[Row], columns: Mapping[str, str], names: Mapping[str, str]) -> bool:
    """Whether a column is nowhere: a wrong mapping would else make every pair wrong."""
    before = len(file.problems)
    for source in dict.fromkeys(row.file for row in found):
        rows = [row for row in found if row.file == source]
        for ours in ("question", "answer"):
            if _any_has(rows, names[ours]):
                continue
            keys = _keys_of(rows)
            if ours in columns:
                message = f"no pair has {names[ours]!r}, mapped to {ours!r}{closest(names[ours], keys)}"
            else:
                message = (
                    f"no pair has {ours!r}, so no {ours} can be read"
                    + (": questions alone can be neither forgotten nor retained" if ours == "answer" else "")
                    + f". Map the column that holds it, {ours}=...; there are {', '.join(keys)}"
                )
            file.report(message, field="columns", file=source)
    for ours, theirs in columns.items():
        if ours not in ("question", "answer", *SPLITS) and found and not _any_has(found, theirs):
            hint = closest(theirs, _keys_of(found))
            file.report(f"no pair has {theirs!r}, mapped to {ours!r}{hint}", field="columns")
    return len(file.problems) > before


def _report_absent_splits(
    file: PairsFile, rows: list[Row], column: str, values_of: Mapping[str, str], has_split: bool
) -> bool:
    if not has_split:
        split, value = next(iter(values_of.items()))
        message = (
            f"{split!r} is mapped to {value!r}, and there is neither a list of that name nor a column {column!r} that "
            "could hold it: map the column too, as in split=concept"
        )
        file.report(message, field="columns")
        return True
    seen: set[str] = set()
    for row in rows:
        value = value_at(row.values, column)
        seen.update(map(str, value if isinstance(value, list) else [value]))
    absent = [value for value in values_of.values() if value != REST and value not in seen]
    for value in absent:
        file.report(f"no pair has {value!r} in {column!r}{closest(value, seen)}", field="columns")
    return bool(absent)


def _split_named(value: Any, values_of: Mapping[str, str]) -> str:
    """The split that a value of the split's column stands for; empty if the record is left out."""
    for split, theirs in values_of.items():
        if theirs != REST and str(value) == theirs:
            return split
    return next((split for split, theirs in values_of.items() if theirs == REST), "")


def _is_scalar(value: Any) -> bool:
    return value is not MISSING and not isinstance(value, list)


def _any_has(rows: Iterable[Row], path: str) -> bool:
    return any(_is_there(value_at(row.values, path)) for row in rows)


def _is_there(value: Any) -> bool:
    if isinstance(value, list) and value:
        return any(map(_is_there, value))
    return value is not MISSING


def _keys_of(rows: Iterable[Row]) -> list[str]:
    """Names that a column can be mapped to, those inside lists of objects as paths."""
    keys: dict[str, None] = {}
    for row in rows:
        for key, value in row.values.items():
            items = [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, Mapping)]
            keys.update({f"{key}.{inner}": None for item in items for inner in item} if items else {str(key): None})
    return list(keys)
