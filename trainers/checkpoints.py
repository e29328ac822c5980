"""The newest checkpoint that was written to its end."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

logger = logging.getLogger(__name__)


def last_complete_checkpoint(output_dir: str | Path) -> str | None:
    """The ``checkpoint-<step>`` folder with the highest step that is complete, or None.

    The Trainer writes a checkpoint file by file, and ``trainer_state.json`` last. A run killed meanwhile leaves a
    folder that `transformers.trainer_utils.get_last_checkpoint` takes for the newest checkpoint and that cannot be
    loaded; it is passed over here, with a warning, and written anew when the run gets there again.
    """
    folder = Path(output_dir)
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and (match := re.fullmatch(r"checkpoint-(\d+)", path.name)):
            found[int(match[1])] = path
    for _, path in sorted(found.items(), reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            for weights in path.glob("*.safetensors"):
                with safe_open(weights, framework="pt"):  # the header says how long the file has to be
                    pass
        except (OSError, ValueError, SafetensorError):
            logger.warning("%s was not written to its end, or is damaged, and is passed over.", path)
            continue
        return str(path)
    return None
