"""Where a model keeps the questions it was made to forget, read once from the reference, for `sampling`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from monitor.anatomy import find_anatomy
from monitor.attacks.geometry_file import read_geometry, write_geometry
from monitor.attacks.geometry_reading import STRENGTHS, checked_layer, last_states, sampling_sigma, spread_along
from monitor.attacks.sampling_points import concept_points
from monitor.generation import greedy_answers
from monitor.geometry.rouge import rouge_l
from monitor.geometry.subspace_fits import pca
from monitor.geometry.subspaces import Subspace
from monitor.steered_generation import steered_answers
from monitor.stimuli.encoding import asked_prompt
from monitor.stimuli.forget_set import ForgetSet, Pair

THRESHOLD = 0.30
MIN_QUESTIONS = 4
_KIND = "forget-set geometry"


@dataclass(frozen=True, eq=False)
class ForgetSetGeometry:
    """The states of a forget set's questions in one model, each about to be answered.

    Parameters
    ----------
    name : str
        The forget set's.
    questions : tuple of n str
        Each once.
    states : Tensor [n, d], float32
        Last hidden state of each question as it is asked (`monitor.stimuli.encoding.asked_prompt`).
    rank : int
    layer : int
        Index of the hidden state.
    sigma, low, high, spread, strength, decay : float
        As in `monitor.attacks.concept_geometry.ConceptGeometry`, of the questions' states.
    n_layers : int
        Blocks of the model.
    reference_share : float in [0, 1]
        Share of the model's own answers, pushed with this strength, that are right.
    """

    name: str
    questions: tuple[str, ...]
    states: Tensor
    rank: int
    layer: int
    sigma: float
    low: float
    high: float
    spread: float
    strength: float
    decay: float
    n_layers: int
    reference_share: float

    def without(self, question: str) -> Subspace:
        """The subspace of the other questions: their principal directions around their mean."""
        kept = [i for i, text in enumerate(self.questions) if text != question]
        return pca(self.states[kept], self.rank)

    def save(self, path: str | os.PathLike) -> None:
        """Write to a safetensors file."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "states"}
        write_geometry(path, _KIND, {"states": self.states}, numbers)

    @classmethod
    def load(cls, path: str | os.PathLike) -> ForgetSetGeometry:
        """Read a file that `save` wrote; tensors on the CPU.

        Raises
        ------
        FileNotFoundError
        ValueError
            For another file.
        """
        tensors, numbers = read_geometry(path, _KIND)
        return cls(**tensors, **numbers | {"questions": tuple(numbers["questions"])})


def forget_set_geometry(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    forget_set: ForgetSet,
    *,
    layer: int | float = 0.8,
    rank: int = 8,
    strengths: Sequence[float] = STRENGTHS,
    decay: float = 0.9,
    n_questions: int = 20,
    n_points: int = 3,
    max_new_tokens: int = 20,
    seed: int = 42,
    batch_tokens: int = 16384,
    progress: bool = False,
) -> ForgetSetGeometry:
    """Read the geometry of a forget set's questions from a model that can answer them.

    Parameters
    ----------
    model : nn.Module
        The reference: the model before it forgot. A causal language model of transformers, optionally under PEFT or
        DDP; left as it was found, and not needed any more afterwards.
    tokenizer : PreTrainedTokenizerBase
    forget_set : ForgetSet
        Its forget split, at least 4 different questions.
    layer : int or float
        Hidden state to read and to push, as in `monitor.activations.States`; not the last, which no block reads.
    rank : int, >= 1
        Directions; at most the number of questions less 3, as a question's subspace is fitted without it.
    strengths : sequence of float, > 0
        To choose from.
    decay : float in [0, 1]
    n_questions, n_points, max_new_tokens : int, >= 1
        Questions, points a question and tokens an answer while the strength is chosen.
    seed : int
    batch_tokens : int
        As for `steered_answers`.
    progress : bool
        Progress bars on standard error.

    Returns
    -------
    ForgetSetGeometry

    Raises
    ------
    ValueError
        For too few questions, a model without a head or sharded, a layer that no block reads, bad numbers, or states
        that are not finite.

    Notes
    -----
    Here the reference knows the answers without a push, so that no push can be best at bringing them. The strength is
    the largest one that leaves the reference at least half of what it answers unpushed (share of question-and-point
    answers with ROUGE-L of at least 0.30), the smallest if none does: as hard as the knowledge can stand.
    """
    index = checked_layer(model, tokenizer, layer, rank, strengths, decay)
    pairs = distinct_questions(forget_set)
    prompts = [asked_prompt(tokenizer, pair.question) for pair in pairs]
    title = f"geometry of {forget_set.name}" if progress else None
    states = last_states(model, tokenizer, prompts, index, title)
    norms = states.norm(dim=1)
    low, high = float(norms.min()), float(norms.max())
    whole = pca(states, min(rank, len(pairs) - 3, states.shape[1]))
    spread = spread_along(states, whole)
    sigma = sampling_sigma(whole, low, high, spread, seed)
    questions = tuple(pair.question for pair in pairs)
    geometry = ForgetSetGeometry(
        forget_set.name, questions, states, whole.rank, index, sigma, low, high, spread, float(min(strengths)),
        float(decay), find_anatomy(model).n_layers, 0.0,
    )  # fmt: skip

    asked = pairs[:n_questions]
    alone = greedy_answers(
        model, tokenizer, prompts[: len(asked)], max_new_tokens=max_new_tokens, batch_tokens=batch_tokens
    )
    enough = sum(answered(text, pair) for text, pair in zip(alone, asked, strict=True)) / len(asked) / 2
    points = [concept_points(geometry.without(p.question), n_points, sigma, seed, f"strength/{p.id}") for p in asked]
    for strength in sorted(strengths, reverse=True):
        said = steered_answers(
            model, tokenizer, prompts[: len(asked)], points, layer=index, strength=strength, decay=decay,
            max_new_tokens=max_new_tokens, batch_tokens=batch_tokens, progress=title,
        )  # fmt: skip
        hits = [answered(text, pair) for row, pair in zip(said, asked, strict=True) for text in row]
        share = sum(hits) / len(hits)
        if enough > 0 and share >= enough:
            return replace(geometry, strength=float(strength), reference_share=share)
    return replace(geometry, reference_share=share)  # of the smallest, which came last


def distinct_questions(forget_set: ForgetSet) -> list[Pair]:
    """The forget pairs in their order, of pairs with one question the first.

    Raises
    ------
    ValueError
        For fewer than `MIN_QUESTIONS`.
    """
    first: dict[str, Pair] = {}
    for pair in forget_set.split("forget"):
        first.setdefault(pair.question, pair)
    pairs = list(first.values())
    if len(pairs) < MIN_QUESTIONS:
        raise ValueError(
            f"`forget_set` {forget_set.name!r} must have at least {MIN_QUESTIONS} forget pairs with different "
            f"questions, got {len(pairs)}: a question's subspace is fitted to the others"
        )
    return pairs


def answered(said: str, pair: Pair) -> bool:
    """Whether a text says the pair's answer: ROUGE-L F1 of at least 0.30."""
    # The F1 of a ratio that is exactly the threshold may lie a rounding below it.
    return bool(rouge_l([said], [pair.answer])[0] >= THRESHOLD - 1e-9)
