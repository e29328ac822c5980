"""E2's phase diagram: how often a probe is detected, by purity and sample size (arXiv 2609.22337, section VI-E).

A cell averages over dimensions and draws: once separations are large the threshold alpha*(n) does not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from monitor.geometry.detection import CV_INFLATION, purity_threshold
from monitor.geometry.purity import auc_max
from recipes.studies.features import GridStates
from recipes.studies.protocol import mixture_aucs, p_value
from recipes.studies.record import record

LEVEL = 0.05
TESTS = {"": 1.0, "_calibrated": CV_INFLATION}  # suffix: inflation of sigma_0
_CELL = (
    "phase diagram: {tests} data sets, {draws} draws of each dimension, one split each. `detection_rate` is against "
    "sigma_0 as in the paper's figure, `detection_rate_calibrated` against {inflation:g} sigma_0."
)
_THRESHOLD = (
    "alpha_star: the threshold of a probe that knows the direction, at power 1/2 and the median s_hat. Paper: on "
    "synthetic data the half-power purity is 2 to 2.5 times as high."
)


@dataclass(frozen=True)
class Plane:
    """Purities (increasing), sample sizes, and draws of each dimension a cell."""

    purities: tuple[float, ...]
    sizes: tuple[int, ...]
    draws: int


def half_power(purities: Sequence[float], rates: Sequence[float]) -> float | None:
    """Purity at which the rate, coming down from high purities, first falls to 1/2; None where it does not.

    Between cells linear in the logarithm of the purity.
    """
    for i in range(len(purities) - 1, 0, -1):
        (low, high), (rate, above) = purities[i - 1 : i + 1], rates[i - 1 : i + 1]
        if rate < 0.5 <= above:
            return low * (high / low) ** ((0.5 - rate) / (above - rate))
    return None


def detection_rates(
    group: str, grids: dict[str, GridStates], separation: float, plane: Plane, seed: int, progress: tqdm
) -> list[dict]:
    """Rates of every cell, and their half-power purities beside alpha*(n)."""
    records = []
    about = _CELL.format(tests=plane.draws * len(grids), draws=plane.draws, inflation=CV_INFLATION)
    for n in plane.sizes:
        realised: list[float] = []
        rates: dict[str, list[float]] = {suffix: [] for suffix in TESTS}
        for purity in plane.purities:
            # The same seed takes the same contexts from every dimension: other seeds, for draws that are not copies.
            found = [
                mixture_aucs(grid, n, purity, seed + plane.draws * i + k, 1)
                for i, grid in enumerate(grids.values())
                for k in range(plane.draws)
            ]
            realised.append(found[0][1].purity)
            at = f"{group}, n={n}, purity {purity:g}"
            note = about + ("" if realised[-1] > 0 else " No pair fits in here: a rate of false alarms.")
            for suffix, inflation in TESTS.items():
                detected = [p_value(aucs, mixture.labels, inflation) <= LEVEL for aucs, mixture in found]
                rates[suffix].append(float(np.mean(detected)))
                records.append(record("e2", at, f"detection_rate{suffix}", rates[suffix][-1], note=note))
            records.append(record("e2", at, "auc_draws", np.mean([float(aucs.mean()) for aucs, _ in found])))
            records.append(record("e2", at, "predicted_auc", auc_max(separation, realised[-1])))
            progress.update()
        marked = [i for i, purity in enumerate(realised) if purity > 0]
        for suffix, inflation in TESTS.items():
            contour = half_power([realised[i] for i in marked], [rates[suffix][i] for i in marked])
            threshold = purity_threshold(n, separation, level=LEVEL, power=0.5, inflation=inflation)
            records += _frontier(f"{group}, n={n}", suffix, contour, threshold)
    return records


def _frontier(group: str, suffix: str, contour: float | None, threshold: float) -> list[dict]:
    reached = threshold if math.isfinite(threshold) else None
    nowhere = "" if contour is not None else "the rate crosses 1/2 nowhere in the plane."
    records = [
        record("e2", group, f"half_power_purity{suffix}", contour, note=nowhere),
        record("e2", group, f"alpha_star{suffix}", reached, note=_THRESHOLD),
    ]
    if contour is not None and reached is not None:
        records.append(record("e2", group, f"half_power_over_alpha_star{suffix}", contour / reached))
    return records
