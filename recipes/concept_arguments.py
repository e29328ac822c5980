"""Which concepts are recovered, and where, as arguments of a command."""

from __future__ import annotations

from dataclasses import dataclass, field

from monitor.stimuli.concepts import CONCEPTS


@dataclass
class ConceptArguments:
    """Concepts, layer and rank of concept recovery.

    Parameters
    ----------
    concepts : list of str
        Bundled concepts, or files of concept sets (JSON Lines; `monitor.stimuli.concepts`).
    concept_layer : str
        A hidden-state index or a fraction of the depth.
    concept_rank : int
        Dimensions of each concept's subspace.
    """

    concepts: list[str] = field(
        default_factory=lambda: list(CONCEPTS),
        metadata={"help": f"What concept recovery is read on: {' '.join(CONCEPTS)}, or files of concept sets."},
    )
    concept_layer: str = field(
        default="0.8", metadata={"help": "Layer of concept recovery: hidden-state index or fraction of the depth."}
    )
    concept_rank: int = field(default=8, metadata={"help": "Dimensions of each concept's subspace."})
