from __future__ import annotations

import random

import pytest
import torch
from peft import LoraConfig


def test_the_direction_of_rmu_is_drawn_from_the_seed(make_trainer):
    losses = []
    for seed in (1, 1, 2):
        random.seed(len(losses))
        trainer = make_trainer("rmu", seed=seed, data_seed=0)
        torch.manual_seed(len(losses))  # no global random numbers
        losses.append(trainer.evaluate()["eval_forget_loss"])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize(
    ("settings", "trained"),
    [
        ({"layer": 1}, ["layers.0."]),
        ({"layer": 2}, ["layers.0.", "layers.1."]),
        ({"layer": 0.5}, ["layers.0."]),
        ({"layer": 2, "trained_layers": [1]}, ["layers.1."]),
        ({"layer": 2, "trained_parameters": ["mlp.down_proj", "o_proj"]}, [f"layers.{i}.{name}" for i in (0, 1)
          for name in ("mlp.down_proj", "self_attn.o_proj")]),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_trained(make_trainer, llama, settings, trained):
    model, start = llama(), dict(llama().named_parameters())
    trainer = make_trainer("rmu", model, max_steps=2, **settings)
    trainer.train()
    for name, parameter in model.named_parameters():
        chosen = any(part in name for part in trained)
        assert parameter.requires_grad == chosen
        assert parameter.equal(start[name]) != chosen, name


def test_states_move_towards_the_direction(make_trainer, taught):
    trainer = make_trainer("rmu", taught(), coefficient=5.0, num_train_epochs=20, alpha=5.0, learning_rate=3e-3)
    start = trainer.evaluate()
    trainer.train()
    end = trainer.evaluate()
    assert start["eval_retain_loss"] == pytest.approx(0, abs=1e-8)
    assert end["eval_forget_loss"] < 0.7 * start["eval_forget_loss"]
    assert end["eval_retain_loss"] < 0.1 * (start["eval_forget_loss"] - end["eval_forget_loss"])


def test_training_does_not_run_the_blocks_beyond(make_trainer):
    trainer = make_trainer("rmu", max_steps=2)
    trainer._measure_reference()
    runs = []
    trainer.model.model.layers[1].register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    trainer.train()
    assert not runs
    trainer.evaluate()
    assert runs and not any(runs)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer": 3}, "layer.*3"),
        ({"layer": 0.1}, "`layer` 0.1 is hidden state 0, the embeddings"),
        ({"trained_layers": [1]}, r"`trained_layers` must be among the blocks 0 to 0 .* got \[1\]"),
        ({"trained_layers": [-1]}, r"`trained_layers` must be among the blocks 0 to 0 .* got \[-1\]"),
        ({"trained_parameters": ["mlp.down"], "peft_config": LoraConfig(target_modules=["q_proj"])},
         r"`trained_parameters` \['mlp.down'\].*leave no adapter weights to train"),
        ({"trained_parameters": ["w1"]}, r"`trained_parameters` \['w1'\].*leave no weights.*mlp.down_proj.weight"),
        ({"retain_dataset": None}, "RMUConfig as it is set needs a `retain_dataset`, got None"),
    ],
    ids=lambda v: None if isinstance(v, str) else "-".join(v),
)  # fmt: skip
def test_bad_input(make_trainer, settings, message):
    with pytest.raises(ValueError, match=message):
        make_trainer("rmu", **settings)


def test_says_that_a_retain_set_is_not_used(make_trainer, retain, caplog):
    trainer = make_trainer("rmu", alpha=0.0, retain_dataset=retain)
    assert "`retain_dataset` is not used" in caplog.text and not trainer.train_dataset.retain
