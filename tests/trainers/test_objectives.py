from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from trainers.answer_rows import AnswerRows, answer_positions, answer_rows, sum_by_sequence
from trainers.objectives import npo, sequence_nll, token_kl, token_nll

GOLDEN = json.loads((Path(__file__).parents[1] / "fixtures" / "unlearning_losses.json").read_text())
EXPECTED = GOLDEN["expected"]


def _golden(part: str, which: str = "logits") -> AnswerRows:
    return answer_rows(torch.tensor(GOLDEN[part][which]), torch.tensor(GOLDEN[part]["labels"]))


def _by_hand(logits, labels) -> list[list[float]]:
    """NLL of every answer token by loops, in double precision, sequence by sequence."""
    sequences = []
    for sequence_logits, sequence_labels in zip(logits.double().tolist(), labels.tolist(), strict=True):
        nll = []
        for t in range(1, len(sequence_labels)):
            if sequence_labels[t] != -100:
                row = sequence_logits[t - 1]
                nll.append(math.log(sum(math.exp(z) for z in row)) - row[sequence_labels[t]])
        sequences.append(nll)
    return sequences


def _random(n: int = 4, length: int = 9, vocabulary: int = 11, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, length, vocabulary, generator=generator)
    labels = torch.full((n, length), -100)
    for i in range(n):
        start, end = 1 + i, 3 + 2 * i if 3 + 2 * i < length else length
        labels[i, start:end] = torch.randint(vocabulary, (end - start,), generator=generator)
    return logits, labels


# Published values


def test_golden_sequence_nll():
    torch.testing.assert_close(
        sequence_nll(_golden("forget")), torch.tensor(EXPECTED["sequence_nll_forget"]), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        sequence_nll(_golden("forget", "reference_logits")),
        torch.tensor(EXPECTED["sequence_nll_forget_reference"]),
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_golden_npo(beta):
    loss = npo(sequence_nll(_golden("forget")), sequence_nll(_golden("forget", "reference_logits")), beta).mean()
    assert loss.item() == pytest.approx(EXPECTED[f"npo_beta{beta}"], abs=1e-5)


def test_golden_retain_terms():
    rows, frozen = _golden("retain"), _golden("retain", "reference_logits")
    assert token_nll(rows).mean().item() == pytest.approx(EXPECTED["retain_nll"], abs=1e-5)
    divergence = token_kl(rows, frozen.logits.log_softmax(-1)).mean().item()
    assert divergence == pytest.approx(EXPECTED["retain_kl_ref_to_model_mean_over_answer_tokens"], abs=1e-5)


# Independent references


def test_nll_by_loops():
    logits, labels = _random()
    by_hand = _by_hand(logits, labels)
    rows = answer_rows(logits, labels)
    assert token_nll(rows).tolist() == pytest.approx([nll for sequence in by_hand for nll in sequence], rel=1e-5)
    assert sequence_nll(rows).tolist() == pytest.approx([sum(sequence) for sequence in by_hand], rel=1e-5)


def test_npo_is_the_definition_by_probabilities():
    """(2/β) log(1 + (π_θ/π_ref)^β), with the probabilities themselves."""
    nll, frozen, beta = torch.tensor([0.5, 2.0, 7.0]), torch.tensor([1.5, 2.0, 1.0]), 0.3
    ratio = torch.exp(-nll.double()) / torch.exp(-frozen.double())
    torch.testing.assert_close(npo(nll, frozen, beta).double(), 2 / beta * torch.log1p(ratio**beta), rtol=1e-5, atol=0)


def test_kl_by_loops():
    logits, labels = _random()
    frozen, _ = _random(seed=1)
    p, q = (
        answer_rows(frozen, labels).logits.double().softmax(-1),
        answer_rows(logits, labels).logits.double().softmax(-1),
    )
    by_hand = [
        sum(a * math.log(a / b) for a, b in zip(x, y, strict=True)) for x, y in zip(p.tolist(), q.tolist(), strict=True)
    ]
    rows = answer_rows(logits, labels)
    log_probs = answer_rows(frozen, labels).logits.log_softmax(-1)
    assert token_kl(rows, log_probs).tolist() == pytest.approx(by_hand, rel=1e-4)
    # Forward KL: the other direction is another number.
    assert token_kl(rows, log_probs).mean().item() != pytest.approx(float((q * (q / p).log()).sum(-1).mean()), rel=1e-2)


# Theorems


def test_at_the_reference_npo_is_a_constant_and_kl_is_zero():
    logits, labels = _random()
    rows = answer_rows(logits, labels)
    nll = sequence_nll(rows)
    torch.testing.assert_close(npo(nll, nll, 0.1), torch.full((4,), 20 * math.log(2)))
    assert token_kl(rows, rows.logits.log_softmax(-1)).abs().max() < 1e-6


def test_kl_is_never_negative():
    logits, labels = _random()
    frozen, _ = _random(seed=1)
    assert (token_kl(answer_rows(logits, labels), answer_rows(frozen, labels).logits.log_softmax(-1)) > 0).all()


def test_npo_gradient_raises_the_forget_nll():
    """∂/∂L = −2σ(β(L_ref − L)): negative everywhere, half of gradient ascent's at the reference, fading beyond it."""
    nll = torch.tensor([1.0, 5.0, 60.0], requires_grad=True)
    frozen = torch.tensor([5.0, 5.0, 5.0])
    npo(nll, frozen, 0.5).sum().backward()
    torch.testing.assert_close(nll.grad, -2 * torch.sigmoid(0.5 * (frozen - nll.detach())))
    assert nll.grad[0] < nll.grad[1] == -1 < nll.grad[2] < 0


def test_small_beta_is_gradient_ascent():
    """npo − (2/β) ln 2 → L_ref − L for β → 0 (arXiv 2404.05868, Prop. 1)."""
    nll, frozen = torch.tensor([3.0, 1.0], dtype=torch.float64), torch.tensor([2.0, 4.0], dtype=torch.float64)
    beta = 1e-6
    torch.testing.assert_close(npo(nll, frozen, beta) - 2 / beta * math.log(2), frozen - nll, rtol=1e-4, atol=1e-4)


def test_npo_is_finite_far_from_the_reference():
    loss = npo(torch.tensor([0.0, 1e4]), torch.tensor([1e4, 0.0]), 1.0)
    torch.testing.assert_close(loss, torch.tensor([2e4, 0.0]))


# Layout


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side):
    logits, labels = _random()
    filler = torch.full((4, 5, 11), 1e4)
    ignored = torch.full((4, 5), -100)
    order = (filler, logits) if side == "left" else (logits, filler)
    padded = answer_rows(torch.cat(order, 1), torch.cat((ignored, labels) if side == "left" else (labels, ignored), 1))
    torch.testing.assert_close(sequence_nll(padded), sequence_nll(answer_rows(logits, labels)), rtol=0, atol=0)


