"""Unlearning losses as pure functions of logits, labels and cached reference quantities.

Notation: y the answer tokens of a sequence, z the logits that predict one of them, p the probability they give it,
L = −Σ_t log π(y_t | ·) the answer's NLL **summed** over its tokens, ℓ the mean over answer tokens, sg a weight without
gradient, θ the model in training, ref the frozen one; f, r the forget and the retain part, w, l the chosen and the
rejected answer. Every loss is to be minimised.

================  =======================================================================  ===========================
method            loss                                                                     source (arXiv)
================  =======================================================================  ===========================
gradient_ascent   −ℓ_f                                                                     2401.06121, Sec. 4.1
grad_diff         −ℓ_f + α ℓ_r                                                             2401.06121, Sec. 4.1
kl_min            −ℓ_f + α KL_r(ref ‖ θ)                                                   2401.06121, Sec. 4.1
npo               (2/β) softplus(β (L_ref − L)), + α ℓ_r or α KL_r                         2404.05868, Eq. 3
simnpo            (2/β) softplus(−β (L/|y| − δ)), + α ℓ_r                                  2410.07163
dpo               −log σ(β [(L_l − L_l,ref) − (L_w − L_w,ref)])                            2305.18290, Eq. 7
wga               −sg(p^β) NLL                                                             2502.19301
satimp            −sg(p^β₁ (1 − p)^β₂) NLL                                                 2505.11953, Sec. 5
undial            cross entropy with softmax(z_ref − strength · onehot(y))                 2402.10052
ce_u              cross entropy with sg(softmax(z, the label's logit at −∞))               2503.01224
rmu               MSE(h(x_f), c u) + α MSE(h(x_r), h_ref(x_r))                             2403.03218, Sec. 4
rmu, adaptive     the same with c = β ‖h_ref(x_f)‖, token by token                         2408.06223
whp               ℓ of the anonymised answers                                              2611.05272; no function
whp_reinforced    ℓ of the labels argmax(v_base − α ReLU(v_reinforced − v_base))           2310.02238, Sec. 2.1
task_vector       none: an operation on weights, θ − α (θ_reinforced − θ)                  2212.04089
================  =======================================================================  ===========================

grad_diff and kl_min are sums of the terms below and have no function of their own. Losses whose mean goes over
sequences (npo, simnpo, dpo) are returned a sequence, [B]; those whose mean goes over answer tokens (gradient_ascent,
wga, satimp, undial, ce_u, KL and NLL) a token, [n]; those of rmu are sums over a sequence's tokens, [B]. The mean is
taken by whoever knows all the sequences and tokens of the step.

Losses are written on :class:`trainers.answer_rows.AnswerRows`, the logits at the positions that predict an answer token
and nothing else: a trainer computes only these. Losses are computed in float32.
"""

from __future__ import annotations

import math

import torch
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
    _check_distributions(reference_log_probs, rows)
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


def gradient_ascent(rows: AnswerRows) -> Tensor:
    """−NLL of every forget answer token: [n] float32, nats, in (−∞, 0].

    Notes
    -----
    −ℓ_f when averaged over answer tokens (TOFU, arXiv 2401.06121, Sec. 4.1). grad_diff adds α ℓ_r (:func:`token_nll` on
    the retain part), kl_min adds α KL_r (:func:`token_kl`).

    Sign: descending the loss **raises** the forget NLL, without bound: ∂/∂NLL = −1 however unlikely the token is by
    then.
    """
    return -token_nll(rows)


def simnpo(nll: Tensor, n_tokens: Tensor, beta: float, delta: float = 0.0) -> Tensor:
    """Simple (reference-free, length-normalised) negative preference optimisation loss of each forget sequence.

    Parameters
    ----------
    nll : Tensor [B]
        L, the NLL **sum** over the answer.
    n_tokens : Tensor [B]
        |y| ≥ 1, the answer's tokens.
    beta : float > 0
        Inverse temperature.
    delta : float, default 0.0
        The NLL a token (nats) around which a sequence is let go of; it stands where NPO has the reference.

    Returns
    -------
    Tensor [B], in (0, ∞). The mean over forget sequences is minimised.

    Notes
    -----
    (2/β) softplus(−β (L/|y| − δ)) = −(2/β) log σ(β (L/|y| − δ)), Fan et al., arXiv 2410.07163; the paper's margin
    is γ = β δ.

    Sign: ∂/∂L = −(2/|y|) σ(−β (L/|y| − δ)) < 0, so descending the loss **raises** the forget NLL.
    """
    return (2.0 / beta) * F.softplus(-beta * (nll / n_tokens - delta))


