"""Entropy of the Gram matrix: published values, an independent reference, and the theorems that connect it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import entropy
from sklearn.metrics.pairwise import cosine_similarity

from monitor.geometry.gram import (
    effective_rank,
    entropy_of_gram,
    gram,
    gram_entropy,
    mean_cosine,
    mean_norm,
    stable_rank,
    unit,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "fixtures" / "fragmentation.json").read_text())["cases"]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"n{len(case['query'])}")
def test_published_values(case):
    query, anonymised = torch.tensor(case["query"]), torch.tensor(case["anonymised"])
    difference = query - anonymised
    for prefix, vectors in (("Reg", query), ("AnonDiff", difference), ("NormAnonDiff", unit(difference))):
        got = {
            "S_alpha_2": gram_entropy(vectors),
            "S_alpha_1": gram_entropy(vectors, 1.0),
            "EffRank": effective_rank(vectors),
            "MeanL2": mean_norm(vectors),
            "MeanCos": mean_cosine(vectors),
        }
        for name, value in got.items():
            assert float(value) == pytest.approx(case["entropy_metrics"][f"{prefix}_{name}"], rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_entropy_against_numpy_spectrum(alpha, shape):
    vectors = draw(*shape) + 1
    spectrum = np.linalg.svd(vectors.numpy(), compute_uv=False) ** 2
    spectrum /= spectrum.sum()
    expected = entropy(spectrum, base=2) if alpha == 1 else np.log2((spectrum**alpha).sum()) / (1 - alpha)
    assert float(gram_entropy(vectors, alpha)) == pytest.approx(expected, abs=1e-10)
    assert float(entropy_of_gram(gram(vectors), alpha)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_lemma_1_entropy_is_the_mean_squared_cosine(seed):
    n = 3 + seed
    vectors = unit(draw(n, 8, seed=seed) + seed / 10)
    cosines = cosine_similarity(vectors.numpy())
    squared = (np.square(cosines).sum() - n) / (n * (n - 1))
    assert float(gram_entropy(vectors)) == pytest.approx(-math.log2((1 + (n - 1) * squared) / n), abs=1e-10)


def test_lemma_1_boundaries():
    direction = unit(draw(1, 7))
    signs = torch.tensor([1.0, -1, 1, -1, 1], dtype=torch.float64)[:, None]
    assert float(gram_entropy(direction * signs)) == pytest.approx(0, abs=1e-12)  # one line, whatever the signs
    assert float(gram_entropy(torch.eye(6)[:5])) == pytest.approx(math.log2(5), abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_proposition_1_sandwich(seed):
    vectors = draw(10, 6 + seed, seed=seed) * torch.linspace(0.1, 3, 6 + seed, dtype=torch.float64)
    entropy_2, rank = float(gram_entropy(vectors)), float(stable_rank(vectors))
    assert 2 ** (entropy_2 / 2) <= rank * (1 + 1e-12)
    assert rank <= 2**entropy_2 * (1 + 1e-12)
    norms = torch.linalg.matrix_norm(vectors) ** 2 / torch.linalg.matrix_norm(vectors, 2) ** 2
    assert rank == pytest.approx(float(norms), rel=1e-10)


def test_effective_rank_counts_directions_and_order_lowers_entropy():
    assert float(effective_rank(torch.eye(9)[:4])) == pytest.approx(4)
    vectors = draw(10, 20) + 0.5
    entropies = [float(gram_entropy(vectors, alpha)) for alpha in (0.5, 1.0, 2.0, 4.0)]
    assert entropies == sorted(entropies, reverse=True)
    assert float(effective_rank(vectors)) == pytest.approx(2 ** entropies[1])


def test_rotation_and_scale_change_nothing():
    vectors = draw(9, 15)
    rotation = torch.linalg.qr(draw(15, 15, seed=1)).Q
    for function in (gram_entropy, effective_rank, stable_rank, mean_cosine):
        assert float(function(7 * vectors @ rotation)) == pytest.approx(float(function(vectors)), abs=1e-10)
    assert float(mean_norm(7 * vectors)) == pytest.approx(7 * float(mean_norm(vectors)))


def test_mean_cosine_against_sklearn():
    vectors = draw(9, 15) + 0.3
    cosines = cosine_similarity(vectors.numpy())
    assert float(mean_cosine(vectors)) == pytest.approx(cosines[np.triu_indices(9, 1)].mean(), abs=1e-12)


def test_layers_in_one_call():
    layers = draw(4, 9, 15).float()
    for function in (gram_entropy, effective_rank, stable_rank, mean_cosine, mean_norm):
        together = function(layers)
        assert together.shape == (4,) and together.dtype == torch.float64
        torch.testing.assert_close(together, torch.stack([function(layer) for layer in layers]))


def test_half_precision_does_not_overflow():
    vectors = (draw(6, 10) * 1e4).half()  # squares overflow in fp16
    assert float(gram_entropy(vectors)) == pytest.approx(float(gram_entropy(vectors.double())))


def test_bad_input():
    vectors = draw(5, 4)
    with pytest.raises(ValueError, match="at least 2 rows"):
        gram_entropy(vectors[:1])
    with pytest.raises(ValueError, match=r"must be \[\.\.\., n, d\]"):
        gram_entropy(vectors[0])
    for bad in (math.nan, math.inf):
        broken = vectors.clone()
        broken[2, 1] = bad
        for function in (gram_entropy, effective_rank, stable_rank, mean_cosine, mean_norm):
            with pytest.raises(ValueError, match="must be finite; 1 entries"):
                function(broken)
    zero = vectors.clone()
    zero[3] = 0
    with pytest.raises(ValueError, match=r"zero at row\(s\) \[3\].*anonymised text equal"):
        mean_cosine(zero)
    for function in (gram_entropy, effective_rank, stable_rank):
        with pytest.raises(ValueError, match="must not all be zero"):
            function(torch.zeros(3, 4))
    with pytest.raises(ValueError, match="alpha"):
        gram_entropy(vectors, 0)