def test_prompt_logits_have_no_part_in_the_loss():
    logits, labels = _random()
    predicts = torch.zeros_like(labels, dtype=torch.bool)
    predicts[:, :-1] = labels[:, 1:] != -100
    changed = torch.where(predicts[..., None], logits, -logits)
    torch.testing.assert_close(sequence_nll(answer_rows(changed, labels)), sequence_nll(answer_rows(logits, labels)))
    # and the answer's do
    changed = torch.where(predicts[..., None], -logits, logits)
    assert (sequence_nll(answer_rows(changed, labels)) - sequence_nll(answer_rows(logits, labels))).abs().min() > 0.1


def test_a_label_without_a_predecessor_is_left_out():
    sequence, position, targets = answer_positions(torch.tensor([[3, 4, -100], [-100, -100, 5]]))
    assert (sequence.tolist(), position.tolist(), targets.tolist()) == ([0, 1], [0, 1], [4, 5])


def test_sum_by_sequence_keeps_an_empty_sequence_and_gradients():
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    sums = sum_by_sequence(values, torch.tensor([0, 2, 2]), 3)
    assert sums.tolist() == [1.0, 0.0, 6.0]
    (sums * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert values.grad.tolist() == [1.0, 3.0, 3.0]


def test_losses_are_in_float32_for_half_precision_logits():
    logits, labels = _random()
    half = answer_rows(logits.bfloat16(), labels)
    assert sequence_nll(half).dtype == torch.float32
    torch.testing.assert_close(sequence_nll(half), sequence_nll(answer_rows(logits.bfloat16().float(), labels)))


def test_kl_refuses_a_distribution_over_other_tokens():
    rows = answer_rows(*_random())
    with pytest.raises(ValueError, match="reference_log_probs.*same tokens"):
        token_kl(rows, rows.logits[1:])
