"""Representation misdirection for unlearning (RMU), with a fixed or an adaptive coefficient."""

from __future__ import annotations

import re
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn

from monitor.anatomy import find_anatomy
from monitor.requests import resolve_layer
from trainers.objectives import random_direction, rmu_forget, rmu_retain, sequence_nll
from trainers.reference_scores import ReferenceNeeds
from trainers.rmu_config import RMUConfig
from trainers.terms import Term
from trainers.truncated import hidden_states_at
from trainers.unlearning_trainer import UnlearningTrainer


class RMUTrainer(UnlearningTrainer):
    """Make a model forget by steering the hidden states of the forget set to a random direction.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` an RMUConfig. Only the blocks
    of ``args.trained_layers`` are trained (of a PeftModel, the adapters in them); everything else is frozen.

    Notes
    -----
    loss = MSE(h_ℓ(x_f), c·u) + alpha · MSE(h_ℓ(x_r), h_ref,ℓ(x_r)), means over the tokens of question and answer that
    are not padding, and over the d dimensions (Li et al., arXiv 2403.03218, Sec. 4; adaptive: Huu-Tien et al., arXiv
    2408.06223). u is a unit vector drawn from the run's seed, uniform on the sphere.

    The forward stops at hidden state ℓ: blocks beyond are neither run nor differentiated. ``forget_nll`` and
    ``retain_nll`` hence are read at evaluations alone. Sign: no term asks for a higher forget NLL; it rises as the
    later blocks meet states they have never seen.
    """

    config_class = RMUConfig

    def reference_needs(self) -> ReferenceNeeds:
        forget = ("forget",) if self.args.adaptive_scale is not None else ()
        return ReferenceNeeds(states=(*forget, *(("retain",) if self.args.needs_retain else ())))

    def reference_layer(self) -> int:
        return _layer_of(self.bare_model(), self.args)

    def choose_parameters(self, model: nn.Module) -> None:
        args, anatomy = self.args, find_anatomy(model)
        layer = _layer_of(model, args)
        blocks = list(range(max(0, layer - 3), layer)) if args.trained_layers is None else args.trained_layers
        if not blocks or any(not 0 <= block < layer for block in blocks):
            raise ValueError(
                f"`trained_layers` must be among the blocks 0 to {layer - 1} that hidden state {layer} comes from, got "
                f"{args.trained_layers}"
            )
        wanted = {id(p) for block in blocks for p in anatomy.blocks[block].parameters()}
        substrings = args.trained_parameters
        trained = 0
        for name, parameter in model.named_parameters():
            chosen = substrings is None or any(part in name for part in substrings)
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in wanted and chosen)
            trained += parameter.requires_grad
        if not trained:
            found = sorted({re.sub(r"^.*?\.\d+\.", "", n) for n, p in model.named_parameters() if id(p) in wanted})
            what = "adapter weights" if is_peft_model(model) else "weights"
            raise ValueError(
                f"`trained_parameters` {substrings} and `trained_layers` {blocks} leave no {what} to train; these "
                f"blocks have {', '.join(found)}"
            )

    def terms(self, model: nn.Module, inputs: dict[str, dict[str, Any]]) -> dict[str, Term]:
        args, forget, retain = self.args, inputs["forget"], inputs.get("retain")
        frozen = self.reference.batch(inputs)
        layer = self.reference.scores.layer if self.reference.scores.layer is not None else self.reference_layer()
        states = dict(zip(inputs, hidden_states_at(model, layer, list(inputs.values())), strict=True))
        coefficient = args.coefficient
        if args.adaptive_scale is not None:
            coefficient = args.adaptive_scale * frozen.states["forget"].norm(dim=-1)
        direction = random_direction(states["forget"].shape[-1], args.seed).to(states["forget"].device)
        loss = rmu_forget(states["forget"], forget["attention_mask"].bool(), direction, coefficient)
        terms = {"forget_loss": Term(loss, "forget", "position", 1.0)}
        if retain is not None:
            loss = rmu_retain(states["retain"], frozen.states["retain"], retain["attention_mask"].bool())
            terms["retain_loss"] = Term(loss, "retain", "position", args.alpha)
        if not torch.is_grad_enabled():
            rows = zip(inputs, self.answer_rows(model, list(inputs.values())), strict=True)
            terms |= {f"{part}_nll": Term(sequence_nll(found), part, "token") for part, found in rows}
        return terms


def _layer_of(model: nn.Module, args: RMUConfig) -> int:
    n_layers = find_anatomy(model).n_layers
    layer = resolve_layer(float(args.layer) if args.layer < 1 else int(args.layer), n_layers)
    if layer == 0:
        raise ValueError(f"`layer` {args.layer} is hidden state 0, the embeddings, which no block can steer")
    return layer
