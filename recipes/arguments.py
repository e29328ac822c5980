"""TRL's parser with errors that name the argument: what YAML let through, unknown names, values of another type."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

import yaml
from trl import TrlParser


def option(argv: Sequence[str], name: str) -> str | None:
    """The last value of an option on a command line, in either of its two forms."""
    found = None
    for i, word in enumerate(argv):
        if word == name and i + 1 < len(argv):
            found = argv[i + 1]
        elif word.startswith(f"{name}="):
            found = word.split("=", 1)[1]
    return found


def read_config(argv: Sequence[str]) -> dict:
    """What the file given by ``--config`` holds; nothing without one.

    Raises
    ------
    ValueError
        If there is no such file, or it is not a YAML mapping.
    """
    path = option(argv, "--config")
    if path is None:
        return {}
    if not Path(path).is_file():
        raise ValueError(f"`--config`: no such file: {path!r}")
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"`--config` is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"`--config` must hold `name: value` lines, {path} holds {type(content).__name__}")
    return content


def parse(argv: Sequence[str], classes: Sequence[type], prog: str) -> tuple:
    """Instances of the dataclasses, from YAML by ``--config`` and the command line over it.

    Raises
    ------
    ValueError
        For a value of another type than its argument's, and for an argument that none of the classes has.
    """
    known = {field.name: field for cls in classes for field in fields(cls) if field.init}
    for name, value in read_config(argv).items():
        if name in known:
            _check_type(name, value, known[name])
    parser = TrlParser(tuple(classes), prog=prog)
    try:
        return parser.parse_args_and_config(list(argv))
    except ValueError as error:
        raise _explained(error, known, prog) from error


def _check_type(name: str, value, field) -> None:
    """The parser takes YAML values as they are: an empty one as None, 1.5 for a whole number, a list for a word."""
    default = field.default if field.default is not MISSING else None
    if field.default_factory is not MISSING:
        default = field.default_factory()
    if value is None and default is not None:
        raise ValueError(f"`{name}` is empty in the config file; give a value, or leave the line out")
    kind = str(field.type).lower()
    if isinstance(value, (list, dict)) and "list" not in kind and "dict" not in kind:
        raise ValueError(f"`{name}` must be a single value, got {value!r}")
    if kind in ("int", "<class 'int'>") and isinstance(value, float) and not value.is_integer():
        raise ValueError(f"`{name}` must be a whole number, got {value!r}")


def _explained(error: ValueError, known: dict, prog: str) -> ValueError:
    """An error about unknown arguments in words that name them and what may have been meant."""
    text = str(error)
    if "not used" not in text and "nknown argument" not in text:
        return error
    names = [name for name in re.findall(r"--?(\w+)|'(\w+)'", text) for name in name if name]
    unknown = [name for name in dict.fromkeys(names) if name not in known and not name.replace(".", "").isdigit()]
    if not unknown:
        return error
    hints = []
    for name in unknown:
        close = difflib.get_close_matches(name, known, n=1)
        hints.append(f"`{name}`" + (f" (did you mean `{close[0]}`?)" if close else ""))
    return ValueError(f"{prog} has no argument {', '.join(hints)}; {prog} --help lists them")
