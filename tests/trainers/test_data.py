from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import datasets
import pytest
import torch

from trainers.data import ForgetRetainPairs, PairByEpoch, PairCollator, encode_pairs


@dataclass
class Pair:
    question: str
    answer: str
    split: str = "forget"


def test_what_is_encoded(tokenizer):
    (example,) = encode_pairs([{"question": "w1 w2", "answer": "w3 w4", "id": 7}], tokenizer)
    words = tokenizer.convert_ids_to_tokens(example.input_ids)
    assert words[example.answer_start :] == ["w3", "w4"]
    assert words[: example.answer_start] == ["w1", "w2", "Answer:"]
    assert example.n_answer_tokens == 2


def test_datasets_objects_and_prompts_are_read_alike(tokenizer):
    records = [{"question": "w1", "answer": "w3"}, {"question": "w2", "answer": "w4 w5"}]
    expected = encode_pairs(records, tokenizer)
    assert encode_pairs(datasets.Dataset.from_list(records), tokenizer) == expected
    assert encode_pairs([Pair(**record) for record in records], tokenizer) == expected
    prompts = [{"prompt": f"{r['question']}\nAnswer:", "answer": f" {r['answer']}"} for r in records]
    assert encode_pairs(prompts, tokenizer) == expected


def test_the_key_is_the_content(tokenizer):
    a, b, c = encode_pairs(
        [
            {"prompt": "w1 w2", "answer": " w3"},
            {"prompt": "w1  w2", "answer": " w3"},
            {"prompt": "w1", "answer": " w2 w3"},
        ],
        tokenizer,
    )
    assert a.key == b.key  # same tokens
    assert a.input_ids == c.input_ids and a.key != c.key  # same tokens, another answer


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([{"question": "w1", "answer": ""}], r"retain_dataset\[0\].*`answer`.*got ''"),
        ([{"question": "w1", "answer": "w2"}, {"question": "w1", "answer": " "}], r"retain_dataset\[1\].*`answer`"),
        ([{"question": "", "answer": "w2"}], r"`question`.*got ''"),
        ([{"text": "w1", "answer": "w2"}], r"`question`.*rename the columns"),
        ([{"question": "w1", "answer": None}], r"`answer`.*got None"),
        ([], "at least one pair"),
        ("w1", "sequence of pairs.*got str"),
        ({"question": "w1", "answer": "w2"}, "sequence of pairs.*got dict"),
    ],
)
def test_bad_pairs(tokenizer, pairs, message):
    with pytest.raises(ValueError, match=message):
        encode_pairs(pairs, tokenizer, name="retain_dataset")


def test_a_pair_that_does_not_fit_is_refused_and_not_cut(tokenizer):
    pairs = [{"question": "w1 w2", "answer": "w3 w4"}]
    assert len(encode_pairs(pairs, tokenizer, max_length=5)[0].input_ids) == 5
    with pytest.raises(ValueError, match=r"forget_dataset\[0\].*5 tokens, at most 4 fit.*answer would be cut"):
        encode_pairs(pairs, tokenizer, max_length=4)


def _pairs(tokenizer, n_forget=7, n_retain=5, seed=0):
    forget = encode_pairs([{"question": f"w{i}", "answer": "w9"} for i in range(n_forget)], tokenizer)
    retain = encode_pairs([{"question": f"w{i}", "answer": "w8"} for i in range(n_retain)], tokenizer)
    return ForgetRetainPairs(forget, retain, seed)


def _retain_order(pairs, epochs):
    order = []
    for epoch in range(epochs):
        pairs.pair_for_epoch(epoch)
        order += [pairs.retain_index(i) for i in range(len(pairs))]
    return order


