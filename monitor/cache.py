"""Where the user's cache is."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``LATENTWATCH_CACHE``, else ``XDG_CACHE_HOME/latentwatch``, else ``~/.cache/latentwatch``."""
    if path := os.environ.get("LATENTWATCH_CACHE"):
        return Path(path).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "latentwatch"
