"""Where the parts of a transformers model are: the inner model, its blocks, its language-model head.

Reads module trees only; no hooks, no forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Anatomy:
    """The parts the activation pass needs.

    Attributes
    ----------
    outer : nn.Module
        What the caller holds: the model, perhaps wrapped by PEFT, DDP or FSDP.
    model : nn.Module
        The transformers model inside the wrappers (adapters injected into it stay active).
    inner : nn.Module
        The part without a head, whose output has `last_hidden_state`; `model` itself for a bare model. For an
        encoder-decoder, its encoder.
    blocks : nn.ModuleList
        The L transformer blocks. The input of block i is hidden state i; hidden state L is the inner output.
    head : nn.Module or None
        The output embedding layer, None for models without a language-model head (and for encoder-decoders).
    sharded : bool
        The parameters are sharded (FSDP): only a call of `outer` by all ranks is valid.
    """

    outer: nn.Module
    model: nn.Module
    inner: nn.Module
    blocks: nn.ModuleList
    head: nn.Module | None
    sharded: bool

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    @property
    def device(self) -> torch.device:
        return next(self.inner.parameters()).device

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)


def _unwrap(outer: nn.Module) -> nn.Module:
    model = outer
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif type(model).__name__ == "FullyShardedDataParallel":
            model = model.module
        elif hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        elif hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            if getattr(model.active_peft_config, "is_prompt_learning", False):
                raise ValueError(
                    "`model` has a prompt-learning adapter (its virtual tokens shift every position), which the "
                    "activation pass does not support. Use an adapter that changes weights, such as LoRA."
                )
            model = model.get_base_model()
        else:
            return model


def find_anatomy(outer: nn.Module) -> Anatomy:
    """Locate the parts of `outer`.

    Raises
    ------
    ValueError
        If `outer` is no transformers model, or no list of `config.num_hidden_layers` blocks is found in it.
    """
    model = _unwrap(outer)
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise ValueError(
            f"`model` must be a transformers model (optionally under PEFT, DDP or FSDP), got {type(outer).__name__} "
            "without a transformers config."
        )
    encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
    inner = model.get_encoder() if encoder_decoder else model.base_model
    n_layers = int(config.get_text_config().num_hidden_layers)
    blocks = next(
        (m for m in inner.modules() if isinstance(m, nn.ModuleList) and len(m) == n_layers and n_layers > 0), None
    )
    if blocks is None:
        raise ValueError(
            f"Found no list of {n_layers} blocks in {type(inner).__name__}, so the layers of this architecture "
            "cannot be read. Supported: decoders, encoders and encoder-decoders of transformers whose blocks are one "
            "ModuleList."
        )
    # A masked language model's head does not predict the next token: only generative models score answers.
    generative = inner is not model and not encoder_decoder and model.can_generate()
    head = model.get_output_embeddings() if generative else None
    sharded = type(outer).__name__ == "FullyShardedDataParallel" or any(
        type(p).__name__ == "DTensor" for p in model.parameters()
    )
    return Anatomy(outer, model, inner, blocks, head, sharded)
