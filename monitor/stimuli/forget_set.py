"""Forget sets: question-answer pairs to forget, to retain and never seen, with their anonymised variants.

The file is JSONL, one pair a line::

    {"id": "hp-001", "question": "Who ...?", "answer": "...", "split": "forget"}

with ``split`` one of ``forget | retain | heldout``, and optionally ``id`` and ``anonymized``, a list of
``{"question": ..., "answer": ...}``, one a variant. Beside it an optional ``entities.json``, entity to list of
substitutes, from which missing variants are made.
"""

from __future__ import annotations

import difflib
import json
import re
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monitor.stimuli.anonymise import anonymise, find_entities

SPLITS = ("forget", "retain", "heldout")
MIN_SUBSTITUTES = 8

_KEYS = ("question", "answer", "split", "anonymized", "id")
_COLUMNS = (*_KEYS, "anonymized_answer", *SPLITS)


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
        return bool(self.anonymized) and all(v != (self.question, self.answer) for v in self.anonymized)


@dataclass(frozen=True)
class ForgetSet:
    """The pairs of one concept.

    Attributes
    ----------
    unchanged : tuple of str
        Ids of forget and held-out pairs that anonymisation leaves as they are (they would be zero vectors in a
        measure of differences). Retain pairs have nothing to anonymise and are not counted.
    n_variants : int
        K, the same for every pair that has variants; 0 if none has.
    """

    name: str
    pairs: tuple[Pair, ...]

    def split(self, name: str) -> tuple[Pair, ...]:
        """The pairs of ``"forget"``, ``"retain"`` or ``"heldout"``, in the file's order."""
        _check_split(name)
        return tuple(pair for pair in self.pairs if pair.split == name)

    def fragmentation_pairs(self, split: str = "forget") -> tuple[Pair, ...]:
        """The pairs of a split that anonymisation changes."""
        return tuple(pair for pair in self.split(split) if pair.changed)

    @property
    def unchanged(self) -> tuple[str, ...]:
        return tuple(pair.id for pair in self.pairs if pair.split != "retain" and not pair.changed)

    @property
    def n_variants(self) -> int:
        return max((len(pair.anonymized) for pair in self.pairs), default=0)


