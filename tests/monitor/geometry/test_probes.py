from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from monitor.geometry import probes as module
from monitor.geometry.auc import auc
from monitor.geometry.probes import fit_probe, grouped_folds, logistic_probes, random_folds

CELLS = 60


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def grid(cells=CELLS):
    """Labels and groups of pairs: the positive members, then the negative ones; a cell holds both of a pair."""
    return torch.cat([torch.ones(cells), torch.zeros(cells)]).long(), torch.arange(cells).repeat(2)


def states(d, signal=1.0, marked=1.0, cells=CELLS, seed=0):
    """Pairs [2 cells, d] on the shared contexts of their cells; a share of them carries the signal, in all features."""
    shared, noise = draw(cells, d, seed=seed).repeat(2, 1), draw(2 * cells, d, seed=seed + 1)
    side = 2 * grid(cells)[0][:, None] - 1
    carries = (torch.arange(cells) < marked * cells).repeat(2)[:, None]
    return shared + 0.5 * noise + 0.5 * signal * side * carries * draw(d, seed=seed + 2).sign()


def published(x, labels, folds, C=1.0):
    """The protocol as a loop over scikit-learn, to its optimum: out-of-fold scores [S, n] of features [n, d]."""
    x, y, folds = x.double().numpy(), labels.numpy(), folds.numpy()
    scores = np.zeros(folds.shape)
    for row, fold in zip(scores, folds, strict=True):
        for k in range(fold.max() + 1):
            probe = make_pipeline(
                StandardScaler(), LogisticRegression(C=C, solver="newton-cholesky", tol=1e-12, max_iter=10_000)
            )
            row[fold == k] = probe.fit(x[fold != k], y[fold != k]).decision_function(x[fold == k])
    return torch.from_numpy(scores)


def assert_equals_published(x, labels, groups, C=1.0, n_seeds=2):
    folds = grouped_folds(groups, n_seeds=n_seeds)
    found, expected = logistic_probes(x, labels, folds, C=C), published(x, labels, folds, C)
    assert found.dtype == torch.float64 and found.shape == folds.shape
    assert float((found - expected).abs().max()) < 5e-3 * float(expected.abs().max())
    assert float((auc(found, labels) - auc(expected, labels)).abs().max()) < 1e-3


# --- the optimum ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 3, 24, 40, 96, 120, 300], ids=lambda d: f"d={d}")
@pytest.mark.parametrize("marked", [1.0, 0.3, 0.0], ids=["separable", "mixed", "noise"])
def test_equals_scikit_learn(d, marked):
    labels, groups = grid()
    assert_equals_published(states(d, marked=marked), labels, groups)


@pytest.mark.parametrize("C", [0.01, 100.0])
@pytest.mark.parametrize("d", [8, 40, 200])
@pytest.mark.parametrize("marked", [1.0, 0.3], ids=["separable", "mixed"])
def test_equals_scikit_learn_at_other_penalties(C, d, marked):
    labels, groups = grid()
    assert_equals_published(states(d, marked=marked), labels, groups, C=C)


def correlated(d):
    """Nearly one direction: condition number of the covariance about 1e8."""
    x = states(d, marked=0.3)
    return x @ torch.linalg.qr(draw(d, d, seed=5))[0] * 10 ** torch.linspace(0, -4, d) @ draw(d, d, seed=6)


def scales(d):
    return states(d, marked=0.3) * 10 ** torch.linspace(-6, 6, d)


def massive(d):
    """A dimension that is huge in two texts, as massive activations are, and one that is huge in all."""
    x = states(d, marked=0.3)
    x[[3, CELLS + 3], 0] += 3e3
    x[:, 1] = 1e4 + 10 * x[:, 1]
    return x


def outlier(d):
    """One sample that sets the standard deviations of every fold that it trains."""
    x = states(d, marked=0.3)
    x[3] *= 100
    return x


