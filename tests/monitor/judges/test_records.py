"""Judgements come back from their records as they were, and two judges' agreement is scikit-learn's."""

from __future__ import annotations

import random

import pytest
from scipy import stats
from sklearn.metrics import cohen_kappa_score

from monitor.judges.agreement import agreement
from monitor.judges.judgement import Judgement
from monitor.judges.records import append_records, judgement_of, judgement_records, read_records

JUDGEMENTS = [
    Judgement(2, 1.5, 0.25, (("lion", "mammals"), ("a, b; c", "other")), (("nll", 1.25), ("repetition", None))),
    Judgement(None, 0.0, None, (), (("concept", "No.\u2028Rating: [[7]]"),)),
]


def test_records_are_flat_and_come_back(tmp_path):
    path = tmp_path / "folder" / "judgements.jsonl"
    records = judgement_records(
        "word_list", "animals", ["Ask\u2028?", "Ask"], ["A lion\nsleeps", ""], JUDGEMENTS, method="pca", rank=4
    )
    append_records(path, records[:1])
    append_records(path, records[1:])
    assert read_records(path) == records
    assert [judgement_of(record) for record in read_records(path)] == JUDGEMENTS
    assert all(value is None or isinstance(value, (str, int, float)) for record in records for value in record.values())
    assert records[0]["method"] == "pca" and records[0]["rank"] == 4 and records[1]["index"] == 1
    assert records[1]["concept"] is None and records[0]["concept_name"] == "animals"


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "judgements.jsonl"
    append_records(path, [{"a": 1}])
    with pytest.raises(ValueError):
        append_records(path, [{"a": 2}, {"a": float("nan")}])
    assert read_records(path) == [{"a": 1}]
    with pytest.raises(ValueError, match="response"):
        judgement_records("j", "animals", ["a"], ["b"], JUDGEMENTS[:1], response=1)


@pytest.mark.parametrize("scores", [(3, 0.0, 0.0), (0, -0.1, 0.0), (0, 0.0, 2.5), (0, float("nan"), 0.0)])
def test_scores_out_of_range_are_refused(scores):
    with pytest.raises(ValueError, match="must be"):
        Judgement(*scores)


def judged(concept, fluency):
    return [Judgement(a, b, 1.0) for a, b in zip(concept, fluency, strict=True)]


def test_agreement_with_oneself_is_perfect_and_with_the_opposite_negative():
    numbers = random.Random(0)
    concept = [0, 1, 2, *(numbers.randint(0, 2) for _ in range(30))]
    one = judged(concept, [numbers.uniform(0, 2) for _ in concept])
    for found in agreement(one, one)[:2]:
        assert (found.exact, found.kappa, found.n, found.left_out) == (1.0, pytest.approx(1.0), 33, 0)
        assert found.spearman == pytest.approx(1.0)
    against = judged([2 - value for value in concept], [0.0] * 33)
    found = agreement(one, against)[0]
    assert found.kappa < 0 and found.spearman == pytest.approx(-1.0)


def test_agreement_is_scikit_learns_and_scipys():
    numbers = random.Random(1)
    a, b = ([numbers.uniform(0, 2) for _ in range(50)] for _ in range(2))
    found = agreement(judged([1] * 50, a), judged([1] * 50, b))[1]
    rounded = [[int(value + 0.5) for value in side] for side in (a, b)]
    assert found.kappa == pytest.approx(cohen_kappa_score(*rounded, weights="quadratic"))
    assert found.spearman == pytest.approx(stats.spearmanr(a, b).statistic)
    assert found.exact == sum(x == y for x, y in zip(*rounded, strict=True)) / 50


def test_what_one_judge_could_not_read_is_left_out_and_a_constant_has_no_kappa():
    first = [Judgement(None, 1.0, 1.0), Judgement(2, 2.0, 1.0), Judgement(0, 0.0, None)]
    second = [Judgement(1, 1.0, 1.0), Judgement(2, 2.0, 1.0), Judgement(1, 0.5, 1.0)]
    concept, fluency, instruction = agreement(first, second)
    assert (concept.n, concept.left_out, concept.exact, concept.spearman) == (2, 1, 0.5, None)
    assert (fluency.n, fluency.spearman) == (3, pytest.approx(1.0))
    assert (instruction.exact, instruction.kappa, instruction.left_out) == (1.0, None, 1)
    nothing = agreement(first[:1], [Judgement(None, None, None)])[1]
    assert (nothing.exact, nothing.n, nothing.left_out) == (None, 0, 1)
    with pytest.raises(ValueError, match="same responses"):
        agreement(first, second[:2])
