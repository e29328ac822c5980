"""The arguments of RMU."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainers.unlearning_config import UnlearningConfig, check_number


@dataclass
class RMUConfig(UnlearningConfig):
    """Arguments of :class:`trainers.rmu.RMUTrainer`: loss = MSE(h(x_f), c·u) + alpha · MSE(h(x_r), h_ref(x_r)).

    Parameters
    ----------
    layer : float, default 0.25
        Where the hidden states h are read: below 1 a fraction of the depth, else a hidden-state index (0 embeddings,
        i what enters block i). Published code counts blocks: its layer 7 is 8 here.
    coefficient : float, default 20.0
        c, the length of the vector that forget states are steered to.
    adaptive_scale : float, optional
        β of adaptive RMU (arXiv 2408.06223): c = β · ‖h_ref(x_f)‖, token by token, in place of `coefficient`.
    alpha : float, default 1200.0
        Weight of the retain term; 0 leaves it out.
    trained_layers : list of int, optional
        Blocks whose weights are trained (block i ends in hidden state i + 1); by default the three that end in `layer`.
    trained_parameters : list of str, optional
        Train only parameters whose name has one of these in it, such as "mlp.down_proj"; all by default.

    See :class:`trainers.unlearning_config.UnlearningConfig` for the rest.
    """

    layer: float = field(
        default=0.25,
        metadata={"help": "Hidden states to steer: a fraction of the depth below 1, else an index."},
    )
    coefficient: float = field(default=20.0, metadata={"help": "c, the length of the vector to steer to."})
    adaptive_scale: float | None = field(
        default=None, metadata={"help": "Adaptive RMU: c = scale * norm of the reference's state, token by token."}
    )
    alpha: float = field(default=1200.0, metadata={"help": "Weight of the retain term; 0 leaves it out."})
    trained_layers: list[int] | None = field(
        default=None, metadata={"help": "Blocks that are trained; by default the three that end in `layer`."}
    )
    trained_parameters: list[str] | None = field(
        default=None, metadata={"help": "Train only parameters with one of these in their name, as mlp.down_proj."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("layer", self.layer, above=0.0)
        if self.layer >= 1 and self.layer != int(self.layer):
            raise ValueError(f"`layer` must be below 1 (a fraction of the depth) or a whole number, got {self.layer}")
        check_number("coefficient", self.coefficient, above=0.0)
        if self.adaptive_scale is not None:
            check_number("adaptive_scale", self.adaptive_scale, above=0.0)
        check_number("alpha", self.alpha, low=0.0)
        _check_list("trained_layers", self.trained_layers, int)
        _check_list("trained_parameters", self.trained_parameters, str)

    @property
    def needs_retain(self) -> bool:
        return self.alpha > 0


def _check_list(name: str, value: list | None, of: type) -> None:
    # A bare string would be taken letter by letter.
    entries = value if isinstance(value, (list, tuple)) else [None]
    if value is not None and not (entries and all(type(entry) is of for entry in entries)):
        raise ValueError(f"`{name}` must be a list of {of.__name__}, or left out, got {value!r}")
