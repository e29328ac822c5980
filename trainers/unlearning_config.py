"""The arguments that all unlearning trainers share."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import TrainingArguments


@dataclass
class UnlearningConfig(TrainingArguments):
    """`TrainingArguments` with defaults for unlearning, plus what every method needs.

    Parameters
    ----------
    max_length : int or None, default 1024
        Tokens a prompt and its answer may have together. Longer pairs are an error, they are not cut.
    disable_dropout : bool, default True
        Switch dropout off, so that the model starts out equal to its reference.
    reference_max_bytes : int, default 2 GiB
        What the reference's distributions may take, in memory and on disk.

    Notes
    -----
    Defaults that differ from `TrainingArguments`: `learning_rate` 1e-5 (5e-5), `logging_steps` 10 (500),
    `remove_unused_columns` False (True; the trainers build their own batches).
    """

    learning_rate: float = field(default=1e-5, metadata={"help": "The initial learning rate of the optimizer."})
    logging_steps: float = field(
        default=10, metadata={"help": "Log every so many update steps; below 1, a share of all steps."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay False: unlearning batches are nested, not model arguments."}
    )
    max_length: int | None = field(
        default=1024,
        metadata={"help": "Tokens that a prompt and its answer may have together; longer pairs are an error."},
    )
    disable_dropout: bool = field(
        default=True, metadata={"help": "Switch dropout off, so that the model starts out equal to its reference."}
    )
    reference_max_bytes: int = field(
        default=2 * 2**30,
        metadata={"help": "Bytes that the reference's distributions (KL terms) may take in memory and on disk."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must be False: the trainer's batches are nested; leave it out")
        if self.label_smoothing_factor:
            raise ValueError(
                f"`label_smoothing_factor` must be 0, got {self.label_smoothing_factor}: the losses are defined on "
                "the answer's own tokens"
            )
        sampling = getattr(self, "train_sampling_strategy", "random")  # absent in earlier releases of transformers 5
        if sampling not in ("random", "sequential"):
            raise ValueError(
                f"`train_sampling_strategy` must be 'random' or 'sequential', got {sampling!r}: "
                "an example is a forget pair and a retain pair and has no single length to group by"
            )
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"`max_length` must be at least 2 (a prompt and an answer token), got {self.max_length}")
        if self.reference_max_bytes < 0:
            raise ValueError(f"`reference_max_bytes` must not be negative, got {self.reference_max_bytes}")
