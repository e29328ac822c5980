"""Keys and values of a text's beginning, computed once and read by any number of batches that continue it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

KeysValues = Sequence[tuple[Tensor, Tensor]]


class _FixedLayer(DynamicLayer):
    """A layer's keys and values of one sequence, [1, heads, P, d], put before those of every row of a batch.

    It does not take up what a forward adds, so one object serves batch after batch; a `DynamicLayer` would hold the
    first batch's tokens in the second.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        rows = len(key_states)
        keys = torch.cat([self.keys.expand(rows, -1, -1, -1), key_states], dim=-2)
        return keys, torch.cat([self.values.expand(rows, -1, -1, -1), value_states], dim=-2)


def fixed_cache(states: KeysValues, length: int) -> DynamicCache:
    """A cache of the first `length` tokens of `states` that forwards read and never change."""
    cache = DynamicCache()
    cache.layers = [_FixedLayer(keys[:, :, :length], values[:, :, :length]) for keys, values in states]
    return cache


def growing_cache(states: KeysValues) -> DynamicCache:
    """A cache of one sequence that a forward adds to."""
    cache = DynamicCache()
    for i, (keys, values) in enumerate(states):
        cache.update(keys, values, i)
    return cache


def states_of(cache: DynamicCache, length: int) -> KeysValues:
    """Keys and values of the first `length` tokens in a cache, a layer each, without the graph they come from."""
    return [(layer.keys.detach()[:, :, :length], layer.values.detach()[:, :, :length]) for layer in cache.layers]


def can_be_cut(config) -> bool:
    """Whether a model of this configuration keeps every token's keys and values, so that a beginning can be reused.

    Not so for sliding-window layers, which drop old tokens, nor for recurrent ones, which keep a state.
    """
    layers = DynamicCache(config=config).layers
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
