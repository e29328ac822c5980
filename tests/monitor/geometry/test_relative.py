from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes

from monitor.geometry.relative import (
    association,
    procrustes_align,
    relative_bias,
    relative_representation,
    seat_bias,
)


def states(*sizes: int, d: int = 24, seed: int = 0, sink: float = 0.0) -> list[torch.Tensor]:
    """Random states; `sink` adds one huge common coordinate, as the last layers of language models have."""
    generator = torch.Generator().manual_seed(seed)
    sets = [torch.randn(n, d, generator=generator) for n in sizes]
    for s in sets:
        s[:, 3] += sink
    return sets


def rotation(d: int, seed: int = 0) -> torch.Tensor:
    q, _ = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return q


def naive_cos(a, b):
    return float(sum(x * y for x, y in zip(a, b, strict=True)) / (np.sqrt(sum(a * a)) * np.sqrt(sum(b * b))))


def naive_relative_bias(targets, positive, negative, anchors):
    """Eqs. 4-6, one sentence at a time."""

    def r(x):
        return np.array([naive_cos(x, a) for a in anchors])

    scores = []
    for s in targets:
        s_positive = -np.mean([np.sqrt(np.sum((r(s) - r(p)) ** 2)) for p in positive])
        s_negative = -np.mean([np.sqrt(np.sum((r(s) - r(n)) ** 2)) for n in negative])
        scores.append(s_positive - s_negative)
    return np.array(scores)


def as_numpy(sets):
    return [s.double().numpy() for s in sets]


def test_relative_bias_is_the_papers_formula():
    sets = states(7, 5, 6, 9)
    assert np.allclose(relative_bias(*sets).numpy(), naive_relative_bias(*as_numpy(sets)), atol=1e-12)
    targets, positive, negative, anchors = sets
    r = [relative_representation(s, anchors) for s in (targets, positive, negative)]
    assert torch.allclose(association(*r), relative_bias(*sets), atol=1e-14)
    assert r[0].shape == (7, 9) and r[0].dtype == torch.float64 and float(r[0].abs().max()) <= 1


def test_seat_is_the_papers_formula():
    targets, positive, negative = states(7, 5, 6)
    t, p, n = as_numpy((targets, positive, negative))
    expected = [np.mean([naive_cos(s, x) for x in p]) - np.mean([naive_cos(s, x) for x in n]) for s in t]
    assert np.allclose(seat_bias(targets, positive, negative).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sink", [0.0, 300.0])
def test_rotating_or_scaling_the_whole_space_changes_nothing(seed, sink):
    sets = states(12, 8, 8, 40, d=96, seed=seed, sink=sink)
    # Rotated in float64 and rounded to float32, as a rotated model's own states would be.
    turned = [(3.7 * s.double() @ rotation(96, seed)).float() for s in sets]
    shift = relative_bias(*turned) - relative_bias(*sets)
    assert abs(float(shift.mean())) < 1e-6
    assert abs(float((seat_bias(*turned[:3]) - seat_bias(*sets[:3])).mean())) < 1e-6
    # A map that is no rotation does change it, by far more than the tolerance: the test can fail.
    stretched = [s * torch.linspace(0.5, 2, 96) for s in sets]
    assert abs(float((relative_bias(*stretched) - relative_bias(*sets)).mean())) > 1e-5


def test_translating_the_space_is_no_invariance():
    sets = states(12, 8, 8, 40)
    assert not torch.allclose(relative_bias(*[s + 1.0 for s in sets]), relative_bias(*sets), atol=1e-3)


def test_distances_keep_their_digits():
    # Two clouds 1e-6 apart: the |x|^2 + |y|^2 - 2xy form in float32 returns nothing but rounding here.
    base = torch.ones(1, 50, dtype=torch.float64) / 7
    positive, negative = base + 1e-6, base - 3e-6
    expected = (3e-6 - 1e-6) * np.sqrt(50)
    assert association(base, positive, negative).item() == pytest.approx(expected, rel=1e-8)


def test_signs():
    targets, positive, negative, anchors = states(10, 10, 10, 30)
    positive, negative = positive + 4 * torch.eye(24)[0], negative + 4 * torch.eye(24)[1]
    for score in (relative_bias, lambda t, p, n, _: seat_bias(t, p, n)):
        nearer_positive = score(targets + 4 * torch.eye(24)[0], positive, negative, anchors)
        nearer_negative = score(targets + 4 * torch.eye(24)[1], positive, negative, anchors)
        assert float(nearer_positive.mean()) > 0.05 and float(nearer_negative.mean()) < -0.05
        # Exchanging the attribute sets changes the sign and nothing else.
        exchanged = score(targets, negative, positive, anchors)
        assert torch.allclose(exchanged, -score(targets, positive, negative, anchors), atol=1e-12)


@pytest.mark.parametrize(("n", "d"), [(40, 12), (12, 12), (9, 30)])
def test_procrustes_is_scipys(n, d):
    source, target = states(n, n, d=d, seed=n)
    expected = source.double().numpy() @ orthogonal_procrustes(source.double().numpy(), target.double().numpy())[0]
    assert np.allclose(procrustes_align(source, target).numpy(), expected, atol=1e-9)


@pytest.mark.parametrize(("n", "d"), [(40, 12), (9, 30)])
def test_procrustes_undoes_a_rotation_and_keeps_all_angles(n, d):
    (target,) = states(n, d=d)
    source = target.double() @ rotation(d)
    assert torch.allclose(procrustes_align(source, target), target.double(), atol=1e-10)
    other = states(n, d=d, seed=9)[0]
    aligned = procrustes_align(source, other)
    assert torch.allclose(aligned @ aligned.T, source @ source.T, atol=1e-9)


def test_procrustes_bears_repeated_rows():
    # A text that is both a target and an anchor makes the rows dependent.
    (target,) = states(9, d=30)
    target = torch.cat([target, target[:4]])
    assert torch.allclose(procrustes_align(target.double() @ rotation(30), target), target.double(), atol=1e-10)


@pytest.mark.parametrize("bad", ["nan", "inf", "zero", "empty", "shape"])
@pytest.mark.parametrize("which", range(4))
def test_unusable_states_are_named(bad, which):
    sets = states(6, 5, 4, 7)
    name = ("targets", "positive", "negative", "anchors")[which]
    if bad == "empty":
        sets[which], message = sets[which][:0], "must be a non-empty matrix"
    elif bad == "shape":
        sets[which], message = sets[which][0], "must be a non-empty matrix"
    elif bad == "zero":
        sets[which][2], message = 0.0, "norm 0 in row 2"
    else:
        sets[which][2, 1], message = float(bad), "nan or inf in row 2"
    with pytest.raises(ValueError, match=f"{name} must .*{message}|{name} {message}"):
        relative_bias(*sets)
    if which < 3:
        with pytest.raises(ValueError, match=name):
            seat_bias(*sets[:3])


def test_procrustes_needs_one_row_per_text():
    source, target = states(5, 6)
    with pytest.raises(ValueError, match="one row per text"):
        procrustes_align(source, target)
