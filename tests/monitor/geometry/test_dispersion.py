"""Dispersion of batch directions: published values, duals, Theorems 1 and 2, and brute force."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from monitor.geometry.dispersion import (
    auss_cos,
    auss_cos2,
    auss_jac,
    auss_jac_soft,
    auss_l2,
    batch_directions,
    batch_means,
    centroid_norm,
    cov_top,
    cov_trace,
    partition,
    second_moment_top,
)
from monitor.geometry.gram import gram_entropy, mean_cosine, stable_rank, unit

GOLDEN = json.loads((Path(__file__).parents[2] / "fixtures" / "fragmentation.json").read_text())["cases"]
ALL = (auss_l2, auss_cos, auss_cos2, auss_jac, auss_jac_soft, centroid_norm, second_moment_top, cov_top, cov_trace)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"n{len(case['query'])}")
def test_published_values_and_partition(case):
    batches = partition(len(case["query"]), case["n_batches"])
    assert [batch.tolist() for batch in batches] == case["partition"]
    directions = batch_directions(torch.tensor(case["query"]) - torch.tensor(case["anonymised"]), batches)
    expected = case["batch_metrics"]
    for name, function in {
        "Centroid_Norm": centroid_norm,
        "Global_Coherence": centroid_norm,
        "AUSS_L2": auss_l2,
        "AUSS_Cos2": auss_cos2,
        "AUSS_Jac": auss_jac,
        "Batch_SecondMoment_TopEig": second_moment_top,
        "Batch_Cov_Trace": cov_trace,
        "Batch_Cov_TopEig": cov_top,
    }.items():
        assert float(function(directions)) == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name


def test_partition_is_of_all_pairs_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    batches = partition(64)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.cat(batches).sort().values.tolist() == list(range(64))
    assert [b.tolist() for b in partition(64, seed=1)] != [b.tolist() for b in batches]
    # torch.chunk's arithmetic: batches of ceil(25/10) = 3 are nine, not ten.
    assert [len(batch) for batch in partition(25, 10)] == [3] * 8 + [1]


@pytest.mark.parametrize("seed", range(10))
def test_duals(seed):
    b = 3 + seed
    directions = unit(draw(b, 20, seed=seed) + seed / 20)
    c = float(centroid_norm(directions))
    assert float(auss_l2(directions)) == pytest.approx(2 * b * (1 - c**2) / (b - 1))
    assert float(auss_cos(directions)) == pytest.approx(float(auss_l2(directions)) / 2)
    assert float(cov_trace(directions)) == pytest.approx(1 - c**2)
    # ... and each is what its name says.
    pairs = list(itertools.combinations(directions, 2))
    assert float(auss_l2(directions)) == pytest.approx(np.mean([float((a - z).square().sum()) for a, z in pairs]))
    assert float(auss_cos(directions)) == pytest.approx(1 - float(mean_cosine(directions)))
    covariance = np.cov(directions.numpy(), rowvar=False, bias=True)
    assert float(cov_trace(directions)) == pytest.approx(np.trace(covariance))
    assert float(cov_top(directions)) == pytest.approx(np.linalg.eigvalsh(covariance)[-1])
    moment = directions.numpy().T @ directions.numpy() / b
    assert float(second_moment_top(directions)) == pytest.approx(np.linalg.eigvalsh(moment)[-1])
    assert float(auss_cos2(directions)) == pytest.approx(1 - np.mean([float(a @ z) ** 2 for a, z in pairs]))


@pytest.mark.parametrize("b", [2, 5, 10])
def test_auss_l2_is_bounded_by_2b_over_b_minus_1_not_by_2(b):
    simplex = unit(torch.eye(b, dtype=torch.float64) - 1 / b)  # b directions as far apart as they get
    assert float(auss_l2(simplex)) == pytest.approx(2 * b / (b - 1))
    assert float(auss_l2(simplex)) > 2
    assert float(auss_l2(torch.eye(b))) == pytest.approx(2)
    assert float(auss_l2(torch.ones(b, 4) / 2)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_theorem_1_high_entropy_forces_fragmentation(seed):
    n = 2 + seed
    vectors = unit(draw(n, 10, seed=seed) + (seed % 5) / 3)
    distance, rank = float(auss_l2(vectors)), float(stable_rank(vectors))
    assert distance >= 2 - 2 / rank - 1e-12
    assert distance >= 2 * n / (n - 1) * (1 - 1 / rank) - 1e-12  # the tighter form its proof gives
    assert distance >= 2 * (1 - 2 ** (-float(gram_entropy(vectors)) / 2)) - 1e-12  # Corollary 1


@pytest.mark.parametrize("seed", range(30))
def test_theorem_2_low_entropy_forces_clustering_in_a_half_space(seed):
    n = 2 + seed
    vectors = unit(draw(n, 10, seed=seed).abs() ** (1 + seed % 4))  # all cosines are non-negative
    bound = 2 * n / (n - 1) * (1 - 2 ** -float(gram_entropy(vectors)))
    assert float(auss_l2(vectors)) <= bound + 1e-12


def test_theorem_2_needs_its_assumption():
    antiparallel = torch.tensor([[1.0, 0], [-1, 0]])
    assert float(gram_entropy(antiparallel)) == pytest.approx(0, abs=1e-12)
    assert float(auss_l2(antiparallel)) == pytest.approx(4)


@pytest.mark.parametrize("k", [1, 5, 32, 40])
def test_jaccard_of_index_sets_against_sets(k):
    directions = unit(draw(6, 40))
    sets = [set(np.argsort(-np.abs(row))[:k].tolist()) for row in directions.numpy()]
    expected = np.mean([1 - len(a & z) / len(a | z) for a, z in itertools.combinations(sets, 2)])
    assert float(auss_jac(directions, k)) == pytest.approx(expected, abs=1e-12)


def test_soft_jaccard_against_its_definition():
    directions = unit(draw(6, 40))
    positive = np.maximum(directions.numpy(), 0)
    expected = np.mean(
        [1 - np.minimum(a, z).sum() / np.maximum(a, z).sum() for a, z in itertools.combinations(positive, 2)]
    )
    assert float(auss_jac_soft(directions)) == pytest.approx(expected, abs=1e-12)
    assert float(auss_jac_soft(directions[:1].expand(4, -1))) == pytest.approx(0, abs=1e-12)
    assert float(auss_jac_soft(torch.eye(4))) == pytest.approx(1)


def test_a_common_direction_lowers_dispersion_and_noise_does_not():
    noise, concept = draw(60, 400), 20 * unit(draw(1, 400, seed=1))
    batches = partition(60)
    known, unknown = batch_directions(noise + concept, batches), batch_directions(noise, batches)
    for function in (auss_l2, auss_cos2, auss_jac, auss_jac_soft):
        assert float(function(known)) < 0.8 * float(function(unknown)), function.__name__
    for function in (centroid_norm, second_moment_top):
        assert float(function(known)) > 1.5 * float(function(unknown)), function.__name__


def test_layers_in_one_call():
    layers = draw(4, 30, 40).float()
    batches = partition(30)
    directions = batch_directions(layers, batches)
    assert directions.shape == (4, 10, 40) and directions.dtype == torch.float64
    for function in ALL:
        torch.testing.assert_close(function(directions), torch.stack([function(layer) for layer in directions]))


def test_batch_means_are_means():
    vectors = draw(7, 3)
    got = batch_means(vectors, [torch.tensor([4, 0]), torch.tensor([6])])
    torch.testing.assert_close(got, torch.stack([(vectors[4] + vectors[0]) / 2, vectors[6]]))


def test_bad_input():
    with pytest.raises(ValueError, match="at least the number of batches, 10; got 9"):
        partition(9, 10)
    with pytest.raises(ValueError, match="batches must be at least 2"):
        partition(9, 1)
    with pytest.raises(ValueError, match="batch 1 is"):
        batch_means(draw(4, 3), [torch.tensor([0]), torch.tensor([], dtype=torch.int64)])
    zero = draw(10, 3)
    batches = partition(10, 5)
    zero[batches[2]] = 0
    with pytest.raises(ValueError, match=r"batch means must have no zero rows.*row\(s\) \[2\]"):
        batch_directions(zero, batches)
    broken = draw(10, 3)
    broken[0, 0] = torch.nan
    with pytest.raises(ValueError, match="must be finite"):
        batch_directions(broken, batches)
    for function in ALL:
        with pytest.raises(ValueError, match="directions must have at least 2 rows"):
            function(torch.ones(1, 40))
    with pytest.raises(ValueError, match="k must be between 1 and the dimension, 3; got 32"):
        auss_jac(draw(4, 3))
    with pytest.raises(ValueError, match="positive coordinate"):
        auss_jac_soft(-torch.eye(3))
