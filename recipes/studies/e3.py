"""E3: laws, thresholds and estimators on data whose truth is known (arXiv 2609.22337, section VI-A, table VI).

A: the purity law on Gaussian mixtures. B: the chordal formula on spheres. C: the purity from which a learned probe
detects. D: the estimators of curvature, dimension and separation.
"""

from __future__ import annotations

import numpy as np
import torch

from recipes.studies import e3_contour, e3_estimators, e3_laws

TITLE = "laws, thresholds and estimators on synthetic data of known truth"


def run(quick: bool = False, seed: int = 42) -> list[dict]:
    """Parts A to D, each with its own generator.

    Parameters
    ----------
    quick : bool
        A part of the settings on a tenth of the samples.
    seed : int

    Returns
    -------
    records : list of dict
    """
    records = e3_laws.purity_law(quick, np.random.default_rng([seed, 0]))
    records += e3_laws.chordal_formula(quick, np.random.default_rng([seed, 1]))
    records += e3_contour.power_contour(quick, torch.Generator().manual_seed(seed))
    for part in (e3_estimators.curvature, e3_estimators.dimension, e3_estimators.separation):
        records += part(quick, torch.Generator().manual_seed(seed))
    return records
