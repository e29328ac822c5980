"""Newton's method for many l2 logistic regressions that share their features: the solver behind `probes`.

A probe of one layer is fitted T times (folds x seeds), each time on other rows and with other feature scales, but
always on the same matrix. All T fits advance together, as columns of the same matrix products, and each Newton system
is solved by conjugate gradients. Few features are solved for the weights (primal), many for one coefficient a sample
(dual); both reach the same optimum.

The problem of column t, with rows i in its training set, features z_i (shared, centred, of unit variance over all rows)
and relative scales r (this training set's standardisation against that of all rows):

    min over theta, b   1/2 sum_j theta_j^2 / r_j^2  +  C sum_i log(1 + exp(-y_i (z_i theta + b))),   y_i = +-1

which is scikit-learn's `LogisticRegression(C=C)` on features standardised in the training set. In the dual
theta = r^2 Z' c, with one coefficient c_i a training row and sum of c = 0. Centring needs no column of its own, the
intercept takes it up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from monitor.geometry.conjugate_gradients import conjugate_gradients

# Up to this many features a row the weights are solved for. Without its held-out rows a fit with d << n changes little.
# With d near n every row has directions of its own, and the preconditioner must leave the held-out ones out, which is
# easy in the dual.
_PRIMAL_UP_TO = 0.25
# Below this second derivative a sample no longer acts on the Hessian, and its square root would be divided by.
_SMALLEST_WEIGHT = 1e-12
# Newton steps: far more than it takes.
_MAX_NEWTON = 50
# Newton steps in float32, of the dual, before it goes on in float64 anyhow.
_MAX_ROUGH = 10
# Scores that are all below this count as 0: features that say nothing.
_SMALLEST_SCORE = 1e-2
# A start is good enough when no score moves by more than this in a Newton step.
_START_TOLERANCE = 0.3
# From here on Newton's method converges quadratically: the weights, and with them the preconditioner, hardly change any
# more, and float64 is worth its time.
_STILL = 0.5
# Error that conjugate gradients leave of a Newton step; the primal's, all in float64, are cheap.
_CG_TOLERANCE, _PRIMAL_CG_TOLERANCE = 0.1, 0.01
# Times that they are started for a step, each on what the last left in full precision, until the step promises a fall
# of the objective that is no less than this share of what an exact one does.
_MAX_REFINEMENTS, _ENOUGH_FALL = 8, 0.75
# Random vectors of the Nystroem approximation, and the most directions that are kept of it.
_SKETCH, _RANK, _SMALLEST_RANK = 128, 96, 16
# A direction of the Gram matrix counts when its eigenvalue times the mean weight exceeds this; the identity has 1.
_COUNTS = 2.0
# Relative ridges that keep a Cholesky factorisation of a float32 product positive.
_SKETCH_RIDGE, _CORE_RIDGE = 1e-4, 1e-5
_MAX_HALVINGS = 30


@dataclass(frozen=True)
class Problem:
    """Fits that share features.

    Parameters
    ----------
    features : Tensor [B, n, d], float64
        Z: layers in front. Centred and scaled over all n rows.
    positive : Tensor [n], float64
        1 for the positive class, 0 for the other.
    train : Tensor [n, T], float64
        1 where a row is in a column's training set.
    scale : Tensor [B, d, T], float64
        r^2: variance of a feature over all rows divided by that over the column's training rows.
    C : float
        Inverse strength of the penalty, as in scikit-learn.
    """

    features: Tensor
    positive: Tensor
    train: Tensor
    scale: Tensor
    C: float

    def to(self, dtype: torch.dtype) -> Problem:
        tensors = (self.features, self.positive, self.train, self.scale)
        return Problem(*(tensor.to(dtype) for tensor in tensors), self.C)

    def kernel(self, c: Tensor) -> Tensor:
        """K c for coefficients [B, n, T], where column t has K = Z diag(r_t^2) Z'."""
        return self.features @ (self.scale * (self.features.mT @ c))


