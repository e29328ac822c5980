"""Watch what a language model still encodes while it is being trained."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monitor.activations import Activations, Answers, States, measure_activations
    from monitor.attack_when import AttackWhen
    from monitor.callback import Monitor
    from monitor.journal import Journal
    from monitor.measure_callbacks import (
        BehaviourCallback,
        BiasShiftCallback,
        ConceptRecoveryCallback,
        DetectabilityCallback,
        FragmentationCallback,
    )
    from monitor.measures.behaviour import Behaviour
    from monitor.measures.bias_shift import BiasShift
    from monitor.measures.concept_recovery import ConceptRecovery
    from monitor.measures.detectability import Detectability
    from monitor.measures.fragmentation import Fragmentation
    from monitor.measures.measure import Measure
    from monitor.readings import Reading
    from monitor.rules import Condition, StopWhen
    from monitor.stimuli.bias import BiasStimuli, load_bias_stimuli
    from monitor.stimuli.concepts import ConceptSet, load_concept_sets
    from monitor.stimuli.counterfactual import CounterfactualSet, counterfactual_sets_from_file
    from monitor.stimuli.counterfactual_grid import load_counterfactual_sets
    from monitor.stimuli.counterfactual_pairs import counterfactual_from_pairs
    from monitor.stimuli.forget_set import ForgetSet, Pair, load_forget_set
    from monitor.stimuli.mixture import draw_mixture, largest_mixture

# Imported when first used: checking a forget set or listing models needs neither torch nor transformers, which take
# seconds to import.
_HOME = {
    "Activations": "monitor.activations",
    "Answers": "monitor.activations",
    "AttackWhen": "monitor.attack_when",
    "Behaviour": "monitor.measures.behaviour",
    "BehaviourCallback": "monitor.measure_callbacks",
    "BiasShift": "monitor.measures.bias_shift",
    "BiasShiftCallback": "monitor.measure_callbacks",
    "BiasStimuli": "monitor.stimuli.bias",
    "ConceptRecovery": "monitor.measures.concept_recovery",
    "ConceptRecoveryCallback": "monitor.measure_callbacks",
    "ConceptSet": "monitor.stimuli.concepts",
    "Condition": "monitor.rules",
    "CounterfactualSet": "monitor.stimuli.counterfactual",
    "Detectability": "monitor.measures.detectability",
    "DetectabilityCallback": "monitor.measure_callbacks",
    "ForgetSet": "monitor.stimuli.forget_set",
    "Fragmentation": "monitor.measures.fragmentation",
    "FragmentationCallback": "monitor.measure_callbacks",
    "Journal": "monitor.journal",
    "Measure": "monitor.measures.measure",
    "Monitor": "monitor.callback",
    "Pair": "monitor.stimuli.forget_set",
    "Reading": "monitor.readings",
    "States": "monitor.activations",
    "StopWhen": "monitor.rules",
    "counterfactual_from_pairs": "monitor.stimuli.counterfactual_pairs",
    "counterfactual_sets_from_file": "monitor.stimuli.counterfactual",
    "draw_mixture": "monitor.stimuli.mixture",
    "largest_mixture": "monitor.stimuli.mixture",
    "load_bias_stimuli": "monitor.stimuli.bias",
    "load_concept_sets": "monitor.stimuli.concepts",
    "load_counterfactual_sets": "monitor.stimuli.counterfactual_grid",
    "load_forget_set": "monitor.stimuli.forget_set",
    "measure_activations": "monitor.activations",
}

__all__ = [
    "Activations",
    "Answers",
    "AttackWhen",
    "Behaviour",
    "BehaviourCallback",
    "BiasShift",
    "BiasShiftCallback",
    "BiasStimuli",
    "ConceptRecovery",
    "ConceptRecoveryCallback",
    "ConceptSet",
    "Condition",
    "CounterfactualSet",
    "Detectability",
    "DetectabilityCallback",
    "ForgetSet",
    "Fragmentation",
    "FragmentationCallback",
    "Journal",
    "Measure",
    "Monitor",
    "Pair",
    "Reading",
    "States",
    "StopWhen",
    "counterfactual_from_pairs",
    "counterfactual_sets_from_file",
    "draw_mixture",
    "largest_mixture",
    "load_bias_stimuli",
    "load_concept_sets",
    "load_counterfactual_sets",
    "load_forget_set",
    "measure_activations",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'monitor' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
