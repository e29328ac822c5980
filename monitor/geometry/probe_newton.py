"""Newton's method for many l2 logistic regressions that share their features: the solver behind `probes`.

A probe of one layer is fitted T times (folds x seeds), each time on other rows and with other feature scales, but
always on the same matrix. All T fits advance together, as columns of the same matrix products, and what a Newton system
costs is kept down by a preconditioner that all of them share: a Nystroem approximation of the layer's Gram matrix. Few
features are solved for the weights (primal), many for one coefficient a sample (dual); both reach the same optimum.

The problem of column t, with rows i in its training set, features z_i (shared, centred, of unit variance over all rows)
and relative scales r (this training set's standardisation against that of all rows):

    min over theta, b   1/2 sum_j theta_j^2 / r_j^2  +  C sum_i log(1 + exp(-y_i (z_i theta + b))),   y_i = +-1

which is scikit-learn's `LogisticRegression(C=C)` on features standardised in the training set. In the dual
theta = r^2 Z' c, with one coefficient c_i a training row and sum of c = 0. Centring needs no column of its own, the
intercept takes it up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this weight a sample no longer acts on the Hessian, and its square root would be divided by.
_SMALLEST_WEIGHT = 1e-12
_MAX_NEWTON = 50
_MAX_CG = 200
_MAX_HALVINGS = 30
# Random vectors of the Gram matrix's approximation. At n = 680 more make conjugate gradients shorter than they cost.
_RANK = 96
# Relative residual at which conjugate gradients stop, in the preconditioner's norm; divided by ten whenever the step
# found that way is no good, down to the second.
_CG_TOLERANCE, _LEAST_CG_TOLERANCE = 0.1, 1e-4
# Corrections of the first step, whose right-hand side is large; later steps correct one another.
_REFINEMENTS = 3
# Largest step in a score below which the preconditioner is kept.
_STILL = 0.5
# Tolerance of the fit on all rows, which is only a start.
_ROUGHLY = 1.0
_NOT_CONVERGED = "the logistic probes did not converge; are the features finite and of a sensible scale?"


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


def solve(problem: Problem, tolerance: float) -> tuple[Tensor, Tensor]:
    """Weights and scores at the optimum.

    Parameters
    ----------
    problem : Problem
    tolerance : float
        Newton's method stops when no training score would move by more than this in a full step. What is left then is
        about a tenth of it, since steps are solved for to a tenth.

    Returns
    -------
    theta : Tensor [B, d, T]
    scores : Tensor [B, n, T]
        Decision values of all rows, held-out ones included.

    Raises
    ------
    RuntimeError
        If it does not converge.
    """
    n, d = problem.features.shape[1:]
    # With d << n the Hessian of the fit on all rows preconditions every column's, held-out rows or not. With d near n
    # or above every row has directions of its own, and the dual works on each column's own rows.
    return _solve_primal(problem, tolerance) if 4 * d <= n else _solve_dual(problem, tolerance)


def _solve_dual(problem: Problem, tolerance: float) -> tuple[Tensor, Tensor]:
    z, train = problem.features, problem.train
    z_32 = z.float()
    gram = z_32 @ z_32.mT
    root_of_gram = _nystroem(gram)
    nothing = z.new_zeros(*z.shape[:2], 1)
    on_all_rows = Problem(
        z, problem.positive, torch.ones_like(train[:, :1]), torch.ones_like(problem.scale[..., :1]), problem.C
    )
    c, b, _ = _dual_newton(on_all_rows, gram, root_of_gram, nothing, nothing[:, :1], True, _ROUGHLY)
    # Every column starts from the fit on all rows, as a combination that its held-out rows still take part in.
    T = train.shape[1]
    c, _, scores = _dual_newton(problem, gram, root_of_gram, c.expand(-1, -1, T), b.expand(-1, -1, T), False, tolerance)
    return problem.scale * (z.mT @ c), scores


def _dual_newton(
    problem: Problem, gram: Tensor, root_of_gram: Tensor, c: Tensor, b: Tensor, inside: bool, tolerance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients c [B, n, T], intercepts b [B, 1, T] and scores [B, n, T] at the optimum.

    `inside` says whether c is zero on held-out rows. Where it is not, the first full step makes it so.
    """
    z, y, train, C = problem.features, problem.positive[:, None], problem.train, problem.C
    n_train = train.sum(0)

    def kernel(c: Tensor) -> Tensor:
        return z @ (problem.scale * (z.mT @ c))

    def near_kernel(v: Tensor) -> Tensor:
        """Product with K in float32; with the Gram matrix of all columns in its place while that converges fast."""
        return z_32 @ (scale_32 * (z_32.mT @ v)) if exact else gram @ v

    z_32, scale_32 = z.float(), problem.scale.float()
    exact = False
    cg_tolerance = _CG_TOLERANCE
    previous = math.inf
    kc = kernel(c)
    # One buffer for the largest intermediate: asking for fresh memory each time takes longer than filling it.
    work = gram.new_empty(len(gram), train.shape[1], *root_of_gram.shape[1:])
    moving = True
    for _ in range(_MAX_NEWTON):
        scores = kc + b
        root = _weights(scores, C).sqrt() * train
        root_32 = root.float()
        if moving:
            precondition = _inverse_of_approximation(root_of_gram, root_32, work)
        wanted = C * (y - torch.sigmoid(scores)) * train
        new, k_new, b_new = c, kc, b
        if not inside:
            new = train * (c - _sum(train * c) / n_train)
            k_new = kernel(new)
        for _ in range(1 if inside else _REFINEMENTS):
            # Newton's new c solves W^-1 c + K c + b = W^-1 wanted + scores with sum of c = 0. The correction is
            # solved for in e, correction = W^1/2 e, where the matrix is I + W^1/2 K W^1/2 and e is orthogonal to
            # W^1/2 1. It is solved roughly and in float32: that takes away most of the error, and the next residual,
            # in float64, sees the rest.
            right = (wanted - new) / root.clamp_min(_SMALLEST_WEIGHT**0.5) + root * (scores - k_new - b_new)
            e, b_step = _conjugate_gradients(
                lambda e, root=root_32: e + root * near_kernel(root * e),
                right.float(),
                precondition,
                cg_tolerance,
                root_32,
            )
            correction = (root_32 * e).double() * train
            correction = correction - train * _sum(correction) / n_train  # in float32 the sum is 0 only to rounding
            new, k_new, b_new = new + correction, k_new + kernel(correction), b_new + b_step.double()
        step, k_step, b_step = new - c, k_new - kc, b_new - b
        moved = k_step + b_step
        quadratic = [_columns(c, kc), _columns(c, k_step), _columns(step, k_step)]
        t = _step_length(quadratic, scores, moved, y, train, C)
        c, kc, b = c + t * step, kc + t * k_step, b + t * b_step
        inside = inside or bool((t == 1).all())
        largest = (moved * train).abs().amax()  # the full step: a column that backtracks is not done
        if inside and bool(largest <= tolerance):
            return c, b, kc + b
        # Few samples, or features with outliers: standardisations differ too much for one Gram matrix to serve all
        # columns.
        exact = exact or not inside or bool(largest > previous / 3)
        # The preconditioner's norm hardly sees an error along the first directions of K; the objective does.
        if bool((t < 1).any()):
            cg_tolerance = max(cg_tolerance / 10, _LEAST_CG_TOLERANCE)
        previous = largest
        moving = bool(largest > _STILL)  # else the weights, and with them the preconditioner, hardly change any more
    raise RuntimeError(_NOT_CONVERGED)


