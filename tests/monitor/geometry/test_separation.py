"""Cross-fitted separation: the definition, free of the inflation d/n, and untouched by what must not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf
from sklearn.covariance import ledoit_wolf_shrinkage as sklearn_shrinkage

from monitor.geometry import separation
from monitor.geometry.separation import (
    crossfit,
    crossfitted_separation,
    group_halves,
    ledoit_wolf_shrinkage,
    naive_separation,
    neutral_offset,
)


def pairs(distance, n=300, d=768, layers=1, seed=0):
    """n samples [n, layers, d] in pairs of one group, classes `distance` apart; every layer has new noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 2
    x = torch.randn(n, layers, d, generator=generator, dtype=torch.float64)
    x[..., 0] += (labels[:, None] - 0.5) * distance
    return x, labels, torch.arange(n) // 2


def uneven(n=60, d=8, layers=3, seed=0):
    """Correlated features of unequal spread, unequal classes, groups of one and of both classes."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(layers, d, d, generator=generator, dtype=torch.float64)
    x = torch.einsum("nld,lde->nle", torch.randn(n, layers, d, generator=generator, dtype=torch.float64), mix)
    labels = (torch.arange(n) % 5 < 2).long()
    return x + 4 * labels[:, None, None] * mix[:, 0], labels, torch.arange(n) // 2


def covariance(x, labels):
    """scikit-learn's Ledoit-Wolf covariance of the class-centred rows, and the difference of the class means."""
    means = np.stack([x[labels == c].mean(0) for c in (0, 1)])
    return LedoitWolf(assume_centered=True).fit(x - means[labels]).covariance_, means[1] - means[0]


def by_definition(features, labels, halves):
    """Squared separation of one layer, split by split."""
    x, labels, products = features.numpy(), labels.numpy(), []
    for in_a in halves.numpy():
        sigma, delta = covariance(x[in_a], labels[in_a])
        _, other = covariance(x[~in_a], labels[~in_a])
        products.append(np.linalg.solve(sigma, delta) @ other)
    return max(0.0, np.mean(products))


def offset_by_definition(features, labels, halves, neutral):
    x, labels, offsets = features.numpy(), labels.numpy(), []
    for in_a in halves.numpy():
        sigma, delta = covariance(x[in_a], labels[in_a])
        score, of_class = x[~in_a] @ np.linalg.solve(sigma, delta), labels[~in_a]
        low, high = score[of_class == 0], score[of_class == 1]
        squares = ((low - low.mean()) ** 2).sum() + ((high - high.mean()) ** 2).sum()
        middle = (low.mean() + high.mean()) / 2
        at = neutral.numpy().mean(0) @ np.linalg.solve(sigma, delta)
        offsets.append((at - middle) / np.sqrt(squares / (len(score) - 2)))
    return np.mean(offsets)


@pytest.mark.parametrize("n, d", [(40, 6), (12, 50), (30, 30)])
def test_shrinkage_is_that_of_scikit_learn(n, d):
    x = np.random.default_rng(n).standard_normal((2, n, d)) * np.geomspace(1, 30, d)
    expected = [sklearn_shrinkage(layer, assume_centered=True) for layer in x]
    assert ledoit_wolf_shrinkage(torch.from_numpy(x)).tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("n, d", [(60, 8), (60, 29), (60, 31), (40, 90)])
