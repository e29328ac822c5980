"""How well a model still says given answers, from per-token log-probabilities and greedy hits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def answer_nll(log_probs: Sequence[Tensor]) -> Tensor:
    """Token-mean negative log-likelihood of each answer.

    Parameters
    ----------
    log_probs : sequence of n Tensors, the i-th of shape (T_i,)
        log p(token | prompt, answer tokens before it), in nats.

    Returns
    -------
    Tensor of shape (n,), float64
        ℓ_i = −(1/T_i) Σ_t log p_t in [0, ∞) nats; higher means less likely.

    Raises
    ------
    ValueError
        If there is no answer, or one has no tokens.
    """
    _check(log_probs, "log_probs")
    return torch.stack([-row.to(torch.float64).mean() for row in log_probs])


def answer_probability(log_probs: Sequence[Tensor]) -> Tensor:
    """Length-normalised probability of each answer, exp(−ℓ): the geometric mean of its tokens' probabilities.

    Same parameters as :func:`answer_nll`; values in [0, 1].

    Notes
    -----
    TOFU's P(a | q)^{1/|a|} (arXiv 2401.06121, Sec. 2.2.2).
    """
    return torch.exp(-answer_nll(log_probs))


def exact_memorisation(greedy: Sequence[Tensor]) -> Tensor:
    """Share of each answer's tokens that are the model's first choice under teacher forcing.

    Parameters
    ----------
    greedy : sequence of n bool Tensors, the i-th of shape (T_i,)
        Whether the true token is the argmax given prompt and true answer tokens before it.

    Returns
    -------
    Tensor of shape (n,), float64, values in [0, 1]; higher means more is memorised.

    Notes
    -----
    EM = (1/T) Σ_t 1[argmax p(· | prompt, y_<t) = y_t] (Tirumala et al., arXiv 2205.10770).
    """
    _check(greedy, "greedy")
    return torch.stack([row.to(torch.float64).mean() for row in greedy])


def extraction_strength(greedy: Sequence[Tensor]) -> Tensor:
    """Share of each answer that greedy decoding completes once the rest of the answer is given.

    Parameters and errors as in :func:`exact_memorisation`; values in {0, 1/T, ..., 1}; higher means that a shorter
    hint brings the answer back.

    Notes
    -----
    ES = 1 − k/T, with k the smallest number of leading answer tokens that must be given for greedy decoding to
    produce all the others (Carlini et al., arXiv 2012.07805). k = T, so ES = 0, where even the last token is missed;
    the loop of published code stops at k = T − 1 there and reports 1/T.

    Teacher-forced hits are enough. Greedy decoding from ``prompt + y[:k]`` gives y[k:] if and only if every hit at
    t >= k is true: its first token is the argmax given y[:k], and as long as the tokens so far equal y the next one
    is conditioned on the same true prefix as under teacher forcing. So T − k is the length of the run of hits at the
    end of the answer.
    """
    _check(greedy, "greedy")
    # cumprod from the end is 1 as long as no miss has been met: its sum is the length of the last run of hits.
    return torch.stack([row.to(torch.float64).flip(0).cumprod(0).mean() for row in greedy])


def _check(rows: Sequence[Tensor], name: str) -> None:
    if len(rows) == 0:
        raise ValueError(f"{name} must hold at least one answer, got none")
    for i, row in enumerate(rows):
        if row.ndim != 1 or row.numel() == 0:
            raise ValueError(
                f"{name}[{i}] must be one-dimensional with at least one token, got shape {tuple(row.shape)}; "
                "leave out pairs whose answer is empty"
            )
