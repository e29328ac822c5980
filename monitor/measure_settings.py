"""What a run's measures were set to, on disk, so that a resumed run can say what it reads otherwise."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from monitor.measures.measure import Measure

FILE_NAME = "measures.json"


def write_settings(path: Path, measures: Sequence[Measure]) -> None:
    """Write every measure's settings by its name, as one JSON object; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(_settings(measures), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def warn_of_changes(path: Path, measures: Sequence[Measure], step: int) -> None:
    """Warn of measures that read otherwise than before `step`, and of those that are new or missing.

    A changed setting is no error, the new one may be the wanted one; but the journal would mix, under one name, values
    that cannot be compared.
    """
    if not path.is_file():
        return
    before, now = json.loads(path.read_text(encoding="utf-8")), json.loads(json.dumps(_settings(measures)))
    changes = [f"{name} is not measured any more" for name in before if name not in now]
    changes += [f"{name} is new" for name in now if name not in before]
    for name in (name for name in now if name in before):
        for setting in dict.fromkeys((*before[name], *now[name])):
            old, new = before[name].get(setting), now[name].get(setting)
            if old != new:
                changes.append(f"{name}: `{setting}` was {old!r}, now {new!r}")
    if changes:
        warnings.warn(
            f"The readings from step {step} on cannot be compared with the earlier ones of this run in all respects: "
            f"{'; '.join(changes)}. Resume with the settings the run started with, or start it anew in another "
            "output directory.",
            stacklevel=3,
        )


def _settings(measures: Sequence[Measure]) -> dict[str, dict[str, Any]]:
    return {measure.name: dict(getattr(measure, "settings", {})) for measure in measures}
