"""The monitor in real training loops: it disturbs nothing, tells everybody, and survives stops."""

import json
import math
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import DataCollatorForLanguageModeling, EarlyStoppingCallback, Trainer, TrainingArguments

from monitor import callback as callback_module
from monitor.activations import Answers, States
from monitor.callback import Monitor
from monitor.readings import Reading

TEXTS = ("the wizard went to the school", "who is the captain", "the ship sails by night")
SENTENCES = [
    f"the {a} went to the {b} by {c}" for a in ("wizard", "captain") for b in ("ship", "school") for c in "xyz"
]


class Drift:
    """How far the pooled states moved from the reference, and the answers' NLL: enough of a measure for a test."""

    headline = ("distance", "nll")

    def __init__(self, name="drift"):
        self.name = name
        self.states = States(TEXTS, (0.5, -1), "mean")
        self.answers = Answers(TEXTS, (" at night",) * len(TEXTS))

    @property
    def stimuli(self):
        return [self.states, self.answers]

    def read(self, now, reference):
        moved = (now.states(self.states) - reference.states(self.states)).norm(dim=-1).mean(0)
        layers = now.layers(self.states)
        readings = [Reading(self.name, "distance", moved[i], layer=layers[i], low=0.0, high=9.0) for i in (1, 0)]
        nll = -torch.cat(now.answers(self.answers).log_probs).mean()
        return [*readings, Reading(self.name, "nll", nll), Reading(self.name, "broken", math.nan)]


@pytest.fixture
def data(tiny_tokenizer):
    return Dataset.from_list([tiny_tokenizer(s) for s in SENTENCES])


@pytest.fixture
def make_trainer(tiny_llama, tiny_tokenizer, data, tmp_path):
    def make(folder="run", model=None, callbacks=None, **options):
        defaults = {
            "output_dir": str(tmp_path / folder), "max_steps": 6, "per_device_train_batch_size": 2, "use_cpu": True,
            "learning_rate": 1e-2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2,
            "report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False,
        }  # fmt: skip
        return Trainer(
            model=model or tiny_llama(),
            args=TrainingArguments(**{**defaults, **options}),
            train_dataset=data,
            eval_dataset=data.select(range(4)),
            processing_class=tiny_tokenizer,
            data_collator=DataCollatorForLanguageModeling(tiny_tokenizer, mlm=False),
            callbacks=callbacks,
        )

    return make


def monitor(**options):
    return Monitor(Drift(), progress=False, **options)


def journal(trainer):
    path = Path(trainer.args.output_dir) / "monitor" / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def untimed(lines):
    return [{k: v for k, v in line.items() if k != "time"} for line in lines]


def steps(trainer):
    return sorted({line["step"] for line in journal(trainer)})


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights_equal(a, b):
    b = b.state_dict()
    return all(tensor.equal(b[name]) for name, tensor in a.state_dict().items())


# --- non-perturbation ---------------------------------------------------------------------------------------------


def test_a_layer_that_the_model_has_not_is_refused_when_attached(make_trainer):
    for layers, wrong in (((2, 7), 7), ((-6,), -6)):
        watching = monitor()
        watching.measures[0].states = States(("a wizard",), layers=layers)
        trainer = make_trainer(str(wrong))
        with pytest.raises(ValueError, match=f"`layer` {wrong} is out of range: the model has 4 blocks"):
            watching.attach(trainer)
        assert watching not in trainer.callback_handler.callbacks


@pytest.mark.parametrize("every", ["eval", "save", "epoch", {"steps": 1}])
def test_a_monitored_run_is_bit_equal_to_an_unmonitored_one(make_trainer, every):
    plain = make_trainer("plain")
    plain.train()
    watched = make_trainer("watched")
    monitor(every=every).attach(watched)
    watched.train()
    assert losses(plain) == losses(watched)
    assert weights_equal(plain.model, watched.model)


