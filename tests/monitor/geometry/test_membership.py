from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_curve

from monitor.geometry.membership import (
    log_prob_moments,
    loss_score,
    min_k_plus_plus_score,
    min_k_score,
    reference_score,
    tpr_at_fpr,
    zlib_score,
)

LENGTHS = (1, 2, 4, 5, 9, 10, 30, 100)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def answers():
    """Log-softmax rows of answers of several lengths over 50 tokens, and the log-probabilities of the tokens said."""
    rows = [(2 * draw(n, 50, seed=n)).log_softmax(-1) for n in LENGTHS]
    said = [row.gather(1, (torch.arange(len(row)) * 7 % 50).unsqueeze(1)).squeeze(1) for row in rows]
    return rows, said


def test_every_score_equals_a_plain_loop(answers):
    rows, said = answers
    texts = ["a" * 3 * n + "é" for n in LENGTHS]
    k = 0.2
    loss, ratio, least, standard = [], [], [], []
    for row, tokens, text in zip(rows, said, texts, strict=True):
        total = sum(float(p) for p in tokens)
        loss.append(total / len(tokens))
        ratio.append(total / len(tokens) / len(zlib.compress(text.encode())))
        kept = max(1, int(len(tokens) * k))
        least.append(np.mean(sorted(tokens.double().tolist())[:kept]))
        z = []
        for distribution, p in zip(row.double(), tokens.double(), strict=True):
            mu = float((distribution.exp() * distribution).sum())
            sigma = math.sqrt(float((distribution.exp() * distribution**2).sum()) - mu**2)
            z.append((float(p) - mu) / sigma)
        standard.append(np.mean(sorted(z)[:kept]))
    moments = [log_prob_moments(row) for row in rows]
    assert loss_score(said).tolist() == pytest.approx(loss)
    assert zlib_score(said, texts).tolist() == pytest.approx(ratio)
    assert min_k_score(said, k).tolist() == pytest.approx(least)
    assert min_k_plus_plus_score(said, moments, k).tolist() == pytest.approx(standard, rel=1e-5)


def test_all_tokens_are_the_loss_and_one_is_the_least_likely(answers):
    _, said = answers
    assert torch.allclose(min_k_score(said, 1.0), loss_score(said))
    assert min_k_score(said, 1e-3).tolist() == pytest.approx([float(row.min()) for row in said])


def test_the_share_of_tokens_is_exact():
    # 0.29 * 100 is 28.999999999999996 in floating point.
    row = -torch.arange(100.0)
    assert float(min_k_score([row], 0.29)) == pytest.approx(-np.mean(range(71, 100)))


def test_moments_of_known_distributions():
    uniform = torch.full((3, 50_000), -math.log(50_000))
    mean, std = log_prob_moments(uniform)
    assert mean.tolist() == pytest.approx([-math.log(50_000)] * 3) and bool((std < 1e-6).all())
    # One token certain, the others impossible: minus infinity weighs nothing.
    certain = torch.tensor([[0.0, -math.inf, -math.inf]])
    assert [float(part) for part in log_prob_moments(certain)] == [0.0, 0.0]
    half = torch.tensor([[0.5, 0.25, 0.25]]).log()
    mean, std = log_prob_moments(half)
    assert float(mean) == pytest.approx(-1.5 * math.log(2)) and float(std) == pytest.approx(0.5 * math.log(2))
    # Neither a uniform nor a certain row tells anything: z is 0, not 0/0 or rounding.
    for rows in (uniform, certain):
        assert float(min_k_plus_plus_score([rows[:, 0]], [log_prob_moments(rows)])) == pytest.approx(0.0, abs=1e-3)


def test_a_token_at_the_mode_of_a_flat_row_is_told_from_a_rare_one_in_a_peaked_row():
    """What Min-K%++ is for: the same log-probability means more where nothing is more likely."""
    flat = torch.tensor([[0.26, 0.24, 0.25, 0.25]]).log()
    peaked = torch.tensor([[0.74, 0.26, 0.0, 0.0]]).log()
    said = [flat[:, 0], peaked[:, 1]]
    assert min_k_score(said)[0] == min_k_score(said)[1]
    plus_plus = min_k_plus_plus_score(said, [log_prob_moments(flat), log_prob_moments(peaked)])
    assert plus_plus[0] > 0 > plus_plus[1]


def test_reference(answers):
    _, said = answers
    assert reference_score(said, loss_score(said)).tolist() == [0.0] * len(said)
    assert torch.allclose(reference_score(said, torch.zeros(len(said))), loss_score(said))
    with pytest.raises(ValueError, match="`reference`"):
        reference_score(said, torch.zeros(2))


@pytest.mark.parametrize("rounding", [None, 1, 0], ids=["no ties", "some ties", "nearly all tied"])
@pytest.mark.parametrize("fpr", [0.01, 0.05, 0.3])
def test_rate_equals_scikit_learns_curve(rounding, fpr):
    labels = (torch.arange(300) % 3 == 0).long()
    scores = draw(300) + 0.8 * labels
    if rounding is not None:
        scores = scores.round(decimals=rounding)
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    assert tpr_at_fpr(scores, labels, fpr) == pytest.approx(true[false <= fpr + 1e-12].max())


def test_rate_is_only_given_where_it_can_be_seen():
    labels = torch.cat([torch.ones(30), torch.zeros(50)])
    scores = torch.cat([torch.ones(30), torch.zeros(50)])
    assert tpr_at_fpr(scores, labels, 0.01) is None
    assert tpr_at_fpr(scores, labels, 0.05) == 1.0
    assert tpr_at_fpr(-scores, labels, 0.05) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: loss_score([]), "at least one answer"),
        (lambda: min_k_score([torch.zeros(0)]), "at least one token"),
        (lambda: min_k_score([torch.zeros(3)], 0.0), "`k`"),
        (lambda: zlib_score([torch.zeros(3)], ["a", "b"]), "`texts`"),
        (lambda: min_k_plus_plus_score([torch.zeros(3)], []), "`moments`"),
        (lambda: tpr_at_fpr(torch.zeros(2), torch.tensor([0, 1]), 1.0), "`fpr`"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
