"""The probe engine against scikit-learn's optimum, and against the condition of optimality itself."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.preprocessing import StandardScaler

from monitor.geometry.auc import auc
from monitor.geometry.probes import fit_probe, grouped_folds, logistic_probes, random_folds


def data(kind, pairs=50, d=40, layers=1, seed=0):
    """Pairs over cells with an uneven spectrum; labels apart everywhere, in a third of the pairs, or nowhere."""
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.arange(1, d + 1) ** -0.7
    rotation = torch.linalg.qr(torch.randn(d, d, generator=generator))[0]
    labels = torch.cat([torch.ones(pairs), torch.zeros(pairs)]).long()
    marked = {
        "separable": torch.ones(pairs),
        "mixed": torch.rand(pairs, generator=generator) < 0.3,
        "noise": torch.zeros(pairs),
    }
    x = []
    for _ in range(layers):
        context = torch.randn(pairs, d, generator=generator).repeat(2, 1)
        own = 0.4 * torch.randn(2 * pairs, d, generator=generator)
        sign = (labels[:, None] - 0.5) * marked[kind].float().repeat(2)[:, None]
        x.append(((context + own + 1.5 * sign) * spectrum) @ rotation)
    return torch.stack(x, dim=1), labels, torch.arange(pairs).repeat(2)


def optimum(x, labels, folds, C=1.0):
    """scikit-learn's in a plain loop, at a tolerance that reaches its optimum."""
    x, labels = x.double().numpy(), labels.numpy()
    scores = np.empty(folds.shape)
    for s, assigned in enumerate(folds.numpy()):
        for f in range(assigned.max() + 1):
            out = assigned == f
            scaler = StandardScaler().fit(x[~out])
            model = LogisticRegression(C=C, tol=1e-12, max_iter=100_000).fit(scaler.transform(x[~out]), labels[~out])
            scores[s, out] = model.decision_function(scaler.transform(x[out]))
    return torch.from_numpy(scores)


def assert_optimal(x, labels, folds, C=1.0, score=0.02):
    found, expected = logistic_probes(x, labels, folds, C=C), optimum(x, labels, folds, C)
    scale = expected.std().clamp_min(1.0)
    assert float((found - expected).abs().max() / scale) < score
    assert torch.allclose(auc(found, labels), auc(expected, labels), atol=1e-3)


@pytest.mark.parametrize("kind", ["separable", "mixed", "noise"])
@pytest.mark.parametrize(("pairs", "d"), [(30, 100), (40, 64), (50, 30), (100, 12), (40, 1)])
def test_scores_are_those_of_scikit_learns_optimum(kind, pairs, d):
    x, labels, cells = data(kind, pairs, d)
    assert_optimal(x[:, 0], labels, grouped_folds(cells, n_seeds=2))


@pytest.mark.parametrize("C", [0.01, 100.0])
@pytest.mark.parametrize("d", [12, 60])
def test_penalties_other_than_one(C, d):
    x, labels, cells = data("mixed", 40, d)
    assert_optimal(x[:, 0], labels, grouped_folds(cells, n_seeds=1), C=C)


def outliers(x):
    x[3] *= 60  # one sample that sets every standard deviation of the folds it is in
    return x


def scales(x):
    return x * torch.logspace(-6, 6, x.shape[1])


def constants(x):
    x[:, 0], x[:, 1] = 7.0, 0.0
    return x


def constant_in_training(x):
    x[:, 0] = 0.0
    x[5, 0] = 3.0  # varies only where sample 5 is held out
    return x


@pytest.mark.parametrize(
    "change", [outliers, scales, constants, constant_in_training, lambda x: x + 300, lambda x: x * 1e-4]
)
@pytest.mark.parametrize("d", [10, 60])
def test_awkward_features(change, d):
    x, labels, cells = data("mixed", 40, d)
    assert_optimal(change(x[:, 0].double()), labels, grouped_folds(cells, n_seeds=1))


def test_unbalanced_classes_and_duplicate_rows():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 30, generator=generator)
    labels = (torch.arange(120) % 10 == 0).long()
    x[labels == 1, 0] += 1.5
    x[60:70] = x[50:60]
    assert_optimal(x, labels, random_folds(120, n_seeds=2))


