"""The monitor: when to measure, and whom to tell. The only file that knows the Trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback

from monitor.activations import DEFAULT_TOKEN_BUDGET, Activations, plan_activations, run_plan
from monitor.anatomy import find_anatomy
from monitor.journal import Journal
from monitor.measures.measure import Measure
from monitor.ranks import barrier, everywhere, rank
from monitor.readings import Reading
from monitor.reference import adapter_off, load_stored, other_reference
from monitor.tensorboard import find_writer, write_layout, write_scalars
from monitor.undisturbed import evaluation_mode

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

    Notes
    -----
    Readings go to ``<output_dir>/monitor/journal.jsonl``, to the metrics of `on_evaluate` as
    ``eval_<measure>_<metric>`` (so that `metric_for_best_model` and `EarlyStoppingCallback` work on them) and, once
    `attach` has given the monitor its trainer, to TensorBoard through the Trainer's writer and to every other tracker.

    A monitored run's weights and losses are bit-equal to the unmonitored run's: the pass draws no random numbers and
    restores what it touches.
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
    ) -> None:
        self.measures = tuple(measures) if isinstance(measures, (list, tuple)) else (measures,)
        if not self.measures:
            raise ValueError("`measures` is empty; give the monitor at least one measure.")
        for measure in self.measures:
            if isinstance(measure, type) or not all(hasattr(measure, part) for part in ("name", "stimuli", "read")):
                raise ValueError(f"`measures` must be measures such as BiasShift() or a list of them, got {measure!r}.")
        names = [measure.name for measure in self.measures]
        if len(set(names)) < len(names):
            raise ValueError(f"`measures` must have distinct names, got {names}; pass `name=...` to one of them.")
        self.every_steps = _every_steps(every)
        self.every = every if isinstance(every, str) else "steps"
        self.reference = reference
        self.at_start, self.at_end = at_start, at_end
        self.tokenizer = tokenizer
        self.token_budget = token_budget
        self.progress = progress
        self.trainer = None
        self._forget_run()

    def _forget_run(self) -> None:
        """What belongs to one trainer: a monitor that is attached to another one starts afresh."""
        self.readings: list[Reading] = []
        self._plan = None
        self._reference: Activations | None = None
        self._journal: Journal | None = None
        self._measured_step: int | None = None
        self._training = False
        self._layout_written = False
        self._evaluated_only = False  # the journal holds nothing but a bare evaluation by this object

    def attach(self, trainer) -> Monitor:
        """Add the monitor to `trainer` and give it the trainer's writer and trackers.

        It goes before an `EarlyStoppingCallback`, which would not see the readings otherwise. Returns the monitor.
        """
        handler = trainer.callback_handler
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
        self._prepare(args, model, processing_class)
        step = state.global_step
        if state.is_world_process_zero:
            if step > 0:
                self._journal.rewind(step)
            elif self._evaluated_only:
                self._journal.rewind(-1)
            else:
                self._set_previous_run_aside(args)
        barrier()
        self._measured_step = None
        self._reference = None
        now = self._obtain_reference(args, model, step)
        self._evaluated_only = False
        if (step == 0 and self.at_start) or self._missed(args, state):
            self._measure(args, state, model, now=now)
        return control

    def on_step_end(self, args, state, control, model=None, **kwargs):
        due = self.every == "steps" and state.global_step % self.every_steps == 0
        if due or (self.at_end and control.should_training_stop):
            self._measure(args, state, model)
        return control

    def on_epoch_end(self, args, state, control, model=None, **kwargs):
        # An early stop leaves the loop through here, before the best model is loaded.
        if self.every == "epoch" or (self.at_end and control.should_training_stop):
            self._measure(args, state, model)
        return control

    def on_save(self, args, state, control, model=None, **kwargs):
        if self.every == "save" and self._training:
            self._measure(args, state, model)
        return control

    def on_evaluate(self, args, state, control, model=None, metrics=None, processing_class=None, **kwargs):
        if not self._training:
            self._evaluate_outside_training(args, state, model, processing_class)
        elif self.every == "eval":
            self._measure(args, state, model)
        if metrics is not None and self._measured_step == state.global_step:
            # In place: this is what best-model bookkeeping and early stopping read.
            metrics.update(self._headlines())
            self._stand_in_for_best(args, metrics)
        return control

    def on_train_end(self, args, state, control, **kwargs):
        self._training = False
        return control

    def _missed(self, args, state) -> bool:
        """Whether the run was killed between writing the checkpoint it resumes from and measuring it.

        A checkpoint comes before the measurement where `on_save` measures, and where the epoch's end does while steps
        decide on checkpoints.
        """
        at_epoch = self.every == "epoch" or (self.every == "eval" and args.eval_strategy == "epoch")
        due = self.every == "save" or (at_epoch and bool(state.epoch) and float(state.epoch).is_integer())
        return state.global_step > 0 and due and not everywhere(state.global_step in self._journal.steps)

    # --- measuring ----------------------------------------------------------------------------------------------

    def _measure(self, args, state, model, now: Activations | None = None) -> None:
        step = state.global_step
        if self._measured_step == step:
            return
        if now is None:
            now = run_plan(
                self._callable(model), self._plan, token_budget=self.token_budget, progress=self._title(f"step {step}")
            )
        self._read(now)
        self._record(args, state, model)

    def _record(self, args, state, model) -> None:
        self._measured_step = state.global_step
        if state.is_world_process_zero and state.global_step not in self._journal.steps:
            self._journal.append(state.global_step, state.epoch, self.readings)
        self._tell(args, state, model)

    def _read(self, now: Activations) -> None:
        self.readings = [reading for measure in self.measures for reading in measure.read(now, self._reference)]

    def _tell(self, args, state, model) -> None:
        if self.trainer is None:
            return
        with evaluation_mode(model):
            # TRL's `log` empties its own metrics of the current mode: the training metrics are not ours to take. And
            # the Trainer takes any log for the one that is due at this step, which would lose its training loss.
            due = self.trainer.control.should_log
            self.trainer.log(self._headlines())
            self.trainer.control.should_log = due
        writer = find_writer(self.trainer) if state.is_world_process_zero else None
        if writer is not None:
            if not self._layout_written:
                write_layout(writer, self.readings)
                self._layout_written = True
            write_scalars(writer, self.readings, state.global_step)

    def _headlines(self) -> dict[str, float]:
        wanted = {measure.name: measure.headline for measure in self.measures}
        metrics: dict[str, float | None] = {}
        for reading in self.readings:
            if not reading.group and reading.metric in wanted[reading.measure]:
                # The first is the headline. Where it is not valid, no other layer's value may take its place.
                metrics.setdefault(f"eval_{reading.measure}_{reading.metric}", reading.value if reading.valid else None)
        return {name: value for name, value in metrics.items() if value is not None}

    def _stand_in_for_best(self, args, metrics: dict) -> None:
        """An invalid reading that decides on the best model counts as the worst; missing, it would end the run."""
        wanted = args.metric_for_best_model
        if wanted is None:
            return
        key = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        ours = {f"eval_{measure.name}_{metric}" for measure in self.measures for metric in measure.headline}
        if key in ours and key not in metrics:
            warnings.warn(
                f"`metric_for_best_model` is {wanted}, and that reading is not valid at this step: it counts as the "
                "worst. The journal says why.",
                stacklevel=2,
            )
            metrics[key] = float("-inf") if args.greater_is_better else float("inf")

    def _evaluate_outside_training(self, args, state, model, processing_class) -> None:
        """A bare `trainer.evaluate()`: measure, but never disturb what a training run stored."""
        self._prepare(args, model, processing_class)
        if self._reference is None:
            stored = self._folder(args) / "reference.safetensors"
            if self.reference == "initial" and not everywhere(stored.is_file()):
                self._reference = run_plan(self._callable(model), self._plan, token_budget=self.token_budget)
            else:
                self._obtain_reference(args, model, step=max(1, state.global_step))
        now = run_plan(
            self._callable(model), self._plan, token_budget=self.token_budget, progress=self._title("evaluation")
        )
        self._evaluated_only = state.is_world_process_zero and not self._journal.lines
        self._read(now)
        self._record(args, state, model)

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
        self._requests = [request for measure in self.measures for request in measure.stimuli]
        self._plan = plan_activations(model, tokenizer, self._requests)

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

    def _set_previous_run_aside(self, args) -> None:
        """A run that starts anew in a used output directory keeps what the earlier one measured."""
        folder = self._folder(args)
        if not (folder / "journal.jsonl").exists():
            return
        n = 1
        while (aside := folder.with_name(f"{FOLDER}-{n}")).exists():
            n += 1
        folder.rename(aside)
        warnings.warn(
            f"{folder} holds the readings of an earlier run, and this run starts at step 0: they are kept in {aside}. "
            "To continue the earlier run, pass `resume_from_checkpoint`.",
            stacklevel=2,
        )
        self._journal = Journal(folder / "journal.jsonl")


def _every_steps(every: str | Mapping[str, int]) -> int | None:
    if isinstance(every, str) and every in ("eval", "save", "epoch"):
        return None
    if isinstance(every, Mapping) and set(every) == {"steps"}:
        steps = every["steps"]
        if isinstance(steps, int) and not isinstance(steps, bool) and steps > 0:
            return steps
    raise ValueError(f"`every` must be 'eval', 'save', 'epoch' or {{'steps': n}} with n > 0, got {every!r}.")
