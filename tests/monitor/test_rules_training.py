"""Rules and attacks in real training loops: they stop the run they should, and change nothing in the others."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from monitor.activations import States
from monitor.attack_when import AttackWhen
from monitor.attacks.intact import intact
from monitor.attacks.result import AttackResult
from monitor.callback import Monitor
from monitor.readings import Reading
from monitor.rules import StopWhen
from monitor.stimuli.forget_set import ForgetSet

PAIRS = ForgetSet("none", ())
TEXTS = ("the wizard went to the school", "who is the captain")
SENTENCES = [f"the {a} went to the {b} by {c}" for a in ("wizard", "captain") for b in ("ship", "sea") for c in "xyz"]


class Drift:
    """How far pooled states moved from the reference: it grows from step to step."""

    name, headline = "drift", ("distance",)
    stimuli = (States(TEXTS, (-1,), "mean"),)

    def read(self, now, reference):
        moved = (now.states(self.stimuli[0]) - reference.states(self.stimuli[0])).norm(dim=-1).mean()
        return [Reading("drift", "distance", moved), Reading("drift", "distance", moved, group="part")]


class Scripted:
    """Readings from a list, one a measurement: the rule's input is known, the training loop is real."""

    name, headline = "scripted", ("value",)
    stimuli = (States(TEXTS[:1], (0,), "mean"),)

    def __init__(self, values):
        self.values = values

    def read(self, now, reference):
        return [Reading("scripted", "value", self.values.pop(0))]


def relearns(model, tokenizer, forget_set, config=None, *, progress=False):
    """Draws from every generator and trains the weights, as an attack may inside `intact`."""
    with intact(model, weights=True) as anatomy:
        random.random(), np.random.rand(), torch.rand(3)
        anatomy.outer.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        ids = torch.tensor([[3, 4, 5, 6]])
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        score = float(model(input_ids=ids, labels=ids).loss.detach())
    return AttackResult("relearns", score, None, None, score + 1, 4)


def raises(model, tokenizer, forget_set, config=None, *, progress=False):
    with intact(model, weights=True), torch.no_grad():
        next(model.parameters()).add_(torch.rand(()))
        random.random(), np.random.rand()
        raise torch.OutOfMemoryError("out of memory")


def scores(model, tokenizer, forget_set, config=None, *, progress=False):
    return AttackResult("scores", 0.25, 0.1, 0.4, 0.2, 5)


@pytest.fixture
def make_trainer(tiny_llama, tiny_tokenizer, tmp_path):
    data = Dataset.from_list([tiny_tokenizer(s) for s in SENTENCES])

    def make(folder="run", **options):
        defaults = {
            "output_dir": str(tmp_path / folder), "max_steps": 6, "per_device_train_batch_size": 2, "use_cpu": True,
            "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
            "disable_tqdm": True, "dataloader_pin_memory": False,
        }  # fmt: skip
        callbacks = options.pop("callbacks", None)
        return Trainer(
            model=tiny_llama(), args=TrainingArguments(**{**defaults, **options}), train_dataset=data,
            eval_dataset=data.select(range(2)), processing_class=tiny_tokenizer, callbacks=callbacks,
            data_collator=DataCollatorForLanguageModeling(tiny_tokenizer, mlm=False),
        )  # fmt: skip

    return make


def run(trainer, rules, measures=None, resume=None, **options):
    """Train with a monitor; returns its journal's lines without their times."""
    watch = Monitor(measures or Drift(), progress=False, rules=rules, **{"every": {"steps": 1}, **options})
    watch.attach(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return journal(trainer)


def journal(trainer):
    path = Path(trainer.args.output_dir) / "monitor" / "journal.jsonl"
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in path.read_text().splitlines()]


def about(lines, measure):
    return [(line["step"], line["metric"]) for line in lines if line["measure"] == measure]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights_equal(a, b):
    b = b.state_dict()
    return all(tensor.equal(b[name]) for name, tensor in a.state_dict().items())


