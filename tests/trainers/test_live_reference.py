"""The frozen model run beside the one in training says what the kept scores say."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel

from trainers.answer_logits import answer_logits
from trainers.live_reference import LiveReference
from trainers.reference_scores import ReferenceScores

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
CASES = [
    ("kl_min", {}),
    ("undial", {}),
    ("npo", {"retain_loss": "kl"}),
    ("rmu", {}),
    ("rmu", {"adaptive_scale": 1.5}),
    ("rmu", {"adaptive_scale": 1.5, "alpha": 0.0}),
]


def _weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _id(value):
    return value if isinstance(value, str) else "-".join(map(str, value.values()))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("name", "settings"), CASES, ids=_id)
def test_trains_as_with_kept_scores(make_trainer, taught, name, settings, lora, caplog):
    if lora:
        settings = {**settings, "peft_config": LoraConfig(**LORA, init_lora_weights=False)}
    runs = []
    for max_bytes in (2**30, 0):
        torch.manual_seed(4)  # of the adapter
        trainer = make_trainer(
            name, taught(), output=f"run{max_bytes}", reference_max_bytes=max_bytes, max_steps=4, optim="sgd",
            learning_rate=1e-2, **settings,
        )  # fmt: skip
        start = _weights(trainer.model)
        trainer.train()
        runs.append((trainer, _losses(trainer), _weights(trainer.model) - start, trainer.evaluate()))
        warned = [r.message for r in caplog.records if "reference_max_bytes" in r.message]
        assert (trainer.reference.live is not None) == bool(warned) == (max_bytes == 0)
    how = "the model with its adapters off" if lora else "a frozen copy of the model"
    assert len(warned) == 1 and "`reference_max_bytes` is 0, and the loss needs" in warned[0] and how in warned[0]
    (kept, losses, update, metrics), (live, live_losses, live_update, live_metrics) = runs
    assert live_losses == pytest.approx(losses, rel=1e-5, abs=1e-6)
    assert update.norm() > 1e-3
    assert (live_update - update).norm() <= 1e-4 * update.norm()
    for key in metrics:
        if key.endswith(("loss", "nll")):
            assert live_metrics[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-5)
    stored = ReferenceScores.load(Path(live.args.output_dir) / "reference_scores.safetensors")
    assert stored.live and not stored.log_probs and not stored.states
    assert [p.requires_grad for p in live.model.parameters()] == [p.requires_grad for p in kept.model.parameters()]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", ["kl_min", "undial", "rmu"])
def test_a_resumed_run_equals_the_uninterrupted_one(make_trainer, name, lora):
    def build(**more):
        torch.manual_seed(4)
        if lora:
            more["peft_config"] = LoraConfig(**LORA)
        return make_trainer(name, reference_max_bytes=0, max_steps=4, save_strategy="steps", save_steps=2, **more)

    whole = build()
    whole.train()
    for evaluated in (False, True):
        resumed = build()
        if evaluated:
            resumed.evaluate()
        resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
        assert _weights(resumed.model).equal(_weights(whole.model))
        assert _losses(resumed) == _losses(whole)
    # What was run beside still is where the limit has been raised since.
    raised = build(**{"output": "run"})
    raised.args.reference_max_bytes = raised.reference.max_bytes = 2**30
    raised.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
    assert raised.reference.live is not None and _weights(raised.model).equal(_weights(whole.model))


@pytest.mark.parametrize("name", ["kl_min", "undial", "rmu"])
def test_resuming_with_another_initial_model_is_an_error(make_trainer, llama, name):
    settings = {"reference_max_bytes": 0, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    make_trainer(name, **settings).train()
    with pytest.raises(ValueError, match="beside the model, and the `model` given is not the one that it started from"):
        make_trainer(name, llama(5), **settings).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ["kl_min", "undial", "rmu"])
def test_the_copy_is_frozen_though_the_model_was_prepared_before(make_trainer, name, bf16):
    """An evaluation prepares the model: accelerate puts a forward of its own into it."""
    more = {"adaptive_scale": 1.5} if name == "rmu" else {}
    trainer = make_trainer(name, reference_max_bytes=0, bf16=bf16, **more)
    trainer.evaluate()
    assert ("forward" in trainer.model.__dict__) == bf16
    trainer.reference.live = None
    trainer.reference.complete = False
    trainer._measure_reference()  # a copy of the prepared model
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(8)])
    before = trainer.reference.batch(batch)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.5)
    after = trainer.reference.batch(batch)
    assert before.log_probs or before.states
    for kind in ("log_probs", "states"):
        for part, value in getattr(before, kind).items():
            assert getattr(after, kind)[part].equal(value)


def test_a_closure_over_the_models_forward_is_not_copied(llama):
    """Such as TRL puts there: called on the copy, it would run the model in training."""
    model = llama()
    original = model.forward
    model.forward = lambda *args, **kwargs: original(*args, **kwargs)
    reference = LiveReference(model)
    ids = torch.arange(4, 24).view(2, 10)
    part = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    before, states = reference.log_probs(part), reference.states(part, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert reference.log_probs(part).equal(before) and reference.states(part, 1).equal(states)


def test_an_evaluation_before_training_leaves_the_reference_frozen(make_trainer):
    for name in ("kl_min", "undial"):
        runs = []
        for evaluated in (False, True):
            trainer = make_trainer(name, reference_max_bytes=0, bf16=True, max_steps=3, output=f"{name}{evaluated}")
            if evaluated:
                trainer.evaluate()
            trainer.train()
            runs.append(_losses(trainer))
        assert runs[0] == pytest.approx(runs[1], rel=1e-3)
        if name == "kl_min":
            assert trainer.evaluate()["eval_retain_loss"] > 1e-3  # a live copy would be the model itself


def test_dropout_is_off(tokenizer):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    model = GPT2LMHeadModel(config).train()
    reference = LiveReference(model)
    ids = torch.arange(4, 24).view(2, 10)
    part = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    first = reference.log_probs(part)
    assert first.equal(reference.log_probs(part)) and not first.requires_grad
    assert reference.states(part, 1).equal(reference.states(part, 1))
    (rows,) = answer_logits(copy.deepcopy(model).eval(), reference._model.get_output_embeddings(), [part])
    assert model.training
    with torch.no_grad():
        (noisy,) = answer_logits(model, model.get_output_embeddings(), [part])
    assert not torch.allclose(noisy.logits.log_softmax(-1), first, atol=1e-2)
    with torch.no_grad():
        (quiet,) = answer_logits(model.eval(), model.get_output_embeddings(), [part])
    torch.testing.assert_close(quiet.logits.log_softmax(-1), first)


def test_trained_biases_cannot_be_switched_off(make_trainer):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    lora = LoraConfig(r=2, target_modules=["c_attn"], bias="all", fan_in_fan_out=True, task_type="CAUSAL_LM")
    trainer = make_trainer("kl_min", GPT2LMHeadModel(config), peft_config=lora, reference_max_bytes=0)
    with pytest.raises(ValueError, match="trains the base model's biases.*Raise `reference_max_bytes`"):
        trainer.train()


def test_late_pairs_that_do_not_fit(make_trainer, forget):
    """The limit is exceeded by pairs that come when the weights have been trained: nothing brings these back."""
    trainer = make_trainer("undial", max_steps=1)
    trainer.train()
    trainer.reference.max_bytes = 0
    before = trainer.evaluate()
    known = [{"question": pair["question"], "answer": pair["answer"]} for pair in forget]
    assert trainer.evaluate(known)["eval_forget_loss"] == before["eval_forget_loss"]  # nothing lacks
    with pytest.raises(RuntimeError, match="1 pairs have no reference scores.*`eval_dataset`"):
        trainer.evaluate([{"question": "w42", "answer": "w43"}])
    assert trainer.evaluate()["eval_forget_loss"] == before["eval_forget_loss"]
