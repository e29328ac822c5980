import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from monitor.geometry.auc import auc
from monitor.geometry.nonlinear_probes import KINDS, nonlinear_probes
from monitor.geometry.probes import grouped_folds, logistic_probes


def xor(n=240, layers=1, seed=0, signal=True):
    """Classes that only the product of two features tells apart."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, layers, 6, generator=generator)
    labels = (torch.arange(n) % 2).long()
    if signal:
        flip = torch.where((x[:, :, 0] * x[:, :, 1] > 0) == (labels[:, None] == 1), 1.0, -1.0)
        x[:, :, 0] = x[:, :, 0] * flip
        x[:, :, :2] += x[:, :, :2].sign()
    return x, labels, grouped_folds(torch.arange(n) // 2, n_seeds=2)


@pytest.mark.parametrize("kind", KINDS)
def test_finds_what_a_linear_probe_cannot_and_nothing_in_noise(kind):
    x, labels, folds = xor(n=600)  # early stopping keeps a tenth for itself
    assert float(auc(nonlinear_probes(x, labels, folds, kind), labels).mean()) > 0.85
    assert float(auc(logistic_probes(x, labels, folds), labels).mean()) < 0.65
    noise, labels, folds = xor(signal=False)
    assert 0.35 < float(auc(nonlinear_probes(noise, labels, folds, kind), labels).mean()) < 0.65


def test_svm_is_scikit_learns_in_a_plain_loop():
    x, labels, folds = xor(n=80, layers=2)
    expected = np.empty((2, 2, 80))
    for s in range(2):
        for layer in range(2):
            for f in range(5):
                out = (folds[s] == f).numpy()
                features = x[:, layer].double().numpy()
                scaler = StandardScaler().fit(features[~out])
                svm = SVC(C=1.0, gamma="scale").fit(scaler.transform(features[~out]), labels.numpy()[~out])
                expected[s, layer, out] = svm.decision_function(scaler.transform(features[out]))
    assert nonlinear_probes(x, labels, folds, "svm", n_jobs=1).numpy() == pytest.approx(expected)


def test_equal_calls_are_equal_and_global_randomness_is_left_alone():
    x, labels, folds = xor(n=60)
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    once, again = (nonlinear_probes(x, labels, folds, "mlp", n_jobs=1) for _ in range(2))
    assert torch.equal(once, again)
    assert (np.random.get_state()[1] == before).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "tree"}, "kind"),
        ({"features": torch.zeros(60, 6)}, "features"),
        ({"features": torch.full((60, 1, 6), torch.nan)}, "finite"),
        ({"labels": torch.zeros(59)}, "labels"),
        ({"labels": torch.full((60,), 2)}, "0 and 1"),
        ({"folds": torch.zeros(60)}, "folds"),
    ],
)
def test_bad_input(change, message):
    x, labels, folds = xor(n=60)
    with pytest.raises(ValueError, match=message):
        nonlinear_probes(**({"features": x, "labels": labels, "folds": folds, "kind": "svm"} | change))
