"""E3, part D: estimators of curvature, dimension and separation where the truth is known."""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor
from tqdm import tqdm

from monitor.geometry.detection import purity_threshold
from monitor.geometry.intrinsic_dimension import mle_dimension, two_nn_dimension
from monitor.geometry.sagitta import sagitta_curvature
from monitor.geometry.separation import crossfitted_separation, naive_separation
from recipes.studies.record import record

CURVATURES = (0.25, 0.5, 1.0, 2.0, 4.0)
SPHERES = (2, 3, 5)  # dimensions of the spheres whose curvature is read
DIMENSIONS = (5, 10, 15, 20, 25)
SEPARATIONS = (1.0, 2.0, 3.0, 4.0)
FEATURES, SAMPLES = 768, 300

_CURVATURE = (
    f"falls regressed on squared tangential distance, as published; curvatures {CURVATURES}. The paper does not state "
    "dimensions, samples or noise; without noise the relative error cannot depend on the curvature."
)
_CHORD = "ours: falls regressed on squared distance, which is exact on a sphere: h = c^2/(2R)."
_SEPARATIONS = (
    f"medians over separations {SEPARATIONS} and seeds; the paper does not state its separations, and the plug-in's "
    "relative error falls as their square."
)
_AT_ZERO = (
    "300 samples in all, 150 of a class: the plug-in then expects sqrt(4 d/n) = 3.20 (2.26 with 300 of each). The "
    "paper's 0.50 is one draw or a mean: the median of the definition is near 0, since half of all draws have "
    "s^2 <= 0."
)
_SHIFT = (
    "alpha* goes as 1/s where s is small, so that 8 % of s are about 8 % of alpha*; the paper's `under 1 %` holds only "
    "where the law is saturated."
)


def curvature(quick: bool, generator: torch.Generator) -> list[dict]:
    """Sagitta curvature of spheres in 20 dimensions."""
    n, dimensions = (300, SPHERES[:1]) if quick else (1_000, SPHERES)
    published = {"tangent": (0.17, 0.28, 1.0), "chord": (None, None, None)}
    records = []
    for noise in (0.0, 0.01):
        found: dict[str, list[list[float]]] = {against: [] for against in published}
        for dimension in dimensions:
            for readings in found.values():
                readings.append([])
            for kappa in CURVATURES:
                points = sphere(n, dimension, generator) / math.sqrt(kappa)
                points = torch.nn.functional.pad(points, (0, 20 - dimension - 1))
                points = points + noise * torch.randn(points.shape, generator=generator, dtype=torch.float64)
                for against, readings in found.items():
                    readings[-1].append(float(sagitta_curvature(points, dimension, against=against)))
        for against, readings in found.items():
            errors = [abs(value / kappa - 1) for row in readings for value, kappa in zip(row, CURVATURES, strict=True)]
            ordered = [row == sorted(row) for row in readings]
            median, largest, order = published[against]
            group = f"D: curvature by {against}s, spheres of d_B {dimensions}, n={n}, noise {noise:g}"
            note = _CURVATURE if against == "tangent" else _CHORD
            records.append(record("e3", group, "median_relative_error", statistics.median(errors), median, note))
            records.append(record("e3", group, "max_relative_error", max(errors), largest))
            records.append(record("e3", group, "share_in_order", sum(ordered) / len(ordered), order))
    return records


def dimension(quick: bool, generator: torch.Generator) -> list[dict]:
    """Intrinsic dimension of spheres, and of a linear manifold of dimension 25."""
    sizes, repeats, dimensions = ((1_000,), 1, DIMENSIONS[::2]) if quick else ((1_000, 2_000, 4_000), 5, DIMENSIONS)
    estimators = {"mle": (mle_dimension, 0.15), "two_nn": (two_nn_dimension, 0.17)}
    records = []
    for n in tqdm(sizes, desc="E3 D, dimension", unit="size", disable=None):
        ratios: dict[str, dict[int, list[float]]] = {name: {d: [] for d in dimensions} for name in estimators}
        flat: dict[str, list[float]] = {name: [] for name in estimators}
        for _ in range(repeats):
            for d in dimensions:
                points = sphere(n, d, generator)
                for name, (estimate, _) in estimators.items():
                    ratios[name][d].append(float(estimate(points)) / d)
            points = torch.randn(n, 25, generator=generator, dtype=torch.float64)
            for name, (estimate, _) in estimators.items():
                flat[name].append(1 - float(estimate(points)) / 25)
        for name, (_, paper) in estimators.items():
            group = f"D: dimension by {name}, spheres of d_B {dimensions}, n={n}"
            errors = {d: [abs(ratio - 1) for ratio in found] for d, found in ratios[name].items()}
            pooled = statistics.median(error for found in errors.values() for error in found)
            note = "the error falls with n, which the paper does not state."
            records.append(record("e3", group, "median_relative_error", pooled, paper, note))
            records.append(record("e3", group, "mean_error_at_25", statistics.mean(errors[25])))
            published = 0.40 if name == "mle" else None
            records.append(record("e3", group, "shortfall_linear_25", statistics.mean(flat[name]), published))
    return records


