"""Bundled forget sets: one folder a concept, with ``pairs.jsonl`` and ``entities.json``."""

from __future__ import annotations

import difflib
from importlib.resources import files
from pathlib import Path


def concept_names() -> list[str]:
    """Names of the bundled concepts."""
    root = Path(str(files("recipes.concepts")))
    return sorted(folder.name for folder in root.iterdir() if (folder / "pairs.jsonl").is_file())


def concept_path(name_or_path: str | Path) -> Path:
    """The pairs file of a bundled concept's name, or of a path (a file, or a folder with ``pairs.jsonl``).

    Raises
    ------
    FileNotFoundError
        If it is neither; the closest bundled name is proposed.
    """
    path = Path(name_or_path)
    if str(name_or_path) in concept_names():
        return Path(str(files("recipes.concepts"))) / str(name_or_path) / "pairs.jsonl"
    if path.is_dir() and (path / "pairs.jsonl").is_file():
        return path / "pairs.jsonl"
    if path.is_file():
        return path
    close = difflib.get_close_matches(str(name_or_path), concept_names(), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise FileNotFoundError(
        f"forget set must be a bundled concept ({', '.join(concept_names())}) or a file that exists, "
        f"got {str(name_or_path)!r}{hint}"
    )
