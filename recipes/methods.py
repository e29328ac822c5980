"""The unlearning methods by their names on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from recipes.arguments import option, read_config
from trainers.ce_u import CEUTrainer
from trainers.dpo import DPOTrainer
from trainers.grad_diff import GradDiffTrainer
from trainers.gradient_ascent import GradientAscentTrainer
from trainers.kl_min import KLMinTrainer
from trainers.npo import NPOTrainer
from trainers.rmu import RMUTrainer
from trainers.satimp import SatImpTrainer
from trainers.simnpo import SimNPOTrainer
from trainers.task_vector import TaskVectorTrainer
from trainers.undial import UNDIALTrainer
from trainers.unlearning_trainer import UnlearningTrainer
from trainers.wga import WGATrainer
from trainers.whp import WHPTrainer
from trainers.whp_reinforced import WHPReinforcedTrainer

DEFAULT = "npo"
# A trainer knows its config class.
METHODS: dict[str, type[UnlearningTrainer]] = {
    "gradient_ascent": GradientAscentTrainer,
    "grad_diff": GradDiffTrainer,
    "kl_min": KLMinTrainer,
    "npo": NPOTrainer,
    "simnpo": SimNPOTrainer,
    "dpo": DPOTrainer,
    "rmu": RMUTrainer,
    "whp": WHPTrainer,
    "whp_reinforced": WHPReinforcedTrainer,
    "wga": WGATrainer,
    "satimp": SatImpTrainer,
    "undial": UNDIALTrainer,
    "ce_u": CEUTrainer,
    "task_vector": TaskVectorTrainer,
}


def method_name(argv: Sequence[str]) -> str:
    """The method that a command line names, by ``--method`` or in its ``--config`` file: it decides which arguments
    there are.

    Raises
    ------
    ValueError
        If there is no such method, or the file is not valid YAML.
    """
    name = option(argv, "--method") or read_config(argv).get("method", DEFAULT)
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {name!r}")
    return name
