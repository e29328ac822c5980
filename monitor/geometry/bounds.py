"""What a linear probe needs: samples for its risk to hold on new data, and limits on curvature and entanglement."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

from monitor.geometry.ranges import as_given, in_range


def rademacher_complexity_bound(norm: ArrayLike, radius: ArrayLike, n: ArrayLike) -> float | NDArray[np.float64]:
    """Upper bound of the empirical Rademacher complexity of linear probes of bounded norm.

    Parameters
    ----------
    norm : float or array_like, >= 0
        Λ, the largest norm of a probe's weight.
    radius : float or array_like, >= 0
        ρ, the radius of a ball around the (centred) representations.
    n : int or array_like, >= 1
        Samples.

    Returns
    -------
    float, or float64 array of the broadcast shape
        Λρ/sqrt(n); lower means less room for chance.

    Notes
    -----
    The complexity is (Λ/n) E|Σ σ_i h_i|, and E|Σ σ_i h_i| <= sqrt(Σ |h_i|²) <= ρ sqrt(n) (arXiv 2609.22337, appendix
    A-A). The ambient dimension does not enter.
    """
    norm, radius = in_range(norm, "norm", 0.0), in_range(radius, "radius", 0.0)
    return as_given(norm * radius / np.sqrt(_count(n, "n")))


def generalization_bound(
    empirical_risk: ArrayLike, norm: ArrayLike, radius: ArrayLike, n: ArrayLike, confidence: float = 0.95
) -> float | NDArray[np.float64]:
    """Upper bound of a linear probe's error on new data, whichever probe of bounded norm was chosen.

    Parameters
    ----------
    empirical_risk : float or array_like, [0, 1]
        Mean training loss: of the ramp loss min(1, max(0, 1 - y f(h))) or another one that is 1-Lipschitz in the
        score, lies in [0, 1] and above the 0-1 loss.
    norm, radius, n
        As in `rademacher_complexity_bound`.
    confidence : float, (0, 1)
        Probability 1 - δ with which the bound holds.

    Returns
    -------
    float, or float64 array of the broadcast shape
        Error rate; above 1 the bound says nothing.

    Notes
    -----
    R̂ + 2Λρ/sqrt(n) + 3 sqrt(log(2/δ)/(2n)) (arXiv 2609.22337, eq. 2). An envelope for a fixed norm, not a rate: a probe
    whose norm grows as samples get fewer decays more slowly (experiment E6 measures slopes of -0.1, not -1/2).
    """
    empirical_risk = in_range(empirical_risk, "empirical_risk", 0.0, 1.0)
    complexity = np.asarray(rademacher_complexity_bound(norm, radius, n))
    deviation = 3.0 * np.sqrt(_log_term(confidence) / _count(n, "n"))
    return as_given(empirical_risk + 2.0 * complexity + deviation)


def extrinsic_radius_cap(min_curvature: ArrayLike) -> float | NDArray[np.float64]:
    """Largest radius of a ball that a closed manifold of positive curvature needs, wherever it lies.

    Parameters
    ----------
    min_curvature : float or array_like, (0, inf)
        κ, a lower bound of the sectional curvature.

    Returns
    -------
    float, or float64 array
        π/(√2 √κ), in the units of the representation.

    Notes
    -----
    Arc <= π/√κ (Bonnet-Myers), chord <= arc, radius <= chord/√2 (Jung, in any dimension): arXiv 2609.22337, eq. 3. The
    round sphere is smaller, `sphere_radius`; other surfaces need not be.
    """
    return as_given(math.pi / (math.sqrt(2.0) * np.sqrt(_positive(min_curvature, "min_curvature"))))


def sphere_radius(curvature: ArrayLike) -> float | NDArray[np.float64]:
    """Radius 1/√κ of the round sphere of curvature κ > 0."""
    return as_given(1.0 / np.sqrt(_positive(curvature, "curvature")))


MINIMAX_CONSTANT = 0.5 * math.exp(-1.0 / 8.0) / math.sqrt(2.0 * math.pi) * (1.0 - math.sqrt(0.6))
"""c₀ of `minimax_excess_risk`: φ(1/2)/2 (1 - sqrt(3/5)) = 0.0397."""


def minimax_excess_risk(dimension: ArrayLike, n: ArrayLike) -> float | NDArray[np.float64]:
    """Error above the best possible that no way of learning a classifier can avoid on all pairs of clusters.

    Parameters
    ----------
    dimension : float or array_like, >= 1
        d, the intrinsic dimension: of the space that the two centres may differ in.
    n : int or array_like, >= 1
        Labelled samples.

    Returns
    -------
    float, or float64 array of the broadcast shape
        c₀ min(1, sqrt(d/n)), c₀ = 0.0397: a rate with a valid constant. The best rule's own worst excess, simulated, is
        3 to 4 times as large for d <= n and up to 12 times beyond.

    Notes
    -----
    arXiv 2609.22337, Proposition 1, eq. 4, states a c₀ > 0. The steps printed in appendix A-B (s² = d/2n, excess
    s φ(s/2)/16 · 0.64) give 0.64 φ(1/2)/(16√2) = 0.00996, but they bound the excess of the hypercube's own classifiers
    only; how that carries over to any classifier, and adds up over coordinates, is not in them. So here is another
    proof, complete, with a larger constant and the same bound s <= 1.

    Let y = ±1 be balanced and x ~ N(yμ/2, I), with μ uniform on the sphere of radius s. The worst risk is at least the
    average one. The data enter through m = mean of y_i x_i alone, and the posterior is ∝ exp(n m·μ/2). The rule of
    least average risk says + where f(x) = E[sinh(μ·x/2) | m] > 0. Split μ = (u, v) and x = (t, x') along and across m;
    pairing u with -u and v with -v leaves

        f = E[1{u > 0} (1 - exp(-n|m|u)) sinh(ut/2) cosh(v·x'/2) | m],

    which has the sign of t. So the best rule is the linear one of direction m = μ/2 + N(0, I/n), and with θ the angle
    between m and μ its excess is

        E Φ(-(s/2) cos θ) - Φ(-s/2) >= (s/2) φ(s/2) (1 - E cos θ),

    since φ is at least φ(s/2) in between. With a² = n s²/4, cos² θ is U/(U + V) with U ~ χ²₁(a²) and V ~ χ²_{d-1}:
    given the Poisson number N of mean a²/2 it has the mean (1 + 2N)/(d + 2N), concave in N. Jensen, twice:

        E cos θ <= sqrt((1 + a²)/(d + a²)).

    Take s = min(1, sqrt(d/n)). Then a² <= d/4, and the root is at most sqrt((4 + d)/(5d)) <= sqrt(3/5) for d >= 2. For
    d = 1 directly 1 - E cos θ = 2Φ(-a) >= 2Φ(-1/2), which is larger. With φ(s/2) >= φ(1/2) the excess is at least
    φ(1/2)/2 (1 - sqrt(3/5)) min(1, sqrt(d/n)).
    """
    dimension = in_range(dimension, "dimension", 1.0, math.inf, open_high=True)
    return as_given(MINIMAX_CONSTANT * np.minimum(1.0, np.sqrt(dimension / _count(n, "n"))))


def samples_for_generalization(epsilon: float, norm: float, radius: float, confidence: float = 0.95) -> int:
    """Samples from which on the training loss certifies the error on new data to within epsilon.

    Parameters
    ----------
    epsilon : float, (0, 1)
        Allowed distance of the error above the training loss.
    norm, radius : float, >= 0
        As in `rademacher_complexity_bound`.
    confidence : float, (0, 1)

    Returns
    -------
    int
        The smallest n with ((2Λρ + 3 sqrt(log(2/δ)/2))/ε)² <= n.

    Notes
    -----
    arXiv 2609.22337, section IV-F (samples): `generalization_bound` solved for n.
    """
    epsilon = float(in_range(epsilon, "epsilon", 0.0, 1.0, open_low=True, open_high=True))
    scale = 2.0 * rademacher_complexity_bound(norm, radius, 1) + 3.0 * math.sqrt(_log_term(confidence))
    return math.ceil((scale / epsilon) ** 2)


def max_curvature(epsilon: ArrayLike, within_std: ArrayLike) -> float | NDArray[np.float64]:
    """Curvature above which no linear probe on a space form reaches an AUC of 1 - epsilon.

    Parameters
    ----------
    epsilon : float or array_like, (0, 1/2)
    within_std : float or array_like, (0, inf)
        σ_w, the within-class standard deviation along the chord.

    Returns
    -------
    float, or float64 array of the broadcast shape
        2/(z²σ_w²) with z = Φ⁻¹(1 - ε), in 1/length².

    Notes
    -----
    arXiv 2609.22337, section IV-F (curvature): `monitor.geometry.curvature.auc_ceiling` = 1 - ε solved for κ.
    Necessary, not sufficient.
    """
    return as_given(2.0 / (_z(epsilon) * _positive(within_std, "within_std")) ** 2)


def max_entanglement(
    epsilon: ArrayLike, separation: ArrayLike, confound_ratio: ArrayLike = math.inf
) -> float | NDArray[np.float64]:
    """Largest squared entanglement ρ² at which an AUC of 1 - epsilon can still be reached.

    Parameters
    ----------
    epsilon : float or array_like, (0, 1/2)
    separation : float or array_like, (0, inf]
        s, without the confound.
    confound_ratio : float or array_like, (0, inf]
        η, the confound's standard deviation over the within-class one. inf: the confounded direction is useless.

    Returns
    -------
    float, or float64 array of the broadcast shape
        In [0, 1]. 1: no entanglement prevents it. 0: none is allowed, and where s < √2 z even that is not enough.

    Notes
    -----
    (1 + η⁻²)(1 - 2z²/s²)₊, cut at 1, with z = Φ⁻¹(1 - ε) (arXiv 2609.22337, section IV-F): `entangled_auc` = 1 - ε
    solved for ρ².
    """
    separation = in_range(separation, "separation", 0.0, open_low=True)
    ratio = in_range(confound_ratio, "confound_ratio", 0.0, open_low=True)
    room = np.maximum(0.0, 1.0 - 2.0 * (_z(epsilon) / separation) ** 2)
    return as_given(np.minimum(1.0, (1.0 + ratio**-2.0) * room))


def entangled_auc(
    separation: ArrayLike, entanglement: ArrayLike, confound_ratio: ArrayLike, aligned: bool = False
) -> float | NDArray[np.float64]:
    """AUC where the signal's direction is entangled with that of a confound.

    Parameters
    ----------
    separation : float or array_like, [0, inf)
        s, without the confound.
    entanglement : float or array_like, [-1, 1]
        ρ, the cosine of the signal's and the confound's direction.
    confound_ratio : float or array_like, [0, inf]
        η, the confound's standard deviation over the within-class one.
    aligned : bool
        False: the best linear probe, which turns away from the confound. True: the probe along the signal's own
        direction, as methods with one fixed bias direction use it.

    Returns
    -------
    float, or float64 array of the broadcast shape
        In [1/2, 1], decreasing in the size of ρ and in η. The aligned one is never above the best one.

    Notes
    -----
    Clusters Δ = s u apart with the covariance I + η² v vᵀ, ρ = u·v. Best: Δᵀ Σ⁻¹ Δ = s²(1 - ρ²η²/(1 + η²)) in Φ(·/√2).
    Aligned: Φ(s/sqrt(2(1 + ρ²η²))) (arXiv 2609.22337, section VI-G, experiment E5).
    """
    separation = in_range(separation, "separation", 0.0, math.inf, open_high=True)
    squared = in_range(entanglement, "entanglement", -1.0, 1.0) ** 2
    ratio = in_range(confound_ratio, "confound_ratio", 0.0)
    # 1/(1 + η²) instead of η²: it has a value for an unbounded confound too.
    kept = 1.0 / (1.0 + ratio**2)
    if aligned:
        # 1/(1 + ρ²η²) = kept / (kept + ρ²(1 - kept)); with no entanglement nothing is lost.
        share = np.where(squared > 0.0, kept / np.where(squared > 0.0, kept + squared * (1.0 - kept), 1.0), 1.0)
    else:
        share = 1.0 - squared * (1.0 - kept)
    return as_given(ndtr(separation * np.sqrt(share / 2.0)))


def _count(value: ArrayLike, name: str) -> NDArray[np.float64]:
    return in_range(value, name, 1.0, math.inf, open_high=True)


def _positive(value: ArrayLike, name: str) -> NDArray[np.float64]:
    return in_range(value, name, 0.0, math.inf, open_low=True, open_high=True)


def _log_term(confidence: float) -> float:
    """log(2/δ)/2."""
    delta = 1.0 - float(in_range(confidence, "confidence", 0.0, 1.0, open_low=True, open_high=True))
    return math.log(2.0 / delta) / 2.0


def _z(epsilon: ArrayLike) -> NDArray[np.float64]:
    return -ndtri(in_range(epsilon, "epsilon", 0.0, 0.5, open_low=True, open_high=True))
