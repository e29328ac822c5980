"""The one activation pass: pooled hidden states and answer log-probabilities of many texts, read once for everybody.

The only file that puts hooks on a model. Hidden state i is what enters block i (transformers' numbering), and L is the
inner model's output after its final norm. Pooling happens inside the hooks, on the device, in float32, so that neither
the hidden states of all layers nor a vocabulary-sized logit tensor is ever held: the language-model head sees only the
rows that predict answer tokens.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from monitor.anatomy import Anatomy, find_anatomy
from monitor.device_batch import DeviceBatch, Store
from monitor.plan import Batch, Plan, build_plan
from monitor.ranks import rank, world_size
from monitor.requests import Answers, Request, States, TokenStates, resolve_layer
from monitor.results import Activations, AnswerScores
from monitor.undisturbed import undisturbed

__all__ = [
    "Activations",
    "AnswerScores",
    "Answers",
    "States",
    "TokenStates",
    "measure_activations",
    "plan_activations",
    "resolve_layer",
    "run_plan",
]

DEFAULT_TOKEN_BUDGET = 2048


def plan_activations(
    model: nn.Module, tokenizer, requests: Sequence[Request], *, max_length: int | None = None
) -> Plan:
    """Tokenise and deduplicate `requests` for `model`; see `monitor.plan.build_plan`.

    `max_length` defaults to what the model and the tokenizer allow.
    """
    anatomy = find_anatomy(model)
    config = anatomy.model.config.get_text_config()
    if max_length is None:
        limits = [getattr(config, "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None)]
        limits = [int(n) for n in limits if n is not None and 0 < n < 10**9]
        max_length = min(limits, default=None)
    if any(isinstance(r, Answers) for r in requests) and anatomy.head is None:
        raise ValueError(
            f"Answer log-probabilities need a language-model head, and {type(anatomy.model).__name__} has none. "
            "Load a causal language model, or leave out the measures that score answers."
        )
    return build_plan(
        tokenizer,
        requests,
        n_layers=anatomy.n_layers,
        vocab_size=anatomy.vocab_size,
        max_length=max_length,
        causal=anatomy.head is not None,
    )


def measure_activations(
    model: nn.Module,
    tokenizer,
    requests: Sequence[Request],
    *,
    token_budget: int = DEFAULT_TOKEN_BUDGET,
    max_length: int | None = None,
    progress: str | None = None,
) -> Activations:
    """Read the union of `requests` from `model` in one pass.

    Parameters
    ----------
    model : nn.Module
        A transformers model, optionally under PEFT, DDP or FSDP. Left as it was found: weights, modes, hooks, caches
        and random-number generators.
    tokenizer : PreTrainedTokenizerBase
    requests : sequence of States, Answers or TokenStates
    token_budget : int, default 2048
        Padded tokens in a batch. Halved for as long as the device runs out of memory.
    max_length : int, optional
        Tokens a text may have; by default what the model and the tokenizer allow.
    progress : str, optional
        Title of a progress bar on standard error; none without it.

    Returns
    -------
    activations : Activations

    Raises
    ------
    ValueError
        For bad requests (see `monitor.plan.build_plan`), or a model the pass cannot read.

    Notes
    -----
    Values do not depend on the composition of batches, on the padding side or on the number of ranks. With several
    ranks all of them must call, and all get the whole result.
    """
    plan = plan_activations(model, tokenizer, requests, max_length=max_length)
    return run_plan(model, plan, token_budget=token_budget, progress=progress)


def run_plan(
    model: nn.Module, plan: Plan, *, token_budget: int = DEFAULT_TOKEN_BUDGET, progress: str | None = None
) -> Activations:
    """Run a plan made by `plan_activations`; the same contract as `measure_activations`."""
    anatomy = find_anatomy(model)
    if anatomy.n_layers != plan.n_layers or anatomy.vocab_size != plan.vocab_size:
        raise ValueError(
            f"The plan was made for a model of {plan.n_layers} blocks and {plan.vocab_size} tokens, this one has "
            f"{anatomy.n_layers} and {anatomy.vocab_size}. Reference and model must share architecture and tokenizer."
        )
    store = Store(plan, anatomy)
    world = world_size()
    batches = plan.batches(token_budget)
    mine = batches[rank() :: world]
    if anatomy.sharded and world > 1:
        # Every forward of a sharded model is a collective: all ranks run equally many, the surplus is discarded.
        rounds = math.ceil(len(batches) / world)
        mine += [batches[0]] * (rounds - len(mine))
    duplicates = max(0, len(mine) - len(batches[rank() :: world]))
    with undisturbed(anatomy), _Reader(anatomy, plan, store) as reader:
        bar = tqdm(
            total=sum(len(b.sequences) for b in mine),
            desc=progress,
            unit="text",
            leave=False,
            disable=progress is None or rank() != 0,
        )
        queue = deque(mine)
        while queue:
            batch = queue.popleft()
            store.discard = duplicates > 0 and len(queue) < duplicates
            try:
                reader.read(batch)
            except (RuntimeError, MemoryError) as error:
                if not _out_of_memory(error) or len(batch.sequences) == 1 or (anatomy.sharded and world > 1):
                    raise
                queue.appendleft(batch)
                queue = deque(half for b in queue for half in _halves(b, len(batch.sequences) // 2))
                reader.release_memory()
                continue
            bar.update(len(batch.sequences))
        bar.close()
    tensors = store.gather(world)
    _warn_if_not_finite(plan, tensors)
    return Activations(plan, tensors)


class _Stop(Exception):
    """Leaves a forward once everything that was asked for has been read."""


class _Reader:
    """The hooks, and one batch's forward through them."""

    def __init__(self, anatomy: Anatomy, plan: Plan, store: Store) -> None:
        self.anatomy, self.plan, self.store = anatomy, plan, store
        self.handles: list = []
        self.batch: DeviceBatch | None = None
        known = inspect.signature(type(anatomy.inner).forward).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
        options = {"use_cache": False, "output_hidden_states": False, "output_attentions": False, "return_dict": True}
        self.options = {name: value for name, value in options.items() if name in known or takes_any}

    def __enter__(self) -> _Reader:
        anatomy = self.anatomy
        wanted = {layer for slot in self.plan.slots for layer in slot.layers}
        wanted |= {slot.layer for slot in self.plan.token_slots}
        for i, block in enumerate(anatomy.blocks):
            if i in wanted:
                # prepend: run before FSDP gathers the block's parameters, which a stop would leave unsharded.
                hook = block.register_forward_pre_hook(self._block_hook(i), with_kwargs=True, prepend=True)
                self.handles.append(hook)
        self.handles.append(anatomy.inner.register_forward_hook(self._inner_hook))
        if anatomy.head is not None and self.plan.answer_start:
            self.handles.append(anatomy.head.register_forward_pre_hook(self._head_hook))
        return self

    def __exit__(self, *_) -> None:
        for handle in self.handles:
            handle.remove()
        self.batch = None

    def read(self, batch: Batch) -> None:
        self.batch = DeviceBatch(batch, self.plan, self.store, self.anatomy.device)
        inputs = {"input_ids": self.batch.input_ids, **self.options}
        if self.batch.padded:
            inputs["attention_mask"] = self.batch.mask.long()
        try:
            if self.anatomy.sharded:
                output = self.anatomy.outer(**inputs)
            elif batch.head:
                # The class's forward: TRL replaces the instance's by a closure of its own.
                output = type(self.anatomy.model).forward(self.anatomy.model, **inputs)
            else:
                output = self.anatomy.inner(**inputs)
        except _Stop:
            return
        finally:
            batch_on_device, self.batch = self.batch, None
        if batch.head and not self.store.discard:
            batch_on_device.write_answers(output.logits)

    def _block_hook(self, layer: int):
        def hook(module, args, kwargs):
            if self.batch is None:
                return
            hidden = args[0] if args else kwargs["hidden_states"]
            self._write(layer, hidden)
            if layer == self.batch.stop and not self.batch.head:
                raise _Stop

        return hook

    def _inner_hook(self, module, args, output):
        if self.batch is None:
            return
        if self.batch.stop == self.plan.n_layers:
            hidden = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
            self._write(self.plan.n_layers, hidden)
        if not self.batch.head and self.anatomy.sharded:
            raise _Stop  # leave the outer forward before the head

    def _head_hook(self, module, args):
        if self.batch is None:
            return None
        hidden = args[0]
        # A contiguous 2-D gather: a sliced 3-D input makes the head's matrix product several times slower.
        rows = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self.batch.answer_positions)
        return (rows.unsqueeze(0), *args[1:])

    def _write(self, layer: int, hidden: Tensor) -> None:
        if not self.store.discard:
            self.batch.write_states(layer, hidden)

    def release_memory(self) -> None:
        self.batch = None
        if self.anatomy.device.type == "cuda":
            torch.cuda.empty_cache()


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return any(s in str(error) for s in ("out of memory", "can't allocate memory", "not enough memory"))


