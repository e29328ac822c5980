from __future__ import annotations

import pytest
import torch

import trainers.reference_scores as module
from trainers.answer_rows import answer_rows
from trainers.data import PairCollator, encode_pairs
from trainers.objectives import sequence_nll
from trainers.reference_scores import ReferenceScores, bytes_needed


@pytest.fixture
def examples(forget, tokenizer):
    return encode_pairs(forget, tokenizer)


@pytest.fixture
def scores(llama, tokenizer, examples):
    scores = ReferenceScores(layer=1)
    scores.measure(llama(), tokenizer, {"nll": examples, "log_probs": examples[:3], "states": examples[:2]})
    return scores


def _keys(examples):
    return [example.key for example in examples]


def test_equal_a_plain_forward(scores, llama, examples):
    model, device = llama(), torch.device("cpu")
    for example in examples:
        batch = PairCollator()([{"forget": example}])["forget"]
        with torch.no_grad():
            rows = answer_rows(model(input_ids=batch["input_ids"]).logits, batch["labels"])
        torch.testing.assert_close(scores.sequence_nll([example.key], device), sequence_nll(rows))
        if example in examples[:3]:
            found = scores.answer_log_probs([example.key], device)
            torch.testing.assert_close(found, rows.logits.log_softmax(-1), atol=1e-5, rtol=1e-5)
    rows = scores.answer_log_probs(_keys(examples[:3]), device)
    assert rows.shape == (sum(example.n_answer_tokens for example in examples[:3]), 64)


def test_come_back_from_disk_bit_for_bit(scores, examples, tmp_path):
    scores.save(tmp_path / "new" / "scores.safetensors")
    again = ReferenceScores.load(tmp_path / "new" / "scores.safetensors")
    device = torch.device("cpu")
    assert scores.sequence_nll(_keys(examples), device).equal(again.sequence_nll(_keys(examples), device))
    assert set(again.log_probs) == set(scores.log_probs) and len(again.log_probs) == 3
    assert all(again.log_probs[key].equal(rows) for key, rows in scores.log_probs.items())
    assert all(again.states[key].equal(rows) for key, rows in scores.states.items()) and len(again.states) == 2
    assert again.layer == 1
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["scores.safetensors"]


def test_a_failed_write_leaves_the_old_file(scores, tmp_path, monkeypatch):
    path = tmp_path / "scores.safetensors"
    scores.save(path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(module, "save_file", fail)
    scores.nll.clear()
    with pytest.raises(OSError, match="disk full"):
        scores.save(path)
    assert path.read_bytes() == before


def test_each_content_is_measured_once(scores, llama, tokenizer, examples, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(module, "measure_activations", fail)
    scores.measure(llama(1), tokenizer, {"nll": [*examples, examples[0]], "log_probs": examples[:2], "states": []})
    with pytest.raises(AssertionError):
        scores.measure(llama(1), tokenizer, {"log_probs": examples[3:]})


def test_missing_names_each_example_once(scores, examples):
    assert scores.missing({"nll": examples, "log_probs": examples[:3]}) == {}
    wanted = {"nll": [examples[0], examples[0]], "log_probs": [examples[1]], "states": []}
    assert ReferenceScores().missing(wanted) == {"nll": [examples[0]], "log_probs": [examples[1]]}


def test_states_equal_a_plain_forward(scores, llama, examples):
    """Of every token, padded with zeros on the right."""
    found = scores.token_states(_keys(examples[:2]), 9, torch.device("cpu"))
    for example, states in zip(examples, found, strict=False):
        ids = torch.tensor([example.input_ids])
        with torch.no_grad():
            expected = llama()(ids, output_hidden_states=True).hidden_states[1][0]
        torch.testing.assert_close(states[: len(expected)], expected, atol=1e-5, rtol=1e-5)
        assert not states[len(expected) :].any()


def test_bytes_are_those_of_the_tensors(llama, tokenizer, examples):
    wanted = {"nll": examples, "log_probs": [*examples, examples[0]], "states": examples[:3]}
    scores = ReferenceScores(layer=2)
    scores.measure(llama(), tokenizer, wanted)
    tensors = [*scores.log_probs.values(), *scores.states.values()]
    assert bytes_needed(llama(), wanted) == sum(tensor.nbytes for tensor in tensors)
