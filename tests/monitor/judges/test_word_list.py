"""The offline judge on planted responses, with planted likelihoods; and on a real model."""

from __future__ import annotations

import math
import random

import pytest
import torch

from monitor.geometry.concept_scores import score_outputs
from monitor.judges.calibration import FluencyScale, fluency_scale, relevance_scale, shuffled_words
from monitor.judges.judgement import Judge, judge_grid
from monitor.judges.mentions import MentionFinder
from monitor.judges.word_list import WordListJudge, concept_score
from monitor.stimuli.concepts import ConceptSet, Context, Entity
from monitor.stimuli.instructions import load_instructions

NAMES = {"mammals": ("lion", "zebra", "camel"), "birds": ("owl", "eagle", "parrot"), "fish": ("shark", "tuna", "eel")}
ANIMALS = ConceptSet(
    "animals",
    tuple(
        Entity(name, kind, (name,), (Context(f"The {kind} number {i} is the", 0),))
        for kind, names in NAMES.items()
        for i, name in enumerate(names)
    ),
)
ASKED = ("Describe a good teacher.", "How do I save money?", "Write a poem about the sea.", "What is music for?")


class Planted:
    """Likelihoods by rule: words in alphabetical disorder are likely, and an instruction by the words in common."""

    def __init__(self):
        self.reads = []

    def answers(self, instructions, max_new_tokens):
        return [f"It begins with what you asked, so here is to that: {text}" for text in instructions]

    def read(self, texts, instructions, responses):
        self.reads.append((list(texts), list(instructions), list(responses)))
        nll = [1.0 if text.startswith(("It", "A ", "The")) else 6.0 for text in texts]
        shared = [
            len(set(a.lower().split()) & set(b.lower().split())) / len(a.split()) - 3
            for a, b in zip(instructions, responses, strict=True)
        ]
        return torch.tensor(nll, dtype=torch.float64), torch.tensor(shared, dtype=torch.float64)


@pytest.fixture
def judge():
    made = WordListJudge(None, None, instructions=ASKED)
    made.likelihood = Planted()
    return made


def test_it_is_a_judge(judge):
    assert isinstance(judge, Judge) and not judge.names_others(ANIMALS)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("The lion sleeps under a tree all day.", 2),
        ("Lions, zebras, owls and an eel.", 2),  # a list is clear enough
        ("A lion.", 2),
        ("There is nothing of the kind here.", 0),
        ("", 0),
        ("lion lion lion lion lion lion", 1),
        ("the lion the lion the lion the lion", 1),
        ("I like lions. I like lions. I like lions. I like", 1),
        ("The answer to your question is owl owl owl owl, as every child knows", 1),
        ("lions, lion lions and lion", 1),  # no loop, but hardly anything else is said
        ("The owl said: owl owl owl owl, as every child knows by now", 2),  # once outside the loop
        ("very very very tired, the lion sleeps", 2),  # the loop is not of it
    ],
)
def test_concept_scores(response, score):
    assert concept_score(response, MentionFinder(ANIMALS).find(response)) == score


def test_planted_generations_reach_the_extremes(judge):
    entities = [name for names in NAMES.values() for name in names]
    planted = {
        "perfect": [f"The {name} came to the old river this morning to drink." for name in entities],
        "collapsed": ["The lion came to the old river this morning to drink."] * 9,
        "off": ["The teacher came to the old school this morning to think."] * 9,
        "degenerate": ["lion " * 12] * 9,
    }
    scores = {
        name: score_outputs(judge_grid(judge, ASKED[:2], [said, said], ANIMALS), ANIMALS)
        for name, said in planted.items()
    }
    value = {name: {key: estimate.value for key, estimate in found.items()} for name, found in scores.items()}
    assert value["perfect"]["concept"] == 2.0 and value["perfect"]["fluency"] == pytest.approx(2.0)
    assert value["perfect"]["diversity"] == pytest.approx(2.0)
    assert value["collapsed"]["concept"] == 2.0 and value["collapsed"]["diversity"] == 0.0
    assert value["off"]["concept"] == 0.0 and value["off"]["diversity"] == 0.0 and value["off"]["fluency"] == 2.0
    assert value["degenerate"]["concept"] == 1.0 and value["degenerate"]["fluency"] == 0.0
    assert value["collapsed"]["maxbench"] == value["off"]["maxbench"] == value["degenerate"]["maxbench"] == 0.0


