"""Can the model say the entity that a context stands before? Only then does the state before it carry the concept."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from monitor.anatomy import find_anatomy
from monitor.generation import Decoder, encode_prompt, greedy_answers, length_batches
from monitor.ranks import gathered, rank, world_size
from monitor.stimuli.concepts import ConceptSet, Entity, mentions
from monitor.stimuli.encoding import encode_answer, qa_answer
from monitor.undisturbed import undisturbed


@dataclass(frozen=True)
class Rate:
    """A share of contexts in [0, 1] and its 95 % interval over entities."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TaskScores:
    """How well a model names a concept's entities; higher is better.

    Parameters
    ----------
    top1 : Rate
        The likeliest next token begins a form of the entity.
    top5 : Rate
        One of the five likeliest does.
    continuation : Rate
        What the model says greedily holds a whole form of the entity.
    n : int
        Contexts.
    """

    top1: Rate
    top5: Rate
    continuation: Rate
    n: int


def concept_task(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    concept: ConceptSet,
    *,
    max_new_tokens: int = 5,
    batch_tokens: int = 4096,
    progress: str | None = None,
) -> TaskScores:
    """Let a model go on from every context of a concept, and count where it names the entity.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, optionally under PEFT, DDP or FSDP. Left as it was found.
    tokenizer : PreTrainedTokenizerBase
    concept : ConceptSet
    max_new_tokens : int, >= 1
        Tokens that the continuation may have.
    batch_tokens : int, >= 1
        Tokens in a batch. Halved for as long as the device runs out of memory.
    progress : str, optional
        Title of a progress bar on standard error; none without it.

    Returns
    -------
    TaskScores

    Raises
    ------
    ValueError
        For a model that cannot generate, contexts that do not fit into the model, bad numbers.

    Notes
    -----
    After MAxBench, "Concept Prediction Task Performance". Contexts are continued as plain text, without a chat
    template. Case makes no difference; in the continuation the form must stand as whole words, so that "million" names
    no lion.

    What *all* entities begin with, in tokens, says nothing about which one it is: it is given to the model before the
    next token is looked at. Tokenizers that cut numbers into digits write every year of the 20th century " ", "1", "9":
    without this, every model would seem to know them all. The continuation starts from the bare context.

    Intervals are Wilson's, at the number of independent contexts that has the variance of the mean over entities
    (contexts of an entity succeed and fail together), at least the number of entities: with every context right or
    wrong it does not shrink to a point.
    """
    said = greedy_answers(
        model, tokenizer, concept.texts, max_new_tokens=max_new_tokens, batch_tokens=batch_tokens, progress=progress
    )
    decoder = Decoder(find_anatomy(model), tokenizer)
    given = _shared_beginning(tokenizer, concept.entities)
    sequences = [encode_prompt(tokenizer, text) + given for text in concept.texts]
    likeliest = _likeliest(decoder, sequences, batch_tokens, progress)

    known = decoder.text(given).strip().casefold()
    top1, top5, continuation = [], [], []
    for label, answer, tokens in zip(concept.labels, said, likeliest, strict=True):
        forms = concept.entities[label].forms
        hits = [_begins(decoder.text([*given, token]), known, forms) for token in tokens]
        top1.append(hits[0])
        top5.append(any(hits))
        continuation.append(mentions(answer, forms))
    rates = [_rate(values, concept.labels) for values in (top1, top5, continuation)]
    return TaskScores(*rates, n=len(concept.texts))


def _shared_beginning(tokenizer: PreTrainedTokenizerBase, entities: Sequence[Entity]) -> list[int]:
    """The tokens that the names of all entities begin with after their contexts; of each name at least one is left."""
    names = []
    for entity in entities:
        ids, first = encode_answer(tokenizer, entity.contexts[0].text, qa_answer(entity.name))
        names.append(ids[first:])
    shared = []
    for column in zip(*(name[:-1] for name in names), strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return shared


def _begins(said: str, known: str, forms: Sequence[str]) -> bool:
    """Whether one of the forms begins with what is said, and more is said than was known before."""
    said = said.strip().casefold()
    return len(said) > len(known) and any(form.casefold().startswith(said) for form in forms)


def _likeliest(
    decoder: Decoder, sequences: Sequence[Sequence[int]], batch_tokens: int, progress: str | None
) -> list[list[int]]:
    """The five likeliest next tokens after each sequence, the likeliest first; on all ranks together."""
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    shared = world_size() > 1 and not decoder.anatomy.sharded
    mine = order[rank() :: world_size()] if shared else order
    queue = deque(length_batches(mine, sequences, 0, batch_tokens))
    found: dict[int, list[int]] = {}
    silent = progress is None or rank() != 0
    with (
        undisturbed(decoder.anatomy),
        tqdm(total=len(mine), desc=progress, unit="context", leave=False, disable=silent) as bar,
    ):
        while queue:
            batch = queue.popleft()
            try:
                top = _top_tokens(decoder, [sequences[i] for i in batch])
            except torch.OutOfMemoryError:
                if len(batch) == 1 or decoder.anatomy.sharded:
                    raise
                queue.extendleft((batch[len(batch) // 2 :], batch[: len(batch) // 2]))
                continue
            found.update(zip(batch, top.tolist(), strict=True))
            bar.update(len(batch))
    if shared:
        found = {i: tokens for part in gathered(found) for i, tokens in part.items()}
    return [found[i] for i in range(len(sequences))]


def _top_tokens(decoder: Decoder, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Next tokens [B, 5] of left-padded sequences; what stands in the padding is never attended to."""
    width = max(map(len, sequences))
    ids, mask = torch.zeros(2, len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        mask[row, width - len(sequence) :] = 1
    ids, mask = ids.to(decoder.anatomy.device), mask.to(decoder.anatomy.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return decoder.next_logits(ids, mask, positions, decoder.new_cache()).topk(5, dim=-1).indices


def _rate(hits: Sequence[bool], labels: Sequence[int]) -> Rate:
    """The share of hits and its interval; see the Notes of `concept_task`."""
    n, share = len(hits), sum(hits) / len(hits)
    excess = [0.0] * (max(labels) + 1)
    for hit, label in zip(hits, labels, strict=True):
        excess[label] += hit - share
    groups = len(excess)
    variance = sum(e * e for e in excess) / n**2 * groups / (groups - 1)
    free = n if variance == 0 else share * (1 - share) / variance
    free = groups if share in (0, 1) else min(max(free, groups), n)
    z = NormalDist().inv_cdf(0.975)
    middle = (share + z * z / (2 * free)) / (1 + z * z / free)
    half = z / (1 + z * z / free) * math.sqrt(share * (1 - share) / free + z * z / (4 * free * free))
    return Rate(share, max(0.0, middle - half), min(1.0, middle + half))
