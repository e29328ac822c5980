"""The unlearning methods by their names on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

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
    name = _option(argv, "--method")
    config = _option(argv, "--config")
    if name is None and config is not None and Path(config).is_file():
        try:
            loaded = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"`--config` is not valid YAML: {error}") from error
        name = loaded.get("method") if isinstance(loaded, dict) else None
    name = DEFAULT if name is None else name
    if name not in METHODS:
        raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {name!r}")
    return name


def _option(argv: Sequence[str], option: str) -> str | None:
    """The last value of an option, in either of its two forms."""
    found = None
    for i, word in enumerate(argv):
        if word == option and i + 1 < len(argv):
            found = argv[i + 1]
        elif word.startswith(f"{option}="):
            found = word.split("=", 1)[1]
    return found
