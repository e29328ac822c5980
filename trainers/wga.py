"""Weighted gradient ascent (WGA)."""

from __future__ import annotations

from collections.abc import Mapping

from trainers.answer_rows import AnswerRows
from trainers.objectives import sequence_nll, wga
from trainers.reference_scores import Frozen
from trainers.terms import Term, token_term
from trainers.unlearning_trainer import UnlearningTrainer
from trainers.wga_config import WGAConfig


class WGATrainer(UnlearningTrainer):
    """Make a model forget question-answer pairs by gradient ascent that lets go of unlikely tokens.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a WGAConfig.

    Notes
    -----
    loss = −gamma · mean_t sg(p_t^β) NLL_t + alpha · R over forget answer tokens (Wang et al., arXiv 2502.19301). Sign:
    minimising it raises the forget NLL, ever slower as the tokens become unlikely.
    """

    config_class = WGAConfig

    def forget_terms(self, rows: Mapping[str, AnswerRows], frozen: Frozen) -> dict[str, Term]:
        forget = rows["forget"]
        return {
            "forget_loss": token_term(wga(forget, self.args.beta), forget, "forget", self.args.gamma),
            "forget_nll": Term(sequence_nll(forget).detach(), "forget", "token"),
        }
