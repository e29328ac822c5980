"""What a model says while points of a concept's geometry are added to its hidden states, or put in their place."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from monitor.anatomy import Anatomy, find_anatomy
from monitor.generation import Decoder, check_room, encode_prompt
from monitor.ranks import gathered, rank, world_size
from monitor.requests import resolve_layer
from monitor.stimuli.encoding import asked_prompt
from monitor.undisturbed import undisturbed

MODES = ("add", "replace")


def steered_answers(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    points: Tensor | Sequence[Tensor],
    *,
    layer: int | float,
    strength: float,
    mode: str = "add",
    decay: float = 0.9,
    max_new_tokens: int = 20,
    batch_tokens: int = 16384,
    progress: str | None = None,
) -> list[list[str]]:
    """Decode the likeliest tokens after each prompt while each of the points steers the model.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, optionally under PEFT or DDP. Left as it was found: weights, gradients,
        hooks, modes, configs and random-number generators.
    tokenizer : PreTrainedTokenizerBase
    prompts : sequence of str
        Finished prompts, as in ``instruction_prompt(tokenizer, instruction)``. Encoded as in
        `monitor.generation.greedy_answers`, so with one BOS at most.
    points : Tensor [n, d], or a sequence of Tensors [n_i, d], one a prompt
        Any floating dtype and device; with one tensor all prompts are steered by the same points. n >= 1.
    layer : int or float
        Hidden state to steer, as in `monitor.activations.States`: what enters block `layer`. Not L, which no block
        reads.
    strength : float
        α of step 0. 0 steers nothing; negative ones push away (`mode` "add").
    mode : {"add", "replace"}
        With α_t = strength · decay^t and a point p: "add" is h ← h + α_t p. "replace" is h ← (1 − w_t) h + w_t p with
        w_t = α_t clipped to [0, 1]: at strength 1 the state of step 0 is the point itself.
    decay : float, in [0, 1]
        1 steers every step alike, 0 the first one alone. The paper decays exponentially and does not say how fast;
        0.9 leaves 14 % at the twentieth token.
    max_new_tokens : int, >= 1
        Tokens an answer may have.
    batch_tokens : int, >= 1
        Tokens in a batch, prompt and answer of every row; a row is a prompt with a point. Halved for as long as the
        device runs out of memory.
    progress : str, optional
        Title of a progress bar on standard error; none without it.

    Returns
    -------
    list (prompt) of list (point) of str
        In the order given, without special tokens and surrounding white space; each ends at the first EOS token of the
        tokenizer or of the model's configuration.

    Raises
    ------
    ValueError
        For a model that cannot generate or is sharded, a layer that no block reads, a blank prompt or one that leaves
        no room for the answer, points of another width or not finite, bad numbers, or logits that are not finite.

    Notes
    -----
    Sampling-based steering of MAxBench. Steered are the prompt's last token (t = 0), which the first new token is
    predicted from, and each new token as it is read (t = 1, 2, ...); the rest of the prompt is the model's own. So a
    prompt is prefilled up to its last token once for all its points in a batch, which share its keys and values. A
    decode step reads one token of every row, and rows that have ended are not computed any further.

    α_t p is rounded to the hidden state's dtype before it is added; "replace" mixes in float32. Answers do not depend
    on the composition of batches or on the number of ranks, up to rounding. With several ranks all must call; the
    prompts are shared out, and all get all answers.
    """
    _check(prompts, strength, mode, decay, max_new_tokens, batch_tokens)
    anatomy = find_anatomy(model)
    index = steerable_layer(anatomy, layer)
    clouds = _clouds(points, len(prompts), anatomy.hidden_size)
    sequences = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    check_room(anatomy, prompts, sequences, max_new_tokens)
    decoder = _SteeredDecoder(anatomy, tokenizer, strength, mode, decay, max_new_tokens)

    order = sorted(range(len(prompts)), key=lambda i: len(sequences[i]))
    rows = [(i, j) for i in order[rank() :: world_size()] for j in range(len(clouds[i]))]
    queue = deque(_batches(rows, sequences, max_new_tokens, batch_tokens))
    answers: dict[tuple[int, int], str] = {}
    silent = progress is None or rank() != 0
    with (
        undisturbed(anatomy),
        entering(anatomy.blocks[index], decoder.steered),
        tqdm(total=len(rows), desc=progress, unit="answer", leave=False, disable=silent) as bar,
    ):
        while queue:
            batch = queue.popleft()
            owners = {i: at for at, i in enumerate(dict.fromkeys(i for i, _ in batch))}
            try:
                said = decoder.decode(
                    [sequences[i] for i in owners],
                    [owners[i] for i, _ in batch],
                    torch.stack([clouds[i][j] for i, j in batch]),
                )
            except torch.OutOfMemoryError:
                size = len(batch) // 2
                if not size:
                    raise
                # The others would not fit either.
                queue = deque(b[at : at + size] for b in (batch, *queue) for at in range(0, len(b), size))
                continue
            answers.update(zip(batch, said, strict=True))
            bar.update(len(batch))
    answers = {row: answer for part in gathered(answers) for row, answer in part.items()}
    return [[answers[i, j] for j in range(len(cloud))] for i, cloud in enumerate(clouds)]


def instruction_prompt(tokenizer: PreTrainedTokenizerBase, instruction: str) -> str:
    """An instruction as a user gives it, up to where the response begins.

    In the tokenizer's chat template where it has one, else as ``"{instruction}\\nAnswer:"``. A template may write the
    BOS token into the text: encode it with `monitor.stimuli.encoding`, which keeps one.

    Raises
    ------
    ValueError
        For a blank instruction.
    """
    if not instruction.strip():
        raise ValueError(f"`instruction` must hold text, got {instruction!r}")
    return asked_prompt(tokenizer, instruction)


@contextmanager
def entering(block: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Pass the hidden state [B, T, d] that enters `block` through `change`, inside the block of code."""

    def hook(module, args, kwargs):
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    handle = block.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def steerable_layer(anatomy: Anatomy, layer: int | float) -> int:
    """The hidden state's index in 0..L-1, after checking that the model can be steered there.

    Raises
    ------
    ValueError
        For a sharded model, or a layer that no block reads.
    """
    if anatomy.sharded:
        raise ValueError("`model` must not be sharded (FSDP) to be steered: gather or reload it in one piece")
    index = resolve_layer(layer, anatomy.n_layers)
    if index == anatomy.n_layers:
        raise ValueError(
            f"`layer` must be a hidden state that a block reads, 0 to {index - 1} for {type(anatomy.model).__name__}, "
            f"got {layer}: hidden state {index} comes after the last block"
        )
    return index


