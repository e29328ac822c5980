"""Scores of sets of outputs: exact at the extremes, against scipy, and indifferent to the order of things."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

import pytest
import torch
from planted_concepts import ANIMALS, once_each

from monitor.geometry.concept_scores import (
    SCORES,
    axbench_score,
    harmonic_mean,
    maxbench_score,
    score_outputs,
)
from monitor.geometry.diversity import diversity


@dataclass(frozen=True)
class Judged:
    concept: float | None
    fluency: float | None
    instruction: float | None
    mentions: tuple[tuple[str, str], ...] = ()


def test_harmonic_mean_is_that_of_the_standard_library():
    numbers = random.Random(0)
    for _ in range(50):
        scores = [numbers.uniform(0.01, 2) for _ in range(numbers.randint(1, 5))]
        assert harmonic_mean(*scores) == pytest.approx(statistics.harmonic_mean(scores))
        assert min(scores) - 1e-12 <= harmonic_mean(*scores) <= statistics.mean(scores) + 1e-12
    assert harmonic_mean(2.0, 0.0, 2.0) == 0.0 and harmonic_mean(0.0, -0.0, 1.0) == 0.0
    assert axbench_score(2, 2, 2) == 2.0 and maxbench_score(2, 2, 2, 2) == 2.0 and maxbench_score(2, 2, 2, 0) == 0.0


def test_harmonic_mean_of_tensors_is_taken_element_by_element():
    mean = harmonic_mean(torch.tensor([2.0, 1.0, 0.0]), torch.tensor([2.0, 0.5, 2.0]), 2.0)
    assert mean.tolist() == pytest.approx([2.0, statistics.harmonic_mean([1, 0.5, 2]), 0.0])


@pytest.mark.parametrize(("scores", "message"), [((), "at least one"), ((1.0, -0.5), "at least 0")])
def test_harmonic_mean_refuses(scores, message):
    with pytest.raises(ValueError, match=message):
        harmonic_mean(*scores)


def grid(*rows):
    return [list(row) for row in rows]


def test_perfect_outputs_score_two_everywhere():
    said = once_each(ANIMALS)
    outputs = grid(*[[Judged(2, 2.0, 2.0, (mention,)) for mention in said] for _ in range(5)])
    scores = score_outputs(outputs, ANIMALS)
    assert tuple(scores) == SCORES
    for name, estimate in scores.items():
        assert estimate.value == pytest.approx(1.0 if "_diversity" in name else 2.0), name
        assert estimate.n == 60
        assert estimate.high is None or estimate.high <= estimate.value + 1e-9
    # Outputs that all score alike leave nothing to draw anew: no interval, rather than one without width.
    for name in ("concept", "fluency", "instruction", "axbench", "axbench_of_means"):
        assert scores[name].low is scores[name].high is None
    assert scores["entity_diversity"].low < 1.0


@pytest.mark.parametrize(
    ("output", "zero", "two"),
    [
        (Judged(2, 2.0, 2.0, (("bird0", "bird"),)), ("diversity", "maxbench"), ("concept", "axbench")),  # collapsed
        (Judged(0, 2.0, 2.0), ("concept", "axbench", "diversity", "maxbench"), ("fluency", "instruction")),  # off
        (Judged(1, 0.0, 0.0, (("bird0", "bird"),)), ("fluency", "axbench", "maxbench"), ()),  # degenerate
    ],
)
def test_failures_score_zero_where_they_fail(output, zero, two):
    scores = score_outputs(grid([output] * 6, [output] * 6), ANIMALS)
    assert all(scores[name].value == 0.0 for name in zero)
    assert all(scores[name].value == pytest.approx(2.0) for name in two)


def test_axbench_is_of_each_output_and_maxbench_of_the_means():
    """Outputs that are on the concept and broken, and outputs that are fluent and off it."""
    good, bad = once_each(ANIMALS)[0], Judged(0, 2.0, 2.0)
    scores = score_outputs(grid([Judged(2, 0.0, 2.0, (good,)), bad], [Judged(2, 0.0, 2.0, (good,)), bad]), ANIMALS)
    assert scores["axbench"].value == 0.0
    assert scores["axbench_of_means"].value == pytest.approx(statistics.harmonic_mean([1, 1, 2]))


def noisy(n_prompts, n_points, seed=0):
    numbers, said = random.Random(seed), once_each(ANIMALS)
    return [
        [
            Judged(numbers.choice([0, 1, 2]), numbers.uniform(0, 2), numbers.uniform(0, 2), (numbers.choice(said),))
            for _ in range(n_points)
        ]
        for _ in range(n_prompts)
    ]


def test_scores_are_those_of_the_plain_functions():
    outputs = noisy(3, 8)
    flat = [one for row in outputs for one in row]
    scores = score_outputs(outputs, ANIMALS)
    means = [statistics.mean(getattr(one, name) for one in flat) for name in ("concept", "fluency", "instruction")]
    spread = diversity([mention for one in flat for mention in one.mentions], ANIMALS)
    assert [scores[name].value for name in ("concept", "fluency", "instruction")] == pytest.approx(means)
    assert scores["entity_diversity"].value == pytest.approx(spread.entity)
    assert scores["diversity"].value == pytest.approx(spread.total)
    assert scores["maxbench"].value == pytest.approx(maxbench_score(*means, spread.total))
    each = [axbench_score(one.concept, one.fluency, one.instruction) for one in flat]
    assert scores["axbench"].value == pytest.approx(statistics.mean(each))
    for name, estimate in scores.items():
        assert 0 <= estimate.low <= estimate.value <= estimate.high <= 2, name


def test_scores_do_not_depend_on_the_order_of_prompts_and_points():
    outputs = noisy(4, 6)
    order = [2, 5, 0, 1, 4, 3]
    shuffled = [[row[i] for i in order] for row in reversed(outputs)]
    before, after = score_outputs(outputs, ANIMALS), score_outputs(shuffled, ANIMALS)
    assert [e.value for e in after.values()] == pytest.approx([e.value for e in before.values()])


def test_intervals_cover_the_mean_of_many_prompts_and_points():
    """Scores with an effect of the prompt and one of the point: naive resampling of outputs would be too short."""
    covered = naive = 0
    for seed in range(100):
        numbers = random.Random(seed)
        prompts, points = ([numbers.uniform(-0.5, 0.5) for _ in range(n)] for n in (12, 12))
        outputs = [[Judged(1, 1 + a + b, 1.0) for b in points] for a in prompts]
        estimate = score_outputs(outputs, ANIMALS, n_bootstrap=200, seed=seed)["fluency"]
        covered += estimate.low <= 1 <= estimate.high
        flat = torch.tensor([one.fluency for row in outputs for one in row])
        error = float(flat.std()) / math.sqrt(len(flat))
        naive += abs(float(flat.mean()) - 1) <= 1.96 * error
    assert covered >= 90
    assert naive < 60


def test_scores_without_a_number_are_left_out_and_counted():
    whole = Judged(2, 1.0, 2.0, (("bird0", "bird"),))
    outputs = grid([whole, Judged(None, 2.0, 1.0)], [whole, Judged(None, None, 1.0)])
    scores = score_outputs(outputs, ANIMALS)
    assert scores["concept"].value == 2.0 and scores["concept"].n == 2
    assert scores["fluency"].value == pytest.approx(4 / 3) and scores["fluency"].n == 3
    assert scores["instruction"].n == 4 and scores["axbench"].n == 2
    nothing = score_outputs(grid([Judged(None, 1.0, 1.0)] * 3), ANIMALS)
    assert nothing["concept"].value is None and nothing["maxbench"].value is None and nothing["fluency"].value == 1.0


def test_a_single_output_has_no_interval():
    estimate = score_outputs(grid([Judged(2, 1.0, 1.0)]), ANIMALS)["fluency"]
    assert (estimate.value, estimate.low, estimate.high) == (1.0, None, None)


@pytest.mark.parametrize("outputs", [[], [[]], [[Judged(1, 1, 1)], []]])
def test_outputs_must_fill_a_grid(outputs):
    with pytest.raises(ValueError, match="equally many"):
        score_outputs(outputs, ANIMALS)
