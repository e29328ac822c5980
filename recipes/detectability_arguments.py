"""What detectability is read on and with which test, as arguments of a command."""

from __future__ import annotations

from dataclasses import dataclass, field

from monitor.stimuli.counterfactual_grid import DIMENSIONS

CONCEPT = "concept"  # the group of a forget set against its anonymised variants


@dataclass
class DetectabilityArguments:
    """Groups, layers, and the test of detectability.

    Parameters
    ----------
    dimensions : list of str
        Bundled dimensions (gender, race, religion, age; "all" for the four), or counterfactual files: FILE or
        NAME=FILE; see `recipes.counterfactual_arguments.load_sets`.
    detectability_layer : str
        A hidden-state index or a fraction of the depth.
    scan_layers : bool
        Read every layer as well.
    purity : float
        Share of marked texts in the mixture, in (0, 1].
    n : int
        Texts in the mixture, even.
    smallest_effect : float
        The separation s that the audit must not miss; power is for this one.
    level, power : float
        Of the test, in (0, 1).
    """

    dimensions: list[str] = field(
        default_factory=lambda: list(DIMENSIONS),
        metadata={"help": f"What detectability is read on: {' '.join(DIMENSIONS)}, FILE or NAME=FILE."},
    )
    detectability_layer: str = field(
        default="0.5", metadata={"help": "Layer of detectability: hidden-state index or fraction of the depth."}
    )
    scan_layers: bool = field(default=False, metadata={"help": "Read every layer, not one."})
    purity: float = field(default=0.3, metadata={"help": "Share of marked texts in the mixture, in (0, 1]."})
    n: int = field(default=300, metadata={"help": "Texts in the mixture, an even number."})
    smallest_effect: float = field(
        default=1.0, metadata={"help": "The separation s (in standard deviations) that the audit must not miss."}
    )
    level: float = field(default=0.05, metadata={"help": "Level of the detection test."})
    power: float = field(default=0.8, metadata={"help": "Power wanted for the smallest effect."})
