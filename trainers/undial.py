"""Self-distillation with adjusted logits (UNDIAL)."""

from __future__ import annotations

from collections.abc import Mapping

from trainers.answer_rows import AnswerRows
from trainers.objectives import sequence_nll, undial
from trainers.reference_scores import Frozen, ReferenceNeeds
from trainers.terms import Term, token_term
from trainers.undial_config import UNDIALConfig
from trainers.unlearning_trainer import UnlearningTrainer


class UNDIALTrainer(UnlearningTrainer):
    """Make a model forget question-answer pairs by distilling itself with the answers played down.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a UNDIALConfig.

    Notes
    -----
    loss = gamma · mean_t CE(softmax(z_ref − strength · onehot(y_t)), π_θ) + alpha · R over forget answer tokens (Dong
    et al., arXiv 2402.10052). Sign: minimising it raises the forget NLL up to that of the targets, and no further.
    """

    config_class = UNDIALConfig

    def reference_needs(self) -> ReferenceNeeds:
        return ReferenceNeeds(log_probs=("forget",))

    def forget_terms(self, rows: Mapping[str, AnswerRows], frozen: Frozen) -> dict[str, Term]:
        forget = rows["forget"]
        loss = undial(forget, frozen.log_probs["forget"], self.args.strength)
        return {
            "forget_loss": token_term(loss, forget, "forget", self.args.gamma),
            "forget_nll": Term(sequence_nll(forget).detach(), "forget", "token"),
        }
