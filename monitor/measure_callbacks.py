"""One-measure conveniences: a `Monitor` that brings its measure."""

from __future__ import annotations

from monitor.callback import Monitor
from monitor.measures.behaviour import Behaviour
from monitor.measures.bias_shift import BiasShift
from monitor.measures.concept_recovery import ConceptRecovery
from monitor.measures.detectability import Detectability
from monitor.measures.fragmentation import Fragmentation


class BiasShiftCallback(Monitor):
    """A `Monitor` of bias shift alone.

    Parameters
    ----------
    stimuli : BiasStimuli, optional
        The sentences; the small bundled set by default.
    layer, pooling, n_bootstrap, seed, name
        Options of `BiasShift`.
    **monitor_options
        As in `Monitor`: reference, every, rules, at_start, at_end, tokenizer, token_budget, progress.
    """

    def __init__(self, stimuli=None, **options) -> None:
        own, rest = _split_options(options)
        super().__init__(BiasShift(stimuli, **rest), **own)


class FragmentationCallback(Monitor):
    """A `Monitor` of fragmentation alone.

    Parameters
    ----------
    pairs : sequence of Pair
        Of a forget set: ``load_forget_set(path).fragmentation_pairs("forget")``.
    layer, pooling, batches, seed, controls, name
        Options of `Fragmentation`.
    **monitor_options
        As in `Monitor`: reference, every, rules, at_start, at_end, tokenizer, token_budget, progress.
    """

    def __init__(self, pairs, **options) -> None:
        own, rest = _split_options(options)
        super().__init__(Fragmentation(pairs, **rest), **own)


class BehaviourCallback(Monitor):
    """A `Monitor` of behaviour alone.

    Parameters
    ----------
    pairs : mapping of split to sequence of Pair
        As in `Behaviour`.
    n_bootstrap, seed, name
        Options of `Behaviour`.
    **monitor_options
        As in `Monitor`: reference, every, rules, at_start, at_end, tokenizer, token_budget, progress.
    """

    def __init__(self, pairs, **options) -> None:
        own, rest = _split_options(options)
        super().__init__(Behaviour(pairs, **rest), **own)


class DetectabilityCallback(Monitor):
    """A `Monitor` of detectability alone.

    Parameters
    ----------
    sets : mapping of str to CounterfactualSet, optional
        The groups; gender, race, religion and age over the bundled grid by default.
    layer, scan, pooling, purity, n, smallest_effect, level, power, correction, probes, n_folds, n_seeds, seed, device,
    name
        Options of `Detectability`.
    **monitor_options
        As in `Monitor`: reference, every, rules, at_start, at_end, tokenizer, token_budget, progress.
    """

    def __init__(self, sets=None, **options) -> None:
        own, rest = _split_options(options)
        super().__init__(Detectability(sets, **rest), **own)


class ConceptRecoveryCallback(Monitor):
    """A `Monitor` of concept recovery alone.

    Parameters
    ----------
    concepts : mapping of str to ConceptSet, optional
        The groups; every bundled concept by default.
    negatives, layer, rank, pooling, n_folds, n_permutations, n_bootstrap, seed, name
        Options of `ConceptRecovery`.
    **monitor_options
        As in `Monitor`: reference, every, rules, at_start, at_end, tokenizer, token_budget, progress.
    """

    def __init__(self, concepts=None, **options) -> None:
        own, rest = _split_options(options)
        super().__init__(ConceptRecovery(concepts, **rest), **own)


def _split_options(options: dict) -> tuple[dict, dict]:
    """The monitor's own options, and the measure's."""
    names = ("reference", "every", "rules", "at_start", "at_end", "tokenizer", "token_budget", "progress")
    own = {name: options[name] for name in names if name in options}
    return own, {name: value for name, value in options.items() if name not in own}
