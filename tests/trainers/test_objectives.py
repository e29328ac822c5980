from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from trainers.answer_rows import AnswerRows, answer_positions, answer_rows, sum_by_sequence
from trainers.objectives import (
    ce_u,
    dpo,
    generic_labels,
    gradient_ascent,
    npo,
    random_direction,
    rmu_forget,
    rmu_retain,
    satimp,
    sequence_nll,
    simnpo,
    token_kl,
    token_nll,
    undial,
    wga,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "fixtures" / "unlearning_losses.json").read_text())
EXPECTED = GOLDEN["expected"]


def _golden(part: str, which: str = "logits", labels: str | None = None) -> AnswerRows:
    return answer_rows(torch.tensor(GOLDEN[part][which]), torch.tensor(GOLDEN[labels or part]["labels"]))


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


def _golden_nll(part: str, which: str = "logits", labels: str | None = None) -> torch.Tensor:
    return sequence_nll(_golden(part, which, labels))


def _frozen(part: str) -> torch.Tensor:
    return _golden(part, "reference_logits").logits.log_softmax(-1)


# Means over sequences for npo, simnpo and dpo, over all answer tokens of the batch for the others.
COMPUTED = {
    "sequence_nll_forget": lambda: _golden_nll("forget"),
    "sequence_nll_forget_reference": lambda: _golden_nll("forget", "reference_logits"),
    "gradient_ascent": lambda: gradient_ascent(_golden("forget")).mean(),
    "retain_nll": lambda: token_nll(_golden("retain")).mean(),
    "npo_beta0.1": lambda: npo(_golden_nll("forget"), _golden_nll("forget", "reference_logits"), 0.1).mean(),
    "npo_beta0.5": lambda: npo(_golden_nll("forget"), _golden_nll("forget", "reference_logits"), 0.5).mean(),
    "dpo_beta0.1_open_unlearning_scale_2_over_beta": lambda: (
        2
        / 0.1
        * dpo(
            _golden_nll("alternate"),
            _golden_nll("alternate", "reference_logits"),
            # The value in the file is that of the forget labels under the **alternate** logits, not under their own.
            _golden_nll("alternate", labels="forget"),
            _golden_nll("alternate", "reference_logits", labels="forget"),
            0.1,
        ).mean()
    ),
    "simnpo_beta4.5_delta0": lambda: simnpo(
        _golden_nll("forget"), _golden("forget").sequence.bincount(), 4.5, 0.0
    ).mean(),
    "wga_beta1": lambda: wga(_golden("forget"), 1.0).mean(),
    "satimp_beta5_1": lambda: satimp(_golden("forget"), 5.0, 1.0).mean(),
    "retain_kl_ref_to_model_mean_over_answer_tokens": lambda: token_kl(_golden("retain"), _frozen("retain")).mean(),
    "undial_beta10_answer_tokens_only": lambda: undial(_golden("forget"), _frozen("forget"), 10.0).mean(),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_golden(name):
    # Relative too: two of the values are themselves not far from 1e-5.
    torch.testing.assert_close(COMPUTED[name](), torch.tensor(EXPECTED[name]), atol=0, rtol=1e-5)
    assert max(abs(COMPUTED[name]() - torch.tensor(EXPECTED[name])).reshape(-1).tolist()) < 1e-5


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


def _layout(side: str, seed: int = 0):
    """Logits, frozen logits and labels, unpadded or with padding that holds nan."""
    logits, labels = _random(seed=seed)
    frozen, _ = _random(seed=seed + 100)
    if side != "none":
        nothing, ignored = torch.full((4, 5, 11), math.nan), torch.full((4, 5), -100)

        def pad(x, filler):
            return torch.cat((filler, x) if side == "left" else (x, filler), 1)

        logits, frozen, labels = pad(logits, nothing), pad(frozen, nothing), pad(labels, ignored)
    return logits, frozen, labels


def _softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(z) for z in row)
    return [math.exp(z) / total for z in row]


def _wga_by_hand(row, frozen, y):
    p = _softmax(row)[y]
    return p**0.7 * math.log(p)


def _satimp_by_hand(row, frozen, y):
    p = _softmax(row)[y]
    return p**0.4 * (1 - p) ** 1.5 * math.log(p)