def constant(d):
    x = states(d, marked=0.3)
    x[:, 0], x[:, 2] = 3.7, 0.0
    return x


def constant_in_training(d):
    """A feature that varies in one cell only: constant wherever that cell is held out."""
    x = states(d, marked=0.3)
    x[:, 1] = 2.5
    x[[7, CELLS + 7], 1] = torch.tensor([8.0, -3.0], dtype=x.dtype)
    return x


def offsets(d):
    return states(d, marked=0.3) + 1e6 * draw(d, seed=3)


def duplicates(d):
    x = states(d, marked=0.3)
    x[: CELLS // 2] = x[CELLS // 2 : CELLS]
    x[CELLS : CELLS + CELLS // 2] = x[CELLS + CELLS // 2 :]
    return x


def heavy_tails(d):
    return states(d, marked=0.3).pow(5)


def low_rank(d):
    return states(4, marked=0.3) @ draw(4, d, seed=3)


HARD = [
    correlated,
    scales,
    massive,
    outlier,
    constant,
    constant_in_training,
    offsets,
    duplicates,
    heavy_tails,
    low_rank,
]


@pytest.mark.parametrize("d", [10, 60, 200])
@pytest.mark.parametrize("features", HARD, ids=lambda f: f.__name__)
def test_equals_scikit_learn_on_hard_features(features, d):
    labels, groups = grid()
    assert_equals_published(features(d), labels, groups)


def test_a_feature_beyond_every_scale_in_one_fold_is_fitted_alone():
    labels, groups = grid()
    x = states(40, marked=0.3)
    x[5, 0] += 1e9
    assert_equals_published(x, labels, groups)


@pytest.mark.parametrize("d", [10, 100])
def test_equals_scikit_learn_with_unbalanced_classes(d):
    x = states(d)
    labels = (torch.arange(2 * CELLS) % 10 == 0).long()
    assert_equals_published(x + 0.3 * labels[:, None], labels, torch.arange(2 * CELLS) // 2)


@pytest.mark.parametrize("d", [10, 100])
def test_equals_scikit_learn_with_uneven_groups(d):
    labels, _ = grid()
    sizes = np.random.default_rng(0).zipf(1.7, 40).clip(max=25)
    groups = torch.from_numpy(np.repeat(np.arange(40), sizes))[torch.randperm(int(sizes.sum()))[: 2 * CELLS]]
    n = len(groups)
    assert_equals_published(states(d, marked=0.3)[:n], labels[torch.arange(n) * 7 % n], groups)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_features_of_other_dtypes_are_taken_as_they_are(dtype):
    labels, groups = grid()
    assert_equals_published(states(80, marked=0.3).to(dtype), labels, groups)


@pytest.mark.parametrize(("C", "d"), [(1.0, 12), (1.0, 90), (0.1, 300), (30.0, 90)])
def test_gradient_vanishes(C, d):
    """No solver to compare with: with c = C (y - p), the optimum has w = Z'c and sum c = 0."""
    labels, _ = grid()
    x = states(d, marked=0.3)[:, None]
    probe = fit_probe(x, labels, C=C)
    std = x[:, 0].std(0, unbiased=False)
    c = C * (labels - torch.sigmoid(probe.score(x)[0]))
    weight = probe.weight[0] * std
    gradient = weight - ((x[:, 0] - x[:, 0].mean(0)) / std).T @ c
    # The Hessian is at least the identity: the gradient's length bounds the error of the weights.
    assert float(gradient.norm()) < 2e-2 * float(weight.norm())
    assert abs(float(c.sum())) < 1e-2 * float(c.abs().sum())


# --- what must hold without a reference -------------------------------------------------------------------------------


def test_layers_are_independent(monkeypatch):
    labels, groups = grid()
    folds = grouped_folds(groups)
    x = torch.stack([features(70) for features in HARD] + [states(70), states(70, marked=0.0)], dim=1)
    together = logistic_probes(x, labels, folds)
    assert together.shape == (5, x.shape[1], len(labels))
    monkeypatch.setitem(module._CHUNK, "cpu", 1 << 30)  # all in one chunk
    for scores in (
        logistic_probes(x, labels, folds),
        torch.stack([logistic_probes(f, labels, folds) for f in x.unbind(1)], 1),
    ):
        assert float(((together - scores).abs().amax((0, 2)) / scores.abs().amax((0, 2))).max()) < 5e-3


def test_order_of_rows_does_not_matter():
    labels, groups = grid()
    x, folds = states(90, marked=0.3), grouped_folds(groups)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    permuted = logistic_probes(x[order], labels[order], folds[:, order])
    scores = logistic_probes(x, labels, folds)
    assert float((permuted - scores[:, order]).abs().max()) < 5e-3 * float(scores.abs().max())


@pytest.mark.parametrize("d", [12, 90])
def test_exchanged_labels_turn_the_sign(d):
    labels, groups = grid()
    x, folds = states(d, marked=0.3), grouped_folds(groups)
    scores = logistic_probes(x, labels, folds)
    turned = logistic_probes(x, 1 - labels, folds)
    assert float((turned + scores).abs().max()) < 5e-3 * float(scores.abs().max())


def test_units_and_origin_of_a_feature_do_not_matter():
    labels, groups = grid()
    x, folds = states(90, marked=0.3), grouped_folds(groups)
    scores = logistic_probes(x, labels, folds)
    other = logistic_probes(x * 10 ** draw(90, seed=8) + draw(90, seed=9), labels, folds)
    assert float((other - scores).abs().max()) < 5e-3 * float(scores.abs().max())


def test_runs_are_equal_and_leave_the_generators_alone():
    labels, groups = grid()
    torch.manual_seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first, second = (
        logistic_probes(states(90, marked=0.3), labels, grouped_folds(groups)) for _ in range(2)
    )  # fmt: skip
    assert torch.equal(first, second)
    assert torch.equal(before[0], torch.get_rng_state()) and np.array_equal(before[1], np.random.get_state()[1])


def test_held_out_rows_do_not_train():
    labels, groups = grid()
    x, folds = states(90, marked=0.3), grouped_folds(groups, n_seeds=1)
    labels_of_one = labels.clone()
    labels_of_one[folds[0] == 2] = 1 - labels[folds[0] == 2]
    scores, other = logistic_probes(x, labels, folds), logistic_probes(x, labels_of_one, folds)
    held_out = folds[0] == 2
    largest = float(scores.abs().max())
    assert float((scores - other)[:, held_out].abs().max()) < 5e-3 * largest
    assert float((scores - other)[:, ~held_out].abs().max()) > 0.1 * largest  # and everything else has changed


def test_signal_is_found_and_noise_is_not():
    labels, groups = grid(150)
    folds = grouped_folds(groups)
    found = [
        float(auc(logistic_probes(states(60, marked=m, cells=150), labels, folds), labels).mean()) for m in (1, 0.3, 0)
    ]
    assert found[0] > 0.999 and 0.56 < found[1] < 0.95 and abs(found[2] - 0.5) < 0.1


# --- one probe on all samples -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [3, 25, 60, 300])
@pytest.mark.parametrize("C", [1.0, 0.05])
def test_fit_probe_equals_scikit_learn_on_raw_features(d, C):
    labels, _ = grid()
    x = torch.stack([states(d, marked=m, seed=s) * 3 + 40 for s, m in enumerate((1.0, 0.3))], dim=1)
    new = states(d, seed=9, cells=20)[:, None].expand(-1, 2, -1) + 40
    probe = fit_probe(x, labels, C=C)
    scores = probe.score(new)
    assert probe.weight.shape == (2, d) and probe.bias.shape == (2,) and scores.shape == (2, 40)
    for layer in range(2):
        scaler = StandardScaler().fit(x[:, layer].numpy())
        expected = LogisticRegression(C=C, solver="newton-cholesky", tol=1e-12, max_iter=10_000)
        expected.fit(scaler.transform(x[:, layer].numpy()), labels.numpy())
        weight = expected.coef_[0] / scaler.scale_
        assert np.abs(probe.weight[layer].numpy() - weight).max() < 5e-3 * np.abs(weight).max()
        bias = expected.intercept_[0] - weight @ scaler.mean_
        assert float(probe.bias[layer]) == pytest.approx(bias, abs=5e-3 * np.abs(weight * scaler.mean_).sum())
        of_new = expected.decision_function(scaler.transform(new[:, layer].numpy()))
        assert np.abs(scores[layer].numpy() - of_new).max() < 5e-3 * np.abs(of_new).max()


# --- folds ------------------------------------------------------------------------------------------------------------


def test_grouped_folds_are_those_of_scikit_learn_and_keep_groups_whole():
    groups = torch.from_numpy(np.random.default_rng(0).integers(0, 30, 200)) * 7 - 50
    folds = grouped_folds(groups, n_folds=4, n_seeds=3, seed=11)
    assert folds.dtype == torch.long and folds.shape == (3, 200)
    for k in range(3):
        splitter = GroupKFold(4, shuffle=True, random_state=11 + k)
        for fold, (_, test) in enumerate(splitter.split(groups, groups=groups)):
            assert torch.equal((folds[k] == fold).nonzero().flatten(), torch.from_numpy(test))
        for group in groups.unique():
            assert len(folds[k][groups == group].unique()) == 1
    assert not torch.equal(folds[0], folds[1])


def test_random_folds_are_even_and_split_pairs():
    folds = random_folds(102, n_seeds=2, seed=4)
    assert all(torch.bincount(row).tolist() == [21, 21, 20, 20, 20] for row in folds)
    assert bool((folds[:, :51] != folds[:, 51:]).any())
    assert torch.equal(folds, random_folds(102, n_seeds=2, seed=4))
    assert not torch.equal(folds[0], folds[1])


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input_is_named():
    labels, groups = grid()
    x, folds = states(5), grouped_folds(groups)
    for bad, message in (
        ((x[0], labels, folds), "features"),
        ((x.long(), labels, folds), "features"),
        ((x[:, :0], labels, folds), "features"),
        ((torch.where(x > 2, torch.nan, x), labels, folds), "finite"),
        ((torch.where(x > 2, torch.inf, x), labels, folds), "finite"),
        ((x, labels[:-1], folds), "labels"),
        ((x, 2 * labels - 1, folds), "labels"),
        ((x, torch.ones_like(labels), folds), "both classes"),
        ((x, (torch.arange(len(labels)) == 0).long(), folds), "without fold"),
        ((x, labels, folds[0]), "folds"),
        ((x, labels, folds[:, :-1]), "folds"),
        ((x, labels, -folds), "folds"),
        ((x, labels, folds.double()), "folds"),
        ((x, labels, torch.zeros_like(folds)), "folds"),
    ):
        with pytest.raises(ValueError, match=message):
            logistic_probes(*bad)
    for C in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="C"):
            logistic_probes(x, labels, folds, C=C)
    with pytest.raises(ValueError, match="layer axis"):
        fit_probe(x, labels)
    with pytest.raises(ValueError, match="both classes"):
        fit_probe(x[:, None], torch.zeros_like(labels))
    with pytest.raises(ValueError, match="groups"):
        grouped_folds(torch.zeros(20).long())
    with pytest.raises(ValueError, match="groups"):
        grouped_folds(groups[None])
    with pytest.raises(ValueError, match="n_folds"):
        grouped_folds(groups, n_folds=1)
    with pytest.raises(ValueError, match="n_seeds"):
        random_folds(20, n_seeds=0)
    with pytest.raises(ValueError, match="n"):
        random_folds(4)
