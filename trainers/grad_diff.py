"""Gradient difference."""

from __future__ import annotations

from trainers.grad_diff_config import GradDiffConfig
from trainers.gradient_ascent import GradientAscentTrainer


class GradDiffTrainer(GradientAscentTrainer):
    """Make a model forget question-answer pairs by gradient difference.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a GradDiffConfig.

    Notes
    -----
    loss = −gamma · ℓ_f + alpha · ℓ_r: gradient ascent on the forget set and descent on the retain set (Liu et al.,
    arXiv 2203.12817; TOFU, arXiv 2401.06121, Sec. 4.1). Sign: minimising it raises the forget NLL.
    """

    config_class = GradDiffConfig