def _undial_by_hand(row, frozen, y):
    target = _softmax([z - 3.0 * (v == y) for v, z in enumerate(frozen)])
    return -sum(q * math.log(p) for q, p in zip(target, _softmax(row), strict=True))


def _ce_u_by_hand(row, frozen, y):
    p = _softmax(row)
    return -sum(p[v] / (1 - p[y]) * math.log(p[v]) for v in range(len(p)) if v != y)


# loss, and the same of one token, in double precision: (logits, frozen logits, label)
TOKEN_LOSSES = {
    "gradient_ascent": (lambda rows, frozen: gradient_ascent(rows), lambda row, frozen, y: math.log(_softmax(row)[y])),
    "wga": (lambda rows, frozen: wga(rows, 0.7), _wga_by_hand),
    "satimp": (lambda rows, frozen: satimp(rows, 0.4, 1.5), _satimp_by_hand),
    "undial": (lambda rows, frozen: undial(rows, frozen, 3.0), _undial_by_hand),
    "ce_u": (lambda rows, frozen: ce_u(rows), _ce_u_by_hand),
}
SEQUENCE_LOSSES = {
    "simnpo": (
        lambda nll, frozen, n: simnpo(nll, n, 2.5, 0.4),
        lambda nll, frozen, n: -2 / 2.5 * math.log(1 / (1 + math.exp(-2.5 * (nll / n - 0.4)))),
    ),
    "npo": (
        lambda nll, frozen, n: npo(nll, frozen, 0.3),
        lambda nll, frozen, n: 2 / 0.3 * math.log(1 + (math.exp(-nll) / math.exp(-frozen)) ** 0.3),
    ),
    # the next sequence of the batch is the chosen answer
    "dpo": (
        lambda nll, frozen, n: dpo(nll.roll(-1), frozen.roll(-1), nll, frozen, 0.3),
        None,
    ),
}


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_token_losses_by_loops(name, side):
    loss, by_hand = TOKEN_LOSSES[name]
    logits, frozen, labels = _layout(side)
    expected = [
        by_hand(logits[i, t - 1].double().tolist(), frozen[i, t - 1].double().tolist(), labels[i, t].item())
        for i in range(labels.shape[0])
        for t in range(1, labels.shape[1])
        if labels[i, t] != -100
    ]
    logits.requires_grad_()
    values = loss(answer_rows(logits, labels), answer_rows(frozen, labels).logits.log_softmax(-1))
    assert values.dtype == torch.float32
    assert values.tolist() == pytest.approx(expected, rel=2e-5, abs=1e-7)
    # Nothing but the rows that predict an answer token has a gradient, nan elsewhere or not.
    values.sum().backward()
    predicts = F.pad(labels[:, 1:] != -100, (0, 1))
    assert (logits.grad[~predicts] == 0).all() and (logits.grad[predicts].abs().amax(-1) > 0).all()


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", SEQUENCE_LOSSES)
def test_sequence_losses_by_loops(name, side):
    loss, by_hand = SEQUENCE_LOSSES[name]
    logits, frozen, labels = _layout(side)
    answer = [[t for t, y in enumerate(row) if t and y != -100] for row in labels.tolist()]

    def nll(which):
        return [
            sum(-math.log(_softmax(which[i, t - 1].double().tolist())[labels[i, t].item()]) for t in answer[i])
            for i in range(4)
        ]

    model, reference = nll(logits), nll(frozen)
    if name == "dpo":
        ratio = [reference[i] - model[i] for i in range(4)]  # log π_θ / π_ref
        expected = [-math.log(1 / (1 + math.exp(-0.3 * (ratio[(i + 1) % 4] - ratio[i])))) for i in range(4)]
    else:
        expected = [by_hand(model[i], reference[i], len(answer[i])) for i in range(4)]
    rows = answer_rows(logits, labels)
    values = loss(sequence_nll(rows), sequence_nll(answer_rows(frozen, labels)), rows.sequence.bincount())
    assert values.dtype == torch.float32
    assert values.tolist() == pytest.approx(expected, rel=2e-5)


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


# Which way descending moves the model


