"""What the monitor asks of a measure. A new measure is one file beside this one and its pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from monitor.activations import Activations, Answers, States
from monitor.readings import Reading


class Measure(Protocol):
    """Stimuli to be read, and a pure function from what was read to readings.

    ``name`` is the first part of every reading's name. ``stimuli`` says which texts are needed, at which layers and
    pooling, and which answers need log-probabilities; the monitor reads the union of all measures' stimuli in one
    pass. ``read`` gets that pass's result for the model as it is now and for the frozen reference, and never a model.
    ``headline`` names the metrics that go into the metrics dict; a metric's headline reading is the *first* reading
    of that metric with an empty group. A measure may also have ``settings``, a dict of JSON values: a run that is
    resumed with others warns.
    """

    name: str
    headline: tuple[str, ...]

    @property
    def stimuli(self) -> Sequence[States | Answers]: ...

    def read(self, now: Activations, reference: Activations) -> list[Reading]: ...
