"""The reinforced model of the original WHP: the model in hand, trained further on the forget set."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedTokenizerBase

from trainers.fine_tuning import FineTuningTrainer
from trainers.fine_tuning_config import FineTuningConfig
from trainers.unlearning_config import UnlearningConfig, check_number


@dataclass
class ReinforcementArguments:
    """How the reinforced model is made, where none is given.

    Parameters
    ----------
    reinforced_model : str, optional
        A path, a Hub id or an embedded name of a model trained further on the forget set already.
    reinforcement_epochs : float, default 3.0
        Epochs over the forget set.
    reinforcement_learning_rate : float, default 3e-6
        As arXiv 2310.02238 (Sec. 3.1) has it for a 7B model.
    """

    reinforced_model: str | None = field(
        default=None, metadata={"help": "A model trained further on the forget set already; made here by default."}
    )
    reinforcement_epochs: float = field(
        default=3.0, metadata={"help": "Epochs over the forget set that make the reinforced model."}
    )
    reinforcement_learning_rate: float = field(
        default=3e-6, metadata={"help": "Learning rate that makes the reinforced model."}
    )

    def __post_init__(self) -> None:
        check_number("reinforcement_epochs", self.reinforcement_epochs, above=0.0)
        check_number("reinforcement_learning_rate", self.reinforcement_learning_rate, above=0.0)


def reinforce(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    forget: Sequence,
    arguments: ReinforcementArguments,
    training: UnlearningConfig,
    peft_config=None,
) -> nn.Module:
    """Train `model` further on the forget pairs, in place, on the device and in the batches of the run to come."""
    config = FineTuningConfig(
        output_dir=training.output_dir,
        num_train_epochs=arguments.reinforcement_epochs,
        learning_rate=arguments.reinforcement_learning_rate,
        per_device_train_batch_size=training.per_device_train_batch_size,
        gradient_accumulation_steps=training.gradient_accumulation_steps,
        max_length=training.max_length,
        use_cpu=training.use_cpu,
        bf16=training.bf16,
        fp16=training.fp16,
        seed=training.seed,
        logging_strategy="no",  # its losses are not those of the run
        disable_tqdm=training.disable_tqdm,
        dataloader_pin_memory=training.dataloader_pin_memory,
        save_strategy="no",
        report_to="none",
    )
    trainer = FineTuningTrainer(model, config, forget, processing_class=tokenizer, peft_config=peft_config)
    if trainer.is_world_process_zero():
        print(f"Training the reinforced model: {arguments.reinforcement_epochs:g} epochs.", file=sys.stderr)
    trainer.train()
    return trainer.bare_model().eval()
