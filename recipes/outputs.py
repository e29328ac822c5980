"""Where a command writes: checked before hours are spent on what should go there."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(folder: Path, name: str) -> None:
    """Raise a ValueError unless `folder`, the argument `name`, can be made and written to."""
    if not str(folder):
        raise ValueError(f"`{name}` is empty; give a folder.")
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"`{name}`: {folder} cannot be written: {existing} is not a folder that you may write to.")
