"""The arguments of gradient difference."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.gradient_ascent_config import GradientAscentConfig
from trainers.unlearning_config import retain_loss_field


@dataclass
class GradDiffConfig(GradientAscentConfig):
    """Arguments of :class:`trainers.grad_diff.GradDiffTrainer`: loss = −gamma · ℓ_f + alpha · ℓ_r.

    See :class:`trainers.unlearning_config.RetainTermConfig` for the rest.
    """

    retain_loss: str = retain_loss_field("nll")
