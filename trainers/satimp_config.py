"""The arguments of SatImp."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainers.unlearning_config import RetainTermConfig, check_number


@dataclass
class SatImpConfig(RetainTermConfig):
    """Arguments of :class:`trainers.satimp.SatImpTrainer`: loss = gamma · SatImp(forget) + alpha · retain term.

    Parameters
    ----------
    beta1 : float, default 5.0
        Saturation: the power of p in a token's weight.
    beta2 : float, default 1.0
        Importance: the power of 1 − p in a token's weight.

    See :class:`trainers.unlearning_config.RetainTermConfig` for the rest.
    """

    beta1: float = field(default=5.0, metadata={"help": "Saturation: the power of p in a token's weight."})
    beta2: float = field(default=1.0, metadata={"help": "Importance: the power of 1 - p in a token's weight."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta1", self.beta1, low=0.0)
        check_number("beta2", self.beta2, low=0.0)
