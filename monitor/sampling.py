"""What a model may say: many samples of an answer, decoded in batches, with random numbers that can be had again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from monitor.anatomy import find_anatomy
from monitor.generation import Decoder, check_room, encode_prompt
from monitor.ranks import gathered, rank, world_size
from monitor.undisturbed import undisturbed


def sampled_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    n_samples: int,
    seeds: Sequence[int],
    temperature: float = 1.0,
    top_k: int | None = None,
    max_new_tokens: int = 50,
    first_steps: Sequence[Callable[[], AbstractContextManager]] | None = None,
    first_step_token: int = 2,
    batch_tokens: int = 16384,
    progress: str | None = None,
) -> list[list[str]]:
    """Draw answers to each prompt.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, optionally under PEFT or DDP. Left as it was found: weights, modes,
        configs and random-number generators.
    tokenizer : PreTrainedTokenizerBase
    prompts : sequence of str
        As in ``qa_prompt(question)``; encoded as in `monitor.generation.greedy_answers`.
    n_samples : int, >= 1
        Answers a prompt.
    seeds : sequence of int, one a prompt
        Of the prompt's own generator. Prompts of one seed are answered with common random numbers: what differs
        between their answers is due to prompt and model, not to luck.
    temperature : float, > 0
        The logits are divided by it.
    top_k : int, >= 1, optional
        Only the `top_k` likeliest tokens can be drawn; all without it.
    max_new_tokens : int, >= 1
        Tokens an answer may have.
    first_steps : sequence of callables, one a prompt, optional
        Each gives a context in which the first decode step runs, a forward of sequence length 1. Prefill and later
        steps run outside of it. It is entered once for every sample (a batch has one), and left before anything else
        happens, also after an exception.
    first_step_token : {1, 2}
        The new token whose logits that step gives. 2: the step reads an answer's first token, the whole prompt being
        prefilled. 1: it reads the prompt's last token, the prompt being prefilled up to there.
    batch_tokens : int, >= 1
        Tokens in a batch, prompt and answer of every sample. Halved for as long as the device runs out of memory.
    progress : str, optional
        Title of a progress bar on standard error; none without it.

    Returns
    -------
    list of list of str
        `n_samples` answers a prompt, in the prompts' order, without special tokens, up to the first EOS token of the
        tokenizer or of the model's configuration. White space is kept.

    Raises
    ------
    ValueError
        For a model that cannot generate or is sharded, a blank prompt, one that leaves no room for the answer, bad
        numbers, or logits that are not finite.

    Notes
    -----
    A prompt is prefilled once, for all its samples. A token is drawn by inverting the distribution function over the
    kept tokens in the vocabulary's order: token = min{t : F(t) > u}, u uniform from the prompt's generator on the CPU,
    one a sample and step. Small changes of the logits then change few draws. Answers do not depend on the batch size
    or on the number of ranks, up to rounding. With several ranks all must call; the prompts are shared out, and all
    get all answers.
    """
    _check(prompts, n_samples, seeds, temperature, top_k, max_new_tokens, first_steps, first_step_token, batch_tokens)
    anatomy = find_anatomy(model)
    if anatomy.sharded:
        raise ValueError("`model` must not be sharded (FSDP) to draw samples from it: gather or reload it in one piece")
    decoder = Decoder(anatomy, tokenizer)
    sequences = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    check_room(anatomy, prompts, sequences, max_new_tokens)
    short = next((i for i, sequence in enumerate(sequences) if len(sequence) < 2), None)
    if first_step_token == 1 and short is not None:
        raise ValueError(
            f"`first_step_token` must be 2 for prompts of a single token, as prompt {short} is ({prompts[short]!r}): "
            "nothing of it could be prefilled"
        )
    sampler = _Sampler(decoder, temperature, top_k, max_new_tokens, first_step_token, batch_tokens)

    mine = range(rank(), len(prompts), world_size())
    answers: dict[int, list[str]] = {}
    silent = progress is None or rank() != 0
    with (
        undisturbed(anatomy),
        tqdm(total=len(mine) * n_samples, desc=progress, unit="sample", leave=False, disable=silent) as bar,
    ):
        for i in mine:
            generator = torch.Generator().manual_seed(seeds[i])
            uniforms = torch.rand(n_samples, max_new_tokens, dtype=torch.float64, generator=generator)
            tokens = sampler.sample(sequences[i], uniforms, first_steps[i] if first_steps else nullcontext, bar)
            answers[i] = [decoder.text(said) for said in tokens]
    if world_size() > 1:
        answers = {i: answer for part in gathered(answers) for i, answer in part.items()}
    return [answers[i] for i in range(len(prompts))]


def draw(logits: Tensor, uniforms: Tensor, temperature: float, top_k: int | None) -> Tensor:
    """One token a row, by inverting the distribution function in the vocabulary's order.

    Parameters
    ----------
    logits : Tensor [B, V]
    uniforms : Tensor [B], float64, in [0, 1), on the same device
    temperature, top_k
        As for `sampled_answers`.

    Returns
    -------
    Tensor [B], int64
        Token t with probability softmax(logits / temperature)_t among the `top_k` largest; for one u always the same.
    """
    size = logits.shape[-1]
    k = size if top_k is None else min(top_k, size)
    # In the vocabulary's order two tokens that change places in likelihood do not change places here.
    ids = logits.topk(k, dim=-1).indices.sort(dim=-1).values
    cumulative = (logits.gather(-1, ids).double() / temperature).softmax(-1).cumsum(-1)
    at = (cumulative <= uniforms.unsqueeze(-1) * cumulative[:, -1:]).sum(-1, keepdim=True)
    return ids.gather(-1, at.clamp(max=k - 1)).squeeze(-1)


class _Sampler:
    """Samples of one prompt after another; remembers the batch size that fits into memory."""

    def __init__(
        self,
        decoder: Decoder,
        temperature: float,
        top_k: int | None,
        max_new_tokens: int,
        first_step_token: int,
        batch_tokens: int,
    ) -> None:
        self.decoder, self.temperature, self.top_k = decoder, temperature, top_k
        self.max_new_tokens, self.batch_tokens = max_new_tokens, batch_tokens
        self.first_step_token = first_step_token

    def sample(
        self, prompt: Sequence[int], uniforms: Tensor, first_step: Callable[[], AbstractContextManager], bar: tqdm
    ) -> list[list[int]]:
        """Tokens of each row of `uniforms` [n, max_new_tokens], up to the first stop token."""
        device = self.decoder.anatomy.device
        ids = torch.tensor([list(prompt)]).to(device)
        mask, positions = torch.ones_like(ids), torch.arange(ids.shape[1], device=device).unsqueeze(0)
        cache = self.decoder.new_cache()
        if self.first_step_token == 1:
            # The samples share this step as they share the prompt.
            self.decoder.next_logits(ids[:, :-1], mask[:, :-1], positions[:, :-1], cache)
            with first_step():
                logits = self.decoder.next_logits(ids[:, -1:], mask, positions[:, -1:], cache)
            first_step = nullcontext
        else:
            logits = self.decoder.next_logits(ids, mask, positions, cache)
        if not torch.isfinite(logits).all():
            raise ValueError(
                "`model` gives logits that are not finite, so nothing can be drawn: it has diverged, or its dtype "
                "overflows (float16 does on models with massive activations): load it in bfloat16 or float32"
            )
        said, width = [], ids.shape[1] + self.max_new_tokens
        while len(said) < len(uniforms):
            rows = uniforms[len(said) :][: max(1, self.batch_tokens // width)]
            try:
                tokens = self._continue(ids.shape[1], logits, copy.deepcopy(cache), rows.to(device), first_step)
            except torch.OutOfMemoryError:
                if len(rows) == 1:
                    raise
                self.batch_tokens = len(rows) // 2 * width
                continue
            said += [self._until_stop(row) for row in tokens.tolist()]
            bar.update(len(rows))
        return said

    def _continue(
        self, length: int, logits: Tensor, cache, uniforms: Tensor, first_step: Callable[[], AbstractContextManager]
    ) -> Tensor:
        """Answers [rows, max_new_tokens] after a prompt of `length` tokens, which `cache` holds for one row."""
        rows, device = len(uniforms), uniforms.device
        cache.batch_repeat_interleave(rows)
        mask = torch.ones(rows, length + self.max_new_tokens, dtype=torch.long, device=device)
        choices = [self._draw(logits.expand(rows, -1), uniforms[:, 0])]
        for step in range(1, self.max_new_tokens):
            at = length + step - 1  # the position of the token that this step reads
            with first_step() if step == 1 else nullcontext():
                logits = self.decoder.next_logits(
                    choices[-1].unsqueeze(1), mask[:, : at + 1], torch.full_like(mask[:, :1], at), cache
                )
            choices.append(self._draw(logits, uniforms[:, step]))
        return torch.stack(choices, 1)

    def _draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        return draw(logits.to(uniforms.device), uniforms, self.temperature, self.top_k)

    def _until_stop(self, tokens: list[int]) -> list[int]:
        # Samples that have ended are decoded on with the others: asking after each step which they are would make
        # the device wait, and the answers are short.
        return tokens[: next((i for i, token in enumerate(tokens) if token in self.decoder.stops), len(tokens))]


def _check(
    prompts, n_samples, seeds, temperature, top_k, max_new_tokens, first_steps, first_step_token, batch_tokens
) -> None:
    if isinstance(prompts, str):
        raise ValueError("`prompts` must be a sequence of texts, got one string: put it in a list")
    for i, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"`prompts` must hold text, got {prompt!r} at {i}: leave it out or ask something")
    for name, per_prompt in (("seeds", seeds), ("first_steps", first_steps)):
        if per_prompt is not None and len(per_prompt) != len(prompts):
            raise ValueError(f"`{name}` must be one a prompt, got {len(per_prompt)} for {len(prompts)} prompts")
    numbers = {"n_samples": n_samples, "max_new_tokens": max_new_tokens, "batch_tokens": batch_tokens}
    for name, number in (numbers | ({} if top_k is None else {"top_k": top_k})).items():
        if number < 1:
            raise ValueError(f"`{name}` must be at least 1, got {number}")
    if first_step_token not in (1, 2):
        raise ValueError(f"`first_step_token` must be 1 or 2, got {first_step_token!r}")
    if not 0 < temperature < math.inf:
        raise ValueError(
            f"`temperature` must be positive and finite, got {temperature}: the limit at 0 is `greedy_answers`"
        )
