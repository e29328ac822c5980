"""Task-vector negation: learn the forget set, then go the opposite way."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import TrainerCallback

from monitor.reference import weights_fingerprint
from trainers.checkpoints import last_complete_checkpoint
from trainers.fine_tuning import FineTuningTrainer
from trainers.task_vector_config import TaskVectorConfig

logger = logging.getLogger(__name__)

FILE_NAME = "task_vector.json"


class TaskVectorTrainer(FineTuningTrainer):
    """Make a model forget by the negation of what it learns when it is trained on the forget set.

    Parameters as in :class:`trainers.unlearning_trainer.UnlearningTrainer`, with ``args`` a TaskVectorConfig.

    Raises
    ------
    ValueError
        For a sharded model, adapters other than LoRA and adapters that are not at zero: the negation of their change
        is no adapter of that kind.

    Notes
    -----
    θ = θ_0 − scale · (θ_learned − θ_0) (Ilharco et al., arXiv 2212.04089), where θ_learned minimises ℓ_f. Until its
    last step the run **learns**: loss and readings say so. The negation is made at the end of the last step, before
    that step's evaluation, measurement and checkpoint; where a callback stops the run, at the end of the epoch that it
    leaves, after the readings of the step. LoRA matrices start from a zero product, so that
    B ← −scale · B is exact.
    """

    config_class = TaskVectorConfig

    def __init__(self, *args, callbacks: list[TrainerCallback] | None = None, **kwargs) -> None:
        self._negation = Negation()
        # First: a monitor that looks at the end of the last step has to see the negated model.
        super().__init__(*args, callbacks=[self._negation, *(callbacks or [])], **kwargs)
        self._negation.trainer = self
        self._initial: dict[str, Tensor] = {}
        self._fingerprint: str | None = None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir) or True
        self._negation.done = False
        self._keep_start()
        if isinstance(resume_from_checkpoint, (str, Path)):
            self._negation.done = self._check_checkpoint(Path(resume_from_checkpoint))
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def negate(self) -> None:
        """θ ← θ_0 − scale · (θ − θ_0), in place."""
        scale = self.args.scale
        with torch.no_grad():
            for name, parameter in self.bare_model().named_parameters():
                if name in self._initial:
                    start = self._initial[name].to(parameter.device)
                    parameter.copy_(start.float() - scale * (parameter.float() - start.float()))
                elif "lora_B" in name and parameter.requires_grad:
                    parameter.mul_(-scale)
        self._initial = {}

    def _keep_start(self) -> None:
        model = self.bare_model()
        if self._sharded:
            raise ValueError("task-vector negation of a sharded model (FSDP, DeepSpeed) is not supported")
        if is_peft_model(model):
            _check_adapter(model)
            return
        self._fingerprint = weights_fingerprint(model)
        self._initial = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def _check_checkpoint(self, checkpoint: Path) -> bool:
        """Whether a checkpoint holds the negated model; an error unless it started from the weights in memory."""
        path = checkpoint / FILE_NAME
        if not path.is_file():
            raise FileNotFoundError(
                f"`resume_from_checkpoint` needs {path}, which says whether the weights there are negated already. "
                "Give a checkpoint of a task-vector run, or start again without resuming"
            )
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["initial_weights"] != self._fingerprint:
            raise ValueError(
                f"the run of {checkpoint} started from other weights than the `model` given, and the "
                "negation needs those. Give that model; the checkpoint is loaded into it afterwards"
            )
        return stored["negated"]

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        super()._save(output_dir, state_dict)
        note = {"negated": self._negation.done, "initial_weights": self._fingerprint}
        path = Path(output_dir if output_dir is not None else self.args.output_dir) / FILE_NAME
        path.write_text(json.dumps(note) + "\n", encoding="utf-8")


class Negation(TrainerCallback):
    """Negate the task vector once training is over: where the last step ends, else as soon as it is known."""

    def __init__(self) -> None:
        self.trainer: TaskVectorTrainer | None = None
        self.done = False

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if self.done and state.global_step < state.max_steps:
            raise ValueError(
                f"the checkpoint of step {state.global_step} ended its run and holds the negated model, which cannot "
                f"go on learning to step {state.max_steps}. Resume from an earlier checkpoint, or start again"
            )

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if control.should_training_stop:
            self._negate()

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        if control.should_training_stop:
            self._negate()

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._negate()

    def _negate(self) -> None:
        if not self.done:
            self.trainer.negate()
            self.done = True


def _check_adapter(model) -> None:
    trained: Sequence[str] = [name for name, p in model.named_parameters() if p.requires_grad]
    others = [name for name in trained if "lora_A" not in name and "lora_B" not in name]
    if others:
        raise ValueError(f"task-vector negation supports LoRA matrices alone, and the adapters train {others[0]}")
    if any(p.abs().max() > 0 for name, p in model.named_parameters() if "lora_B" in name and p.requires_grad):
        raise ValueError(
            "task-vector negation of an adapter needs one that starts at zero, and `model` brings a trained one. Merge "
            "it into the base first (merge_and_unload)"
        )
