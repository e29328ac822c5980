"""The arguments of KL minimisation."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.gradient_ascent_config import GradientAscentConfig
from trainers.unlearning_config import retain_loss_field


@dataclass
class KLMinConfig(GradientAscentConfig):
    """Arguments of :class:`trainers.kl_min.KLMinTrainer`: loss = −gamma · ℓ_f + alpha · KL_r.

    See :class:`trainers.unlearning_config.RetainTermConfig` for the rest.
    """

    retain_loss: str = retain_loss_field("kl")