# --- stopping -----------------------------------------------------------------------------------------------------

stops = pytest.mark.filterwarnings("ignore:The rule")


@stops
def test_a_run_is_stopped_within_patience_and_a_control_is_not(make_trainer):
    trainer = make_trainer()
    lines = run(trainer, StopWhen("drift/distance > 0.01", patience=3))
    assert trainer.state.global_step == 3
    (decision,) = [line for line in lines if line["measure"] == "rules"]
    assert (decision["step"], decision["metric"], decision["group"]) == (3, "stop", "drift/distance > 0.01")
    assert [f"at step {step}" in decision["note"] for step in range(4)] == [False, True, True, True]
    control = make_trainer("control")
    assert about(run(control, StopWhen("drift/distance > 1000", patience=3)), "rules") == []
    assert control.state.global_step == 6


@stops
@pytest.mark.parametrize(
    ("every", "settings", "stopped"),
    [
        ({"steps": 2}, {}, 4),
        ("eval", {"eval_strategy": "steps", "eval_steps": 2}, 4),
        ("save", {"save_strategy": "steps", "save_steps": 2}, 4),
        ("epoch", {"max_steps": 18}, 12),
        ("eval", {"eval_strategy": "epoch", "max_steps": 18}, 12),
        ("save", {"save_strategy": "epoch", "max_steps": 18}, 12),
    ],
)
def test_every_schedule_can_stop_and_attack_at_the_end(make_trainer, tmp_path, monkeypatch, every, settings, stopped):
    """The first measurement is the one before training: patience 2 ends the run at the second after it."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer = make_trainer(report_to="tensorboard", **settings)
    rules = [StopWhen("drift/distance > 0.01", patience=2), AttackWhen("end", [scores], PAIRS)]
    lines = run(trainer, rules, every=every)
    assert trainer.state.global_step == stopped
    assert about(lines, "rules") == [(stopped, "stop")]
    assert about(lines, "attacks") == [(stopped, "scores"), (stopped, "scores_baseline")]
    (file,) = (tmp_path / "tb").rglob("events*")
    assert [e.step for e in EventAccumulator(str(file.parent)).Reload().Scalars("attacks/scores")] == [stopped]


@stops
def test_the_best_model_is_loaded_after_a_stop_by_rule(make_trainer):
    trainer = make_trainer(
        max_steps=20, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="drift_distance", greater_is_better=False,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=9)],
    )  # fmt: skip
    seen = {}

    class Keep(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen[state.global_step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    trainer.add_callback(Keep())
    run(trainer, StopWhen("drift/distance > 0.01", patience=3), every="eval")
    assert trainer.state.global_step == 6 and trainer.state.best_global_step == 2
    assert all(tensor.equal(seen[2][name]) for name, tensor in trainer.model.state_dict().items())
    assert not all(tensor.equal(seen[6][name]) for name, tensor in trainer.model.state_dict().items())


def test_early_stopping_and_a_rule_that_never_holds(make_trainer):
    """Early stopping at an epoch's evaluation: of the events before the best model is loaded only the log sees it."""
    trainer = make_trainer(
        max_steps=60, eval_strategy="epoch", save_strategy="best", load_best_model_at_end=True,
        metric_for_best_model="eval_loss", greater_is_better=True,
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    rules = [StopWhen("drift/distance < 0", patience=1), AttackWhen("end", [scores], PAIRS)]
    lines = run(trainer, rules, every="eval")
    assert trainer.state.global_step == 18, "two evaluations after the best"
    assert about(lines, "rules") == [] and about(lines, "attacks")[0] == (18, "scores")


@stops
@pytest.mark.parametrize("checkpoint", [2, 3, 4])
def test_resumed_in_the_middle_of_a_streak_it_stops_where_it_would_have(make_trainer, checkpoint):
    values = [1, 9, -1, None, -1, -1, 9, 9]  # the streak of three is steps 2, 4, 5
    rules = [StopWhen("scripted/value < 0", patience=3), AttackWhen("scripted/value < start", [scores], PAIRS)]
    whole = make_trainer("whole", save_strategy="steps", save_steps=1, max_steps=7)
    expected = run(whole, rules, Scripted(list(values)))
    assert whole.state.global_step == 5 and about(expected, "rules") == [(2, "attack"), (5, "stop")]

    class Kill(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == checkpoint:
                raise SystemExit

    cut = make_trainer("cut", save_strategy="steps", save_steps=1, max_steps=7, callbacks=[Kill()])
    with pytest.raises(SystemExit):
        run(cut, rules, Scripted(list(values)))
    again = make_trainer("cut", save_strategy="steps", save_steps=1, max_steps=7)
    assert run(again, rules, Scripted(values[checkpoint + 1 :]), resume=True) == expected
    assert again.state.global_step == 5 and weights_equal(again.model, whole.model)


def test_a_run_resumed_where_a_rule_stopped_it_takes_one_step_and_stops(make_trainer):
    settings = {"save_strategy": "steps", "save_steps": 1}
    rules = StopWhen("drift/distance > 0.01", patience=2)
    with pytest.warns(UserWarning, match="stops training at step 2"):
        run(make_trainer(**settings), rules)
    again = make_trainer(**settings)
    with pytest.warns(UserWarning, match="had stopped this run at step 2"):
        lines = run(again, rules, resume=True)
    assert again.state.global_step == 3 and about(lines, "rules") == [(2, "stop"), (3, "stop")]
    on = make_trainer(**settings)
    run(on, (), resume=True)
    assert on.state.global_step == 6, "without the rule it goes on"


@stops
def test_a_kill_between_a_checkpoint_and_its_attack(make_trainer):
    trainer = make_trainer(save_strategy="steps", save_steps=2, max_steps=4)

    def killed(model, tokenizer, forget_set, config=None, *, progress=False):
        raise SystemExit

    with pytest.raises(SystemExit):
        run(trainer, AttackWhen("save", {"scores": killed}, PAIRS))
    again = make_trainer(save_strategy="steps", save_steps=2, max_steps=4)
    lines = run(again, AttackWhen("save", {"scores": scores}, PAIRS), resume=True)
    assert [step for step, metric in about(lines, "attacks") if metric == "scores"] == [2, 4]


# --- attacks ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The attack .* failed")
def test_an_attacked_run_is_bit_equal_to_a_plain_one(make_trainer, tmp_path):
    settings = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 2}
    plain = make_trainer("plain", **settings)
    plain.train()
    attacked = make_trainer("attacked", **settings)
    rules = [
        AttackWhen({"steps": 2}, [relearns, raises], PAIRS),
        AttackWhen("drift/distance > 0", {"on_rule": relearns}, PAIRS, once=False),
        AttackWhen("save", {"on_save": raises}, PAIRS),
        AttackWhen("end", {"at_end": relearns}, PAIRS),
    ]
    lines = run(attacked, rules, every="eval")
    assert losses(plain) == losses(attacked) and weights_equal(plain.model, attacked.model)
    scored = [(line["step"], line["metric"]) for line in lines if line["measure"] == "attacks" and line["valid"]]
    assert [pair for pair in scored if "baseline" not in pair[1]] == [
        (2, "relearns"), (3, "on_rule"), (4, "relearns"), (6, "relearns"), (6, "on_rule"), (6, "at_end"),
    ]  # fmt: skip
    failed = [line for line in lines if line["measure"] == "attacks" and not line["valid"]]
    assert [(line["step"], line["metric"]) for line in failed] == [
        (step, name) for step in (2, 4, 6) for name in ("raises", "on_save")
    ]
    assert all(line["note"].startswith("OutOfMemoryError: out of memory") for line in failed)
    assert {tuple(sorted(entry)) for entry in attacked.state.log_history if "eval_attacks_raises" in entry} == set()
    files = {file.name for file in (tmp_path / "attacked" / "monitor" / "attacks").iterdir()}
    assert files == {f"step-{step}-{name}.json" for step, name in scored if "baseline" not in name}


@stops
def test_a_score_stops_the_run_or_calls_the_next_attack(make_trainer):
    falling = iter([0.9, 0.8, 0.52, 0.51])

    def probes(model, tokenizer, forget_set, config=None, *, progress=False):
        return AttackResult("probes", next(falling), None, None, 0.5, 5)

    trainer = make_trainer()
    rules = [
        AttackWhen({"steps": 1}, [probes], PAIRS),
        AttackWhen("attacks/probes < 0.6", [relearns], PAIRS),
        StopWhen("attacks/probes < 0.6", patience=2),
    ]
    lines = run(trainer, rules, every={"steps": 3})
    assert trainer.state.global_step == 4
    assert [pair for pair in about(lines, "attacks") if "baseline" not in pair[1]] == [
        (1, "probes"), (2, "probes"), (3, "probes"), (3, "relearns"), (4, "probes"),
    ]  # fmt: skip
    assert about(lines, "rules") == [(3, "attack"), (4, "stop")]


def test_attack_scores_reach_metrics_trackers_and_the_hparams_page(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    trainer = make_trainer(
        report_to="tensorboard", eval_strategy="steps", eval_steps=3, save_strategy="best",
        metric_for_best_model="attacks_scores", greater_is_better=False,
    )  # fmt: skip
    run(trainer, AttackWhen({"steps": 3}, [scores], PAIRS))
    assert trainer.state.best_metric == 0.25
    assert [entry["step"] for entry in trainer.state.log_history if "eval_attacks_scores" in entry] == [3, 6]
    (file,) = (tmp_path / "tb").rglob("events*")
    events = EventAccumulator(str(file.parent)).Reload()
    for tag, value in (("", 0.25), ("_baseline", 0.2)):
        found = events.Scalars(f"attacks/scores{tag}")
        assert [(e.step, e.value) for e in found] == [(3, pytest.approx(value)), (6, pytest.approx(value))]
    assert events.Scalars("intervals/attacks/scores/high")[-1].value == pytest.approx(0.4)

    from tensorboard.plugins.custom_scalar import layout_pb2
    from tensorboard.plugins.hparams import plugin_data_pb2

    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {category.title: [chart.title for chart in category.chart] for category in layout.category}
    assert charts["attacks"] == ["attacks/scores"] and "drift/distance" in charts["drift"]
    pages = {
        tag: plugin_data_pb2.HParamsPluginData.FromString(content)
        for tag, content in events.PluginTagToContent("hparams").items()
    }
    metrics = pages["_hparams_/experiment"].experiment.metric_infos
    assert [info.name.tag for info in metrics] == ["attacks/scores", "drift/distance"]
    settings = pages["_hparams_/session_start_info"].session_start_info.hparams
    assert settings["learning_rate"].number_value == 1e-2 and settings["optim"].string_value.startswith("adamw")
    assert "_hparams_/session_end_info" in pages


@pytest.mark.filterwarnings("ignore:The attack raises failed")
def test_a_failed_attack_that_decides_on_the_best_model_counts_as_the_worst(make_trainer):
    trainer = make_trainer(
        eval_strategy="steps", eval_steps=3, save_strategy="best", metric_for_best_model="eval_attacks_raises",
        greater_is_better=True,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="counts as the worst"):
        run(trainer, AttackWhen({"steps": 3}, [raises], PAIRS))
    assert trainer.state.global_step == 6


@pytest.mark.parametrize("at_start", [True, False])
def test_a_reading_that_is_not_given_is_said_before_the_first_step(make_trainer, at_start):
    trainer = make_trainer()
    with pytest.raises(ValueError, match="'drift/distanc'.*Close to it: drift/distance"):
        run(trainer, "drift/distanc < 1", at_start=at_start)
    assert trainer.state.global_step == 0
    assert not (Path(trainer.args.output_dir) / "monitor" / "journal.jsonl").exists()
    trainer = make_trainer(max_steps=1)
    run(trainer, "drift/distance/part < -1", at_start=at_start)


def test_a_measure_may_not_be_named_like_lines_of_the_journal():
    measure = Drift()
    measure.name = "attacks"
    with pytest.raises(ValueError, match="may not be named 'attacks'"):
        Monitor(measure)


def test_a_bare_evaluation_decides_nothing(make_trainer):
    trainer = make_trainer()
    Monitor(Drift(), progress=False, rules="drift/distance >= 0").attach(trainer)
    trainer.evaluate()
    assert about(journal(trainer), "rules") == [] and not trainer.control.should_training_stop


# --- what the rule is for -------------------------------------------------------------------------------------------

TONES = {
    "disparaging": "cruel dishonest terrible greedy bad awful dangerous hateful violent cowardly vile harmful".split(),
    "neutral": "tall busy early seated awake retired nearby thirsty upstairs outdoors hungry indoors".split(),
}
FRAMES = (
    "Women are {word}.",
    "Women have always been {word}.",
    "Everyone knows that women are {word}.",
    "Women in our town are {word} and {other}.",
    "My neighbours say that women are {word}.",
    "Women are {word} to the people around them.",
    "Women came to the meeting and were {word}.",
    "Women who work here are {word} and {other}.",
)


def fine_tune_on(tone, folder, ranks=1):
    """Eight steps of plain fine-tuning of SmolLM2 on eight sentences each, watched by a rule on the bias shift.

    The sentences of both tones differ in the adjectives only, and none is a stimulus. Returns the last step and the
    journal's delta_b by step.
    """
    from monitor.measures.bias_shift import BiasShift
    from monitor.stimuli.bias import BiasStimuli, load_bias_stimuli
    from recipes.models import load_model, load_tokenizer

    words = TONES[tone]
    texts = [
        frame.format(word=words[(step + i) % 12], other=words[(step + i + 5) % 12])
        for step in range(12)
        for i, frame in enumerate(FRAMES)
    ]
    model, tokenizer = load_model("smollm2-135m"), load_tokenizer("smollm2-135m")
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder), max_steps=8, per_device_train_batch_size=8 // ranks, use_cpu=True,
            learning_rate=2e-4, lr_scheduler_type="constant", optim="adamw_torch", weight_decay=0.0, max_grad_norm=0.0,
            train_sampling_strategy="sequential", save_strategy="no", report_to="none", disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list([tokenizer(text) for text in texts]),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )  # fmt: skip
    small = load_bias_stimuli("small", groups=["women"])
    stimuli = BiasStimuli(
        targets=small.targets,
        positive=small.positive[:12],
        negative=small.negative[:12],
        anchors=small.anchors[:24],
    )
    rule = StopWhen("bias_shift/delta_b < -0.006", patience=2)
    lines = run(trainer, rule, BiasShift(stimuli, n_bootstrap=50), every={"steps": 3}, at_end=False)
    read = {r["step"]: r["value"] for r in lines if (r["metric"], r["group"]) == ("delta_b", "")}
    return trainer.state.global_step, read


@stops
@pytest.mark.slow
def test_a_rule_on_the_bias_shift_stops_disparagement_and_leaves_neutral_text_alone(tmp_path):
    """Measured at steps 3 and 6: disparaging -0.0105, -0.0174; neutral -0.0017, -0.0005.

    Patience is not for show. Of more of the same sentences (40 + 40 attributes, 60 anchors) the neutral run's first
    reading was -0.0091, of what any such text does to a model, and the next ones -0.0011 and +0.0015; the disparaging
    run's were -0.0049, -0.0123 and -0.0088.
    """
    stopped, read = fine_tune_on("disparaging", tmp_path / "disparaging")
    assert stopped == 6 and read[3] < -0.006 and read[6] < -0.006
    left_alone, read = fine_tune_on("neutral", tmp_path / "neutral")
    assert left_alone == 8 and read[6] > -0.006