def _rows(seed: int = 0, n: int = 12, scale: float = 2.0, dtype=torch.float32) -> AnswerRows:
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(n, 11, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.randint(11, (n,), generator=generator)
    targets[::2] = logits[::2].argmax(-1)  # likely labels and unlikely ones in turn
    return AnswerRows(logits, targets, torch.arange(n) // 3, n // 3)


def _descend(loss, rows: AnswerRows, step: float = 0.05) -> AnswerRows:
    """One step of steepest descent on the logits, every row by the same length."""
    logits = rows.logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(rows._replace(logits=logits)).sum(), logits)
    return rows._replace(logits=rows.logits - step * gradient / gradient.abs().amax(-1, keepdim=True))


@pytest.mark.parametrize(
    "loss",
    [
        gradient_ascent,
        lambda rows: wga(rows, 1.0),
        lambda rows: satimp(rows, 5.0, 1.0),
        ce_u,
        lambda rows: npo(sequence_nll(rows), torch.tensor([2.0, 5.0, 9.0, 30.0]), 0.1),
        lambda rows: simnpo(sequence_nll(rows), torch.full((4,), 3), 2.5, 0.0),
    ],
    ids=["gradient_ascent", "wga", "satimp", "ce_u", "npo", "simnpo"],
)
def test_descending_raises_the_nll_of_every_forget_token(loss):
    rows = _rows()
    assert (token_nll(_descend(loss, rows)) > token_nll(rows) + 1e-3).all()


def test_descending_the_nll_lowers_it():
    """The control of the test above: it can fail."""
    rows = _rows()
    assert (token_nll(_descend(token_nll, rows)) < token_nll(rows) - 1e-3).all()
    # and so does NPO with the NLL difference where the log ratio belongs
    swapped = _descend(lambda rows: npo(torch.full((4,), 6.0), sequence_nll(rows), 0.1), rows)
    assert (token_nll(swapped) < token_nll(rows)).all()


def test_dpo_raises_the_rejected_and_lowers_the_chosen():
    chosen, rejected = torch.tensor([3.0, 40.0], requires_grad=True), torch.tensor([2.0, 1.0], requires_grad=True)
    frozen_chosen, frozen_rejected = torch.tensor([3.0, 5.0]), torch.tensor([2.0, 6.0])
    dpo(chosen, frozen_chosen, rejected, frozen_rejected, 0.5).sum().backward()
    assert (rejected.grad < 0).all() and (chosen.grad > 0).all()
    log_ratio = (frozen_chosen - chosen) - (frozen_rejected - rejected)
    torch.testing.assert_close(chosen.grad, 0.5 * torch.sigmoid(-0.5 * log_ratio).detach())
    torch.testing.assert_close(rejected.grad, -chosen.grad)


def test_simnpo_gradient():
    """∂/∂L = −(2/|y|) σ(−β(L/|y| − δ))."""
    nll, n = torch.tensor([0.5, 4.0, 60.0], requires_grad=True), torch.tensor([1, 2, 10])
    simnpo(nll, n, 1.5, 2.0).sum().backward()
    expected = [-2 / k / (1 + math.exp(1.5 * (x / k - 2.0))) for x, k in zip([0.5, 4.0, 60.0], [1, 2, 10], strict=True)]
    assert nll.grad.tolist() == pytest.approx(expected)


def test_undial_moves_the_label_to_its_target_from_either_side():
    rows, strength = _rows(), 2.0
    frozen = rows.logits.log_softmax(-1)
    label = F.one_hot(rows.targets, 11)
    target = (frozen - strength * label).softmax(-1)

    def loss(rows):
        return undial(rows, frozen, strength)

    # At the reference the label is more likely than in the target, and becomes less so.
    assert (token_nll(_descend(loss, rows)) > token_nll(rows)).all()
    # Far below the target it is pulled up again: the loss does not run away.
    below = rows._replace(logits=rows.logits - 9.0 * label)
    assert (token_nll(_descend(loss, below)) < token_nll(below)).all()
    for start in (rows, below):
        logits = start.logits.clone()
        for _ in range(800):
            logits.requires_grad_()
            (gradient,) = torch.autograd.grad(loss(rows._replace(logits=logits)).sum(), logits)
            logits = (logits - 3 * gradient).detach()
        torch.testing.assert_close(logits.softmax(-1), target, atol=2e-3, rtol=0)


# Weights and targets without a gradient


def _gradient(loss, rows: AnswerRows) -> torch.Tensor:
    logits = rows.logits.clone().requires_grad_()
    return torch.autograd.grad(loss(rows._replace(logits=logits)).sum(), logits)[0]


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        (lambda rows: wga(rows, 0.7), lambda p: p**0.7),
        (lambda rows: satimp(rows, 0.4, 1.5), lambda p: p**0.4 * (1 - p) ** 1.5),
    ],
    ids=["wga", "satimp"],
)
def test_weights_carry_no_gradient(loss, weight):
    rows = _rows()
    p = (-token_nll(rows)).exp()
    torch.testing.assert_close(_gradient(loss, rows), -weight(p)[:, None] * _gradient(token_nll, rows))

    def attached(rows):
        nll = token_nll(rows)
        return -weight((-nll).exp()) * nll

    torch.testing.assert_close(attached(rows), loss(rows))  # the same value,
    assert (_gradient(attached, rows) - _gradient(loss, rows)).abs().max() > 0.1  # another gradient


