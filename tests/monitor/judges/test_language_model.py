"""The judging model: ratings and mentions read from its answers, unreadable ones counted and not made up."""

from __future__ import annotations

import pytest

from monitor.judges.judgement import Judge, Judgement, unread
from monitor.judges.language_model import LanguageModelJudge, load_rubrics, rating, read_mentions
from monitor.judges.mentions import MentionFinder
from monitor.stimuli.concepts import ConceptSet, Context, Entity


def concept(categories: bool) -> ConceptSet:
    named = {"lion": "mammals", "zebra": "mammals", "owl": "birds", "eagle": "birds"}
    return ConceptSet(
        "animals",
        tuple(
            Entity(name, kind if categories else name, (name,), (Context(f"Number {i} is the", 0),))
            for i, (name, kind) in enumerate(named.items())
        ),
    )


ANIMALS = concept(True)


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("It names a lion.\nRating: [[2]]", 2),
        ("Rating: [[0]]", 0),
        ("**Rating:** [[1]]", 1),
        ("rating: 1", 1),
        ("Rating: [[2.0]]", 2),
        ("Rating: [[1]]\nOn second thoughts:\nRating: [[2]].", 2),
        ("Rating: [[0]] or Rating: [[1]] or Rating: [[2]]", None),  # a list of the grades is no grade
        ("Rating: [[n]]", None),
        ("Rating: [[3]]", None),
        ("Rating: [[10]]", None),
        ("Rating: [[1.5]]", None),
        ("Rating: [[-1]]", None),
        ("I would give it two points.", None),
        ("", None),
    ],
)
def test_ratings(answer, value):
    assert rating(answer) == value


RESPONSE = "A lion, two owls and a dragon met a red fox by the Nile."


@pytest.mark.parametrize(
    ("answer", "mentions"),
    [
        ("lion | mammals\nowl | birds", (("lion", "mammals"),)),  # "owl" does not stand there as a word
        ("- lion | mammals\n* owls | birds", (("lion", "mammals"), ("owl", "birds"))),
        ("lion | birds", (("lion", "mammals"),)),  # a listed entity keeps its category
        ("dragon | other\nred fox | Mammals", (("dragon", "other"), ("red fox", "mammals"))),
        ("Dragon | reptiles", (("dragon", "other"),)),
        ("tiger | mammals", ()),  # made up
        ("lion | mammals\nlion | mammals", (("lion", "mammals"),)),
        ("thing | category\nnone", ()),
        ("There is a lion.", ()),
        ("", ()),
    ],
)
def test_mentions(answer, mentions):
    assert read_mentions(answer, RESPONSE, ANIMALS, MentionFinder(ANIMALS)) == mentions


def test_without_categories_what_is_not_listed_is_other():
    found = read_mentions("fox | mammals\nlion | lion", RESPONSE, concept(False), MentionFinder(concept(False)))
    assert found == (("fox", "other"), ("lion", "lion"))


class Scripted(LanguageModelJudge):
    """Says what the script has for a word of the question."""

    def __init__(self, script):
        super().__init__(None, None)
        self.script, self.asked = script, []

    def _ask(self, questions):
        self.asked += questions
        return [next(answer for word, answer in self.script.items() if word in question) for question in questions]


SCRIPT = {
    "brings in a topic": "Clear.\nRating: [[2]]",
    "how fluent": "Hm.",
    "is an answer": "No.\nRating: [[0]]",
    "You list": "lion | mammals",
}


def test_every_response_is_judged_on_four_rubrics_and_every_answer_is_kept():
    judge = Scripted(SCRIPT)
    assert isinstance(judge, Judge) and judge.names_others(ANIMALS)
    asked, said = ["Ask $response {x}"] * 3, ["A lion {0} $concept sleeps", "", "A lion {0} $concept sleeps"]
    one, nothing, same = judge.judge(asked, said, ANIMALS)
    assert (one.concept, one.fluency, one.instruction, one.mentions) == (2, None, 0, (("lion", "mammals"),))
    assert dict(one.evidence) == dict(zip(load_rubrics(), SCRIPT.values(), strict=True))
    assert nothing == Judgement(0, 0.0, 0.0) and same == one
    assert unread([one, nothing, same]) == {"concept": 0, "fluency": 2, "instruction": 0}
    # Equal responses are asked about once, and what looks like a field in them is none.
    assert len(judge.asked) == 4
    assert all("A lion {0} $concept sleeps" in question for question in judge.asked)
    assert any("Ask $response {x}" in question for question in judge.asked)
    assert any("mammals, birds" in question for question in judge.asked)


def test_rubrics_are_four_and_hold_the_response():
    rubrics = load_rubrics()
    assert list(rubrics) == ["concept", "fluency", "instruction", "mentions"]
    LanguageModelJudge(None, None, rubrics=rubrics)
    with pytest.raises(ValueError, match="must be concept, fluency"):
        LanguageModelJudge(None, None, rubrics={"concept": "$response"})
    for text in ("no field", "$response $other"):
        with pytest.raises(ValueError, match="must hold \\$response"):
            LanguageModelJudge(None, None, rubrics=rubrics | {"fluency": text})


def test_any_causal_model_can_be_asked(tiny_llama, tiny_tokenizer):
    short = {name: f"{name}: $response" for name in load_rubrics()}
    model = tiny_llama()
    judge = LanguageModelJudge(model, tiny_tokenizer, rubrics=short, max_new_tokens=5)
    (one,) = judge.judge(["Who is it?"], ["A lion"], ANIMALS)
    assert (one.concept, one.fluency, one.instruction, one.mentions) == (None, None, None, ())
    assert [name for name, _ in one.evidence] == list(short)


@pytest.mark.slow
def test_a_model_too_small_to_judge_leaves_gaps_and_no_scores(smollm2):
    """SmolLM2-135M goes on about the text instead of grading it: that is told, not taken for a grade."""
    model, tokenizer = smollm2
    judge = LanguageModelJudge(model, tokenizer, max_new_tokens=30)
    (one,) = judge.judge(["Describe your morning."], ["The lion sleeps in the shade of a tree."], ANIMALS)
    answers = dict(one.evidence)
    assert all(answers.values())
    for name in ("concept", "fluency", "instruction"):
        assert getattr(one, name) == rating(answers[name])
    assert sum(unread([one]).values()) == sum("Rating: [[" not in answers[name] for name in list(answers)[:3])
