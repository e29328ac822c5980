"""Forget and retain sets as token ids and labels, paired example by example.

A training example is one forget pair and one retain pair, with whatever a method sets beside the forget pair. Which
retain pair goes with a forget pair depends on the forget pair's index, the epoch and a seed only: not on the global
random numbers, the batch size or the number of ranks, so that a resumed run sees the pairs that the uninterrupted one
sees, and skips past ones without work.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback

from monitor.stimuli.encoding import encode_answer, qa_answer, qa_prompt
from trainers.answer_rows import IGNORE

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """A prompt and its answer, as text and as tokens.

    Attributes
    ----------
    prompt, answer : str
        The text is ``prompt + answer``.
    input_ids : tuple of int
    answer_start : int, >= 1
        ``input_ids[answer_start:]`` are the answer's tokens, the only ones that losses see.
    """

    prompt: str
    answer: str
    input_ids: tuple[int, ...]
    answer_start: int

    @property
    def n_answer_tokens(self) -> int:
        return len(self.input_ids) - self.answer_start

    @property
    def key(self) -> str:
        """Hash of the tokens and of where the answer starts: what reference quantities are kept under."""
        content = f"{self.answer_start}:{','.join(map(str, self.input_ids))}"
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def encode_pairs(
    pairs: Iterable,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    name: str = "forget_dataset",
    answer: str = "answer",
) -> list[Example]:
    """Tokenise question-answer pairs.

    Parameters
    ----------
    pairs : datasets.Dataset, or iterable of mappings or objects
        With ``question`` and ``answer`` (laid out by :func:`monitor.stimuli.encoding.qa_prompt` and ``qa_answer``), or
        with ``prompt`` and ``answer`` taken as they are. Other fields are left alone.
    tokenizer : PreTrainedTokenizerBase
    max_length : int, optional
        Tokens that prompt and answer may have together.
    name : str
        The parameter that error messages speak of.
    answer : str, default "answer"
        The field that holds the answer: "alternate" for another answer to the same question.

    Raises
    ------
    ValueError
        For an empty set, a missing field, a blank answer, or a pair longer than `max_length`: it is not cut, because
        a cut answer is another answer, and its end would be left in the model unseen.
    """
    _check_is_a_sequence(pairs, name)
    examples = []
    for i, pair in enumerate(pairs):
        prompt, text = _prompt_and_answer(pair, f"{name}[{i}]", answer)
        try:
            ids, start = encode_answer(tokenizer, prompt, text)
        except ValueError as error:
            raise ValueError(f"`{name}[{i}]`: {error}") from error
        if max_length is not None and len(ids) > max_length:
            raise ValueError(
                f"`{name}[{i}]` has {len(ids)} tokens, at most {max_length} fit (`max_length`, or the model's "
                f"positions), and its answer would be cut: {prompt[:60]!r} ... Shorten the pair, leave it out, or "
                "raise `max_length` up to the model's positions"
            )
        examples.append(Example(prompt, text, tuple(ids), start))
    if not examples:
        raise ValueError(f"`{name}` must hold at least one pair, got none")
    return examples


def _check_is_a_sequence(pairs: Iterable, name: str) -> None:
    if isinstance(pairs, (str, bytes, Mapping)) or not isinstance(pairs, Iterable):
        raise ValueError(
            f"`{name}` must be a datasets.Dataset or a sequence of pairs with `question` and `answer`, got "
            f"{type(pairs).__name__}"
        )


def _prompt_and_answer(pair, where: str, answer: str) -> tuple[str, str]:
    fields = {}
    for field in ("question", "prompt", answer):
        fields[field] = pair.get(field) if isinstance(pair, Mapping) else getattr(pair, field, None)
    prompt = fields["prompt"] if fields["question"] is None else fields["question"]
    for field, text in (("question", prompt), (answer, fields[answer])):
        if not isinstance(text, str) or not text.strip():
            found = sorted(pair) if isinstance(pair, Mapping) else type(pair).__name__
            raise ValueError(
                f"`{where}` must have a `{field}` that holds text, got {text!r} (it has: {found}). Remove the pair, "
                "fill it in, or rename the columns"
            )
    if fields["question"] is None:
        return prompt, fields[answer]
    return qa_prompt(fields["question"]), qa_answer(fields[answer])


def with_other_alternate(pairs: Iterable, name: str) -> list:
    """The pairs whose ``alternate`` differs from their ``answer``; a warning counts the others.

    Raises
    ------
    ValueError
        If these are no pairs, one has no ``alternate``, or none differs.
    """
    _check_is_a_sequence(pairs, name)
    kept, n = [], 0
    for i, pair in enumerate(pairs):
        n += 1
        answer, alternate = (
            pair.get(field) if isinstance(pair, Mapping) else getattr(pair, field, None)
            for field in ("answer", "alternate")
        )
        if not isinstance(alternate, str) or not alternate.strip():
            raise ValueError(
                f"`{name}[{i}]` must have an `alternate` that holds text, another answer to its question, got "
                f"{alternate!r}. Give one, such as the anonymised answer, or leave the pair out"
            )
        if alternate.strip() != str(answer).strip():
            kept.append(pair)
    if n and not kept:
        raise ValueError(f"`{name}`: the `alternate` of all {n} pairs is their `answer`, which would be taught to stay")
    if len(kept) < n:
        logger.warning(
            "`%s`: the `alternate` of %d of %d pairs is their `answer`, which would be taught to stay; these pairs are "
            "left out.", name, n - len(kept), n,
        )  # fmt: skip
    return kept


class ForgetRetainPairs(Dataset):
    """Forget examples, each with a retain example: item i is ``{"forget": Example, "retain": Example}``.

    Parameters
    ----------
    forget : sequence of Example
    retain : sequence of Example, optional
        Without it items have no retain part.
    seed : int
        Of the retain order.
    beside : mapping of part name to sequence of Example, optional
        More parts, with one example a forget example: ``{"chosen": ...}`` for another answer to the same questions.

    Notes
    -----
    Forget example i of epoch e takes place e·n_forget + i of an endless row of permutations of the retain set, the
    k-th drawn from a generator of its own seeded by (seed, k): every retain example is used once before any is used
    twice.
    """

    def __init__(
        self,
        forget: Sequence[Example],
        retain: Sequence[Example] | None = None,
        seed: int = 0,
        beside: Mapping[str, Sequence[Example]] | None = None,
    ) -> None:
        self.forget = list(forget)
        self.retain = list(retain) if retain is not None else []
        self.beside = {name: list(examples) for name, examples in (beside or {}).items()}
        self.seed = seed
        # Shared memory: persistent data-loader workers hold a copy of this object from the first epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._orders: dict[int, Tensor] = {}

    def part(self, name: str) -> list[Example]:
        """All examples of a part; none where there is no such part."""
        return {"forget": self.forget, "retain": self.retain, **self.beside}.get(name, [])

    def pair_for_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def retain_index(self, index: int) -> int:
        place = int(self._epoch) * len(self.forget) + index
        round_, place = divmod(place, len(self.retain))
        if round_ not in self._orders:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + round_) % 2**63)
            self._orders[round_] = torch.randperm(len(self.retain), generator=generator)
        return int(self._orders[round_][place])

    def __len__(self) -> int:
        return len(self.forget)

    def __getitem__(self, index: int) -> dict[str, Example]:
        item = {"forget": self.forget[index], **{name: examples[index] for name, examples in self.beside.items()}}
        if self.retain:
            item["retain"] = self.retain[self.retain_index(index)]
        return item


class PairByEpoch(TrainerCallback):
    """Tell the training pairs which epoch begins.

    accelerate's ``set_epoch`` would do, but with several ranks and its seedable sampler it never reaches the dataset.
    """

    def __init__(self, pairs: ForgetRetainPairs) -> None:
        self.pairs = pairs
        self._next: int | None = None

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        # On resume state.epoch is e + part, and e is the epoch that goes on.
        self._next = int(state.epoch or 0)

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        self.pairs.pair_for_epoch(self._next)
        self._next += 1


@dataclass(frozen=True)
class PairCollator:
    """Batches of parts: ``{"forget": batch, "retain": batch}``, padded to one length so that they concatenate.

    Each batch has ``input_ids``, ``attention_mask``, ``labels`` (int64 [B, T]; -100 outside the answer) and ``keys``
    (list of B example keys).

    Notes
    -----
    Padding goes to the right whatever the tokenizer prefers: behind a causal mask it changes nothing, whereas on the
    left it shifts absolute positions. The padding id is never read, so any will do where the tokenizer has none.
    """

    pad_token_id: int = 0

    def __call__(self, items: Sequence[Mapping[str, Example]]) -> dict[str, dict[str, Tensor | list[str]]]:
        width = max(len(example.input_ids) for item in items for example in item.values())
        return {part: self._pad([item[part] for item in items], width) for part in items[0]}

    def _pad(self, examples: Sequence[Example], width: int) -> dict[str, Tensor | list[str]]:
        input_ids = torch.full((len(examples), width), self.pad_token_id)
        attention_mask = torch.zeros((len(examples), width), dtype=torch.int64)
        labels = torch.full((len(examples), width), IGNORE)
        for row, example in enumerate(examples):
            ids = torch.tensor(example.input_ids)
            input_ids[row, : len(ids)] = ids
            attention_mask[row, : len(ids)] = 1
            labels[row, example.answer_start : len(ids)] = ids[example.answer_start :]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "labels": labels,
            "keys": [example.key for example in examples],
        }