def separation(quick: bool, generator: torch.Generator) -> list[dict]:
    """Cross-fitted and plug-in separation at d = 768 and n = 300, known to be equal or planted."""
    layers, zero_layers = (5, 10) if quick else (20, 100)  # independent draws
    crossed, plug_in = separations(0.0, zero_layers, generator)
    group = f"D: separation, true s=0, d={FEATURES}, n={SAMPLES}"
    records = [
        record("e3", group, "median_crossfitted", crossed.median(), 0.50, _AT_ZERO),
        record("e3", group, "mean_crossfitted", crossed.mean()),
        record("e3", group, "share_crossfitted_above_0.5", (crossed > 0.5).double().mean()),
        record("e3", group, "median_naive", plug_in.median(), 3.24),
    ]
    errors: dict[str, list[Tensor]] = {"crossfitted": [], "naive": []}
    for s in SEPARATIONS:
        for name, found in zip(errors, separations(s, layers, generator), strict=True):
            errors[name].append((found / s - 1).abs())
            group = f"D: separation, true s={s:g}, d={FEATURES}, n={SAMPLES}"
            records.append(record("e3", group, f"median_relative_error_{name}", errors[name][-1].median()))
    group = f"D: separation, true s>0, d={FEATURES}, n={SAMPLES}"
    for name, paper in (("crossfitted", 0.08), ("naive", 0.75)):
        pooled = torch.cat(errors[name]).median()
        records.append(record("e3", group, f"median_relative_error_{name}", pooled, paper, _SEPARATIONS))
    crossed, plug_in = separations(2.0, layers, generator, uneven=True)
    group = f"D: separation, true s=2, eigenvalues 1/j, d={FEATURES}, n={SAMPLES}"
    note = (
        "ours: with unequal eigenvalues the shrunk covariance is not the true one, and s is off by more than its noise."
    )
    records.append(record("e3", group, "median_crossfitted", crossed.median(), note=note))
    records.append(record("e3", group, "median_naive", plug_in.median()))
    for s in (2.0, 8.0):
        shift = 1 - purity_threshold(SAMPLES, 1.08 * s, power=0.5) / purity_threshold(SAMPLES, s, power=0.5)
        records.append(record("e3", f"D: s={s:g} read 8 % too large", "shift_of_alpha_star", shift, 0.01, _SHIFT))
    return records


def separations(s: float, layers: int, generator: torch.Generator, uneven: bool = False) -> tuple[Tensor, Tensor]:
    """Cross-fitted and plug-in estimates [layers] of independent draws, classes s apart in a random direction."""
    labels, groups = torch.arange(SAMPLES) % 2, torch.arange(SAMPLES) // 2
    x = torch.randn(SAMPLES, layers, FEATURES, generator=generator, dtype=torch.float64)
    direction = torch.randn(layers, FEATURES, generator=generator, dtype=torch.float64)
    x += (labels[:, None, None] - 0.5) * s * direction / direction.norm(dim=1, keepdim=True)
    if uneven:
        x *= torch.arange(1, FEATURES + 1, dtype=torch.float64).rsqrt()  # the Mahalanobis distance does not change
    seed = int(torch.randint(2**31, (), generator=generator))
    return crossfitted_separation(x, labels, groups, seed=seed), naive_separation(x, labels)


def sphere(n: int, d: int, generator: torch.Generator) -> Tensor:
    """n uniform points [n, d + 1] of the unit sphere of d dimensions."""
    x = torch.randn(n, d + 1, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=1, keepdim=True)