def solve(problem: Problem, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and scores at the optimum.

    Parameters
    ----------
    problem : Problem
    tolerance : float
        Newton's method stops after a step in which no training score moved by more than this (times the largest score
        where that is below 1), and no held-out score f by more than this times max(1, |f|). Of such a step the linear
        solver leaves a tenth, and the method itself, which converges quadratically, about its square: scores are off
        by some tenth of the tolerance.

    Returns
    -------
    theta : Tensor [B, d, T]
    scores : Tensor [B, n, T]
        Decision values of all rows, held-out ones included.
    converged : bool Tensor [B, T]
        Which columns are at their optimum. The others have features whose correlations or outliers are beyond float32;
        `solve_alone` is for them.
    """
    n, d = problem.features.shape[1:]
    return _solve_primal(problem, tolerance) if d <= _PRIMAL_UP_TO * n else _solve_dual(problem, tolerance)


def solve_alone(features: Tensor, positive: Tensor, C: float, tolerance: float) -> tuple[Tensor, Tensor]:
    """Weights [d] and intercept [] of one fit on all its rows [n, d], by dense factorisations: slower, and sure.

    Raises
    ------
    RuntimeError
        If it does not converge.
    """
    n, d = features.shape
    # With more features than rows the weights lie in the space of the rows.
    basis, small = torch.linalg.qr(features.mT) if d > n else (None, features.mT)
    weights, _, converged = _fit_all_rows(_with_intercept(small.mT[None]), positive[:, None], C, tolerance)
    if not bool(converged.all()):
        raise RuntimeError("a logistic probe did not converge; are the features finite and of a sensible scale?")
    weights, intercept = weights[0, :-1, 0], weights[0, -1, 0]
    return weights if basis is None else basis @ weights, intercept


# --- dual: one coefficient a sample -----------------------------------------------------------------------------------


def _solve_dual(problem: Problem, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    z, T = problem.features, problem.train.shape[1]
    rough = problem.to(torch.float32)
    gram = rough.features @ rough.features.mT
    basis, coefficients = _nystroem(gram)
    # The fit on all rows, first in the leading directions alone; then every column starts from it, as a combination of
    # rows that its held-out ones still take part in.
    weights, scores, _ = _fit_all_rows(
        _with_intercept(basis.double()), problem.positive[:, None], problem.C, _START_TOLERANCE
    )
    c = coefficients @ weights[:, :-1].float()
    c = c - c.mean(-2, keepdim=True)  # Z'1 = 0: the same fit, with the sum that the dual asks for
    b = weights[:, -1:].float()
    basis = basis[..., : _rank(basis, _curvature(scores, problem.C))].contiguous()
    on_all_rows = replace(rough, train=torch.ones_like(rough.train[:, :1]), scale=torch.ones_like(rough.scale[..., :1]))
    c, b, _, _ = _DualNewton(gram, basis, 1).run(on_all_rows, c, b, _START_TOLERANCE, _MAX_ROUGH)
    newton = _DualNewton(gram, basis, T)
    c, b, _, _ = newton.run(rough, c.expand(-1, -1, T), b.expand(-1, -1, T), _STILL, _MAX_ROUGH)
    c, b, scores, converged = newton.run(problem, c.double(), b.double(), tolerance, _MAX_NEWTON)
    return problem.scale * (z.mT @ c), scores, converged


def _nystroem(gram: Tensor) -> tuple[Tensor, Tensor]:
    """F, E [B, n, r] with F F' near K [B, n, n] and F = K E; columns of F are orthogonal, by falling length.

    From one product with random vectors (Halko et al., arXiv 0909.4061, Sec. 5.5). The approximation steers the speed
    only, never the optimum; its vectors are fixed all the same, so that runs are equal.
    """
    n = gram.shape[-1]
    vectors = torch.randn(n, min(_SKETCH, n), generator=torch.Generator().manual_seed(0)).to(gram)
    sketch = gram @ vectors
    core = (vectors.mT @ sketch).double()
    core = (core + core.mT) / 2
    diagonal = core.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(_SKETCH_RIDGE * diagonal.mean(-1, keepdim=True) + torch.finfo(torch.float32).tiny)
    factor = torch.linalg.cholesky(core).to(gram)
    basis = torch.linalg.solve_triangular(factor, sketch.mT, upper=False).mT
    coefficients = torch.linalg.solve_triangular(factor, vectors.mT.expand(len(gram), -1, -1), upper=False).mT
    _, rotation = torch.linalg.eigh(basis.mT @ basis)
    rotation = rotation[..., -_RANK:].flip(-1)
    return basis @ rotation, coefficients @ rotation


def _rank(basis: Tensor, weights: Tensor) -> int:
    """Directions worth a place in the preconditioner, of the layer that has most of them."""
    counts = _columns(basis, basis) * weights.mean(-2, keepdim=True) > _COUNTS
    return max(int(counts.sum(-1).max()), min(_SMALLEST_RANK, basis.shape[-1]))


class _DualNewton:
    """Newton's method on T columns, with what it keeps from one precision to the next.

    Parameters
    ----------
    gram : Tensor [B, n, n], float32
        Z Z', for all columns.
    basis : Tensor [B, n, r], float32
        F with F F' near it.
    """

    def __init__(self, gram: Tensor, basis: Tensor, T: int):
        self.gram, self.basis = gram, basis
        self.rest = (gram.diagonal(dim1=-2, dim2=-1) - basis.square().sum(-1)).clamp_min(0)[:, None]
        # One buffer for the largest intermediate: asking for fresh memory each time takes longer than filling it.
        self.work = gram.new_empty(len(gram), T, *basis.shape[1:])
        # Whether the last step changed the weights, and with them the preconditioner.
        self.moving = True
        # Whether each column has its own K in a step, in full precision. The Gram matrix in its place is cheaper, and
        # good enough unless standardisations differ much: few samples, or features with outliers.
        self.exact = False

    def run(
        self, problem: Problem, c: Tensor, b: Tensor, tolerance: float, max_steps: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From coefficients c [B, n, T] and intercepts b [B, 1, T] until a step changes scores by `tolerance` at most.

        Returns c, b, the scores [B, n, T], and which columns got there [B, T].
        """
        y, train = problem.positive[:, None], problem.train
        inside = not bool((c * (1 - train)).any())  # else the first full step drops the held-out rows
        kc = problem.kernel(c)
        previous = math.inf
        for _ in range(max_steps):
            scores = kc + b
            step, k_step, b_step, penalty, change = self._step(problem, c, kc, b, inside, tolerance)
            t = _step_length(penalty, scores, k_step + b_step, y, train, problem.C)
            c, kc, b = c + t * step, kc + t * k_step, b + t * b_step
            inside = inside or bool((t == 1).all())
            done = (change <= tolerance)[:, 0] & inside  # the full step: a column that backtracks is not done
            largest = float(change.amax())
            self.moving = largest > _STILL
            if bool(done.all()) or bool((t == 0).any()):
                break
            self.exact = self.exact or (largest <= _STILL and largest > previous / 3)
            previous = largest
        return c, b, kc + b, done

    def _step(
        self, problem: Problem, c: Tensor, kc: Tensor, b: Tensor, inside: bool, tolerance: float
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor], Tensor]:
        """Step of c, of K c and of b, the penalty's products as `_step_length` wants them, and `_change`."""
        y, train, C = problem.positive[:, None], problem.train, problem.C
        n_train = train.sum(0)
        scores = kc + b
        p = torch.sigmoid(scores)
        root = _curvature(scores, C, p).sqrt() * train
        wanted = C * (y - p) * train
        root_32 = root.mT.float().contiguous()
        if self.moving:
            self.precondition = _inverse_of_approximation(self.basis, self.rest, root_32, self.work)

        def matrix(e: Tensor) -> Tensor:
            v = root_32 * e
            kv = problem.kernel(v.mT.to(c)).mT.to(v) if self.exact else v @ self.gram
            return torch.addcmul(e, root_32, kv)

        new, k_new, b_new = c, kc, b
        if not inside:
            new = train * (c - _sum(train * c) / n_train)
            k_new = problem.kernel(new)
        for refinement in range(_MAX_REFINEMENTS):
            # Newton's new c solves W^-1 c + K c + b = W^-1 wanted + scores with sum of c = 0. The correction is solved
            # for in e, correction = W^1/2 e, where the matrix is I + W^1/2 K W^1/2 and e is orthogonal to W^1/2 1. It
            # is solved roughly and in float32: that takes away most of the error, and the next residual sees the rest.
            right = (wanted - new) / root.clamp_min(_SMALLEST_WEIGHT**0.5) + root * (scores - k_new - b_new)
            e, b_more = conjugate_gradients(
                matrix, right.mT.float().contiguous(), self.precondition, _CG_TOLERANCE, root_32
            )
            more = (root_32 * e).mT.to(c)
            more = more - train * (_sum(more) / n_train)  # in float32 the sum is 0 only to rounding
            new, k_new, b_new = new + more, k_new + problem.kernel(more), b_new + b_more.mT.to(c)
            step, k_step, b_step = new - c, k_new - kc, b_new - b
            moved = k_step + b_step
            change = _change(moved, scores, train)
            penalty = [_columns(c, kc), _columns(c, k_step), _columns(step, k_step)]
            # At the solution fall = bend. The dual's error says little about the primal's, but where the fall is less
            # than half the bend the quadratic model itself would rise.
            fall = _columns(wanted, moved) - penalty[1]
            bend = penalty[2] + _columns(root * moved, root * moved)
            if bool(((fall > _ENOUGH_FALL * bend) | (change <= tolerance)).all()):
                break
            self.exact = self.exact or refinement > 1
        return step, k_step, b_step, penalty, change


