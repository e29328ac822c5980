"""Which concepts are recovered, and where, as arguments of a command."""

from __future__ import annotations

from dataclasses import dataclass, field

from monitor.stimuli.concepts import CONCEPTS


@dataclass
class ConceptArguments:
    """Concepts, layer and rank of concept recovery and of the attack `sampling`.

    Parameters
    ----------
    concepts : list of str, optional
        Bundled concepts, or files of concept sets (JSON Lines; `monitor.stimuli.concepts`). Without it the measure
        reads all bundled ones, and the attack asks the forget set's own questions.
    concept_layer : str
        A hidden-state index or a fraction of the depth.
    concept_rank : int
        Dimensions of each concept's subspace.
    """

    concepts: list[str] | None = field(
        default=None,
        metadata={
            "help": f"Of {' '.join(CONCEPTS)}, or files of concept sets: for concept recovery (default: all) and the "
            "attack sampling (default: the forget set)."
        },
    )
    concept_layer: str = field(
        default="0.8", metadata={"help": "Layer of concepts: hidden-state index or fraction of the depth."}
    )
    concept_rank: int = field(default=8, metadata={"help": "Dimensions of each concept's subspace."})
