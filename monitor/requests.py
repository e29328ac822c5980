"""What a measure asks of the activation pass: pooled states, answers' log-probabilities, states of every token."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

POOLINGS = ("mean", "last", "max", "mean_no_sink")


@dataclass(frozen=True)
class States:
    """Pooled hidden states to be read.

    Parameters
    ----------
    texts : tuple of str
    layers : tuple of int or float, or "all", default (-1,)
        Hidden-state indices 0..L (0 the embeddings, L after the final norm; negative ones count from the end) or
        fractions of the depth as floats (0.8 is round(0.8 L)); "all" is 0..L.
    pooling : {"mean", "last", "max", "mean_no_sink"}, default "mean"
        Over the text's own tokens. "mean_no_sink" prepends the tokenizer's BOS token, where it has one, and leaves
        it out of the mean: the first token of many models carries a massive activation that a plain mean measures
        instead of the text.
    """

    texts: tuple[str, ...]
    layers: tuple[int | float, ...] | str = (-1,)
    pooling: str = "mean"

    def __post_init__(self) -> None:
        if isinstance(self.texts, str):
            raise ValueError("`texts` must be a sequence of strings, got one string; wrap it in a tuple.")
        object.__setattr__(self, "texts", tuple(self.texts))
        if not isinstance(self.layers, str):
            for layer in self.layers:
                check_layer(layer)
            object.__setattr__(self, "layers", tuple(map(_told_apart, self.layers)))
        elif self.layers != "all":
            raise ValueError(f"`layers` must be a tuple of layers or 'all', got {self.layers!r}.")
        if self.pooling not in POOLINGS:
            raise ValueError(f"`pooling` must be one of {', '.join(POOLINGS)}, got {self.pooling!r}.")
        _check_texts("texts", self.texts)


@dataclass(frozen=True)
class Answers:
    """Answer-token log-probabilities log p(answer | prompt) to be read.

    Parameters
    ----------
    prompts, answers : tuples of str, of the same length
        The text is ``prompt + answer``, tokenised as one; the answer begins with its own leading space. Tokens that
        end after the prompt are the answer's.
    distribution : bool, default False
        Ask for the whole log-softmax row at each answer token as well.
    """

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    distribution: bool = False

    def __post_init__(self) -> None:
        _check_pairs(self)


@dataclass(frozen=True)
class TokenStates:
    """The hidden states of every token of ``prompt + answer`` to be read, without pooling, at one layer.

    Parameters
    ----------
    prompts, answers : tuples of str, of the same length
        As in `Answers`, and tokenised the same way: no token is appended after the answer.
    layer : int or float
        A hidden-state index 0..L or a fraction of the depth, as in `States`.

    Notes
    -----
    A pass holds tokens x hidden_size float32 of these on the device until it ends.
    """

    prompts: tuple[str, ...]
    answers: tuple[str, ...]
    layer: int | float

    def __post_init__(self) -> None:
        _check_pairs(self)
        check_layer(self.layer)
        object.__setattr__(self, "layer", _told_apart(self.layer))


Request = States | Answers | TokenStates


def _told_apart(layer: int | float) -> int | float:
    """The whole depth as -1, because 1.0 == 1: requests for the last and for the first layer would be equal."""
    return -1 if isinstance(layer, float) and layer == 1.0 else layer


def _check_pairs(request: Answers | TokenStates) -> None:
    """Make `prompts` and `answers` tuples and check that they pair."""
    for name in ("prompts", "answers"):
        if isinstance(getattr(request, name), str):
            raise ValueError(f"`{name}` must be a sequence of strings, got one string; wrap it in a tuple.")
        object.__setattr__(request, name, tuple(getattr(request, name)))
    n_prompts, n_answers = len(request.prompts), len(request.answers)
    if n_prompts != n_answers:
        raise ValueError(f"`prompts` and `answers` must have the same length, got {n_prompts} and {n_answers}.")
    _check_texts("prompts", request.prompts)
    _check_texts("answers", request.answers)


def _check_texts(name: str, texts: tuple[str, ...]) -> None:
    if not texts:
        raise ValueError(f"`{name}` is empty; give at least one text.")
    blank = [i for i, text in enumerate(texts) if not isinstance(text, str) or not text.strip()]
    if blank:
        raise ValueError(
            f"`{name}` must hold non-blank strings; blank or not a string at positions {blank[:5]}"
            f"{' ...' if len(blank) > 5 else ''} of {len(texts)}. Remove them or fill them in."
        )


def check_layer(layer: int | float) -> None:
    """Refuse what is a layer of no model."""
    if isinstance(layer, float):
        if not 0.0 <= layer <= 1.0:
            raise ValueError(f"`layer` as a fraction of the depth must be in [0, 1], got {layer}.")
    elif isinstance(layer, bool) or not isinstance(layer, int):
        raise ValueError(f"`layer` must be an int or a fraction of the depth as a float, got {layer!r}.")


def check_layers(requests: Iterable[Request], n_layers: int) -> None:
    """Refuse requests for layers that a model of this many blocks has not."""
    for request in requests:
        layers = getattr(request, "layers", (request.layer,) if isinstance(request, TokenStates) else ())
        for layer in () if layers == "all" else layers:
            resolve_layer(layer, n_layers)


def resolve_layer(layer: int | float, n_layers: int) -> int:
    """Hidden-state index of a layer.

    Parameters
    ----------
    layer : int or float
        An index in [-(L+1), L], or a fraction of the depth in [0.0, 1.0].
    n_layers : int
        L, the number of blocks.

    Returns
    -------
    index : int in 0..L
    """
    check_layer(layer)
    if isinstance(layer, float):
        return math.floor(layer * n_layers + 0.5)
    if not -(n_layers + 1) <= layer <= n_layers:
        raise ValueError(
            f"`layer` {layer} is out of range: the model has {n_layers} blocks, so hidden states 0 (embeddings) to "
            f"{n_layers} (after the final norm), or -{n_layers + 1} to -1 from the end."
        )
    return layer % (n_layers + 1)