def test_a_loop_is_not_fluent_however_likely(judge):
    once, loop = judge.judge([ASKED[0]] * 2, ["The owl sleeps in a tree", "The owl the owl the owl the owl"], ANIMALS)
    assert (once.fluency, loop.fluency) == (2.0, 0.0)
    assert dict(loop.evidence) == {"nll": 1.0, "repetition": 1.0, "instruction_log_prob": -3.0}


def test_instruction_is_two_for_the_unsteered_answer_and_zero_for_those_to_others(judge):
    own = judge.likelihood.answers(ASKED, 20)
    right = judge.judge(ASKED, own, ANIMALS)
    assert [one.instruction for one in right] == pytest.approx([2.0] * 4)
    wrong = judge.judge(ASKED, ["Bananas grow nowhere near"] * 4, ANIMALS)
    assert [one.instruction for one in wrong] == [0.0] * 4


def test_judgements_do_not_depend_on_the_other_responses_or_their_order(judge):
    responses = [f"The {name} is there: {text}" for name in ("lion", "owl") for text in ASKED]
    asked = list(ASKED) * 2
    together = judge.judge(asked, responses, ANIMALS)
    order = random.Random(0).sample(range(8), 8)
    shuffled = judge.judge([asked[i] for i in order], [responses[i] for i in order], ANIMALS)
    assert shuffled == [together[i] for i in order]
    other = WordListJudge(None, None, instructions=ASKED[::-1])
    other.likelihood = Planted()
    alone = [other.judge([a], [r], ANIMALS)[0] for a, r in zip(asked, responses, strict=True)]
    assert [one.instruction for one in alone] == pytest.approx([one.instruction for one in together])


def test_responses_without_a_word_score_zero_and_are_not_read(judge):
    judged = judge.judge([ASKED[0]] * 3, ["", " \n", "?!"], ANIMALS)
    assert [(one.concept, one.fluency, one.instruction, one.mentions) for one in judged] == [(0, 0.0, 0.0, ())] * 3
    assert judge.likelihood.reads[-1] == ([], [], [])
    assert judge.judge([], [], ANIMALS) == []


def test_scales_are_made_once_an_instruction(judge):
    judge.judge([ASKED[0]], ["The owl sleeps"], ANIMALS)
    first = len(judge.likelihood.reads)
    judge.judge([ASKED[0]], ["The eel sleeps"], ANIMALS)
    assert [len(texts) for texts, _, _ in judge.likelihood.reads[first:]] == [0, 1]
    fluency, relevance = judge.scales
    assert set(relevance) == {ASKED[0]} and fluency == judge.scales[0]


def test_fluency_falls_from_the_natural_to_the_shuffled():
    scale = fluency_scale(torch.linspace(1, 3, 41), torch.linspace(5, 7, 41))
    assert scale == FluencyScale(pytest.approx(2.9), pytest.approx(6.0))
    nll = torch.tensor([0.1, 2.9, 4.45, 6.0, 9.0, math.inf, math.nan])
    assert scale.score(nll, torch.zeros(7)).tolist() == pytest.approx([2, 2, 1, 0, 0, 0, 0], abs=1e-6)
    assert scale.score(torch.full((3,), 1.0), torch.tensor([0.0, 0.25, 1.0])).tolist() == pytest.approx([2, 1.5, 0])
    # A model that cannot tell has a scale all the same.
    blind = fluency_scale(torch.full((4,), 3.0), torch.full((4,), 2.0))
    assert (blind.good, blind.bad) == (3.0, pytest.approx(3.0 + math.log(2)))


def test_relevance_rises_from_the_unrelated_to_the_own():
    scale = relevance_scale(-1.0, torch.tensor([-3.5, -2.5, -3.0]))
    assert scale.score(torch.tensor([-5.0, -3.0, -2.0, -1.0, 0.0, -math.inf, math.nan])).tolist() == pytest.approx(
        [0, 0, 1, 2, 2, 0, 0]
    )
    missed = relevance_scale(-4.0, torch.tensor([-3.5, -2.5, -3.0]))
    assert (missed.chance, missed.best) == (pytest.approx(-3.0), pytest.approx(-1.5))


