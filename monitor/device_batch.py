"""What a pass holds on the device: the results so far, and one batch with where its results go.

No hooks here; `monitor.activations` calls `write_states` from its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monitor.anatomy import Anatomy
from monitor.plan import Batch, Plan
from monitor.results import answer_offsets, token_offsets


class Store:
    """Results on the device, written batch by batch, moved to the CPU once."""

    def __init__(self, plan: Plan, anatomy: Anatomy) -> None:
        self.plan = plan
        self.discard = False
        device, d = anatomy.device, anatomy.hidden_size
        self.states = [torch.zeros(len(s.sequences), len(s.layers), d, device=device) for s in plan.slots]
        self.row = [{sequence: row for row, sequence in enumerate(s.sequences)} for s in plan.slots]
        self.token_offsets = [token_offsets(plan, i) for i in range(len(plan.token_slots))]
        self.tokens = [
            torch.zeros(sum(len(plan.sequences[i]) for i in s.sequences), d, device=device) for s in plan.token_slots
        ]
        self.offsets = answer_offsets(plan)
        self.wide = answer_offsets(plan, distribution=True)
        n_tokens = max((stop for _, stop in self.offsets.values()), default=0)
        n_rows = max((stop for _, stop in self.wide.values()), default=0)
        self.log_probs = torch.zeros(n_tokens, device=device)
        self.greedy = torch.zeros(n_tokens, device=device, dtype=torch.uint8)
        self.log_distribution = torch.zeros(n_rows, plan.vocab_size if n_rows else 0, device=device)

    def gather(self, world: int) -> dict[str, Tensor]:
        tensors = {f"states.{i}": t for i, t in enumerate(self.states)}
        tensors |= {f"tokens.{i}": t for i, t in enumerate(self.tokens)}
        if self.plan.answer_start:
            tensors["answers.log_probs"] = self.log_probs
            tensors["answers.greedy"] = self.greedy
        if self.plan.distribution:
            tensors["answers.log_distribution"] = self.log_distribution
        if world > 1:
            # Each row was written by one rank and is zero on the others.
            for tensor in tensors.values():
                torch.distributed.all_reduce(tensor)
        return {name: tensor.cpu() for name, tensor in tensors.items()}


class DeviceBatch:
    """One batch on the device: ids, masks, pooling weights, and where its results go."""

    def __init__(self, batch: Batch, plan: Plan, store: Store, device: torch.device) -> None:
        self.plan, self.store, self.stop, self.head = plan, store, batch.stop, batch.head
        sequences = batch.sequences
        lengths = [len(plan.sequences[i]) for i in sequences]
        width = max(lengths)
        ids = torch.full((len(sequences), width), plan.pad_token_id, dtype=torch.long)
        for row, i in enumerate(sequences):
            ids[row, : lengths[row]] = torch.tensor(plan.sequences[i])
        self.padded = min(lengths) < width
        self.input_ids = ids.to(device, non_blocking=True)
        length = torch.tensor(lengths).to(device, non_blocking=True)
        self.mask = torch.arange(width, device=device) < length.unsqueeze(1)
        self.last = length - 1
        skip = torch.tensor([plan.skip[i] for i in sequences]).to(device, non_blocking=True)
        self.no_sink = self.mask & (torch.arange(width, device=device) >= skip.unsqueeze(1))
        # For each slot: which rows of the batch go to which rows of the store.
        self.targets = []
        for slot, states in enumerate(store.states):
            pairs = [(row, store.row[slot][i]) for row, i in enumerate(sequences) if i in store.row[slot]]
            if pairs:
                source, target = torch.tensor(pairs).to(device, non_blocking=True).unbind(1)
                layers = {layer: k for k, layer in enumerate(plan.slots[slot].layers)}
                self.targets.append((plan.slots[slot].pooling, layers, source, target, states))
        # For each token slot: which tokens of the flattened batch go to which rows of the store.
        self.token_targets = []
        for slot, tokens in enumerate(store.tokens):
            offsets = store.token_offsets[slot]
            rows = [(row, i) for row, i in enumerate(sequences) if i in offsets]
            source = [row * width + t for row, i in rows for t in range(len(plan.sequences[i]))]
            target = [t for _, i in rows for t in range(*offsets[i])]
            if rows:
                pair = torch.tensor([source, target]).to(device, non_blocking=True)
                self.token_targets.append((plan.token_slots[slot].layer, *pair, tokens))
        if self.head:
            self._locate_answers(sequences, width, device)

    def _locate_answers(self, sequences: Sequence[int], width: int, device: torch.device) -> None:
        positions, tokens, target, wide_source, wide_target = [], [], [], [], []
        for row, i in enumerate(sequences):
            start, n = self.plan.answer_start[i], self.plan.answer_length(i)
            if i in self.plan.distribution:
                wide_source += range(len(positions), len(positions) + n)
                wide_target += range(*self.store.wide[i])
            positions += range(row * width + start - 1, row * width + start - 1 + n)  # the row before predicts a token
            tokens += self.plan.sequences[i][start:]
            target += range(*self.store.offsets[i])
        on_device = [torch.tensor(v, dtype=torch.long).to(device, non_blocking=True) for v in
                     (positions, tokens, target, wide_source, wide_target)]  # fmt: skip
        self.answer_positions, self.answer_tokens, self.answer_target, self.wide_source, self.wide_target = on_device

    def write_states(self, layer: int, hidden: Tensor) -> None:
        pooled: dict[str, Tensor] = {}
        for pooling, layers, source, target, states in self.targets:
            if layer in layers:
                if pooling not in pooled:
                    pooled[pooling] = self._pool(pooling, hidden)
                states[target, layers[layer]] = pooled[pooling][source].to(states.device)

        for at, source, target, tokens in self.token_targets:
            if at == layer:
                rows = hidden.flatten(0, 1).index_select(0, source.to(hidden.device))
                tokens[target] = rows.to(tokens.device, torch.float32)

    def _pool(self, pooling: str, hidden: Tensor) -> Tensor:
        """[B, T, d] of any dtype -> [B, d] float32. Padding is never multiplied in, so it may hold anything."""
        hidden = hidden.float()
        if pooling == "last":
            return hidden[torch.arange(len(hidden), device=hidden.device), self.last.to(hidden.device)]
        mask = (self.no_sink if pooling == "mean_no_sink" else self.mask).to(hidden.device).unsqueeze(-1)
        if pooling == "max":
            return hidden.masked_fill(~mask, -torch.inf).amax(1)
        if self.padded:
            return hidden.masked_fill(~mask, 0.0).sum(1) / mask.sum(1)
        if pooling == "mean":
            return hidden.mean(1)
        weights = mask.transpose(1, 2).float()
        return torch.bmm(weights, hidden).squeeze(1) / weights.sum(2)

    def write_answers(self, logits: Tensor) -> None:
        """logits [1, n_rows, V], the rows `answer_positions` asked for."""
        rows = logits[0].float()
        normaliser = rows.logsumexp(-1)
        tokens, target = self.answer_tokens.to(rows.device), self.answer_target
        log_probs = rows.gather(1, tokens.unsqueeze(1)).squeeze(1) - normaliser
        store = self.store
        store.log_probs[target] = log_probs.to(store.log_probs.device)
        store.greedy[target] = (rows.argmax(-1) == tokens).to(store.greedy.device, torch.uint8)
        if len(self.wide_source):
            source = self.wide_source.to(rows.device)
            wide = rows[source] - normaliser[source].unsqueeze(1)
            store.log_distribution[self.wide_target] = wide.to(store.log_distribution.device)
