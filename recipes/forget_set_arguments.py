"""A forget set named on the command line: its files, one or one a split, and its columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from monitor.stimuli.pairs_file import SPLITS, closest
from recipes.concepts import concept_path


def forget_set_source(items: str | Sequence[str]) -> Path | dict[str, Path]:
    """The file, or the file of each split, that `load_forget_set` takes.

    Parameters
    ----------
    items : str or sequence of str
        A bundled concept's name or a file; or ``forget=FILE``, ``retain=FILE`` and ``heldout=FILE``, each by itself or
        with a comma between them.

    Raises
    ------
    FileNotFoundError
        If a name is neither a bundled concept nor a file.
    ValueError
        If there are several files that do not say their split.
    """
    items = [items] if isinstance(items, str) else list(items)
    if len(items) == 1 and (Path(items[0]).exists() or not re.match(rf"\s*({'|'.join(SPLITS)})\s*=", items[0])):
        return concept_path(items[0])
    files = _named(items, "split=FILE")
    for split in files:
        if split not in SPLITS:
            raise ValueError(f"a file must be for one of {', '.join(SPLITS)}, got {split!r}{closest(split, SPLITS)}")
    return {split: concept_path(file) for split, file in files.items()}


def column_mapping(items: str | Sequence[str] | None) -> dict[str, str] | None:
    """The `columns` of `load_forget_set`, of ``ours=theirs`` items, each by itself or with a comma between them.

    Raises
    ------
    ValueError
        If an item is not of that form, or a name is mapped twice.
    """
    if not items:
        return None
    return _named([items] if isinstance(items, str) else items, "name=column")


def _named(items: Sequence[str], form: str) -> dict[str, str]:
    named: dict[str, str] = {}
    for item in items:
        for part in re.split(r",(?=\s*\w+\s*=)", item):  # other commas may be part of a name
            name, equals, value = (text.strip() for text in part.partition("="))
            if not name or not equals or not value:
                raise ValueError(f"expected {form} ..., got {part.strip()!r}")
            if name in named:
                raise ValueError(f"{name!r} is mapped twice")
            named[name] = value
    return named
