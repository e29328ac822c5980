"""KL minimisation."""

from __future__ import annotations

from trainers.gradient_ascent import GradientAscentTrainer
from trainers.kl_min_config import KLMinConfig


class KLMinTrainer(GradientAscentTrainer):
    """Make a model forget question-answer pairs by KL minimisation.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a KLMinConfig.

    Notes
    -----
    loss = −gamma · ℓ_f + alpha · KL_r(ref ‖ θ): gradient ascent on the forget set, and on the retain set the divergence
    from the reference, a mean over answer tokens (TOFU, arXiv 2401.06121, Sec. 4.1). Sign: minimising it raises the
    forget NLL.
    """

    config_class = KLMinConfig
