"""What a judge says of one response, and what a judge is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from monitor.stimuli.concepts import ConceptSet

SCORES = ("concept", "fluency", "instruction")


@dataclass(frozen=True)
class Judgement:
    """One response, judged.

    Parameters
    ----------
    concept : int in {0, 1, 2}, or None
        0 the concept is not mentioned, 1 it is, but unnaturally, 2 it clearly is.
    fluency : float in [0, 2], or None
        Higher: better English.
    instruction : float in [0, 2], or None
        Higher: more of an answer to the instruction.
    mentions : tuple of (entity, category)
        The entities of the concept that the response names, each once, in the order of their first mention: by the
        name that the concept lists it under, else lower-cased as it stands there, which a judge may give the category
        ``"other"``.
    evidence : tuple of (name, value)
        What the scores were decided on: numbers (None if not finite), or the answers of a judging model word for word.

    Raises
    ------
    ValueError
        A score outside its range.

    Notes
    -----
    A score is None where the judge's answer could not be read. It is left out of means, and counted.
    """

    concept: int | None
    fluency: float | None
    instruction: float | None
    mentions: tuple[tuple[str, str], ...] = ()
    evidence: tuple[tuple[str, str | float | None], ...] = ()

    def __post_init__(self) -> None:
        if self.concept not in (None, 0, 1, 2):
            raise ValueError(f"`concept` must be 0, 1, 2 or None, got {self.concept!r}")
        for name in ("fluency", "instruction"):
            score = getattr(self, name)
            if score is not None and not 0.0 <= score <= 2.0:
                raise ValueError(f"`{name}` must be in [0, 2] or None, got {score!r}")


@runtime_checkable
class Judge(Protocol):
    """Whoever judges responses.

    Attributes
    ----------
    name : str
    """

    name: str

    def judge(self, instruction: Sequence[str], responses: Sequence[str], concept: ConceptSet) -> list[Judgement]:
        """One judgement a response; ``instruction[i]`` is what ``responses[i]`` was to answer."""
        ...

    def names_others(self, concept: ConceptSet) -> bool:
        """Whether mentions can be of entities that the concept does not list.

        It is `other` of `monitor.geometry.concept_scores.score_outputs` and `diversity`.
        """
        ...


def judge_grid(
    judge: Judge, instructions: Sequence[str], answers: Sequence[Sequence[str]], concept: ConceptSet
) -> list[list[Judgement]]:
    """Judge the answers of many points to each instruction, in one call.

    Parameters
    ----------
    instructions : sequence of P str
    answers : sequence of P sequences of str
        As `monitor.steered_generation.steered_answers` returns them.

    Returns
    -------
    list of P lists of Judgement
        As `monitor.geometry.concept_scores.score_outputs` takes them.
    """
    if len(instructions) != len(answers):
        raise ValueError(
            f"`answers` must hold a sequence for each of the {len(instructions)} instructions, got {len(answers)}"
        )
    asked = [text for text, row in zip(instructions, answers, strict=True) for _ in row]
    judged = iter(judge.judge(asked, [answer for row in answers for answer in row], concept))
    return [[next(judged) for _ in row] for row in answers]


def unread(judgements: Sequence[Judgement]) -> dict[str, int]:
    """How many judgements lack each score, because the judge's answer could not be read."""
    return {name: sum(getattr(judgement, name) is None for judgement in judgements) for name in SCORES}


def check_responses(instruction: Sequence[str], responses: Sequence[str]) -> None:
    """Refuse what no judge can judge."""
    for name, texts in (("instruction", instruction), ("responses", responses)):
        if isinstance(texts, str):
            raise ValueError(f"`{name}` must be a sequence of texts, got one string: put it in a list")
    if len(instruction) != len(responses):
        raise ValueError(
            f"`instruction` must hold one instruction a response, got {len(instruction)} and {len(responses)}"
        )
    blank = [i for i, text in enumerate(instruction) if not text.strip()]
    if blank:
        raise ValueError(f"`instruction` must hold text, got a blank one at {blank[0]}")
