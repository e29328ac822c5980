"""Schatten probe: a linear classifier of entities whose weights are made to have low rank.

MAxBench, Sec. 3.1 and App. B; the penalty is the variational form of the Schatten-p quasi-norm of Giampouras, Vidal,
Rontogiannis and Haeffele (NeurIPS 2020).
"""

from __future__ import annotations

import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from monitor.geometry.subspace_fits import of_unit_size
from monitor.geometry.subspaces import (
    Subspace,
    check_activations,
    check_entities,
    check_rank,
    effective_rank,
    leading_directions,
)

# The penalty is not smooth where a column vanishes: it is smoothed, less and less. In units of squared column norms.
_SMOOTHING = (1e-1, 1e-2, 1e-3)
_STEPS = 100
# A pair of columns has vanished when its squared norm is this small against the largest.
_VANISHED = 1e-6


def schatten_surrogate(a: Tensor, b: Tensor, p: float, smoothing: float = 0.0) -> Tensor:
    """Σ_i ((‖a_i‖² + ‖b_i‖²)/2 + smoothing)^p over the columns of A [d, m] and B [C, m].

    For 0 < p <= 1 and without smoothing, its least value over all A Bᵀ = W is the Schatten quasi-norm Σ_i s_i(W)^p (sum
    of the singular values to the power p), reached at A = U S^(1/2), B = V S^(1/2). Columns of A and B are penalised
    together: a pair vanishes as a whole, and with it a rank.
    """
    return ((a.square().sum(0) + b.square().sum(0)) / 2 + smoothing).pow(p).sum()


def schatten_probe(
    x: Tensor, labels: Tensor, rank: int | None = None, *, p: float = 0.5, penalty: float = 0.1
) -> Subspace:
    """Leading left singular vectors of a low-rank classifier's weights, as many as the weights' effective rank says.

    Parameters
    ----------
    x : Tensor [n, d]
    labels : Tensor [n], int64, or sequence of int
        Entity of each row, at least two.
    rank : int, 1 to min(C - 1, d), optional
        At most so many directions; by default as many as the effective rank.
    p : float in (0, 1]
        Of the quasi-norm; the smaller, the fewer directions. 1 is the nuclear norm.
    penalty : float, > 0
        Its weight against the mean cross-entropy in nats.

    Returns
    -------
    Subspace
        Of rank min(`rank`, round(effective rank of W)), at least 1. The offset is the mean of the rows.

    Raises
    ------
    ValueError
        For shapes that do not fit, x not finite or constant, a single entity, or numbers out of range.

    Notes
    -----
    Minimises, over A [d, m], B [C, m] with m = min(C - 1, d) and a bias c,

        mean cross-entropy of x A Bᵀ + c,  plus  penalty · Σ_i ((‖a_i‖² + ‖b_i‖²)/2)^p

    by L-BFGS in float64, from the singular vectors of scikit-learn's logistic regression, with a smoothing of the
    penalty that is lowered in three stages. It is not convex for p < 1: what is found is a minimum, not surely the
    least. Rows are centred and divided by one number, as in `linear_probe`. The best A lies in the span of the rows, so
    the search is done there, in min(n, d) coordinates. The effective rank is exp of the entropy of W's normalised
    singular values (Roy and Vetterli, EUSIPCO 2007). MAxBench gives neither p nor the penalty; the defaults are ours.
    """
    if not 0 < p <= 1:
        raise ValueError(f"p must lie in (0, 1]; got {p}")
    if not 0 < penalty < float("inf"):
        raise ValueError(f"penalty must be positive and finite; got {penalty}")
    rows = check_activations(x)
    index, count = check_entities(labels, len(rows), rows.device)
    limit = min(count - 1, rows.shape[1])
    if rank is not None:
        check_rank(rank, limit, f"min(C - 1, d) of C = {count} entities in {rows.shape[1]} dimensions")
    weights = low_rank_weights(of_unit_size(rows), index, count, p, penalty)
    kept = max(1, min(round(float(effective_rank(weights))), limit if rank is None else rank))
    return Subspace(leading_directions(weights.mT, kept, "the probe's weights"), rows.mean(0), "schatten_probe")


def low_rank_weights(features: Tensor, index: Tensor, count: int, p: float, penalty: float) -> Tensor:
    """W = A Bᵀ [d, C] of the minimum described in `schatten_probe`, for centred float64 features [n, d]."""
    turn = _row_span(features)
    inside = features @ turn
    probe = LogisticRegression(max_iter=2000).fit(inside.cpu().numpy(), index.cpu().numpy())
    start = torch.from_numpy(probe.coef_).to(inside)
    if count == 2:  # scikit-learn keeps one row for two classes, the difference of theirs
        start = torch.cat([-start, start]) / 2
    left, values, right = torch.linalg.svd(start.mT, full_matrices=False)
    width = min(count - 1, inside.shape[1])
    root = values[:width].sqrt()
    # Contiguous: L-BFGS flattens gradients by views.
    a, b = ((part * root).contiguous().requires_grad_() for part in (left[:, :width], right[:width].mT))
    bias = torch.zeros(count, dtype=inside.dtype, device=inside.device, requires_grad=True)
    with torch.enable_grad():
        for smoothing in _SMOOTHING:
            _minimise(inside, index, (a, b, bias), p, penalty, smoothing)
            a, b = _without_vanished(a, b)
    return turn @ (a @ b.mT).detach()


def _minimise(
    features: Tensor, index: Tensor, parameters: tuple[Tensor, ...], p: float, penalty: float, smoothing: float
) -> None:
    a, b, bias = parameters
    optimiser = torch.optim.LBFGS(
        parameters, max_iter=_STEPS, history_size=20, tolerance_grad=1e-7, tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )  # fmt: skip

    def loss() -> Tensor:
        optimiser.zero_grad()
        error = torch.nn.functional.cross_entropy(features @ a @ b.mT + bias, index)
        value = error + penalty * schatten_surrogate(a, b, p, smoothing)
        value.backward()
        return value

    optimiser.step(loss)


def _without_vanished(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """A and B without the pairs of columns that the penalty has brought to zero: they do not come back, but cost."""
    sizes = a.detach().square().sum(0) + b.detach().square().sum(0)
    alive = sizes > _VANISHED * sizes.max()
    return a.detach()[:, alive].contiguous().requires_grad_(), b.detach()[:, alive].contiguous().requires_grad_()


def _row_span(features: Tensor) -> Tensor:
    """Orthonormal basis [d, r] of the span of the rows."""
    if len(features) >= features.shape[1]:
        return torch.eye(features.shape[1], dtype=features.dtype, device=features.device)
    values, vectors = torch.linalg.eigh(features @ features.mT)
    return torch.linalg.qr(features.mT @ vectors[:, values > 1e-12 * values[-1]]).Q
