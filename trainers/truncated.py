"""A training forward that ends at a hidden layer: its states, with gradients, and none of the blocks after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from monitor.anatomy import Anatomy, find_anatomy
from monitor.requests import resolve_layer


def hidden_states_at(model: nn.Module, layer: int | float, parts: Sequence[dict[str, Tensor]]) -> tuple[Tensor, ...]:
    """Run `model` once over the concatenated parts, up to hidden state `layer`, and return that state of each.

    Parameters
    ----------
    model : nn.Module
        What to call: a causal language model as wrapped for training (PEFT, DDP, FSDP2, mixed precision), so that the
        wrappers' own hooks run.
    layer : int or float
        Hidden-state index 0..L as in transformers: 0 the embeddings, i what enters block i, L after the final norm;
        negative ones count from the end, a float is a fraction of the depth. Blocks 0..layer-1 run.
    parts : sequence of batches
        Each with ``input_ids`` and ``attention_mask`` [B, T], all of one T.

    Returns
    -------
    states : tuple of Tensor [B, T, d]
        One a part, of the dtype that the wrapped model gives its outputs. Padding positions hold anything.

    Raises
    ------
    ValueError
        If `model` is no causal language model or has no such layer.

    Notes
    -----
    The forward ends without an exception, because a wrapper's work after the forward (DDP's preparation of the gradient
    reduction) must run: for the call, the blocks from `layer` on give way to one stand-in that keeps what reaches it.
    The state leaves through the outer output, so that wrappers see what the loss depends on, and nothing else. The
    final norm then runs on one tensor and the head on one row, both cut off from the gradient.

    Parameters after `layer` (those blocks, the final norm, an untied head) get no gradient. DDP must know: freeze them,
    or wrap with ``find_unused_parameters=True`` (the Trainer's choice, unless activations are checkpointed).
    """
    anatomy = find_anatomy(model)
    if anatomy.head is None:
        raise ValueError(
            f"`model` must be a causal language model, got {type(anatomy.model).__name__} without a language-model "
            "head. Load it with AutoModelForCausalLM."
        )
    input_ids = torch.cat([part["input_ids"] for part in parts])
    attention_mask = torch.cat([part["attention_mask"] for part in parts])
    with _truncated(anatomy, resolve_layer(layer, anatomy.n_layers)):
        output = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True)
    if not output.get("hidden_states"):
        raise ValueError(
            f"`model` ({type(anatomy.model).__name__}) does not hand on the hidden states of its inner model "
            f"({type(anatomy.inner).__name__}), so none can be trained on."
        )
    return output["hidden_states"][0].split([len(part["input_ids"]) for part in parts])


class _StandIn(nn.Module):
    """In the place of the first block that is not to run: keeps what would enter it, and passes it on for the norm."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = (block,)  # in a tuple, so that it does not become a part of this module
        self.hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        self.hidden = hidden_states
        return hidden_states.detach()

    def __getattr__(self, name: str):
        """What the inner forward asks of a block, its kind of attention for one."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"][0], name)


@contextmanager
def _truncated(anatomy: Anatomy, layer: int) -> Iterator[None]:
    """Inside, a forward has hidden state `layer` as its output's only ``hidden_states``, and logits of one row."""
    stand_in = _StandIn(anatomy.blocks[layer]) if layer < anatomy.n_layers else None

    def keep_states(module: nn.Module, args: tuple, output):
        last = output["last_hidden_state"]
        hidden = last if stand_in is None else stand_in.hidden
        row = last.detach().flatten(0, -2)[:1].unsqueeze(0)  # [1, 1, d], for the head
        return type(output)(last_hidden_state=row, hidden_states=(hidden,))

    def cut_off(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return output.detach()  # or DDP would wait for a gradient of the head

    holder, name = _holder(anatomy)
    handles = [
        anatomy.inner.register_forward_hook(keep_states),
        anatomy.head.register_forward_hook(cut_off),
    ]
    try:
        if stand_in is not None:
            setattr(holder, name, nn.ModuleList([*anatomy.blocks[:layer], stand_in]))
        yield
    finally:
        setattr(holder, name, anatomy.blocks)
        for handle in handles:
            handle.remove()


def _holder(anatomy: Anatomy) -> tuple[nn.Module, str]:
    """The module whose attribute the list of blocks is, and the attribute's name."""
    return next(
        (module, name)
        for module in anatomy.inner.modules()
        for name, child in module.named_children()
        if child is anatomy.blocks
    )
