"""Membership scores: how much an answer looks like one the model was trained on, from its tokens' log-probabilities.

All are oriented alike: higher means more like a member.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from monitor.geometry.answers import answer_nll
from monitor.geometry.auc import check_labels

# Below this spread (nats) all tokens are as likely as each other, or one is certain: a z-score would divide rounding.
_NO_SPREAD = 1e-6


def loss_score(log_probs: Sequence[Tensor]) -> Tensor:
    """LOSS: the token-mean log-likelihood of each answer.

    Parameters
    ----------
    log_probs : sequence of n Tensors, the i-th of shape (T_i,)
        log p(token | prompt, answer tokens before it), in nats.

    Returns
    -------
    Tensor of shape (n,), float64, in (-inf, 0] nats
        (1/T) Σ_t log p_t (Yeom et al., arXiv 1709.01604: members have the lower loss).

    Raises
    ------
    ValueError
        If there is no answer, or one has no tokens.
    """
    return -answer_nll(log_probs)


def zlib_score(log_probs: Sequence[Tensor], texts: Sequence[str]) -> Tensor:
    """The token-mean log-likelihood in units of the text's own complexity.

    Parameters
    ----------
    log_probs : as in :func:`loss_score`
    texts : sequence of n str
        The answers' texts.

    Returns
    -------
    Tensor of shape (n,), float64, in (-inf, 0] nats a byte
        (1/T) Σ_t log p_t / bytes of zlib(text in UTF-8): a text that compresses well is likely without having been
        seen (Carlini et al., arXiv 2012.07805, as the ratio's inverse and with the sign of a likelihood).

    Raises
    ------
    ValueError
        As `loss_score`, and if there are not as many texts.
    """
    if len(texts) != len(log_probs):
        raise ValueError(f"`texts` must be as many as the answers, got {len(texts)} for {len(log_probs)}")
    sizes = [len(zlib.compress(text.encode("utf-8"))) for text in texts]
    return loss_score(log_probs) / torch.tensor(sizes, dtype=torch.float64)


def min_k_score(log_probs: Sequence[Tensor], k: float = 0.2) -> Tensor:
    """Min-K%: the mean log-probability of the answer's least likely tokens.

    Parameters
    ----------
    log_probs : as in :func:`loss_score`
    k : float in (0, 1]
        Share of the tokens that is looked at: the max(1, ⌊kT⌋) least likely. Published code takes ⌊kT⌋ alone, which
        leaves nothing of an answer of fewer than 1/k tokens. k = 1 is `loss_score`.

    Returns
    -------
    Tensor of shape (n,), float64, in (-inf, 0] nats
        (1/|E|) Σ_{t∈E} log p_t, E the least likely tokens: a text never seen has a few that surprise (Shi et al.,
        arXiv 2310.16789).

    Raises
    ------
    ValueError
        As `loss_score`, and for k outside (0, 1].
    """
    if not 0.0 < k <= 1.0:
        raise ValueError(f"`k` is the share of tokens to look at and must be in (0, 1], got {k}")
    answer_nll(log_probs)  # its checks
    return torch.stack([_mean_of_lowest(row.to(torch.float64), k) for row in log_probs])


def log_prob_moments(log_distribution: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of log p(z) for z drawn from p, a row at a time.

    Parameters
    ----------
    log_distribution : Tensor of shape (..., V)
        Log-softmax rows.

    Returns
    -------
    mean, std : Tensors of shape (...), float64
        μ = Σ_z p(z) log p(z) (minus the entropy) and σ = (Σ_z p(z) (log p(z) − μ)²)^½, nats. Tokens that cannot occur
        (p = 0) add nothing.
    """
    rows = log_distribution.to(torch.float64)
    # Rows rounded to float32 sum to 1 only nearly, which would shift a mean of log-probabilities near -10.
    weights = torch.softmax(rows, dim=-1)
    rows = torch.where(weights > 0, rows, 0.0)
    mean = (weights * rows).sum(-1)
    variance = (weights * (rows - mean.unsqueeze(-1)).square()).sum(-1)
    return mean, variance.sqrt()


def min_k_plus_plus_score(
    log_probs: Sequence[Tensor], moments: Sequence[tuple[Tensor, Tensor]], k: float = 0.2
) -> Tensor:
    """Min-K%++: Min-K% of log-probabilities measured against what the model expects at each place.

    Parameters
    ----------
    log_probs : as in :func:`loss_score`
    moments : sequence of n pairs of Tensors of shape (T_i,)
        Of the rows that predict the answer's tokens, from :func:`log_prob_moments`.
    k : as in :func:`min_k_score`

    Returns
    -------
    Tensor of shape (n,), float64, standard deviations
        The mean of the max(1, ⌊kT⌋) lowest z_t = (log p_t − μ_t)/σ_t: at a member the token is a mode of the model's
        distribution, however flat that is (Zhang et al., arXiv 2404.02936). Where σ = 0, z = 0 for a token
        that is certain or one of equals.

    Raises
    ------
    ValueError
        As `min_k_score`, and if the moments are not as many.
    """
    if len(moments) != len(log_probs):
        raise ValueError(f"`moments` must be as many as the answers, got {len(moments)} for {len(log_probs)}")
    z = [
        (row.to(torch.float64) - mean) / std.clamp_min(_NO_SPREAD)
        for row, (mean, std) in zip(log_probs, moments, strict=True)
    ]
    return min_k_score(z, k)


def reference_score(log_probs: Sequence[Tensor], reference: Tensor) -> Tensor:
    """The token-mean log-likelihood against that of a model that has not been trained on the members.

    Parameters
    ----------
    log_probs : as in :func:`loss_score`
    reference : Tensor of shape (n,)
        The same answers' token-mean log-likelihood under the reference, nats.

    Returns
    -------
    Tensor of shape (n,), float64, nats
        log p − log p_ref: how likely an answer is apart from how likely it is to anybody (Carlini et al.,
        arXiv 2012.07805, with a second model).

    Raises
    ------
    ValueError
        As `loss_score`, and for another shape.
    """
    scores = loss_score(log_probs)
    if reference.shape != scores.shape:
        raise ValueError(
            f"`reference` must be one number an answer, {tuple(scores.shape)}, got {tuple(reference.shape)}"
        )
    return scores - reference.to(scores)


def tpr_at_fpr(scores: Tensor, labels: Tensor, fpr: float) -> float | None:
    """Share of the members that are found by the loosest threshold that accuses at most `fpr` of the non-members.

    Parameters
    ----------
    scores : Tensor of shape (n,)
    labels : Tensor of shape (n,)
        1 a member, 0 not.
    fpr : float in (0, 1)

    Returns
    -------
    float in [0, 1] or None
        None where there are fewer than 1/fpr non-members: no threshold has that rate, and 0 would be another one.

    Raises
    ------
    ValueError
        For labels as in `monitor.geometry.auc.auc`, or `fpr` outside (0, 1).

    Notes
    -----
    With m = ⌊fpr · n₋⌋ and t the (m + 1)-th highest score of a non-member, the share of members above t (Carlini et
    al., arXiv 2112.03570: an attack that is sure of a few is not seen in an average).
    """
    if not 0.0 < fpr < 1.0:
        raise ValueError(f"`fpr` must lie strictly between 0 and 1, got {fpr}")
    member = check_labels(labels, scores.numel(), scores.device)
    allowed = _floor(fpr * int((~member).sum()))
    if allowed < 1:
        return None
    threshold = scores[~member].sort(descending=True).values[allowed]
    return float((scores[member] > threshold).to(torch.float64).mean())


def _mean_of_lowest(row: Tensor, k: float) -> Tensor:
    return row.sort().values[: max(1, _floor(k * len(row)))].mean()


def _floor(x: float) -> int:
    """⌊x⌋ of a product that may fall short of an integer by rounding: 0.29 · 100 is 28.999999999999996."""
    return math.floor(x + 1e-9)
