"""The arguments of UNDIAL."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainers.unlearning_config import RetainTermConfig, check_number, retain_loss_field


@dataclass
class UNDIALConfig(RetainTermConfig):
    """Arguments of :class:`trainers.undial.UNDIALTrainer`: loss = gamma · UNDIAL(forget) + alpha · retain term.

    Parameters
    ----------
    strength : float, default 10.0
        How much the answer's logit is lowered in the targets.

    `retain_loss` is "none" by default: the targets hold everything but the answer.
    See :class:`trainers.unlearning_config.RetainTermConfig` for the rest.
    """

    strength: float = field(default=10.0, metadata={"help": "How much the answer's logit is lowered in the targets."})
    retain_loss: str = retain_loss_field("none")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("strength", self.strength, low=0.0)
