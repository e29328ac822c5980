"""Unlearning losses as pure functions of logits, labels and cached reference quantities.

Notation: y the answer tokens of a sequence, L = −Σ_t log π(y_t | ·) its NLL **summed** over answer tokens, ℓ the mean
over answer tokens, θ the model in training, ref the frozen one. Every loss is to be minimised.

Losses are written on :class:`trainers.answer_rows.AnswerRows`, the logits at the positions that predict an answer token
and nothing else: a trainer computes only these. Losses are computed in float32.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from trainers.answer_rows import AnswerRows, sum_by_sequence


def token_nll(rows: AnswerRows) -> Tensor:
    """−log π(y_t | ·) of every answer token: [n] float32, nats, in [0, ∞)."""
    return F.cross_entropy(rows.logits.float(), rows.targets, reduction="none")


def sequence_nll(rows: AnswerRows) -> Tensor:
    """L, the answer's NLL summed over its tokens: [n_sequences] float32, nats, in [0, ∞)."""
    return sum_by_sequence(token_nll(rows), rows.sequence, rows.n_sequences)


def token_kl(rows: AnswerRows, reference_log_probs: Tensor) -> Tensor:
    """KL(ref ‖ θ) at every answer token: [n] float32, nats, in [0, ∞), 0 where both agree.

    Parameters
    ----------
    rows : AnswerRows
    reference_log_probs : Tensor [n, V], float32
        log-softmax of the frozen model at the same positions.

    Notes
    -----
    Σ_v p_ref(v) (log p_ref(v) − log p_θ(v)): the forward KL of KL minimisation (TOFU, arXiv 2401.06121, Sec. 4.1) and
    of NPO+KL (arXiv 2404.05868, Sec. 5). Published code often averages it over prompt and padding positions, too.
    """
    if reference_log_probs.shape != rows.logits.shape:
        raise ValueError(
            f"`reference_log_probs` must have the shape of the answer rows {tuple(rows.logits.shape)}, got "
            f"{tuple(reference_log_probs.shape)}; compute it on the same tokens"
        )
    log_probs = rows.logits.float().log_softmax(-1)
    return F.kl_div(log_probs, reference_log_probs.float(), reduction="none", log_target=True).sum(-1)


def npo(nll: Tensor, reference_nll: Tensor, beta: float) -> Tensor:
    """Negative preference optimisation loss of each forget sequence.

    Parameters
    ----------
    nll, reference_nll : Tensor [B]
        L_θ and L_ref: NLL **sums** over the answer, of the model and of the frozen reference.
    beta : float > 0
        Inverse temperature. β → 0 is gradient ascent (up to a constant); a larger β lets go of a sequence sooner.

    Returns
    -------
    Tensor [B], in (0, ∞); (2/β) ln 2 where θ = ref. The mean over forget sequences is minimised.

    Notes
    -----
    (2/β) log(1 + (π_θ(y|x) / π_ref(y|x))^β), Zhang et al., arXiv 2404.05868, Eq. 3. With log π = −L the ratio is
    log(π_θ/π_ref) = L_ref − L_θ, so the loss is (2/β) softplus(β (L_ref − L_θ)) = −(2/β) log σ(β (L_θ − L_ref)).

    Sign: ∂/∂L_θ = −2 σ(β (L_ref − L_θ)) < 0, so descending the loss **raises** the forget NLL. Code that passes the
    NLL difference L_θ − L_ref where the log ratio belongs lowers it instead.
    """
    return (2.0 / beta) * F.softplus(beta * (reference_nll - nll))
