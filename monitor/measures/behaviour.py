"""Behaviour: does the model still say the answers, and has it collapsed?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from monitor.activations import Activations, Answers
from monitor.geometry.answers import answer_nll, answer_probability, exact_memorisation, extraction_strength
from monitor.geometry.statistics import mean_interval
from monitor.readings import Reading
from monitor.stimuli.encoding import qa_answer, qa_prompt
from monitor.stimuli.forget_set import Pair

_SPLITS = ("forget", "retain", "heldout")
_HIGHER_MEANS = {
    "nll": "the {split} answers are less likely",
    "probability": "the {split} answers are more likely",
    "exact_memorisation": "more {split} answer tokens are the first choice",
    "extraction_strength": "a shorter hint completes the {split} answers",
    "nll_change": "the {split} answers became less likely since the reference",
}
_RANGES = {
    "nll": (0.0, math.inf),
    "probability": (0.0, 1.0),
    "exact_memorisation": (0.0, 1.0),
    "extraction_strength": (0.0, 1.0),
    "nll_change": (-math.inf, math.inf),
}
# The retain NLL counts as lost when it is this many times the reference's, and the answers' tokens half as likely.
_RETAIN_FACTOR = 2.0
_RETAIN_RISE = math.log(2)


class Behaviour:
    """Answer likelihood, memorisation and collapse on forget, retain and held-out pairs.

    Parameters
    ----------
    pairs : mapping from ``"forget"``, ``"retain"``, ``"heldout"`` to sequences of pairs
        Of each pair ``question`` and ``answer`` are read. Any of the three may be missing.
    n_bootstrap : int
        Resamples of each interval.
    seed : int
        Seed of the bootstrap's own generator.
    name : str
        First part of every reading's name.

    Raises
    ------
    ValueError
        For an unknown or empty split, and for blank questions or answers, naming the pairs.

    Notes
    -----
    The text is ``"{question}\\nAnswer: {answer}"``; ℓ is the token mean of the answer's NLL. Readings of each split,
    all means over its pairs with a 95 % percentile bootstrap interval over pairs:

    - ``<split>_nll``: ℓ, nats, [0, ∞).
    - ``<split>_probability``: exp(−ℓ), [0, 1] (TOFU, arXiv 2401.06121).
    - ``<split>_exact_memorisation``: share of answer tokens that are the first choice, [0, 1].
    - ``<split>_extraction_strength``: 1 − k/T, with k the answer tokens to be given before greedy decoding says the
      rest, [0, 1].
    - ``<split>_nll_change``: ℓ minus the reference's, paired, nats.

    ``collapsed`` is 1 if the forget NLL exceeds ln V, the NLL of a uniform guess over the V vocabulary entries, or the
    retain NLL is at least twice the reference's and ln 2 above it, or either is not finite; else 0. Its note says
    which. (Where the reference knows the answers by heart, twice next to nothing is nothing: a token has to become half
    as likely as well. From ln 2 on that follows from the doubling.) A collapsed model has not forgotten, it has been
    broken.
    """

    def __init__(
        self,
        pairs: Mapping[str, Sequence[Pair]],
        *,
        n_bootstrap: int = 1000,
        seed: int = 0,
        name: str = "behaviour",
    ) -> None:
        unknown = [split for split in pairs if split not in _SPLITS]
        if unknown or not pairs:
            raise ValueError(f"pairs must have keys among {', '.join(_SPLITS)}, got {unknown or 'none'}")
        if n_bootstrap < 1:
            raise ValueError(f"n_bootstrap must be at least 1, got {n_bootstrap}")
        for split, members in pairs.items():
            _check_pairs(split, members)
        self.name = name
        self.n_bootstrap = n_bootstrap
        self.seed = seed
        self.settings = {
            "splits": [split for split in _SPLITS if split in pairs],
            "n_bootstrap": n_bootstrap,
            "seed": seed,
        }
        self._requests = {
            split: Answers(
                prompts=tuple(qa_prompt(pair.question) for pair in pairs[split]),
                answers=tuple(qa_answer(pair.answer) for pair in pairs[split]),
            )
            for split in _SPLITS
            if split in pairs
        }
        nll = tuple(f"{split}_nll" for split in self._requests)
        self.headline = (*nll, *(("collapsed",) if self._can_collapse() else ()))

    @property
    def stimuli(self) -> Sequence[Answers]:
        """One request a split."""
        return tuple(self._requests.values())

    def read(self, now: Activations, reference: Activations) -> list[Reading]:
        """Readings of the model as it is now; the reference is needed for changes and for collapse."""
        readings = []
        nll_now: dict[str, Tensor] = {}
        nll_reference: dict[str, Tensor] = {}
        for split, request in self._requests.items():
            scores = now.answers(request)
            nll_now[split] = answer_nll(scores.log_probs)
            nll_reference[split] = answer_nll(reference.answers(request).log_probs)
            values = {
                "nll": nll_now[split],
                "probability": answer_probability(scores.log_probs),
                "exact_memorisation": exact_memorisation(scores.greedy),
                "extraction_strength": extraction_strength(scores.greedy),
                "nll_change": nll_now[split] - nll_reference[split],
            }
            # Where log-probabilities are not finite the argmax means nothing either.
            broken = _not_finite(nll_now[split])
            readings += [self._reading(split, metric, value, broken) for metric, value in values.items()]
        if self._can_collapse():
            readings.append(self._collapsed(nll_now, nll_reference, now.vocab_size))
        return readings

    def _can_collapse(self) -> bool:
        return "forget" in self._requests or "retain" in self._requests

    def _reading(self, split: str, metric: str, values: Tensor, broken: str) -> Reading:
        about = {"higher_means": _HIGHER_MEANS[metric].format(split=split), "range": _RANGES[metric]}
        problem = broken or _not_finite(values)
        if problem:
            return Reading(self.name, f"{split}_{metric}", None, valid=False, note=problem, **about)
        low, high = mean_interval(values, n_bootstrap=self.n_bootstrap, seed=self.seed)
        return Reading(self.name, f"{split}_{metric}", float(values.mean()), low=low, high=high, **about)

    def _collapsed(self, now: Mapping[str, Tensor], reference: Mapping[str, Tensor], vocab_size: int) -> Reading:
        reasons = []
        note = ""
        for split in ("forget", "retain"):
            # Nothing that a broken model gets is a number to compare; not to call it collapsed would keep rules quiet.
            if split in now and _not_finite(now[split]):
                reasons.append(f"the {split} NLL is not finite")
        if "forget" in now and float(now["forget"].mean()) > math.log(vocab_size):
            reasons.append(
                f"the forget NLL {float(now['forget'].mean()):.3f} exceeds ln V = {math.log(vocab_size):.3f}, "
                "a uniform guess"
            )
        if "retain" in now:
            retain, start = float(now["retain"].mean()), float(reference["retain"].mean())
            if not math.isfinite(start):
                note = "the reference's retain NLL is not finite: judged by the rest alone"
            elif retain >= _RETAIN_FACTOR * start and retain - start >= _RETAIN_RISE:
                reasons.append(
                    f"the retain NLL {retain:.3f} is at least {_RETAIN_FACTOR:g} x the reference's {start:.3f}"
                )
        return Reading(
            self.name,
            "collapsed",
            float(bool(reasons)),
            higher_means="the model is broken, not forgetful",
            range=(0.0, 1.0),
            note="; ".join(reasons) or note,
        )


def _not_finite(values: Tensor) -> str:
    bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
    return f"{len(bad)} of {values.numel()} pairs are not finite, the first at {bad[0]}" if bad else ""


def _check_pairs(split: str, members: Sequence[Pair]) -> None:
    if len(members) == 0:
        raise ValueError(f"pairs[{split!r}] must hold at least one pair, got none; leave the split out instead")
    for part in ("question", "answer"):
        blank = [pair.id for pair in members if not getattr(pair, part).strip()]
        if blank:
            raise ValueError(
                f"pairs[{split!r}] must not have blank {part}s, got {len(blank)}: {', '.join(blank)}; "
                "fill them in or leave these pairs out"
            )
