"""A forward pass whose language-model head sees the rows that predict answer tokens, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainers.answer_rows import AnswerRows, answer_positions


def answer_logits(model: nn.Module, head: nn.Module, parts: Sequence[dict[str, Tensor]]) -> tuple[AnswerRows, ...]:
    """Run `model` once over the concatenated parts and return the answer rows of each.

    Parameters
    ----------
    model : nn.Module
        What to call: the model as wrapped for training (PEFT, DDP, FSDP, mixed precision), so that the wrappers'
        own hooks run.
    head : nn.Module
        The output embedding inside it (``get_output_embeddings()``).
    parts : sequence of batches
        Each with ``input_ids``, ``attention_mask``, ``labels`` [B, T], all of one T.

    Notes
    -----
    A pre-hook swaps the head's input [B, T, d] for the gathered rows [1, n, d]. What the architecture does to logits
    afterwards (scaling, soft capping) therefore still happens, and no [B, T, V] tensor is ever made. The rows are
    contiguous: a frozen head on a strided slice is several times slower.
    """
    input_ids = torch.cat([part["input_ids"] for part in parts])
    attention_mask = torch.cat([part["attention_mask"] for part in parts])
    length = input_ids.shape[1]

    located, offset = [], 0
    for part in parts:
        sequence, position, targets = answer_positions(part["labels"])
        located.append(((sequence + offset) * length + position, sequence, targets))
        offset += part["labels"].shape[0]
    flat = torch.cat([rows for rows, _, _ in located])

    gathered = False

    def keep_answer_rows(module: nn.Module, args: tuple) -> tuple:
        nonlocal gathered
        gathered = True
        return (args[0].flatten(0, 1).index_select(0, flat.to(args[0].device)).unsqueeze(0), *args[1:])

    handle = head.register_forward_pre_hook(keep_answer_rows)
    try:
        output = model(input_ids=input_ids, attention_mask=attention_mask)
    finally:
        handle.remove()
    logits = output["logits"].flatten(0, 1)
    if not gathered:  # a forward that multiplies by the head's weight without calling the head
        logits = logits.index_select(0, flat.to(logits.device))

    rows = logits.split([len(targets) for _, _, targets in located])
    return tuple(
        AnswerRows(part_logits, targets.to(logits.device), sequence.to(logits.device), part["labels"].shape[0])
        for part_logits, (_, sequence, targets), part in zip(rows, located, parts, strict=True)
    )
