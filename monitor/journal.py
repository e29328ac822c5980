"""A run's readings on disk: one reading a line, each measurement appended whole or not at all."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

from monitor.readings import Reading

# What is journaled beside measurements: what rules decided, and what attacks found.
RULES, ATTACKS = "rules", "attacks"


class Journal:
    """``journal.jsonl``: a line is ``step, epoch, time, measure, metric, group, layer, value, low, high, valid, note``.

    Parameters
    ----------
    path : path-like
        The file; its folder is made at the first append.

    Notes
    -----
    A measurement is many lines. They are appended and synced, then the committed length is replaced atomically in
    ``.journal.committed``; what lies behind that length when the journal is next opened belongs to a measurement that a
    kill cut short, and is dropped. So readers see whole measurements, at the price of one small file.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._committed_path = self.path.with_name(f".{self.path.stem}.committed")
        self.lines = [json.loads(line) for line in self._committed_bytes().splitlines()]

    @property
    def steps(self) -> set[int]:
        """Steps that have been measured; an attack alone does not make one."""
        return {line["step"] for line in self.lines if line["measure"] not in (RULES, ATTACKS)}

    def append(self, step: int, epoch: float | None, readings: Sequence[Reading]) -> None:
        """Add one measurement, with what rules decided on it, or the readings of one attack."""
        now = time.time()
        lines = [_line(step, epoch, now, reading) for reading in readings]
        data = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        start = len(self._committed_bytes())
        self._commit(start)  # also before: the length on disk may be of a longer journal, or missing
        with open(self.path, "ab") as file:
            file.truncate(start)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._commit(start + len(data))
        self.lines += lines

    def rewind(self, step: int) -> None:
        """Drop the measurements after `step`: a run that resumes there takes them anew."""
        kept = [line for line in self.lines if line["step"] <= step]
        if len(kept) == len(self.lines):
            return
        data = "".join(json.dumps(line) + "\n" for line in kept).encode()
        # Both files are replaced atomically. Between the two the committed length lies behind the new file's end,
        # which `_committed_bytes` reads as "all of it".
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_bytes(data)
        os.replace(partial, self.path)
        self._commit(len(data))
        self.lines = kept

    def _commit(self, length: int) -> None:
        partial = self._committed_path.with_name(f"{self._committed_path.name}.partial")
        partial.write_text(str(length))
        os.replace(partial, self._committed_path)

    def _committed_bytes(self) -> bytes:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return b""
        try:
            data = data[: int(self._committed_path.read_text())]
        except (FileNotFoundError, ValueError):
            pass  # a copied journal without its length: whole lines only
        return data[: data.rfind(b"\n") + 1]


def new_journal(path: Path) -> Journal:
    """An empty journal; a used one's folder, with what an earlier run measured, is kept under another name."""
    if path.exists():
        n = 1
        while (aside := path.parent.with_name(f"{path.parent.name}-{n}")).exists():
            n += 1
        path.parent.rename(aside)
        warnings.warn(
            f"{path.parent} holds the readings of an earlier run, and this run starts at step 0: they are kept in "
            f"{aside}. To continue the earlier run, pass `resume_from_checkpoint`.",
            stacklevel=3,
        )
    return Journal(path)


def _line(step: int, epoch: float | None, now: float, reading: Reading) -> dict:
    return {
        "step": int(step),
        "epoch": None if epoch is None else float(epoch),
        "time": now,
        "measure": reading.measure,
        "metric": reading.metric,
        "group": reading.group,
        "layer": reading.layer,
        "value": reading.value,
        "low": reading.low,
        "high": reading.high,
        "valid": reading.valid,
        "note": reading.note,
    }
