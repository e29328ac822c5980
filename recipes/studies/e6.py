"""E6: the gap between training and test AUC against the number of samples (arXiv 2609.22337, section VI-H, table VII).

Theorem 1's n^-1/2 is an envelope for probes of a fixed norm. How fast the gap of a fitted probe closes depends on how
many samples there are for each direction the probe can use: on the penalty, and on the spectrum of the features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from monitor.geometry.auc import auc
from monitor.geometry.bounds import generalization_bound
from monitor.geometry.probes import LinearProbe, fit_probe
from recipes.studies.record import record

TITLE = "the gap between training and test AUC against the number of samples"

SEPARATION, PURITY = 10.0, 0.3
SIZES = (50, 100, 200, 400, 800)
PENALTIES = ("C=1", "C=0.01", "fixed norm")
_PAPER = {"C=1": -0.09, "C=0.01": -0.33}  # about; and the middle of -0.29 to -0.37
_BISECTIONS = 12


@dataclass(frozen=True)
class Features:
    """Gaussian features: root [d, d] maps white noise to them, delta [d] is the difference of the marked centres."""

    root: Tensor
    delta: Tensor

    def draw(self, n: int, repeats: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Samples [n, repeats, d] at the study's purity and their labels [n]; the same labels in every repeat."""
        labels = torch.arange(n) % 2
        marked = torch.arange(n) < 2 * round(PURITY * n / 2)
        x = torch.randn(n, repeats, len(self.delta), generator=generator) @ self.root.T
        return x + (marked * (labels - 0.5))[:, None, None] * self.delta, labels


def power_law(dimension: int, exponent: float, generator: torch.Generator) -> Features:
    """Covariance with the eigenvalues j^-exponent in random directions; centres s apart in a random whitened one."""
    root = torch.arange(1, dimension + 1, dtype=torch.float64) ** (-exponent / 2)
    root = root / root.square().mean().sqrt()
    axes = torch.linalg.qr(torch.randn(dimension, dimension, generator=generator, dtype=torch.float64))[0]
    white = torch.randn(dimension, generator=generator, dtype=torch.float64)
    root = axes * root
    return Features(root.float(), (root @ (SEPARATION * white / white.norm())).float())


def run(quick: bool = False, seed: int = 42) -> list[dict]:
    """Slope of the logarithm of the gap against that of n, by spectrum and penalty.

    Parameters
    ----------
    quick : bool
        Fewer dimensions and samples, two spectra, 2 repeats instead of 8.
    seed : int

    Returns
    -------
    records : list of dict
    """
    sizes, repeats, n_test = (SIZES[:4], 2, 1_000) if quick else (SIZES, 8, 4_000)
    spectra = ((16, 0.0), (512, 0.0)) if quick else ((64, 0.0), (768, 0.0), (768, 1.0), (768, 1.5), (768, 2.0))
    records = []
    with tqdm(total=len(spectra) * len(PENALTIES) * len(sizes), desc="E6", unit="size", disable=None) as progress:
        for dimension, exponent in spectra:
            generator = torch.Generator().manual_seed(seed)
            features = power_law(dimension, exponent, generator)
            test = features.draw(n_test, repeats, generator)
            train = {n: features.draw(n, repeats, generator) for n in sizes}
            norm = float(_norms(fit_probe(*train[sizes[0]], C=0.01), train[sizes[0]][0]).mean())
            for penalty in PENALTIES:
                spectrum = f"eigenvalues j^-{exponent:g}" if exponent else "isotropic"
                group = f"d={dimension}, {spectrum}, {penalty}"
                gaps, trained = [], []
                for n in sizes:
                    C = c_of_norm(*train[n], norm) if penalty == "fixed norm" else float(penalty.removeprefix("C="))
                    probe = fit_probe(*train[n], C=C)
                    gap, on_train = auc_gap(probe, train[n], test)
                    gaps.append(gap)
                    trained.append(on_train)
                    progress.update()
                records += _summary(group, sizes, gaps, trained, _PAPER.get(penalty))
            records += _envelope(group, probe, train[sizes[-1]], test, norm)
    return records


def auc_gap(probe: LinearProbe, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """Training less test AUC, and the training AUC; means over repeats."""
    on_train, on_test = (float(auc(probe.score(x), labels).mean()) for x, labels in (train, test))
    return on_train - on_test, on_train


def slope(sizes: tuple[int, ...], gaps: list[float]) -> tuple[float, float]:
    """Least-squares slope of log gap against log n, and its R^2."""
    x, y = np.log(sizes), np.log(gaps)
    coefficient = float(np.polyfit(x, y, 1)[0])
    return coefficient, float(np.corrcoef(x, y)[0, 1] ** 2)


def c_of_norm(features: Tensor, labels: Tensor, norm: float) -> float:
    """The C at which probes have this norm in the mean over repeats; the norm increases with C."""
    low, high = 1e-7, 1.0
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        reached = float(_norms(fit_probe(features, labels, C=middle), features).mean()) >= norm
        low, high = (low, middle) if reached else (middle, high)
    return high


def _norms(probe: LinearProbe, features: Tensor) -> Tensor:
    """Norm of the weights [repeats] on standardised features: what the penalty is on."""
    return (probe.weight * features.double().std(0, correction=0)).norm(dim=-1)


def _summary(
    group: str, sizes: tuple[int, ...], gaps: list[float], trained: list[float], paper: float | None
) -> list[dict]:
    coefficient, r_squared = slope(sizes, gaps)
    note = (
        f"n = {', '.join(map(str, sizes))}; s = {SEPARATION:g}, purity {PURITY:g}. Paper: on features of six models, "
        "-0.06 to -0.12 at C=1 and -0.29 to -0.37 at C=0.01; beside ours the value it calls typical, and the middle."
    )
    return [
        record("e6", group, "slope", coefficient, paper, note),
        record("e6", group, "slope_r2", r_squared),
        record("e6", group, f"gap_n{sizes[0]}", gaps[0]),
        record("e6", group, f"gap_n{sizes[-1]}", gaps[-1]),
        record("e6", group, f"train_auc_n{sizes[-1]}", trained[-1]),
    ]


def _envelope(
    group: str, probe: LinearProbe, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], norm: float
) -> list[dict]:
    """Error rate of the probes of fixed norm beside Theorem 1's bound, at the largest n."""
    x, labels = train
    sign = 2.0 * labels - 1.0
    ramp = (1 - sign * probe.score(x)).clamp(0, 1).mean()
    standardised = (x.double() - x.double().mean(0)) / x.double().std(0, correction=0)
    bound = generalization_bound(float(ramp), norm, float(standardised.norm(dim=-1).max()), len(x))
    wrong = (probe.score(test[0]) > 0) != (test[1] > 0)
    note = f"Theorem 1 at n={len(x)}, with the probe's norm {norm:.3g} and the features' radius as they are."
    return [
        record("e6", group, "error_rate", wrong.double().mean()),
        record("e6", group, "error_bound", bound, note=note),
    ]
