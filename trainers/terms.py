"""A loss as terms, each a sum over sequences that is divided by a count of the whole optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainers.answer_rows import IGNORE, AnswerRows, sum_by_sequence

PER = ("sequence", "token", "position")


class Term(NamedTuple):
    """A part of the loss: weight · Σ values / number of (sequences | answer tokens | positions) of one part.

    Attributes
    ----------
    values : Tensor [B], float32
        One a sequence; the sum over its answer tokens or positions where the mean goes over these.
    part : str
        The part of the batch, such as "forget" or "retain".
    per : {"sequence", "token", "position"}
        What the mean goes over: sequences, answer tokens, or all tokens that are not padding.
    weight : float, default 0.0
        0 is logged and not trained on.
    """

    values: Tensor
    part: str
    per: str
    weight: float = 0.0


def token_term(values: Tensor, rows: AnswerRows, part: str, weight: float = 0.0) -> Term:
    """The term of a loss that has one value an answer token, [n]."""
    return Term(sum_by_sequence(values, rows.sequence, rows.n_sequences), part, "token", weight)


def counts_by_sequence(part: Mapping[str, Tensor], per: str) -> Tensor:
    """[B], int64: 1 each, the number of answer tokens, or the number of tokens that are not padding."""
    if per == "sequence":
        return torch.ones_like(part["labels"][:, 0])
    if per == "token":
        return (part["labels"][:, 1:] != IGNORE).sum(1)
    return part["attention_mask"].sum(1)


def count(batches: Sequence[Mapping[str, dict[str, Any]]]) -> dict[tuple[str, str], Tensor]:
    """(part, per) -> how many there are over several batches, as int64 scalars."""
    return {
        (part, per): sum(counts_by_sequence(batch[part], per).sum() for batch in batches)
        for part in (batches[0] if batches else ())
        for per in PER
    }