def test_bit_equal_with_dropout_active(make_trainer, tiny_tokenizer):
    from transformers import GPT2Config, GPT2LMHeadModel

    def model():
        torch.manual_seed(3)
        config = GPT2Config(
            vocab_size=len(tiny_tokenizer), n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
        return GPT2LMHeadModel(config)

    plain = make_trainer("plain", model())  # building a trainer seeds the generators
    plain.train()
    watched = make_trainer("watched", model())
    monitor(every={"steps": 1}).attach(watched)
    watched.train()
    assert losses(plain) == losses(watched) and weights_equal(plain.model, watched.model)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_bit_equal_under_trl_sft(tiny_llama, tiny_tokenizer, tmp_path, lora):
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    def run(folder, watch):
        args = SFTConfig(
            output_dir=str(tmp_path / folder), max_steps=4, per_device_train_batch_size=2, use_cpu=True, bf16=False,
            learning_rate=1e-2, logging_steps=1, eval_strategy="steps", eval_steps=2, report_to="none",
            disable_tqdm=True, max_length=32, dataloader_pin_memory=False,
        )  # fmt: skip
        dataset = Dataset.from_dict({"text": SENTENCES})
        torch.manual_seed(0)
        trainer = SFTTrainer(
            model=tiny_llama(), args=args, train_dataset=dataset, eval_dataset=dataset.select(range(4)),
            processing_class=tiny_tokenizer, peft_config=LoraConfig(target_modules=["q_proj"]) if lora else None,
        )  # fmt: skip
        if watch:
            monitor(reference="adapter_off" if lora else "initial", every={"steps": 1}).attach(trainer)
        trainer.train()
        return trainer

    plain, watched = run("plain", False), run("watched", True)
    assert weights_equal(plain.model, watched.model)
    ours = [e for e in watched.state.log_history if not any("drift" in key for key in e)]
    timeless = [
        [{k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k} for entry in history]
        for history in (plain.state.log_history, ours)
    ]
    assert timeless[0] == timeless[1], "TRL's own metrics must come through untouched"


# --- schedules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        ("eval", [0, 2, 4, 6]),
        ("save", [0, 3, 6]),
        ("epoch", [0, 6]),
        ({"steps": 4}, [0, 4, 6]),
    ],
)
def test_schedules(make_trainer, every, expected):
    trainer = make_trainer(save_steps=3)
    monitor(every=every).attach(trainer)
    trainer.train()
    assert steps(trainer) == expected
    assert set(Counter((r["step"], r["metric"], r["layer"]) for r in journal(trainer)).values()) == {1}


def test_start_and_end_can_be_left_out(make_trainer):
    trainer = make_trainer(eval_strategy="no")
    monitor(every={"steps": 4}, at_start=False, at_end=False).attach(trainer)
    trainer.train()
    assert steps(trainer) == [4]


def test_several_evaluation_sets_are_one_measurement(make_trainer, data):
    trainer = make_trainer()
    trainer.eval_dataset = {"a": data.select(range(2)), "b": data.select(range(2, 4))}
    monitor().attach(trainer)
    trainer.train()
    assert steps(trainer) == [0, 2, 4, 6]
    assert set(Counter((r["step"], r["metric"], r["layer"]) for r in journal(trainer)).values()) == {1}


def test_an_early_stop_between_schedules_is_measured_at_its_end(make_trainer):
    trainer = make_trainer(
        max_steps=20, metric_for_best_model="eval_loss", load_best_model_at_end=True, greater_is_better=True,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=1)],
    )  # fmt: skip
    monitor(every={"steps": 100}).attach(trainer)
    trainer.train()
    assert trainer.state.global_step < 20
    assert steps(trainer) == [0, trainer.state.global_step]


def test_a_class_is_no_measure():
    with pytest.raises(ValueError, match="measures"):
        Monitor(Drift)


