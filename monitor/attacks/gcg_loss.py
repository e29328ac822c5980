"""How far a model is from answering with the target after a suffix: for one suffix with gradient, for many without."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from monitor.anatomy import Anatomy
from monitor.attacks.gcg_prefix import KeysValues, can_be_cut, fixed_cache, growing_cache, states_of
from monitor.attacks.gcg_prompt import SuffixPrompt


class TargetLoss:
    """Mean negative log-likelihood of a prompt's target tokens, in nats a token, as a function of its suffix.

    ℓ(s) = −(1/T) Σ_t log p(y_t | before, s, after, y_<t), in float32 from the model's logits.

    Parameters
    ----------
    anatomy : Anatomy
        Of a causal language model in evaluation mode whose parameters need no gradient.
    prompt : SuffixPrompt
    batch_size : int
        Suffixes in a forward; halved for as long as the device runs out of memory.
    prefix_cache : bool
        Whether keys and values of what comes before the first changed token are computed once. Switched off by itself
        for models that do not keep all of them (sliding windows, recurrent layers): the same losses, more work.

    Notes
    -----
    Only the rows that predict target tokens reach the head. The model's own forward is called, so that what an
    architecture does to its logits (soft caps, scales) is in; the class's, as trainers replace the instance's.
    """

    def __init__(self, anatomy: Anatomy, prompt: SuffixPrompt, batch_size: int, prefix_cache: bool = True) -> None:
        self.anatomy, self.prompt, self.batch_size = anatomy, prompt, batch_size
        self.embed = anatomy.model.get_input_embeddings()
        # The last target token predicts nothing that is asked for.
        self._rest = [*prompt.after, *prompt.target[:-1]]
        self._target = torch.tensor(prompt.target)
        known = inspect.signature(type(anatomy.model).forward).parameters
        # transformers 5.24 calls the cache `cache`; before, it was `past_key_values`.
        self._cache_name = next((n for n in ("cache", "past_key_values") if n in known), None)
        self._before = self._states_before() if prefix_cache else None
        self._current: tuple[list[int], KeysValues] | None = None

    @property
    def cached(self) -> bool:
        """Whether keys and values of the prompt's beginning are reused."""
        return self._before is not None

    def gradient(self, suffix: Sequence[int]) -> tuple[float, Tensor]:
        """The suffix's loss and its gradient with respect to the suffix's embeddings, (n_slots, d) float32.

        The suffix becomes the current one: `losses` of suffixes that begin like it starts from its keys and values.
        """
        n_before = len(self.prompt.before) if self.cached else 0
        head = [] if self.cached else self.prompt.before
        ids = self._ids([[*head, *suffix, *self._rest]])
        cache = growing_cache(self._before) if self.cached else None
        with torch.enable_grad():
            inputs = self.embed(ids).detach().requires_grad_()
            loss = self._loss(cache, inputs_embeds=inputs).sum()
            (gradient,) = torch.autograd.grad(loss, inputs)
        if self.cached:
            self._current = (list(suffix), states_of(cache, n_before + len(suffix)))
        return float(loss.detach()), gradient[0, len(head) : len(head) + len(suffix)].float()

    @torch.no_grad()
    def scores(self, gradient: Tensor, tokens: Tensor, rows: int = 16384) -> Tensor:
        """First-order change of the loss, up to a constant a slot, for each of `tokens` in each slot.

        With E the embedding of the tokens this is ∇ℓ Eᵀ, the gradient with respect to the slot's one-hot vector
        (arXiv 2307.15043, Sec. 2.2), without a one-hot vector.

        Parameters
        ----------
        gradient : Tensor of shape (n_slots, d)
        tokens : Tensor of shape (n,)
            Taken through the embedding module, adapters and scales included, `rows` at a time.

        Returns
        -------
        Tensor of shape (n_slots, n), float32
        """
        return torch.cat([gradient @ self.embed(ids).float().T for ids in tokens.to(gradient.device).split(rows)], 1)

    @torch.no_grad()
    def losses(self, suffixes: Sequence[Sequence[int]], changed: Sequence[int] | None = None) -> Tensor:
        """Loss of each suffix.

        Parameters
        ----------
        suffixes : sequence of n >= 1 lists of int
        changed : sequence of n int, optional
            For each, a slot before which it equals the current suffix (`gradient`'s last). Sorted by it, a batch starts
            where its first suffix begins to differ.

        Returns
        -------
        Tensor of shape (n,), float32, on the CPU; infinity where the model gives no finite one

        Raises
        ------
        torch.OutOfMemoryError
            If not even one suffix fits.
        """
        if changed is None or self._current is None:
            changed = [0] * len(suffixes)
        order = sorted(range(len(suffixes)), key=lambda i: changed[i])
        found, done = [], 0
        while done < len(order):
            batch = order[done : done + self.batch_size]
            try:
                found.append(self._batch([suffixes[i] for i in batch], changed[batch[0]]))
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                self.batch_size = len(batch) // 2
                continue
            done += len(batch)
        losses = torch.empty(len(order))
        losses[torch.tensor(order)] = torch.cat(found).cpu()
        return losses.nan_to_num(nan=torch.inf)

    def _batch(self, suffixes: Sequence[Sequence[int]], same: int) -> Tensor:
        """Losses of suffixes that equal the current one in the first `same` slots."""
        if not self.cached:
            return self._loss(None, input_ids=self._ids([[*self.prompt.before, *s, *self._rest] for s in suffixes]))
        states = self._current[1] if same else self._before
        cache = fixed_cache(states, len(self.prompt.before) + same)
        return self._loss(cache, input_ids=self._ids([[*s[same:], *self._rest] for s in suffixes]))

    def _ids(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows).to(self.anatomy.device)

    def _loss(self, cache: DynamicCache | None, **inputs: Tensor) -> Tensor:
        """[B, n] tokens after what the cache holds, the last T of which predict the target -> losses [B]."""
        logits = self._logits(cache, **inputs).float()
        target = self._target.to(logits.device).expand(len(logits), -1)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(len(logits), -1).mean(1)

    def _logits(self, cache: DynamicCache | None, **inputs: Tensor) -> Tensor:
        """Logits of the rows that predict the target, [B, T, V]."""
        (tokens,) = inputs.values()
        n_rows, n_target = len(tokens), len(self._target)
        with _last_rows_only(self.anatomy.head, n_target) as gathered:
            logits = self._forward(cache, **inputs)
        if gathered:
            return logits.view(n_rows, n_target, -1)
        return logits[:, -n_target:]  # a forward that multiplies by the head's weight without calling the head

    def _forward(self, cache: DynamicCache | None, **inputs: Tensor) -> Tensor:
        if cache is not None:
            inputs |= {self._cache_name: cache}
        model = self.anatomy.model
        return type(model).forward(model, use_cache=cache is not None, return_dict=True, **inputs).logits

    @torch.no_grad()
    def _states_before(self) -> KeysValues | None:
        """Keys and values of what comes before the suffix; None for a model that does not keep them all."""
        config, length = self.anatomy.model.config, len(self.prompt.before)
        if self._cache_name is None or not can_be_cut(config):
            return None
        cache = DynamicCache(config=config)
        with _last_rows_only(self.anatomy.head, 1):
            self._forward(cache, input_ids=self._ids([self.prompt.before]))
        if any(layer.get_seq_length() != length for layer in cache.layers):  # layers that borrow another's
            return None
        return states_of(cache, length)


@contextmanager
def _last_rows_only(head: torch.nn.Module, n: int) -> Iterator[list[bool]]:
    """Inside the block the head sees a sequence's last `n` rows only; what is yielded is not empty once it did.

    As one contiguous matrix: on a slice of a batch its product is several times slower.
    """
    gathered: list[bool] = []

    def keep(module: torch.nn.Module, args: tuple) -> tuple:
        gathered.append(True)
        hidden = args[0]
        return (hidden[:, -n:].reshape(1, -1, hidden.shape[-1]), *args[1:])

    handle = head.register_forward_pre_hook(keep)
    try:
        yield gathered
    finally:
        handle.remove()
