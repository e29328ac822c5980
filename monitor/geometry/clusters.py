"""The detection test where a context holds several pairs: they may share what sets their members apart."""

from __future__ import annotations

import torch
from scipy import stats
from torch import Tensor

from monitor.geometry.detection import CV_INFLATION


def effective_clusters(groups: Tensor) -> float:
    """How many clusters of one size are worth as much as these.

    Parameters
    ----------
    groups : Tensor [n], integer
        Cluster of each observation.

    Returns
    -------
    float
        In [1, number of clusters]; that number where all are of one size. (Σ m_c)² / Σ m_c² with m_c observations in
        cluster c (Kish, Survey Sampling, 1965).
    """
    counts = torch.unique(groups, return_counts=True)[1].double()
    return float(counts.sum() ** 2 / counts.square().sum())


def clustered_p(auc: float, standard_error: float, clusters: float, inflation: float = CV_INFLATION) -> float:
    """One-sided p-value of an AUC above chance whose samples depend on one another within clusters.

    Parameters
    ----------
    auc : float in [0, 1]
    standard_error : float, > 0
        Of the AUC over clusters, as from `monitor.geometry.auc.auc_standard_error`.
    clusters : float, >= 1
        Effective number of clusters.
    inflation : float, default 1.4
        See `monitor.geometry.detection.detection_z`.

    Returns
    -------
    float in [0, 1]

    Notes
    -----
    P(T > (A - 1/2) / (inflation · se)) for Student's t with clusters - 1 degrees of freedom, at least one: the standard
    error is itself estimated from no more than that.
    """
    return float(stats.t.sf((auc - 0.5) / (inflation * standard_error), max(clusters - 1.0, 1.0)))


def clustered_threshold(standard_error: float, clusters: float, level: float, inflation: float = CV_INFLATION) -> float:
    """The AUC whose `clustered_p` is `level`; above 1 where no AUC is enough."""
    return 0.5 + inflation * standard_error * float(stats.t.isf(level, max(clusters - 1.0, 1.0)))
