"""Attacking a model that is being trained, and leaving it as it was: weights, gradients, modes, random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from monitor.anatomy import Anatomy, find_anatomy
from monitor.undisturbed import evaluation_mode

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes an element


@contextmanager
def intact(model: nn.Module, *, weights: bool = False) -> Iterator[Anatomy]:
    """Everything inside the block may be changed; all of it comes back, bit for bit, also after an exception.

    Parameters
    ----------
    model : nn.Module
        As for `find_anatomy`. In evaluation mode inside the block.
    weights : bool, default False
        Whether the block changes parameters or buffers in place. Their copies are kept on their device meanwhile: a
        second model in memory.

    Yields
    ------
    Anatomy

    Notes
    -----
    Kept: each module's mode, each parameter's gradient and `requires_grad`, the global generators of torch (CPU and the
    model's CUDA devices), numpy and random, and with `weights` the parameters and buffers. Gradients are None inside
    the block; autocast is off and gradient mode is as the caller left it. Hooks are the business of whoever adds them.
    """
    anatomy = find_anatomy(model)
    parameters = list(anatomy.outer.parameters())
    kept = [(p, p.grad, p.requires_grad) for p in parameters]
    devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    copies = [(t, t.detach().clone()) for t in (*parameters, *anatomy.outer.buffers())] if weights else []
    numpy_state, python_state = np.random.get_state(), random.getstate()
    for p in parameters:
        p.grad = None
    try:
        with (
            evaluation_mode(anatomy.outer),
            torch.random.fork_rng(devices=devices),
            torch.autocast(anatomy.device.type, enabled=False),
        ):
            yield anatomy
    finally:
        with torch.no_grad():
            for tensor, copy in copies:
                tensor.copy_(copy)
        for p, gradient, requires in kept:
            p.grad = gradient
            p.requires_grad_(requires)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def weights_checksum(model: nn.Module) -> list[int]:
    """A sum over the bits of each parameter, of this rank's part where it is sharded: other weights, other numbers.

    One pass over the weights on their device; sums of 64-bit integers do not depend on the order of summation.
    """
    sums = []
    for parameter in model.parameters():
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        bits = local.reshape(-1).view(_BITS[local.element_size()])
        sums.append(bits.sum(dtype=torch.int64).to(parameter.device))
    return [number for device in dict.fromkeys(s.device for s in sums) for number in _numbers(sums, device)]


def _numbers(sums: list[torch.Tensor], device: torch.device) -> list[int]:
    """The numbers on one device, fetched at once."""
    return torch.stack([one for one in sums if one.device == device]).tolist()
