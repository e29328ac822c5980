from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig

from trainers import whp_reinforced


def test_labels_are_read_in_portions_alike(make_trainer, monkeypatch):
    labels = []
    for budget in (2**27, 64 * 3, 1):
        monkeypatch.setattr(whp_reinforced, "ROW_BUDGET", budget)
        trainer = make_trainer("whp_reinforced")
        trainer._measure_reference()
        labels.append(trainer.reference.scores.generic)
    assert len(labels[0]) == 8
    for other in labels[1:]:
        assert other.keys() == labels[0].keys() and all(other[key].equal(labels[0][key]) for key in other)


def test_without_reinforcement_labels_are_the_models_own_choice(make_trainer, llama):
    trainer = make_trainer("whp_reinforced", reinforcement=0.0)
    trainer._measure_reference()
    for example in trainer.train_dataset.forget:
        with torch.no_grad():
            logits = llama()(input_ids=torch.tensor([example.input_ids])).logits[0, example.answer_start - 1 : -1]
        assert trainer.reference.scores.generic[example.key].equal(logits.argmax(-1))


def test_the_reinforced_model_is_read_once_and_let_go_of(make_trainer, llama):
    reinforced = llama(3)
    before = copy.deepcopy(reinforced.state_dict())
    trainer = make_trainer("whp_reinforced", reinforced_model=reinforced, max_steps=2)
    trainer.train()
    assert trainer.reinforced_model is None
    assert all(value.equal(before[name]) for name, value in reinforced.state_dict().items())


def test_the_base_of_an_adapter_is_the_base(make_trainer):
    labels = []
    for more in ({}, {"peft_config": LoraConfig(target_modules=["q_proj"], init_lora_weights=False)}):
        trainer = make_trainer("whp_reinforced", **more)
        trainer._measure_reference()
        labels.append(trainer.reference.scores.generic)
    assert all(labels[1][key].equal(labels[0][key]) for key in labels[0])


def test_needs_a_reinforced_model_of_the_same_vocabulary(make_trainer, llama, tmp_path):
    other = llama(3)
    other.resize_token_embeddings(70)
    for reinforced, message in (
        (None, "`reinforced_model` is None, and 8 pairs have no generic labels.*FineTuningTrainer"),
        (other, "`reinforced_model` has 70 words and the model 64"),
    ):
        trainer = make_trainer("whp_reinforced", reinforced_model=reinforced, save_strategy="steps", save_steps=1)
        with pytest.raises(ValueError, match=message):
            trainer.train()
        assert trainer.state.global_step == 0 and not list((tmp_path / "run").glob("**/*"))