def dpo(
    chosen_nll: Tensor,
    chosen_reference_nll: Tensor,
    rejected_nll: Tensor,
    rejected_reference_nll: Tensor,
    beta: float,
) -> Tensor:
    """Direct preference optimisation loss of each pair of answers.

    Parameters
    ----------
    chosen_nll, chosen_reference_nll : Tensor [B]
        L_w and L_w,ref: NLL **sums** of the answer to prefer (a refusal, an alternate answer, or a retain pair).
    rejected_nll, rejected_reference_nll : Tensor [B]
        L_l and L_l,ref: those of the answer to forget.
    beta : float > 0
        Inverse temperature.

    Returns
    -------
    Tensor [B], in (0, ∞); ln 2 where θ = ref. The mean over pairs is minimised.

    Notes
    -----
    −log σ(β [(L_l − L_l,ref) − (L_w − L_w,ref)]), Rafailov et al., arXiv 2305.18290, Eq. 7, with log π = −L. Some
    unlearning code multiplies it by NPO's factor 2/β; this one does not.

    Sign: ∂/∂L_l = −∂/∂L_w < 0, so descending the loss **raises** the NLL of the rejected (forget) answer and lowers
    that of the chosen one.
    """
    log_ratio = (rejected_nll - rejected_reference_nll) - (chosen_nll - chosen_reference_nll)
    return F.softplus(-beta * log_ratio)


def wga(rows: AnswerRows, beta: float) -> Tensor:
    """Weighted gradient ascent loss of every forget answer token.

    Parameters
    ----------
    rows : AnswerRows
    beta : float ≥ 0
        0 is gradient ascent; a larger β lets go of unlikely tokens sooner.

    Returns
    -------
    Tensor [n] float32, in (−∞, 0]; in [−1/(eβ), 0] for β > 0. The mean over answer tokens is minimised.

    Notes
    -----
    −sg(p^β) NLL with p = π(y_t | ·), Wang et al., arXiv 2502.19301 (their α is β here).

    Sign: ∂/∂NLL = −p^β < 0, so descending the loss **raises** the forget NLL, ever more slowly. It is the missing
    gradient of the weight that makes it so: with it the derivative is −p^β (1 − β NLL), which lowers the NLL of every
    token already beyond 1/β.
    """
    nll = token_nll(rows)
    # p^β as exp(−β NLL): p itself underflows at an NLL of about 100, where p^β need not be small.
    return -(-beta * nll.detach()).exp() * nll


def satimp(rows: AnswerRows, beta1: float, beta2: float) -> Tensor:
    """Saturation- and importance-weighted gradient ascent loss of every forget answer token.

    Parameters
    ----------
    rows : AnswerRows
    beta1 : float ≥ 0
        Saturation: a larger one leaves tokens alone that are unlikely already.
    beta2 : float ≥ 0
        Importance: a larger one leaves tokens alone that are all but certain (mostly function words).

    Returns
    -------
    Tensor [n] float32, in (−∞, 0]. The mean over answer tokens is minimised. (0, 0) is gradient ascent, (β, 0) is WGA.

    Notes
    -----
    −sg(p^β₁ (1 − p)^β₂) NLL with p = π(y_t | ·), Yang et al., arXiv 2505.11953, Sec. 5.

    Sign: ∂/∂NLL = −p^β₁ (1 − p)^β₂ ≤ 0, so descending the loss **raises** the forget NLL.
    """
    nll = token_nll(rows)
    log_p = -nll.detach()
    return -(beta1 * log_p).exp() * (1.0 - log_p.exp()).pow(beta2) * nll