def test_wga_with_a_gradient_in_its_weight_would_lower_the_nll_of_unlikely_tokens():
    rows = _rows()
    nll = token_nll(rows)
    unlikely = nll > 1.0  # 1/β

    def attached(rows):
        nll = token_nll(rows)
        return -(-nll).exp() * nll

    moved = token_nll(_descend(attached, rows, 1e-2)) - nll
    assert unlikely.any() and (~unlikely).any()
    assert (moved[unlikely] < 0).all() and (moved[~unlikely] > 0).all()


def test_ce_u_gradient_is_that_of_the_labels_improbability():
    """∇ = ∇ −log(1 − p_y): p_y at the label, −p_v p_y / (1 − p_y) elsewhere. A target with gradient adds ∇H(q)."""
    rows = _rows()

    def improbability(rows):
        p = rows.logits.double().softmax(-1).gather(1, rows.targets[:, None])[:, 0]
        return -torch.log1p(-p)

    gradient = _gradient(ce_u, rows)
    torch.testing.assert_close(gradient, _gradient(improbability, rows))
    p_label = (-token_nll(rows)).exp()
    torch.testing.assert_close(gradient.gather(1, rows.targets[:, None])[:, 0], p_label)

    def attached(rows):
        others = rows.logits.scatter(1, rows.targets[:, None], -math.inf)
        return F.cross_entropy(rows.logits, others.softmax(-1), reduction="none")

    torch.testing.assert_close(attached(rows), ce_u(rows))
    assert (_gradient(attached, rows) - gradient).abs().max() > 0.1


def test_undial_reference_has_no_gradient():
    rows = _rows()
    frozen = _rows(seed=1).logits.log_softmax(-1).requires_grad_()
    logits = rows.logits.clone().requires_grad_()
    undial(rows._replace(logits=logits), frozen, 1.0).sum().backward()
    assert frozen.grad is None and logits.grad is not None


# Special cases in which one loss is another


def test_simnpo_is_npo_of_the_mean_nll_against_delta():
    nll, n = torch.tensor([0.5, 4.0, 60.0]), torch.tensor([1, 2, 10])
    torch.testing.assert_close(simnpo(nll, n, 1.5, 2.0), npo(nll / n, torch.full((3,), 2.0), 1.5))


def test_without_weights_wga_and_satimp_are_gradient_ascent():
    rows = _rows()
    for loss in (lambda rows: wga(rows, 0.0), lambda rows: satimp(rows, 0.0, 0.0)):
        torch.testing.assert_close(loss(rows), gradient_ascent(rows), rtol=0, atol=0)
        torch.testing.assert_close(_gradient(loss, rows), _gradient(gradient_ascent, rows), rtol=0, atol=0)
    torch.testing.assert_close(satimp(rows, 0.7, 0.0), wga(rows, 0.7))


def test_wga_is_bounded():
    """−1/(eβ) at NLL = 1/β, where p^β · NLL is greatest."""
    nll = torch.linspace(0, 30, 3001)
    rows = AnswerRows(
        torch.stack((-nll, torch.log(-torch.expm1(-nll))), 1),
        torch.zeros(3001, dtype=torch.long),
        torch.arange(3001),
        1,
    )
    assert wga(rows, 2.0).min().item() == pytest.approx(-1 / (2 * math.e), rel=1e-5)
    assert wga(rows, 2.0).argmin().item() == pytest.approx(50, abs=1)


