"""What holds of every method: accumulation, direction, resuming, adapters, mixed precision, monitoring, ranks."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from processes import run

from monitor.callback import Monitor
from monitor.measures.behaviour import Behaviour

ROOT = Path(__file__).parents[2]
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
NAMES = (
    "gradient_ascent", "grad_diff", "kl_min", "npo", "simnpo", "dpo", "rmu", "whp", "whp_reinforced", "wga", "satimp",
    "undial", "ce_u", "fine_tuning", "task_vector",
)  # fmt: skip


def _weights(model) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _mean_nll(model, examples) -> float:
    """Token mean over the set, one unpadded text at a time through full logits."""
    total, n = 0.0, 0
    for example in examples:
        ids = torch.tensor([example.input_ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, example.answer_start - 1 : -1]
        total += F.cross_entropy(logits, ids[0, example.answer_start :], reduction="sum").item()
        n += example.n_answer_tokens
    return total / n


def test_the_table_holds_every_method(methods):
    configs = {path.stem.removesuffix("_config") for path in (ROOT / "trainers").glob("*_config.py")}
    assert set(methods) == set(NAMES) == configs - {"unlearning"}


# Accumulation


def test_accumulated_batches_equal_the_large_batch(make_trainer, method, taught):
    """Answers differ in length, so means of batch means would not agree; SGD shows the update itself."""
    start = _weights(taught())
    updates, entries = {}, {}
    for size, steps in ((8, 1), (4, 2), (1, 8)):
        trainer = make_trainer(
            method,
            taught(),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            num_train_epochs=2,
            optim="sgd",
            max_grad_norm=0.0,
            learning_rate=0.1,
        )
        trainer.train()
        updates[size] = _weights(trainer.model) - start
        entries[size] = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert updates[8].norm() > 1e-2
    for size in (4, 1):
        assert (updates[size] - updates[8]).norm() <= 1e-5 * updates[8].norm()
        for found, expected in zip(entries[size], entries[8], strict=True):
            for name in expected:
                if name.endswith(("loss", "nll")):
                    assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
        # At the first step model and reference agree, and the gains are rounding.
        assert entries[size][1].get("reward_accuracy") == entries[8][1].get("reward_accuracy")


# Direction

# How far each goes depends on its loss: these settings take every method past the same marks on a model that knows
# both sets. Reinforcement changes little of what is known already, so a small gain has to count.
STRONGER = {
    "rmu": {"coefficient": 10.0, "alpha": 20.0, "learning_rate": 3e-3},
    "whp_reinforced": {"reinforcement": 50.0},
    "satimp": {"beta1": 1.0, "beta2": 0.5},
    "simnpo": {"beta": 2.0, "delta": 0.0},
    "dpo": {"beta": 0.5, "learning_rate": 3e-3},
    "task_vector": {"scale": 3.0},
    "undial": {"strength": 10.0},
}


WITHOUT_RETAIN = ("fine_tuning", "task_vector")  # there is nothing that could hold the rest


@pytest.mark.parametrize(
    ("method", "held"),
    [(name, held) for name in NAMES for held in (True, False) if not (held and name in WITHOUT_RETAIN)],
    indirect=["method"],
)
def test_forgets_what_it_knew_and_holds_the_rest(make_trainer, method, taught, held):
    """Forget NLL up; retain NLL kept by a retain term, and by nothing else: the control without one."""
    settings = {"num_train_epochs": 20, "lr_scheduler_type": "constant", **STRONGER.get(method.name, {})}
    if method.has_retain_loss:
        kept = method.config.__dataclass_fields__["retain_loss"].default
        settings |= {"retain_loss": "none" if not held else "nll" if kept == "none" else kept, "alpha": 5.0}
    elif method.name == "rmu":
        settings |= {} if held else {"alpha": 0.0}
    else:
        assert method.name in WITHOUT_RETAIN
    model = taught()
    if method.name == "whp_reinforced":
        further = make_trainer("fine_tuning", taught(), output="further", num_train_epochs=10)
        further.train()
        settings["reinforced_model"] = further.model
    trainer = make_trainer(method, model, **settings)
    forget = trainer.train_dataset.forget
    retain = trainer.train_dataset.retain or make_trainer("grad_diff").train_dataset.retain
    knew = _mean_nll(model, forget), _mean_nll(model, retain)
    assert max(knew) < 0.3
    trainer.train()
    after = _mean_nll(model, forget), _mean_nll(model, retain)
    print(method.name, held, knew, after)
    if method.name == "fine_tuning":
        assert after[0] < 0.5 * knew[0]
        return
    assert after[0] > knew[0] + 1
    if held:
        assert after[1] < 1.1 * knew[1] + 0.1
    else:
        assert after[1] > 1.1 * knew[1] + 0.1


# Resuming


def test_a_resumed_run_equals_the_uninterrupted_one(make_trainer, method, llama):
    settings = {
        "per_device_train_batch_size": 3,  # 8 pairs: the checkpoint lies within an epoch
        "num_train_epochs": 3,
        "save_strategy": "steps",
        "save_steps": 4,
    }
    whole = make_trainer(method, **settings)
    whole.train()
    trained = _weights(whole.model)
    assert not trained.equal(_weights(llama()))

    more = {"reinforced_model": None} if method.name == "whp_reinforced" else {}
    resumed = make_trainer(method, **settings, **more)
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-4"))
    assert _weights(resumed.model).equal(trained)
    assert _losses(resumed) == _losses(whole)

    # Nothing is left to do, and nothing is done.
    again = make_trainer(method, **settings, **more)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 9
    assert _weights(again.model).equal(trained)


# Adapters


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_trains_adapters_only(make_trainer, method, taught, checkpointing):
    model = taught()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    strong = STRONGER.get(method.name, {})
    if method.name == "whp_reinforced":
        strong = {**strong, "reinforced_model": make_trainer("fine_tuning", taught(), output="further")}
        strong["reinforced_model"].train()
        strong["reinforced_model"] = strong["reinforced_model"].model
    trainer = make_trainer(
        method,
        model,
        peft_config=LoraConfig(**LORA),
        num_train_epochs=8,
        activation_checkpointing=checkpointing,
        **{**strong, "learning_rate": 2e-2},
    )
    start = trainer.evaluate()
    trained = {name for name, p in trainer.model.named_parameters() if p.requires_grad}
    adapters = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if "lora_" in name}
    assert trained == {name for name in adapters if method.name != "rmu" or ".layers.0." in name}
    trainer.train()
    end = trainer.evaluate()
    print(method.name, start["eval_forget_nll"], end["eval_forget_nll"])
    change = end["eval_forget_nll"] - start["eval_forget_nll"]
    assert change < -0.05 if method.name == "fine_tuning" else change > 0.3
    after = dict(trainer.model.named_parameters())
    for name, value in before.items():
        name = "base_model.model." + name
        parameter = after[name] if name in after else after[name.replace(".weight", ".base_layer.weight")]
        assert parameter.equal(value), name
    for name, value in adapters.items():
        assert after[name].requires_grad == (name in trained)
        if "lora_B" in name:
            assert after[name].equal(value) == (name not in trained), name


@pytest.mark.parametrize(("name", "lora"), [("npo", True), ("rmu", True), ("rmu", False)])
def test_reentrant_checkpoints_train_too(make_trainer, name, lora):
    """These take no gradient back through a block whose input needs none, and frozen embeddings need none."""
    runs = []
    for checkpoints in ({}, {"activation_checkpointing_kwargs": {"use_reentrant": True}}):
        torch.manual_seed(1)  # of the adapter
        trainer = make_trainer(
            name,
            peft_config=LoraConfig(**LORA) if lora else None,
            activation_checkpointing=bool(checkpoints),
            max_steps=2,
            **checkpoints,
        )
        start = _weights(trainer.model)
        trainer.train()
        runs.append(_weights(trainer.model))
        assert not runs[-1].equal(start)
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["npo", "dpo", "kl_min", "undial", "rmu", "whp_reinforced"])
@pytest.mark.parametrize("max_bytes", [2**30, 0])
def test_the_reference_of_a_trained_adapter_is_the_base_model(make_trainer, methods, llama, name, max_bytes):
    """Kept or run beside; and reading it leaves what is trained as it was."""
    extra = {"adaptive_scale": 1.5} if name == "rmu" else {"retain_loss": "kl"}
    model = get_peft_model(llama(), LoraConfig(**LORA))
    torch.manual_seed(3)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.5)
    trainer = make_trainer(name, model, reference_max_bytes=max_bytes, **extra)
    plain = make_trainer(name, **extra)
    trained = [p.requires_grad for p in model.parameters()]
    found, expected = (_frozen_word(t) for t in (trainer, plain))
    assert found.keys() == expected.keys() and expected
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-4)
    assert [p.requires_grad for p in model.parameters()] == trained
    live = max_bytes == 0 and any(key[0] in ("log_probs", "states") for key in expected)
    assert (trainer.reference.live is not None) == live
    loss = trainer.evaluate()["eval_loss"]
    assert loss != pytest.approx(plain.evaluate()["eval_loss"], rel=1e-3)  # its own word is that of the adapter


def _frozen_word(trainer) -> dict:
    trainer._measure_reference()
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(8)])
    word = trainer.reference.batch(batch)
    found = {(kind, part): value for kind, parts in word._asdict().items() for part, value in parts.items()}
    for (kind, part), value in found.items():
        if kind == "states":  # padding may hold anything
            found[kind, part] = value * batch[part]["attention_mask"][..., None]
    return found


# Mixed precision


def test_bf16_autocast_trains(make_trainer, method, taught):
    settings = {"max_steps": 3, **STRONGER.get(method.name, {})}
    trainers = [make_trainer(method, taught(), output=str(bf16), bf16=bf16, **settings) for bf16 in (False, True)]
    start = _weights(trainers[0].model)
    for trainer in trainers:
        trainer.train()
    assert {p.dtype for p in trainers[1].model.parameters()} == {torch.float32}
    full, half = (trainer.state.log_history[0] for trainer in trainers)
    names = [name for name in full if name.endswith(("loss", "nll"))]
    for name in names:
        assert half[name] == pytest.approx(full[name], rel=0.05, abs=0.05), name
    assert any(half[name] != full[name] for name in names)  # it is another precision
    # Adam's first steps are all but the gradient's signs, and rounding turns those of the smallest gradients: how many
    # depends on the CPU's units (least similar is RMU: 0.90 with AVX512-BF16). Unrelated directions would have 0.
    one, two = (_weights(trainer.model) - start for trainer in trainers)
    assert F.cosine_similarity(one, two, dim=0) > 0.85


def test_a_bf16_model_trains(make_trainer, method, taught):
    settings = {"max_steps": 3, "learning_rate": 3e-3, **STRONGER.get(method.name, {})}
    trainer = make_trainer(method, taught().to(torch.bfloat16), **settings)
    start = trainer.evaluate()
    before = _weights(trainer.model)
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16}
    end, moved = trainer.evaluate(), _weights(trainer.model)
    assert moved.isfinite().all() and not moved.equal(before)
    assert all(math.isfinite(end[name]) for name in end)
    if method.name != "fine_tuning":  # Adam's first steps overshoot what is all but learned
        assert end["eval_forget_nll"] > start["eval_forget_nll"]


# Monitoring


def test_a_monitored_run_is_bit_equal_to_an_unmonitored_one(make_trainer, method, forget, retain):
    settings = {"num_train_epochs": 2, "per_device_train_batch_size": 3, "eval_strategy": "steps", "eval_steps": 2}
    plain = make_trainer(method, output="plain", **settings)
    plain.train()
    watched = make_trainer(method, output="watched", **settings)
    pairs = {"forget": [SimpleNamespace(**pair) for pair in forget], "retain": [SimpleNamespace(**p) for p in retain]}
    monitor = Monitor(Behaviour(pairs, n_bootstrap=10), every={"steps": 1}, progress=False).attach(watched)
    watched.train()
    assert len(monitor._journal.steps) == 7  # the start and six steps
    assert _weights(watched.model).equal(_weights(plain.model))
    assert _losses(watched) == _losses(plain)
    first, *_, last = [line for line in monitor._journal.lines if line["metric"] == "forget_nll"]
    assert last["value"] != first["value"]


# Ranks

RANKS = """
import gc, sys, torch
from peft import LoraConfig
root, tests, output, size = sys.argv[1:]
sys.path[:0] = [root, tests]
import conftest

