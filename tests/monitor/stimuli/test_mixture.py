"""A mixture has the purity, the balance and the pairs that it says, never a text twice, and no luck from outside."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from scipy import stats

from monitor.stimuli.counterfactual import CounterfactualSet
from monitor.stimuli.counterfactual_grid import load_counterfactual_sets
from monitor.stimuli.mixture import Mixture, draw_mixture, largest_mixture

GRID = load_counterfactual_sets(["gender"])["gender"]
PURITIES = [0.0, 0.01, 0.05, 0.1, 0.25, 0.3, 1 / 3, 0.5, 0.7, 0.99, 1.0]


def pool(n_pairs: int, n_neutral: int) -> CounterfactualSet:
    return CounterfactualSet(
        positive=[f"he {i}" for i in range(n_pairs)],
        negative=[f"she {i}" for i in range(n_pairs)],
        cells=[f"c{i % 7}" for i in range(n_pairs)],
        neutral=[f"it {j}" for j in range(n_neutral)],
        neutral_cells=[f"c{j % 5}" for j in range(n_neutral)],
    )


def fits(n: int, purity: float, n_pairs: int, n_neutral: int) -> bool:
    """Independently of the code: by the definition."""
    marked = 2 * round(purity * n / 2)
    return marked <= 2 * n_pairs and n - marked <= n_neutral


@pytest.mark.parametrize("purity", PURITIES)
@pytest.mark.parametrize("n", [2, 30, 100, 300, 680])
def test_properties_over_a_grid(n, purity):
    for seed in (0, 1):
        mixture = draw_mixture(GRID, n, purity, seed)
        k, p = mixture.n_marked, GRID.n_pairs
        rows, labels = mixture.rows.tolist(), mixture.labels
        assert len(set(rows)) == len(rows) == n and mixture.rows.dtype == labels.dtype == torch.int64
        assert k == 2 * round(purity * n / 2) and mixture.purity == k / n
        assert abs(mixture.purity - purity) <= 1 / n + 1e-12
        assert all(row < 2 * p for row in rows[:k]) and all(2 * p <= row < len(GRID.texts) for row in rows[k:])
        # Whole pairs: the i-th negative is the i-th positive's.
        assert [row + p for row in rows[: k // 2]] == rows[k // 2 : k]
        assert labels[:k].tolist() == [GRID.labels[row] for row in rows[:k]]
        assert labels.sum() == n // 2 and labels[k:].sum() == (n - k) // 2
        assert mixture.groups.tolist() == [GRID.groups[row] for row in rows]


def test_seeds_differ_repeat_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, again, other = (draw_mixture(GRID, 300, 0.3, seed) for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.rows, again.rows) and torch.equal(one.labels, again.labels)
    assert not torch.equal(one.rows, other.rows)
    torch.manual_seed(6)
    assert torch.equal(draw_mixture(GRID, 300, 0.3, 4).rows, one.rows)


def test_with_one_seed_lower_purities_and_sizes_are_contained():
    drawn = [draw_mixture(GRID, n, purity, 3) for n, purity in ((100, 0.1), (300, 0.1), (300, 0.5), (680, 1.0))]
    marked = [set(mixture.rows[: mixture.n_marked].tolist()) for mixture in drawn]
    assert all(smaller < larger for smaller, larger in zip(marked, marked[1:], strict=False))


def test_every_text_is_drawn_equally_often_and_neutral_labels_are_a_coin():
    """400 draws: uniform counts by a chi-square test, and the label of a neutral text by its binomial spread."""
    stimuli = pool(20, 40)
    rows, ones = torch.zeros(80), torch.zeros(80)
    for seed in range(400):
        mixture = draw_mixture(stimuli, 30, 0.4, seed)
        rows[mixture.rows] += 1
        ones[mixture.rows] += mixture.labels.float()
    for part in (rows[:20], rows[40:]):
        # Drawn without replacement, so the statistic is below its chi-square: the test errs on the safe side.
        assert stats.chisquare(part.numpy()).pvalue > 1e-3
    z = (ones[40:] - rows[40:] / 2) / (rows[40:] / 4).sqrt()
    assert z.abs().max() < 4 and 0.5 < z.square().mean() < 1.6
    # A cell's neutral texts are not labelled together.
    assert torch.equal(ones[:20], rows[:20]) and not ones[20:40].any()


@pytest.mark.parametrize(("n_pairs", "n_neutral"), [(340, 680), (10, 0), (1, 1), (25, 7), (7, 25), (100, 3)])
def test_the_largest_mixture_is_the_largest_and_all_below_fit(n_pairs, n_neutral):
    stimuli = pool(n_pairs, n_neutral)
    generator = np.random.default_rng(0)
    for purity in (*PURITIES, *generator.uniform(0, 1, 40)):
        sizes = [n for n in range(2, 2 * n_pairs + n_neutral + 3, 2) if fits(n, purity, n_pairs, n_neutral)]
        assert largest_mixture(stimuli, purity) == max(sizes, default=0)
        assert sizes == list(range(2, max(sizes, default=0) + 1, 2))


def test_what_the_paper_asks_of_its_grid_is_there():
    assert largest_mixture(GRID, 1.0) == 680
    assert largest_mixture(GRID, 0.3) >= 300
    # Its phase diagram has n = 1000 up to purity 1, which is past the pool ("deliberately broken" in V-E).
    with pytest.raises(ValueError, match="n=1000 at purity=1.0 needs 500 pairs and 0 neutral texts, the pool has 340"):
        draw_mixture(GRID, 1000, 1.0)


@pytest.mark.parametrize(("n_pairs", "n_neutral"), [(25, 7), (7, 25), (20, 20)])
def test_the_error_beyond_the_pool_names_what_fits_and_it_does(n_pairs, n_neutral):
    stimuli, refused = pool(n_pairs, n_neutral), 0
    for n in range(2, 2 * n_pairs + n_neutral + 5, 4):
        for purity in PURITIES:
            if fits(n, purity, n_pairs, n_neutral):
                assert isinstance(draw_mixture(stimuli, n, purity), Mixture)
                continue
            refused += 1
            with pytest.raises(ValueError, match="drawing a text twice") as caught:
                draw_mixture(stimuli, n, purity)
            message = str(caught.value)
            largest = int(re.search(r"largest n at this purity is (\d+)", message)[1])
            assert largest < n and (largest == 0 or draw_mixture(stimuli, largest, purity).purity <= 1)
            span = re.search(rf"at n={n} the purity may be from (\S+) to (\S+)\. Or", message)
            possible = [k for k in range(n // 2 + 1) if k <= n_pairs and n - 2 * k <= n_neutral]
            assert bool(span) == bool(possible)
            if span:
                assert [float(bound) for bound in span.groups()] == pytest.approx(
                    [2 * possible[0] / n, 2 * possible[-1] / n], rel=1e-5
                )
                for bound in span.groups():
                    draw_mixture(stimuli, n, float(bound))
            else:
                most = int(re.search(rf"at no purity does n={n} fit, n=(\d+) at most", message)[1])
                assert most == 2 * (n_pairs + n_neutral // 2) < n
    assert refused > 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((GRID, 301, 0.3), "n must be an even int of at least 2, .*; got 301"),
        ((GRID, 0, 0.3), "n must be .*; got 0"),
        ((GRID, 300.0, 0.3), "n must be .*; got 300.0"),
        ((GRID, 300, 1.1), r"purity must be a share from 0 to 1, got 1.1"),
        ((GRID, 300, -0.1), "purity must be .*got -0.1"),
        ((GRID, 300, float("nan")), "purity must be .*got nan"),
        ((GRID, 300, "0.3"), "purity must be .*got '0.3'"),
        ((GRID, 300, True), "purity must be .*got True"),
        ((GRID, 300, 0.3, 1.5), "seed must be an int, got 1.5"),
        ((["he", "she"], 300, 0.3), "stimuli must be a CounterfactualSet, got list"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        draw_mixture(*arguments)


def test_numbers_of_numpy_are_numbers():
    drawn = draw_mixture(GRID, np.int64(300), np.float32(0.5), np.int64(1))
    assert torch.equal(drawn.rows, draw_mixture(GRID, 300, 0.5, 1).rows) and drawn.purity == 0.5
    with pytest.raises(ValueError, match="purity must be"):
        largest_mixture(GRID, 2)
