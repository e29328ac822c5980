"""The little the monitor needs to know about other processes; without torch.distributed there is one, rank 0."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if _initialised() else 0


def world_size() -> int:
    return dist.get_world_size() if _initialised() else 1


def barrier() -> None:
    if _initialised():
        dist.barrier()


def gathered(value: Any) -> list[Any]:
    """`value` of every rank, in the order of ranks, on every rank."""
    if not _initialised():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def everywhere(condition: bool) -> bool:
    """Whether `condition` holds on every rank: a pass is a collective, so ranks may not disagree about running it."""
    return all(gathered(condition))


def from_first(value: T) -> T:
    """The first rank's `value`, on every rank: what only it may decide."""
    if not _initialised():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