def undial(rows: AnswerRows, reference_log_probs: Tensor, strength: float) -> Tensor:
    """Self-distillation loss of every forget answer token, towards the frozen model with the answer played down.

    Parameters
    ----------
    rows : AnswerRows
    reference_log_probs : Tensor [n, V], float32
        log-softmax of the frozen model at the same positions.
    strength : float ≥ 0
        What is taken from the frozen model's logit of the answer token.

    Returns
    -------
    Tensor [n] float32, nats, from the target's entropy (where θ is the target) to ∞. The mean over answer tokens is
    minimised.

    Notes
    -----
    −Σ_v q_v log p_v with q = softmax(z_ref − strength · onehot(y)), Dong et al., arXiv 2402.10052. Log-probabilities
    serve as z_ref: they differ from the logits by a constant a row, and softmax does not see it. Published code also
    averages over prompt and padding positions, where it plays down a token that is none of the answer's.

    Sign: ∂/∂z = p − q. From the reference, descending the loss **raises** the forget NLL until p = q, and no further:
    the target is fixed and p_y does not fall below q_y. A label less likely than q_y is pulled back up.
    """
    _check_distributions(reference_log_probs, rows)
    label = rows.targets[:, None]
    adjusted = reference_log_probs.detach().float()
    adjusted = adjusted.scatter(1, label, adjusted.gather(1, label) - strength)
    return F.cross_entropy(rows.logits.float(), adjusted.softmax(-1), reduction="none")


def ce_u(rows: AnswerRows) -> Tensor:
    """Cross-entropy unlearning loss of every forget answer token.

    Returns
    -------
    Tensor [n] float32, nats, in [0, ∞). The mean over answer tokens is minimised.

    Notes
    -----
    −Σ_v q_v log p_v with q = sg(softmax(z with the label's logit at −∞)), the model's own distribution over all other
    tokens, Yang, arXiv 2503.01224. The target carries no gradient. In value it is H(q) − log(1 − p_y); its gradient is
    that of −log(1 − p_y) alone.

    Sign: ∂/∂z_y = p_y > 0 and ∂/∂z_v < 0 elsewhere, so descending the loss **raises** the forget NLL; most where the
    label is certain, where gradient ascent has next to no gradient, and ever less as it becomes unlikely.
    """
    logits = rows.logits.float()
    others = logits.detach().scatter(1, rows.targets[:, None], -math.inf)
    return F.cross_entropy(logits, others.softmax(-1), reduction="none")


def rmu_forget(states: Tensor, mask: Tensor, direction: Tensor, coefficient: float | Tensor) -> Tensor:
    """Squared distance of a forget batch's hidden states from one random direction.

    Parameters
    ----------
    states : Tensor [B, T, d]
        Hidden states h of the model in training at one layer, any floating dtype. Padding may hold anything, inf and
        nan included: it has no influence and no gradient.
    mask : Tensor [B, T], bool
        True at tokens, False at padding.
    direction : Tensor [d]
        Unit vector u, on the device of `states`; see :func:`random_direction`.
    coefficient : float or Tensor [B, T]
        c, the length of the target. One a token makes it adaptive: c = β ‖h_ref(x_f)‖.

    Returns
    -------
    Tensor [B] float32, in [0, ∞): the **sum** over tokens of the mean over dimensions of (h − c u)². Divided by the
    number of tokens it is the MSE that is minimised.

    Raises
    ------
    ValueError
        Where shapes or the mask's dtype do not fit.

    Notes
    -----
    Li et al., arXiv 2403.03218, Sec. 4; adaptive coefficient: Huu-Tien et al., arXiv 2408.06223. MSE means the mean
    over tokens **and** dimensions, as in the published code; the papers' formulas sum over dimensions, which scales
    forget and retain terms alike.

    Sign: ∂/∂h = 2 (h − c u) / d, so descending the loss moves h towards c u. The forget NLL rises because later layers
    cannot read c u, not by construction.
    """
    _check_states(states, mask)
    if isinstance(coefficient, Tensor):
        if coefficient.shape not in (torch.Size(), mask.shape):
            raise ValueError(
                f"`coefficient` must be one number, or one a token {tuple(mask.shape)}, got a tensor of shape "
                f"{tuple(coefficient.shape)}"
            )
        coefficient = coefficient.float()[..., None]
    return _squared_distance(states, coefficient * direction.float(), mask)