def _inverse_of_approximation(basis: Tensor, rest: Tensor, root: Tensor, work: Tensor) -> Callable[[Tensor], Tensor]:
    """v -> (I + W^1/2 (F F' + R) W^1/2)^-1 v for every row of root = W^1/2 [B, T, n], by Woodbury's r x r inverse.

    R = diag(rest), with rest [B, 1, n], is what F F' leaves of the Gram matrix's diagonal.
    """
    inner_weight = 1 / (1 + root.square() * rest)
    scaled = root * inner_weight
    weighted = torch.mul((root * scaled)[..., None], basis[:, None], out=work)  # [B, T, n, r]
    core = basis.mT[:, None] @ weighted
    core.diagonal(dim1=-2, dim2=-1).mul_(1 + _CORE_RIDGE).add_(1)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(core))
    basis_T = basis.mT.contiguous()

    def apply(v: Tensor) -> Tensor:
        inner = (scaled * v) @ basis
        inner = (inner[..., None, :] @ inverse)[..., 0, :]
        return torch.addcmul(inner_weight * v, scaled, inner @ basis_T, value=-1)

    return apply


# --- primal: one weight a feature -------------------------------------------------------------------------------------


def _solve_primal(problem: Problem, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    y, train, C = problem.positive[:, None], problem.train, problem.C
    z = _with_intercept(problem.features)
    penalty = torch.cat([1 / problem.scale, torch.zeros_like(problem.scale[:, :1])], dim=1)
    penalty_T = penalty.mT.contiguous()
    theta, scores, _ = _fit_all_rows(z, y, C, _START_TOLERANCE)
    inverse = torch.cholesky_inverse(_factor(z, scores, C, float(train.mean())))

    def direction(gradient: Tensor, scores: Tensor) -> Tensor:
        weights = (_curvature(scores, C) * train).mT.contiguous()
        solved, _ = conjugate_gradients(
            lambda v: penalty_T * v + (weights * (v @ z.mT)) @ z,
            gradient.mT,
            lambda v: v @ inverse,
            _PRIMAL_CG_TOLERANCE,
        )
        return solved.mT

    T = train.shape[1]
    theta, scores, converged = _primal_newton(
        z, y, train, penalty, C, theta.expand(-1, -1, T), scores.expand(-1, -1, T), direction, tolerance
    )
    return theta[:, :-1], scores, converged


def _fit_all_rows(z: Tensor, y: Tensor, C: float, tolerance: float) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [B, d, 1] and scores [B, n, 1] of features [B, n, d], the last of them the intercept; dense."""
    penalty = z.new_ones(z.shape[-1], 1)
    penalty[-1] = 0
    nothing = z.new_zeros(len(z), z.shape[-1], 1)
    return _primal_newton(
        z, y, torch.ones_like(y), penalty, C, nothing, z @ nothing,
        lambda gradient, scores: torch.cholesky_solve(gradient, _factor(z, scores, C)), tolerance,
    )  # fmt: skip


def _primal_newton(
    z: Tensor,
    y: Tensor,
    rows: Tensor,
    penalty: Tensor,
    C: float,
    theta: Tensor,
    scores: Tensor,
    direction: Callable[[Tensor, Tensor], Tensor],
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Newton's method from theta [B, d, T], scores [B, n, T]; `direction` maps (-gradient, scores) to the step."""
    for _ in range(_MAX_NEWTON):
        step = direction(z.mT @ (C * (y - torch.sigmoid(scores)) * rows) - penalty * theta, scores)
        moved = z @ step
        quadratic = [_columns(a, penalty * b) for a, b in ((theta, theta), (theta, step), (step, step))]
        t = _step_length(quadratic, scores, moved, y, rows, C)
        theta, scores = theta + t * step, scores + t * moved
        done = (_change(moved, scores, rows) <= tolerance)[:, 0]
        if bool(done.all()) or bool((t == 0).any()):
            break
    return theta, scores, done


def _factor(z: Tensor, scores: Tensor, C: float, share: float = 1.0) -> Tensor:
    """Cholesky factor of the Hessian of the fit on all rows, with its data part multiplied by `share`."""
    hessian = share * z.mT @ (_curvature(scores, C) * z)
    hessian.diagonal(dim1=-2, dim2=-1)[..., :-1].add_(1)
    return torch.linalg.cholesky(hessian)


def _with_intercept(z: Tensor) -> Tensor:
    return torch.cat([z, torch.ones_like(z[..., :1])], dim=-1)


# --- the objective ----------------------------------------------------------------------------------------------------


def _curvature(scores: Tensor, C: float, p: Tensor | None = None) -> Tensor:
    """Second derivative of C log(1 + exp(-y f)) in f, which does not depend on y; p = sigmoid(f) if known."""
    p = torch.sigmoid(scores) if p is None else p
    return (C * p * (1 - p)).clamp_min(_SMALLEST_WEIGHT)


def _change(moved: Tensor, scores: Tensor, rows: Tensor) -> Tensor:
    """Largest change of a column's scores f, [B, 1, T], relative to the largest |f| if below 1.

    Held-out rows take part, relative to max(1, |f|): an outlier among them asks more of the weights than training does.
    """
    size = scores.abs()
    least = (size * rows).amax(-2, keepdim=True).clamp(_SMALLEST_SCORE, 1.0)
    return (moved.abs() / torch.maximum(size * (1 - rows), least)).amax(-2, keepdim=True)


def _step_length(quadratic: list[Tensor], scores: Tensor, moved: Tensor, y: Tensor, rows: Tensor, C: float) -> Tensor:
    """Largest of 1, 1/2, 1/4, ... at which a column's objective does not rise, [B, 1, T].

    `quadratic` holds the penalty's products old-old, old-step, step-step.
    """
    old, mixed, new = quadratic
    sign = 1 - 2 * y

    def objective(t: Tensor) -> Tensor:
        loss = torch.nn.functional.softplus(sign * torch.addcmul(scores, t, moved)) * rows
        return 0.5 * (old + 2 * t * mixed + t * t * new) + C * _sum(loss)

    t = torch.ones_like(old)
    before = objective(torch.zeros_like(t))
    slack = 8 * torch.finfo(t.dtype).eps * before.abs()  # at the optimum the objective only rounds
    for _ in range(_MAX_HALVINGS):
        worse = ~(objective(t) <= before + slack)
        if not bool(worse.any()):
            return t
        t = torch.where(worse, t / 2, t)
    return torch.where(worse, 0.0, t)


def _sum(a: Tensor) -> Tensor:
    return a.sum(-2, keepdim=True)


def _columns(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each column: [B, k, T] x [B, k, T] -> [B, 1, T]."""
    return (a * b).sum(-2, keepdim=True)
