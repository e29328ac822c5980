import pytest

from monitor.attacks.word_frequency import content_words, word_frequency


@pytest.mark.parametrize(
    ("answer", "question", "expected"),
    [
        ("J.K. Rowling", "Who wrote the books?", ("rowling",)),
        ("They are glassblowers", "What do the parents do?", ("glassblowers",)),
        (
            "the Hogwarts Express from King's Cross",
            "Where does the Hogwarts train leave?",
            ("express", "king", "cross"),
        ),
        ("Platform 9", "", ("platform", "9")),
        ("seven, yes: SEVEN", "", ("seven", "yes")),
        ("Dvořák", "", ("dvořák",)),
        ("中", "", ("中",)),
        ("Harry Potter", "Who is Harry Potter?", ()),
        ("It is the one", "", ()),
    ],
)
def test_an_answer_is_recognised_by_words_of_its_own(answer, question, expected):
    assert content_words(answer, question) == expected


def test_the_best_word_counts_and_a_sample_counts_once():
    samples = ["Rowling, Rowling!", "J. K. rowling", "Joanne", "the Rowlings"]
    assert word_frequency(samples, ("rowling",)) == 2 / 4
    assert word_frequency(samples, ("joanne", "rowling")) == 2 / 4
    assert word_frequency(samples, ("joanne", "kathleen")) == 1 / 4
    assert word_frequency(samples, ("owl",)) == 0


def test_words_cut_off_do_not_count():
    assert word_frequency(["a phoen", "phoenix"], ("phoenix",)) == 0.5


@pytest.mark.parametrize(("samples", "answer"), [([], ("a",)), ("text", ("a",)), (["text"], ()), (["text"], "a")])
def test_nothing_to_count_is_an_error(samples, answer):
    with pytest.raises(ValueError, match="must hold at least one"):
        word_frequency(samples, answer)
