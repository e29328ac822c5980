"""Affine subspaces {L q + b} of activation space: what concept geometries are sampled from and compared as.

L [d, k] has orthonormal columns, b [d] is the offset (MAxBench, Sec. 2.1). `monitor.geometry.subspace_fits` finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from monitor.geometry.gram import check_vectors

# Columns are stored in float32: their inner products are off by a few 1e-7, by more with half-precision inputs.
_ORTHONORMAL = 1e-3
# A direction whose singular value is so small against the largest is rounding, not data.
_RANK_TOLERANCE = 1e-6


def check_activations(x: Tensor, name: str = "x", *, at_least: int = 2) -> Tensor:
    """`x` as float64 [n, d], after checking its shape, that it has `at_least` rows, and that it is finite."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a Tensor [n, d], got {type(x).__name__}; torch.as_tensor makes one")
    if not x.is_floating_point():
        raise ValueError(f"{name} must be of a floating dtype, got {x.dtype}; convert it by .float()")
    if x.ndim != 2:
        raise ValueError(f"{name} must have the shape [n, d], a state a row; got {tuple(x.shape)}")
    return check_vectors(x.detach(), name, at_least=at_least)


def check_entities(labels: Tensor | Sequence[int], n: int, device: torch.device) -> tuple[Tensor, int]:
    """Labels [n] as 0..C-1 in the order of their values, on `device`, and C, after checking that C >= 2."""
    labels = as_labels(labels)
    if labels.shape != (n,) or labels.is_floating_point():
        raise ValueError(
            f"labels must be integers [n], one entity a row of x: expected shape {(n,)}, "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    values, index = torch.unique(labels.to(device), return_inverse=True)
    if len(values) < 2:
        raise ValueError(f"labels must hold at least two entities; all {n} are {values.tolist()}")
    return index, len(values)


def as_labels(labels: Tensor | Sequence[int]) -> Tensor:
    """Labels as a Tensor; a `ConceptSet` has them as a tuple."""
    if isinstance(labels, Tensor):
        return labels
    try:
        return torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"labels must be integers [n], one entity a row of x; got {type(labels).__name__}") from None


def check_rank(rank: int, limit: int, why: str) -> None:
    """Refuse ranks outside 1..limit, saying why the limit is there."""
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise ValueError(f"rank must be a whole number, got {rank!r}")
    if not 1 <= rank <= limit:
        raise ValueError(f"rank must be from 1 to {limit}, {why}; got {rank}")


def fix_signs(basis: Tensor) -> Tensor:
    """Columns of [d, k], each with its largest entry made positive: a direction has no sign, a result needs one."""
    largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))
    return basis * torch.where(largest < 0, -1.0, 1.0)


def leading_directions(rows: Tensor, rank: int, what: str = "x") -> Tensor:
    """Leading `rank` right singular vectors of float64 rows [m, d], as orthonormal columns [d, rank], signs fixed.

    From the smaller of the two Gram matrices: for m rows in thousands of dimensions far cheaper than an SVD, and exact
    to about the square root of the float64 precision times the ratio of singular values.

    Raises
    ------
    ValueError
        If the rows span fewer than `rank` directions.
    """
    wide = rows.shape[0] < rows.shape[1]
    values, vectors = torch.linalg.eigh(rows @ rows.mT if wide else rows.mT @ rows)
    values, vectors = values.flip(-1)[:rank], vectors.flip(-1)[:, :rank]
    spanned = int((values > _RANK_TOLERANCE**2 * values[0].clamp_min(1e-300)).sum())
    if spanned == 0 or not values[0] > 0:
        raise ValueError(f"{what} must vary: it spans no direction at all (all rows are equal, or next to it)")
    if spanned < rank:
        raise ValueError(f"rank must be at most {spanned}, the number of directions that {what} spans; got {rank}")
    return fix_signs(torch.linalg.qr(rows.mT @ vectors).Q if wide else vectors)


