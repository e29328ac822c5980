"""Measurements are on disk whole or not at all, and a resumed run replaces what it takes anew."""

import json
import math

import numpy as np
import pytest

from monitor.journal import Journal
from monitor.readings import Reading

KEYS = "step epoch time measure metric group layer value low high valid note".split()


def readings(n, value=1.0):
    return [Reading("m", f"r{i}", value, layer=i) for i in range(n)]


def on_disk(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_a_reading_with_the_named_fields(tmp_path):
    journal = Journal(tmp_path / "monitor" / "journal.jsonl")
    journal.append(3, 0.5, [Reading("bias_shift", "delta_b", -0.1, "women", 30, -0.2, 0.0, note="n")])
    (line,) = on_disk(journal.path)
    assert list(line) == KEYS
    assert (line["step"], line["group"], line["layer"], line["low"], line["note"]) == (3, "women", 30, -0.2, "n")


def test_a_value_that_is_not_finite_is_null_and_invalid(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(
        0, None, [Reading("m", "r", math.nan), Reading("m", "r", 1.0, low=-math.inf), Reading("m", "r", None)]
    )
    first, second, third = on_disk(journal.path)
    assert first["value"] is None and not first["valid"] and "nan" in first["note"]
    assert second["valid"] and second["low"] is None
    assert not third["valid"]


def test_numpy_scalars_become_floats():
    reading = Reading("m", "r", np.float32(0.5), low=np.float64(0.1))
    assert type(reading.value) is float and type(reading.low) is float


@pytest.mark.parametrize("cut", [1, 7, 60, 200])
def test_a_measurement_cut_short_by_a_kill_is_dropped_whole(tmp_path, cut):
    path = tmp_path / "journal.jsonl"
    Journal(path).append(0, 0.0, readings(3))
    whole = path.read_bytes()
    Journal(path).append(1, 0.1, readings(5, value=2.0))
    # As after a kill: some bytes of the second measurement were written, its length was not committed.
    path.write_bytes(path.read_bytes()[: len(whole) + cut])
    (tmp_path / ".journal.committed").write_text(str(len(whole)))
    journal = Journal(path)
    assert journal.steps == {0}
    journal.append(1, 0.1, readings(5))
    assert [line["step"] for line in on_disk(path)] == [0] * 3 + [1] * 5


def test_rewinding_keeps_up_to_the_step_and_appends_after(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for step in (0, 5, 10, 15):
        journal.append(step, None, readings(2))
    resumed = Journal(path)
    resumed.rewind(5)
    assert resumed.steps == {0, 5} and {line["step"] for line in on_disk(path)} == {0, 5}
    resumed.append(10, None, readings(2, value=3.0))
    assert [line["step"] for line in on_disk(path)] == [0, 0, 5, 5, 10, 10]
    assert Journal(path).lines == resumed.lines


def test_a_kill_between_the_two_files_of_a_rewind_loses_nothing(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append(0, None, readings(2))
    journal.append(5, None, readings(2))
    length = (tmp_path / ".journal.committed").read_text()
    journal.rewind(0)
    (tmp_path / ".journal.committed").write_text(length)  # the old length, behind the new end
    assert Journal(path).steps == {0}


def test_a_copied_journal_without_its_length_is_read_up_to_its_last_whole_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    Journal(path).append(0, None, readings(2))
    (tmp_path / ".journal.committed").unlink()
    path.write_bytes(path.read_bytes() + b'{"step": 5, "val')
    assert Journal(path).steps == {0}


def test_a_length_left_behind_by_a_kill_does_not_let_a_torn_measurement_in(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.append(0, None, readings(2))
    journal.append(5, None, readings(2))
    length = (tmp_path / ".journal.committed").read_text()
    journal.rewind(0)
    (tmp_path / ".journal.committed").write_text(length)  # killed between the two files of the rewind
    resumed = Journal(path)
    monkeypatch.setattr("monitor.journal.os.fsync", lambda descriptor: 1 / 0)  # killed after writing, before committing
    with pytest.raises(ZeroDivisionError):
        resumed.append(5, None, readings(4))
    assert Journal(path).steps == {0}
    monkeypatch.undo()
    fresh = Journal(tmp_path / "new" / "journal.jsonl")
    monkeypatch.setattr("monitor.journal.os.fsync", lambda descriptor: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fresh.append(0, None, readings(4))
    assert Journal(tmp_path / "new" / "journal.jsonl").steps == set(), "the very first measurement, too"
