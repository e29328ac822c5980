"""From requests to token sequences and batches: everything about a pass that needs no model.

A plan is built once (tokenising, deduplicating, batching) and run many times.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from monitor.requests import Answers, Request, States, TokenStates, resolve_layer
from monitor.stimuli.encoding import encode_answer, encode_text


@dataclass(frozen=True)
class StatesSlot:
    """Where one (pooling, layers) combination is stored: a tensor [len(sequences), len(layers), d]."""

    pooling: str
    layers: tuple[int, ...]
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class TokensSlot:
    """Where the token states of one layer are stored: a tensor [tokens of all the sequences, d], in their order."""

    layer: int
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Sequences read together. `stop` is the deepest hidden state needed; `head` whether answers are scored."""

    sequences: tuple[int, ...]
    stop: int
    head: bool


@dataclass
class Plan:
    """The union of the requests as deduplicated token sequences.

    Attributes
    ----------
    sequences : list of tuple of int
        Distinct token sequences.
    skip : list of int
        Leading tokens that "mean_no_sink" leaves out, per sequence (1 if it starts with BOS).
    slots : list of StatesSlot
    slot_rows : dict States -> (slot index, rows of its texts in the slot, LongTensor)
    answer_start : dict sequence -> index of the first answer token
    answer_rows : dict Answers -> list of sequences
    distribution : set of int
        Sequences whose log-softmax rows are wanted.
    token_slots : list of TokensSlot
    token_rows : dict TokenStates -> (token slot index, list of sequences)
    """

    n_layers: int
    vocab_size: int
    pad_token_id: int
    sequences: list[tuple[int, ...]] = field(default_factory=list)
    skip: list[int] = field(default_factory=list)
    slots: list[StatesSlot] = field(default_factory=list)
    slot_rows: dict[States, tuple[int, Tensor]] = field(default_factory=dict)
    answer_start: dict[int, int] = field(default_factory=dict)
    answer_rows: dict[Answers, list[int]] = field(default_factory=dict)
    distribution: set[int] = field(default_factory=set)
    token_slots: list[TokensSlot] = field(default_factory=list)
    token_rows: dict[TokenStates, tuple[int, list[int]]] = field(default_factory=dict)

    def answer_length(self, sequence: int) -> int:
        start = self.answer_start.get(sequence)
        return 0 if start is None else len(self.sequences[sequence]) - start

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.sequences))

    def fingerprint(self) -> str:
        """Hash of the token sequences and of what is read from them; results are interchangeable if it agrees."""
        spec = {
            "n_layers": self.n_layers,
            "vocab_size": self.vocab_size,
            "sequences": self.sequences,
            "skip": self.skip,
            "slots": [(s.pooling, s.layers, s.sequences) for s in self.slots],
            "answers": sorted(self.answer_start.items()),
            "distribution": sorted(self.distribution),
        }
        if self.token_slots:  # left out otherwise: the hashes of plans without token states stay what they were
            spec["tokens"] = [(s.layer, s.sequences) for s in self.token_slots]
        return hashlib.sha256(json.dumps(spec).encode()).hexdigest()

    def batches(self, token_budget: int) -> list[Batch]:
        """Sequences of similar length and equal depth together, at most `token_budget` padded tokens each.

        Batches of one exact length need no padding and no mask, so a batch closes when the length changes unless it
        is still small. The same `token_budget` always gives the same batches.
        """
        stop = [0] * len(self.sequences)
        for slot in self.slots:
            for sequence in slot.sequences:
                stop[sequence] = max(stop[sequence], max(slot.layers))
        for slot in self.token_slots:
            for sequence in slot.sequences:
                stop[sequence] = max(stop[sequence], slot.layer)
        keys = [(i in self.answer_start, stop[i]) for i in range(len(self.sequences))]
        order = sorted(range(len(self.sequences)), key=lambda i: (keys[i], len(self.sequences[i]), i))
        # Logits rows are held in float32 next to the hidden states: bound them like a token budget of their own.
        row_budget = max(1, 2**25 // self.vocab_size)
        batches: list[Batch] = []
        current: list[int] = []
        rows = 0
        for i in order:
            length = len(self.sequences[i])
            if current:
                last = len(self.sequences[current[-1]])
                full = length * (len(current) + 1) > token_budget or rows + self.answer_length(i) > row_budget
                if keys[i] != keys[current[-1]] or full or (length != last and 2 * last * len(current) >= token_budget):
                    batches.append(Batch(tuple(current), stop[current[0]], keys[current[0]][0]))
                    current, rows = [], 0
            current.append(i)
            rows += self.answer_length(i)
        if current:
            batches.append(Batch(tuple(current), stop[current[0]], keys[current[0]][0]))
        return batches


def build_plan(
    tokenizer,
    requests: Sequence[Request],
    *,
    n_layers: int,
    vocab_size: int,
    max_length: int | None = None,
    causal: bool = True,
) -> Plan:
    """Tokenise and deduplicate `requests`.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
    requests : sequence of States, Answers or TokenStates
    n_layers, vocab_size : int
        Of the model that will be read.
    max_length : int, optional
        Tokens a sequence may have. Longer texts of `States` are cut, with a warning; longer prompts with
        their answers are an error.
    causal : bool, default True
        Whether the model is a decoder; only decoders have an attention sink at BOS worth a warning when the
        tokenizer has no BOS token.

    Raises
    ------
    ValueError
        For a layer out of range, an answer that does not fit, a text without tokens.
    """
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    plan = Plan(n_layers, vocab_size, 0 if pad is None else int(pad))
    index: dict[tuple[int, ...], int] = {}
    bos = tokenizer.bos_token_id
    cut: list[str] = []

    def add(ids: Sequence[int]) -> int:
        key = tuple(ids)
        if key not in index:
            index[key] = len(plan.sequences)
            plan.sequences.append(key)
            plan.skip.append(int(bos is not None and key[0] == bos))
        return index[key]

    def encode(prompt: str, answer: str) -> tuple[list[int], int]:
        ids, start = encode_answer(tokenizer, prompt, answer)
        if max_length is not None and len(ids) > max_length:
            raise ValueError(
                f"Prompt and answer have {len(ids)} tokens and the limit is {max_length}, so the answer would "
                f"be cut: {prompt[:60]!r} ... Shorten it or raise `max_length`."
            )
        if start < 1:
            raise ValueError(f"`prompts` must have at least one token each, got none for {prompt!r}.")
        return ids, start

    slot_of: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    tokens_of: dict[int, list[int]] = {}
    wanted: list[tuple[States, tuple[str, tuple[int, ...]], list[int]]] = []
    for request in requests:
        if isinstance(request, States):
            if request in (w[0] for w in wanted):
                continue
            no_sink = request.pooling == "mean_no_sink"
            if no_sink and bos is None and causal:
                warnings.warn(
                    "`pooling='mean_no_sink'` leaves the BOS token out of the mean, but this tokenizer has no BOS "
                    "token; the mean includes the first token, which may carry a massive activation.",
                    stacklevel=3,
                )
            layers = (
                tuple(range(n_layers + 1))
                if request.layers == "all"
                else tuple(dict.fromkeys(resolve_layer(layer, n_layers) for layer in request.layers))
            )
            rows = []
            for text in request.texts:
                ids = encode_text(tokenizer, text, bos=no_sink)
                if max_length is not None and len(ids) > max_length:
                    cut.append(text)
                    ids = ids[:max_length]
                if len(ids) - int(no_sink and bos is not None) < 1:
                    raise ValueError(f"`texts` must have at least one token each, got none for {text!r}.")
                rows.append(add(ids))
            key = (request.pooling, layers)
            slot_of.setdefault(key, []).extend(rows)
            wanted.append((request, key, rows))
        elif isinstance(request, Answers):
            rows = []
            for prompt, answer in zip(request.prompts, request.answers, strict=True):
                ids, start = encode(prompt, answer)
                row = add(ids)
                if plan.answer_start.setdefault(row, start) != start:
                    # The same tokens, divided elsewhere: a sequence of its own, read a second time.
                    row = len(plan.sequences)
                    plan.sequences.append(tuple(ids))
                    plan.skip.append(plan.skip[index[tuple(ids)]])
                    plan.answer_start[row] = start
                if request.distribution:
                    plan.distribution.add(row)
                rows.append(row)
            plan.answer_rows[request] = rows
        elif isinstance(request, TokenStates):
            layer = resolve_layer(request.layer, n_layers)
            rows = [add(encode(*pair)[0]) for pair in zip(request.prompts, request.answers, strict=True)]
            tokens_of.setdefault(layer, []).extend(rows)
            plan.token_rows[request] = (list(tokens_of).index(layer), rows)
        else:
            raise ValueError(f"`requests` must hold States, Answers and TokenStates, got {type(request).__name__}.")

    slots = list(slot_of)
    position: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for key in slots:
        unique = tuple(dict.fromkeys(slot_of[key]))
        position[key] = {sequence: row for row, sequence in enumerate(unique)}
        plan.slots.append(StatesSlot(key[0], key[1], unique))
    for request, key, rows in wanted:
        plan.slot_rows[request] = (slots.index(key), torch.tensor([position[key][r] for r in rows]))
    plan.token_slots += [TokensSlot(layer, tuple(dict.fromkeys(rows))) for layer, rows in tokens_of.items()]
    if cut:
        warnings.warn(
            f"{len(cut)} of the texts are longer than {max_length} tokens and were cut; their pooled states leave out "
            f"what follows. First: {cut[0][:60]!r} ...",
            stacklevel=3,
        )
    return plan