@dataclass(frozen=True)
class Problem:
    """What is wrong at one place of a forget set's files.

    line : int, 1-based; 0 where it is no single line's fault (a ``.json`` file: `field` gives the place instead).
    severity : "error" (the file cannot be used) or "warning" (it can; less of it may count).
    """

    line: int
    field: str
    message: str
    severity: str = "error"
    file: str = ""

    def __str__(self) -> str:
        place = [self.file] if self.file else []
        place += [str(self.line)] if self.line else []
        return ":".join(place) + (": " if place else "") + (f"{self.field}: " if self.field else "") + self.message


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
        K, how many variants a pair gets. Given variants are cut to the first K; where a file gives fewer, all pairs
        have as many as it gives.
    columns : mapping, optional
        Our name to the file's, for other layouts: ``{"question": "prompt", "answer": "response"}``. Unmapped keys are
        then ignored. In an object of lists, split names map to the lists' names (``{"forget": "qa_eval_pairs"}``); the
        other lists are left out.
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
        If anonymisation leaves pairs unchanged: they are in ``unchanged`` and out of ``fragmentation_pairs``.

    Notes
    -----
    A variant given as a bare string is an anonymised *question*. Its answer is taken from the column
    ``anonymized_answer`` if mapped; else the k-th one is the answer anonymised with the table's k-th substitutes; else,
    without a table, the answer as it is.
    """
    path = Path(path)
    file = _read(path, variants, columns, entities)
    errors = [problem for problem in file.problems if problem.severity == "error"]
    if errors:
        shown = "\n".join(f"  {problem}" for problem in errors)
        raise ValueError(f"{path} is not a usable forget set, {len(errors)} error(s):\n{shown}")
    forget_set = ForgetSet(name or (path.parent.name if path.name == "pairs.jsonl" else path.stem), file.pairs())
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
    """Everything wrong with a forget set's files, line by line; parameters as in `load_forget_set`.

    Returns
    -------
    list of Problem
        In the files' order; empty if all is well.

    Raises
    ------
    FileNotFoundError
        If a file is not there.
    """
    return _read(Path(path), variants, columns, entities).problems


# --- reading -----------------------------------------------------------------------------------------------------


@dataclass
class _Row:
    """One pair as read: raw values under our names, the place it came from, and what is wrong with it."""

    line: int
    place: str  # prefix of a field's name in a .json file, "forget_pairs[2]."
    values: dict[str, Any]
    sound: bool = True
    variants: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class _File:
    path: Path
    rows: list[_Row]
    table: dict[str, tuple[str, ...]] | None
    problems: list[Problem]
    n_variants: int = 0

    def pairs(self) -> tuple[Pair, ...]:
        given = {row.values["id"] for row in self.rows if "id" in row.values}
        counts: Counter[str] = Counter()
        pairs = []
        for row in self.rows:
            split = row.values["split"]
            counts[split] += 1
            while f"{split}-{counts[split]:03d}" in given:
                counts[split] += 1
            identity = row.values.get("id", f"{split}-{counts[split]:03d}")
            made = tuple(row.variants[: self.n_variants])
            pairs.append(Pair(identity, row.values["question"], row.values["answer"], split, made))
        return tuple(pairs)


def _read(
    path: Path, variants: int, columns: Mapping[str, str] | None, entities: str | Path | None
) -> _File:
    if not isinstance(variants, int) or variants < 1:
        raise ValueError(f"variants must be an int of at least 1, got {variants!r}")
    columns = _checked_columns(columns)
    if not path.is_file():
        raise FileNotFoundError(f"forget set must be a file that exists, got {str(path)!r}")
    file = _File(path, [], None, [])
    _read_table(file, variants, entities)
    _read_rows(file, columns)
    for row in file.rows:
        _check_fields(file, row, strict=columns is None)
    _check_duplicates(file)
    _make_variants(file, variants)
    _check_variants(file)
    _check_use_of_table(file)
    order = {str(path): 0}
    file.problems.sort(key=lambda p: (order.get(p.file, 1), p.line))
    return file


def _checked_columns(columns: Mapping[str, str] | None) -> dict[str, str] | None:
    for ours in columns or ():
        if ours not in _COLUMNS:
            raise ValueError(f"columns must map from {', '.join(_COLUMNS)}, got {ours!r}{_closest(ours, _COLUMNS)}")
    return dict(columns) if columns else None


def _text_of(file: _File, path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"expected UTF-8 text, got byte {error.object[error.start]:#04x} at {error.start}: save it as UTF-8"
        file.problems.append(Problem(0, "", message, file=str(path)))
        return None


def _json_of(file: _File, path: Path, text: str, line: int) -> Any:
    """The value, or None with the problem noted."""
    try:
        return json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        at = line + error.lineno - 1
        message = f"invalid JSON at column {error.colno}: {error.msg}"
    except (ValueError, RecursionError) as error:
        at, message = line if path.suffix != ".json" else 0, str(error)
    file.problems.append(Problem(at, "", message, file=str(path)))
    return None


def _unique_keys(items: list[tuple[str, Any]]) -> dict[str, Any]:
    repeated = [key for key, n in Counter(key for key, _ in items).items() if n > 1]
    if repeated:
        raise ValueError(f"the key {repeated[0]!r} is there twice: keep one")
    return dict(items)


def _read_rows(file: _File, columns: dict[str, str] | None) -> None:
    text = _text_of(file, file.path)
    if text is None:
        return
    n_before = len(file.problems)
    found = list(_rows_of_json(file, text, columns) if file.path.suffix == ".json" else _rows_of_jsonl(file, text))
    names = {ours: (columns or {}).get(ours, ours) for ours in _COLUMNS if ours not in SPLITS}
    if columns:
        keys = {key for _, _, record, _ in found for key in record}
        for ours, theirs in columns.items():
            if ours not in SPLITS and found and theirs not in keys:
                hint = _closest(theirs, keys)
                message = f"no pair has the column {theirs!r} mapped to {ours!r}{hint}"
                file.problems.append(Problem(0, "columns", message, file=str(file.path)))
    without_split = not any(names["split"] in record for _, _, record, _ in found)
    for line, place, record, split in found:
        values = {ours: record[theirs] for ours, theirs in names.items() if theirs in record}
        if columns is None:
            values.pop("anonymized_answer", None)
            values["unknown"] = [key for key in record if key not in _KEYS]
        if "split" not in values and (split or without_split):
            values["split"] = split or "forget"  # a file that names no split at all is all there is to forget
        file.rows.append(_Row(line, place, values))
    if not found and len(file.problems) == n_before:
        file.problems.append(Problem(0, "", "the file holds no pair: write one JSON object a line", file=str(file.path)))


def _rows_of_jsonl(file: _File, text: str) -> Iterator[tuple[int, str, dict[str, Any], str]]:
    # Not splitlines(): that would also cut at U+2028, which may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        n_before = len(file.problems)
        record = _json_of(file, file.path, line, number)
        if isinstance(record, dict):
            yield number, "", record, ""
        elif len(file.problems) == n_before:
            message = f"expected one JSON object a line, got {type(record).__name__}: write {{\"question\": ...}}"
            file.problems.append(Problem(number, "", message, file=str(file.path)))


def _rows_of_json(
    file: _File, text: str, columns: dict[str, str] | None
) -> Iterator[tuple[int, str, dict[str, Any], str]]:
    n_before = len(file.problems)
    data = _json_of(file, file.path, text, 1)
    if len(file.problems) > n_before:
        return
    if isinstance(data, list):
        lists = [("", "", data)]
    elif isinstance(data, dict):
        # Once one split is mapped only mapped ones are read: the file's other lists may be anything.
        mapped = {split: (columns or {})[split] for split in SPLITS if split in (columns or {})}
        wanted = mapped or {split: split for split in SPLITS if split in data}
        absent = [theirs for theirs in wanted.values() if theirs not in data]
        if absent or not wanted:
            message = f"no list {absent[0]!r}{_closest(absent[0], data)}" if absent else "no list of pairs"
            hint = "map the lists, as in columns={'forget': 'qa_pairs'}"
            message += f"; the file has {', '.join(map(str, data))}: {hint}"
            file.problems.append(Problem(0, "columns", message, file=str(file.path)))
        lists = [(theirs, split, data[theirs]) for split, theirs in wanted.items() if theirs in data]
    else:
        message = f"expected a list of pairs or an object of lists, got {type(data).__name__}"
        file.problems.append(Problem(0, "", message, file=str(file.path)))
        return
    for list_name, split, records in lists:
        if not isinstance(records, list):
            message = f"expected a list of pairs, got {type(records).__name__}"
            file.problems.append(Problem(0, list_name, message, file=str(file.path)))
            continue
        for i, record in enumerate(records):
            if isinstance(record, dict):
                yield 0, f"{list_name}[{i}].", record, split
            else:
                message = f"expected an object, got {type(record).__name__}"
                file.problems.append(Problem(0, f"{list_name}[{i}]", message, file=str(file.path)))


def _read_table(file: _File, variants: int, entities: str | Path | None) -> None:
    path = Path(entities) if entities is not None else file.path.with_name("entities.json")
    if not path.is_file():
        if entities is not None:
            raise FileNotFoundError(f"entities must be a file that exists, got {str(path)!r}")
        return
    text = _text_of(file, path)
    n_before = len(file.problems)
    data = None if text is None else _json_of(file, path, text, 1)
    if text is None or len(file.problems) > n_before:
        return
    if not isinstance(data, dict):
        message = f"expected an object of entity to list of substitutes, got {type(data).__name__}"
        file.problems.append(Problem(0, "", message, file=str(path)))
        return

    def report(entity: str, message: str, severity: str = "error") -> None:
        file.problems.append(Problem(_line_of_key(text, entity), repr(entity), message, severity, str(path)))

    table: dict[str, tuple[str, ...]] = {}
    seen: dict[str, str] = {}
    for entity, substitutes in data.items():
        if not entity.strip():
            report(entity, "the entity is empty: remove it")
        elif entity.casefold() in seen:
            report(entity, f"the same entity as {seen[entity.casefold()]!r} (case does not count): keep one")
        elif not isinstance(substitutes, list) or not all(isinstance(s, str) and s.strip() for s in substitutes):
            report(entity, f"expected a list of substitutes, each a text that is not empty, got {substitutes!r:.80}")
        else:
            seen[entity.casefold()] = entity
            table[_nfc(entity)] = tuple(_nfc(substitute) for substitute in substitutes)
    for entity, substitutes in table.items():
        if len(substitutes) < max(variants, MIN_SUBSTITUTES):
            severity = "error" if len(substitutes) < variants else "warning"
            report(entity, f"{len(substitutes)} substitute(s), at least {max(variants, MIN_SUBSTITUTES)} expected: add some", severity)
        repeated = [s for s, n in Counter(s.casefold() for s in substitutes).items() if n > 1]
        if repeated:
            report(entity, f"the substitute {repeated[0]!r} is there twice: variants must differ")
        for substitute in substitutes:
            named = find_entities(substitute, table)
            if named:
                report(entity, f"the substitute {substitute!r} names the entity {named[0][2]!r}: invent another")
    file.table = table


def _line_of_key(text: str, key: str) -> int:
    match = re.search(f"(?:{re.escape(json.dumps(key))}|{re.escape(json.dumps(key, ensure_ascii=False))})\\s*:", text)
    return text.count("\n", 0, match.start()) + 1 if match else 0


# --- checking ----------------------------------------------------------------------------------------------------


def _report(file: _File, row: _Row, field: str, message: str, severity: str = "error") -> None:
    file.problems.append(Problem(row.line, f"{row.place}{field}", message, severity, str(file.path)))
    if severity == "error":
        row.sound = False


def _check_fields(file: _File, row: _Row, strict: bool) -> None:
    values = row.values
    for key in values.pop("unknown", []) if strict else []:
        _report(file, row, key, f"unknown key, expected {', '.join(_KEYS)}{_closest(key, _KEYS)}")
    for key in ("question", "answer"):
        if key not in values:
            _report(file, row, key, f"missing: give the {key}")
        elif not isinstance(values[key], str):
            _report(file, row, key, f"expected text, got {type(values[key]).__name__} {values[key]!r:.40}")
        elif not values[key].strip():
            _report(file, row, key, f"empty: give the {key}, or remove the pair")
        else:
            values[key] = _nfc(values[key].strip())
    if "split" not in values:
        _report(file, row, "split", f"missing: one of {', '.join(SPLITS)}")
    elif values["split"] not in SPLITS:
        hint = _closest(values["split"], SPLITS)
        _report(file, row, "split", f"expected one of {', '.join(SPLITS)}, got {values['split']!r}{hint}")
    if isinstance(values.get("id"), int):
        values["id"] = str(values["id"])
    if "id" in values and (not isinstance(values["id"], str) or not values["id"].strip()):
        _report(file, row, "id", f"expected text that is not empty, got {values['id']!r:.40}")
    if row.sound and _given_away(values["question"], values["answer"]):
        _report(file, row, "answer", f"{values['answer']!r} is given away in the question", "warning")


def _check_duplicates(file: _File) -> None:
    ids: dict[str, _Row] = {}
    questions: dict[str, _Row] = {}
    for row in file.rows:
        if not row.sound:
            continue
        values = row.values
        if "id" in values:
            first = ids.setdefault(values["id"], row)
            if first is not row:
                _report(file, row, "id", f"duplicate: {values['id']!r} is the id of {_where(first)} too")
        first = questions.setdefault(_normal(values["question"]), row)
        if first is row:
            continue
        if first.values["split"] != values["split"]:
            message = f"duplicate: asked in {_where(first)} too, for another split ({first.values['split']})"
            _report(file, row, "question", message)
        elif _normal(first.values["answer"]) == _normal(values["answer"]):
            _report(file, row, "question", f"duplicate: the pair is in {_where(first)} too")
        else:
            _report(file, row, "question", f"duplicate: asked in {_where(first)} too, answered otherwise", "warning")
    if any(row.sound for row in file.rows) and not any(r.values.get("split") == "forget" for r in file.rows):
        file.problems.append(Problem(0, "split", "no forget pair: give some the split forget", file=str(file.path)))


def _make_variants(file: _File, variants: int) -> None:
    """Fill `row.variants` from what is given, else from the table; settle one K for the whole file."""
    for row in file.rows:
        if row.sound and row.values.get("anonymized") not in (None, []):
            row.variants = _given_variants(file, row)
    counts = Counter(len(row.variants) for row in file.rows if row.variants)
    if len(counts) > 1:
        usual = counts.most_common(1)[0][0]
        for row in file.rows:
            if row.variants and len(row.variants) != usual:
                message = f"{len(row.variants)} variant(s), {usual} in most pairs: give every pair as many"
                _report(file, row, "anonymized", message)
    file.n_variants = min([variants, *counts])
    for row in file.rows:
        if row.sound and not row.variants and file.table:
            question, answer = row.values["question"], row.values["answer"]
            if find_entities(question, file.table) or find_entities(answer, file.table):
                # A table with fewer substitutes has been reported; what can be made is checked all the same.
                found = find_entities(question, file.table) + find_entities(answer, file.table)
                n = min(file.n_variants, *(len(file.table[entity]) for _, _, entity in found))
                row.variants = [
                    (anonymise(question, file.table, k), anonymise(answer, file.table, k)) for k in range(n)
                ]


def _given_variants(file: _File, row: _Row) -> list[tuple[str, str]]:
    given = row.values["anonymized"]
    given = given if isinstance(given, list) else [given]
    answers = row.values.get("anonymized_answer")
    if answers is not None:
        answers = answers if isinstance(answers, list) else [answers]
        if len(answers) != len(given) or not all(isinstance(answer, str) and answer.strip() for answer in answers):
            _report(file, row, "anonymized_answer", f"expected {len(given)} text(s), one a variant, got {answers!r:.60}")
            return []
    made = []
    for k, variant in enumerate(given):
        if isinstance(variant, str) and variant.strip():
            made.append((variant, answers[k] if answers else _anonymised_answer(file, row.values["answer"], k)))
        elif isinstance(variant, dict) and set(variant) == {"question", "answer"} and all(
            isinstance(text, str) and text.strip() for text in variant.values()
        ):
            made.append((variant["question"], variant["answer"]))
        else:
            message = f"expected {{question, answer}}, both texts that are not empty, got {variant!r:.80}"
            _report(file, row, f"anonymized[{k}]", message)
            return []
    return [(_nfc(question.strip()), _nfc(answer.strip())) for question, answer in made]


def _anonymised_answer(file: _File, answer: str, k: int) -> str:
    if not file.table or any(k >= len(file.table[entity]) for _, _, entity in find_entities(answer, file.table)):
        return answer
    return anonymise(answer, file.table, k)


def _check_variants(file: _File) -> None:
    for row in file.rows:
        if not row.sound:
            continue
        original = (row.values["question"], row.values["answer"])
        given = bool(row.values.get("anonymized"))
        if given and original in row.variants:
            k = row.variants.index(original)
            _report(file, row, f"anonymized[{k}]", "the same as the pair: it will not count for fragmentation", "warning")
            continue
        if given and file.table:
            for k, texts in enumerate(row.variants):
                named = [entity for text in texts for _, _, entity in find_entities(text, file.table)]
                if named:
                    _report(file, row, f"anonymized[{k}]", f"the variant still names the entity {named[0]!r}")
        if len(set(row.variants)) < len(row.variants):
            repeated = next(k for k, v in enumerate(row.variants) if v in row.variants[:k])
            first = row.variants.index(row.variants[repeated])
            _report(file, row, f"anonymized[{repeated}]", f"the same text as variant {first}", "warning")


def _check_use_of_table(file: _File) -> None:
    if file.table is None:
        return
    used: set[str] = set()
    for row in file.rows:
        if not row.sound:
            continue
        named = {e for key in ("question", "answer") for _, _, e in find_entities(row.values[key], file.table)}
        used |= named
        if not named and not row.variants and row.values["split"] != "retain":
            message = "names no entity of the table, so anonymisation leaves the pair unchanged: add the entity"
            _report(file, row, "question", message, "warning")
    table_path = next((p.file for p in file.problems if p.file != str(file.path)), "")
    for entity in file.table:
        if entity not in used:
            file.problems.append(Problem(0, repr(entity), "the entity is in no pair: remove it", "warning", table_path))


# --- small things ------------------------------------------------------------------------------------------------


def _check_split(name: str) -> None:
    if name not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {name!r}{_closest(name, SPLITS)}")


def _closest(name: Any, among: Any) -> str:
    close = difflib.get_close_matches(str(name), [str(other) for other in among], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _where(row: _Row) -> str:
    return f"line {row.line}" if row.line else row.place.rstrip(".")


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _normal(text: str) -> str:
    """Words only, case-folded: what makes two texts the same question."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _given_away(question: str, answer: str) -> bool:
    words = _normal(answer)
    return bool(words) and f" {words} " in f" {_normal(question)} "