def _nystroem(gram: Tensor) -> Tensor:
    """F [B, n, r] with F F' near K [B, n, n], by a product with r random vectors (Halko et al., arXiv 0909.4061)."""
    n = gram.shape[-1]
    rank = min(_RANK, n)
    # The approximation steers the speed only, never the optimum; fixed all the same, so that runs are equal.
    vectors = torch.randn(n, rank, generator=torch.Generator().manual_seed(0)).to(gram)
    sketch = gram @ vectors
    core = (vectors.mT @ sketch).double()
    core = (core + core.mT) / 2
    core.diagonal(dim1=-2, dim2=-1).add_(1e-5 * core.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True))
    factor = torch.linalg.cholesky(core).to(gram)
    return torch.linalg.solve_triangular(factor, sketch.mT, upper=False).mT


def _inverse_of_approximation(root_of_gram: Tensor, root: Tensor, work: Tensor):
    """v -> (I + W^1/2 F F' W^1/2)^-1 v for every column of root = W^1/2 [B, n, T], by the r x r inverse of Woodbury."""
    weighted = torch.mul(root.mT[..., None], root_of_gram[:, None], out=work)  # [B, T, n, r]
    core = weighted.mT @ weighted
    core.diagonal(dim1=-2, dim2=-1).add_(1)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(core))

    def apply(v: Tensor) -> Tensor:
        inner = (root_of_gram.mT @ (root * v)).mT[..., None]  # [B, T, r, 1]
        return v - root * (root_of_gram @ (inverse @ inner)[..., 0].mT)

    return apply


