"""The arguments of WHP with a reinforced model."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainers.unlearning_config import RetainTermConfig, check_number


@dataclass
class WHPReinforcedConfig(RetainTermConfig):
    """Arguments of :class:`trainers.whp_reinforced.WHPReinforcedTrainer`: loss = gamma · ℓ(generic labels) + alpha · R.

    Parameters
    ----------
    reinforcement : float, default 5.0
        What a token loses, in nats, for each nat it gained by reinforcement: α of arXiv 2310.02238.

    `retain_loss` is "nll", `alpha` and `gamma` are 1 by default.
    See :class:`trainers.unlearning_config.RetainTermConfig` for the rest.
    """

    reinforcement: float = field(
        default=5.0, metadata={"help": "What a token loses, in nats, for each nat it gained by reinforcement."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("reinforcement", self.reinforcement, low=0.0)