def test_undial_of_strength_zero_keeps_the_reference():
    rows = _rows()
    frozen = rows.logits.log_softmax(-1)
    assert _gradient(lambda rows: undial(rows, frozen, 0.0), rows).abs().max() < 1e-6
    entropy = -(frozen.exp() * frozen).sum(-1)
    torch.testing.assert_close(undial(rows, frozen, 0.0), entropy)
    assert _gradient(lambda rows: undial(rows, frozen, 1.0), rows).abs().max() > 0.1


def test_undial_takes_raw_logits_as_well_as_log_probabilities():
    rows, frozen = _rows(), _rows(seed=1).logits
    torch.testing.assert_close(undial(rows, frozen + 7.0, 2.0), undial(rows, frozen.log_softmax(-1), 2.0))


def test_dpo_of_equal_answers_is_log_2():
    nll, frozen = torch.tensor([3.0, 70.0], requires_grad=True), torch.tensor([5.0, 1.0])
    loss = dpo(nll, frozen, nll, frozen, 0.3)
    torch.testing.assert_close(loss, torch.full((2,), math.log(2)))
    loss.sum().backward()
    assert nll.grad.abs().max() == 0


# Extremes


@pytest.mark.parametrize("gap", [-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_certain_and_impossible_tokens_have_finite_losses_and_gradients(name, gap):
    logits = torch.zeros(3, 11)
    targets = torch.tensor([0, 5, 10])
    logits[torch.arange(3), targets] = gap
    rows = AnswerRows(logits, targets, torch.arange(3), 3)
    frozen = (-logits).log_softmax(-1)  # the reference at the other extreme
    assert TOKEN_LOSSES[name][0](rows, frozen).isfinite().all()
    assert _gradient(lambda rows: TOKEN_LOSSES[name][0](rows, frozen), rows).isfinite().all()


def test_satimp_extremes():
    """0 · NLL at either end, also for exponents below 1, whose own gradient would be infinite."""
    rows = AnswerRows(torch.tensor([[1e4, 0.0], [-1e4, 0.0]]), torch.tensor([0, 0]), torch.tensor([0, 1]), 2)
    assert satimp(rows, 0.5, 0.5).tolist() == [0.0, 0.0]
    assert _gradient(lambda rows: satimp(rows, 0.5, 0.5), rows).abs().max() == 0


def test_weights_do_not_underflow_with_the_probability():
    rows = AnswerRows(torch.tensor([[-200.0, 0.0]]), torch.tensor([0]), torch.tensor([0]), 1)
    assert (-token_nll(rows)).exp().item() == 0.0
    expected = pytest.approx(-200 * math.exp(-2.0), rel=1e-5)
    assert wga(rows, 0.01).item() == expected
    assert satimp(rows, 0.01, 1.0).item() == expected


@pytest.mark.parametrize("gap", [3.0, 30.0, 300.0])
def test_ce_u_keeps_its_digits_where_the_label_is_certain(gap):
    logits = torch.tensor([[gap, 0.3, -0.4, 1.1]])
    rows = AnswerRows(logits, torch.tensor([0]), torch.tensor([0]), 1)
    others = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64)
    log_p = others - torch.cat((torch.tensor([gap], dtype=torch.float64), others)).logsumexp(0)
    assert ce_u(rows).item() == pytest.approx(-(others.softmax(0) * log_p).sum().item(), rel=1e-6)
    assert _gradient(ce_u, rows)[0, 0].item() == pytest.approx(1.0, abs=0.3)
    if gap > 20:  # where the same by way of 1 − p_y is lost in float32
        assert torch.log1p(-logits.softmax(-1)[0, 0]).isinf()


@pytest.mark.parametrize(
    "loss",
    [
        lambda nll: simnpo(nll, torch.tensor([1, 1, 7]), 4.5, 3.0),
        lambda nll: dpo(nll, torch.zeros(3), nll.flip(0), torch.zeros(3), 1.0),
        lambda nll: npo(nll, nll.detach().flip(0), 1.0),
    ],
    ids=["simnpo", "dpo", "npo"],
)
def test_extreme_sequences_have_finite_losses_and_gradients(loss):
    nll = torch.tensor([0.0, 1e5, 1e-8], requires_grad=True)
    values = loss(nll)
    values.sum().backward()
    assert values.isfinite().all() and nll.grad.isfinite().all()


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_half_precision_logits_give_float32_losses(name):
    loss, _ = TOKEN_LOSSES[name]
    rows = _rows(dtype=torch.bfloat16)
    frozen = _rows(seed=1).logits.log_softmax(-1)
    values = loss(rows, frozen)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, loss(rows._replace(logits=rows.logits.float()), frozen), rtol=0, atol=0)
    assert _gradient(lambda rows: loss(rows, frozen), rows).dtype == torch.bfloat16


