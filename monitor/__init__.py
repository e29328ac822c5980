"""Watch what a language model still encodes while it is being trained."""

from monitor.activations import Activations, Answers, States, measure_activations
from monitor.callback import BehaviourCallback, BiasShiftCallback, FragmentationCallback, Monitor
from monitor.journal import Journal
from monitor.measures.behaviour import Behaviour
from monitor.measures.bias_shift import BiasShift
from monitor.measures.fragmentation import Fragmentation
from monitor.measures.measure import Measure
from monitor.readings import Reading
from monitor.stimuli.bias import BiasStimuli, load_bias_stimuli
from monitor.stimuli.forget_set import ForgetSet, Pair, load_forget_set

__all__ = [
    "Activations",
    "Answers",
    "Behaviour",
    "BehaviourCallback",
    "BiasShift",
    "BiasShiftCallback",
    "BiasStimuli",
    "ForgetSet",
    "Fragmentation",
    "FragmentationCallback",
    "Journal",
    "Measure",
    "Monitor",
    "Pair",
    "Reading",
    "States",
    "load_bias_stimuli",
    "load_forget_set",
    "measure_activations",
]
