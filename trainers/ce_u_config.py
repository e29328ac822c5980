"""The arguments of CE-U."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.unlearning_config import RetainTermConfig, retain_loss_field


@dataclass
class CEUConfig(RetainTermConfig):
    """Arguments of :class:`trainers.ce_u.CEUTrainer`: loss = gamma · CE-U(forget) + alpha · retain term.

    `retain_loss` is "none" by default.
    See :class:`trainers.unlearning_config.RetainTermConfig` for the rest.
    """

    retain_loss: str = retain_loss_field("none")