# Hidden states


def _states(side: str = "right", dtype=torch.float32, filler: float = math.nan):
    """States [3, 6, 5], frozen states, mask; padding holds `filler`."""
    generator = torch.Generator().manual_seed(0)
    states, frozen = torch.randn(2, 3, 6, 5, generator=generator).to(dtype)
    lengths = torch.tensor([6, 4, 1])[:, None]
    position = torch.arange(6)
    mask = {"none": position < 9, "right": position < lengths, "left": position >= 6 - lengths}[side].expand(3, 6)
    for x in (states, frozen):
        x[~mask] = filler
    return states, frozen, mask


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("filler", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("adaptive", [False, True])
def test_rmu_by_loops(side, filler, adaptive):
    states, frozen, mask = _states(side, filler=filler)
    u = random_direction(5, seed=3)
    coefficient = 2.0 * frozen.norm(dim=-1) if adaptive else 6.5
    forget, retain = [0.0] * 3, [0.0] * 3
    for i in range(3):
        for t in range(6):
            if mask[i, t]:
                h, ref = states[i, t].double().tolist(), frozen[i, t].double().tolist()
                c = 2.0 * math.sqrt(sum(x * x for x in ref)) if adaptive else 6.5
                forget[i] += sum((x - c * v) ** 2 for x, v in zip(h, u.tolist(), strict=True)) / 5
                retain[i] += sum((x - y) ** 2 for x, y in zip(h, ref, strict=True)) / 5
    states.requires_grad_()
    values = rmu_forget(states, mask, u, coefficient), rmu_retain(states, frozen, mask)
    for value, expected in zip(values, (forget, retain), strict=True):
        assert value.dtype == torch.float32 and value.tolist() == pytest.approx(expected, rel=1e-5)
        (gradient,) = torch.autograd.grad(value.sum(), states)
        assert (gradient[~mask] == 0).all() and (gradient[mask].abs().amax(-1) > 0).all()


def test_rmu_over_the_number_of_tokens_is_the_mse():
    states, frozen, mask = _states()
    u = random_direction(5, seed=3)
    torch.testing.assert_close(
        rmu_forget(states, mask, u, 6.5).sum() / mask.sum(), F.mse_loss(states[mask], (6.5 * u).expand(11, 5))
    )
    torch.testing.assert_close(
        rmu_retain(states, frozen, mask).sum() / mask.sum(), F.mse_loss(states[mask], frozen[mask])
    )


def test_rmu_is_zero_at_its_targets_and_descends_to_them():
    states, frozen, mask = _states()
    u = random_direction(5, seed=3)
    assert rmu_retain(frozen, frozen, mask).tolist() == [0.0] * 3
    assert rmu_forget((6.5 * u).expand(3, 6, 5), mask, u, 6.5).tolist() == [0.0] * 3
    moving = states.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(rmu_forget(moving, mask, u, 6.5).sum(), moving)
    # A step of d/2 along −∂/∂h = −2(h − cu)/d ends at c u.
    torch.testing.assert_close((moving - 2.5 * gradient)[mask].detach(), (6.5 * u).expand(11, 5))


def test_rmu_in_half_precision_computes_in_float32():
    states, frozen, mask = _states(dtype=torch.bfloat16)
    u = random_direction(5, seed=3)
    values = rmu_forget(states, mask, u, 6.5), rmu_retain(states, frozen, mask)
    exact = rmu_forget(states.float(), mask, u, 6.5), rmu_retain(states.float(), frozen.float(), mask)
    torch.testing.assert_close(values, exact, rtol=0, atol=0)
    rounded = (states - (6.5 * u).bfloat16()).masked_fill(~mask[..., None], 0).square().mean(-1).sum(1)
    assert (rounded.float() - values[0]).abs().max() > 1e-3  # what is gained


def test_rmu_reference_states_have_no_gradient():
    states, frozen, mask = _states()
    states.requires_grad_()
    frozen.requires_grad_()
    rmu_retain(states, frozen, mask).sum().backward()
    assert frozen.grad is None and states.grad is not None


def test_rmu_refuses_what_does_not_fit():
    states, frozen, mask = _states("none")
    u = random_direction(5, seed=3)
    with pytest.raises(ValueError, match="`mask` must be bool.*int64.*attention_mask.bool"):
        rmu_forget(states, mask.long(), u, 1.0)
    with pytest.raises(ValueError, match="`mask` must be bool of shape"):
        rmu_retain(states, frozen, mask[:1])
    with pytest.raises(ValueError, match="`reference_states`.*same tokens"):
        rmu_retain(states, frozen[:, :4], mask)
    with pytest.raises(ValueError, match="`coefficient`.*one a token"):
        rmu_forget(states, mask, u, torch.ones(3))


def test_random_direction():
    u = random_direction(4096, seed=0)
    assert (u.dtype, u.device.type, u.shape) == (torch.float32, "cpu", (4096,))
    assert u.norm().item() == pytest.approx(1.0, abs=1e-6)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert torch.equal(random_direction(4096, seed=0), u)  # whatever the global RNG, which is left alone
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(state)
    # No direction is preferred: cosines of independent ones are N(0, 1/d), and so is that with (1, …, 1).
    assert abs(u @ random_direction(4096, seed=1)) < 5 / 64
    assert abs(u.mean() * 64) < 5 / 64


# Generic labels


def test_generic_labels_by_loops():
    base, reinforced = _rows(n=60).logits.log_softmax(-1), _rows(seed=1, n=60).logits.log_softmax(-1)
    expected = []
    for b, r in zip(base.double().tolist(), reinforced.double().tolist(), strict=True):
        generic = [x - 0.8 * max(y - x, 0.0) for x, y in zip(b, r, strict=True)]
        expected.append(generic.index(max(generic)))
    labels = generic_labels(base, reinforced, 0.8)
    assert labels.dtype == torch.int64 and labels.tolist() == expected
    assert (labels != base.argmax(-1)).any() and (labels == base.argmax(-1)).any()
    assert torch.equal(generic_labels(base, reinforced, 0.0), base.argmax(-1))


def test_generic_labels_leave_what_the_reinforced_model_learned():
    base = torch.tensor([[0.5, 0.4, 0.1], [0.5, 0.4, 0.1]]).log()
    reinforced = torch.tensor([[0.8, 0.15, 0.05], [0.4, 0.5, 0.1]]).log()
    assert generic_labels(base, reinforced, 5.0).tolist() == [1, 0]


def test_generic_labels_do_not_see_a_constant_added_to_logits():
    base, reinforced = _rows(n=60).logits, _rows(seed=1, n=60).logits

    def normalised(b, r):
        return generic_labels(b.log_softmax(-1), r.log_softmax(-1), 0.8)

    labels = normalised(base, reinforced)
    for constant in (-8.0, 8.0):
        assert torch.equal(normalised(base + constant, reinforced), labels)
        assert torch.equal(normalised(base, reinforced + constant), labels)
    # The formula on raw logits does.
    raw = (base - 0.8 * (reinforced - base).relu()).argmax(-1)
    shifted = (base - 0.8 * (reinforced - 8.0 - base).relu()).argmax(-1)
    assert (raw != shifted).any()


def test_generic_labels_pass_over_excluded_tokens():
    base, reinforced = torch.tensor([[-math.inf, -0.1, -3.0]]), torch.tensor([[-math.inf, -0.1, -3.0]])
    assert generic_labels(base, reinforced, 5.0).tolist() == [1]


def test_generic_labels_refuse_other_tokens():
    with pytest.raises(ValueError, match="`reinforced_log_probs`.*same tokens"):
        generic_labels(torch.zeros(2, 5), torch.zeros(3, 5), 1.0)


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
    with pytest.raises(ValueError, match="reference_log_probs.*same tokens"):
        undial(rows, rows.logits[1:], 1.0)