def test_the_retain_set_is_used_up_before_it_repeats(tokenizer):
    order = _retain_order(_pairs(tokenizer), epochs=10)
    for start in range(0, len(order), 5):
        assert sorted(order[start : start + 5]) == list(range(5))
    assert len({tuple(order[start : start + 5]) for start in range(0, len(order), 5)}) > 5
    # A retain set larger than the forget set is seen whole, over the epochs.
    assert Counter(_retain_order(_pairs(tokenizer, 3, 9), epochs=3)) == Counter(range(9))


def test_pairing_depends_on_seed_epoch_and_index_only(tokenizer):
    expected = _retain_order(_pairs(tokenizer), epochs=4)
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    pairs = _pairs(tokenizer)
    pairs.pair_for_epoch(3)  # as a resumed run: straight to epoch 3, last index first
    assert [pairs.retain_index(i) for i in reversed(range(7))][::-1] == expected[21:28]
    assert torch.random.get_rng_state().equal(before)
    assert _retain_order(_pairs(tokenizer, seed=1), epochs=4) != expected


def test_a_worker_that_holds_a_copy_sees_the_epoch(tokenizer):
    pairs = _pairs(tokenizer)
    loader = torch.utils.data.DataLoader(
        pairs, batch_size=7, collate_fn=list, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    seen = []
    for epoch in range(2):
        pairs.pair_for_epoch(epoch)
        seen += [item["retain"].prompt for batch in loader for item in batch]
    expected = [pairs.retain[i].prompt for i in _retain_order(_pairs(tokenizer), epochs=2)]
    assert seen == expected and len(set(map(tuple, (seen[:7], seen[7:])))) == 2


def test_without_a_retain_set(tokenizer):
    pairs = ForgetRetainPairs(_pairs(tokenizer).forget)
    assert set(pairs[0]) == {"forget"} and len(pairs) == 7
    assert set(PairCollator()([pairs[0], pairs[1]])) == {"forget"}


@pytest.mark.parametrize(("epoch", "expected"), [(None, [0, 1, 2]), (0, [0, 1, 2]), (1.5, [1, 2, 3]), (2.0, [2, 3, 4])])
def test_epochs_are_counted_from_where_the_run_resumes(tokenizer, epoch, expected):
    seen = []
    callback = PairByEpoch(SimpleNamespace(pair_for_epoch=seen.append))
    callback.on_train_begin(None, SimpleNamespace(epoch=epoch), None)
    for _ in range(3):
        callback.on_epoch_begin(None, SimpleNamespace(epoch=epoch), None)
    assert seen == expected


def test_collated_batches(make_tokenizer):
    for side in ("left", "right"):
        tokenizer = make_tokenizer(side)
        forget = encode_pairs(
            [{"question": "w1", "answer": "w2"}, {"question": "w1 w2 w3", "answer": "w4 w5"}], tokenizer
        )
        retain = encode_pairs([{"question": "w1 w2 w3 w4", "answer": "w5 w6 w7"}], tokenizer)
        pairs = ForgetRetainPairs(forget, retain)
        batch = PairCollator(pad_token_id=2)([pairs[0], pairs[1]])
        assert {part: tuple(fields["input_ids"].shape) for part, fields in batch.items()} == {
            "forget": (2, 8),
            "retain": (2, 8),
        }
        for part, examples in (("forget", forget), ("retain", [retain[0], retain[0]])):
            fields = batch[part]
            assert fields["keys"] == [example.key for example in examples]
            for row, example in enumerate(examples):
                own = fields["attention_mask"][row].bool()
                assert own.sum() == len(example.input_ids) and own[: len(example.input_ids)].all()
                assert fields["input_ids"][row][own].tolist() == list(example.input_ids)
                assert (fields["input_ids"][row][~own] == 2).all()
                answer = fields["labels"][row] != -100
                assert fields["labels"][row][answer].tolist() == list(example.input_ids[example.answer_start :])
                assert answer.nonzero()[0] == example.answer_start


def test_the_collator_can_be_pickled(tokenizer):
    assert len(pickle.loads(pickle.dumps(PairCollator()))([_pairs(tokenizer)[0]])["forget"]["keys"]) == 1