def test_layers_together_are_layers_alone_in_any_dtype():
    x, labels, cells = data("mixed", 40, 50, layers=4)
    folds = grouped_folds(cells)
    together = logistic_probes(x, labels, folds)
    for layer in range(4):
        assert torch.allclose(together[:, layer], logistic_probes(x[:, layer], labels, folds), atol=5e-3)
    rounded = x.bfloat16()
    assert torch.equal(logistic_probes(rounded, labels, folds), logistic_probes(rounded.double(), labels, folds))


@pytest.mark.parametrize("d", [12, 90])
def test_order_of_rows_does_not_matter_and_exchanged_labels_turn_the_scores(d):
    x, labels, cells = data("mixed", 40, d)
    folds = grouped_folds(cells, n_seeds=2)
    scores = logistic_probes(x, labels, folds)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(logistic_probes(x[order], labels[order], folds[:, order]), scores[..., order], atol=2e-2)
    assert torch.allclose(logistic_probes(x, 1 - labels, folds), -scores, atol=2e-2)


@pytest.mark.parametrize("d", [8, 70])
def test_fitted_probe_is_at_the_optimum_on_raw_features(d):
    x, labels, _ = data("mixed", 40, d, layers=2)
    x = x * 5 + 3
    probe = fit_probe(x, labels)
    for layer in range(2):
        features = x[:, layer].double()
        std = features.std(0, unbiased=False)
        scores = probe.score(x)[layer]
        assert torch.allclose(scores, features @ probe.weight[layer] + probe.bias[layer])
        # The gradient in the weights of standardised features, and in the intercept, is zero.
        residual = labels - torch.sigmoid(scores)
        z = (features - features.mean(0)) / std
        assert float((z.T @ residual - probe.weight[layer] * std).abs().max()) < 0.05
        assert abs(float(residual.sum())) < 0.02
        reference = LogisticRegression(tol=1e-12, max_iter=100_000).fit(z.numpy(), labels.numpy())
        assert scores.numpy() == pytest.approx(reference.decision_function(z.numpy()), abs=0.05)


def test_grouped_folds_are_scikit_learns_and_keep_groups_whole():
    cells = torch.arange(30).repeat(3)
    folds = grouped_folds(cells, n_folds=4, n_seeds=3, seed=7)
    for k in range(3):
        for f, (_, test) in enumerate(GroupKFold(4, shuffle=True, random_state=7 + k).split(cells, groups=cells)):
            assert (folds[k] == f).nonzero()[:, 0].tolist() == sorted(test.tolist())
        assert all(len(folds[k][cells == c].unique()) == 1 for c in range(30))
    assert not torch.equal(folds[0], folds[1])


def test_equal_calls_are_equal_and_global_randomness_is_left_alone():
    x, labels, cells = data("mixed", 30, 50)
    torch.manual_seed(0), np.random.seed(0)
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()
    folds = grouped_folds(cells)
    assert torch.equal(logistic_probes(x, labels, folds), logistic_probes(x, labels, folds))
    assert torch.equal(torch.get_rng_state(), before) and (np.random.get_state()[1] == numpy_before).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": torch.zeros(20)}, "features"),
        ({"features": torch.zeros(20, 3, dtype=torch.long)}, "floating"),
        ({"features": torch.full((20, 3), torch.inf)}, "finite"),
        ({"labels": torch.zeros(19)}, "labels"),
        ({"labels": torch.arange(20)}, "0 and 1"),
        ({"labels": torch.zeros(20)}, "both classes"),
        ({"folds": torch.zeros(2, 19, dtype=torch.long)}, "folds"),
        ({"C": 0.0}, "C"),
    ],
)
def test_bad_input(change, message):
    arguments = {"features": torch.rand(20, 3), "labels": torch.arange(20) % 2, "folds": random_folds(20, n_seeds=2)}
    with pytest.raises(ValueError, match=message):
        logistic_probes(**(arguments | change))


def test_fewer_groups_than_folds():
    with pytest.raises(ValueError, match="3 groups for 5 folds"):
        grouped_folds(torch.arange(3).repeat(4))
    with pytest.raises(ValueError, match="n_folds"):
        random_folds(4)
