"""The arguments of SimNPO."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainers.unlearning_config import RetainTermConfig, check_number


@dataclass
class SimNPOConfig(RetainTermConfig):
    """Arguments of :class:`trainers.simnpo.SimNPOTrainer`: loss = gamma · SimNPO(forget) + alpha · retain term.

    Parameters
    ----------
    beta : float, default 4.5
        Inverse temperature.
    delta : float, default 0.0
        Nats a token that an answer should lose at least: the margin.

    `retain_loss` is "nll", `alpha` and `gamma` are 1 by default.
    See :class:`trainers.unlearning_config.RetainTermConfig` for the rest.
    """

    beta: float = field(default=4.5, metadata={"help": "Inverse temperature of SimNPO."})
    delta: float = field(default=0.0, metadata={"help": "Margin: nats a token that an answer should lose at least."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, above=0.0)
        check_number("delta", self.delta)
