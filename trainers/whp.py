"""Who's Harry Potter (WHP) with anonymised answers as targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainers.answer_rows import AnswerRows
from trainers.data import Example, with_other_alternate
from trainers.objectives import sequence_nll
from trainers.reference_scores import Frozen
from trainers.terms import Term
from trainers.unlearning_trainer import UnlearningTrainer
from trainers.whp_config import WHPConfig


class WHPTrainer(UnlearningTrainer):
    """Make a model forget question-answer pairs by teaching it other answers to the same questions.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a WHPConfig. The forget pairs
    need a field ``alternate``, such as the answer told of invented names; pairs whose alternate is the answer itself
    are left out with a warning: they would be taught to stay.

    Notes
    -----
    loss = gamma · ℓ(alternate answers | the original questions) + alpha · ℓ_r, means over answer tokens (arXiv
    2611.05272, App. B.5, after Eldan and Russinovich, arXiv 2310.02238). Sign: minimising it lowers the NLL of the
    alternate answers; the forget NLL rises as they take its probability, which no term asks for. Because the concept
    is redirected, a low overlap of outputs with the answers says little here.

    ``forget_nll``, of the true answers, is read at evaluations; a training step has no need of their forward.
    """

    config_class = WHPConfig

    def usable(self, dataset: Sequence, name: str) -> Sequence:
        return with_other_alternate(dataset, name)

    def beside(self, dataset: Sequence, name: str) -> dict[str, list[Example]]:
        return {"alternate": self.encode(dataset, name, answer="alternate")}

    def terms(self, model: nn.Module, inputs: dict[str, dict[str, Any]]) -> dict[str, Term]:
        if torch.is_grad_enabled():
            inputs = {part: batch for part, batch in inputs.items() if part != "forget"}
        return super().terms(model, inputs)

    def forget_terms(self, rows: Mapping[str, AnswerRows], frozen: Frozen) -> dict[str, Term]:
        terms = {"forget_loss": Term(sequence_nll(rows["alternate"]), "alternate", "token", self.args.gamma)}
        if "forget" in rows:
            terms["forget_nll"] = Term(sequence_nll(rows["forget"]), "forget", "token")
        return terms
