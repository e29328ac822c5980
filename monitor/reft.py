"""ReFT-r1: the one direction that both tells a concept and steers towards it, learned with the model frozen."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from monitor.anatomy import Anatomy
from monitor.attacks.intact import intact
from monitor.geometry.subspaces import Subspace
from monitor.ranks import from_first, rank
from monitor.steered_generation import entering, instruction_prompt, steerable_layer
from monitor.stimuli.encoding import encode_answer


class Pair(Protocol):
    """An instruction with a response that has the concept, and one that has not."""

    instruction: str
    positive: str
    negative: str


def reft_r1(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    *,
    layer: int | float,
    k: int = 8,
    sparsity: float = 0.03,
    learning_rate: float = 0.01,
    epochs: int = 6,
    batch_size: int = 6,
    seed: int = 0,
    progress: str | None = None,
) -> Subspace:
    """Learn the direction from pairs of responses.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, optionally under PEFT or DDP. Left as it was found: weights, gradients,
        hooks, modes and random-number generators.
    tokenizer : PreTrainedTokenizerBase
    pairs : sequence of n >= 1 PairedResponse
        As from `monitor.stimuli.paired_responses.load_paired_responses`; positive and negative are 2n examples.
    layer : int or float
        Hidden state to read and to push, as in `monitor.activations.States`: what enters block `layer`, 0 to L-1.
    k : int, >= 1
        Latents a text whose mean is the push.
    sparsity : float, >= 0
        λ of the other latents. 0.03 is the 0.005 of the published runs, which sum over batches of 6.
    learning_rate : float, > 0
        Of AdamW without weight decay, falling linearly to 0.
    epochs, batch_size : int, >= 1
        Batches are halved for as long as the device runs out of memory; their gradients are added up, so that the
        result stays the same up to rounding.
    seed : int
        Of the order of examples.
    progress : str, optional
        Title of a progress bar on standard error; none without it.

    Returns
    -------
    Subspace
        ``method="reft_r1"``, rank 1, offset 0, on the CPU. The column points towards the concept: ReLU(h · w) tells it.

    Raises
    ------
    ValueError
        For a model that cannot generate or is sharded, a layer that no block reads, texts that do not fit, bad
        numbers, a loss that is not finite.

    Notes
    -----
    Rank-1 representation finetuning (Wu et al., arXiv 2501.17148, "ReFT-r1"), with a unit vector w:

        a_i = ReLU(h_i · w),    h_i ← h_i + mean(top-k a) · w,
        loss = −mean_t log p(y_t | x, y_<t; pushed) + λ · mean_texts (1/T) Σ_{i not in the top k} a_i.

    i runs over all T tokens of instruction and response but the first, which is BOS or carries a massive activation; t
    over the tokens of the batch's responses alone. Positive and negative responses have **one and the same loss**, no
    label enters: pushed along w, a positive text becomes likelier the larger its latents are, a negative one the
    smaller, so telling and steering are learned together. As published, the push of a token knows the tokens after it.

    Two things are not as published, where w starts at random and is free. Hidden states have a mean μ much longer than
    what tells them apart, so the sign of μ · w is the sign of nearly all h_i · w: a step that turns it cuts off every
    latent, no gradient comes from there, and w stays where it is. So w is kept orthogonal to μ, the mean state of the
    negative responses, and starts at the difference of the means of positive and negative responses, as far as that
    is orthogonal to μ.
    """
    examples = _check(pairs, k, sparsity, learning_rate, epochs, batch_size)
    with intact(model) as anatomy:
        learner = _Learner(anatomy, layer, k, sparsity)
        sequences = [_encoded(tokenizer, *example) for example in examples]
        _check_room(anatomy, sequences)
        for parameter in anatomy.outer.parameters():
            parameter.requires_grad_(False)
        generator = torch.Generator().manual_seed(seed)
        steps = epochs * math.ceil(len(sequences) / batch_size)
        batches = _batches(sequences, batch_size, epochs, generator)
        with tqdm(total=steps, desc=progress, unit="step", leave=False, disable=progress is None or rank() != 0) as bar:
            direction = learner.learn(
                sequences[: len(pairs)], sequences[len(pairs) :], batches, steps, learning_rate, bar
            )
    direction = from_first(direction.cpu())
    return Subspace(basis=direction.unsqueeze(1), offset=torch.zeros_like(direction), method="reft_r1")


Example = tuple[list[int], int]  # token ids of instruction and response, and where the response begins


class _Learner:
    """The frozen model, pushed along a direction, and the loss of texts under it."""

    def __init__(self, anatomy: Anatomy, layer: int | float, k: int, sparsity: float) -> None:
        if anatomy.head is None:
            raise ValueError(
                f"`model` must be a causal language model, got {type(anatomy.model).__name__}, which has no head to "
                "predict responses with: load it with AutoModelForCausalLM"
            )
        self.anatomy, self.k, self.sparsity = anatomy, k, sparsity
        self.block = anatomy.blocks[steerable_layer(anatomy, layer)]
        known = inspect.signature(type(anatomy.model).forward).parameters
        self.options = {"use_cache": False} if "use_cache" in known else {}

    def learn(
        self,
        positives: Sequence[Example],
        negatives: Sequence[Example],
        batches: Iterator[list[Example]],
        steps: int,
        learning_rate: float,
        bar: tqdm,
    ) -> Tensor:
        """w [d] after all batches."""
        self._find_means(positives, negatives)
        w = self._unit(self.difference)
        if not bool(torch.isfinite(w).all()):
            raise ValueError(
                "`pairs` must have responses that differ with the concept and without, and `model` finite hidden "
                f"states, but their mean states differ by {float(self.difference.norm())}: nothing to start from"
            )
        w.requires_grad_()
        optimizer = torch.optim.AdamW([w], lr=learning_rate, weight_decay=0.0)
        at_once = len(positives) + len(negatives)
        for step, batch in enumerate(batches):
            while True:
                try:
                    loss, w.grad = self._gradient(w, batch, at_once)
                    break
                except torch.OutOfMemoryError:
                    at_once = min(at_once, len(batch))
                    if at_once == 1:
                        raise
                    at_once = (at_once + 1) // 2
            if not math.isfinite(loss):
                raise ValueError(
                    "`model` gives a loss that is not finite while ReFT-r1 learns: lower `learning_rate`, or load the "
                    "model in bfloat16 or float32"
                )
            optimizer.param_groups[0]["lr"] = learning_rate * (1 - step / steps)
            optimizer.step()
            with torch.no_grad():
                w.copy_(self._unit(w))
            bar.update()
        return w.detach()

    @torch.no_grad()
    def _find_means(self, positives: Sequence[Example], negatives: Sequence[Example]) -> None:
        """The direction of the mean state without the concept, and the difference of the means with it and without."""
        means = []
        for examples in (positives, negatives):
            total, n = torch.zeros((), device=self.anatomy.device), 0
            for ids, first in examples:
                states: list[Tensor] = []
                self._nll([(ids, first)], lambda hidden, counted: states.append(hidden) or hidden)  # noqa: B023
                total, n = total + states[0][0, first:].float().sum(0).to(total.device), n + len(ids) - first
            means.append(total / n)
        self.middle, self.difference = means[1] / means[1].norm(), means[0] - means[1]

    def _unit(self, w: Tensor) -> Tensor:
        """`w` without what it has of the mean state, of length 1."""
        w = w - (w @ self.middle) * self.middle
        return w / w.norm()

    def _gradient(self, w: Tensor, batch: Sequence[Example], at_once: int) -> tuple[float, Tensor]:
        """The batch's loss, and its gradient by w along the unit sphere."""
        n_tokens = sum(len(ids) - first for ids, first in batch)
        total, gradient = 0.0, torch.zeros_like(w)
        for start in range(0, len(batch), at_once):
            part = batch[start : start + at_once]
            spare: list[Tensor] = []
            with torch.enable_grad():
                # Through `_unit`, so that the gradient has nothing along w or along the mean state.
                unit = self._unit(w)
                nll = self._nll(part, lambda hidden, counted: self._pushed(hidden, counted, unit, spare))  # noqa: B023
                loss = nll / n_tokens + self.sparsity * spare[0].to(nll.device) / len(batch)
                (piece,) = torch.autograd.grad(loss, w)
            total, gradient = total + float(loss.detach()), gradient + piece
        return total, gradient

    def _pushed(self, hidden: Tensor, counted: Tensor, unit: Tensor, spare: list[Tensor]) -> Tensor:
        """Hidden states [B, T, d] after the push; to `spare` goes the sum over texts of their other latents' mean."""
        unit = unit.to(hidden.device)
        latents = (hidden.float() @ unit).relu() * counted
        top = latents.topk(min(self.k, latents.shape[1]), dim=-1)
        number = counted.sum(-1)
        push = top.values.sum(-1) / number.clamp(max=self.k)
        spare.append((latents.scatter(-1, top.indices, 0.0).sum(-1) / number).sum())
        return hidden + ((push.unsqueeze(-1) * counted).unsqueeze(-1) * unit).to(hidden.dtype)

    def _nll(self, batch: Sequence[Example], change) -> Tensor:
        """Sum of the NLL of all response tokens, float32, with `change(hidden, counted)` before the block."""
        device, width = self.anatomy.device, max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch]).to(device)
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch]).to(device)
        places = [(row, t) for row, (ids, first) in enumerate(batch) for t in range(first, len(ids))]
        row, t = torch.tensor(places).to(device).unbind(1)
        counted = mask.bool() & (torch.arange(width, device=device) > 0)

        def rows_alone(module, args):
            # The head sees the rows that predict response tokens, as one contiguous matrix.
            hidden = args[0]
            at = (row * width + t - 1).to(hidden.device)
            return (hidden.reshape(-1, hidden.shape[-1]).index_select(0, at).unsqueeze(0), *args[1:])

        handle = self.anatomy.head.register_forward_pre_hook(rows_alone)
        try:
            with entering(self.block, lambda hidden: change(hidden, counted.to(hidden.device))):
                # The class's forward: trainers replace the instance's by closures of their own.
                logits = (
                    type(self.anatomy.model)
                    .forward(self.anatomy.model, input_ids=ids, attention_mask=mask, **self.options)
                    .logits
                )
        finally:
            handle.remove()
        return nn.functional.cross_entropy(logits[0].float(), ids[row, t].to(logits.device), reduction="sum")


