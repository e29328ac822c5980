"""The arguments of weighted gradient ascent."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainers.unlearning_config import RetainTermConfig, check_number


@dataclass
class WGAConfig(RetainTermConfig):
    """Arguments of :class:`trainers.wga.WGATrainer`: loss = gamma · WGA(forget) + alpha · retain term.

    Parameters
    ----------
    beta : float, default 1.0
        Power of a token's probability that weights it; 0 is gradient ascent.

    See :class:`trainers.unlearning_config.RetainTermConfig` for the rest.
    """

    beta: float = field(
        default=1.0, metadata={"help": "Power of a token's probability that weights it; 0 is gradient ascent."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, low=0.0)
