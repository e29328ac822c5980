"""Learning a forget set: the reinforced model of WHP, and what a task vector is made from."""

from __future__ import annotations

from collections.abc import Mapping

from trainers.answer_rows import AnswerRows
from trainers.fine_tuning_config import FineTuningConfig
from trainers.objectives import sequence_nll
from trainers.reference_scores import Frozen
from trainers.terms import Term
from trainers.unlearning_trainer import UnlearningTrainer


class FineTuningTrainer(UnlearningTrainer):
    """Teach a model question-answer pairs: the opposite of forgetting.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a FineTuningConfig.

    Notes
    -----
    loss = +ℓ_f, the mean NLL over the answer tokens of ``forget_dataset``. Sign: minimising it lowers the forget NLL.
    """

    config_class = FineTuningConfig

    def forget_terms(self, rows: Mapping[str, AnswerRows], frozen: Frozen) -> dict[str, Term]:
        nll = sequence_nll(rows["forget"])
        return {
            "forget_loss": Term(nll, "forget", "token", 1.0),
            "forget_nll": Term(nll.detach(), "forget", "token"),
        }