def _encoded(tokenizer: PreTrainedTokenizerBase, instruction: str, response: str) -> Example:
    """Ids of instruction and response, and where the response begins."""
    prompt = instruction_prompt(tokenizer, instruction)
    # A response is set off by a space, unless the prompt ends in one or in a template's mark.
    marked = prompt[-1:].isspace() or prompt.endswith(tuple(tokenizer.get_added_vocab()))
    return encode_answer(tokenizer, prompt, response if marked else f" {response}")


def _batches(
    sequences: Sequence[Example], batch_size: int, epochs: int, generator: torch.Generator
) -> Iterator[list[Example]]:
    for _ in range(epochs):
        order = torch.randperm(len(sequences), generator=generator).tolist()
        for start in range(0, len(order), batch_size):
            yield [sequences[i] for i in order[start : start + batch_size]]


def _check(
    pairs: Sequence[Pair], k: int, sparsity: float, learning_rate: float, epochs: int, batch_size: int
) -> list[tuple[str, str]]:
    """(instruction, response) of all positives, then of all negatives."""
    if not isinstance(pairs, Sequence) or isinstance(pairs, str):
        raise ValueError(f"`pairs` must be a sequence of PairedResponse, got {type(pairs).__name__}")
    if not pairs:
        raise ValueError("`pairs` is empty: ReFT-r1 needs responses with the concept and without")
    for i, pair in enumerate(pairs):
        for name in ("instruction", "positive", "negative"):
            text = getattr(pair, name, None)
            if not isinstance(text, str) or not text.strip():
                raise ValueError(
                    f"`pairs` must hold PairedResponse objects with text, but the {name} of pair {i} is {text!r}"
                )
    for name, number in (("k", k), ("epochs", epochs), ("batch_size", batch_size)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1, got {number!r}")
    for name, number in (("sparsity", sparsity), ("learning_rate", learning_rate)):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ValueError(f"`{name}` must be a finite number, got {number!r}")
    if sparsity < 0:
        raise ValueError(f"`sparsity` must not be negative, got {sparsity}")
    if learning_rate <= 0:
        raise ValueError(f"`learning_rate` must be positive, got {learning_rate}")
    return [(p.instruction, p.positive) for p in pairs] + [(p.instruction, p.negative) for p in pairs]


def _check_room(anatomy: Anatomy, sequences: Sequence[Example]) -> None:
    limit = getattr(anatomy.model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(range(len(sequences)), key=lambda i: len(sequences[i][0]))
    if limit and len(sequences[longest][0]) > limit:
        n = len(sequences) // 2
        raise ValueError(
            f"`pairs` must fit into the model's {limit} positions, but pair {longest % n} has "
            f"{len(sequences[longest][0])} tokens with its {'positive' if longest < n else 'negative'} response: "
            "shorten it"
        )
