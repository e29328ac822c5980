"""A language model as the judge: rubrics as text files, ratings read from its answers, every answer kept."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template

from torch import nn
from transformers import PreTrainedTokenizerBase

from monitor.generation import greedy_answers
from monitor.geometry.diversity import OTHER
from monitor.judges.judgement import SCORES, Judgement, check_responses
from monitor.judges.mentions import MentionFinder, plain
from monitor.stimuli.concepts import ConceptSet
from monitor.stimuli.encoding import asked_prompt

RUBRICS = (*SCORES, "mentions")
_RATING = re.compile(r"rating[\s:*]*\[{0,2}\s*([0-9]+(?:\.[0-9]+)?)(?![\w.]*\d)", re.IGNORECASE)
# Entities shown to the judge, so that it knows what is meant by the concept.
_EXAMPLES = 6


def load_rubrics() -> dict[str, str]:
    """The bundled rubrics: ``concept``, ``fluency``, ``instruction``, ``mentions``.

    Texts with ``$concept``, ``$examples``, ``$categories``, ``$instruction`` and ``$response`` where these go. The
    first three ask for ``Rating: [[n]]`` with n 0, 1 or 2, the last for lines ``entity | category``.
    """
    folder = files("monitor.judges").joinpath("rubrics")
    return {name: folder.joinpath(f"{name}.txt").read_text(encoding="utf-8") for name in RUBRICS}


class LanguageModelJudge:
    """Any causal language model as the judge.

    Parameters
    ----------
    model : nn.Module
        Best another and a larger one than the judged. Left as it was found.
    tokenizer : PreTrainedTokenizerBase
        With a chat template the rubric is what the user says.
    rubrics : mapping of str to str, optional
        Instead of those that `load_rubrics` gives; all four.
    max_new_tokens : int
        Tokens that the judge may explain itself and rate in.
    batch_tokens : int
        Tokens in a batch.
    progress : str, optional
        Title of a progress bar on standard error; none without it.

    Raises
    ------
    ValueError
        Rubrics that are missing, unknown, or do not hold ``$response``.

    Notes
    -----
    Four questions a response (MAxBench, Section 4.3), answered greedily. A rating that cannot be read, or is none of 0,
    1 and 2, makes the score None: AxBench's code counts it as 0, which blames the response for its judge. Every answer
    is kept in `Judgement.evidence`, by the rubric's name. A mention counts if what the judge names stands in the
    response; it goes by the name that the concept lists it under, where it does, and else has the judge's category, or
    ``"other"`` if that is none of the concept's. A response without text is not asked about and scores 0.
    """

    name = "language_model"

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        *,
        rubrics: Mapping[str, str] | None = None,
        max_new_tokens: int = 100,
        batch_tokens: int = 8192,
        progress: str | None = None,
    ) -> None:
        self.rubrics = dict(load_rubrics() if rubrics is None else rubrics)
        if set(self.rubrics) != set(RUBRICS):
            raise ValueError(f"`rubrics` must be {', '.join(RUBRICS)}, got {', '.join(self.rubrics) or 'none'}")
        for name, text in self.rubrics.items():
            fields = Template(text).get_identifiers()
            unknown = set(fields) - {"concept", "examples", "categories", "instruction", "response"}
            if "response" not in fields or unknown:
                raise ValueError(
                    f"`rubrics[{name!r}]` must hold $response, and of other fields only $concept, $examples, "
                    f"$categories and $instruction, got {sorted(fields)}"
                )
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.batch_tokens, self.progress = max_new_tokens, batch_tokens, progress

    def judge(self, instruction: Sequence[str], responses: Sequence[str], concept: ConceptSet) -> list[Judgement]:
        """One judgement a response; see `monitor.judges.judgement.Judge`."""
        check_responses(instruction, responses)
        questions = {
            (name, i): self._question(name, asked, response, concept)
            for i, (asked, response) in enumerate(zip(instruction, responses, strict=True))
            if response.strip()
            for name in RUBRICS
        }
        # Steering that has no effect gives one response many times: it is judged once.
        distinct = list(dict.fromkeys(questions.values()))
        answers = dict(zip(distinct, self._ask(distinct), strict=True))
        finder = MentionFinder(concept)
        judgements = []
        for i, response in enumerate(responses):
            if not response.strip():
                judgements.append(Judgement(0, 0.0, 0.0))
                continue
            said = {name: answers[questions[name, i]] for name in RUBRICS}
            concept_rating, fluency, relevance = (rating(said[name]) for name in SCORES)
            mentions = read_mentions(said["mentions"], response, concept, finder)
            judgements.append(Judgement(concept_rating, fluency, relevance, mentions, tuple(said.items())))
        return judgements

    def names_others(self, concept: ConceptSet) -> bool:
        """True: a judge is asked for all that belongs to the concept."""
        return True

    def _question(self, rubric: str, instruction: str, response: str, concept: ConceptSet) -> str:
        examples = [entity.name for entity in concept.entities]
        step = max(1, len(examples) // _EXAMPLES)  # spread over the categories
        return Template(self.rubrics[rubric]).substitute(
            concept=concept.name,
            examples=", ".join(examples[::step][:_EXAMPLES]),
            categories=", ".join(_categories(concept)) or "none",
            instruction=instruction.strip(),
            response=response.strip(),
        )

    def _ask(self, questions: Sequence[str]) -> list[str]:
        if not questions:
            return []
        return greedy_answers(
            self.model,
            self.tokenizer,
            [asked_prompt(self.tokenizer, question) for question in questions],
            max_new_tokens=self.max_new_tokens,
            one_line=False,
            batch_tokens=self.batch_tokens,
            progress=self.progress,
        )


def rating(answer: str) -> int | None:
    """The last rating in a judge's answer, ``Rating: [[n]]`` with n 0, 1 or 2; None if there is no such.

    None as well if the line that it is in gives several: a judge that lists the grades has not chosen one.
    """
    lines = [found for found in map(_RATING.findall, answer.splitlines()) if found]
    values = {float(value) for value in lines[-1]} if lines else set()
    return int(values.pop()) if len(values) == 1 and values <= {0.0, 1.0, 2.0} else None


def read_mentions(
    answer: str, response: str, concept: ConceptSet, finder: MentionFinder
) -> tuple[tuple[str, str], ...]:
    """The mentions in a judge's answer of lines ``entity | category``; see the notes of `LanguageModelJudge`."""
    text = plain(response).casefold()
    categories = {category.casefold(): category for category in _categories(concept)}
    mentions: dict[str, str] = {}
    for line in plain(answer).splitlines():
        parts = [part.strip(" \t-*\u2022\"'.") for part in line.split("|")]
        if len(parts) != 2 or not parts[0]:
            continue
        entity, category = parts[0].casefold(), parts[1].casefold()
        if not _whole(entity, text):
            continue  # what the judge made up
        listed = finder.find(parts[0])
        if listed:
            mentions.setdefault(listed[0].entity, listed[0].category)
        else:
            mentions.setdefault(entity, categories.get(category, OTHER))
    return tuple(mentions.items())


def _whole(words: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def _categories(concept: ConceptSet) -> tuple[str, ...]:
    """The concept's categories; none where every entity is its own."""
    categories = concept.categories
    return () if len(categories) == len(concept.entities) else categories
