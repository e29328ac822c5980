from __future__ import annotations

import pytest
import torch
from scipy import stats

from monitor.geometry.auc import auc, auc_interval, auc_standard_error
from monitor.geometry.clusters import clustered_p, clustered_threshold, effective_clusters
from monitor.geometry.detection import detection_p


def test_effective_clusters():
    assert effective_clusters(torch.arange(12)) == 12
    assert effective_clusters(torch.arange(12) // 3) == 4
    lopsided = torch.tensor([0] * 40 + list(range(1, 11)))
    assert effective_clusters(lopsided) == pytest.approx(50**2 / (40**2 + 10))


def test_threshold_is_where_the_p_value_is_the_level():
    for clusters in (1.2, 8.0, 300.0):
        assert clustered_p(clustered_threshold(0.05, clusters, 0.03), 0.05, clusters) == pytest.approx(0.03)


def test_many_independent_clusters_are_the_usual_test():
    assert clustered_p(0.6, 0.0335, 1e6) == pytest.approx(float(stats.norm.sf(0.1 / (1.4 * 0.0335))), rel=1e-4)
    scores = torch.randn(200, 400, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(400) % 2
    errors = auc_standard_error(scores, labels)
    # Of samples without a signal it is sigma_0, but for what it is estimated by.
    usual = [detection_p(float(area), 200, 200) for area in auc(scores, labels)]
    ours = [
        clustered_p(float(area), float(error), 400) for area, error in zip(auc(scores, labels), errors, strict=True)
    ]
    assert max(abs(a - b) for a, b in zip(usual, ours, strict=True)) < 0.02


def test_standard_error_is_that_of_the_interval():
    generator = torch.Generator().manual_seed(1)
    labels, groups = torch.arange(60) % 2, torch.arange(60) // 4
    scores = torch.randn(3, 60, generator=generator) + labels
    low, high = auc_interval(scores, labels, groups)
    area, error = auc(scores, labels), auc_standard_error(scores, labels, groups)
    reach = stats.norm.isf(0.025) * error / (area * (1 - area))
    assert torch.allclose(torch.logit(high) - torch.logit(area), reach)
    assert float(auc_standard_error(labels.double(), labels)) == 0.0
