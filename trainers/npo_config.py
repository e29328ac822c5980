"""The arguments of NPO."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trainers.unlearning_config import UnlearningConfig

RETAIN_LOSSES = ("nll", "kl", "none")


@dataclass
class NPOConfig(UnlearningConfig):
    """Arguments of :class:`trainers.npo.NPOTrainer`: loss = gamma · NPO(forget) + alpha · retain term.

    Parameters
    ----------
    beta : float, default 0.1
        Inverse temperature of NPO; towards 0 it becomes gradient ascent.
    retain_loss : {"nll", "kl", "none"}, default "nll"
        What holds the retain set: its NLL, the KL divergence from the reference, both as means over answer tokens,
        or nothing.
    alpha : float, default 1.0
        Weight of the retain term.
    gamma : float, default 1.0
        Weight of the NPO term.

    See :class:`trainers.unlearning_config.UnlearningConfig` for the rest.
    """

    beta: float = field(
        default=0.1, metadata={"help": "Inverse temperature of NPO; towards 0 it becomes gradient ascent."}
    )
    retain_loss: str = field(
        default="nll",
        metadata={
            "help": "What holds the retain set: its NLL, the KL divergence from the reference, or nothing.",
            "choices": list(RETAIN_LOSSES),
        },
    )
    alpha: float = field(default=1.0, metadata={"help": "Weight of the retain term."})
    gamma: float = field(default=1.0, metadata={"help": "Weight of the NPO term."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta", "alpha", "gamma"):
            if not isinstance(getattr(self, name), (int, float)):
                raise ValueError(f"`{name}` must be a number, got {getattr(self, name)!r}")
        if not (math.isfinite(self.beta) and self.beta > 0):
            raise ValueError(
                f"`beta` must be a positive number, got {self.beta}; for its limit 0 use a small value such as 1e-3"
            )
        if self.retain_loss not in RETAIN_LOSSES:
            raise ValueError(f"`retain_loss` must be one of {', '.join(RETAIN_LOSSES)}, got {self.retain_loss!r}")
        for name in ("alpha", "gamma"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"`{name}` must be a number >= 0, got {getattr(self, name)}")
