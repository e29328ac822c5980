"""The arguments of DPO for unlearning."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainers.unlearning_config import RetainTermConfig, check_choice, check_number

CHOSEN = ("refusal", "alternate", "retain")


@dataclass
class DPOConfig(RetainTermConfig):
    """Arguments of :class:`trainers.dpo.DPOTrainer`: loss = gamma · DPO(chosen over forget) + alpha · retain term.

    Parameters
    ----------
    beta : float, default 0.1
        Inverse temperature of DPO.
    chosen : {"refusal", "alternate", "retain"}, default "refusal"
        What is preferred to the answer: a refusal ("I don't know."), the pair's ``alternate`` answer, or a retain pair
        of its own question (arXiv 2611.05272, App. B.5).

    `retain_loss` is "nll", `alpha` and `gamma` are 1 by default.
    See :class:`trainers.unlearning_config.RetainTermConfig` for the rest.
    """

    beta: float = field(default=0.1, metadata={"help": "Inverse temperature of DPO."})
    chosen: str = field(
        default="refusal",
        metadata={
            "help": "What is preferred to the answer: a refusal, the pair's alternate answer, or a retain pair.",
            "choices": list(CHOSEN),
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, above=0.0)
        check_choice("chosen", self.chosen, CHOSEN)

    @property
    def needs_retain(self) -> bool:
        return super().needs_retain or self.chosen == "retain"
