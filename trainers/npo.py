"""Negative preference optimisation (NPO)."""

from __future__ import annotations

from collections.abc import Mapping

from trainers.answer_rows import AnswerRows
from trainers.npo_config import NPOConfig
from trainers.objectives import npo, sequence_nll
from trainers.reference_scores import Frozen, ReferenceNeeds
from trainers.terms import Term
from trainers.unlearning_trainer import UnlearningTrainer


class NPOTrainer(UnlearningTrainer):
    """Make a model forget question-answer pairs by NPO.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` an NPOConfig.

    Notes
    -----
    loss = gamma · (1/N) Σᵢ (2/β) log(1 + (π_θ(yᵢ|xᵢ)/π_ref(yᵢ|xᵢ))^β) + alpha · R over N forget pairs (Zhang et al.,
    arXiv 2404.05868, Eq. 3; with R its NPO+RT and NPO+KL variants). Sign: minimising it raises the forget NLL; at the
    start, where θ = ref, the NPO term is (2/β) ln 2.
    """

    config_class = NPOConfig

    def reference_needs(self) -> ReferenceNeeds:
        return ReferenceNeeds(nll=("forget",))

    def forget_terms(self, rows: Mapping[str, AnswerRows], frozen: Frozen) -> dict[str, Term]:
        nll = sequence_nll(rows["forget"])
        return {
            "forget_loss": Term(npo(nll, frozen.nll["forget"], self.args.beta), "forget", "sequence", self.args.gamma),
            "forget_nll": Term(nll.detach(), "forget", "token"),
        }
