"""The logits that predict answer tokens, and nothing else: what every loss on outputs is written on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

IGNORE = -100


class AnswerRows(NamedTuple):
    """The logits that predict answer tokens.

    Attributes
    ----------
    logits : Tensor [n, V]
        One row an answer token, sequences one after the other.
    targets : Tensor [n], int64
        The answer tokens.
    sequence : Tensor [n], int64
        The sequence (0..n_sequences-1) each row belongs to.
    n_sequences : int
    """

    logits: Tensor
    targets: Tensor
    sequence: Tensor
    n_sequences: int


def answer_positions(labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where answer tokens are predicted.

    Parameters
    ----------
    labels : Tensor [B, T], int64
        The token at each position where it belongs to the answer, -100 elsewhere (prompt, padding on either side).

    Returns
    -------
    sequence, position : Tensors [n], int64
        Logits at ``[sequence, position]`` predict the label at ``[sequence, position + 1]``; in reading order.
    targets : Tensor [n], int64
        Those labels. A label at position 0 has nothing before it and is left out.
    """
    shifted = labels[:, 1:]
    sequence, position = (shifted != IGNORE).nonzero(as_tuple=True)
    return sequence, position, shifted[sequence, position]


def answer_rows(logits: Tensor, labels: Tensor) -> AnswerRows:
    """Cut the rows that predict answer tokens out of full logits [B, T, V] with labels [B, T] (-100: no answer)."""
    sequence, position, targets = answer_positions(labels)
    return AnswerRows(logits[sequence, position], targets, sequence, labels.shape[0])


def sum_by_sequence(values: Tensor, sequence: Tensor, n_sequences: int) -> Tensor:
    """Sum [n] values over the rows of each sequence: [n_sequences].

    A masked sum and not a scatter: atomic additions would make the loss differ from run to run on a GPU.
    """
    member = sequence == torch.arange(n_sequences, device=values.device)[:, None]
    return torch.where(member, values, 0.0).sum(1)
