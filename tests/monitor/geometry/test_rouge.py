"""ROUGE-L against its definition: hand-computed values, subsequences enumerated one by one, and its properties."""

import random
from itertools import combinations

import pytest
import torch

from monitor.geometry.rouge import rouge_l, rouge_l_scores, words

VOCABULARY = ["the", "wizard", "sailed", "a", "ship", "home"]


def longest_common(a, b):
    """Every subsequence of `a`, longest first, looked for in `b` with an iterator: no table, no bits."""
    for length in range(len(a), 0, -1):
        for chosen in combinations(a, length):
            rest = iter(b)
            if all(word in rest for word in chosen):
                return length
    return 0


def random_text(seed, most=8):
    rng = random.Random(seed)
    return " ".join(rng.choices(VOCABULARY, k=rng.randint(1, most)))


@pytest.mark.parametrize(
    ("candidate", "reference", "precision", "recall"),
    [
        # Lin 2004, Sec. 3.1: S1 "police killed the gunman"; S2, S3 and S4 share 3, 2 and 2 words with it in order.
        ("police kill the gunman", "police killed the gunman", 3 / 4, 3 / 4),
        ("the gunman kill police", "police killed the gunman", 2 / 4, 2 / 4),
        ("the gunman police killed", "police killed the gunman", 2 / 4, 2 / 4),
        ("Albus Dumbledore, I think", "Dumbledore.", 1 / 4, 1),
        ("b a", "a b", 1 / 2, 1 / 2),
        ("a a a", "a", 1 / 3, 1),
        ("a", "a b a b a", 1, 1 / 5),
        ("", "Dumbledore", 0, 0),
        (" ?! ", "Dumbledore", 0, 0),
    ],
)
def test_values_computed_by_hand(candidate, reference, precision, recall):
    scores = rouge_l_scores([candidate], [reference])
    f1 = 0.0 if precision == 0 else 2 * precision * recall / (precision + recall)
    for score, expected in zip(scores, (precision, recall, f1), strict=True):
        assert score.dtype == torch.float64 and score.tolist() == pytest.approx([expected], abs=1e-15)


def test_equals_the_enumeration_of_all_subsequences():
    candidates, references = [random_text(i) for i in range(150)], [random_text(1000 + i) for i in range(150)]
    scores = rouge_l_scores(candidates, references)
    for i, (a, b) in enumerate(zip(map(str.split, candidates), map(str.split, references), strict=True)):
        common = longest_common(a, b)
        assert scores.precision[i].item() == pytest.approx(common / len(a), abs=1e-15)
        assert scores.recall[i].item() == pytest.approx(common / len(b), abs=1e-15)
        assert scores.f1[i].item() == pytest.approx(2 * common / (len(a) + len(b)), abs=1e-15)
    assert len(set(scores.f1.tolist())) > 20, "the texts must give many different scores"


def test_longer_than_a_machine_word():
    text = [f"w{i}" for i in range(200)]
    every_second, backwards = " ".join(text[::2]), " ".join(text[::-1])
    scores = rouge_l_scores([every_second, backwards], [" ".join(text)] * 2)
    assert scores.recall.tolist() == [0.5, 1 / 200] and scores.precision.tolist() == [1.0, 1 / 200]


def test_symmetric_bounded_one_for_equal_and_zero_for_disjoint():
    a, b = [random_text(i) for i in range(60)], [random_text(99 + i) for i in range(60)]
    f1 = rouge_l(a, b)
    assert f1.equal(rouge_l(b, a)) and f1.min() >= 0 and f1.max() <= 1
    assert rouge_l(a, a).tolist() == [1.0] * 60
    assert rouge_l(["one two"] * 60, a).tolist() == [0.0] * 60
    assert rouge_l([], []).shape == (0,)


def test_precision_and_recall_change_places_with_the_texts():
    a, b = [random_text(i) for i in range(30)], [random_text(50 + i) for i in range(30)]
    assert rouge_l_scores(a, b).precision.equal(rouge_l_scores(b, a).recall)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Harry's owl, Hedwig -- 7 years!", ["harry", "s", "owl", "hedwig", "7", "years"]),
        ("snake_case\ttab\nline", ["snake", "case", "tab", "line"]),
        ("Antonín DVOŘÁK", ["antonín", "dvořák"]),
        ("Война и мир", ["война", "и", "мир"]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),  # vowel signs and viramas are marks, not letters
        ("ハリー・ポッター", ["ハリー", "ポッター"]),
        ("-- ... !", []),
    ],
)
def test_words_of_any_script(text, expected):
    assert words(text) == expected


def test_composed_and_decomposed_letters_are_the_same_word():
    assert rouge_l(["Dvor\u030ca\u0301k"], ["Dvořák"]).tolist() == [1.0]


@pytest.mark.parametrize(
    ("candidates", "references", "message"),
    [
        ("a text", ["a text"], "`candidates`.*one string"),
        (["a text"], "a text", "`references`.*one string"),
        (["a", "b"], ["a"], "2 and 1"),
        (["a", "b"], ["a", "?!"], "`references`.*at 1"),
    ],
)
def test_bad_input_is_named(candidates, references, message):
    with pytest.raises(ValueError, match=message):
        rouge_l(candidates, references)
