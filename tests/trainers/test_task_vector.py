from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback

from monitor.callback import Monitor
from monitor.measures.behaviour import Behaviour

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_the_weights_are_those_of_learning_turned_round(make_trainer, llama, scale):
    learned = make_trainer("fine_tuning", output="learned", num_train_epochs=2)
    learned.train()
    trainer = make_trainer("task_vector", num_train_epochs=2, scale=scale)
    trainer.train()
    for start, towards, away in zip(*(m.parameters() for m in (llama(), learned.model, trainer.model)), strict=True):
        assert not towards.equal(start)
        assert away.equal(start - scale * (towards - start))


def test_lora_the_change_of_the_merged_weights_is_turned_round(make_trainer, llama):
    learned = make_trainer("fine_tuning", output="learned", peft_config=LoraConfig(**LORA), max_steps=4)
    trainer = make_trainer("task_vector", peft_config=LoraConfig(**LORA), max_steps=4)
    for one in (learned, trainer):
        # Both draw the same adapters: A is random.
        torch.manual_seed(1)
        for name, parameter in one.model.named_parameters():
            if "lora_A" in name:
                torch.nn.init.normal_(parameter)
        one.train()
    moved = 0
    modules = dict(learned.model.named_modules())
    for name, module in trainer.model.named_modules():
        if hasattr(module, "get_delta_weight"):
            delta = module.get_delta_weight("default")
            assert delta.equal(-modules[name].get_delta_weight("default"))
            moved += delta.abs().max() > 1e-3
    assert moved == 4


@pytest.mark.parametrize("how", ["callbacks", "attach"])
@pytest.mark.parametrize("every", ["eval", "save", "epoch", {"steps": 1}])
def test_the_last_step_shows_and_saves_the_negated_model(make_trainer, llama, forget, how, every):
    pairs = {"forget": [SimpleNamespace(**pair) for pair in forget]}
    monitor = Monitor(Behaviour(pairs, n_bootstrap=10), every=every, progress=False)
    callbacks = [monitor] if how == "callbacks" else None
    settings = {"eval_strategy": "steps", "eval_steps": 1, **SAVING, "save_steps": 1}
    trainer = make_trainer("task_vector", callbacks=callbacks, **settings)
    if how == "attach":
        monitor.attach(trainer)
    trainer.train()
    readings = {line["step"]: line["value"] for line in monitor._journal.lines if line["metric"] == "forget_nll"}
    assert readings[2] < readings[0] < readings[4]  # learns until the last step
    evaluated = {e["step"]: e["eval_forget_nll"] for e in trainer.state.log_history if "eval_forget_nll" in e}
    assert evaluated[3] < evaluated[1] < evaluated[4]
    assert evaluated[4] == pytest.approx(trainer.evaluate()["eval_forget_nll"])
    for step, negated in ((3, False), (4, True)):
        folder = Path(trainer.args.output_dir) / f"checkpoint-{step}"
        saved = AutoModelForCausalLM.from_pretrained(folder)
        same = all(a.equal(b) for a, b in zip(saved.parameters(), trainer.model.parameters(), strict=True))
        assert same == negated == json.loads((folder / "task_vector.json").read_text())["negated"]


class _StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


def test_a_run_that_is_stopped_early_is_negated_too(make_trainer, llama):
    """Before the epoch's evaluation and checkpoint."""
    settings = {"callbacks": [_StopAt(3)], "num_train_epochs": 3, "save_strategy": "epoch", "eval_strategy": "epoch"}
    learned = make_trainer("fine_tuning", output="learned", **settings)
    trainer = make_trainer("task_vector", **settings)
    for one in (learned, trainer):
        one.train()
        assert one.state.global_step == 3
    saved = AutoModelForCausalLM.from_pretrained(Path(trainer.args.output_dir) / "checkpoint-3")
    for start, towards, away, kept in zip(
        *(m.parameters() for m in (llama(), learned.model, trainer.model, saved)), strict=True
    ):
        assert away.equal(start - (towards - start)) and kept.equal(away)
    evaluated = [e["eval_forget_nll"] for e in trainer.state.log_history if "eval_forget_nll" in e]
    assert len(evaluated) == 2 and evaluated[1] == pytest.approx(trainer.evaluate()["eval_forget_nll"])


