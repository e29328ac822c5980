"""Who's Harry Potter (WHP) with the generic labels of a reinforced model, the original."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from monitor.activations import Answers, measure_activations
from monitor.anatomy import find_anatomy
from trainers.answer_rows import AnswerRows
from trainers.data import Example
from trainers.objectives import generic_labels, sequence_nll
from trainers.reference_scores import Frozen, ReferenceNeeds
from trainers.terms import Term
from trainers.unlearning_trainer import UnlearningTrainer
from trainers.whp_reinforced_config import WHPReinforcedConfig

ROW_BUDGET = 2**27  # numbers held at once in each model's distributions: 512 MiB


class WHPReinforcedTrainer(UnlearningTrainer):
    """Make a model forget question-answer pairs by teaching it what it would say had it not read about them.

    Parameters
    ----------
    reinforced_model : nn.Module, optional
        The model trained further on the forget set (:class:`trainers.fine_tuning.FineTuningTrainer` does that). It is
        read once, before training, and let go of. A resumed run does not need it.
    model, args, ...
        As in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a WHPReinforcedConfig.

    Raises
    ------
    ValueError
        If labels are lacking and there is no reinforced model, or one of another vocabulary.

    Notes
    -----
    loss = gamma · ℓ(generic labels) + alpha · R. The generic label of an answer token is
    argmax(v_base − α · ReLU(v_reinforced − v_base)), after the true tokens before it (Eldan and Russinovich, arXiv
    2310.02238, Sec. 2.1), where v are log-probabilities, see :func:`trainers.objectives.generic_labels`. Sign:
    minimising it lowers the NLL of the generic labels; the forget NLL rises where they differ from the answer.
    """

    config_class = WHPReinforcedConfig

    def __init__(self, *args, reinforced_model: nn.Module | None = None, **kwargs) -> None:
        self.reinforced_model = reinforced_model
        super().__init__(*args, **kwargs)

    def reference_needs(self) -> ReferenceNeeds:
        return ReferenceNeeds(generic=("forget",))

    def measure_frozen(self, model: nn.Module, lacking: Mapping[str, Sequence[Example]], progress: str | None) -> None:
        super().measure_frozen(model, lacking, progress)
        examples = lacking.get("generic", ())
        if not examples:
            return
        reinforced, vocabulary = self.reinforced_model, find_anatomy(model).vocab_size
        if reinforced is None:
            raise ValueError(
                f"`reinforced_model` is None, and {len(examples)} pairs have no generic labels yet. Give the model "
                "trained further on the forget set (FineTuningTrainer)"
            )
        if find_anatomy(reinforced).vocab_size != vocabulary:
            raise ValueError(
                f"`reinforced_model` has {find_anatomy(reinforced).vocab_size} words and the model {vocabulary}; it "
                "must be the model itself, trained further"
            )
        reinforced.to(find_anatomy(model).device)
        for some in _portions(examples, ROW_BUDGET // vocabulary):
            request = Answers(tuple(e.prompt for e in some), tuple(e.answer for e in some), distribution=True)
            base, further = (
                measure_activations(m, self._tokenizer, [request], progress=progress).answers(request).log_distribution
                for m in (model, reinforced)
            )
            for example, v_base, v_reinforced in zip(some, base, further, strict=True):
                labels = generic_labels(v_base, v_reinforced, self.args.reinforcement)
                self.reference.scores.generic[example.key] = labels
        self.reinforced_model = None

    def forget_terms(self, rows: Mapping[str, AnswerRows], frozen: Frozen) -> dict[str, Term]:
        forget = rows["forget"]
        return {
            "forget_loss": Term(
                sequence_nll(forget._replace(targets=frozen.generic["forget"])), "forget", "token", self.args.gamma
            ),
            "forget_nll": Term(sequence_nll(forget).detach(), "forget", "token"),
        }


def _portions(examples: Sequence[Example], n_rows: int) -> Iterator[list[Example]]:
    """Examples in order, at most `n_rows` answer tokens at a time (or one example)."""
    some: list[Example] = []
    for example in examples:
        if some and sum(e.n_answer_tokens for e in some) + example.n_answer_tokens > n_rows:
            yield some
            some = []
        some.append(example)
    if some:
        yield some
