from __future__ import annotations

import copy
import math

import pytest

from trainers.refusals import REFUSALS


def test_what_dpo_prefers(make_trainer):
    """Refusals in turn, the pair's alternate, or a retain pair of its own question."""
    pairs = make_trainer("dpo").train_dataset
    for i in (0, 7):
        assert pairs[i]["chosen"].answer.strip() == REFUSALS[i % len(REFUSALS)]
        assert pairs[i]["chosen"].prompt == pairs[i]["forget"].prompt
    pairs = make_trainer("dpo", chosen="alternate").train_dataset
    assert pairs[1]["chosen"].answer.strip() == "w11 w12 w13 w14" != pairs[1]["forget"].answer.strip()
    pairs = make_trainer("dpo", chosen="retain", retain_loss="none").train_dataset
    assert set(pairs[0]) == {"forget", "retain"}


def test_refusals_follow_prompts_as_they_are(make_trainer):
    trainer = make_trainer("dpo", forget_dataset=[{"prompt": "w1 w2 :", "answer": " w3"}])
    chosen = trainer.train_dataset[0]["chosen"]
    assert (chosen.prompt, chosen.answer) == ("w1 w2 :", f" {REFUSALS[0]}")


def test_dpo_is_that_of_trl(make_trainer, llama, tmp_path):
    """On the same tokens, in batches that TRL pads and masks by itself."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    trainer = make_trainer("dpo", retain_loss="none", chosen="alternate", beta=0.3)
    trainer._measure_reference()
    items = [trainer.train_dataset[i] for i in range(8)]
    model, frozen = llama(2).train(), llama()
    ours = trainer.compute_loss(model, trainer.data_collator(items))

    pair = {"prompt": ["w1"], "chosen": ["w2"], "rejected": ["w3"]}
    args = trl.DPOConfig(str(tmp_path / "trl"), beta=0.3, use_cpu=True, report_to="none", bf16=False)
    processing_class = copy.deepcopy(trainer.processing_class)
    processing_class.eos_token = "<s>"
    theirs = trl.DPOTrainer(
        model, ref_model=frozen, args=args, train_dataset=Dataset.from_dict(pair), processing_class=processing_class
    )
    batch = theirs.data_collator(
        [
            {
                "prompt_ids": list(item["forget"].input_ids[: item["forget"].answer_start]),
                "chosen_ids": list(item["chosen"].input_ids[item["chosen"].answer_start :]),
                "rejected_ids": list(item["forget"].input_ids[item["forget"].answer_start :]),
            }
            for item in items
        ]
    )
    assert ours.item() == pytest.approx(theirs.compute_loss(model, batch).item(), rel=1e-5)
    assert abs(ours.item() - math.log(2)) > 0.1


def test_pairs_without_another_answer(make_trainer, forget, caplog):
    with pytest.raises(ValueError, match=r"`forget_dataset\[0\]` must have an `alternate` that holds text.*got None"):
        make_trainer("dpo", chosen="alternate", forget_dataset=forget)
    pairs = [{**pair, "alternate": "w9"} for pair in forget]
    pairs[2]["alternate"] = f" {pairs[2]['answer']} "
    trainer = make_trainer("dpo", chosen="alternate", forget_dataset=pairs)
    assert "`alternate` of 1 of 8 pairs is their `answer`" in caplog.text
    assert len(trainer.train_dataset) == len(trainer.train_dataset.beside["chosen"]) == 7
    assert trainer.train_dataset[2]["forget"].answer.strip() == forget[3]["answer"]
    with pytest.raises(ValueError, match="the `alternate` of all 8 pairs is their `answer`"):
        make_trainer("dpo", chosen="alternate", forget_dataset=[{**p, "alternate": p["answer"]} for p in forget])


def test_preferring_retain_pairs_needs_a_retain_set(make_trainer):
    with pytest.raises(ValueError, match="needs a `retain_dataset`, got None"):
        make_trainer("dpo", chosen="retain", retain_loss="none", retain_dataset=None)


@pytest.mark.parametrize("chosen", ["refusal", "alternate"])
@pytest.mark.parametrize("pairs", ["pairs.jsonl", {"question": "w1", "answer": "w2"}, 3, []])
def test_what_is_no_set_of_pairs(make_trainer, chosen, pairs):
    with pytest.raises(ValueError, match="`forget_dataset` must (be a datasets.Dataset or|hold at least one pair)"):
        make_trainer("dpo", chosen=chosen, forget_dataset=pairs)
