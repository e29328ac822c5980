"""The offline judge: word lists for the concept, the unsteered model's likelihoods for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from monitor.judges.calibration import (
    FluencyScale,
    RelevanceScale,
    fluency_scale,
    relevance_scale,
    shuffled_words,
)
from monitor.judges.judgement import Judgement, check_responses
from monitor.judges.likelihood import Likelihood
from monitor.judges.mentions import Mention, MentionFinder, named, plain
from monitor.judges.repetition import looped, repetition, word_spans
from monitor.stimuli.concepts import ConceptSet
from monitor.stimuli.instructions import load_instructions

# A text of fewer words is too short for one entity to crowd out the rest: "A lion." is an answer.
_SHORT = 4


class WordListJudge:
    """Judges without a judging model and without a network.

    Parameters
    ----------
    model : nn.Module
        The model whose answers are judged, unsteered. Left as it was found. Its own answers are the measure, and are
        taken at the first judgement: make another judge when its weights change.
    tokenizer : PreTrainedTokenizerBase
    instructions : sequence of at least 3 str, optional
        Whose unsteered answers are the measure of fluency, and the unrelated responses of relevance; by default 20 of
        the bundled ones.
    max_new_tokens : int
        Tokens of these answers: as many as the judged ones have at most.
    batch_tokens : int
        Padded tokens in a batch.
    progress : str, optional
        Title of a progress bar on standard error; none without it.

    Notes
    -----
    **Concept.** 0 if no entity is mentioned (`MentionFinder`). 1 if every mention lies in a loop (`looped`), or if
    more than half of the words, of four or more, are mentions of one entity. Else 2.

    **Fluency.** The token mean of −log p(response) after an opening that tells nothing of the instruction, on the
    scale of `fluency_scale`, times the share of the response that is no repetition. Meaning does not count.

    **Instruction.** The token mean of log p(instruction | response), on the scale of `relevance_scale`: 0 as likely as
    after the unsteered answers to other instructions, 2 as after the unsteered answer to this one.

    A response without a word scores 0 everywhere.
    """

    name = "word_list"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        instructions: Sequence[str] | None = None,
        max_new_tokens: int = 20,
        batch_tokens: int = 4096,
        progress: str | None = None,
    ) -> None:
        if instructions is None:
            instructions = load_instructions().norms[:20]
        if isinstance(instructions, str) or len(set(instructions)) < 3:
            raise ValueError(
                f"`instructions` must hold at least 3 different instructions, got {instructions!r}: a scale is made of "
                "the answers to them"
            )
        self.instructions = tuple(dict.fromkeys(instructions))
        self.max_new_tokens = max_new_tokens
        self.likelihood = Likelihood(model, tokenizer, batch_tokens=batch_tokens, progress=progress)
        self._answers: dict[str, str] = {}
        self._fluency: FluencyScale | None = None
        self._relevance: dict[str, RelevanceScale] = {}

    def judge(self, instruction: Sequence[str], responses: Sequence[str], concept: ConceptSet) -> list[Judgement]:
        """One judgement a response; see `monitor.judges.judgement.Judge`."""
        check_responses(instruction, responses)
        if not responses:
            return []
        self._calibrate(instruction)
        words = [[word for word, _, _ in word_spans(plain(response))] for response in responses]
        said = [i for i, text in enumerate(words) if text]
        nll, log_prob = self.likelihood.read(
            [responses[i] for i in said], [instruction[i] for i in said], [responses[i] for i in said]
        )
        repeated = torch.tensor([repetition(words[i]) for i in said], dtype=torch.float64)
        fluency = self._fluency.score(nll, repeated)
        finder = MentionFinder(concept)
        judgements = [Judgement(0, 0.0, 0.0)] * len(responses)
        for at, i in enumerate(said):
            mentions = finder.find(responses[i])
            judgements[i] = Judgement(
                concept_score(responses[i], mentions),
                float(fluency[at]),
                float(self._relevance[instruction[i]].score(log_prob[at])),
                named(mentions),
                (
                    ("nll", _finite(nll[at])),
                    ("repetition", _finite(repeated[at])),
                    ("instruction_log_prob", _finite(log_prob[at])),
                ),
            )
        return judgements

    def names_others(self, concept: ConceptSet) -> bool:
        """False, but for years (`MentionFinder`)."""
        return MentionFinder(concept).names_others

    @property
    def scales(self) -> tuple[FluencyScale, dict[str, RelevanceScale]]:
        """The scales in use: of fluency, and of relevance by instruction; made here if there are none yet."""
        self._calibrate(())
        return self._fluency, dict(self._relevance)

    def _calibrate(self, instructions: Sequence[str]) -> None:
        """Make the scales that these instructions need and that are not made yet."""
        new = [text for text in dict.fromkeys(instructions) if text not in self._relevance]
        unheard = [text for text in dict.fromkeys((*self.instructions, *new)) if text not in self._answers]
        if unheard:
            said = self.likelihood.answers(unheard, self.max_new_tokens)
            self._answers.update(zip(unheard, said, strict=True))
        heard = {text: self._answers[text] for text in self.instructions if word_spans(self._answers[text])}
        if len(heard) < 3:
            raise ValueError(
                f"the unsteered model says something to {len(heard)} of {len(self.instructions)} instructions, and the "
                "scales need 3: it is no model to judge with, or `instructions` must be others"
            )
        natural = list(heard.values()) if self._fluency is None else []
        shuffled = shuffled_words(natural)
        asked: list[tuple[str, str]] = []
        for text in new:
            asked += [(text, answer) for other, answer in heard.items() if other != text]
            asked.append((text, self._answers[text] if word_spans(self._answers[text]) else "-"))
        nll, log_prob = self.likelihood.read(
            natural + shuffled, [text for text, _ in asked], [answer for _, answer in asked]
        )
        if natural:
            self._fluency = fluency_scale(nll[: len(natural)], nll[len(natural) :])
        sizes = Counter(text for text, _ in asked)
        start = 0
        for text in new:
            own: Tensor = log_prob[start : start + sizes[text]]
            self._relevance[text] = relevance_scale(float(own[-1]), own[:-1])
            start += sizes[text]


def concept_score(response: str, mentions: Sequence[Mention]) -> int:
    """0, 1 or 2 by the rule in `WordListJudge`; positions of mentions are those in ``plain(response)``."""
    if not mentions:
        return 0
    spans = word_spans(plain(response))
    loops = looped([word for word, _, _ in spans])
    covered: Counter[str] = Counter()
    outside = False
    for mention in mentions:
        own = [i for i, (_, start, end) in enumerate(spans) if start < mention.end and mention.start < end]
        covered[mention.entity] += len(own)
        outside = outside or not all(loops[i] for i in own)
    crowded = len(spans) >= _SHORT and 2 * max(covered.values()) > len(spans)
    return 1 if crowded or not outside else 2


def _finite(value: Tensor) -> float | None:
    return float(value) if bool(torch.isfinite(value)) else None
