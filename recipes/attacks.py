"""The attacks a command was asked for by name, in the papers' setting or a quick one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from monitor.attacks.gcg import GCGConfig, gcg
from monitor.attacks.in_context import InContextConfig, in_context
from monitor.attacks.membership import MembershipConfig, membership
from monitor.attacks.quantization import QuantizationConfig, quantization
from monitor.attacks.relearning import RelearningConfig, relearning
from monitor.attacks.result import AttackResult
from monitor.attacks.sampling import SamplingConfig, sampling
from monitor.attacks.steering import SteeringConfig, steering


class Attack(NamedTuple):
    """An attack with its settings, and what its score is, for a table."""

    function: Callable[..., AttackResult]
    config: Any
    score: str

    @property
    def name(self) -> str:
        """The function's, or the config's own where one function attacks several things."""
        return getattr(self.config, "name", self.function.__name__)


SAMPLING = "sampling"
# In the order they are run: the cheap ones first. Sampling's settings hold what was read from the reference, a model:
# `recipes.sampling_attacks`.
ATTACKS = {
    "membership": (membership, MembershipConfig, "AUC, facts to forget against never-seen ones"),
    "quantization": (quantization, QuantizationConfig, "answer probability, int4 weights"),
    "in_context": (in_context, InContextConfig, "share of questions answered after examples"),
    "relearning": (relearning, RelearningConfig, "answer probability after training on other facts"),
    "steering": (steering, SteeringConfig, "AUC, answer words with steering against without"),
    "gcg": (gcg, GCGConfig, "share of questions answered with a found suffix"),
    SAMPLING: (
        sampling,
        SamplingConfig,
        "share of outputs, or questions, in which the reference's points bring it back",
    ),
}


def chosen(names: str | Sequence[str], *, quick: bool = False, seed: int = 42) -> list[Attack]:
    """The attacks of these names, each with its settings; all but `sampling`, see `wants_sampling`.

    Parameters
    ----------
    names : str or sequence of str
        Of `ATTACKS`; "all" is every one.
    quick : bool
        The small setting instead of the papers'.
    seed : int
        Of every attack that draws.

    Raises
    ------
    ValueError
        For an unknown name, or none at all.
    """
    wanted = [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in wanted if name not in (*ATTACKS, "all")]:
        raise ValueError(f"`attacks` must be among {', '.join(ATTACKS)}, or all; got {', '.join(map(str, unknown))}.")
    if not wanted:
        raise ValueError(f"`attacks` is empty; choose from {', '.join(ATTACKS)}, or all.")
    found = []
    for name, (function, config_class, score) in ATTACKS.items():
        if name != SAMPLING and (name in wanted or "all" in wanted):
            config = config_class.quick() if quick else config_class()
            if any(field.name == "seed" for field in fields(config)):
                config = replace(config, seed=seed)
            found.append(Attack(function, config, score))
    return found


def wants_sampling(names: str | Sequence[str]) -> bool:
    """Whether `sampling` is among the names, or "all"."""
    return not {SAMPLING, "all"}.isdisjoint([names] if isinstance(names, str) else names)
