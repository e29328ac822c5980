"""Where likelihoods begin and end to be good: scales taken from the unsteered model's own answers."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# A scale is never shorter than half the likelihood a token: less does not tell good from bad English.
_SHORTEST = math.log(2)
_DEVIATIONS = 3.0


@dataclass(frozen=True)
class FluencyScale:
    """Negative log-likelihoods, nats a token, from which a text is as fluent (2), or as broken (0), as can be.

    Attributes
    ----------
    good : float
    bad : float, > good
    """

    good: float
    bad: float

    def score(self, nll: Tensor, repeated: Tensor) -> Tensor:
        """Fluency of n texts in [0, 2]; higher is better.

        Parameters
        ----------
        nll : Tensor [n]
            Nats a token. May be infinite or NaN: such a text scores 0.
        repeated : Tensor [n] in [0, 1]
            `monitor.judges.repetition.repetition`. A loop is most likely: perplexity alone would praise it.

        Notes
        -----
        2 · min(1, max(0, (bad − nll) / (bad − good))) · (1 − repeated).
        """
        likely = ((self.bad - nll.to(torch.float64)) / (self.bad - self.good)).clamp(0, 1).nan_to_num(0.0)
        return 2 * likely * (1 - repeated.to(torch.float64))


def fluency_scale(natural: Tensor, shuffled: Tensor) -> FluencyScale:
    """The scale from unsteered answers and from the same answers with their words in random order.

    Parameters
    ----------
    natural, shuffled : Tensor [n]
        Nats a token.

    Returns
    -------
    FluencyScale
        `good` is the 95 % quantile of the natural texts: what is as likely as they are is as good. `bad` is the median
        of the shuffled ones, at least ln 2 above `good`.
    """
    good = float(torch.quantile(natural.to(torch.float64), 0.95))
    return FluencyScale(good, max(float(shuffled.to(torch.float64).median()), good + _SHORTEST))


def shuffled_words(texts: Sequence[str], seed: int = 0) -> list[str]:
    """The texts with their words in random order."""
    shuffler = random.Random(seed)
    return [" ".join(shuffler.sample(words, len(words))) for words in map(str.split, texts)]


@dataclass(frozen=True)
class RelevanceScale:
    """How likely one instruction is after responses to others, and after the response to itself.

    Attributes
    ----------
    chance, best : float, best > chance
        Mean log-probability of the instruction's tokens, nats.
    """

    chance: float
    best: float

    def score(self, log_prob: Tensor) -> Tensor:
        """Relevance of responses in [0, 2]: 0 as for a response to something else, 2 as for the unsteered answer.

        Notes
        -----
        2 · min(1, max(0, (log p(instruction | response) − chance) / (best − chance))): both logarithms lack the same
        log p(instruction), so this is pointwise mutual information on a scale.
        """
        return 2 * ((log_prob.to(torch.float64) - self.chance) / (self.best - self.chance)).clamp(0, 1).nan_to_num(0.0)


def relevance_scale(own: float, unrelated: Tensor) -> RelevanceScale:
    """The scale of an instruction.

    Parameters
    ----------
    own : float
        log p(instruction | the unsteered answer to it), nats a token.
    unrelated : Tensor [n], n >= 2
        log p(instruction | the unsteered answer to another instruction).

    Returns
    -------
    RelevanceScale
        `chance` is the mean of the unrelated ones; `best` is `own`, but at least three of their standard deviations
        above their mean: an unsteered answer that misses the point sets no standard. (SmolLM2-135M's own answers of 20
        tokens to six instructions lay five above, on average.)
    """
    unrelated = unrelated.to(torch.float64)
    chance, spread = float(unrelated.mean()), float(unrelated.std())
    return RelevanceScale(chance, max(own, chance + max(_DEVIATIONS * spread, 1e-6)))
