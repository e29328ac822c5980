"""How long a model's hidden states are: the range that points to steer by must lie in to look like states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from monitor.activations import DEFAULT_TOKEN_BUDGET, States, measure_activations


def activation_norm_range(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    layer: int | float,
    token_budget: int = DEFAULT_TOKEN_BUDGET,
    progress: str | None = None,
) -> tuple[float, float]:
    """Smallest and largest norm of the prompts' last hidden states.

    Parameters
    ----------
    model : nn.Module
        As for `monitor.activations.measure_activations`; left as it was found.
    tokenizer : PreTrainedTokenizerBase
        One that appends a token to every text (EOS) has the norm of that token read.
    prompts : sequence of n >= 1 str
        Finished prompts, as in ``instruction_prompt(tokenizer, instruction)``: the last token is the one that
        `steered_answers` steers first.
    layer : int or float
        As in `monitor.activations.States`.
    token_budget, progress
        As for `measure_activations`.

    Returns
    -------
    (r_min, r_max) : two floats, 0 < r_min <= r_max
        min_i ‖x_i‖₂ and max_i ‖x_i‖₂ over the prompts (MAxBench, App. I; there 805 instructions). Extremes, so the
        range widens with n.

    Raises
    ------
    ValueError
        For no or blank prompts, a layer out of range, or states that are not finite.
    """
    request = States(prompts, layers=(layer,), pooling="last")
    activations = measure_activations(model, tokenizer, [request], token_budget=token_budget, progress=progress)
    norms = activations.states(request)[:, 0].norm(dim=-1)
    if not torch.isfinite(norms).all():
        raise ValueError(
            f"`model` has hidden states at layer {layer} that are not finite, so they have no range: it has diverged, "
            "or its dtype overflows (float16 does on models with massive activations): load it in bfloat16 or float32"
        )
    return float(norms.min()), float(norms.max())
