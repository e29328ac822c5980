"""Coverage, exclusion, drift and the entity probe on planted concepts, against scikit-learn, and on noise."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestCentroid
from sklearn.preprocessing import StandardScaler

from monitor.geometry.concept_coverage import (
    angle_summary,
    coverage,
    entity_probe,
    exclusion,
    offset_drift,
)
from monitor.geometry.probes import grouped_folds
from monitor.geometry.subspaces import Isotropic, Subspace


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(d: int = 24, k: int = 3, seed: int = 0) -> Subspace:
    return Subspace(torch.linalg.qr(draw(d, k, seed=seed)).Q, 2 * draw(d, seed=seed + 50), "planted")


def entities(strength: float, *, n_entities: int = 6, clues: int = 5, contexts: int = 3, d: int = 20, seed: int = 0):
    """Contexts around an entity's centroid and their clue's own shift, which its contexts share."""
    labels = torch.arange(n_entities).repeat_interleave(clues * contexts)
    groups = torch.arange(n_entities * clues).repeat_interleave(contexts)
    x = strength * draw(n_entities, d, seed=seed)[labels] + draw(n_entities * clues, d, seed=seed + 1)[groups]
    return x + 0.3 * draw(len(labels), d, seed=seed + 2), labels, groups


def test_coverage_at_its_extremes_and_in_between():
    space = planted()
    inside = space.sample(4, 3.0, torch.Generator().manual_seed(0)).double()
    across = torch.linalg.qr(torch.cat([space.basis.double(), draw(24, 1, seed=9)], 1)).Q[:, 3]
    torch.testing.assert_close(coverage(space, inside), torch.ones(4, dtype=torch.float64), atol=1e-6, rtol=0)
    off = space.offset.double() + 2 * across[None]
    torch.testing.assert_close(coverage(space, off), torch.zeros(1, dtype=torch.float64), atol=1e-6, rtol=0)
    half = space.offset.double() + space.basis[:, 0].double() * math.sqrt(3) + across  # shares 3/4 and 1/4
    assert float(coverage(space, half[None])) == pytest.approx(0.75, abs=1e-6)
    assert float(coverage(space, space.offset.double()[None])) == 1.0


def test_chance_is_the_mean_over_subspaces_turned_at_random():
    centroids = draw(5, 24, seed=3)
    values = []
    for seed in range(300):
        basis = torch.linalg.qr(draw(24, 3, seed=1000 + seed)).Q
        values.append(coverage(Subspace(basis, torch.zeros(24), "random"), centroids))
    values = torch.stack(values)
    assert float(values.mean()) == pytest.approx(3 / 24, abs=4 * float(values.mean(1).std()) / math.sqrt(300))
    everywhere = Isotropic(torch.zeros(24))
    assert bool((coverage(everywhere, centroids) == 1).all())


def test_exclusion_of_planted_negatives_and_of_none():
    space = planted()
    positives = space.sample(200, 2.0, torch.Generator().manual_seed(0)).double() + 0.5 * draw(200, 24)
    far = space.offset.double() + 3 * draw(150, 24, seed=1)
    alike = space.sample(200, 2.0, torch.Generator().manual_seed(1)).double() + 0.5 * draw(200, 24, seed=2)
    near, further, likewise = (space.distance(x) for x in (positives, far, alike))
    assert exclusion(near, further) > 0.999
    assert exclusion(further, near) < 0.001  # direction
    assert exclusion(near, likewise) == pytest.approx(0.5, abs=0.09)  # three standard errors
    whole = Isotropic(space.offset)
    assert exclusion(whole.distance(positives), whole.distance(far)) == 0.5  # the whole space excludes nothing


def test_drift_and_angles_of_a_moved_and_turned_subspace():
    basis = torch.linalg.qr(draw(24, 6)).Q
    reference = Subspace(basis[:, :2], 2 * basis[:, 5], "planted")
    angle = math.radians(30)
    turned = torch.stack([basis[:, 0], math.cos(angle) * basis[:, 1] + math.sin(angle) * basis[:, 3]], 1)
    now = Subspace(turned, 2 * basis[:, 5] + basis[:, 4], "planted")
    assert offset_drift(now, reference) == pytest.approx(0.5, abs=1e-6)
    assert offset_drift(now, reference, basis[:, 5]) == pytest.approx(1.0, abs=1e-6)  # one away from there, one moved
    assert offset_drift(reference, reference) == 0
    summary = angle_summary(now, reference)
    assert summary.smallest == pytest.approx(0, abs=1e-3)
    assert (summary.mean, summary.largest) == (pytest.approx(15, abs=1e-3), pytest.approx(30, abs=1e-3))
    with pytest.raises(ValueError, match="offset other than origin"):
        offset_drift(now, reference.linear())
    with pytest.raises(ValueError, match="same space; got 24 and 8"):
        offset_drift(now, planted(8))
    with pytest.raises(ValueError, match=r"origin must be \[d\], d = 24"):
        offset_drift(now, reference, torch.zeros(3))


@pytest.mark.parametrize("d", [7, 60])
@pytest.mark.parametrize("strength", [0.0, 0.7])
def test_the_probe_is_sklearns_nearest_centroid_of_whitened_features_on_the_same_folds(d: int, strength: float):
    x, labels, groups = entities(strength, d=d)
    x = x * torch.logspace(0, 3, d, dtype=torch.float64) + 5
    folds = grouped_folds(groups, n_folds=5, n_seeds=1, seed=3)[0].numpy()
    right = np.zeros(len(x))
    for fold in range(5):
        train, test = folds != fold, folds == fold
        scaler = StandardScaler().fit(x.numpy()[train])
        z = scaler.transform(x.numpy())
        metric = np.linalg.inv(z[train].T @ z[train] + 0.5 * d * np.eye(d))
        round_ = z @ np.linalg.cholesky(metric)
        model = NearestCentroid().fit(round_[train], labels.numpy()[train])
        right[test] = model.predict(round_[test]) == labels.numpy()[test]
    found = entity_probe(x, labels, groups, 2, 3, ridge=0.5)
    assert found.accuracy == pytest.approx(right.mean(), abs=1e-12)
    expected = [right[labels.numpy() == entity].mean() for entity in range(6)]
    np.testing.assert_allclose(found.by_entity.numpy(), expected, atol=1e-12)


def test_permutations_equal_probes_of_relabelled_texts():
    """The null is made of what the probe itself says of permuted labels, not of a shortcut's approximation."""
    from monitor.geometry.concept_coverage import _relabelled

    x, labels, groups = entities(0.5)
    found = entity_probe(x, labels, groups, 6, 1)
    one_by_one = torch.tensor(
        [entity_probe(x, row, groups, 2, 1).accuracy for row in _relabelled(labels, groups, 6, 1).T]
    )
    assert found.null_mean == pytest.approx(float(one_by_one.mean()), abs=1e-6)
    assert found.null_sd == pytest.approx(float(one_by_one.std()), abs=1e-6)