@pytest.mark.parametrize("every", ["evaluation", {"steps": 0}, {"epochs": 1}, {"steps": 1.5}, 10])
def test_an_unknown_schedule_is_refused(every):
    with pytest.raises(ValueError, match="every"):
        monitor(every=every)


def test_measures_must_be_there_and_have_distinct_names():
    with pytest.raises(ValueError, match="empty"):
        Monitor([])
    with pytest.raises(ValueError, match="distinct"):
        Monitor([Drift(), Drift()])
    with pytest.raises(ValueError, match="must be measures such as .* got dict"):
        Monitor({"a": "pages of texts"})


@pytest.mark.parametrize("name", ["", "a/b", "two words", None])
def test_a_measures_name_is_a_word(name):
    with pytest.raises(ValueError, match="`name` is the first part"):
        Monitor(Drift(name))


# --- whom it tells ------------------------------------------------------------------------------------------------


def test_the_reference_is_the_start_and_readings_move_away_from_it(make_trainer):
    trainer = make_trainer()
    monitor().attach(trainer)
    trainer.train()
    headline = {r["step"]: r["value"] for r in journal(trainer) if r["metric"] == "distance" and r["layer"] == 4}
    assert headline[0] == 0.0 and headline[6] > headline[2] > 0
    broken = [r for r in journal(trainer) if r["metric"] == "broken"]
    assert broken and all(r["value"] is None and not r["valid"] and r["note"] for r in broken)


def test_headlines_reach_metrics_best_model_and_the_checkpoint(make_trainer):
    trainer = make_trainer(metric_for_best_model="eval_drift_distance", greater_is_better=False, save_strategy="best")
    seen = {}
    watch = monitor().attach(trainer)
    original = trainer._determine_best_metric
    trainer._determine_best_metric = lambda metrics, trial: seen.update(metrics) or original(metrics, trial)
    trainer.train()
    assert trainer.state.best_metric == pytest.approx(
        min(r["value"] for r in journal(trainer) if r["step"] > 0 and r["metric"] == "distance" and r["layer"] == 4)
    )
    assert set(seen) >= {"eval_drift_distance", "eval_drift_nll"} and "eval_drift_broken" not in seen
    assert type(seen["eval_drift_distance"]) is float
    logged = [entry for entry in trainer.state.log_history if "eval_drift_distance" in entry]
    assert [entry["step"] for entry in logged] == [0, 2, 4, 6], "other trackers get them through the Trainer's log"
    assert watch.readings


class Broken(Drift):
    """Its headline cannot be read, another layer's value can."""

    def read(self, now, reference):
        return [
            Reading(self.name, "distance", None, layer=4, note="states are not finite"),
            Reading(self.name, "distance", 1.0, layer=2),
            Reading(self.name, "nll", 1.0),
            Reading(self.name, "nll", 2.0),
        ]


