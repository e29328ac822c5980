"""Reading a model that is being trained, and leaving it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from monitor.anatomy import Anatomy


@contextmanager
def undisturbed(anatomy: Anatomy) -> Iterator[None]:
    """Evaluation mode without gradients; modes per module and random-number generators come back as they were.

    Evaluation mode also keeps the cache on: activation checkpointing, which drops it, is for training mode alone.
    """
    devices = sorted({p.device.index for p in anatomy.model.parameters() if p.device.type == "cuda"})
    with (
        evaluation_mode(anatomy.outer),
        torch.random.fork_rng(devices=devices),
        torch.no_grad(),
        torch.autocast(anatomy.device.type, enabled=False),
    ):
        yield


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()` inside the block; each module's own mode comes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
