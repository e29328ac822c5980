"""A concept whose values have an order, as a curve: a cubic spline through their centroids, closed for cyclic ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.interpolate import CubicSpline
from torch import Tensor

from monitor.geometry.subspace_fits import entity_centroids
from monitor.geometry.subspaces import as_labels, check_activations, check_draw, check_rank, leading_directions

# Points of the grid on each segment where the search for the nearest point begins, and the steps that refine it.
_GRID = 64
_STEPS = 8
# Distances alive at once in that search, in numbers: 64 MB.
_MAX_DISTANCES = 1 << 23


@dataclass(frozen=True, eq=False)
class Spline:
    """The curve b + L c(s), c a cubic spline in the plane of k principal directions.

    Attributes
    ----------
    knots : Tensor [S + 1], float64
        Values of s where the segments meet; value v of the concept is at s = v.
    coefficients : Tensor [4, S, k], float64
        Of (s - knot)³, (s - knot)², (s - knot), 1.
    basis : Tensor [d, k], offset : Tensor [d], float64
        L and b.
    cyclic : bool
        Whether the curve is closed; s then counts modulo the distance of the outer knots.
    method : str
    """

    knots: Tensor
    coefficients: Tensor
    basis: Tensor
    offset: Tensor
    cyclic: bool
    method: str = "spline"

    @property
    def rank(self) -> int:
        """k, the dimension of the plane the curve lies in."""
        return self.basis.shape[1]

    @property
    def dim(self) -> int:
        """d, the width of the activations."""
        return self.basis.shape[0]

    def at(self, s: Tensor) -> Tensor:
        """Points [n, d] float32 of the curve at parameters s [n]; beyond the ends of an open curve, its ends."""
        return self._embed(self._derivatives(s.to(self.knots))[0]).float()

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """`n` points [n, d] float32 of the curve, evenly distributed in s (MAxBench, Sec. 3.2)."""
        check_draw(n, 0.0, generator)
        share = torch.rand(n, generator=generator, device=generator.device, dtype=torch.float64).to(self.knots.device)
        return self.at(self.knots[0] + share * (self.knots[-1] - self.knots[0]))

    def nearest(self, x: Tensor) -> Tensor:
        """Parameter s [n], float64, of the nearest point of the curve to each row of x [n, d].

        Distances are least in the space exactly where they are in the plane. There the nearest of a dense grid is
        refined by Newton's steps on (c(s) - y)·c'(s) within its neighbours, and kept where these do not come closer.
        """
        x = check_activations(x, at_least=1)
        if x.shape[1] != self.dim:
            raise ValueError(f"x must be as wide as the spline's space, {self.dim}; got {x.shape[1]}")
        y = (x.to(self.basis.device) - self.offset) @ self.basis
        share = torch.arange(_GRID, dtype=torch.float64, device=self.knots.device) / _GRID
        grid = (self.knots[:-1, None] + share * self.knots.diff()[:, None]).flatten()
        grid = torch.cat([grid, self.knots[-1:]])
        points = self._derivatives(grid)[0]
        blocks = y.split(max(1, _MAX_DISTANCES // len(grid)))
        start = grid[torch.cat([torch.cdist(block, points).argmin(1) for block in blocks])]
        reach = self.knots.diff().max() / _GRID
        s = start
        for _ in range(_STEPS):
            c, first, second = self._derivatives(s)
            away = c - y
            slope = (away * first).sum(1)
            bend = first.square().sum(1) + (away * second).sum(1)
            step = torch.where(bend > 0, slope / bend.clamp_min(1e-300), 0.0)
            s = torch.minimum(torch.maximum(s - step, start - reach), start + reach)
            if not self.cyclic:
                s = s.clamp(self.knots[0], self.knots[-1])
        closer = (self._derivatives(s)[0] - y).norm(dim=1) < (self._derivatives(start)[0] - y).norm(dim=1)
        return self._within(torch.where(closer, s, start))

    def project(self, x: Tensor) -> Tensor:
        """Nearest points of the curve to rows x [n, d], in the dtype of x."""
        return self._embed(self._derivatives(self.nearest(x))[0]).to(x.dtype)

    def distance(self, x: Tensor) -> Tensor:
        """Distance of rows x [n, d] from the curve, [n] float64."""
        return (x.double() - self._embed(self._derivatives(self.nearest(x))[0])).norm(dim=1)

    def _embed(self, c: Tensor) -> Tensor:
        return self.offset + c @ self.basis.mT

    def _within(self, s: Tensor) -> Tensor:
        """s on the curve: wrapped where it is closed, clamped where it is open."""
        start, end = self.knots[0], self.knots[-1]
        return start + torch.remainder(s - start, end - start) if self.cyclic else s.clamp(start, end)

    def _derivatives(self, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """c(s), c'(s), c''(s), each [n, k]."""
        s = self._within(s)
        segment = (torch.searchsorted(self.knots, s.contiguous(), right=True) - 1).clamp(0, len(self.knots) - 2)
        t = (s - self.knots[segment])[:, None]
        a, b, c, d = self.coefficients[:, segment]
        return ((a * t + b) * t + c) * t + d, (3 * a * t + 2 * b) * t + c, 6 * a * t + 2 * b


