"""Concepts as JSON Lines: one entity a line, and beside the file a header with the templates that its clues fill."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from monitor.stimuli.concepts import CONCEPTS, CONTROL, ConceptSet, Context, Entity

_ROW = {
    "entity": str,
    "category": str,
    "forms": list,
    "article": str,
    "clues": list,
    "contexts": list,
    "questions": list,
}
_HEADER = {"concept": str, "ordered": bool, "cyclic": bool, "article": str, "templates": list, "question": str}
_TYPES = {str: "text", list: "a list of texts", bool: "true or false"}


def read_concept_set(path: str | Path) -> ConceptSet:
    """Read one concept.

    Parameters
    ----------
    path : str or Path
        A UTF-8 file of JSON objects, one entity a line: ``entity``, and either ``contexts`` (texts that end just before
        the entity, each a clue of its own) or ``clues`` (see Notes). Optional: ``category`` (default: the entity's
        name), ``forms`` (all that counts as a mention; the name comes first, whether it is written or not),
        ``questions`` (beside ``contexts``) and ``article`` (beside ``clues``).

    Returns
    -------
    ConceptSet
        Named by the header, or by the file.

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The first fault found, with its line: no JSON, a key that is missing or unknown, a value of the wrong kind,
        clues without templates, or what `ConceptSet` refuses.

    Notes
    -----
    The header is a JSON object in the file of the same name that ends in ``.json``: ``templates`` that hold ``{clue}``,
    ``article`` ("the", or "": what stands between a template and the entity), ``question`` ("Which animal {clue}?"),
    ``ordered``, ``cyclic`` (both false by default) and ``concept`` (the name). Every clue fills every template. A file
    of ``contexts`` can do without a header.
    """
    path = Path(path)
    if not path.is_file():
        known = (*CONCEPTS, CONTROL)
        close = difflib.get_close_matches(str(path).casefold(), known, n=1)
        raise FileNotFoundError(
            f"concept must be one of {', '.join(known)}, or a JSON Lines file that exists, got {str(path)!r}"
            + (f": did you mean {close[0]!r}?" if close else "")
        )
    header_path = path.with_suffix(".json")
    header = _read_header(header_path) if header_path != path and header_path.is_file() else {}
    # Not splitlines(): that would also cut at U+2028, which may stand inside a JSON string.
    lines = _text(path).split("\n")
    entities = [
        _entity(_record(line, _ROW, f"{path}, line {number}"), header, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    try:
        return ConceptSet(
            header.get("concept", path.stem), tuple(entities), header.get("ordered", False), header.get("cyclic", False)
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} must be UTF-8, got the byte {error.object[error.start]:#04x}: save it as such"
        ) from None


def _read_header(path: Path) -> dict[str, Any]:
    header = _record(_text(path), _HEADER, str(path))
    for template in [*header.get("templates", []), *([header["question"]] if "question" in header else [])]:
        if template.count("{clue}") != 1:
            raise ValueError(f"{path}: a template must hold {{clue}} once, got {template!r}: write where the clue goes")
    return header


def _record(text: str, keys: dict[str, type], where: str) -> dict[str, Any]:
    """One JSON object with no other keys, and values of these types that are not blank (an article may be)."""
    try:
        record = json.loads(text, object_pairs_hook=_without_doubles)
    except _Doubled as error:
        raise ValueError(f"{where}: expected every key once, got {error} twice: remove one") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: expected a JSON object, got invalid JSON ({error}): correct it") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(record).__name__}: write {{...}}")
    for key, value in record.items():
        if key not in keys:
            raise ValueError(f"{where}: expected the keys {', '.join(keys)}, got {key!r}: rename it or remove it")
        listed = keys[key] is list
        if not isinstance(value, keys[key]) or (listed and not all(isinstance(item, str) for item in value)):
            raise ValueError(f"{where}: expected {_TYPES[keys[key]]} for {key!r}, got {value!r:.60}: correct it")
        if listed and not value:
            raise ValueError(f"{where}: expected at least one text for {key!r}, got none: write one or remove the key")
        texts = value if listed else [value] if isinstance(value, str) and key != "article" else []
        if any(not item.strip() for item in texts):
            raise ValueError(f"{where}: expected text for {key!r}, got a blank in {value!r:.60}: write it or remove it")
    return record


class _Doubled(Exception):
    """A key that is there twice; JSON itself would take the last."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if doubled := next((key for i, key in enumerate(keys) if key in keys[:i]), None):
        raise _Doubled(repr(doubled))
    return dict(pairs)


def _entity(row: dict[str, Any], header: dict[str, Any], where: str) -> Entity:
    if "entity" not in row:
        raise ValueError(f"{where}: expected the key 'entity', the entity's name, got none: add it")
    if ("clues" in row) == ("contexts" in row):
        got = "both" if "clues" in row else "neither"
        raise ValueError(f"{where}: expected either 'clues' or 'contexts', got {got}: give one of them")
    for key, needed in (("article", "clues"), ("questions", "contexts")):
        if key in row and needed not in row:
            raise ValueError(f"{where}: expected {key!r} only beside {needed!r}, got it without: remove it")
    name = row["entity"]
    forms = (name, *(form for form in row.get("forms", ()) if form != name))
    if "contexts" in row:
        contexts = [Context(text, clue) for clue, text in enumerate(row["contexts"])]
        questions = row.get("questions", [])
    else:
        if "templates" not in header:
            raise ValueError(
                f"{where}: expected templates for the clues in a header beside the file (same name, .json), got none: "
                'write {"templates": ["The animal that {clue} is the"]}, or give whole \'contexts\''
            )
        article = row.get("article", header.get("article", "")).strip()
        contexts = [
            Context(_capitalised(f"{template.replace('{clue}', clue)} {article}".rstrip()), number)
            for number, clue in enumerate(row["clues"])
            for template in header["templates"]
        ]
        questions = [
            _capitalised(header["question"].replace("{clue}", c)) for c in row["clues"] if "question" in header
        ]
    return Entity(name, row.get("category", name), forms, tuple(contexts), tuple(questions))


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]
