"""Could the probe have told? The null of an AUC, the purity and the sample size at which a signal shows.

Everything here is a one-sided test of an AUC against its null: "the scores do not know the labels". The test at a level
is detected where (AUC - 1/2) / (inflation σ₀) >= z_{1-level}; its power follows from the purity law.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

from monitor.geometry.purity import auc_excess
from monitor.geometry.ranges import as_given, in_range

CV_INFLATION = 1.4
"""Null scale of a pooled cross-validated AUC over that of a held-out one (arXiv 2609.22337, section V-E): 1.17 to 1.31
are measured there, 1.4 covers them."""

DETECTED, NOT_DETECTED, UNDERPOWERED = "detected", "not detected", "underpowered"


def null_std(n_positive: ArrayLike, n_negative: ArrayLike) -> float | NDArray[np.float64]:
    """Standard deviation of a held-out AUC when scores and labels are independent.

    Parameters
    ----------
    n_positive, n_negative : int or array_like, >= 1
        Scored samples of the two groups.

    Returns
    -------
    float, or float64 array of the broadcast shape
        σ₀ > 0, in units of AUC.

    Notes
    -----
    σ₀² = (n₊ + n₋ + 1) / (12 n₊ n₋), the Mann-Whitney variance (arXiv 2609.22337, Theorem 4). Exact for scores without
    ties and a rule fixed before the labels were seen, whatever the distribution of the scores; ties make the true one
    smaller. For n₊ = n₋ = n/2 it is sqrt((n + 1)/3)/n, about 1/sqrt(3n).
    """
    n_positive, n_negative = _count(n_positive, "n_positive"), _count(n_negative, "n_negative")
    return as_given(np.sqrt((n_positive + n_negative + 1.0) / (12.0 * n_positive * n_negative)))


def detection_z(
    auc: ArrayLike, n_positive: ArrayLike, n_negative: ArrayLike, inflation: float = CV_INFLATION
) -> float | NDArray[np.float64]:
    """How far an AUC lies above chance, in standard deviations of its null.

    Parameters
    ----------
    auc : float or array_like, [0, 1]
    n_positive, n_negative : int or array_like, >= 1
    inflation : float, >= 1
        `CV_INFLATION` for a pooled cross-validated AUC (averaged over seeds or not), 1 for one held-out split.

    Returns
    -------
    float, or float64 array of the broadcast shape
        About standard normal under the null; higher means more evidence.

    Notes
    -----
    (AUC - 1/2) / (inflation σ₀). Seeds re-split the same samples: averaging over them does not divide σ₀ by their root
    (arXiv 2609.22337, section V-E, measures false alarms of 22-37 % at 5 % for that mistake).
    """
    auc = in_range(auc, "auc", 0.0, 1.0)
    return as_given((auc - 0.5) / (_inflation(inflation) * null_std(n_positive, n_negative)))


def detection_p(
    auc: ArrayLike, n_positive: ArrayLike, n_negative: ArrayLike, inflation: float = CV_INFLATION
) -> float | NDArray[np.float64]:
    """One-sided p-value of an AUC above chance; parameters as in `detection_z`.

    Returns
    -------
    float, or float64 array of the broadcast shape
        In [0, 1], lower means more evidence. Computed as Φ(-z), which keeps its precision where 1 - Φ(z) is 0 (from z
        of about 8 on); beyond z = 37.6 the true value is below the smallest normal double and 0 is returned.
    """
    return as_given(ndtr(-np.asarray(detection_z(auc, n_positive, n_negative, inflation))))


def detectable_auc(
    n_positive: ArrayLike,
    n_negative: ArrayLike,
    *,
    level: float = 0.05,
    power: float = 0.8,
    inflation: float = CV_INFLATION,
) -> float | NDArray[np.float64]:
    """The true AUC from which on a test of this size detects with the wanted power.

    Parameters
    ----------
    n_positive, n_negative : int or array_like, >= 1
    level : float, (0, 1)
        Chance of a false detection.
    power : float, (level, 1)
        Chance of a true one.
    inflation : float, >= 1
        See `detection_z`.

    Returns
    -------
    float, or float64 array of the broadcast shape
        Above 1/2. Above 1 where no AUC is enough: too few samples.

    Notes
    -----
    1/2 + (z_{1-level} + z_{power}) inflation σ₀ (arXiv 2609.22337, eq. 10).
    """
    return as_given(0.5 + _quantiles(level, power) * _inflation(inflation) * null_std(n_positive, n_negative))


def learned_separation(
    separation: ArrayLike, purity: ArrayLike, n_train: ArrayLike, dimension: ArrayLike
) -> float | NDArray[np.float64]:
    """The separation that a direction learned from few samples keeps on new ones.

    Parameters
    ----------
    separation : float or array_like, [0, inf)
        s of the best direction.
    purity : float or array_like, [0, 1]
        Fraction a of marked texts among the training samples.
    n_train : float or array_like, > 0
        Training samples, half of each group.
    dimension : float or array_like, >= 1
        Dimensions d the direction is searched in: the probe's, or the effective number where it is regularised.

    Returns
    -------
    float, or float64 array of the broadcast shape
        s_w in [0, s]; tends to s for many samples, to 0 for few.

    Notes
    -----
    Not in arXiv 2609.22337, whose threshold is for the best direction; its learned probes need 2-2.5 times that purity
    (section VI-E). Derivation: whiten, so that Σ = I and the groups' centres are Δ apart, |Δ| = s. Let the learned
    direction be the difference of the class means of n_train/2 samples each. A class mean of purity a has its centre at
    μ₀ ± aΔ/2 and a variance of 2/n_train a coordinate, so

        w = aΔ + ε,     ε ~ N(0, (4/n_train) I),     |ε|² ≈ 4d/n_train.

    (Along Δ the mixture adds to the variance; one coordinate of d.) A marked group's score is at distance w·Δ/|w| from
    the other's, in within-class standard deviations:

        s_w = w·Δ/|w| ≈ a s² / sqrt(a² s² + 4d/n_train) = s / sqrt(1 + 4d/(n_train a² s²)).

    Unlike s this depends on the purity: at small a it goes as a itself and the AUC's excess as a². It holds for a
    Gaussian of known covariance; a probe that must also learn the covariance does worse, one that is told of sparsity
    or of a prior direction better.
    """
    s = in_range(separation, "separation", 0.0, math.inf, open_high=True)
    a = in_range(purity, "purity", 0.0, 1.0)
    n = in_range(n_train, "n_train", 0.0, math.inf, open_low=True)
    d = in_range(dimension, "dimension", 1.0, math.inf, open_high=True)
    mean = a * s
    return as_given(s * mean / np.sqrt(np.where(mean > 0.0, mean**2 + 4.0 * d / n, 1.0)))


def purity_threshold(
    n: float,
    separation: float,
    *,
    level: float = 0.05,
    power: float = 0.8,
    offset: float = 0.0,
    inflation: float = 1.0,
    dimension: float | None = None,
    train_fraction: float = 0.8,
) -> float:
    """α*(n): the smallest purity at which a signal is detected with the wanted power.

    Parameters
    ----------
    n : float, >= 2
        Scored samples, half of each group.
    separation : float, [0, inf]
        Mahalanobis distance s of the marked groups; finite where a dimension is given.
    level : float, (0, 1)
    power : float, (level, 1)
    offset : float
        See `monitor.geometry.purity.auc_max`.
    inflation : float, >= 1
        1 for one held-out split, `CV_INFLATION` for a pooled cross-validated AUC.
    dimension : float, optional
        Given: the frontier of a direction learned from ``train_fraction * n`` samples, see `learned_separation`.
        Otherwise that of the best direction.
    train_fraction : float, > 0
        Training samples a scored one: 0.8 in five-fold cross-validation, above 1 where a held-out split is the smaller
        part. Not used without a dimension.

    Returns
    -------
    float
        In (0, 1]; inf where not even a purity of 1 is enough. Below it a result that shows nothing says nothing about
        the model.

    Raises
    ------
    ValueError
        For values outside their range.

    Notes
    -----
    Solves AUC_max(a) - 1/2 = (z_{1-level} + z_{power}) inflation σ₀(n/2, n/2) (arXiv 2609.22337, eq. 10), unique since
    the left side increases strictly; by bisection to neighbouring doubles.
    """
    n, train = _number(n, "n", 2.0), _train_fraction(train_fraction)
    required = _quantiles(level, power) * _inflation(inflation) * _balanced_std(n)
    excess = _excess_at(separation, offset, dimension)
    if excess(1.0, train * n) < required:
        return math.inf
    low, high = 0.0, 1.0
    while low < (middle := (low + high) / 2.0) < high:  # until they are neighbouring doubles
        low, high = (low, middle) if excess(middle, train * n) >= required else (middle, high)
    return high


def asymptotic_purity_threshold(
    n: float, separation: float, *, level: float = 0.05, power: float = 0.8, inflation: float = 1.0
) -> float:
    """α*(n) to first order in a small separation; parameters as in `purity_threshold`, 0 < s < inf.

    Returns
    -------
    float
        Above 0, proportional to 1/(s sqrt n): slope -1/2 on logarithmic axes. Above 1 where no purity is enough.

    Notes
    -----
    2√π/√3 (z_{1-level} + z_{power}) inflation / (s sqrt n), with 2√π/√3 = 2.0467 (arXiv 2609.22337, eq. 11, which cuts
    it to 2.046 and rounds it to 2.05). It lies below the exact one, little for s <= 1 and by half for s = 6: from there
    on the threshold no longer depends on s and is about (z + z) inflation / sqrt(3n) instead.
    """
    n = _number(n, "n", 2.0)
    s = _number(separation, "separation", 0.0, open_low=True)
    return _ASYMPTOTIC * _quantiles(level, power) * _inflation(inflation) / (s * math.sqrt(n))


def sample_budget(
    purity: float,
    separation: float,
    *,
    level: float = 0.05,
    power: float = 0.8,
    offset: float = 0.0,
    inflation: float = 1.0,
    dimension: float | None = None,
    train_fraction: float = 0.8,
) -> int:
    """The smallest even number of samples, half of each group, that detects with the wanted power.

    Parameters
    ----------
    purity : float, (0, 1]
    separation : float, (0, inf]
    level, power, offset, inflation, dimension, train_fraction
        As in `purity_threshold`.

    Returns
    -------
    int
        Even, at least 2. An inflation of 1.4 multiplies it by about 1.96. Below about 10 a group the normal power it
        rests on is rough.

    Raises
    ------
    ValueError
        For values outside their range. A separation or a purity of 0 is never detected, whatever the budget.

    Notes
    -----
    Smallest even n with AUC_max(purity) - 1/2 >= (z_{1-level} + z_{power}) inflation σ₀(n/2, n/2): the inverse of
    `purity_threshold` (arXiv 2609.22337, sections IV-E and VII-A). The right side falls and the left side does not fall
    with n, so that there is one crossing.
    """
    purity = _number(purity, "purity", 0.0, 1.0, open_low=True, open_high=False)
    train = _train_fraction(train_fraction)
    multiple = _quantiles(level, power) * _inflation(inflation)
    if _number(separation, "separation", 0.0, open_high=False) == 0.0:
        raise ValueError("separation must be above 0: no sample is large enough to detect no effect, got 0")
    excess = _excess_at(separation, offset, dimension)

    def enough(half: int) -> bool:
        return excess(purity, train * 2 * half) >= multiple * _balanced_std(2.0 * half)

    high = 1
    while not enough(high):
        high *= 2
        if high > _LARGEST_HALF:
            raise ValueError(
                f"separation {separation} at purity {purity}: more than {2 * _LARGEST_HALF:.0e} samples would be needed"
            )
    low = high // 2  # not enough, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return 2 * high


def asymptotic_sample_budget(
    purity: float, separation: float, *, level: float = 0.05, power: float = 0.8, inflation: float = 1.0
) -> int:
    """`sample_budget` to first order in a small separation, and rounded up to an even number as well.

    Notes
    -----
    (2√π/√3 (z_{1-level} + z_{power}) inflation / (s a))² (arXiv 2609.22337, section IV-E). Too small where s is large:
    see `asymptotic_purity_threshold`.
    """
    a = _number(purity, "purity", 0.0, 1.0, open_low=True, open_high=False)
    s = _number(separation, "separation", 0.0, open_low=True)
    root = _ASYMPTOTIC * _quantiles(level, power) * _inflation(inflation) / (s * a)
    return 2 * max(1, math.ceil(root**2 / 2.0))


def detection_power(
    n: float,
    purity: float,
    separation: float,
    *,
    level: float = 0.05,
    offset: float = 0.0,
    inflation: float = 1.0,
    dimension: float | None = None,
    train_fraction: float = 0.8,
) -> float:
    """Chance that a signal of this separation and purity is detected.

    Parameters
    ----------
    n : float, >= 2
        Scored samples, half of each group.
    purity : float, [0, 1]
    separation : float, [0, inf]
    level, offset, inflation, dimension, train_fraction
        As in `purity_threshold`.

    Returns
    -------
    float
        In [level, 1]; the level where there is no signal.

    Notes
    -----
    Φ((AUC_max - 1/2)/(inflation σ₀) - z_{1-level}) (arXiv 2609.22337, Theorem 4): normal, with the null's standard
    deviation under the alternative too, as the theorem has it; right near the frontier, where it is used.
    """
    n, train = _number(n, "n", 2.0), _train_fraction(train_fraction)
    purity = _number(purity, "purity", 0.0, 1.0, open_high=False)
    level = _number(level, "level", 0.0, 1.0, open_low=True)
    excess = _excess_at(separation, offset, dimension)(purity, train * n)
    return float(ndtr(excess / (_inflation(inflation) * _balanced_std(n)) + ndtri(level)))


def verdict(p: float, power: float, *, level: float = 0.05, wanted_power: float = 0.8) -> str:
    """What a test's outcome says, given what it could have said.

    Parameters
    ----------
    p : float, [0, 1]
        The p-value, corrected for its family already.
    power : float, [0, 1]
        The power there was for the smallest effect of interest, at the level each test of the family has.
    level : float, (0, 1)
    wanted_power : float, (0, 1)

    Returns
    -------
    str
        `DETECTED` for p <= level, whatever the power. Otherwise `NOT_DETECTED` where the power was there: an effect of
        that size would have shown. Otherwise `UNDERPOWERED`: the result does not tell a clean model from a blind probe
        (arXiv 2609.22337, section VII-A).
    """
    p, power = _number(p, "p", 0.0, 1.0, open_high=False), _number(power, "power", 0.0, 1.0, open_high=False)
    level = _number(level, "level", 0.0, 1.0, open_low=True)
    wanted_power = _number(wanted_power, "wanted_power", 0.0, 1.0, open_low=True)
    if p <= level:
        return DETECTED
    return NOT_DETECTED if power >= wanted_power else UNDERPOWERED


_ASYMPTOTIC = 2.0 * math.sqrt(math.pi / 3.0)
_LARGEST_HALF = 2**52  # beyond it halves are no longer exact in double precision


def _excess_at(separation: float, offset: float, dimension: float | None) -> Callable[[float, float], float]:
    """AUC_max - 1/2 as a function of the purity and the number of training samples, which only a dimension makes use
    of."""
    _number(offset, "offset", -math.inf, math.inf, open_low=True)
    if dimension is None:
        separation = _number(separation, "separation", 0.0, open_high=False)
        return lambda purity, n_train: auc_excess(separation, purity, offset)
    _number(dimension, "dimension", 1.0)
    return lambda purity, n_train: auc_excess(
        learned_separation(separation, purity, n_train, dimension), purity, offset
    )


def _balanced_std(n: float) -> float:
    """`null_std(n/2, n/2)`, for odd n too."""
    return math.sqrt((n + 1.0) / 3.0) / n


def _quantiles(level: float, power: float) -> float:
    level = _number(level, "level", 0.0, 1.0, open_low=True)
    power = _number(power, "power", 0.0, 1.0, open_low=True)
    if power <= level:
        raise ValueError(
            f"power must be above level: a test detects nothing at all with chance level; got {power} and {level}"
        )
    return float(ndtri(power) - ndtri(level))


def _inflation(value: float) -> float:
    return _number(value, "inflation", 1.0)


def _train_fraction(value: float) -> float:
    return _number(value, "train_fraction", 0.0, open_low=True)


def _count(value: ArrayLike, name: str) -> NDArray[np.float64]:
    return in_range(value, name, 1.0, math.inf, open_high=True)


def _number(
    value: float, name: str, low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = True
) -> float:
    checked = in_range(value, name, low, high, open_low=open_low, open_high=open_high)
    if checked.ndim:
        raise ValueError(f"{name} must be one number, got an array of shape {checked.shape}")
    return float(checked)