def test_entities_in_the_middle_of_a_line_are_named_too():
    """Regression on one-hot targets would name the two at the ends alone."""
    labels = torch.arange(9).repeat_interleave(8)
    x = 3.0 * labels[:, None] * torch.tensor([[1.0, 0.5]], dtype=torch.float64) + 0.3 * draw(72, 2)
    found = entity_probe(x, labels, torch.arange(72) // 2, 50)
    assert found.accuracy > 0.95 and float(found.by_entity.min()) > 0.7


def test_whole_cells_are_relabelled():
    from monitor.geometry.concept_coverage import _relabelled

    _, labels, groups = entities(0.0)
    permuted = _relabelled(labels, groups, 20, 0)
    for group in groups.unique():
        assert (permuted[groups == group] == permuted[groups == group][0]).all()
    assert (permuted.sort(0).values == labels[:, None]).all()  # every entity keeps its number of texts
    assert len(permuted.unique(dim=1).T) == 20


def test_planted_entities_are_found_and_noise_is_not():
    strong = entity_probe(*entities(2.0), n_permutations=99)
    assert strong.accuracy > 0.9 and strong.p == 0.01
    assert strong.null_mean == pytest.approx(1 / 6, abs=0.05)
    ps = [entity_probe(*entities(0.0, seed=10 * seed), n_permutations=49, seed=seed).p for seed in range(20)]
    assert 0.25 < sum(ps) / 20 < 0.75  # uniform on (0, 1]: mean 0.5, standard error 0.065


def test_shared_words_do_not_count():
    """Ten contexts of a clue are one witness: permuting contexts by themselves would call this noise a discovery."""
    ps = [
        entity_probe(*entities(0.0, clues=3, contexts=10, seed=10 * seed), n_permutations=49, seed=seed, n_folds=3).p
        for seed in range(12)
    ]
    assert sum(p < 0.05 for p in ps) <= 3  # P(more than 3 of 12 at 5 %) is 0.002


def test_global_generators_stay_and_seeds_decide():
    state = torch.random.get_rng_state()
    first, again = (entity_probe(*entities(0.3), 20, 5) for _ in range(2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert (first.accuracy, first.null_mean, first.p) == (again.accuracy, again.null_mean, again.p)


def test_speed_at_the_size_of_a_concept():
    x, labels, groups = entities(0.5, n_entities=50, clues=4, contexts=3, d=576)
    start = time.process_time()
    entity_probe(x.float(), labels, groups, 200, 0)
    assert time.process_time() - start < 10  # of one core: about one or two; a loop over scikit-learn takes minutes


def test_bad_input():
    x, labels, groups = entities(0.5)
    with pytest.raises(ValueError, match="labels must hold at least two entities"):
        entity_probe(x, torch.zeros_like(labels), groups)
    with pytest.raises(ValueError, match=r"labels must be integers \[n\]"):
        entity_probe(x, labels[1:], groups)
    with pytest.raises(ValueError, match=r"groups must be integers \[n\]"):
        entity_probe(x, labels, groups[1:])
    with pytest.raises(ValueError, match=r"each entity at least two groups.*entities number \[0, 1, 2, 3, 4, 5\]"):
        entity_probe(x, labels, labels)
    with pytest.raises(ValueError, match="n_permutations must be at least 2"):
        entity_probe(x, labels, groups, 1)
    with pytest.raises(ValueError, match="ridge must be positive"):
        entity_probe(x, labels, groups, ridge=0.0)
    with pytest.raises(ValueError, match="x must be finite"):
        entity_probe(x / 0, labels, groups)
    with pytest.raises(ValueError, match="centroids must have the shape"):
        coverage(planted(), torch.zeros(24))
