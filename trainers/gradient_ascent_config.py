"""The arguments of gradient ascent."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.unlearning_config import RetainTermConfig, retain_loss_field


@dataclass
class GradientAscentConfig(RetainTermConfig):
    """Arguments of :class:`trainers.gradient_ascent.GradientAscentTrainer`: loss = −gamma · ℓ_f.

    No retain term by default.

    See :class:`trainers.unlearning_config.RetainTermConfig` for the rest.
    """

    retain_loss: str = retain_loss_field("none")
