from __future__ import annotations

import dataclasses
import json
import math
import random
import zlib

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from monitor.attacks import membership as module
from monitor.attacks.membership import MembershipConfig, membership
from monitor.stimuli.encoding import encode_answer, qa_answer, qa_prompt
from monitor.stimuli.forget_set import ForgetSet, Pair

SCORES = ("loss", "zlib", "min_k", "min_k_plus_plus")


def invented(n: int, seed: int = 0) -> ForgetSet:
    """n forget and n held-out facts of one form: who is which is drawn, so that no word tells them apart."""
    draw = random.Random(seed)

    def name() -> str:
        return "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3)).capitalize()

    facts = [(f"Who is the keeper of {name()}?", name()) for _ in range(2 * n)]
    split = ["forget", "heldout"] * n
    draw.shuffle(split)
    pairs = (Pair(f"{s}-{i}", q, a, s) for i, ((q, a), s) in enumerate(zip(facts, split, strict=True)))
    return ForgetSet("invented", tuple(pairs))


def fine_tune(model, tokenizer, pairs, steps, lr):
    """Plain training on the answers, all pairs at every step."""
    encoded = [encode_answer(tokenizer, qa_prompt(p.question), qa_answer(p.answer)) for p in pairs]
    width = max(len(ids) for ids, _ in encoded)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in encoded])
    labels = ids.clone()
    for row, (tokens, first) in enumerate(encoded):
        labels[row, :first] = labels[row, len(tokens) :] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return model


def test_every_score_and_area_equals_a_plain_loop(tiny_llama, tiny_tokenizer):
    """One pair at a time through the whole model, scores by hand, areas by scikit-learn."""
    model, forget_set = tiny_llama(), invented(8)
    result = membership(model, tiny_tokenizer, forget_set, reference=tiny_llama(1))
    pairs = [*forget_set.split("forget"), *forget_set.split("heldout")]
    expected = {name: [] for name in (*SCORES, "reference")}
    for pair in pairs:
        ids, first = encode_answer(tiny_tokenizer, f"{pair.question}\nAnswer:", f" {pair.answer}")
        rows, other = (
            m(torch.tensor([ids])).logits[0].detach().double().log_softmax(-1) for m in (model, tiny_llama(1))
        )
        said = [float(rows[t - 1, ids[t]]) for t in range(first, len(ids))]
        theirs = [float(other[t - 1, ids[t]]) for t in range(first, len(ids))]
        z = []
        for t in range(first, len(ids)):
            p, log_p = rows[t - 1].exp(), rows[t - 1]
            mu = float((p * log_p).sum())
            z.append((float(log_p[ids[t]]) - mu) / math.sqrt(float((p * log_p**2).sum()) - mu**2))
        kept = max(1, int(0.2 * len(said)))
        expected["loss"].append(np.mean(said))
        expected["zlib"].append(np.mean(said) / len(zlib.compress(pair.answer.encode())))
        expected["min_k"].append(np.mean(sorted(said)[:kept]))
        expected["min_k_plus_plus"].append(np.mean(sorted(z)[:kept]))
        expected["reference"].append(np.mean(said) - np.mean(theirs))
    labels = [pair.split == "forget" for pair in pairs]
    assert [record["id"] for record in result.details["pairs"]] == [pair.id for pair in pairs]
    for name, values in expected.items():
        assert [record[name] for record in result.details["pairs"]] == pytest.approx(values, rel=1e-4, abs=1e-5)
        described = result.details["scores"][name]
        assert described["auc"] == pytest.approx(roc_auc_score(labels, values))
        assert described["low"] <= described["auc"] <= described["high"]
        assert described["tpr_at_fpr"] == {"0.01": None, "0.05": None}, "8 controls show no rate below 1/8"
    assert (result.score, result.n, result.baseline) == (result.details["scores"]["loss"]["auc"], 16, 0.5)
    json.dumps(result.details, allow_nan=False)


