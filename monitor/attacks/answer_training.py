"""A few steps of training on answers, in place and without a Trainer: the model may be in somebody else's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from tqdm.auto import tqdm

from monitor.anatomy import Anatomy
from monitor.ranks import rank

if TYPE_CHECKING:
    from monitor.attacks.relearning import RelearningConfig


def train_on_answers(
    anatomy: Anatomy, sequences: Sequence[tuple[list[int], int]], config: RelearningConfig, title: str | None
) -> None:
    """Change the model's weights in place; `sequences` are token ids and where the answer begins in them."""
    parameters = _trained_parameters(anatomy)
    for p in anatomy.outer.parameters():
        p.requires_grad_(False)
    for p in parameters:
        p.requires_grad_(True)
    masters = [p if p.dtype in (torch.float32, torch.float64) else p.detach().float() for p in parameters]
    fused = all(master.device.type in ("cpu", "cuda") for master in masters)  # a fifth of the time on CPUs
    optimizer = torch.optim.AdamW(masters, lr=config.learning_rate, weight_decay=0.0, fused=fused)
    batches = _batches(len(sequences), config)
    at_once = config.batch_size
    for _ in tqdm(range(config.steps), desc=title, unit="step", leave=False, disable=title is None or rank() != 0):
        batch = [sequences[i] for i in next(batches)]
        while True:
            try:
                gradients = _gradients(anatomy, batch, at_once, parameters)
                break
            except torch.OutOfMemoryError:
                if at_once == 1:
                    raise
                at_once = (at_once + 1) // 2
            torch.cuda.empty_cache()
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        norm = nn.utils.clip_grad_norm_(masters, config.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise ValueError(
                "relearning diverged: its gradient is not finite. Lower `learning_rate` of RelearningConfig, or load "
                "the model in bfloat16 or float32"
            )
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(parameters, masters, strict=True):
                if p is not master:
                    p.copy_(master)


def _trained_parameters(anatomy: Anatomy) -> list[nn.Parameter]:
    adapters = adapter_parameters(anatomy.model)
    if adapters:
        return [p for p in anatomy.outer.parameters() if p.requires_grad] or adapters
    return list(anatomy.model.parameters())


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the adapters, active or not, in PEFT's layers; none without PEFT."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return [p for layer in layers for name in layer.adapter_layer_names for p in getattr(layer, name).parameters()]


def _batches(n: int, config: RelearningConfig) -> Iterator[list[int]]:
    """Batches of one seeded permutation of 0..n-1 after the other, without end; one may reach into the next."""
    generator = torch.Generator().manual_seed(config.seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < config.batch_size:
            waiting += torch.randperm(n, generator=generator).tolist()
        yield waiting[: config.batch_size]
        waiting = waiting[config.batch_size :]


def _gradients(
    anatomy: Anatomy, batch: Sequence[tuple[list[int], int]], at_once: int, parameters: Sequence[nn.Parameter]
) -> list[Tensor | None]:
    """Gradient of the batch's mean answer-token NLL for each parameter, float32 at least; None where it has none.

    Not by `backward`, whose hooks on parameters belong to somebody else's training (DDP's reducer, optimisers that
    step while gradients arrive).
    """
    n_tokens = sum(len(ids) - first for ids, first in batch)
    total: list[Tensor | None] = [None] * len(parameters)
    for start in range(0, len(batch), at_once):
        with torch.enable_grad():
            loss = _answer_nll(anatomy, batch[start : start + at_once]) / n_tokens
            parts = torch.autograd.grad(loss, parameters, allow_unused=True)
        for i, part in enumerate(parts):
            if part is not None:
                part = part if part.dtype == torch.float64 else part.float()
                total[i] = part if total[i] is None else total[i] + part
    return total


def _answer_nll(anatomy: Anatomy, batch: Sequence[tuple[list[int], int]]) -> Tensor:
    """Sum of the NLL of all answer tokens of the batch, float32."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch])
    places = torch.tensor([(row, t) for row, (ids, first) in enumerate(batch) for t in range(first, len(ids))])
    forward = type(anatomy.model).forward  # the class's: trainers replace the instance's by closures of their own
    options = {"use_cache": False} if "use_cache" in inspect.signature(forward).parameters else {}
    logits = forward(
        anatomy.model, input_ids=ids.to(anatomy.device), attention_mask=mask.to(anatomy.device), **options
    ).logits
    row, t = places.to(logits.device).unbind(1)
    targets = ids.to(logits.device)[row, t]
    return nn.functional.cross_entropy(logits[row, t - 1].float(), targets, reduction="sum")
