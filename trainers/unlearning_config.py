"""The arguments that all unlearning trainers share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from transformers import TrainingArguments

RETAIN_LOSSES = ("nll", "kl", "none")


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
        What the reference's distributions and hidden states may take, in memory and on disk. Where they would take
        more, the reference is run beside the model instead, which is slower.

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
        metadata={
            "help": "Bytes that the reference's distributions and states may take; beyond, it is run beside the model."
        },
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
        check_number("learning_rate", self.learning_rate, low=0.0)
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a whole number >= 1, got {value!r}")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"`max_length` must be at least 2 (a prompt and an answer token), got {self.max_length}")
        if self.reference_max_bytes < 0:
            raise ValueError(f"`reference_max_bytes` must not be negative, got {self.reference_max_bytes}")

    @property
    def needs_retain(self) -> bool:
        """Whether the loss has a retain part."""
        return False


def retain_loss_field(default: str):
    """The field `retain_loss` with a method's own default."""
    text = "What holds the retain set: its NLL, the KL divergence from the reference, or nothing."
    return field(default=default, metadata={"help": text, "choices": list(RETAIN_LOSSES)})


@dataclass
class RetainTermConfig(UnlearningConfig):
    """Arguments of a loss = gamma · forget term + alpha · retain term; each method has its own defaults.

    Parameters
    ----------
    retain_loss : {"nll", "kl", "none"}
        What holds the retain set: its NLL, the KL divergence from the reference, both as means over answer tokens,
        or nothing.
    alpha : float, >= 0
        Weight of the retain term.
    gamma : float, >= 0
        Weight of the forget term.
    """

    retain_loss: str = retain_loss_field("nll")
    alpha: float = field(default=1.0, metadata={"help": "Weight of the retain term."})
    gamma: float = field(default=1.0, metadata={"help": "Weight of the forget term."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("retain_loss", self.retain_loss, RETAIN_LOSSES)
        check_number("alpha", self.alpha, low=0.0)
        check_number("gamma", self.gamma, low=0.0)
        if self.gamma == 0 and (self.alpha == 0 or self.retain_loss == "none"):
            raise ValueError(
                f"`gamma` is 0 and there is no retain term (`alpha` {self.alpha}, `retain_loss` {self.retain_loss!r}), "
                "so nothing would be trained. Raise one of the weights"
            )

    @property
    def needs_retain(self) -> bool:
        return self.retain_loss != "none"


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """A ValueError that names the parameter unless `value` is one of the choices."""
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}, got {value!r}")


def check_number(name: str, value: float, low: float | None = None, above: float | None = None) -> None:
    """A ValueError that names the parameter unless `value` is a finite number, >= `low`, > `above`."""
    # The parser passes on whatever a YAML file holds.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"`{name}` must be a finite number, got {value!r}")
    if low is not None and value < low:
        raise ValueError(f"`{name}` must be a number >= {low:g}, got {value}")
    if above is not None and value <= above:
        raise ValueError(f"`{name}` must be a number > {above:g}, got {value}")
