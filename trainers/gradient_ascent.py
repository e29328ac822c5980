"""Gradient ascent."""

from __future__ import annotations

from collections.abc import Mapping

from trainers.answer_rows import AnswerRows
from trainers.gradient_ascent_config import GradientAscentConfig
from trainers.objectives import gradient_ascent, sequence_nll
from trainers.reference_scores import Frozen
from trainers.terms import Term, token_term
from trainers.unlearning_trainer import UnlearningTrainer


class GradientAscentTrainer(UnlearningTrainer):
    """Make a model forget question-answer pairs by ascending their NLL.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a GradientAscentConfig.

    Notes
    -----
    loss = −gamma · ℓ_f + alpha · R, with ℓ_f the mean NLL over forget answer tokens (Jang et al., arXiv 2210.01504;
    TOFU, arXiv 2401.06121, Sec. 4.1); R is nothing by default. Sign: minimising it raises the forget NLL, without
    bound: the model breaks if it goes on for long.
    """

    config_class = GradientAscentConfig

    def forget_terms(self, rows: Mapping[str, AnswerRows], frozen: Frozen) -> dict[str, Term]:
        forget = rows["forget"]
        return {
            "forget_loss": token_term(gradient_ascent(forget), forget, "forget", self.args.gamma),
            "forget_nll": Term(sequence_nll(forget).detach(), "forget", "token"),
        }
