"""Simple negative preference optimisation (SimNPO)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trainers.answer_rows import AnswerRows, sum_by_sequence
from trainers.objectives import sequence_nll, simnpo
from trainers.reference_scores import Frozen
from trainers.simnpo_config import SimNPOConfig
from trainers.terms import Term
from trainers.unlearning_trainer import UnlearningTrainer


class SimNPOTrainer(UnlearningTrainer):
    """Make a model forget question-answer pairs by SimNPO, which needs no reference.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a SimNPOConfig.

    Notes
    -----
    loss = gamma · (1/N) Σᵢ (2/β) softplus(−β (Lᵢ/|yᵢ| − δ)) + alpha · R over N forget pairs (Fan et al., arXiv
    2410.07163). Sign: minimising it raises the forget NLL until it is well beyond δ nats a token.
    """

    config_class = SimNPOConfig

    def forget_terms(self, rows: Mapping[str, AnswerRows], frozen: Frozen) -> dict[str, Term]:
        forget, args = rows["forget"], self.args
        nll = sequence_nll(forget)
        n_tokens = sum_by_sequence(torch.ones_like(forget.targets), forget.sequence, forget.n_sequences)
        return {
            "forget_loss": Term(simnpo(nll, n_tokens, args.beta, args.delta), "forget", "sequence", args.gamma),
            "forget_nll": Term(nll.detach(), "forget", "token"),
        }