def _solve_primal(problem: Problem, tolerance: float) -> tuple[Tensor, Tensor]:
    B, n, d = problem.features.shape
    y, train, C = problem.positive[:, None], problem.train, problem.C
    T = train.shape[1]
    z = torch.cat([problem.features, problem.features.new_ones(B, n, 1)], dim=-1)  # the last weight is the intercept
    penalty = torch.cat([1 / problem.scale, problem.scale.new_zeros(B, 1, T)], dim=1)
    of_all = torch.cat([z.new_ones(d), z.new_zeros(1)])[:, None]

    def factor(scores: Tensor, share: float) -> Tensor:
        hessian = share * z.mT @ (_weights(scores, C) * z)
        hessian.diagonal(dim1=-2, dim2=-1).add_(of_all[:, 0])
        return torch.linalg.cholesky(hessian)

    def newton(theta: Tensor, scores: Tensor, rows: Tensor, penalty: Tensor, solve, tolerance: float):
        for _ in range(_MAX_NEWTON):
            gradient = z.mT @ (C * (y - torch.sigmoid(scores)) * rows) - penalty * theta
            step = solve(gradient, scores)
            moved = z @ step
            quadratic = [_columns(a, penalty * b) for a, b in ((theta, theta), (theta, step), (step, step))]
            t = _step_length(quadratic, scores, moved, y, rows, C)
            theta, scores = theta + t * step, scores + t * moved
            if bool((moved * rows).abs().amax() <= tolerance):
                return theta, scores
        raise RuntimeError(_NOT_CONVERGED)

    theta, scores = newton(
        z.new_zeros(B, d + 1, 1), z.new_zeros(B, n, 1), torch.ones_like(y), of_all,
        lambda gradient, scores: torch.cholesky_solve(gradient, factor(scores, 1.0)), _ROUGHLY,
    )  # fmt: skip
    inverse = torch.cholesky_inverse(factor(scores, float(train.mean())))

    def by_gradients(gradient: Tensor, scores: Tensor) -> Tensor:
        weights = _weights(scores, C) * train
        return _conjugate_gradients(
            lambda v: penalty * v + z.mT @ (weights * (z @ v)), gradient, lambda v: inverse @ v, _CG_TOLERANCE
        )[0]

    theta, scores = newton(theta.expand(-1, -1, T), scores.expand(-1, -1, T), train, penalty, by_gradients, tolerance)
    return theta[:, :d], scores


def _weights(scores: Tensor, C: float) -> Tensor:
    """Second derivative of C log(1 + exp(-y f)) in f, which does not depend on y."""
    p = torch.sigmoid(scores)
    return (C * p * (1 - p)).clamp_min(_SMALLEST_WEIGHT)


def _conjugate_gradients(
    matrix, right: Tensor, precondition, tolerance: float, orthogonal: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Solve A x + v m = right, v'x = 0 for every column of [B, m, T], all columns in step.

    `orthogonal` is v; without it the system is A x = right. Returns x and the multipliers m [B, 1, T]. The
    preconditioner is projected, so that every iterate keeps v'x = 0.
    """
    if orthogonal is not None:
        q = precondition(orthogonal)
        vq = _columns(orthogonal, q)

    def project(r: Tensor) -> tuple[Tensor, Tensor]:
        u = precondition(r)
        if orthogonal is None:
            return u, torch.zeros_like(u[..., :1, :])
        m = _ratio(_columns(orthogonal, u), vq)
        return u - q * m, m

    x = torch.zeros_like(right)
    r = right
    z, multiplier = project(r)
    p = z
    rz = _columns(r, z)
    enough = rz * tolerance**2  # in the preconditioner's norm, where the matrix is near the identity
    for _ in range(_MAX_CG):
        # A column that is solved rests: its residual would shrink into denormal numbers, which are slow.
        active = rz > enough
        if not bool(active.any()):
            break
        ap = matrix(p)
        alpha = torch.where(active, _ratio(rz, _columns(p, ap)), 0.0)
        x = x + alpha * p
        r = r - alpha * ap
        z, m = project(r)
        multiplier = torch.where(active, m, multiplier)
        previous, rz = rz, torch.where(active, _columns(r, z), rz)
        p = torch.where(active, z + _ratio(rz, previous) * p, 0.0)
    return x, multiplier


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 for a column that is solved already."""
    return torch.where(b > 0, a / b.clamp_min(torch.finfo(b.dtype).tiny), 0.0)


def _sum(a: Tensor) -> Tensor:
    return a.sum(-2, keepdim=True)


def _columns(a: Tensor, b: Tensor) -> Tensor:
    """Inner product of each column: [B, m, T] x [B, m, T] -> [B, 1, T]."""
    return (a * b).sum(-2, keepdim=True)


def _objective(penalty: Tensor, scores: Tensor, y: Tensor, rows: Tensor, C: float) -> Tensor:
    loss = torch.nn.functional.softplus((1 - 2 * y) * scores) * rows
    return 0.5 * penalty + C * loss.sum(-2, keepdim=True)


def _step_length(quadratic: list[Tensor], scores: Tensor, moved: Tensor, y: Tensor, rows: Tensor, C: float) -> Tensor:
    """Largest of 1, 1/2, 1/4, ... at which no column's objective rises, [B, 1, T].

    `quadratic` holds the penalty's products old-old, old-step, step-step.
    """

    def objective(t: Tensor) -> Tensor:
        penalty = quadratic[0] + 2 * t * quadratic[1] + t * t * quadratic[2]
        return _objective(penalty, scores + t * moved, y, rows, C)

    t = torch.ones_like(quadratic[0])
    before = objective(torch.zeros_like(t))
    slack = 1e-12 * before.abs() + 1e-12  # at the optimum the objective only rounds
    for _ in range(_MAX_HALVINGS):
        worse = ~(objective(t) <= before + slack)
        if not bool(worse.any()):
            return t
        t = torch.where(worse, t / 2, t)
    return torch.where(worse, 0.0, t)
