"""Saturation- and importance-weighted gradient ascent (SatImp)."""

from __future__ import annotations

from collections.abc import Mapping

from trainers.answer_rows import AnswerRows
from trainers.objectives import satimp, sequence_nll
from trainers.reference_scores import Frozen
from trainers.satimp_config import SatImpConfig
from trainers.terms import Term, token_term
from trainers.unlearning_trainer import UnlearningTrainer


class SatImpTrainer(UnlearningTrainer):
    """Make a model forget question-answer pairs by gradient ascent on the tokens that matter.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a SatImpConfig.

    Notes
    -----
    loss = −gamma · mean_t sg(p_t^β₁ (1 − p_t)^β₂) NLL_t + alpha · R over forget answer tokens (Yang et al., arXiv
    2505.11953). Sign: minimising it raises the forget NLL.
    """

    config_class = SatImpConfig

    def forget_terms(self, rows: Mapping[str, AnswerRows], frozen: Frozen) -> dict[str, Term]:
        forget = rows["forget"]
        loss = satimp(forget, self.args.beta1, self.args.beta2)
        return {
            "forget_loss": token_term(loss, forget, "forget", self.args.gamma),
            "forget_nll": Term(sequence_nll(forget).detach(), "forget", "token"),
        }
