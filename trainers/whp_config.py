"""The arguments of WHP with anonymised answers."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.unlearning_config import RetainTermConfig


@dataclass
class WHPConfig(RetainTermConfig):
    """Arguments of :class:`trainers.whp.WHPTrainer`: loss = gamma · ℓ of the alternate answers + alpha · retain term.

    `retain_loss` is "nll", `alpha` and `gamma` are 1 by default.
    See :class:`trainers.unlearning_config.RetainTermConfig` for the rest.
    """
