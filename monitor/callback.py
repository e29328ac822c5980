"""The monitor: when to measure, and whom to tell. The only file that knows the Trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_utils import SaveStrategy

from monitor.activations import DEFAULT_TOKEN_BUDGET, Activations, plan_activations, run_plan
from monitor.anatomy import find_anatomy
from monitor.attack_run import drop_results_after, result_file, run_attack
from monitor.attack_when import AttackWhen
from monitor.decisions import Decisions, Due, Rule
from monitor.journal import ATTACKS, Journal, new_journal
from monitor.measure_checks import check_measures
from monitor.measure_settings import FILE_NAME as SETTINGS
from monitor.measure_settings import warn_of_changes, write_settings
from monitor.measures.measure import Measure
from monitor.ranks import barrier, everywhere, rank
from monitor.readings import Reading
from monitor.reference import adapter_off, load_stored, other_reference
from monitor.requests import Request, check_layers
from monitor.rule_checks import check_conditions, parse_rules, warn_of_idle
from monitor.schedule import every_steps, measured_after_checkpoint
from monitor.telling import headlines, log, stand_in_for_best
from monitor.tensorboard import find_writer, write_hparams, write_layout, write_scalars

FOLDER = "monitor"


class Monitor(TrainerCallback):
    """Measure what the model encodes while it is trained, against a frozen reference.

    Parameters
    ----------
    measures : Measure or sequence of Measure
        What to measure; all of them share one activation pass.
    reference : {"initial", "adapter_off"}, path, Hub id or model, default "initial"
        The frozen side. "initial" is the weights training starts from, measured before the first step and kept in the
        output directory, so that a resumed run compares with the true start. "adapter_off" is a PEFT model with its
        adapters switched off. Anything else is another model, measured once and released.
    every : {"eval", "save", "epoch"} or {"steps": n}, default "eval"
        When to measure: at every evaluation, checkpoint, end of an epoch, or every n optimiser steps.
    at_start, at_end : bool, default True
        Measure before the first step, and after the last.
    tokenizer : PreTrainedTokenizerBase, optional
        By default the Trainer's `processing_class`.
    token_budget : int, default 2048
        Padded tokens in a batch of the activation pass.
    progress : bool, default True
        Show a progress bar while measuring, on the first process only.
    rules : str, StopWhen, AttackWhen or a sequence of them, default ()
        What follows from readings: ``"bias_shift/delta_b < -0.02"`` (short for `StopWhen` of it) stops training,
        `AttackWhen` attacks the model. Decided by the first process, after each measurement.

    Notes
    -----
    Readings go to ``<output_dir>/monitor/journal.jsonl``, to the metrics of `on_evaluate` as
    ``eval_<measure>_<metric>`` (so that `metric_for_best_model` and `EarlyStoppingCallback` work on them) and, once
    `attach` has given the monitor its trainer, to TensorBoard through the Trainer's writer and to every other tracker.

    A monitored run's weights and losses are bit-equal to the unmonitored run's: the pass draws no random numbers and
    restores what it touches. So does a run that is attacked on the way, and an attack that fails is a reading that says
    so. Decisions and what attacks found are lines of the journal, too (measures ``rules`` and ``attacks``), and the
    state of rules is read from it when a run is resumed. A resumed run that a rule had stopped at that very checkpoint
    takes one more step, before which the Trainer cannot be stopped, and stops.
    """

    def __init__(
        self,
        measures: Measure | Sequence[Measure],
        reference: str | os.PathLike | nn.Module = "initial",
        every: str | Mapping[str, int] = "eval",
        *,
        at_start: bool = True,
        at_end: bool = True,
        tokenizer=None,
        token_budget: int = DEFAULT_TOKEN_BUDGET,
        progress: bool = True,
        rules: str | Rule | Sequence[str | Rule] = (),
    ) -> None:
        self.measures = check_measures(measures)
        self.every_steps = every_steps(every)
        self.every = every if isinstance(every, str) else "steps"
        self.reference = reference
        self.at_start, self.at_end = at_start, at_end
        self.tokenizer = tokenizer
        self.token_budget = token_budget
        self.progress = progress
        self.rules = parse_rules(rules, self.measures)
        self.trainer = None
        self._forget_run()

    def _forget_run(self) -> None:
        """What belongs to one trainer: a monitor that is attached to another one starts afresh."""
        self.readings: list[Reading] = []  # of the last measurement
        self.attack_readings: list[Reading] = []  # of the last step with attacks
        self._plan = None
        self._reference: Activations | None = None
        self._journal: Journal | None = None
        self._decisions: Decisions | None = None
        self._measured_step: int | None = None
        self._attacked_step: int | None = None
        self._training = False
        self._finished = True
        self._names_checked = False
        self._layout_written = False
        self._tags: set[str] = set()  # of the headline scalars that TensorBoard has got
        self._evaluated_only = False  # the journal holds nothing but a bare evaluation by this object

    def attach(self, trainer) -> Monitor:
        """Add the monitor to `trainer` and give it the trainer's writer and trackers.

        It goes before an `EarlyStoppingCallback`, which would not see the readings otherwise. Returns the monitor. A
        layer that the trainer's model has not is a ValueError here, and not only when training begins.
        """
        handler = trainer.callback_handler
        if trainer.model is not None:  # with `model_init` there is none yet
            check_layers(self._asked(), find_anatomy(trainer.model).n_layers)
        if self.trainer is not None and self.trainer is not trainer:
            self._forget_run()
        if self not in handler.callbacks:
            trainer.add_callback(self)
            handler.callbacks.remove(self)
            early = [i for i, c in enumerate(handler.callbacks) if isinstance(c, EarlyStoppingCallback)]
            handler.callbacks.insert(min(early, default=len(handler.callbacks)), self)
        self.trainer = trainer
        return self

    # --- the Trainer's events -----------------------------------------------------------------------------------

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **kwargs):
        self._training = True
        self._finished = True  # until a step has been taken there is no end to look at
        self._prepare(args, model, processing_class)
        step = state.global_step
        if state.is_world_process_zero:
            if step > 0:
                self._journal.rewind(step)
                drop_results_after(self._folder(args), step)
                warn_of_changes(self._folder(args) / SETTINGS, self.measures, step)
            elif self._evaluated_only:
                self._journal.rewind(-1)
            else:
                self._journal = new_journal(self._journal.path)
            write_settings(self._folder(args) / SETTINGS, self.measures)
            warn_of_idle(self.rules, state.max_steps, args.save_strategy != SaveStrategy.NO)
        barrier()
        self._measured_step = self._attacked_step = None
        self._reference = None
        now = self._obtain_reference(args, model, step)
        self._evaluated_only = False
        self._decisions = Decisions(self.rules, self._journal, first=state.is_world_process_zero)
        if (step == 0 and self.at_start) or self._missed(args, state):
            self._measure(args, state, control, model, now=now)
        self._check_rules_unmeasured()
        if step > 0:
            self._attack(self._decisions.resume(control, step), args, state, control, model)
        return control

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self._finished = False
        if self.every == "steps" and state.global_step % self.every_steps == 0:
            self._measure(args, state, control, model)
        self._attack(self._decisions.scheduled("step", state.global_step), args, state, control, model)
        if control.should_training_stop:
            self._finish(args, state, control, model)
        return control

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        if self.every == "epoch":
            self._measure(args, state, control, model)
        # An early stop leaves the loop through here, before the best model is loaded.
        if control.should_training_stop:
            self._finish(args, state, control, model)
        return control

    def on_save(self, args, state, control, model=None, **kwargs):
        if self._training:
            if self.every == "save":
                self._measure(args, state, control, model)
            self._attack(self._decisions.scheduled("save", state.global_step), args, state, control, model)
        return control

    def on_evaluate(self, args, state, control, model=None, metrics=None, processing_class=None, **kwargs):
        if not self._training:
            self._evaluate_outside_training(args, state, model, processing_class)
        elif self.every == "eval":
            self._measure(args, state, control, model)
        if metrics is not None:
            # In place: this is what best-model bookkeeping and early stopping read.
            wanted = self._headline_metrics()
            if self._attacked_step == state.global_step:
                metrics.update(headlines(self.attack_readings, wanted))
            if self._measured_step == state.global_step:
                metrics.update(headlines(self.readings, wanted))
            else:
                wanted = {ATTACKS: wanted[ATTACKS]}
            stand_in_for_best(args, metrics, wanted)
        return control

    def on_log(self, args, state, control, logs=None, model=None, **kwargs):
        if self._training and "train_runtime" in (logs or {}):
            # The summary of the training: the last event before the best model is loaded and TensorBoard's writer is
            # closed, and the only one after an evaluation or a checkpoint that an epoch's end brought.
            self._finish(args, state, control, model)
            writer = self._writer(state)
            if writer is not None and self._tags:
                write_hparams(writer, args, model, sorted(self._tags))
        return control

    def on_train_end(self, args, state, control, **kwargs):
        self._training = False
        return control

    def _finish(self, args, state, control, model) -> None:
        """The last measurement and attacks, at whichever event first sees the end."""
        if self._finished:
            return
        self._finished = True
        if self.at_end:
            self._measure(args, state, control, model)
        self._attack(self._decisions.scheduled("end", state.global_step), args, state, control, model)

    def _missed(self, args, state) -> bool:
        """Whether the run was killed between writing the checkpoint it resumes from and measuring it."""
        due = state.global_step > 0 and measured_after_checkpoint(self.every, args, state)
        return due and not everywhere(state.global_step in self._journal.steps)

    # --- measuring ----------------------------------------------------------------------------------------------

    def _measure(self, args, state, control, model, now: Activations | None = None) -> None:
        step = state.global_step
        if self._measured_step == step:
            return
        if now is None:
            now = self._run(model, f"step {step}")
        self._read(now)
        self._record(state)
        self._tell(state, model, self.readings)
        self._attack(self._decisions.follow(control, step), args, state, control, model)

    def _read(self, now: Activations) -> None:
        self.readings = [reading for measure in self.measures for reading in measure.read(now, self._reference)]
        if not self._names_checked:
            check_conditions(self.rules, self.readings, warn=rank() == 0)
            self._names_checked = True

    def _record(self, state) -> None:
        """Journal the readings, and in training what the rules make of them."""
        step = self._measured_step = state.global_step
        if state.is_world_process_zero and step not in self._journal.steps:
            decided = self._decisions.decide(step, self.readings) if self._training else []
            self._journal.append(step, state.epoch, [*self.readings, *decided])

    def _tell(self, state, model, readings: Sequence[Reading]) -> None:
        if self.trainer is None:
            return
        wanted = self._headline_metrics()
        if metrics := headlines(readings, wanted):
            log(self.trainer, model, metrics)
        writer = self._writer(state)
        if writer is None:
            return
        if not self._layout_written and self.readings:
            write_layout(writer, self.readings, wanted[ATTACKS])
            self._layout_written = True
        write_scalars(writer, readings, state.global_step)
        self._tags |= {r.name for r in readings if r.valid and not r.group and r.metric in wanted[r.measure]}

    def _writer(self, state):
        return find_writer(self.trainer) if self.trainer is not None and state.is_world_process_zero else None

    def _headline_metrics(self) -> dict[str, tuple[str, ...]]:
        """Of each measure, and of attacks."""
        attacks = (name for rule in self.rules if isinstance(rule, AttackWhen) for name in rule.names)
        measured = {measure.name: tuple(measure.headline) for measure in self.measures}
        return {**measured, ATTACKS: tuple(dict.fromkeys(attacks))}

    def _evaluate_outside_training(self, args, state, model, processing_class) -> None:
        """A bare `trainer.evaluate()`: measure, but never disturb what a training run stored."""
        self._prepare(args, model, processing_class)
        if self._reference is None:
            stored = self._folder(args) / "reference.safetensors"
            if self.reference == "initial" and not everywhere(stored.is_file()):
                self._reference = run_plan(self._callable(model), self._plan, token_budget=self.token_budget)
            else:
                self._obtain_reference(args, model, step=max(1, state.global_step))
        now = self._run(model, "evaluation")
        self._evaluated_only = state.is_world_process_zero and not self._journal.lines
        self._read(now)
        self._record(state)
        self._tell(state, model, self.readings)

    # --- rules and attacks ---------------------------------------------------------------------------------------

    def _attack(self, due: Due, args, state, control, model) -> None:
        """Run attacks, each with what started it; one that has run at this step is not run again."""
        step = state.global_step
        if due and self._attacked_step != step:
            self._attacked_step, self.attack_readings = step, []
        waiting = list(due)
        while waiting:
            attack, trigger = waiting.pop(0)
            if any(reading.metric == attack.name for reading in self.attack_readings):
                continue
            readings = run_attack(
                attack, self._callable(model), self._tokenizer, trigger=trigger, seed=args.seed, progress=self.progress,
                file=result_file(self._folder(args), step, attack.name),
            )  # fmt: skip
            if state.is_world_process_zero:
                self._journal.append(step, state.epoch, [*readings, *self._decisions.decide(step, readings)])
            self.attack_readings += readings
            self._tell(state, model, readings)
            waiting += self._decisions.follow(control, step)  # of rules on the attack's score

    def _check_rules_unmeasured(self) -> None:
        """Before the first step also where nothing is measured there: on the journal's names, or the reference's."""
        known = {"/".join(filter(None, (r["measure"], r["metric"], r["group"]))) for r in self._journal.lines}
        conditions = [rule.condition for rule in self.rules if rule.condition is not None]
        conditions = [condition for condition in conditions if condition.measure != ATTACKS]
        if not self._names_checked and any(condition.name not in known for condition in conditions):
            asked = [m for m in self.measures if any(condition.measure == m.name for condition in conditions)]
            readings = [r for measure in asked for r in measure.read(self._reference, self._reference)]
            check_conditions(self.rules, readings, warn=rank() == 0)
        self._names_checked = True

    # --- reference and files ------------------------------------------------------------------------------------

    def _prepare(self, args, model, processing_class) -> None:
        if self._journal is None or self._journal.path.parent != self._folder(args):
            self._journal = Journal(self._folder(args) / "journal.jsonl")
        if self._plan is not None:
            return
        tokenizer = self.tokenizer if self.tokenizer is not None else processing_class
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor holds one
        if tokenizer is None:
            raise ValueError(
                "The monitor needs the model's tokenizer. Give the Trainer `processing_class=tokenizer`, or the "
                "monitor `tokenizer=tokenizer`."
            )
        self._tokenizer = tokenizer
        self._requests = self._asked()
        self._plan = plan_activations(model, tokenizer, self._requests)

    def _asked(self) -> list[Request]:
        return [request for measure in self.measures for request in measure.stimuli]

    def _obtain_reference(self, args, model, step: int) -> Activations | None:
        """Set `_reference`; returns the current model's activations if they were read on the way."""
        path = self._folder(args) / "reference.safetensors"
        if isinstance(self.reference, str) and self.reference == "initial":
            if step > 0:
                self._reference = load_stored(path, self._plan)
                return None
            self._reference = self._run(model, "the initial model")
            if rank() == 0:
                self._reference.save(path, reference="initial")
            return self._reference
        if isinstance(self.reference, str) and self.reference == "adapter_off":
            with adapter_off(self._callable(model)):
                self._reference = self._run(model, "the model with its adapter off")
        else:
            anatomy = find_anatomy(model)
            dtype = next(anatomy.inner.parameters()).dtype
            self._reference = other_reference(
                self.reference, self._requests, self._tokenizer, dtype=dtype, device=anatomy.device,
                token_budget=self.token_budget, progress=self._title("the reference"),
            )  # fmt: skip
        if step == 0 and rank() == 0:
            self._reference.save(path, reference=str(self.reference)[:200])
        return None

    def _run(self, model, title: str) -> Activations:
        return run_plan(self._callable(model), self._plan, token_budget=self.token_budget, progress=self._title(title))

    def _callable(self, model) -> nn.Module:
        """What may be called: under FSDP only the wrapper the Trainer trains with."""
        if self.trainer is not None and find_anatomy(self.trainer.model_wrapped).sharded:
            return self.trainer.model_wrapped
        return model

    def _title(self, what: str) -> str | None:
        return f"Monitor: {what}" if self.progress else None

    @staticmethod
    def _folder(args) -> Path:
        return Path(args.output_dir) / FOLDER
