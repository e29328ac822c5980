"""Greedy coordinate gradient: the search for one prompt's suffix."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from monitor.attacks.gcg_candidates import best_tokens, draw
from monitor.attacks.gcg_loss import TargetLoss


@dataclass(frozen=True)
class Found:
    """The best suffix that was met.

    Attributes
    ----------
    suffix : str
        As text: encoded in its prompt it gives the ids whose loss is `loss`.
    loss, loss_start : float
        Mean NLL of the target, nats a token: of this suffix and of the initial one. ``loss <= loss_start``.
    step : int
        After how many steps it was met; 0 for the initial one.
    trace : tuple of float
        Loss of the suffix that each step went on with; not monotone, as a step takes the best of its candidates even
        where all are worse than what it has.
    """

    suffix: str
    loss: float
    loss_start: float
    step: int
    trace: tuple[float, ...]


def optimise(
    loss: TargetLoss,
    allowed: Tensor,
    *,
    steps: int,
    candidates: int,
    top_k: int,
    seed: int,
    after_step: Callable[[float], None] = lambda _: None,
) -> Found:
    """The search for one prompt's suffix.

    Parameters
    ----------
    loss : TargetLoss
        With its prompt.
    allowed : Tensor of shape (n,)
        Ids a suffix may hold, as from `allowed_tokens`.
    steps, candidates, top_k, seed : int
        As in `GCGConfig`.
    after_step : function of float
        Told the best loss so far after each step.

    Raises
    ------
    ValueError
        If the initial loss is not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt, current = loss.prompt, list(loss.prompt.slots)
    now, gradient = loss.gradient(current)
    if not math.isfinite(now):
        raise ValueError(
            f"`model` must give the target a finite likelihood, got a loss of {now} for the question "
            f"{prompt.question!r}: it is broken, or its dtype overflows (load it in bfloat16 or float32)"
        )
    best, start, trace = (now, 0, prompt.suffix), now, []
    for step in range(1, steps + 1):
        if step > 1:
            now, gradient = loss.gradient(current)
        tokens = best_tokens(loss.scores(gradient, allowed), allowed, top_k)
        drawn = draw(prompt, current, tokens, candidates, generator)
        if drawn:
            losses = loss.losses([c.ids for c in drawn], [c.changed for c in drawn])
            at = int(losses.argmin())
            if losses[at].isfinite():
                current, now = drawn[at].ids, float(losses[at])
                if now < best[0]:
                    best = (now, step, drawn[at].text)
        trace.append(now)
        after_step(best[0])
    return Found(best[2], best[0], start, best[1], tuple(trace))
