"""The arguments of task-vector negation."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainers.fine_tuning_config import FineTuningConfig
from trainers.unlearning_config import check_number


@dataclass
class TaskVectorConfig(FineTuningConfig):
    """Arguments of :class:`trainers.task_vector.TaskVectorTrainer`: θ_ref − scale · (θ − θ_ref) after training on ℓ_f.

    Parameters
    ----------
    scale : float, default 1.0
        How far to go in the direction opposite to learning the forget set.

    See :class:`trainers.unlearning_config.UnlearningConfig` for the rest.
    """

    scale: float = field(default=1.0, metadata={"help": "How far to go in the direction opposite to learning."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("scale", self.scale, low=0.0)
        if self.load_best_model_at_end:
            raise ValueError(
                "`load_best_model_at_end` must be False: checkpoints before the last step hold the model that learns, "
                "and the negation would be lost"
            )
