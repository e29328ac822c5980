from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import run

from trainers.npo import NPOTrainer
from trainers.npo_config import NPOConfig
from trainers.reference_scores import FILE_NAME, ReferenceScores
from trainers.unlearning_config import UnlearningConfig
from trainers.unlearning_trainer import UnlearningTrainer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def build(tmp_path, llama, tokenizer, forget, retain):
    def build(output="run", seed=0, forget_dataset=forget, retain_dataset=retain, eval_dataset=None, **overrides):
        settings = {
            "output_dir": str(tmp_path / output),
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "save_strategy": "no",
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "retain_loss": "kl",
            **overrides,
        }
        return NPOTrainer(
            llama(seed),
            NPOConfig(**settings),
            forget_dataset,
            retain_dataset,
            eval_dataset,
            processing_class=tokenizer,
        )

    return build


def _weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def _losses(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# Accumulation and ranks


@pytest.mark.parametrize("retain_loss", ["nll", "kl"])
def test_accumulated_batches_equal_the_large_batch(build, retain_loss):
    """Answers differ in length, so means of batch means would not agree; SGD shows the update itself."""
    start = _weights(build())
    updates, losses, entries = {}, {}, {}
    for size, steps in ((8, 1), (4, 2), (1, 8), (3, 3)):
        trainer = build(
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            num_train_epochs=2,
            retain_loss=retain_loss,
            optim="sgd",
            max_grad_norm=0.0,
            learning_rate=1e-2,
        )
        trainer.train()
        updates[size], losses[size] = _weights(trainer) - start, _losses(trainer)
        entries[size] = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert updates[8].norm() > 1e-2
    for size in (4, 1, 3):  # 3 + 3 + 2: the last batch is smaller
        assert (updates[size] - updates[8]).norm() <= 1e-5 * updates[8].norm()
        assert losses[size] == pytest.approx(losses[8], rel=1e-5)
        for found, expected in zip(entries[size], entries[8], strict=True):
            for name in ("forget_loss", "forget_nll", "retain_nll"):
                assert found[name] == pytest.approx(expected[name], rel=1e-5)


RANKS = """
import sys, torch
root, tests, output, size = sys.argv[1:]
sys.path[:0] = [root, tests]
import conftest
from trainers.npo import NPOTrainer
from trainers.npo_config import NPOConfig

found = {}
for retain_loss in ("nll", "kl"):
    args = NPOConfig(
        output_dir=output, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", optim="sgd",
        retain_loss=retain_loss, per_device_train_batch_size=int(size), gradient_accumulation_steps=2,
        max_grad_norm=0.0, num_train_epochs=2, learning_rate=1e-2, logging_steps=1,
        train_sampling_strategy="sequential",
    )
    model, tokenizer = conftest._llama(), conftest._tokenizer()
    trainer = NPOTrainer(model, args, conftest.FORGET, conftest.RETAIN, conftest.FORGET[:7], tokenizer)
    before = trainer.evaluate()
    trainer.train()
    found[retain_loss] = {
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]),
        "metrics": [before, trainer.evaluate(), *(e for e in trainer.state.log_history if "loss" in e)],
    }
    assert len(set(trainer.accelerator.gather(found[retain_loss]["weights"].sum()[None]).tolist())) == 1
if trainer.is_world_process_zero():
    torch.save((trainer.accelerator.num_processes, found), output + ".pt")
"""


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path, llama):
    """With an evaluation first, after which accelerate would leave the model without DDP; 7 pairs to evaluate."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    runs = []
    for ranks in (1, 2):
        output = str(tmp_path / f"ranks{ranks}")
        run(script, [ROOT, Path(__file__).parent, output, 4 // ranks], tmp_path, ranks=ranks)
        processes, found = torch.load(f"{output}.pt")
        assert processes == ranks
        runs.append(found)
    start = torch.cat([p.detach().flatten() for p in llama().parameters()])
    for retain_loss in ("nll", "kl"):
        one, two = (run[retain_loss]["weights"] - start for run in runs)
        assert one.norm() > 1e-2
        assert (two - one).norm() <= 1e-5 * one.norm()
        for a, b in zip(runs[0][retain_loss]["metrics"], runs[1][retain_loss]["metrics"], strict=True):
            names = [name for name in a if name.endswith(("loss", "nll"))]
            assert len(names) == 5
            assert [b[name] for name in names] == pytest.approx([a[name] for name in names], rel=1e-5, abs=1e-6)


# The reference, and resuming


@pytest.mark.parametrize("save_steps", [2, 3])
def test_a_resumed_run_equals_the_uninterrupted_one(build, save_steps):
    """8 pairs in batches of 3: checkpoints within an epoch and at its end."""
    settings = {
        "per_device_train_batch_size": 3,
        "num_train_epochs": 3,
        "save_strategy": "steps",
        "save_steps": save_steps,
    }
    whole = build("whole", **settings)
    whole.train()
    stopped = build("stopped", **settings)
    stopped.train()  # leaves its checkpoints behind, as a kill after the save would
    measured = stopped.reference.scores.nll

    resumed = build("stopped", seed=5, **settings)  # other initial weights: they must not become the reference
    resumed.evaluate()  # reads other scores, which must give way too
    resumed.train(resume_from_checkpoint=str(Path(resumed.args.output_dir) / f"checkpoint-{save_steps}"))
    assert _weights(resumed).equal(_weights(whole))
    assert _losses(resumed) == _losses(whole)
    assert resumed.reference.scores.nll == pytest.approx(measured, rel=1e-6)


def test_a_checkpoint_cut_short_by_a_kill_is_not_resumed_from(build):
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = build("run", **settings)
    whole.train()
    (Path(whole.args.output_dir) / "checkpoint-4" / "trainer_state.json").unlink()  # what the Trainer writes last
    resumed = build("run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert _weights(resumed).equal(_weights(whole))


def test_a_run_resumed_into_another_folder_takes_the_reference_along(build):
    settings = {"per_device_train_batch_size": 4, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    first = build("first", **settings)
    first.train()
    second = build("second", **settings)
    second.train(resume_from_checkpoint=str(Path(first.args.output_dir) / "checkpoint-2"))
    assert _weights(second).equal(_weights(first))
    assert (Path(second.args.output_dir) / FILE_NAME).is_file()


def test_resuming_without_the_reference_or_with_other_data(build, forget):
    settings = {"per_device_train_batch_size": 4, "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    first = build(**settings)
    first.train()
    other = [*forget[1:], {"question": "w1 w1", "answer": "w1"}]
    with pytest.raises(ValueError, match="lacks the scores of 1 pairs.*resumed"):
        build(forget_dataset=other, **settings).train(resume_from_checkpoint=True)
    (Path(first.args.output_dir) / FILE_NAME).unlink()
    with pytest.raises(FileNotFoundError, match=f"resume_from_checkpoint.*{FILE_NAME}.*start again"):
        build(**settings).train(resume_from_checkpoint=True)


def test_a_new_run_in_an_old_folder_reads_its_own_reference(build):
    build(max_steps=1).train()
    trainer = build(seed=7, max_steps=1)
    trainer.train()
    stored = ReferenceScores.load(Path(trainer.args.output_dir) / FILE_NAME)
    expected = build("elsewhere", seed=7)
    expected._measure_reference()
    assert stored.nll == pytest.approx(expected.reference.scores.nll, rel=1e-6)


def test_the_reference_stays_while_the_model_learns(build):
    trainer = build(num_train_epochs=3)
    trainer._measure_reference()
    before = dict(trainer.reference.scores.nll)
    trainer.train()
    trainer.evaluate()
    trainer.train()  # goes on from trained weights, against the same reference
    assert trainer.reference.scores.nll == before


def test_pairs_that_come_too_late_for_a_reference(build):
    late = [{"question": "w40", "answer": "w41"}]
    trainer = build(max_steps=1)
    assert trainer.evaluate(late)["eval_forget_loss"] > 0  # not too late yet
    trainer.train()
    trainer.evaluate(late)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="1 pairs have no reference scores.*`eval_dataset`"):
            trainer.evaluate([{"question": "w42", "answer": "w43"}])
    assert trainer.evaluate()["eval_forget_loss"] > 0


def test_the_run_uses_no_random_numbers_for_the_reference(build):
    trainer = build()
    before = torch.random.get_rng_state()
    trainer._measure_reference()
    assert torch.random.get_rng_state().equal(before)


# Evaluation, logs


def test_several_evaluation_sets_during_training(build, forget, retain):
    trainer = build(
        eval_dataset={"known": forget[:3], "other": [{"question": "w40", "answer": "w41 w42"}]},
        eval_strategy="steps",
        eval_steps=1,
        max_steps=2,
        metric_for_best_model="eval_known_loss",
        greater_is_better=False,
    )
    trainer.train()
    known = [entry["eval_known_loss"] for entry in trainer.state.log_history if "eval_known_loss" in entry]
    other = [
        entry["eval_other_forget_loss"] for entry in trainer.state.log_history if "eval_other_forget_loss" in entry
    ]
    assert len(known) == len(other) == 2 and known[0] != known[1]
    json.dumps(trainer.state.log_history)
    assert trainer.state.best_metric == min(known)


def test_evaluation_in_between_changes_nothing(build):
    runs = []
    for strategy in ("no", "steps"):
        trainer = build(eval_strategy=strategy, eval_steps=1, num_train_epochs=2, per_device_train_batch_size=3)
        trainer.train()
        runs.append((_weights(trainer), _losses(trainer)))
    assert runs[0][0].equal(runs[1][0]) and runs[0][1] == runs[1][1]


def test_compute_loss_by_hand_is_the_mean_over_its_batch(build):
    trainer = build(retain_loss="nll")
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(8)])
    loss, parts = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    metrics = trainer.evaluate()
    assert loss.item() == pytest.approx(metrics["eval_loss"], rel=1e-5)
    assert parts["forget_loss"].shape == (8,)


@pytest.mark.parametrize("trained", [False, True])
def test_predict_is_an_evaluation_by_another_name(build, forget, trained):
    trainer = build(retain_loss="nll", max_steps=1, eval_dataset=forget[:3])
    expected = trainer.evaluate()
    found = trainer.predict(forget[:3]).metrics
    for name in ("loss", "forget_loss", "forget_nll", "retain_nll"):
        assert found[f"test_{name}"] == pytest.approx(expected[f"eval_{name}"], rel=1e-6)
    if trained:
        trainer.train()
        assert trainer.predict(forget[:3]).metrics["test_forget_nll"] != found["test_forget_nll"]


def test_bf16_autocast_trains(build):
    trainer = build(bf16=True, max_steps=3)
    trainer.train()
    first = [entry["forget_loss"] for entry in trainer.state.log_history if "forget_loss" in entry][0]
    assert first == pytest.approx(13.863, abs=0.3)  # the reference is read in float32
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_a_method_must_say_its_terms(llama, tokenizer, forget, tmp_path):
    trainer = UnlearningTrainer(
        llama(),
        UnlearningConfig(str(tmp_path), use_cpu=True, report_to="none"),
        forget,
        processing_class=tokenizer,
    )
    with pytest.raises(NotImplementedError):
        trainer.evaluate()