def test_no_other_layer_takes_the_place_of_an_invalid_headline(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer = make_trainer(report_to="tensorboard", metric_for_best_model="drift_distance", greater_is_better=False)
    Monitor(Broken(), progress=False).attach(trainer)
    with pytest.warns(UserWarning, match="counts as the worst"):
        trainer.train()
    assert not any("eval_drift_distance" in entry for entry in trainer.state.log_history)
    (file,) = (tmp_path / "tb").rglob("events*")
    tags = EventAccumulator(str(file.parent)).Reload().Tags()["scalars"]
    assert "drift/distance" not in tags and "drift/distance/layer_02" in tags and "drift/nll" in tags


def test_early_stopping_works_on_a_reading_and_comes_after_the_monitor(make_trainer):
    trainer = make_trainer(
        max_steps=40, metric_for_best_model="eval_drift_distance", greater_is_better=False, load_best_model_at_end=True,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    monitor().attach(trainer)
    trainer.train()
    assert trainer.state.global_step == 6, "the distance grows: two evaluations after the best the run ends"


def test_callbacks_argument_alone_measures_and_journals(make_trainer):
    trainer = make_trainer(callbacks=[monitor()])
    trainer.train()
    assert steps(trainer) == [0, 2, 4, 6]


def test_tensorboard_scalars_go_through_the_trainers_own_writer(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer = make_trainer(report_to="tensorboard")
    monitor().attach(trainer)
    trainer.train()
    files = list((tmp_path / "tb").rglob("events*"))
    assert len(files) == 1, "a second writer would hide the first"
    events = EventAccumulator(str(files[0].parent)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"drift/distance", "drift/distance/layer_02", "drift/nll", "train/loss"} <= tags
    assert {"intervals/drift/distance/low", "intervals/drift/distance/high"} <= tags
    assert "drift/broken" not in tags
    assert [e.step for e in events.Scalars("drift/distance")] == [0, 2, 4, 6]


def test_every_reading_has_one_tag_a_step(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer = make_trainer(report_to="tensorboard")
    monitor(every={"steps": 3}).attach(trainer)
    trainer.train()
    (file,) = (tmp_path / "tb").rglob("events*")
    events = EventAccumulator(str(file.parent)).Reload()
    for tag in events.Tags()["scalars"]:
        if tag.startswith("drift/"):
            assert [e.step for e in events.Scalars(tag)] == [0, 3, 6]


# --- stops and resumption ------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Like SIGKILL for the code under test: nothing catches it."""


def kill_at(trainer, step, event):
    from transformers import TrainerCallback

    class Killer(TrainerCallback):
        pass

    def strike(self, args, state, control, **kwargs):
        if state.global_step == step:
            raise Killed

    setattr(Killer, event, strike)
    trainer.add_callback(Killer())


@pytest.mark.parametrize("every", ["eval", "save", {"steps": 1}])
@pytest.mark.parametrize(
    ("step", "event"), [(3, "on_step_end"), (4, "on_evaluate"), (4, "on_save"), (5, "on_step_begin")]
)
def test_killed_and_resumed_the_journal_reads_as_if_it_had_never_stopped(make_trainer, every, step, event):
    whole = make_trainer("whole")
    monitor(every=every).attach(whole)
    whole.train()
    stopped = make_trainer("stopped")
    monitor(every=every).attach(stopped)
    kill_at(stopped, step, event)
    with pytest.raises(Killed):
        stopped.train()
    resumed = make_trainer("stopped")
    monitor(every=every).attach(resumed)
    resumed.train(resume_from_checkpoint=True)
    assert untimed(journal(resumed)) == untimed(journal(whole))
    assert weights_equal(resumed.model, whole.model)


def test_killed_before_its_checkpoint_was_measured(make_trainer, monkeypatch):
    """every='save': the checkpoint is on disk, the measurement of it is not."""
    whole = make_trainer("whole")
    monitor(every="save").attach(whole)
    whole.train()
    stopped = make_trainer("stopped")
    watch = monitor(every="save").attach(stopped)
    original = callback_module.run_plan

    def die(*args, **kwargs):
        if stopped.state.global_step == 4:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(callback_module, "run_plan", die)
    with pytest.raises(Killed):
        stopped.train()
    assert watch is not None and steps(stopped) == [0, 2]
    monkeypatch.undo()
    resumed = make_trainer("stopped")
    monitor(every="save").attach(resumed)
    resumed.train(resume_from_checkpoint=True)
    assert untimed(journal(resumed)) == untimed(journal(whole))


@pytest.mark.parametrize("options", [{"every": "epoch"}, {"every": "eval"}])
def test_killed_between_a_checkpoint_and_the_epochs_end(make_trainer, options):
    """Steps decide on checkpoints and epochs on measurements: the checkpoint of that step comes first."""
    settings = {"save_steps": 6, "max_steps": 12, "eval_strategy": "epoch" if options["every"] == "eval" else "no"}
    whole = make_trainer("whole", **settings)
    monitor(**options).attach(whole)
    whole.train()
    stopped = make_trainer("stopped", **settings)
    monitor(**options).attach(stopped)
    kill_at(stopped, 6, "on_save")
    with pytest.raises(Killed):
        stopped.train()
    resumed = make_trainer("stopped", **settings)
    monitor(**options).attach(resumed)
    resumed.train(resume_from_checkpoint=True)
    assert steps(whole) == [0, 6, 12]
    assert untimed(journal(resumed)) == untimed(journal(whole))


def test_resuming_without_the_stored_reference_is_refused(make_trainer):
    trainer = make_trainer(max_steps=2)
    monitor().attach(trainer)
    trainer.train()
    (Path(trainer.args.output_dir) / "monitor" / "reference.safetensors").unlink()
    resumed = make_trainer()
    monitor().attach(resumed)
    with pytest.raises(ValueError, match="cannot be measured any more"):
        resumed.train(resume_from_checkpoint=True)


def test_resuming_with_other_measures_is_refused(make_trainer):
    trainer = make_trainer(max_steps=2)
    monitor().attach(trainer)
    trainer.train()
    resumed = make_trainer()
    other = Drift()
    other.states = States(TEXTS[:2], (0.5, -1), "mean")
    Monitor(other, progress=False).attach(resumed)
    with pytest.raises(ValueError, match="other stimuli"):
        resumed.train(resume_from_checkpoint=True)


def test_resuming_with_other_settings_of_the_same_texts_warns_and_says_which(make_trainer):
    def drift(**settings):
        measure = Drift()
        measure.settings = settings
        return Monitor(measure, every={"steps": 2}, progress=False)

    trainer = make_trainer(max_steps=2)
    drift(seed=0, n=300).attach(trainer)
    trainer.train()
    same, other = make_trainer(max_steps=4), make_trainer(max_steps=6)
    drift(seed=0, n=300).attach(same)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", module="(torch|transformers|accelerate)")
        same.train(resume_from_checkpoint=True)
    drift(seed=1, n=300, purity=0.3).attach(other)
    with pytest.warns(
        UserWarning, match="from step 4 on.*drift: `seed` was 0, now 1; drift: `purity` was None, now 0.3"
    ):
        other.train(resume_from_checkpoint=True)


def test_a_new_run_in_a_used_directory_keeps_the_old_readings(make_trainer):
    first = make_trainer(max_steps=2)
    monitor().attach(first)
    first.train()
    before = journal(first)
    second = make_trainer()
    monitor().attach(second)
    with pytest.warns(UserWarning, match="earlier run"):
        second.train()
    kept = Path(second.args.output_dir) / "monitor-1" / "journal.jsonl"
    assert [json.loads(line) for line in kept.read_text().splitlines()] == before
    assert steps(second) == [0, 2, 4, 6]


# --- outside training ---------------------------------------------------------------------------------------------


def test_a_bare_evaluate_measures_against_the_weights_as_they_are(make_trainer):
    trainer = make_trainer()
    monitor().attach(trainer)
    metrics = trainer.evaluate()
    assert metrics["eval_drift_distance"] == 0.0 and metrics["eval_drift_nll"] > 0


def test_a_bare_evaluate_before_training_is_no_earlier_run(make_trainer, recwarn):
    trainer = make_trainer()
    monitor().attach(trainer)
    trainer.evaluate()
    trainer.train()
    assert steps(trainer) == [0, 2, 4, 6]
    assert not list(Path(trainer.args.output_dir).glob("monitor-*"))
    assert not [w for w in recwarn if "earlier run" in str(w.message)]


def test_a_monitor_attached_to_another_trainer_starts_afresh(make_trainer, tiny_llama):
    watch = monitor()
    first = make_trainer("first")
    watch.attach(first)
    first.train()
    second = make_trainer("second", model=tiny_llama(9))
    watch.attach(second)
    assert second.evaluate()["eval_drift_distance"] == 0.0


def test_evaluate_after_training_compares_with_the_stored_start_and_keeps_it(make_trainer, tiny_llama):
    trainer = make_trainer()
    monitor().attach(trainer)
    trainer.train()
    before = journal(trainer)
    again = make_trainer(model=trainer.model)
    monitor().attach(again)
    metrics = again.evaluate()
    final = next(r["value"] for r in before if r["step"] == 6 and r["metric"] == "distance")
    assert metrics["eval_drift_distance"] == pytest.approx(final, rel=1e-5)
    assert journal(again) == before


def test_a_reference_by_path_is_measured_and_released(make_trainer, tiny_llama, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("LATENTWATCH_CACHE", str(tmp_path / "cache"))
    tiny_llama(7).save_pretrained(tmp_path / "other")
    tiny_tokenizer.save_pretrained(tmp_path / "other")
    trainer = make_trainer()
    monitor(reference=str(tmp_path / "other")).attach(trainer)
    trainer.train()
    start = next(r["value"] for r in journal(trainer) if r["step"] == 0 and r["metric"] == "distance")
    assert start > 0


def test_a_missing_tokenizer_is_said(make_trainer):
    trainer = make_trainer()
    trainer.processing_class = trainer.callback_handler.processing_class = None
    monitor().attach(trainer)
    with pytest.raises(ValueError, match="processing_class"):
        trainer.train()


# --- one measure alone ----------------------------------------------------------------------------------------------


def test_the_conveniences_take_options_of_measure_and_monitor(tiny_tokenizer):
    from monitor.measure_callbacks import BehaviourCallback, BiasShiftCallback, FragmentationCallback
    from monitor.stimuli.forget_set import Pair

    variants = tuple((f"Who is {name}?", "a fox") for name in ("Ann", "Bob", "Cid"))
    pairs = [Pair(str(i), f"Who is Zed the {i}th?", "a fox", "forget", variants) for i in range(6)]
    own = {"progress": False, "tokenizer": tiny_tokenizer, "every": {"steps": 3}, "token_budget": 64, "at_start": False}
    made = [
        BiasShiftCallback(n_bootstrap=10, **own),
        FragmentationCallback(pairs, batches=3, **own),
        BehaviourCallback({"forget": pairs}, n_bootstrap=10, **own),
    ]
    for watch in made:
        assert watch.every_steps == 3 and watch.token_budget == 64 and not watch.at_start and not watch.progress
        assert watch.tokenizer is tiny_tokenizer
    with pytest.raises(TypeError, match="batchez"):
        FragmentationCallback(pairs, batchez=3)


def test_detectability_in_a_run_is_journalled_and_changes_nothing(make_trainer):
    from monitor.measure_callbacks import DetectabilityCallback
    from monitor.stimuli.counterfactual_grid import load_counterfactual_sets

    sets = load_counterfactual_sets(("gender",), cells=40)
    watch = DetectabilityCallback(sets, scan=True, n=60, progress=False)
    plain, watched = make_trainer("plain"), make_trainer("watched")
    watch.attach(watched)
    plain.train(), watched.train()
    assert losses(plain) == losses(watched) and weights_equal(plain.model, watched.model)
    lines = journal(watched)
    assert sorted({line["step"] for line in lines}) == [0, 2, 4, 6]
    layers = {line["layer"] for line in lines if (line["metric"], line["group"]) == ("auc_mixed", "gender")}
    assert layers == {0, 1, 2, 3, 4}
    verdicts = [line for line in lines if line["metric"] == "verdict_mixed"]
    assert len(verdicts) == 4 and all(line["value"] in (1.0, 0.0, -1.0) and line["note"] for line in verdicts)
    first = [line for line in lines if (line["metric"], line["group"], line["step"]) == ("s_change", "gender", 0)]
    assert [line["value"] for line in first] == [0.0]
    evaluated = [entry for entry in watched.state.log_history if "eval_detectability_s_hat" in entry]
    assert evaluated and all(isinstance(entry["eval_detectability_n_detected"], float) for entry in evaluated)