def rmu_retain(states: Tensor, reference_states: Tensor, mask: Tensor) -> Tensor:
    """Squared distance of a retain batch's hidden states from those of the frozen model.

    Parameters
    ----------
    states : Tensor [B, T, d]
        Hidden states h of the model in training, as in :func:`rmu_forget`.
    reference_states : Tensor [B, T, d]
        Those of the frozen model, at the same layer on the same tokens.
    mask : Tensor [B, T], bool
        True at tokens, False at padding, which has no influence and no gradient.

    Returns
    -------
    Tensor [B] float32, in [0, ∞), 0 where both agree: the **sum** over tokens of the mean over dimensions of
    (h − h_ref)². Divided by the number of tokens it is the MSE that is minimised.

    Raises
    ------
    ValueError
        Where shapes or the mask's dtype do not fit.

    Notes
    -----
    Li et al., arXiv 2403.03218, Sec. 4. Sign: ∂/∂h = 2 (h − h_ref) / d, so descending the loss brings the retain
    states back to the frozen model's.
    """
    _check_states(states, mask)
    if reference_states.shape != states.shape:
        raise ValueError(
            f"`reference_states` must have the shape of `states` {tuple(states.shape)}, got "
            f"{tuple(reference_states.shape)}; compute them on the same tokens at the same layer"
        )
    return _squared_distance(states, reference_states.detach().float(), mask)


def random_direction(d: int, seed: int) -> Tensor:
    """A random unit vector: [d] float32 on the CPU, the same for a seed whatever the device and the global RNG.

    Notes
    -----
    x / ‖x‖ with x ~ N(0, I): every direction is equally likely. The published RMU code (arXiv 2403.03218) draws x from
    U[0, 1)^d, where all directions have a cosine of about 0.87 with (1, …, 1).
    """
    x = torch.randn(d, generator=torch.Generator().manual_seed(seed))
    return x / x.norm()


def generic_labels(base_log_probs: Tensor, reinforced_log_probs: Tensor, alpha: float) -> Tensor:
    """The tokens that a model would say if it had not read what the reinforced model read more of.

    Parameters
    ----------
    base_log_probs, reinforced_log_probs : Tensor [n, V]
        log-softmax, at the same positions, of the frozen model and of that model trained further on the forget text.
    alpha : float ≥ 0
        How much a token loses for each nat it gained by the further training. 0 gives the frozen model's own choice.

    Returns
    -------
    Tensor [n], int64
        Labels in place of the answer's tokens; whp_reinforced minimises their NLL.

    Notes
    -----
    argmax_v [v_base − α ReLU(v_reinforced − v_base)], Eldan & Russinovich, arXiv 2310.02238, Sec. 2.1. There v are raw
    logits. ReLU sees a constant added to a row of logits, which changes nothing that the model says; so v are
    log-probabilities here, of which there is only one form, and a token is penalised where its **probability** rose.

    Sign: descending the NLL of these labels raises the forget NLL where they differ from the answer, and lowers it
    where they agree with it.
    """
    if base_log_probs.shape != reinforced_log_probs.shape:
        raise ValueError(
            f"`reinforced_log_probs` must have the shape of `base_log_probs` {tuple(base_log_probs.shape)}, got "
            f"{tuple(reinforced_log_probs.shape)}; compute both on the same tokens"
        )
    base = base_log_probs.float()
    generic = base - alpha * (reinforced_log_probs.float() - base).relu()
    # A token that the base model excludes is no label, also where both do and the difference is nan.
    return generic.masked_fill(base == -math.inf, -math.inf).argmax(-1)


def _squared_distance(states: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    # Padding leaves before the square: 0 · nan would be nan, in the gradient too.
    difference = (states.float() - target).masked_fill(~mask[..., None], 0.0)
    return difference.square().mean(-1).sum(1)


def _check_states(states: Tensor, mask: Tensor) -> None:
    if mask.dtype != torch.bool or mask.shape != states.shape[:-1]:
        raise ValueError(
            f"`mask` must be bool of shape {tuple(states.shape[:-1])}, got {mask.dtype} of shape {tuple(mask.shape)}; "
            "give attention_mask.bool() of the same batch"
        )


def _check_distributions(reference_log_probs: Tensor, rows: AnswerRows) -> None:
    if reference_log_probs.shape != rows.logits.shape:
        raise ValueError(
            f"`reference_log_probs` must have the shape of the answer rows {tuple(rows.logits.shape)}, got "
            f"{tuple(reference_log_probs.shape)}; compute it on the same tokens"
        )
