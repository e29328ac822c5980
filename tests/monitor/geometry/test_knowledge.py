"""The null: its definition, its calibration where nothing is known, its power where something is."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from monitor.geometry.dispersion import auss_l2, batch_directions, centroid_norm, partition
from monitor.geometry.knowledge import knowledge_null, knowledge_z, permutation_p

PAIRS, DIMENSION, ENTITIES = 40, 64, 12


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def universes(concept: float, runs: int, variants: int = 8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Query [runs, n, d] and variants [K, runs, n, d]: each universe has its own name vectors, a few names in most
    pairs as in a real forget set, and noise per pair. `concept` is the length of a direction all queries share."""
    generator = torch.Generator().manual_seed(seed)
    popularity = 1 / torch.arange(1, ENTITIES + 1, dtype=torch.float64)
    mentions = torch.zeros(runs, PAIRS, ENTITIES, dtype=torch.float64)
    named = torch.multinomial(popularity.expand(runs * PAIRS, -1), 2, generator=generator).view(runs, PAIRS, 2)
    mentions.scatter_(-1, named, 0.5)
    names = torch.randn(variants + 1, runs, ENTITIES, DIMENSION, generator=generator, dtype=torch.float64)
    noise = torch.randn(variants + 1, runs, PAIRS, DIMENSION, generator=generator, dtype=torch.float64)
    states = mentions @ names + 0.5 * noise
    direction = torch.randn(runs, 1, DIMENSION, generator=generator, dtype=torch.float64)
    return states[0] + concept * direction / direction.norm(dim=-1, keepdim=True), states[1:]


def test_observed_and_null_are_their_definition():
    query, variants = draw(20, 9), draw(4, 20, 9, seed=1)
    batches = partition(20, 5)
    observed, null = knowledge_null(query, variants, batches)
    looks, nulls = [], []
    for k in range(4):
        others = torch.stack([variants[j] for j in range(4) if j != k]).mean(0)
        looks.append(centroid_norm(batch_directions(query - others, batches)))
        nulls.append(centroid_norm(batch_directions(variants[k] - others, batches)))
    torch.testing.assert_close(observed, torch.stack(looks).mean())
    torch.testing.assert_close(null, torch.stack(nulls))


def test_a_universe_more_is_within_two_sd_as_often_as_a_normal_number():
    query, variants = universes(concept=0, runs=400)
    observed, null = knowledge_null(query, variants, partition(PAIRS))
    z = knowledge_z(observed, null)
    alarms = float((z.abs() > 2).double().mean())
    assert 0.02 < alarms < 0.085  # nominal 0.046
    assert abs(float(z.mean())) < 0.25 and float(z.std()) == pytest.approx(1, abs=0.15)
    # What the correction is for: the plain distance raises false alarms more than twice as often as nominal.
    plain = (observed - null.mean(0)) / null.std(0)
    assert float((plain.abs() > 2).double().mean()) > 0.092
    # The permutation p is (nearly) uniform on its grid of 1/9 .. 9/9.
    p = permutation_p(observed, null)
    assert float((p <= 1 / 9 + 1e-9).double().mean()) == pytest.approx(1 / 9, abs=0.05)
    assert float(p.mean()) == pytest.approx(5 / 9, abs=0.06)


def test_a_shared_concept_is_seen_and_more_of_it_more():
    batches = partition(PAIRS)
    medians = [float(knowledge_z(*knowledge_null(*universes(c, runs=60), batches)).median()) for c in (0.0, 2.0, 4.0)]
    assert medians[0] < 1 < medians[1] < medians[2]
    assert medians[2] > 2


def test_metrics_of_dispersion_turn_the_sign():
    query, variants = universes(concept=4, runs=20)
    observed, null = knowledge_null(query, variants, partition(PAIRS), metric=auss_l2)
    assert float(knowledge_z(observed, null, higher_means_known=False).median()) > 2
    torch.testing.assert_close(knowledge_z(observed, null, higher_means_known=False), -knowledge_z(observed, null))
    assert float(permutation_p(observed, null, higher_means_known=False).median()) == pytest.approx(1 / 9)
    assert float(permutation_p(observed, null).median()) == pytest.approx(1)


def test_z_is_the_normal_quantile_of_student_t():
    null = torch.tensor([1.0, 2, 3, 4, 5])
    for distance in (-3.0, -0.1, 0.5, 2.0):
        observed = null.mean() + distance * null.std()
        expected = stats.norm.ppf(stats.t.cdf(distance / math.sqrt(1 + 1 / 5), 4))
        assert float(knowledge_z(observed, null)) == pytest.approx(expected, abs=1e-6)
    many = draw(5000)  # the correction goes away when the null is well known
    assert float(knowledge_z(many.mean() + 3 * many.std(), many)) == pytest.approx(3, abs=0.01)
    assert 4 < float(knowledge_z(torch.tensor(1e6), null)) < math.inf  # far out stays finite


def test_layers_in_one_call():
    query, variants = draw(3, 20, 9), draw(4, 3, 20, 9, seed=1)
    batches = partition(20, 5)
    z = knowledge_z(*knowledge_null(query, variants, batches))
    alone = torch.stack([knowledge_z(*knowledge_null(query[i], variants[:, i], batches)) for i in range(3)])
    torch.testing.assert_close(z, alone)


def test_bad_input():
    query, variants = draw(20, 9), draw(4, 20, 9, seed=1)
    batches = partition(20, 5)
    with pytest.raises(ValueError, match="at least 3 variants a pair.*got 2"):
        knowledge_null(query, variants[:2], batches)
    with pytest.raises(ValueError, match=r"variants must be \[K, \.\.\.\] with the query's shape \(20, 9\)"):
        knowledge_null(query, variants[:, :19], batches)
    with pytest.raises(ValueError, match="query must be finite"):
        knowledge_null(query / 0, variants, batches)
    with pytest.raises(ValueError, match="query - variants must have no zero rows"):
        knowledge_null(torch.ones(20, 9), torch.ones(4, 20, 9), batches)
    with pytest.raises(ValueError, match="at least 3 values"):
        knowledge_z(torch.tensor(1.0), torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="vary over the variants"):
        knowledge_z(torch.tensor(1.0), torch.ones(8))
