"""The little the monitor needs to know about other processes; without torch.distributed there is one, rank 0."""

from __future__ import annotations

import torch.distributed as dist


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if _initialised() else 0


def world_size() -> int:
    return dist.get_world_size() if _initialised() else 1


def barrier() -> None:
    if _initialised():
        dist.barrier()


def everywhere(condition: bool) -> bool:
    """Whether `condition` holds on every rank: a pass is a collective, so ranks may not disagree about running it."""
    if not _initialised():
        return condition
    conditions: list[bool] = [False] * world_size()
    dist.all_gather_object(conditions, condition)
    return all(conditions)
