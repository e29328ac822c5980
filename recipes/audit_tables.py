"""Readings as an audit's tables show them: the headline of each name, its cell, its layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monitor.readings import Reading
from recipes.summary import number

Found = Mapping[tuple[str, str], Reading]  # (metric, group) -> the headline reading, of one measure


def headlines(readings: Sequence[Reading]) -> Found:
    """(metric, group) to the first reading of that name: other layers follow the headline."""
    found: dict[tuple[str, str], Reading] = {}
    for reading in readings:
        found.setdefault((reading.metric, reading.group), reading)
    return found


def valid(found: Found, metric: str, group: str = "") -> Reading | None:
    reading = found.get((metric, group))
    return reading if reading is not None and reading.valid else None


def cell(reading: Reading | None, interval: bool = True) -> str:
    if reading is None:
        return ""
    return number(reading.value, *((reading.low, reading.high) if interval else (None, None)))


def where(found: Found) -> str:
    """The headline's layer, and what the brackets are."""
    return f"layer {next(iter(found.values())).layer}, 95 % intervals"


def by_layer(readings: Sequence[Reading]) -> dict[int, Found]:
    layers: dict[int, dict[tuple[str, str], Reading]] = {}
    for reading in readings:
        layers.setdefault(reading.layer, {}).setdefault((reading.metric, reading.group), reading)
    return layers