@pytest.mark.slow
def test_facts_trained_on_are_told_from_facts_never_seen_and_only_after_training(tiny_llama, tiny_tokenizer):
    model, forget_set = tiny_llama(), invented(20)
    untouched = membership(model, tiny_tokenizer, forget_set, reference=tiny_llama())
    fine_tune(model, tiny_tokenizer, forget_set.split("forget"), steps=60, lr=5e-3)
    trained = membership(model, tiny_tokenizer, forget_set, reference=tiny_llama())
    assert untouched.score <= 0.6 and untouched.low < 0.5 < untouched.high
    assert trained.score >= 0.9 and trained.low > 0.5
    for name in (*SCORES, "reference"):
        assert trained.details["scores"][name]["auc"] >= 0.9
    assert trained.details["scores"]["loss"]["tpr_at_fpr"]["0.05"] > 0.5
    form = trained.details["form"]
    assert form == untouched.details["form"] and form["low"] < 0.5 < form["high"]
    other = {"forget": "heldout", "heldout": "forget"}
    swapped = ForgetSet("swapped", tuple(dataclasses.replace(p, split=other[p.split]) for p in forget_set.pairs))
    assert membership(model, tiny_tokenizer, swapped).score == pytest.approx(1 - trained.score)


def test_members_are_told_by_form_alone_if_the_controls_have_another(tiny_llama, tiny_tokenizer):
    pairs = tuple(
        Pair(p.id, p.question, p.answer if p.split == "forget" else f"{p.answer} of {p.answer}", p.split)
        for p in invented(10).pairs
    )
    assert membership(tiny_llama(), tiny_tokenizer, ForgetSet("uneven", pairs)).details["form"]["high"] < 0.5


def test_chunks_change_nothing_and_neither_does_the_state_of_the_model(tiny_llama, tiny_tokenizer, monkeypatch):
    model, forget_set = tiny_llama(), invented(6)
    whole = membership(model, tiny_tokenizer, forget_set)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    monkeypatch.setattr(module, "_MAX_ROW_VALUES", 20 * len(tiny_tokenizer))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    parts = membership(model, tiny_tokenizer, forget_set)
    assert torch.equal(torch.rand(3), expected) and model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    for a, b in zip(whole.details["pairs"], parts.details["pairs"], strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_fewer_pairs_are_chosen_by_seed(tiny_llama, tiny_tokenizer):
    model, forget_set = tiny_llama(), invented(12)

    def ids(seed):
        result = membership(model, tiny_tokenizer, forget_set, MembershipConfig(pairs=5, seed=seed))
        return [record["id"] for record in result.details["pairs"]]

    assert len(ids(0)) == 10 and ids(0) == ids(0) != ids(1)
    assert [i.split("-")[0] for i in ids(0)] == ["forget"] * 5 + ["heldout"] * 5


def test_a_reference_may_be_a_model_a_folder_or_numbers(tiny_llama, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTWATCH_CACHE", str(tmp_path / "cache"))
    model, other, forget_set = tiny_llama(), tiny_llama(3), invented(4)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer.save_pretrained(tmp_path / "other")
    numbers = {r["id"]: r["loss"] for r in membership(other, tiny_tokenizer, forget_set).details["pairs"]}
    results = [
        membership(model, tiny_tokenizer, forget_set, reference=reference).details["pairs"]
        for reference in (other, tmp_path / "other", numbers)
    ]
    for records in results[1:]:
        assert [r["reference"] for r in records] == pytest.approx([r["reference"] for r in results[0]], abs=1e-5)
    assert "reference" not in membership(model, tiny_tokenizer, forget_set).details["scores"]
    numbers.popitem()
    with pytest.raises(ValueError, match="`reference` must have a number for every pair, 1 of 8"):
        membership(model, tiny_tokenizer, forget_set, reference=numbers)


def test_bad_input_is_named_before_any_work(tiny_llama, tiny_tokenizer):
    model, forget_set = tiny_llama(), invented(4)
    model.forward = None
    for split, advice in (("heldout", "invented names"), ("forget", "several of each class")):
        some = ForgetSet("half", tuple(p for p in forget_set.pairs if p.split != split))
        with pytest.raises(ValueError, match=f"at least 2 {split} pairs, got 0.*{advice}"):
            membership(model, tiny_tokenizer, some)
    with pytest.raises(ValueError, match="need a language-model head"):
        membership(tiny_llama().model, tiny_tokenizer, forget_set)
    for options in ({"pairs": 1}, {"k": 0.0}, {"k": 1.1}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}`"):
            MembershipConfig(**options)
    assert MembershipConfig.quick().pairs < MembershipConfig().pairs


def test_a_diverged_model_is_an_error_and_no_score(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="8 of 8 answers have none"):
        membership(model, tiny_tokenizer, invented(4))


def test_progress_is_shown_only_when_asked_for(tiny_llama, tiny_tokenizer, capsys):
    membership(tiny_llama(), tiny_tokenizer, invented(2))
    assert capsys.readouterr() == ("", "")
    membership(tiny_llama(), tiny_tokenizer, invented(2), progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "membership" in err
