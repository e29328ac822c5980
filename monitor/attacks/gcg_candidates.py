"""What the suffix may become in one step: tokens that the gradient favours, drawn at random, that survive as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from monitor.attacks.gcg_prompt import SuffixPrompt


class Candidate(NamedTuple):
    """A suffix that differs from the current one at slot `changed`, and its text."""

    ids: list[int]
    changed: int
    text: str


def allowed_tokens(tokenizer: PreTrainedTokenizerBase, n_rows: int, ascii_only: bool) -> Tensor:
    """Ids a suffix may hold: no special or added token, none that is no text by itself.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    n_rows : int
        Rows of the embedding table; ids beyond them are left out, as are rows beyond the vocabulary.
    ascii_only : bool
        Only tokens whose text is printable ASCII, as in the published code of arXiv 2307.15043.

    Returns
    -------
    Tensor of shape (n,), int64, ascending, on the CPU

    Raises
    ------
    ValueError
        If no token is left.
    """
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    ids = [i for i in range(min(len(tokenizer), n_rows)) if i not in special]
    texts = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    kept = [
        i
        for i, text in zip(ids, texts, strict=True)
        if text and "\ufffd" not in text and (not ascii_only or (text.isascii() and text.isprintable()))
    ]
    if not kept:
        raise ValueError(
            f"`ascii_only` must leave tokens to choose from, but none of {type(tokenizer).__name__}'s {len(ids)} is "
            "printable ASCII: set it to False"
        )
    return torch.tensor(kept)


def best_tokens(scores: Tensor, allowed: Tensor, top_k: int) -> Tensor:
    """The `top_k` allowed tokens of each slot with the lowest scores.

    Parameters
    ----------
    scores : Tensor of shape (n_slots, n_allowed)
        First-order change of the loss, column j for token ``allowed[j]``.
    allowed : Tensor of shape (n_allowed,)

    Returns
    -------
    Tensor of shape (n_slots, min(top_k, n_allowed)), on the CPU
    """
    columns = scores.topk(min(top_k, len(allowed)), dim=1, largest=False).indices
    return allowed[columns.cpu()]


def draw(
    prompt: SuffixPrompt, current: Sequence[int], best: Tensor, count: int, generator: torch.Generator
) -> list[Candidate]:
    """Candidates with one token replaced, without doubles, that encode to themselves when told as text.

    Parameters
    ----------
    current : sequence of n_slots int
    best : Tensor of shape (n_slots, k), on the CPU
    count : int
        How many are drawn: a slot uniformly, then one of its k tokens uniformly (arXiv 2307.15043, Algorithm 1).
    generator : torch.Generator
        On the CPU, so that the draws are the same on every device.

    Returns
    -------
    list of Candidate
        At most `count`, in the order drawn; empty where none survives.
    """
    slots = torch.randint(best.shape[0], (count,), generator=generator)
    ranks = torch.randint(best.shape[1], (count,), generator=generator)
    drawn = dict.fromkeys(zip(slots.tolist(), best[slots, ranks].tolist(), strict=True))
    changed = [slot for slot, _ in drawn]
    rows = [[*current[:slot], token, *current[slot + 1 :]] for slot, token in drawn]
    return [Candidate(rows[i], changed[i], text) for i, text in prompt.surviving(rows)]
