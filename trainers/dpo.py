"""Direct preference optimisation (DPO) of anything but the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainers.answer_rows import AnswerRows
from trainers.data import Example, with_other_alternate
from trainers.dpo_config import DPOConfig
from trainers.objectives import dpo, sequence_nll
from trainers.reference_scores import Frozen, ReferenceNeeds
from trainers.refusals import REFUSALS
from trainers.terms import Term
from trainers.unlearning_trainer import UnlearningTrainer


class DPOTrainer(UnlearningTrainer):
    """Make a model forget question-answer pairs by DPO: each answer is the rejected one.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a DPOConfig. With
    ``args.chosen="alternate"`` the forget pairs need a field ``alternate``, another answer to the question.

    Notes
    -----
    loss = gamma · (1/N) Σᵢ −log σ(β [(L_l − L_l,ref) − (L_w − L_w,ref)]) + alpha · R over N forget pairs, l the answer
    and w what is chosen (Rafailov et al., arXiv 2305.18290, Eq. 7; refusals as in TOFU, arXiv 2401.06121; retain pairs
    as in arXiv 2611.05272, App. B.5). At the start the DPO term is ln 2. Sign: minimising it raises the forget NLL and
    lowers the NLL of what is chosen. TRL's DPO is the same loss on pairs of its own data format, with a live
    reference; some published unlearning code multiplies it by 2/β.

    Logged besides: ``chosen_nll``, and ``reward_accuracy``, the share of pairs whose chosen answer gained more.
    """

    config_class = DPOConfig

    @property
    def chosen_part(self) -> str:
        return "retain" if self.args.chosen == "retain" else "chosen"

    def usable(self, dataset: Sequence, name: str) -> Sequence:
        return with_other_alternate(dataset, name) if self.args.chosen == "alternate" else dataset

    def beside(self, dataset: Sequence, name: str) -> dict[str, list[Example]]:
        if self.args.chosen == "alternate":
            return {"chosen": self.encode(dataset, name, answer="alternate")}
        if self.args.chosen == "refusal":
            return {"chosen": self.encode_refusals(dataset, name)}
        return {}

    def reference_needs(self) -> ReferenceNeeds:
        return ReferenceNeeds(nll=("forget", self.chosen_part))

    def forget_terms(self, rows: Mapping[str, AnswerRows], frozen: Frozen) -> dict[str, Term]:
        part = self.chosen_part
        nll, chosen_nll = sequence_nll(rows["forget"]), sequence_nll(rows[part])
        loss = dpo(chosen_nll, frozen.nll[part], nll, frozen.nll["forget"], self.args.beta)
        gain = (nll - frozen.nll["forget"]) - (chosen_nll - frozen.nll[part])
        return {
            "forget_loss": Term(loss, "forget", "sequence", self.args.gamma),
            "forget_nll": Term(nll.detach(), "forget", "token"),
            "chosen_nll": Term(chosen_nll.detach(), part, "token"),
            "reward_accuracy": Term((gain.detach() > 0).float(), "forget", "sequence"),
        }

    def encode_refusals(self, dataset: Sequence, name: str) -> list[Example]:
        """A refusal to each question, in turn."""
        pairs = []
        for i, pair in enumerate(dataset):
            text = REFUSALS[i % len(REFUSALS)]
            question, prompt = (
                pair.get(field) if isinstance(pair, Mapping) else getattr(pair, field, None)
                for field in ("question", "prompt")
            )
            # The space that an answer begins with is laid out for a question, and is the answer's own after a prompt.
            if question is not None:
                pairs.append({"question": question, "answer": text})
            else:
                pairs.append({"prompt": prompt, "answer": f" {text}"})
        return self.encode(pairs, name)