def left_padded(sequences: Sequence[Sequence[int]], room: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [B, T], and mask and positions [B, T + room], int64 on the CPU; the last column is everyone's last token."""
    width = max(map(len, sequences))
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    mask = torch.ones(len(sequences), width + room, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        mask[row, : width - len(sequence)] = 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


class _SteeredDecoder(Decoder):
    """Greedy decoding of one batch of rows; `steered` is what the hook calls."""

    def __init__(
        self, anatomy: Anatomy, tokenizer, strength: float, mode: str, decay: float, max_new_tokens: int
    ) -> None:
        super().__init__(anatomy, tokenizer)
        self.strength, self.mode, self.decay, self.max_new_tokens = strength, mode, decay, max_new_tokens
        self.points: Tensor | None = None  # [B, d] float32; None outside of decode steps
        self.step = 0

    def steered(self, hidden: Tensor) -> Tensor:
        """The hidden state [B, 1, d] with each row's point in it."""
        if self.points is None:
            return hidden
        strength = self.strength * self.decay**self.step
        points = self.points.unsqueeze(1).to(hidden.device)
        if self.mode == "add":
            return hidden + (strength * points).to(hidden.dtype)
        weight = min(max(strength, 0.0), 1.0)
        return ((1 - weight) * hidden.float() + weight * points).to(hidden.dtype)

    def decode(self, prompts: Sequence[Sequence[int]], owners: Sequence[int], points: Tensor) -> list[str]:
        """What each row says: `owners[row]` is its prompt, `points[row]` what steers it."""
        device = self.anatomy.device
        ids, mask, positions = (tensor.to(device) for tensor in left_padded(prompts, self.max_new_tokens))
        points, owner = points.to(device), torch.tensor(owners).to(device)
        cache, at = self.new_cache(), ids.shape[1] - 1
        if at:
            self.next_logits(ids[:, :at], mask[:, :at], positions[:, :at], cache)
            cache.reorder_cache(owner)  # its prompt's keys and values for each row
        ids, mask, positions = ids[owner, -1:], mask[owner], positions[owner]
        said: list[list[int]] = [[] for _ in owners]
        rows = list(range(len(owners)))  # which answer a row of the batch is
        for step in range(self.max_new_tokens):
            here = at + step
            self.points, self.step = points, step
            try:
                logits = self.next_logits(ids, mask[:, : here + 1], positions[:, here : here + 1], cache)
            finally:
                self.points = None
            choice = logits.argmax(-1, keepdim=True)
            self._check_finite(logits.gather(-1, choice))
            choice = choice.to(device)
            going = []
            for row, token in enumerate(choice.squeeze(1).tolist()):
                if token not in self.stops:
                    said[rows[row]].append(token)
                    going.append(row)
            if not going:
                break
            if len(going) < len(rows):
                keep = torch.tensor(going).to(device)
                cache.reorder_cache(keep)
                mask, positions, points, choice = mask[keep], positions[keep], points[keep], choice[keep]
                rows = [rows[row] for row in going]
            ids = choice
        return [self.text(tokens).strip() for tokens in said]

    def _check_finite(self, best: Tensor) -> None:
        # The largest of the logits is NaN if any is.
        if not torch.isfinite(best).all():
            raise ValueError(
                f"`model` gives logits that are not finite when it is steered with `strength` {self.strength}: lower "
                "it, or load the model in bfloat16 or float32; a model that does so unsteered has diverged"
            )


def _batches(
    rows: Sequence[tuple[int, int]], sequences: Sequence[Sequence[int]], max_new_tokens: int, batch_tokens: int
) -> Iterator[list[tuple[int, int]]]:
    """Rows (prompt, point) in their order, prompts ascending in length, in batches of at most `batch_tokens` tokens."""
    batch: list[tuple[int, int]] = []
    for i, j in rows:
        length = len(sequences[i])
        full = (len(batch) + 1) * (length + max_new_tokens) > batch_tokens
        # Prompts of a single token have nothing to prefill: beside others they would be a row of padding alone.
        if batch and (full or (length > 1) != (len(sequences[batch[0][0]]) > 1)):
            yield batch
            batch = []
        batch.append((i, j))
    if batch:
        yield batch


def _clouds(points: Tensor | Sequence[Tensor], n_prompts: int, d: int) -> list[Tensor]:
    """Each prompt's points, float32."""
    shared = isinstance(points, Tensor) and points.ndim != 3
    if not shared and (not isinstance(points, (Tensor, Sequence)) or len(points) != n_prompts):
        got = f"{len(points)} for {n_prompts} prompts" if isinstance(points, (Tensor, Sequence)) else f"{points!r}"
        raise ValueError(
            f"`points` must be one tensor [n, {d}] for all prompts, or a list with such a tensor for each, got {got}"
        )
    for i, cloud in enumerate([points] if shared else points):
        name = "`points`" if shared else f"`points` of prompt {i}"
        if not isinstance(cloud, Tensor) or not cloud.is_floating_point():
            kind = cloud.dtype if isinstance(cloud, Tensor) else type(cloud).__name__
            raise ValueError(f"{name} must be a Tensor of a floating dtype, got {kind}")
        if cloud.ndim != 2 or not len(cloud) or cloud.shape[1] != d:
            raise ValueError(
                f"{name} must have the shape [n, {d}] of n >= 1 hidden states of the model, got {list(cloud.shape)}"
            )
        if not torch.isfinite(cloud).all():
            bad = int((~torch.isfinite(cloud).all(1)).nonzero()[0])
            raise ValueError(f"{name} must be finite, point {bad} is not: leave it out or sample closer to the model's")
    return [points.float()] * n_prompts if shared else [cloud.float() for cloud in points]


def _check(
    prompts: Sequence[str], strength: float, mode: str, decay: float, max_new_tokens: int, batch_tokens: int
) -> None:
    if isinstance(prompts, str):
        raise ValueError("`prompts` must be a sequence of texts, got one string: put it in a list")
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"`prompts` must hold text, got {prompt!r} at {i}: leave it out or ask something")
    for name, number in (("strength", strength), ("decay", decay)):
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
            raise ValueError(f"`{name}` must be a finite number, got {number!r}")
    if mode not in MODES:
        raise ValueError(f"`mode` must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "replace" and strength < 0:
        raise ValueError(f"`strength` must be at least 0 where `mode` is 'replace', got {strength}: it is a share")
    if not 0 <= decay <= 1:
        raise ValueError(f"`decay` must be in [0, 1], got {decay}: it is what a step leaves of the strength")
    for name, number in (("max_new_tokens", max_new_tokens), ("batch_tokens", batch_tokens)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1, got {number!r}")
