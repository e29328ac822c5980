"""The arguments of NPO."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainers.unlearning_config import RetainTermConfig, check_number


@dataclass
class NPOConfig(RetainTermConfig):
    """Arguments of :class:`trainers.npo.NPOTrainer`: loss = gamma · NPO(forget) + alpha · retain term.

    Parameters
    ----------
    beta : float, default 0.1
        Inverse temperature of NPO; towards 0 it becomes gradient ascent.

    `retain_loss` is "nll", `alpha` and `gamma` are 1 by default; see
    :class:`trainers.unlearning_config.RetainTermConfig` for these and the rest.
    """

    beta: float = field(
        default=0.1, metadata={"help": "Inverse temperature of NPO; towards 0 it becomes gradient ascent."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, above=0.0)
