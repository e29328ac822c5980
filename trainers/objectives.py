"""Unlearning losses as pure functions of logits, labels and cached reference quantities.

Notation: y the answer tokens of a sequence, L = −Σ_t log π(y_t | ·) its NLL **summed** over answer tokens, ℓ the mean
over answer tokens, θ the model in training, ref the frozen one. Every loss is to be minimised.

Losses are written on :class:`AnswerRows`, the logits at the positions that predict an answer token and nothing else:
a trainer computes only these, :func:`answer_rows` cuts them out of full logits. Losses are computed in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


class AnswerRows(NamedTuple):
    """The logits that predict answer tokens.

    Attributes
    ----------
    logits : Tensor [n, V]
        One row an answer token, sequences one after the other.
    targets : Tensor [n], int64
        The answer tokens.
    sequence : Tensor [n], int64
        The sequence (0..n_sequences-1) each row belongs to.
    n_sequences : int
    """

    logits: Tensor
    targets: Tensor
    sequence: Tensor
    n_sequences: int


def answer_positions(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where answer tokens are predicted.

    Parameters
    ----------
    labels : Tensor [B, T], int64
        The token at each position where it belongs to the answer, -100 elsewhere (prompt, padding on either side).

    Returns
    -------
    sequence, position : Tensors [n], int64
        Logits at ``[sequence, position]`` predict the label at ``[sequence, position + 1]``; in reading order.
    targets : Tensor [n], int64
        Those labels. A label at position 0 has nothing before it and is left out.
    """
    shifted = labels[:, 1:]
    sequence, position = (shifted != IGNORE).nonzero(as_tuple=True)
    return sequence, position, shifted[sequence, position]


def answer_rows(logits: Tensor, labels: Tensor) -> AnswerRows:
    """Cut the rows that predict answer tokens out of full logits [B, T, V] with labels [B, T] (-100: no answer)."""
    sequence, position, targets = answer_positions(labels)
    return AnswerRows(logits[sequence, position], targets, sequence, labels.shape[0])


def sum_by_sequence(values: Tensor, sequence: Tensor, n_sequences: int) -> Tensor:
    """Sum [n] values over the rows of each sequence: [n_sequences].

    A masked sum and not a scatter: atomic additions would make the loss differ from run to run on a GPU.
    """
    member = sequence == torch.arange(n_sequences, device=values.device)[:, None]
    return torch.where(member, values, 0.0).sum(1)


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