def test_shuffled_words_are_the_same_words():
    text = "one two three four five six seven"
    (shuffled,) = shuffled_words([text])
    assert shuffled != text and sorted(shuffled.split()) == sorted(text.split())
    assert shuffled_words([text]) == [shuffled]


@pytest.mark.parametrize(
    ("instruction", "responses", "message"),
    [
        ("text", ["a"], "one string"),
        (["a"], "text", "one string"),
        (["a"], ["b", "c"], "one instruction a response"),
        ([" "], ["b"], "blank"),
    ],
)
def test_bad_arguments_are_refused(judge, instruction, responses, message):
    with pytest.raises(ValueError, match=message):
        judge.judge(instruction, responses, ANIMALS)


def test_scales_need_instructions_and_answers(judge):
    with pytest.raises(ValueError, match="at least 3"):
        WordListJudge(None, None, instructions=["a", "a", "b"])
    judge.likelihood.answers = lambda instructions, max_new_tokens: [""] * len(instructions)
    with pytest.raises(ValueError, match="says something to 0 of 4"):
        judge.judge([ASKED[0]], ["The owl"], ANIMALS)


def test_likelihoods_of_a_model_are_those_read_one_by_one(tiny_llama, tiny_tokenizer):
    from monitor.judges.likelihood import Likelihood

    model = tiny_llama()
    likelihood = Likelihood(model, tiny_tokenizer)
    texts = ["the wizard went", " to the school "]
    nll, log_prob = likelihood.read(texts, ["who is he"], ["the captain"])
    for text, value in zip(texts, nll, strict=True):
        ids = tiny_tokenizer(f"Here is a sentence: {text.strip()}")["input_ids"]
        start = len(tiny_tokenizer("Here is a sentence:")["input_ids"])
        log_p = model(torch.tensor([ids])).logits[0, :-1].detach().log_softmax(-1)
        expected = -torch.stack([log_p[i - 1, ids[i]] for i in range(start, len(ids))]).mean()
        assert float(value) == pytest.approx(float(expected), rel=1e-4)
    assert log_prob.shape == (1,) and float(log_prob) < 0
    assert [part.tolist() for part in likelihood.read([], [], [])] == [[], []]


FLUENT = {
    "Describe what makes a good teacher.": "A good teacher is patient, explains things clearly and listens.",
    "Give three tips for saving money.": "Cook at home, turn off the lights, and write down what you spend each week.",
    "How to prepare for a job interview?": "Learn about the company, practise common questions, and arrive early.",
    "Write a note to thank a neighbour.": "Dear Anna, thank you so much for watering the garden while we were away.",
}


@pytest.mark.slow
def test_a_real_model_tells_english_from_disorder_and_answers_from_answers_to_others(smollm2):
    model, tokenizer = smollm2
    judge = WordListJudge(model, tokenizer, instructions=load_instructions().norms[:8])
    asked, said = list(FLUENT), list(FLUENT.values())
    right = judge.judge(asked, said, ANIMALS)
    disorder = judge.judge(asked, shuffled_words(said), ANIMALS)
    wrong = judge.judge(asked, said[1:] + said[:1], ANIMALS)
    (loop,) = judge.judge(asked[:1], ["I am a good teacher. I am a good teacher. I am a good teacher."], ANIMALS)
    for good, bad in zip(right, disorder, strict=True):
        assert good.fluency > bad.fluency + 0.5
    assert sum(one.fluency for one in right) / 4 > 1.2
    assert sum(one.fluency for one in disorder) / 4 < 0.5
    # Not each of them: of the note, a small model cannot tell what it was an answer to.
    better = sum(good.instruction > bad.instruction for good, bad in zip(right, wrong, strict=True))
    means = [sum(one.instruction for one in judged) / 4 for judged in (right, wrong)]
    assert better >= 3 and means[0] > 1.2 and means[0] - means[1] > 0.7
    assert dict(loop.evidence)["nll"] < min(dict(one.evidence)["nll"] for one in right) and loop.fluency == 0.0
