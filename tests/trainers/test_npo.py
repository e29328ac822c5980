from __future__ import annotations

import copy
import math

import datasets
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaModel, TrainingArguments

from trainers.npo import NPOTrainer
from trainers.npo_config import NPOConfig


@pytest.fixture
def build(tmp_path, llama, make_tokenizer, forget, retain):
    """A trainer on a tiny model; keyword arguments that NPOTrainer takes go there, all others to the config."""

    def build(model=None, **overrides):
        own = {
            name: overrides.pop(name)
            for name in ("forget_dataset", "retain_dataset", "eval_dataset", "processing_class", "peft_config")
            if name in overrides
        }
        settings = {
            "output_dir": str(tmp_path / "run"),
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 4,
            "logging_steps": 1,
            **overrides,
        }
        arguments = {
            "forget_dataset": forget,
            "retain_dataset": None if settings.get("retain_loss") == "none" else retain,
            "processing_class": make_tokenizer(),
            **own,
        }
        return NPOTrainer(llama() if model is None else model, NPOConfig(**settings), **arguments)

    return build


def _mean_nll(model, examples) -> float:
    """Token mean over the set, one unpadded text at a time through full logits."""
    total, n = 0.0, 0
    for example in examples:
        ids = torch.tensor([example.input_ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        start = example.answer_start
        total += F.cross_entropy(logits[start - 1 :], ids[0, start:], reduction="sum").item()
        n += example.n_answer_tokens
    return total / n


def _sequence_log_prob(model, example) -> torch.Tensor:
    ids = torch.tensor([example.input_ids])
    log_probs = model(input_ids=ids).logits[0].log_softmax(-1)
    return sum(log_probs[t - 1, ids[0, t]] for t in range(example.answer_start, ids.shape[1]))


# The loss


@pytest.mark.parametrize("retain_loss", ["none", "nll", "kl"])
def test_loss_and_gradient_by_the_definition(build, llama, retain_loss):
    """One batch against a few lines: unpadded texts, one at a time, full logits, a live reference."""
    model, frozen = llama(), llama()
    trainer = build(model, retain_loss=retain_loss, beta=0.5, alpha=0.7, gamma=1.3)
    trainer._measure_reference()
    with torch.no_grad():  # move away from the reference
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    items = [trainer.train_dataset[i] for i in range(8)]
    loss = trainer.compute_loss(model.train(), trainer.data_collator(items))
    loss.backward()
    gradient = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    expected = 0.0
    for item in items:
        log_ratio = _sequence_log_prob(model, item["forget"]) - _sequence_log_prob(frozen, item["forget"]).detach()
        expected = expected + 1.3 * 2 / 0.5 * torch.log1p(torch.exp(0.5 * log_ratio)) / 8
    if retain_loss != "none":
        n = sum(item["retain"].n_answer_tokens for item in items)
        for item in items:
            example, ids = item["retain"], torch.tensor([item["retain"].input_ids])
            q = model(input_ids=ids).logits[0].log_softmax(-1)
            p = frozen(input_ids=ids).logits[0].log_softmax(-1).detach()
            for t in range(example.answer_start, ids.shape[1]):
                kl = (p[t - 1].exp() * (p[t - 1] - q[t - 1])).sum()
                expected = expected + 0.7 / n * (kl if retain_loss == "kl" else -q[t - 1, ids[0, t]])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    expected.backward()
    for found, parameter in zip(gradient, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_starts_at_two_over_beta_ln_two(build, beta):
    metrics = build(retain_loss="kl", beta=beta).evaluate()
    assert metrics["eval_forget_loss"] == pytest.approx(2 / beta * math.log(2), rel=1e-5)
    assert metrics["eval_retain_loss"] == pytest.approx(0, abs=1e-5)
    assert metrics["eval_loss"] == pytest.approx(2 / beta * math.log(2), rel=1e-5)


def test_starts_there_with_dropout_in_the_model(build):
    """The reference is read without dropout, so training must be without it too."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5
    )
    first = []
    for disable in (True, False):
        trainer = build(
            GPT2LMHeadModel(copy.deepcopy(config)), retain_loss="none", max_steps=1, disable_dropout=disable
        )
        trainer.train()
        first.append(trainer.state.log_history[0]["forget_loss"])
    assert first[0] == pytest.approx(20 * math.log(2), rel=1e-5)
    assert first[1] != pytest.approx(20 * math.log(2), rel=1e-4)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_evaluation_does_not_depend_on_padding_or_batches(build, make_tokenizer, batch_size):
    expected = build(per_device_eval_batch_size=8).evaluate()
    for side, pad in (("left", True), ("right", True), ("right", False)):
        trainer = build(per_device_eval_batch_size=batch_size, processing_class=make_tokenizer(side, pad))
        found = trainer.evaluate()
        for name in ("eval_loss", "eval_forget_loss", "eval_forget_nll", "eval_retain_nll"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5), (side, pad, name)


# Training


@pytest.mark.parametrize("retain_loss", ["none", "nll", "kl"])
def test_forgets_what_it_knew_and_holds_the_rest(build, llama, retain_loss):
    model = llama()
    trainer = build(model)
    forget, retain = trainer.train_dataset.forget, trainer.train_dataset.retain
    batch = trainer.data_collator([{"forget": example} for example in (*forget, *retain)])["forget"]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):  # learn both sets first
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    knew = _mean_nll(model, forget), _mean_nll(model, retain)
    assert max(knew) < 0.5

    trainer = build(model, retain_loss=retain_loss, num_train_epochs=15, lr_scheduler_type="constant", alpha=5.0)
    trainer.train()
    after = _mean_nll(model, forget), _mean_nll(model, retain)
    assert after[0] > knew[0] + 1
    if retain_loss == "none":
        assert after[1] > knew[1] + 0.3  # nothing holds it: the control for the two below
    else:
        assert after[1] < knew[1] + 0.3


def test_logs_the_components(build, llama):
    trainer = build(llama(), max_steps=2, logging_steps=2, alpha=0.5, gamma=2.0, per_device_train_batch_size=8)
    forget = _mean_nll(trainer.model, trainer.train_dataset.forget)
    trainer.train()
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["loss"] == pytest.approx(2 * entry["forget_loss"] + 0.5 * entry["retain_loss"], rel=1e-5)
    assert entry["retain_nll"] == entry["retain_loss"]
    assert all(isinstance(entry[name], float) for name in ("forget_loss", "forget_nll", "retain_nll"))

    trainer = build(llama(), max_steps=1, per_device_train_batch_size=8)
    trainer.train()
    assert trainer.state.log_history[0]["forget_nll"] == pytest.approx(forget, rel=1e-5)


# LoRA

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("retain_loss", ["nll", "kl"])
def test_lora_trains_adapters_only(build, llama, retain_loss, checkpointing):
    model = llama()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = build(
        model,
        peft_config=LoraConfig(**LORA),
        retain_loss=retain_loss,
        num_train_epochs=6,
        learning_rate=1e-2,
        activation_checkpointing=checkpointing,
    )
    start = trainer.evaluate()
    trainer.train()
    end = trainer.evaluate()
    assert start["eval_forget_loss"] == pytest.approx(20 * math.log(2), rel=1e-5)
    assert end["eval_forget_nll"] > start["eval_forget_nll"] + 0.1
    with trainer.model.disable_adapter():
        after = trainer.model.get_base_model().state_dict()
        for key, value in before.items():
            assert after[key.replace("_proj.weight", "_proj.base_layer.weight") if _adapted(key) else key].equal(value)
    assert all(("lora_" in name) == p.requires_grad for name, p in trainer.model.named_parameters())


def _adapted(key: str) -> bool:
    return key.endswith(("q_proj.weight", "v_proj.weight"))


def test_the_reference_of_a_trained_adapter_is_the_base_model(build, llama):
    model = get_peft_model(llama(), LoraConfig(**LORA))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    metrics = build(model).evaluate()
    assert abs(metrics["eval_forget_loss"] - 20 * math.log(2)) > 0.1
    expected = build(llama())
    expected._measure_reference()
    trainer = build(model)
    trainer._measure_reference()
    assert trainer.reference.scores.nll == pytest.approx(expected.reference.scores.nll, rel=1e-6)


def test_the_head_may_be_adapted_too(build):
    trainer = build(peft_config=LoraConfig(**{**LORA, "target_modules": ["q_proj", "lm_head"]}), num_train_epochs=2)
    trainer.train()
    adapter = trainer.model.get_base_model().lm_head.lora_B["default"].weight
    assert adapter.abs().max() > 0


# What it refuses


def test_needs_a_retain_set_for_a_retain_term(build):
    for retain_loss in ("nll", "kl"):
        with pytest.raises(ValueError, match=f"retain_loss='{retain_loss}'.*needs a `retain_dataset`.*'none'"):
            build(retain_loss=retain_loss, retain_dataset=None)


def test_says_that_a_retain_set_is_not_used(build, caplog, retain):
    trainer = build(retain_loss="none", retain_dataset=retain)
    assert "`retain_dataset` is not used" in caplog.text
    assert not trainer.train_dataset.retain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"forget_dataset": [{"question": "w1", "answer": ""}]}, r"forget_dataset\[0\].*`answer`"),
        ({"retain_dataset": [{"question": "w1", "answer": " "}]}, r"retain_dataset\[0\].*`answer`"),
        ({"eval_dataset": {"a": [{"question": "w1"}]}}, r"eval_dataset\['a'\]\[0\].*`answer`"),
        ({"max_length": 4}, "at most 4 fit.*would be cut"),
        ({"forget_dataset": [{"question": "w1 " * 70, "answer": "w2"}]}, "72 tokens, at most 64 fit"),
        ({"processing_class": None}, "`processing_class` must be the model's tokenizer"),
    ],
)
def test_bad_input(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(**arguments).train()


def test_bad_models_and_arguments(build, llama, make_tokenizer, forget, retain, tmp_path):
    with pytest.raises(ValueError, match="`model` must be a loaded model, got str"):
        build("smollm2")
    with pytest.raises(ValueError, match="must be a causal language model with an output head, got LlamaModel"):
        build(LlamaModel(llama().config))
    with pytest.raises(ValueError, match="`args` must be of NPOConfig, got TrainingArguments"):
        NPOTrainer(llama(), TrainingArguments(str(tmp_path)), forget, retain, processing_class=make_tokenizer())
    with pytest.raises(ValueError, match="PeftModel already"):
        build(get_peft_model(llama(), LoraConfig(**LORA)), peft_config=LoraConfig(**LORA))


def test_takes_datasets_and_saves_a_model_that_loads(build, forget, tmp_path):
    trainer = build(forget_dataset=datasets.Dataset.from_list(forget), max_steps=1)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for a, b in zip(again.parameters(), trainer.model.parameters(), strict=True):
        assert a.equal(b)