def test_values_are_those_of_the_definition(n, d):
    x, labels, groups = uneven(n, d)
    neutral = torch.randn(7, 3, d, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1
    halves = group_halves(groups, labels, n_splits=3, seed=5)
    found = crossfit(x, labels, groups, neutral, n_splits=3, seed=5)
    for layer in range(3):
        squared = by_definition(x[:, layer], labels, halves)
        offset = offset_by_definition(x[:, layer], labels, halves, neutral[:, layer])
        assert float(found.separation[layer]) ** 2 == pytest.approx(squared, rel=1e-7, abs=1e-9)
        assert float(found.offset[layer]) == pytest.approx(offset, rel=1e-7)
        sigma, delta = covariance(x[:, layer].numpy(), labels.numpy())
        naive = np.sqrt(delta @ np.linalg.solve(sigma, delta))
        assert float(naive_separation(x, labels)[layer]) == pytest.approx(naive, rel=1e-7)
    assert (found.separation > 0).all()  # nothing above was 0 = 0


def test_both_paths_find_one_direction():
    x, labels, _ = uneven(50, 40)
    x = (x - x.mean(0)).transpose(0, 1).contiguous()
    some = separation._samples(torch.arange(50) % 4 > 0, labels.bool())
    weights = separation._weights_from_gram(x @ x.mT, 40, some)
    by_gram = (weights[:, None] @ x)[:, 0]
    torch.testing.assert_close(by_gram, separation._direction_from_covariance(x, some), rtol=1e-8, atol=1e-10)


def test_equal_classes_are_not_told_apart_where_the_plug_in_sees_three_deviations():
    x, labels, groups = pairs(0.0, layers=20)  # 20 layers of independent noise: 20 seeds
    found, naive = crossfitted_separation(x, labels, groups), naive_separation(x, labels)
    assert float(found.median()) <= 0.6  # table VI: 0.50
    assert float(naive.median()) >= 3  # table VI: 3.24
    assert float(naive.median()) == pytest.approx((768 * 4 / 300) ** 0.5, abs=0.1)
    # 300 of each class would give 2.26: the paper's n counts both.
    x, labels, _ = pairs(0.0, n=600, layers=4)
    assert float(naive_separation(x, labels).median()) < 2.5


@pytest.mark.parametrize("distance", [2.0, 4.0])
def test_planted_separation_is_found_in_more_dimensions_than_samples(distance):
    x, labels, groups = pairs(distance, layers=20, seed=1)
    error = (crossfitted_separation(x, labels, groups) / distance - 1).abs().median()
    naive_error = (naive_separation(x, labels) / distance - 1).abs().median()
    assert float(error) <= 0.12 and float(naive_error) > 2 * float(error)
    assert (naive_separation(x, labels) > crossfitted_separation(x, labels, groups)).all()


def test_squared_estimate_is_unbiased():
    # 200 layers at s = 1.5: without the cut at 0 (never reached here) the mean of the squares is s².
    x, labels, groups = pairs(1.5, n=120, d=20, layers=200, seed=2)
    squared = crossfitted_separation(x, labels, groups).square()
    assert float(squared.min()) > 0
    standard_error = float(squared.std()) / 200**0.5
    # Σ_A⁻¹ of 58 residual degrees of freedom would inflate by 58/(58 - 21) unshrunk; Ledoit-Wolf knows Σ = I.
    assert float(squared.mean()) == pytest.approx(1.5**2, abs=3 * standard_error + 0.05)


@pytest.mark.parametrize("d", [10, 100])
def test_rotation_translation_and_common_scale_do_not_matter(d):
    x, labels, groups = uneven(60, d)
    neutral = x[:9] + 1
    q, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    expected = crossfit(x, labels, groups, neutral)
    for move in (lambda z: z @ q, lambda z: z + 100 * q[0], lambda z: 1e-3 * z, lambda z: -z):
        found = crossfit(move(x), labels, groups, move(neutral))
        torch.testing.assert_close(found.separation, expected.separation, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(found.offset, expected.offset, rtol=1e-7, atol=1e-9)
    stretched = crossfitted_separation(x * torch.linspace(1, 20, d), labels, groups)
    assert not torch.allclose(stretched, expected.separation, rtol=1e-3)  # separate scales do


def test_exchanged_classes_are_as_far_apart_with_neutral_texts_on_the_other_side():
    x, labels, groups = uneven()
    expected = crossfit(x, labels, groups, x[:9] + 1)
    found = crossfit(x, 1 - labels, groups, x[:9] + 1)
    torch.testing.assert_close(found.separation, expected.separation)
    torch.testing.assert_close(found.offset, -expected.offset)
    torch.testing.assert_close(naive_separation(x, 1 - labels), naive_separation(x, labels))


def test_groups_are_never_cut_and_halves_are_even():
    generator = torch.Generator().manual_seed(4)
    groups = torch.randint(40, (400,), generator=generator) * 7 - 3
    labels = torch.randint(2, (400,), generator=generator)
    labels[groups == groups[0]] = 1  # one group of a single class
    halves = group_halves(groups, labels, n_splits=6)
    for in_a in halves:
        in_half, in_other = set(groups[in_a].tolist()), set(groups[~in_a].tolist())
        assert not in_half & in_other and abs(len(in_half) - len(in_other)) <= 2
    assert len({tuple(in_a.tolist()) for in_a in halves}) == 6
    assert torch.equal(halves, group_halves(groups, labels, n_splits=6))
    assert not torch.equal(halves, group_halves(groups, labels, n_splits=6, seed=1))


def test_one_class_groups_are_spread_over_both_halves():
    labels = torch.tensor([1] * 8 + [0] * 8)
    for in_a in group_halves(torch.arange(16), labels, n_splits=20):
        assert in_a[:8].sum() == in_a[8:].sum() == 4


def test_what_a_group_shares_is_not_taken_for_signal():
    # 30 groups of one class, ten members each that share most of their features; classes do not differ.
    generator = torch.Generator().manual_seed(5)
    groups, labels = torch.arange(300) // 10, (torch.arange(300) // 10) % 2
    x = 2 * torch.randn(30, 20, 40, generator=generator)[groups] + torch.randn(300, 20, 40, generator=generator)
    together = crossfitted_separation(x, labels, groups)
    parted = crossfitted_separation(x, labels, torch.arange(300))
    assert float(parted.median()) > 1.5 > 1.0 > float(together.median())


def test_pairs_that_are_parted_cancel_signal():
    # Members of a pair share their context: in different halves their errors are opposite, and hide a true difference.
    generator = torch.Generator().manual_seed(6)
    x, labels, groups = pairs(1.0, n=100, d=40, layers=20, seed=6)
    x = x + 3 * torch.randn(50, 20, 40, generator=generator, dtype=torch.float64)[groups]
    in_half = [group_halves(g, labels, n_splits=4) for g in (groups, torch.arange(100))]
    squares = [np.mean([_signed(x[:, layer], labels, halves) for layer in range(20)]) for halves in in_half]
    assert squares[0] > 0 > squares[1]


def _signed(x, labels, halves):
    products = []
    for in_a in halves.numpy():
        sigma, delta = covariance(x.numpy()[in_a], labels.numpy()[in_a])
        products.append(np.linalg.solve(sigma, delta) @ covariance(x.numpy()[~in_a], labels.numpy()[~in_a])[1])
    return np.mean(products)


@pytest.mark.parametrize("d", [10, 100])
def test_layers_at_once_are_layers_one_by_one(d, monkeypatch):
    x, labels, groups = uneven(60, d, layers=5)
    together, naive = crossfit(x, labels, groups, x[:9] + 1), naive_separation(x, labels)
    monkeypatch.setitem(separation._MAX_ENTRIES, "cpu", 2 * 60 * (60 + d))  # two layers a chunk
    chunked = crossfit(x, labels, groups, x[:9] + 1)
    torch.testing.assert_close(chunked, together)
    for layer in range(5):
        alone = crossfit(x[:, layer], labels, groups, x[:9, layer] + 1)
        assert alone.separation.shape == alone.offset.shape == ()
        torch.testing.assert_close(alone.separation, together.separation[layer])
        torch.testing.assert_close(alone.offset, together.offset[layer])
        torch.testing.assert_close(naive_separation(x[:, layer], labels), naive[layer])


def test_float32_is_enough_beside_massive_activations():
    x, labels, groups = pairs(3.0, n=120, d=200, layers=3)
    x[..., 5] = 3_000 + 30 * x[..., 5]  # one feature a hundred times as loud as the rest
    x = x + torch.linspace(-500, 500, 200)
    expected = crossfitted_separation(x, labels, groups)
    found = crossfitted_separation(x.float(), labels, groups)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert (expected > 1).all()


def test_offset_is_where_the_neutral_texts_are():
    x, labels, groups = pairs(3.0, n=1_000, d=10, layers=20)
    generator = torch.Generator().manual_seed(7)
    for planted in (-1.5, 0.0, 0.8, 1.5):  # 1.5 = s/2: on the positive class
        neutral = torch.randn(1_000, 20, 10, generator=generator, dtype=torch.float64)
        neutral[..., 0] += planted
        found = neutral_offset(x, labels, groups, neutral)
        assert float(found.mean()) == pytest.approx(planted, abs=0.05)
        assert float(found.std()) < 0.1
    # Neutral texts off the line between the classes do not count.
    aside = torch.zeros(5, 20, 10, dtype=torch.float64)
    aside[..., 1] = 2.0
    assert float(neutral_offset(x, labels, groups, aside).abs().max()) < 0.5


def test_crossfit_is_both_at_once():
    x, labels, groups = uneven()
    both = crossfit(x, labels, groups, x[:9] + 1, n_splits=2, seed=3)
    assert torch.equal(both.separation, crossfitted_separation(x, labels, groups, n_splits=2, seed=3))
    assert torch.equal(both.offset, neutral_offset(x, labels, groups, x[:9] + 1, n_splits=2, seed=3))
    assert crossfit(x, labels, groups).offset is None


def test_global_generator_is_left_alone():
    x, labels, groups = uneven()
    state = torch.random.get_rng_state()
    crossfitted_separation(x, labels, groups)
    assert torch.equal(state, torch.random.get_rng_state())


def test_features_that_never_vary_are_zero_apart():
    x, labels, groups = uneven()
    x[:, 1] = 1_234.567  # a layer read at one shared token
    found = crossfit(x, labels, groups, x[:9])
    assert found.separation[1] == 0 and found.offset[1] == 0 and naive_separation(x, labels)[1] == 0
    assert (found.separation[[0, 2]] > 0).all()


@pytest.mark.parametrize("d", [8, 40, 200])
@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e6 / 3])
def test_features_that_vary_between_classes_alone_have_no_separation(d, scale):
    x, labels, groups = uneven(60, d)
    x[:, 1] = (labels[:, None] + 0.1) * torch.linspace(1, 2, d, dtype=torch.float64) * scale
    for estimate in (lambda: crossfitted_separation(x, labels, groups), lambda: naive_separation(x, labels)):
        with pytest.raises(ValueError, match=r"vary within the classes.*layer\(s\) \[1\]"):
            estimate()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_features_are_refused(bad):
    x, labels, groups = uneven()
    broken = x.clone()
    broken[3, 1, 2] = bad
    with pytest.raises(ValueError, match="features must be finite; 1 entries"):
        crossfitted_separation(broken, labels, groups)
    with pytest.raises(ValueError, match="features must be finite"):
        naive_separation(broken, labels)
    with pytest.raises(ValueError, match="neutral must be finite"):
        neutral_offset(x, labels, groups, broken)


def test_bad_input():
    x, labels, groups = uneven()
    with pytest.raises(ValueError, match="groups must leave at least two samples"):
        crossfitted_separation(x, labels, torch.zeros(60, dtype=torch.long))
    with pytest.raises(ValueError, match="groups must leave at least two samples"):
        crossfitted_separation(x[:6], torch.tensor([0, 1] * 3), torch.arange(6) // 2)
    with pytest.raises(ValueError, match="one group per sample"):
        crossfitted_separation(x, labels, groups[:-1])
    with pytest.raises(ValueError, match="labels"):
        crossfitted_separation(x, labels + 1, groups)
    with pytest.raises(ValueError, match="labels"):
        naive_separation(x, torch.ones(60, dtype=torch.long))
    with pytest.raises(ValueError, match="n_splits"):
        crossfitted_separation(x, labels, groups, n_splits=0)
    with pytest.raises(ValueError, match="neutral must have the features' layers and width"):
        neutral_offset(x, labels, groups, x[:, :, :-1])
    with pytest.raises(ValueError, match="features must be"):
        naive_separation(x[:0], labels[:0])
