"""Reading a forget set's pairs, from files or from memory, and its entity table."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monitor.stimuli.anonymise import find_entities
from monitor.stimuli.pairs_columns import MISSING, check_columns, map_columns, value_at
from monitor.stimuli.pairs_file import MIN_SUBSTITUTES, SPLITS, PairsFile, Problem, Row, closest, nfc


@dataclass(frozen=True)
class Source:
    """Where pairs come from: a file, or records. split: what all of them are for, if the caller said so."""

    name: str
    data: Path | Iterable[Any]
    split: str = ""


def read_pairs_file(
    source: Any, variants: int, columns: Mapping[str, str] | None, entities: str | Path | None
) -> PairsFile:
    """Read the pairs and the entity table; parameters as in `monitor.stimuli.forget_set.load_forget_set`."""
    columns = dict(columns or {})
    sources = sources_of(source)
    check_columns(columns, by_split=bool(sources[0].split))
    for part in sources:
        if isinstance(part.data, Path) and not part.data.is_file():
            of_split = f" of {part.split}" if part.split else ""
            raise FileNotFoundError(f"forget set must be a file that exists, got {str(part.data)!r}{of_split}")
    table_path = Path(entities) if entities is not None else None
    if table_path is None and isinstance(sources[0].data, Path):
        table_path = sources[0].data.with_name("entities.json")
    file = PairsFile(tuple(part.name for part in sources), table_path)
    if table_path is not None and table_path.is_file():
        _read_table(file, variants)
    elif entities is not None:
        raise FileNotFoundError(f"entities must be a file that exists, got {str(entities)!r}")
    found = [row for part in sources for row in _rows_of(file, part, columns)]
    map_columns(file, found, columns)
    return file


def sources_of(source: Any) -> list[Source]:
    """One source, or one a split, in the order of `SPLITS`."""
    if not isinstance(source, Mapping):
        return [_source_of(source, "")]
    for split in source:
        if split not in SPLITS:
            raise ValueError(
                f"source must map from {', '.join(SPLITS)}, got {split!r}: say which split it is, as in "
                f'{{"forget": data[{split!r}]}}'
            )
    if "forget" not in source:
        raise ValueError(f"source must have pairs to forget under 'forget', got {', '.join(source) or 'nothing'}")
    return [_source_of(source[split], split) for split in SPLITS if split in source]


def _source_of(data: Any, split: str) -> Source:
    if isinstance(data, (str, os.PathLike)):
        return Source(str(data), Path(data), split)
    if isinstance(data, (bytes, Mapping)) or not isinstance(data, Iterable):
        raise ValueError(
            "source must be a path, records (a datasets.Dataset, a list of dicts) or a mapping of splits to either, "
            f"got {type(data).__name__}" + (f" for {split!r}" if split else "")
        )
    return Source(split or "records", data, split)


# --- pairs -------------------------------------------------------------------------------------------------------


def _rows_of(file: PairsFile, source: Source, columns: dict[str, str]) -> list[Row]:
    n_problems = len(file.problems)
    if not isinstance(source.data, Path):
        plain = getattr(source.data, "with_format", None)  # of a Dataset: values as Python's own, not as tensors
        rows = list(_rows_of_list(file, source, list(plain(None) if plain else source.data)))
    elif source.data.suffix == ".parquet":
        rows = list(_rows_of_parquet(file, source))
    else:
        text = _text_of(file, source.data)
        if text is None:
            return []
        rows_of = _rows_of_json if source.data.suffix == ".json" else _rows_of_jsonl
        rows = list(rows_of(file, source, text, columns))
    if not rows and len(file.problems) == n_problems:
        hint = ": write one JSON object a line" if isinstance(source.data, Path) else ""
        file.report(f"the file holds no pair{hint}", file=source.name)
    return rows


def _rows_of_jsonl(file: PairsFile, source: Source, text: str, columns: dict[str, str]) -> Iterator[Row]:
    # Not splitlines(): that would also cut at U+2028, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record, fault = _json_of(line)
        if fault is not None:
            file.report(fault[1], number, file=source.name)
        elif not isinstance(record, dict):
            message = f'expected an object a line, {{"question": ...}}, got {type(record).__name__}'
            file.report(message, number, file=source.name)
        else:
            yield Row(number, "", record, source.name, file_of=source.split)


def _rows_of_json(file: PairsFile, source: Source, text: str, columns: dict[str, str]) -> Iterator[Row]:
    data, fault = _json_of(text)
    if fault is not None and _is_json_lines(text):
        yield from _rows_of_jsonl(file, source, text, columns)
    elif fault is not None:
        file.report(fault[1], fault[0], file=source.name)
    elif isinstance(data, list):
        yield from _rows_of_list(file, source, data)
    elif isinstance(data, dict):
        yield from _rows_of_object(file, source, data, columns)
    else:
        message = f"expected a list of pairs or an object of such lists, got {type(data).__name__}"
        file.report(message, file=source.name)


def _is_json_lines(text: str) -> bool:
    """Whether the first line is a whole object: some benchmarks name JSON Lines .json."""
    first = next((line for line in text.split("\n") if line.strip()), "")
    return isinstance(_json_of(first)[0], dict)


def _rows_of_object(file: PairsFile, source: Source, data: dict, columns: dict[str, str]) -> Iterator[Row]:
    # Once one split is mapped only mapped lists are read: the file's others may be anything.
    wanted = {split: columns[split] for split in SPLITS if split in columns} or {s: s for s in SPLITS if s in data}
    absent = [theirs for theirs in wanted.values() if theirs not in data]
    if (absent or not wanted) and value_at(data, columns.get("question", "question")) is not MISSING:
        yield Row(1, "", data, source.name, file_of=source.split)  # a file of one record
        return
    if source.split:
        has = ", ".join(map(str, data)) or "nothing"
        message = f"expected the list of the pairs of {source.split!r} alone, got an object of {has}"
        file.report(message, file=source.name)
        return
    if absent or not wanted:
        fault = f"no list {absent[0]!r}{closest(absent[0], data)}" if absent else "no list named for a split"
        has = ", ".join(map(str, data)) or "nothing"
        message = f"{fault}; the file has {has}: map the lists, as in forget=qa_pairs"
        file.report(message, field="columns", file=source.name)
    for split, theirs in wanted.items():
        if theirs in data:
            yield from _rows_of_list(file, source, data[theirs], theirs, split)


def _rows_of_list(file: PairsFile, source: Source, records: Any, name: str = "", list_of: str = "") -> Iterator[Row]:
    if not isinstance(records, list):
        message = f"expected a list of pairs, got {type(records).__name__}"
        file.report(message, field=name, file=source.name)
        return
    for i, record in enumerate(records):
        if isinstance(record, Mapping):
            yield Row(0, f"{name}[{i}].", dict(record), source.name, list_of, source.split)
        else:
            message = f"expected an object, got {type(record).__name__}"
            file.report(message, field=f"{name}[{i}]", file=source.name)


def _rows_of_parquet(file: PairsFile, source: Source) -> Iterator[Row]:
    import pyarrow  # noqa: PLC0415 - slow to import, and of no use to other files
    import pyarrow.parquet  # noqa: PLC0415

    try:
        records = pyarrow.parquet.read_table(source.data).to_pylist()
    except pyarrow.ArrowInvalid as error:
        file.report(f"expected a Parquet file: {error}", file=source.name)
        return
    yield from _rows_of_list(file, source, records)


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
