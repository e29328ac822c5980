"""The frozen model itself, for distributions and hidden states that are too large to be kept."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from monitor.reference import adapter_off
from monitor.undisturbed import evaluation_mode
from trainers.answer_logits import answer_logits
from trainers.truncated import hidden_states_at


class LiveReference:
    """A frozen model that is run beside the one in training.

    Parameters
    ----------
    model : nn.Module
        The model as it is now, without wrappers. A PeftModel is its own reference, with its adapters off; of any other
        a frozen copy is made, which doubles the memory of the weights.

    Raises
    ------
    ValueError
        For an adapter whose switching off does not bring the base model back (trained biases).
    """

    def __init__(self, model: nn.Module) -> None:
        if is_peft_model(model):
            try:
                with adapter_off(model):
                    pass
            except ValueError as error:
                raise ValueError(
                    "the adapter trains the base model's biases, which stay changed with the adapter off, so that it "
                    "cannot be run as its own reference. Raise `reference_max_bytes`: the reference is then read "
                    "before training. Or set bias='none'"
                ) from error
            self._model, self._frozen = model, lambda: adapter_off(model)
            return
        self._model = copy.deepcopy(model)
        # accelerate and TRL put a closure over the original here, and a copy of it would run the live model.
        self._model.__dict__.pop("forward", None)
        self._model.__dict__.pop("_original_forward", None)
        self._model.requires_grad_(False)
        self._frozen = nullcontext

    def log_probs(self, part: dict[str, Tensor]) -> Tensor:
        """log-softmax rows at the part's answer tokens, [n, V] float32."""
        with torch.no_grad(), self._frozen(), evaluation_mode(self._model):
            (rows,) = answer_logits(self._model, self._model.get_output_embeddings(), [part])
            return rows.logits.float().log_softmax(-1)

    def states(self, part: dict[str, Tensor], layer: int) -> Tensor:
        """Hidden states at a layer, [B, T, d] float32."""
        with torch.no_grad(), self._frozen(), evaluation_mode(self._model):
            (states,) = hidden_states_at(self._model, layer, [part])
            return states.float()