@dataclass(frozen=True, eq=False)
class Subspace:
    """The points L q + b.

    Attributes
    ----------
    basis : Tensor [d, k], float32
        L, orthonormal columns, the most important first where the method orders them.
    offset : Tensor [d], float32
        b; zero for a linear subspace.
    method : str
        What found it, for tables.

    Raises
    ------
    ValueError
        For shapes that do not fit, entries that are not finite, more columns than dimensions, columns that are not
        orthonormal.
    """

    basis: Tensor
    offset: Tensor
    method: str

    def __post_init__(self) -> None:
        if self.basis.ndim != 2 or not 1 <= self.basis.shape[1] <= self.basis.shape[0]:
            raise ValueError(f"basis must be [d, k] with 1 <= k <= d; got shape {tuple(self.basis.shape)}")
        if self.offset.shape != self.basis.shape[:1]:
            raise ValueError(
                f"offset must be [d], d = {self.basis.shape[0]} of the basis; got shape {tuple(self.offset.shape)}"
            )
        object.__setattr__(self, "basis", self.basis.detach().float())
        object.__setattr__(self, "offset", self.offset.detach().to(self.basis))
        if not bool(torch.isfinite(self.offset).all() & torch.isfinite(self.basis).all()):
            raise ValueError("basis and offset must be finite (float32 overflow, or a model that diverged?)")
        products = self.basis.mT @ self.basis
        error = float((products - torch.eye(self.rank, device=products.device)).abs().max())
        if error > _ORTHONORMAL:
            raise ValueError(
                f"basis must have orthonormal columns (torch.linalg.qr); their inner products are off by {error:.2g}"
            )

    @property
    def rank(self) -> int:
        """k, the number of directions."""
        return self.basis.shape[1]

    @property
    def dim(self) -> int:
        """d, the width of the activations."""
        return self.basis.shape[0]

    def sample(self, n: int, sigma: float, generator: torch.Generator) -> Tensor:
        """`n` points L z + b with z ~ N(0, sigma² I): [n, d] float32, on the device of the basis.

        The draws come from `generator` on its own device, so that a CPU generator gives the same points everywhere.
        """
        check_draw(n, sigma, generator)
        z = torch.randn(n, self.rank, generator=generator, device=generator.device).to(self.basis.device)
        return self.offset + (sigma * z) @ self.basis.mT

    def project(self, x: Tensor) -> Tensor:
        """Nearest points b + L Lᵀ(x - b) of the subspace to rows x [n, d], in the dtype of x."""
        basis, offset = self.basis.double(), self.offset.double()
        return (offset + (self._rows(x) - offset) @ basis @ basis.mT).to(x.dtype)

    def distance(self, x: Tensor) -> Tensor:
        """Distance of rows x [n, d] from the subspace, [n] float64, in the units of the activations."""
        basis, centred = self.basis.double(), self._rows(x) - self.offset.double()
        return (centred - centred @ basis @ basis.mT).norm(dim=-1)

    def linear(self) -> Subspace:
        """The same directions through the origin."""
        return replace(self, offset=torch.zeros_like(self.offset))

    def _rows(self, x: Tensor) -> Tensor:
        x = check_activations(x, at_least=1)
        if x.shape[1] != self.dim:
            raise ValueError(f"x must be as wide as the subspace's space, {self.dim}; got {x.shape[1]}")
        return x


def check_draw(n: int, sigma: float, generator: torch.Generator) -> None:
    """Refuse to draw fewer than one point, with a scale that is negative or not finite, or from no generator."""
    if not isinstance(generator, torch.Generator):
        raise ValueError(f"generator must be a torch.Generator, so that the draw can be repeated; got {generator!r}")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n must be a whole number of points, at least 1; got {n!r}")
    if not 0 <= sigma < float("inf"):
        raise ValueError(f"sigma must be at least 0 and finite; got {sigma}")