def test_training_again_starts_from_the_negated_model(make_trainer):
    settings = {"max_steps": 2, "optim": "sgd", "learning_rate": 1e-2}  # Adam's moments would be taken along
    trainer = make_trainer("task_vector", **settings)
    trainer.train()
    start = [p.detach().clone() for p in trainer.model.parameters()]
    learned = make_trainer("fine_tuning", output="learned", **settings)
    learned.model.load_state_dict(trainer.model.state_dict())
    learned.train()
    trainer.train()
    for before, towards, away in zip(start, learned.model.parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(away, before - (towards - before), rtol=0, atol=1e-7)


# Resuming; that it equals the uninterrupted run is tested with all other methods.


def test_resuming_with_another_initial_model_is_an_error(make_trainer, llama, tmp_path):
    make_trainer("task_vector", **SAVING).train()
    for output in ("run", "elsewhere"):
        other = make_trainer("task_vector", llama(5), output=output, **SAVING)
        with pytest.raises(ValueError, match="started from other weights than the `model` given.*Give that model"):
            other.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))


def test_a_negated_checkpoint_cannot_go_on_learning(make_trainer, tmp_path):
    make_trainer("task_vector", **SAVING).train()
    longer = make_trainer("task_vector", **{**SAVING, "max_steps": 6})
    with pytest.raises(ValueError, match="checkpoint of step 4 ended its run and holds the negated model.*step 6"):
        longer.train(resume_from_checkpoint=True)
    # An earlier one can, and the end is that of the longer run.
    longer = make_trainer("task_vector", **{**SAVING, "max_steps": 6, "lr_scheduler_type": "constant"}, output="a")
    longer.train()
    short = {**SAVING, "lr_scheduler_type": "constant"}
    make_trainer("task_vector", **short, output="b").train()
    resumed = make_trainer("task_vector", **{**short, "max_steps": 6}, output="b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    for a, b in zip(longer.model.parameters(), resumed.model.parameters(), strict=True):
        assert a.equal(b)


def test_resuming_from_a_run_of_another_method_is_an_error(make_trainer, tmp_path):
    make_trainer("fine_tuning", **SAVING).train()
    with pytest.raises(FileNotFoundError, match="`resume_from_checkpoint` needs .*task_vector.json"):
        make_trainer("task_vector", **SAVING).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))


def test_lora_resumed_equals_the_uninterrupted_run(make_trainer, llama):
    def build():
        torch.manual_seed(1)
        return make_trainer("task_vector", peft_config=LoraConfig(**LORA), **SAVING)

    whole = build()
    whole.train()
    for checkpoint in ("checkpoint-2", "checkpoint-4"):
        resumed = build()
        resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / checkpoint))
        for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
            assert a.equal(b)


# What it refuses


def test_adapters_that_cannot_be_turned_round(make_trainer, llama):
    for more in ({"use_dora": True}, {"modules_to_save": ["lm_head"]}):
        config = LoraConfig(**{**LORA, **more})
        with pytest.raises(ValueError, match="supports LoRA matrices alone, and the adapters train .*"):
            make_trainer("task_vector", peft_config=config, max_steps=1).train()
    model = get_peft_model(llama(), LoraConfig(**LORA))
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "lora_B" in name).add_(1)
    with pytest.raises(ValueError, match="needs one that starts at zero.*merge_and_unload"):
        make_trainer("task_vector", model, max_steps=1).train()


def test_loading_the_best_model_would_lose_the_negation(make_trainer):
    with pytest.raises(ValueError, match="`load_best_model_at_end` must be False"):
        make_trainer(
            "task_vector", load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps", eval_steps=2,
            save_steps=2,
        )  # fmt: skip
