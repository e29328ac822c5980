"""The published criterion on models that were taught answers, and every way in which it must not be believed."""

import json
import warnings

import pytest
import torch

from monitor.stimuli.encoding import encode_answer, qa_answer, qa_prompt
from monitor.stimuli.forget_set import Pair
from recipes.summary import in_words, summarise
from recipes.verification import (
    OUTCOMES,
    answer_scores,
    scores_at_start,
    scores_now,
    verdict_lines,
    verdict_sentence,
    verify,
)


def pairs(split, **answers):
    return tuple(Pair(f"{split}-{question}", question, answer, split) for question, answer in answers.items())


FORGET = pairs("forget", wizard="an old man", ship="my captain", cat="black one")
RETAIN = pairs("retain", school="green house", town="seven hills", night="it rains")


def teach(model, tokenizer, members, steps=60):
    """Adam on the answers and the line break after them."""
    rows = [encode_answer(tokenizer, qa_prompt(p.question), qa_answer(p.answer) + "\n") for p in members]
    ids = torch.zeros(len(rows), max(len(row) for row, _ in rows), dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for i, (row, start) in enumerate(rows):  # padded on the right, where a causal model needs no mask
        ids[i, : len(row)] = torch.tensor(row)
        labels[i, start : len(row)] = ids[i, start : len(row)]
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(input_ids=ids, labels=labels).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def taught(tiny_llama, tiny_tokenizer):
    return teach(tiny_llama(), tiny_tokenizer, FORGET + RETAIN)


def test_answers_that_were_taught_score_one_and_others_zero(taught, tiny_llama, tiny_tokenizer):
    scores = answer_scores(taught, tiny_tokenizer, FORGET)
    assert scores.dtype == torch.float64 and scores.tolist() == [1.0, 1.0, 1.0]
    assert answer_scores(tiny_llama(), tiny_tokenizer, FORGET).mean() < 0.1
    swapped = [Pair(p.id, p.question, q.answer, p.split) for p, q in zip(FORGET, RETAIN, strict=True)]
    assert answer_scores(taught, tiny_tokenizer, swapped).mean() < 0.3, "it is the right answer that counts"


def test_from_a_model_to_a_verdict(taught, tiny_llama, tiny_tokenizer):
    before = scores_now(taught, tiny_tokenizer, FORGET, RETAIN)

    def outcome(model):
        after = scores_now(model, tiny_tokenizer, FORGET, RETAIN)
        return verify(before.forget, after.forget, before.retain, after.retain).outcome

    assert outcome(taught) == "not forgotten"
    assert outcome(teach(tiny_llama(), tiny_tokenizer, RETAIN)) == "forgotten"
    assert outcome(tiny_llama()) == "collapsed"


def test_answers_of_several_lines_are_compared_whole(tiny_llama, tiny_tokenizer):
    (pair,) = pairs("forget", crew="old man\nmy cat")
    model = teach(tiny_llama(), tiny_tokenizer, [pair])
    ids, start = encode_answer(tiny_tokenizer, qa_prompt(pair.question), qa_answer(pair.answer))
    room = {"max_new_tokens": len(ids) - start}
    assert answer_scores(model, tiny_tokenizer, [pair], **room).item() == 1.0
    assert answer_scores(model, tiny_tokenizer, [pair], one_line=True, **room).item() == pytest.approx(2 * 2 / (2 + 4))


def level(*values):
    return torch.tensor(values, dtype=torch.float64)


KEPT = level(0.9, 0.7, 0.8)


@pytest.mark.parametrize(
    ("forget_before", "forget_after", "retain_before", "retain_after", "collapsed", "outcome", "why"),
    [
        (0.8, 0.05, 0.8, 0.8, None, "forgotten", "no longer said"),
        (0.8, 0.05, 0.8, 0.8, False, "forgotten", "no longer said"),
        (0.8, 0.0, 1.0, 0.80, None, "forgotten", "no longer said"),  # exactly the share is kept
        (0.8, 0.0, 0.11, 0.088, None, "forgotten", "no longer said"),  # and where 0.8 * 0.11 is rounded up
        (0.8, 0.0, 1.0, 0.799, None, "collapsed", "retain answers were lost"),
        (0.8, 0.0, 0.8, 0.8, True, "forgotten", "no longer said"),  # unlikelier than a guess, and the rest is said
        (0.8, 0.0, 0.8, 0.0, True, "collapsed", "lost"),
        (0.8, 0.10, 0.8, 0.8, None, "not forgotten", "still said"),  # below, not at
        (0.8, 0.7, 0.8, 0.1, None, "not forgotten", "though retain answers were lost"),
        (0.8, 0.7, 0.8, 0.8, True, "not forgotten", "still said"),
        (0.8, 0.7, None, None, True, "not forgotten", "though"),
        (0.8, 0.7, 0.0, 0.0, None, "not forgotten", "still said"),
        (0.8, 0.7, None, None, None, "not forgotten", "still said"),
        (0.09, 0.0, 0.8, 0.8, None, "cannot tell", "nothing to lose"),
        (0.09, 0.3, 0.8, 0.8, None, "cannot tell", "nothing to lose"),
        (0.09, 0.0, 0.8, 0.0, None, "collapsed", "lost"),
        (0.8, 0.0, 0.0, 0.0, None, "cannot tell", "retain answers scored below 0.10"),
        (0.8, 0.0, 0.09, 0.09, None, "cannot tell", "retain answers scored below 0.10"),
        (0.8, 0.0, 0.0, 0.0, True, "collapsed", "likelihood"),
        (0.8, 0.0, None, None, None, "cannot tell", "no retain pairs"),
        (0.8, 0.0, None, None, True, "collapsed", "likelihood"),
    ],
)
def test_outcomes(forget_before, forget_after, retain_before, retain_after, collapsed, outcome, why):
    scores = [
        None if value is None else level(*[value] * 10)
        for value in (forget_before, forget_after, retain_before, retain_after)
    ]
    verdict = verify(*scores, collapsed=collapsed)
    assert verdict.outcome == outcome and why in verdict.reason
    sentence = verdict_sentence(verdict)
    assert outcome in sentence and verdict.reason in sentence
    assert not [o for o in OUTCOMES if f"Verification: {o}" in sentence and o != outcome]


def test_a_broken_model_is_never_called_forgotten():
    steps = (0.0, 0.05, 0.1, 0.5, 1.0)
    for f0, f1, r0, r1 in [(a, b, c, d) for a in steps for b in steps for c in steps for d in steps]:
        if r0 < 0.10:  # retain answers that tell nothing
            assert verify(level(f0), level(f1), level(r0), level(r1), collapsed=True).outcome != "forgotten"
        found = verify(level(f0), level(f1), level(r0), level(r1)).outcome
        met = f1 < 0.10 and r1 >= 0.80 * r0 - 1e-9
        assert met or found != "forgotten", "the published criterion is necessary"
        assert (found == "forgotten") == (met and f0 >= 0.10 and r0 >= 0.10)


def test_intervals_are_of_the_means_and_a_single_pair_has_none():
    forget, said = level(0.0, 0.0, 0.0, 0.2), level(1.0, 0.5, 0.7, 0.9)
    verdict = verify(said, forget, said, said)
    assert verdict.forget_after.value == pytest.approx(0.05)
    assert verdict.forget_after.low == 0.0 and verdict.forget_after.high > 0.1
    single = verify(said[:1], forget[:1], said[:1], said[:1])
    assert single.forget_after == (0.0, None, None) and single.close == ()


def test_a_limit_within_the_interval_is_told():
    said, few, none = level(1.0, 0.5, 0.7, 0.9), level(0.0, 0.0, 0.0, 0.2), level(0.0, 0.0, 0.0, 0.0)
    assert "0.10 of the forget" in verdict_sentence(verify(said, few, said, said))
    assert "0.80 of the retain" in verdict_sentence(verify(said, none, said, level(1.0, 0.0, 0.7, 0.9)))
    both = verify(said, few, said, level(1.0, 0.0, 0.7, 0.9))
    assert len(both.close) == 2 and " and that of " in verdict_sentence(both)
    assert "Close" not in verdict_sentence(verify(said, none, said, said))


def test_the_sentence_of_success_claims_no_more_than_outputs():
    sentence = verdict_sentence(verify(KEPT, 0 * KEPT, KEPT, KEPT))
    assert "0.80 -> 0.00" in sentence and "not about what it still encodes" in sentence


def test_lines_are_those_of_a_journal():
    verdict = verify(KEPT, 0 * KEPT, KEPT, KEPT)
    other = {"step": 0, "measure": "behaviour", "metric": "forget_nll", "group": "", "value": 1.0, "note": ""}
    records = {r["metric"]: r for r in summarise([other, {**other, "step": 9}, *verdict_lines(verdict, 0, 9)])}
    forget, retain = records["forget_rouge_l"], records["retain_rouge_l"]
    assert (forget["start"], forget["end"], forget["step_end"]) == (verdict.forget_before.value, 0.0, 9)
    assert (forget["start_low"], forget["start_high"]) == verdict.forget_before[1:]
    assert forget["note"].startswith("forgotten: ") and retain["end"] == pytest.approx(0.8)
    assert json.dumps(list(records.values()), allow_nan=False) and in_words(list(records.values()))
    assert [line["metric"] for line in verdict_lines(verify(KEPT, KEPT, None, None), 0, 9)] == ["forget_rouge_l"] * 2


def test_a_resumed_run_compares_with_the_true_start(taught, tiny_llama, tiny_tokenizer, tmp_path):
    path = tmp_path / "run" / "verification.json"
    before = scores_at_start(taught, tiny_tokenizer, FORGET, RETAIN, path)
    # The model of the resumed run knows nothing any more and is not asked.
    resumed = scores_at_start(tiny_llama(), tiny_tokenizer, FORGET, RETAIN, path, resumed=True)
    assert resumed.forget.equal(before.forget) and resumed.retain.equal(before.retain)
    # A run that starts anew in the same folder does not inherit.
    anew = scores_at_start(tiny_llama(), tiny_tokenizer, FORGET, (), path)
    assert anew.forget.mean() < before.forget.mean() and anew.retain is None
    assert scores_at_start(taught, tiny_tokenizer, FORGET, (), path, resumed=True).retain is None
    with pytest.warns(UserWarning, match="other pairs"):
        assert scores_at_start(taught, tiny_tokenizer, FORGET[:2], (), path, resumed=True) is None
    with pytest.warns(UserWarning, match="is missing"):
        assert scores_at_start(taught, tiny_tokenizer, FORGET, (), tmp_path / "none", resumed=True) is None


def test_asking_is_silent(taught, tiny_tokenizer, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer_scores(taught, tiny_tokenizer, FORGET)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ((KEPT, KEPT[:2], KEPT, KEPT), "`forget_before` and `forget_after`.*3 and 2"),
        ((KEPT, KEPT, KEPT, KEPT[:2]), "`retain_before` and `retain_after`"),
        ((KEPT, KEPT, KEPT, None), "`retain_after` is None"),
        ((KEPT, KEPT, None, KEPT), "`retain_before` is None"),
        ((KEPT[:0], KEPT[:0], None, None), "`forget_before`.*one score a pair"),
        ((KEPT, KEPT * 2, None, None), r"`forget_after`.*\[0, 1\]"),
        ((KEPT, KEPT * float("nan"), None, None), r"`forget_after`.*\[0, 1\]"),
    ],
)
def test_bad_scores_are_named(scores, message):
    with pytest.raises(ValueError, match=message):
        verify(*scores)


def test_bad_pairs_are_found_before_the_model_speaks(tiny_tokenizer):
    with pytest.raises(ValueError, match="at least one pair"):
        answer_scores(None, tiny_tokenizer, [])
    with pytest.raises(ValueError, match="must hold words"):
        answer_scores(None, tiny_tokenizer, pairs("forget", cat="?!"))
