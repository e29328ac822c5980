from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from monitor.geometry.auc import auc
from monitor.geometry.nonlinear_probes import nonlinear_probes
from monitor.geometry.probes import grouped_folds, logistic_probes


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grid(n):
    return torch.arange(n) % 2, torch.arange(n) // 2


def exclusive_or(n, d=6):
    """Labels are the exclusive or of two features' signs: no direction tells them apart, each quadrant does."""
    x = draw(n, d)
    x[:, :2] += x[:, :2].sign()
    return x, (x[:, 0] * x[:, 1] > 0).long()


def plain_loop(x, labels, folds, make):
    x, y, folds = x.numpy(), labels.numpy(), folds.numpy()
    scores = np.zeros((len(folds), x.shape[1], len(y)))
    for s, fold in enumerate(folds):
        for layer in range(x.shape[1]):
            for k in range(fold.max() + 1):
                probe = make_pipeline(StandardScaler(), make()).fit(x[fold != k, layer], y[fold != k])
                held_out = x[fold == k, layer]
                scores[s, layer, fold == k] = (
                    probe.predict_proba(held_out)[:, 1] if isinstance(probe[-1], MLPClassifier)
                    else probe.decision_function(held_out)
                )  # fmt: skip
    return torch.from_numpy(scores)


PLAIN = {
    "svm": lambda: SVC(C=1.0, kernel="rbf", gamma="scale"),
    "mlp": lambda: MLPClassifier(
        hidden_layer_sizes=(64,), activation="relu", solver="adam", early_stopping=True, random_state=0
    ),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_equals_a_plain_loop(kind):
    labels, groups = grid(90)
    x = 5 * draw(90, 2, 7) * 10 ** draw(7, seed=1) + 3
    x[:, 0] += labels[:, None]
    folds = grouped_folds(groups, n_folds=3, n_seeds=2)
    scores = nonlinear_probes(x, labels, folds, kind)
    assert scores.dtype == torch.float64 and scores.shape == (2, 2, 90)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.allclose(scores, plain_loop(x, labels, folds, PLAIN[kind]), rtol=0, atol=1e-10)
    alone = nonlinear_probes(x[:, 1].float(), labels, folds, kind)
    assert alone.shape == (2, 90) and torch.allclose(alone, scores[:, 1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", PLAIN)
def test_sees_what_no_direction_shows(kind):
    x, labels = exclusive_or(800)
    folds = grouped_folds(torch.arange(800), n_seeds=1)
    assert float(auc(nonlinear_probes(x, labels, folds, kind), labels)) > 0.9
    assert float(auc(logistic_probes(x, labels, folds), labels)) < 0.6


@pytest.mark.parametrize("kind", PLAIN)
def test_noise_is_at_chance(kind):
    labels, groups = grid(300)
    areas = auc(nonlinear_probes(draw(300, 3, 20), labels, grouped_folds(groups, n_seeds=1), kind), labels)
    assert float((areas - 0.5).abs().max()) < 0.13  # three standard deviations of a cross-validated null


def test_jobs_and_global_generators_change_nothing():
    labels, groups = grid(60)
    x, folds = draw(60, 4), grouped_folds(groups, n_folds=3, n_seeds=1)
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        for n_jobs in (1, 2):
            scores = nonlinear_probes(x, labels, folds, "mlp", n_jobs=n_jobs)
            assert torch.equal(scores, nonlinear_probes(x, labels, folds, "mlp"))
        assert torch.equal(before[0], torch.get_rng_state())
        assert np.array_equal(before[1], np.random.get_state()[1])
    assert not torch.equal(scores, nonlinear_probes(x, labels, folds, "mlp", seed=1))


def test_only_the_warning_of_unfinished_networks_is_silenced():
    labels, groups = grid(60)
    folds = grouped_folds(groups, n_folds=3, n_seeds=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nonlinear_probes(draw(60, 4), labels, folds, "mlp")
    assert not caught


def test_bad_input_is_named():
    labels, groups = grid(40)
    x, folds = draw(40, 5), grouped_folds(groups)
    for bad, message in (
        ((x, labels, folds, "tree"), "kind"),
        ((x.long(), labels, folds, "svm"), "features"),
        ((torch.where(x > 2, torch.nan, x), labels, folds, "svm"), "finite"),
        ((x, labels + 1, folds, "svm"), "labels"),
        ((x, torch.ones_like(labels), folds, "mlp"), "both classes"),
        ((x, labels, folds[0], "svm"), "folds"),
    ):
        with pytest.raises(ValueError, match=message):
            nonlinear_probes(*bad)