def spline(x: Tensor, labels: Tensor, cyclic: bool, rank: int, *, n_values: int | None = None) -> Spline:
    """The curve through the centroids of a concept's values, in their order.

    Parameters
    ----------
    x : Tensor [n, d]
    labels : Tensor [n], int64, or sequence of int
        Place of each row's value in the order. Values that are missing (held out) keep their place: the curve passes
        from the one before to the one after in two steps of s.
    cyclic : bool
        Whether the last value is followed by the first.
    rank : int, 1 to min(values - 1, d)
        Principal directions of the centroids that the curve may use.
    n_values : int, optional
        Length of a cycle; by default the largest label plus one. Needed where the last value is held out.

    Returns
    -------
    Spline
        Through the centroids' projections exactly. Closed: with two continuous derivatives all around. Open: without
        curvature at its ends.

    Raises
    ------
    ValueError
        For shapes that do not fit, x not finite, fewer than two values (three of a cycle), a rank out of range, or a
        cycle shorter than its labels.

    Notes
    -----
    MAxBench, Sec. 3.1.2 and 3.2, after Wurgaft et al. (2026): centroids, PCA, cubic spline with one unit of s between
    values. scipy's `CubicSpline`, "periodic" or "natural".
    """
    x = check_activations(x)
    centroids = entity_centroids(x, labels)
    values = torch.unique(as_labels(labels)).cpu().numpy().astype(np.float64)
    if cyclic and len(values) < 3:
        raise ValueError(f"labels must hold at least three values of a cycle, two are a line; got {values.tolist()}")
    check_rank(
        rank, min(len(values) - 1, x.shape[1]), f"min(values - 1, d) of {len(values)} values in {x.shape[1]} dimensions"
    )
    if cyclic and n_values is None and values[0] < 0:
        raise ValueError(
            f"labels must count from 0 where n_values is left out, it is then their largest plus 1; got {values[0]:.0f}"
        )
    offset = centroids.mean(0)
    basis = leading_directions(centroids - offset, rank, "the values' centroids")
    points = ((centroids - offset) @ basis).cpu().numpy()
    if cyclic:
        period = values[-1] + 1 if n_values is None else n_values
        if period <= values[-1] - values[0]:
            raise ValueError(
                f"n_values must be more than the labels reach over, from {values[0]:.0f} to {values[-1]:.0f}; "
                f"got {period:.0f}"
            )
        values, points = np.append(values, values[0] + period), np.concatenate([points, points[:1]])
    curve = CubicSpline(values, points, bc_type="periodic" if cyclic else "natural")
    knots, coefficients = (torch.from_numpy(np.ascontiguousarray(part)).to(x) for part in (curve.x, curve.c))
    return Spline(knots, coefficients, basis, offset, cyclic)
