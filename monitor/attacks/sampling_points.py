"""Points to inject: of a subspace, and others of the same lengths that no concept chose."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from monitor.geometry.subspaces import Subspace


def own_generator(seed: int, what: str) -> torch.Generator:
    """A CPU generator for one purpose: what another purpose draws does not move it."""
    return torch.Generator().manual_seed(random.Random(f"{seed}/{what}").getrandbits(63))


def concept_points(subspace: Subspace, n: int, sigma: float, seed: int, what: str = "points") -> Tensor:
    """`n` points L z + b, z ~ N(0, sigma² I): [n, d] float32, on the device of the basis."""
    return subspace.sample(n, sigma, own_generator(seed, what))


def isotropic_points(points: Tensor, seed: int, what: str = "isotropic") -> Tensor:
    """As many points of uniform directions, each of the length of one of `points` [n, d].

    Around the origin, not around the offset of the subspace: that the offset is the mean of a concept's states is
    knowledge of the concept.
    """
    directions = torch.randn(points.shape, generator=own_generator(seed, what)).to(points)
    return directions * (points.norm(dim=1, keepdim=True) / directions.norm(dim=1, keepdim=True))
