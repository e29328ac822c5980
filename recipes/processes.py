"""The processes of a command that trains nothing, so that no TrainingArguments make them known to each other."""

from __future__ import annotations

import torch
from accelerate import PartialState


def process_state(use_cpu: bool = False) -> PartialState:
    """accelerate's state; the first call decides for the process.

    Without an accelerator it needs to be told that the CPU is meant: processes that torchrun starts would not know of
    each other, and each would write what the first one writes.
    """
    return PartialState(cpu=use_cpu or not torch.accelerator.is_available())
