"""What a model says when it is asked: greedy answers, decoded in batches.

The loop is written out instead of `model.generate`, which fills every option that is not set from the checkpoint's
own `generation_config`. Some of these cannot be set to "off" (`suppress_tokens`, `bad_words_ids`), so with it the
answer would be the checkpoint's generation settings' as well as the weights'. The loop also calls the class's
forward, not the one that a trainer has put on the instance.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import DynamicCache, PreTrainedTokenizerBase

from monitor.anatomy import Anatomy, find_anatomy
from monitor.ranks import gathered, rank, world_size
from monitor.stimuli.encoding import encode_answer, qa_answer
from monitor.undisturbed import undisturbed


def greedy_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 50,
    one_line: bool = True,
    batch_tokens: int = 4096,
    progress: str | None = None,
) -> list[str]:
    """Decode the likeliest token after each prompt, again and again, until the answer ends.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, optionally under PEFT, DDP or FSDP. Left as it was found: weights,
        modes, configs and random-number generators. Under FSDP never call between backward and the optimiser's step.
    tokenizer : PreTrainedTokenizerBase
    prompts : sequence of str
        As in ``qa_prompt(question)``. Encoded as they are in training (`encode_answer`): one BOS where the tokenizer
        puts one, and nothing appended.
    max_new_tokens : int, >= 1
        Tokens an answer may have; 50 as in arXiv 2611.05272, App. B.6.
    one_line : bool
        The answer is the first line that holds text, and decoding stops at its end. Texts are
        ``"{question}\\nAnswer: {answer}"``, so what follows an answer's line break is the next question that a model
        makes up: it belongs to no answer and would hide a right one among wrong words. Line breaks *before* the
        answer do not end it, or a model that starts with one would seem to know nothing. False: all that is said.
    batch_tokens : int, >= 1
        Tokens in a batch, those to be decoded included. Halved for as long as the device runs out of memory.
    progress : str, optional
        Title of a progress bar on standard error; none without it.

    Returns
    -------
    list of str
        One answer a prompt, in the prompts' order, without special tokens and surrounding white space; "" if nothing
        was said. It ends at the first EOS token of the tokenizer or of the model's configuration.

    Raises
    ------
    ValueError
        For a model that cannot generate, a blank prompt, a prompt that leaves no room for the answer, bad numbers.

    Notes
    -----
    Answers do not depend on the composition of batches or on the number of ranks, up to rounding: in half precision
    two tokens may be as good as tied. With several ranks all of them must call, and all get all answers; the prompts
    are shared out, except under FSDP, where every forward needs every rank and all decode the same.
    """
    _check_arguments(prompts, max_new_tokens, batch_tokens)
    anatomy = find_anatomy(model)
    decoder = _GreedyDecoder(anatomy, tokenizer, max_new_tokens, one_line)
    sequences = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    check_room(anatomy, prompts, sequences, max_new_tokens)

    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    shared = world_size() > 1 and not anatomy.sharded
    mine = order[rank() :: world_size()] if shared else order
    queue = deque(length_batches(mine, sequences, max_new_tokens, batch_tokens))
    answers: dict[int, str] = {}
    silent = progress is None or rank() != 0
    with (
        undisturbed(anatomy),
        tqdm(total=len(mine), desc=progress, unit="answer", leave=False, disable=silent) as bar,
    ):
        while queue:
            batch = queue.popleft()
            try:
                said = decoder.decode([sequences[i] for i in batch])
            except torch.OutOfMemoryError:
                if len(batch) == 1 or anatomy.sharded:
                    raise
                queue.extendleft((batch[len(batch) // 2 :], batch[: len(batch) // 2]))
                continue
            answers.update(zip(batch, said, strict=True))
            bar.update(len(batch))
    if shared:
        answers = {i: answer for part in gathered(answers) for i, answer in part.items()}
    return [answers[i] for i in range(len(prompts))]


class Decoder:
    """A model's next-token logits, and the tokens that end what it says; what that takes is looked up once.

    Parameters
    ----------
    anatomy : Anatomy
    tokenizer : PreTrainedTokenizerBase

    Attributes
    ----------
    stops : set of int
        EOS of the tokenizer and of the model's configurations.

    Raises
    ------
    ValueError
        For a model without a head, or one that takes no cache.
    """

    def __init__(self, anatomy: Anatomy, tokenizer: PreTrainedTokenizerBase) -> None:
        name = type(anatomy.model).__name__
        if anatomy.head is None:
            raise ValueError(
                f"`model` must be a causal language model, got {name}, which has no head to speak with: load it with "
                "AutoModelForCausalLM"
            )
        self.anatomy, self.tokenizer = anatomy, tokenizer
        known = inspect.signature(type(anatomy.model).forward).parameters
        # transformers 5.24 calls the cache `cache`; before, it was `past_key_values`.
        cache_name = next((n for n in ("cache", "past_key_values") if n in known), None)
        if cache_name is None:
            raise ValueError(f"`model` must take a cache of past keys and values to decode with, {name} takes none")
        self.cache_name = cache_name
        self.takes_positions = "position_ids" in known
        self.options = {"use_cache": True, "return_dict": True} | (
            {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        )
        self.stops = _stop_tokens(anatomy.model, tokenizer)

    def new_cache(self) -> DynamicCache:
        """An empty cache for `next_logits` to fill."""
        return DynamicCache(config=self.anatomy.model.config)

    def next_logits(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """ids [B, T] after what the cache holds, mask [B, all so far], positions [B, T] -> logits [B, V] after them."""
        anatomy = self.anatomy
        inputs = {"input_ids": ids, "attention_mask": mask, self.cache_name: cache, **self.options}
        if self.takes_positions:
            inputs["position_ids"] = positions
        if anatomy.sharded:
            logits = anatomy.outer(**inputs).logits
        else:
            # The class's forward: trainers replace the instance's by closures of their own.
            logits = type(anatomy.model).forward(anatomy.model, **inputs).logits
        return logits[:, -1]

    def text(self, tokens: list[int]) -> str:
        """What the tokens say, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class _GreedyDecoder(Decoder):
    """Greedy decoding of one batch."""

    def __init__(self, anatomy: Anatomy, tokenizer, max_new_tokens: int, one_line: bool) -> None:
        super().__init__(anatomy, tokenizer)
        self.max_new_tokens, self.one_line = max_new_tokens, one_line
        self.breaks_line: dict[int, bool] = {}

    def decode(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        device, width = self.anatomy.device, max(map(len, sequences))
        # Left-padded: the last column is everyone's last token. What stands in the padding is never attended to.
        ids = torch.zeros(len(sequences), width, dtype=torch.long)
        mask = torch.ones(len(sequences), width + self.max_new_tokens, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, width - len(sequence) :] = torch.tensor(sequence)
            mask[row, : width - len(sequence)] = 0
        ids, mask = ids.to(device), mask.to(device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = self.new_cache()
        said: list[list[int]] = [[] for _ in sequences]
        rows = list(range(len(sequences)))  # which sequence a row of the batch is
        start, stop = 0, width
        while True:
            choice = self._next(ids, mask[:, :stop], positions[:, start:stop], cache)
            going = []
            for at, token in enumerate(choice.tolist()):
                if not self._ends(said[rows[at]], token):
                    going.append(at)
            if not going or stop == width + self.max_new_tokens - 1:
                return [self._answer(tokens) for tokens in said]
            if len(going) < len(rows):
                # Answers differ much in length: rows that have ended are not computed any further.
                keep = torch.tensor(going).to(device)
                cache.reorder_cache(keep)
                mask, positions, choice = mask[keep], positions[keep], choice[keep]
                rows = [rows[at] for at in going]
            ids, start, stop = choice.unsqueeze(1), stop, stop + 1

    def _next(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """The likeliest next token [B]; parameters as for `next_logits`."""
        choice = self.next_logits(ids, mask, positions, cache).argmax(-1).to(ids.device)
        if self.anatomy.sharded and world_size() > 1:
            # All ranks must leave the loop together: a tie broken differently would leave one of them waiting.
            dist.broadcast(choice, src=0)
        return choice

    def _ends(self, said: list[int], token: int) -> bool:
        """Add `token` to what was said, unless it is a stop token; whether the answer ends with it."""
        if token in self.stops:
            return True
        said.append(token)
        if not self.one_line:
            return False
        if token not in self.breaks_line:
            self.breaks_line[token] = "\n" in self.text([token])
        return self.breaks_line[token] and "\n" in self.text(said).lstrip()

    def _answer(self, said: list[int]) -> str:
        text = self.text(said).strip()
        return text.split("\n", 1)[0].rstrip() if self.one_line else text


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The prompt's ids as an answer sees them: encoded alone, a template could append EOS to it."""
    ids, first = encode_answer(tokenizer, prompt, qa_answer("x"))
    return ids[:first]


def _stop_tokens(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """EOS of the tokenizer, and of the configurations, where a chat model's end of turn is."""
    stops: set[int] = set()
    generation = getattr(model, "generation_config", None)
    for source in (tokenizer, generation, model.config.get_text_config()):
        eos = getattr(source, "eos_token_id", None)
        stops.update(eos if isinstance(eos, (list, tuple)) else [] if eos is None else [eos])
    return {int(token) for token in stops}


def length_batches(
    order: Sequence[int], sequences: Sequence[Sequence[int]], new_tokens: int, batch_tokens: int
) -> Iterator[list[int]]:
    """Indices in `order`, lengths ascending, in batches of at most `batch_tokens` padded tokens (or of one).

    `new_tokens` is what each sequence will grow by.
    """
    batch: list[int] = []
    for i in order:
        if batch and (len(batch) + 1) * (len(sequences[i]) + new_tokens) > batch_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _check_arguments(prompts: Sequence[str], max_new_tokens: int, batch_tokens: int) -> None:
    if isinstance(prompts, str):
        raise ValueError("`prompts` must be a sequence of texts, got one string: put it in a list")
    for i, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"`prompts` must hold text, got {prompt!r} at {i}: leave it out or ask something")
    for name, number in (("max_new_tokens", max_new_tokens), ("batch_tokens", batch_tokens)):
        if number < 1:
            raise ValueError(f"`{name}` must be at least 1, got {number}")


def check_room(
    anatomy: Anatomy, prompts: Sequence[str], sequences: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    limit = getattr(anatomy.model.config.get_text_config(), "max_position_embeddings", None)
    if not sequences or not limit:
        return
    longest = max(range(len(sequences)), key=lambda i: len(sequences[i]))
    needed = len(sequences[longest]) + max_new_tokens
    if needed > limit:
        raise ValueError(
            f"`prompts` and `max_new_tokens` must fit into the model's {limit} positions, but prompt {longest} "
            f"({prompts[longest][:60]!r}) has {len(sequences[longest])} tokens, {needed} with the answer: shorten it, "
            "or lower `max_new_tokens`"
        )
