"""The arguments of fine-tuning on a forget set."""

from __future__ import annotations

from dataclasses import dataclass

from trainers.unlearning_config import UnlearningConfig


@dataclass
class FineTuningConfig(UnlearningConfig):
    """Arguments of :class:`trainers.fine_tuning.FineTuningTrainer`: loss = +ℓ_f.

    See :class:`trainers.unlearning_config.UnlearningConfig`.
    """
