"""Conjugate gradients on many systems at once, each a row, with a preconditioner and an optional constraint.

Rows, as a product of few rows with a large matrix is faster than that of the matrix with few columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# A system that needs more iterations than this is left as solved as it is.
_MAX_ITERATIONS = 200


def conjugate_gradients(
    matrix: Callable[[Tensor], Tensor],
    right: Tensor,
    precondition: Callable[[Tensor], Tensor],
    tolerance: float,
    normal: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Solve A x + m v = right with v'x = 0, or A x = right.

    Parameters
    ----------
    matrix : callable
        v -> A v for each row of v [B, T, k]; symmetric and positive definite, another matrix for each row.
    right : Tensor [B, T, k]
    precondition : callable
        v -> P v, symmetric and positive definite, near the inverse of A.
    tolerance : float
        A row is done when its residual r, in the norm (r'P r)^1/2, is this share of what it was at x = 0.
    normal : Tensor [B, T, k], optional
        v, for every row another; without it there is no constraint.

    Returns
    -------
    x : Tensor [B, T, k]
    multiplier : Tensor [B, T, 1]
        m; 0 without a constraint.

    Notes
    -----
    The constraint is kept by projecting the preconditioner, P - P v v'P / v'P v, so that every iterate has v'x = 0. The
    residual's own part along v is taken out at each iteration (Gould, Hribar and Nocedal 2001): it does not vanish, and
    beside it the part that does would be lost to rounding.
    """
    tiny = torch.finfo(right.dtype).tiny
    if normal is not None:
        across = precondition(normal)
        length = rows(normal, across).clamp_min(tiny)

    def project(r: Tensor, multiplier: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z = P r on the constraint, and r without its part along v, which is added to the multiplier instead."""
        z = precondition(r)
        if normal is None:
            return z, r, multiplier
        m = rows(normal, z) / length
        return torch.addcmul(z, across, m, value=-1), torch.addcmul(r, normal, m, value=-1), multiplier + m

    x = torch.zeros_like(right)
    p, r, multiplier = project(right, torch.zeros_like(right[..., :1]))
    size = rows(r, p)
    enough = size * tolerance**2
    # A row that is done rests: its residual would shrink into denormal numbers, which are slow.
    active = size > enough
    for _ in range(_MAX_ITERATIONS):
        if not bool(active.any()):
            break
        ap = matrix(p)
        alpha = size * active / rows(p, ap).clamp_min(tiny)
        x = torch.addcmul(x, alpha, p)
        r = torch.addcmul(r, alpha, ap, value=-1)
        z, r, multiplier = project(r, multiplier)
        previous, size = size, rows(r, z)
        active = active & (size > enough)
        p = torch.addcmul(z, size * active / previous.clamp_min(tiny), p)
    return x, multiplier


def rows(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each row: [B, T, k] x [B, T, k] -> [B, T, 1]."""
    return (a * b).sum(-1, keepdim=True)