gc.freeze()

def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.accelerator.unwrap_model(trainer.model).parameters()])

CASES = [(name, {}) for name in conftest.METHODS] + [
    ("npo", {"activation_checkpointing": True}),
    ("dpo", {"chosen": "retain"}),
    ("kl_min", {"reference_max_bytes": 0}),
    ("rmu", {"adaptive_scale": 1.5, "reference_max_bytes": 0}),
    ("rmu", {"activation_checkpointing": True}),
    ("rmu", {"activation_checkpointing": True, "peft_config": LoraConfig(target_modules=["q_proj", "down_proj"])}),
]
found = {}
for name, settings in CASES:
    torch.manual_seed(0)
    trainer = conftest._trainer(
        conftest.METHODS[name], output, per_device_train_batch_size=int(size), gradient_accumulation_steps=2,
        optim="sgd", max_grad_norm=0.0, num_train_epochs=2, train_sampling_strategy="sequential",
        learning_rate={"undial": 0.1, "ce_u": 1.0}.get(name, 0.1 if "peft_config" in settings else 1e-2),
        eval_dataset=conftest.FORGET_ALTERNATE[:7], **settings,
    )
    start = weights(trainer)
    before = trainer.evaluate()
    trainer.train()
    end = weights(trainer)
    found["-".join((name, *settings))] = {
        "update": end - start,
        "metrics": [before, trainer.evaluate(), *(e for e in trainer.state.log_history if "loss" in e)],
    }
    assert len(set(trainer.accelerator.gather(end.sum()[None]).tolist())) == 1, name
if trainer.is_world_process_zero():
    torch.save((trainer.accelerator.num_processes, found), output + ".pt")
"""


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path, methods):
    """Every method, after an evaluation, with 7 pairs to evaluate on."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    runs = []
    for ranks in (1, 2):
        output = str(tmp_path / f"ranks{ranks}")
        run(script, [ROOT, Path(__file__).parent, output, 4 // ranks], tmp_path, ranks=ranks)
        processes, found = torch.load(f"{output}.pt")
        assert processes == ranks
        runs.append(found)
    assert runs[0].keys() == runs[1].keys() and set(methods) < set(runs[0])
    for case in runs[0]:
        one, two = (run[case]["update"] for run in runs)
        assert one.norm() > 1e-2, case
        # Undial starts next to its targets: its gradient is what is left of larger ones.
        assert (two - one).norm() <= (1e-4 if case == "undial" else 1e-5) * one.norm(), case
        for a, b in zip(runs[0][case]["metrics"], runs[1][case]["metrics"], strict=True):
            names = [name for name in a if name.endswith(("loss", "nll"))]
            assert [b[name] for name in names] == pytest.approx([a[name] for name in names], rel=1e-5, abs=1e-6), case
