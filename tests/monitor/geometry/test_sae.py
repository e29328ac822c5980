"""Sparse autoencoders: planted features found, correlations against scikit-learn, files of either layout, bad files."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sklearn.metrics import matthews_corrcoef

from monitor.geometry import sae as module
from monitor.geometry.sae import (
    SparseAutoencoder,
    feature_correlations,
    load_sparse_autoencoder,
    sae_directions,
    sae_top_k,
    sample_independently,
    top_features,
)
from monitor.geometry.subspaces import principal_angles

D, M = 32, 80


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def planted(**options) -> SparseAutoencoder:
    """Features whose decoder directions are also what they read."""
    directions = torch.nn.functional.normalize(draw(M, D), dim=1)
    return SparseAutoencoder(directions.mT.clone(), torch.full((M,), -4.0), directions, **options)


def texts(sae: SparseAutoencoder, features: list[int], n: int = 120, seed: int = 1):
    """Positives along one of the features each, and negatives that are noise."""
    of_row = torch.arange(n) % len(features)
    positives = 6 * sae.W_dec[torch.tensor(features)[of_row]] + 0.3 * draw(n, D, seed=seed)
    return positives, 2 * draw(n, D, seed=seed + 1)


def test_planted_features_are_picked_and_span_the_subspace():
    sae = planted()
    positives, negatives = texts(sae, [7, 41, 63])
    features, correlations = top_features(sae, positives, negatives, 3)
    assert sorted(features.tolist()) == [7, 41, 63]
    assert (correlations.diff() <= 0).all() and float(correlations[-1]) > 0.3
    found = sae_top_k(sae, positives, negatives, 3)
    assert found.method == "sae_top_k" and not found.offset.any()
    assert math.degrees(float(principal_angles(found.basis, sae.W_dec[[7, 41, 63]].mT)[-1])) < 1e-3


def test_smaller_ranks_are_the_first_columns_and_point_where_features_write():
    sae = planted()
    positives, negatives = texts(sae, [7, 41, 63])
    features, _ = top_features(sae, positives, negatives, 4)
    four = sae_top_k(sae, positives, negatives, 4)
    for rank in (1, 2, 3):
        torch.testing.assert_close(sae_top_k(sae, positives, negatives, rank).basis, four.basis[:, :rank])
    torch.testing.assert_close(four.basis[:, 0], sae.W_dec[features[0]])
    assert ((sae.W_dec[features] * four.basis.mT).sum(1) > 0).all()


@pytest.mark.parametrize("options", [{}, {"threshold": torch.linspace(0, 2, M)}])
def test_correlations_are_sklearns(options, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ACTIVATIONS", 7 * M)  # blocks of seven rows
    sae = planted(**options)
    positives, negatives = texts(sae, [3, 4])
    negatives = negatives[:90]
    active = torch.cat([sae.encode(positives), sae.encode(negatives)]) > 0
    labels = np.repeat([1, 0], [120, 90])
    expected = [matthews_corrcoef(labels, active[:, i].numpy()) for i in range(M)]
    assert min(expected) < 0 or options  # both signs are there
    np.testing.assert_allclose(feature_correlations(sae, positives, negatives).numpy(), expected, atol=1e-12)


def test_no_feature_goes_with_noise():
    """Negative control: positives drawn like the negatives."""
    _, negatives = texts(planted(), [0])
    _, others = texts(planted(), [0], seed=5)
    assert float(feature_correlations(planted(), others, negatives).abs().max()) < 4.5 / math.sqrt(240)


def test_encoding_by_hand():
    weights = torch.tensor([[1.0, -1.0], [0.0, 2.0]])
    x = torch.tensor([[1.0, 1.0], [-3.0, 0.0]])
    bias, after = torch.tensor([0.5, 0.0]), torch.tensor([1.0, 0.0])
    plain = SparseAutoencoder(weights, bias, torch.eye(2), after)
    torch.testing.assert_close(plain.encode(x), torch.tensor([[1.5, 1.0], [0.0, 3.0]]))
    shifted = SparseAutoencoder(weights, bias, torch.eye(2), after, subtract_b_dec=True)
    torch.testing.assert_close(shifted.encode(x), torch.tensor([[0.5, 2.0], [0.0, 4.0]]))
    jump = SparseAutoencoder(weights, bias, torch.eye(2), threshold=torch.tensor([1.6, 0.9]))
    torch.testing.assert_close(jump.encode(x), torch.tensor([[0.0, 1.0], [0.0, 3.0]]))


def test_independent_samples_lie_on_one_direction_each():
    sae = planted()
    directions = sae_directions(sae, *texts(sae, [7, 41, 63]), 3)
    points = sample_independently(directions, [1.0, 2.0, 4.0], 3000, torch.Generator().manual_seed(0))
    distances = torch.stack([direction.distance(points) for direction in directions])
    on, which = distances.min(0)
    assert float(on.max()) < 1e-5
    counts = torch.bincount(which, minlength=3)
    assert counts.min() > 900  # 1000 expected, standard deviation 26
    for j, sigma in enumerate((1.0, 2.0, 4.0)):
        assert float(points[which == j].norm(dim=1).square().mean().sqrt()) == pytest.approx(sigma, rel=0.1)


def stored(tmp_path, **tensors: torch.Tensor):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "sae.safetensors")
    return tmp_path / "sae.safetensors"


def test_files_of_either_layout_and_of_any_names(tmp_path):
    sae = planted(b_dec=draw(D, seed=3), threshold=torch.rand(M, generator=torch.Generator().manual_seed(0)))
    x = draw(10, D, seed=4)
    layouts = [
        ({"W_enc": sae.W_enc, "b_enc": sae.b_enc, "W_dec": sae.W_dec, "b_dec": sae.b_dec}, None),
        ({"encoder.weight": sae.W_enc.mT, "encoder.bias": sae.b_enc, "decoder.weight": sae.W_dec.mT}, None),
        ({"e": sae.W_enc.mT, "bias": sae.b_enc, "d": sae.W_dec}, {"W_enc": "e", "b_enc": "bias", "W_dec": "d"}),
    ]
    for tensors, names in layouts:
        read = load_sparse_autoencoder(stored(tmp_path, **tensors, threshold=sae.threshold), names=names)
        torch.testing.assert_close(read.encode(x), sae.encode(x))
        torch.testing.assert_close(read.W_dec, sae.W_dec)
        assert (read.b_dec is not None) == ("b_dec" in tensors)
    half = {name: tensor.half() for name, tensor in layouts[0][0].items()}
    assert load_sparse_autoencoder(stored(tmp_path, **half)).W_enc.dtype == torch.float32


def test_square_matrices_are_turned_by_their_names(tmp_path):
    encoder, decoder = draw(D, D), draw(D, D, seed=1)
    plain = load_sparse_autoencoder(stored(tmp_path, W_enc=encoder, b_enc=torch.zeros(D), W_dec=decoder))
    torch.testing.assert_close(plain.W_enc, encoder)
    modules = {"encoder.weight": encoder, "encoder.bias": torch.zeros(D), "decoder.weight": decoder}
    turned = load_sparse_autoencoder(stored(tmp_path, **modules))
    torch.testing.assert_close(turned.W_enc, encoder.mT)
    torch.testing.assert_close(turned.W_dec, decoder.mT)


def test_bad_files(tmp_path):
    sae = planted()
    with pytest.raises(FileNotFoundError, match="there is none at"):
        load_sparse_autoencoder(tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match=r"must hold W_dec as W_dec or decoder.weight; it holds W_enc, b_enc. Map it"):
        load_sparse_autoencoder(stored(tmp_path, W_enc=sae.W_enc, b_enc=sae.b_enc))
    whole = {"W_enc": sae.W_enc, "b_enc": sae.b_enc, "W_dec": sae.W_dec}
    with pytest.raises(ValueError, match=r"got the keys \['encoder'\]"):
        load_sparse_autoencoder(stored(tmp_path, **whole), names={"encoder": "W_enc"})
    with pytest.raises(ValueError, match="must hold threshold as t; it holds"):
        load_sparse_autoencoder(stored(tmp_path, **whole), names={"threshold": "t"})
    with pytest.raises(ValueError, match=r"W_enc must be \[d, m\] or \[m, d\] with m = 79"):
        load_sparse_autoencoder(stored(tmp_path, **{**whole, "b_enc": sae.b_enc[1:]}))
    with pytest.raises(ValueError, match=r"W_dec must have shape \(80, 32\) or \(32, 80\); W_dec has \(80, 31\)"):
        load_sparse_autoencoder(stored(tmp_path, **{**whole, "W_dec": sae.W_dec[:, 1:]}))
    with pytest.raises(ValueError, match=r"b_dec must have shape \(32,\)"):
        load_sparse_autoencoder(stored(tmp_path, **whole, b_dec=torch.zeros(5)))


def test_bad_input():
    sae = planted()
    positives, negatives = texts(sae, [7])
    with pytest.raises(ValueError, match="b_dec must be given"):
        planted(subtract_b_dec=True)
    with pytest.raises(ValueError, match="b_enc must be finite"):
        SparseAutoencoder(sae.W_enc, sae.b_enc / 0, sae.W_dec)
    for rank in (0, 33):
        with pytest.raises(ValueError, match=rf"rank must be from 1 to 32.*got {rank}"):
            sae_top_k(sae, positives, negatives, rank)
    with pytest.raises(ValueError, match="negatives must be as wide as the autoencoder reads, 32; got 31"):
        sae_top_k(sae, positives, negatives[:, 1:], 1)
    with pytest.raises(ValueError, match="x must be finite"):
        sae_top_k(sae, positives / 0, negatives, 1)
    twice = SparseAutoencoder(sae.W_enc, sae.b_enc, sae.W_dec[:1].expand(M, D))
    with pytest.raises(ValueError, match="rank must be smaller: the decoder directions.*linearly dependent"):
        sae_top_k(twice, positives, negatives, 2)
    direction = sae_directions(sae, positives, negatives, 1)
    with pytest.raises(ValueError, match="sigmas must be one a direction, 1; got 2"):
        sample_independently(direction, [1.0, 1.0], 3, torch.Generator())
    with pytest.raises(ValueError, match="directions must be of rank 1"):
        sample_independently([sae_top_k(sae, positives, negatives, 2)], [1.0], 3, torch.Generator())
