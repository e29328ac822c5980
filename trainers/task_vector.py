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
    that step's evaluation, measurement and checkpoint. LoRA matrices start from a zero product, so that
    B ← −scale · B is exact.
    """

    config_class = TaskVectorConfig

    def __init__(self, *args, callbacks: list[TrainerCallback] | None = None, **kwargs) -> None:
        self._negation = Negation()
        # First: a monitor that looks at the end of the last step has to see the negated model.
        super().__init__(*args, callbacks=[self._negation, *(callbacks or [])], **kwargs)
        self._negation.trainer = self
        self._initial: dict[str, Tensor] = {}

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        self._negation.done = False
        self._keep_start(bool(resume_from_checkpoint))
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

    def _keep_start(self, resumed: bool) -> None:
        model = self.bare_model()
        if self._sharded:
            raise ValueError("task-vector negation of a sharded model (FSDP, DeepSpeed) is not supported")
        if is_peft_model(model):
            _check_adapter(model)
            return
        path = Path(self.args.output_dir) / FILE_NAME
        fingerprint = weights_fingerprint(model)
        if resumed and path.is_file() and json.loads(path.read_text())["initial_weights"] != fingerprint:
            raise ValueError(
                f"the run in {self.args.output_dir} started from other weights than the `model` given, and the "
                "negation needs those. Give that model; the checkpoint is loaded into it afterwards"
            )
        if not resumed and self.args.should_save:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"initial_weights": fingerprint}) + "\n", encoding="utf-8")
        self._initial = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }


class Negation(TrainerCallback):
    """Negate the task vector once training is over: where the last step ends, else as soon as it is known."""

    def __init__(self) -> None:
        self.trainer: TaskVectorTrainer | None = None
        self.done = False

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
    if any("lora_A" not in name and "lora_B" not in name for name in trained):
        raise ValueError(
            "task-vector negation supports LoRA matrices alone, and the adapters train "
            f"{next(name for name in trained if 'lora_' not in name or '_embedding' in name)}"
        )
    if any(p.abs().max() > 0 for name, p in model.named_parameters() if "lora_B" in name and p.requires_grad):
        raise ValueError(
            "task-vector negation of an adapter needs one that starts at zero, and `model` brings a trained one. Merge "
            "it into the base first (merge_and_unload)"
        )