def _halves(batch: Batch, size: int) -> list[Batch]:
    size = max(1, size)
    return [Batch(batch.sequences[i : i + size], batch.stop, batch.head) for i in range(0, len(batch.sequences), size)]


def _warn_if_not_finite(plan: Plan, tensors: dict[str, Tensor]) -> None:
    for i, slot in enumerate(plan.slots):
        bad = ~torch.isfinite(tensors[f"states.{i}"]).all(-1)
        if bad.any():
            layers = [layer for layer, column in zip(slot.layers, bad.any(0).tolist(), strict=True) if column]
            _warn_of_overflow(f"{int(bad.any(1).sum())} of {len(bad)} texts", layers)
    for i, slot in enumerate(plan.token_slots):
        bad = ~torch.isfinite(tensors[f"tokens.{i}"]).all(-1)
        if bad.any():
            _warn_of_overflow(f"{int(bad.sum())} of {len(bad)} tokens", [slot.layer])


def _warn_of_overflow(what: str, layers: list[int]) -> None:
    warnings.warn(
        f"Hidden states of {what} are not finite at layers {layers}; the readings that need them are invalid. The "
        "model may have diverged, or its dtype overflows (float16 does on models with massive activations): load it in "
        "bfloat16 or float32.",
        stacklevel=4,
    )
