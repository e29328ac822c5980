"""Cross-entropy unlearning (CE-U)."""

from __future__ import annotations

from collections.abc import Mapping

from trainers.answer_rows import AnswerRows
from trainers.ce_u_config import CEUConfig
from trainers.objectives import ce_u, sequence_nll
from trainers.reference_scores import Frozen
from trainers.terms import Term, token_term
from trainers.unlearning_trainer import UnlearningTrainer


class CEUTrainer(UnlearningTrainer):
    """Make a model forget question-answer pairs by teaching it its own choice among the other tokens.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a CEUConfig.

    Notes
    -----
    loss = gamma · mean_t CE(sg(softmax(z with z_y = −∞)), π_θ) + alpha · R over forget answer tokens (Yang, arXiv
    2503.01224). Sign: minimising it raises the forget NLL, with a gradient that fades as the answer becomes unlikely.
    The paper leaves out the first token of each answer, where that carries no knowledge; the short answers of a forget
    set may have no other, so all are kept here.
    """

    config_class = CEUConfig

    def forget_terms(self, rows: Mapping[str, AnswerRows], frozen: Frozen) -> dict[str, Term]:
        forget = rows["forget"]
        return {
            "forget_loss": token_term(ce_u(forget), forget, "forget", self.args.gamma),
            "forget_nll": Term(sequence_nll(forget).detach(), "forget", "token"),
        }
