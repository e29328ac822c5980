"""CKA, PCA similarity and PCA shift against scikit-learn, the d x d formula, and planted drift."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from monitor.geometry.drift import linear_cka, pca_shift, pca_similarity

ALL = (linear_cka, pca_similarity, pca_shift)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def stretched(n: int, d: int, seed: int = 0) -> torch.Tensor:
    """A cloud with a clear first direction, away from the origin."""
    return draw(n, d, seed=seed) * torch.linspace(4, 0.5, d, dtype=torch.float64) + draw(d, seed=seed + 100)


def test_cka_against_the_covariance_form():
    x, y = stretched(30, 8), stretched(30, 12, seed=1)
    a, b = (x - x.mean(0)).numpy(), (y - y.mean(0)).numpy()
    expected = np.linalg.norm(b.T @ a) ** 2 / (np.linalg.norm(a.T @ a) * np.linalg.norm(b.T @ b))
    assert float(linear_cka(x, y)) == pytest.approx(expected, abs=1e-12)


def test_cka_sees_neither_rotation_nor_scale_nor_translation_but_sees_shuffling():
    x = stretched(40, 8)
    rotation = torch.linalg.qr(draw(8, 8, seed=2)).Q
    assert float(linear_cka(3 * x @ rotation + 5, x)) == pytest.approx(1)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    assert float(linear_cka(x[order], x)) < 0.3


def test_pca_against_sklearn():
    x, y = stretched(30, 8), stretched(30, 8, seed=1)
    now, reference = PCA(1).fit(x.numpy()).components_[0], PCA(1).fit(y.numpy()).components_[0]
    assert float(pca_similarity(x, y)) == pytest.approx(abs(float(now @ reference)), abs=1e-10)
    shift = float(x.mean(0).numpy() @ reference - y.mean(0).numpy() @ reference)
    assert abs(float(pca_shift(x, y))) == pytest.approx(abs(shift), abs=1e-10)


def test_planted_shift_is_read_with_its_sign_and_size():
    x = stretched(50, 8)
    direction = torch.from_numpy(PCA(1).fit(x.numpy()).components_[0])
    outwards = direction * torch.sign(x.mean(0) @ direction)
    for size in (2.5, -2.5):
        assert float(pca_shift(x + size * outwards, x)) == pytest.approx(size)
        assert float(pca_similarity(x + size * outwards, x)) == pytest.approx(1)


def test_a_turned_principal_direction_is_seen():
    x = draw(200, 6) * torch.tensor([5.0, 1, 1, 1, 1, 1])
    y = draw(200, 6, seed=1) * torch.tensor([1.0, 5, 1, 1, 1, 1])
    assert float(pca_similarity(x, y)) < 0.2
    assert float(pca_similarity(-x, x)) == pytest.approx(1)  # a direction has no sign


def test_no_drift():
    x = stretched(20, 30).float()
    assert float(linear_cka(x, x)) == pytest.approx(1)
    assert float(pca_similarity(x, x)) == pytest.approx(1)
    assert float(pca_shift(x, x)) == pytest.approx(0, abs=1e-9)


def test_layers_in_one_call():
    x, y = draw(3, 20, 6).float(), draw(3, 20, 6, seed=1).float()
    for function in ALL:
        torch.testing.assert_close(function(x, y), torch.stack([function(a, b) for a, b in zip(x, y, strict=True)]))


def test_bad_input():
    x = draw(10, 4)
    for function in ALL:
        with pytest.raises(ValueError, match="same texts; got 10 and 9"):
            function(x, x[:9])
        with pytest.raises(ValueError, match="vary over the texts"):
            function(x, torch.ones(10, 4))
        with pytest.raises(ValueError, match="now must have at least 2 rows"):
            function(x[:1], x[:1])
        with pytest.raises(ValueError, match="reference must be finite"):
            function(x, x / 0)
    for function in (pca_similarity, pca_shift):
        with pytest.raises(ValueError, match="same width; got 4 and 3"):
            function(x, x[:, :3])