@dataclass(frozen=True, eq=False)
class Isotropic:
    """The whole space around a centroid: the baseline that knows where a concept is but none of its directions.

    Same interface as `Subspace`, without its d x d identity in memory (`basis` makes one where it is asked for).

    Attributes
    ----------
    offset : Tensor [d], float32
    method : str
    """

    offset: Tensor
    method: str = "isotropic"

    @property
    def basis(self) -> Tensor:
        """The identity, [d, d] float32."""
        return torch.eye(self.dim, device=self.offset.device)

    @property
    def rank(self) -> int:
        """d: every direction."""
        return self.dim

    @property
    def dim(self) -> int:
        """d, the width of the activations."""
        return self.offset.shape[0]

    def sample(self, n: int, sigma: float, generator: torch.Generator) -> Tensor:
        """`n` points b + sigma z / sqrt(d), z ~ N(0, I_d): [n, d] float32.

        Divided by sqrt(d), so that sigma is the points' root-mean-square distance from the offset, of the size that it
        is for a direction. Without it no sigma of the calibration grid would give norms near those of activations.
        """
        check_draw(n, sigma, generator)
        z = torch.randn(n, self.dim, generator=generator, device=generator.device).to(self.offset.device)
        return self.offset + sigma / self.dim**0.5 * z

    def project(self, x: Tensor) -> Tensor:
        """x itself: every point lies in the space."""
        return x

    def distance(self, x: Tensor) -> Tensor:
        """Zeros [n], float64."""
        return torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)

    def linear(self) -> Isotropic:
        """The same around the origin."""
        return replace(self, offset=torch.zeros_like(self.offset))


def principal_angles(a: Tensor, b: Tensor) -> Tensor:
    """Principal angles between the column spans of a [d, k] and b [d, k'].

    Returns
    -------
    Tensor [min(k, k')], float64, on the device of `a`
        Radians in [0, pi/2], ascending. All 0: the smaller span lies in the larger one.

    Raises
    ------
    ValueError
        For matrices of another shape or height, not finite, or with linearly dependent columns.

    Notes
    -----
    Bjoerck and Golub (Math. Comp. 27, 1973): cosines are the singular values of QaᵀQb, sines those of Qb - Qa QaᵀQb.
    The sine is taken below 45 degrees, where the cosine loses half of the digits.
    """
    first, second = _orthonormal(a, "a"), _orthonormal(b, "b")
    if first.shape[0] != second.shape[0]:
        raise ValueError(f"a and b must have equally many rows; got {first.shape[0]} and {second.shape[0]}")
    if first.shape[1] < second.shape[1]:
        first, second = second, first
    shared = first.mT @ second
    cosines = torch.linalg.svdvals(shared).clamp(max=1.0)  # descending
    sines = torch.linalg.svdvals(second - first @ shared).flip(-1).clamp(max=1.0)  # ascending
    return torch.where(cosines.square() > 0.5, sines.asin(), cosines.acos())


def _orthonormal(columns: Tensor, name: str) -> Tensor:
    if columns.ndim != 2 or not 1 <= columns.shape[1] <= columns.shape[0]:
        raise ValueError(f"{name} must be [d, k] with 1 <= k <= d; got shape {tuple(columns.shape)}")
    columns = check_vectors(columns.detach(), name, at_least=1)
    q, r = torch.linalg.qr(columns)
    # |r_jj| is what column j adds to the span of those before it.
    if bool((r.diagonal().abs() <= 1e-9 * columns.norm(dim=0)).any()):
        raise ValueError(f"{name} must have linearly independent columns")
    return q


def effective_rank(x: Tensor) -> Tensor:
    """Effective rank of a matrix, exp of the entropy of its normalised singular values.

    Parameters
    ----------
    x : Tensor [n, d]
        Not centred here: subtract the mean first where the spread around it is meant.

    Returns
    -------
    Tensor, scalar float64
        1 (one direction) to min(n, d) (all singular values equal).

    Raises
    ------
    ValueError
        For another shape, entries that are not finite, or a matrix of zeros.

    Notes
    -----
    erank = exp(-Σ p_i ln p_i), p_i = s_i / Σ s (Roy and Vetterli, EUSIPCO 2007). Of singular values, not of their
    squares: it is not the exponential of the entropy of the Gram matrix in `monitor.geometry.gram`.
    """
    values = torch.linalg.svdvals(check_activations(x, at_least=1))
    total = values.sum()
    if total == 0:
        raise ValueError("x must not be all zero: it has no rank")
    shares = values / total
    return torch.special.entr(shares).sum().exp()
