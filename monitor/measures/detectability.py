"""Detectability: how far apart are groups in the hidden states, does a probe see it, and could it have told?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import torch

from monitor.activations import Activations, States, resolve_layer
from monitor.geometry.clusters import clustered_threshold
from monitor.geometry.detection import (
    CV_INFLATION,
    DETECTED,
    NOT_DETECTED,
    UNDERPOWERED,
    detectable_auc,
    detection_power,
    null_std,
    sample_budget,
    verdict,
)
from monitor.geometry.multiplicity import benjamini_hochberg, bonferroni
from monitor.geometry.planted import planted_power
from monitor.measures.detectability_design import Design, design
from monitor.measures.detectability_group import DetectionTest, GroupReadings, read_group
from monitor.readings import Reading
from monitor.stimuli.counterfactual import CounterfactualSet
from monitor.stimuli.counterfactual_grid import load_counterfactual_sets

CORRECTIONS = ("bonferroni", "bh", "none")
PROBES = ("linear", "svm", "mlp")
VERDICTS = {DETECTED: 1.0, NOT_DETECTED: 0.0, UNDERPOWERED: -1.0}


class Detectability:
    """Linear detectability of groups, or of a concept against its anonymised variants, with the power there was.

    Parameters
    ----------
    sets : mapping of str to CounterfactualSet, optional
        The groups of readings. Default: gender, race, religion and age over the bundled 340-cell grid. For a forget set
        against its anonymised variants see `monitor.stimuli.counterfactual_pairs.counterfactual_from_pairs`.
    layer : int or float
        Hidden-state index or fraction of the depth, of the headline readings and the verdicts. Default: mid-depth, as
        published.
    scan : bool
        Also read every other layer: separation, offset, AUC and p-values, without intervals and verdicts.
    pooling : str
        One of the activation pass's poolings; ``"mean"`` is the published one.
    purity : float, in (0, 1]
        Share α of marked texts in the mixture that the second probe is read on.
    n : int, even
        Texts in the mixture. A set without neutral texts is read at purity 1 alone.
    smallest_effect : float
        Separation s, in standard deviations within a class, that a null result must be able to exclude.
    level, power : float
        Level of the detection test, and the power wanted for the smallest effect.
    correction : {"bonferroni", "bh", "none"}
        Of the p-values, over all tests of one checkpoint at the headline layer; the layers of a scan are a second
        family.
    probes : sequence of {"linear", "svm", "mlp"}
        The linear probe is always read. The others, at the headline layer, are diagnostics: no probe can beat the
        purity law, so one that beats the linear probe says that the linear one sits below the law.
    n_folds, n_seeds : int
        Of the cross-validation, grouped by context cell.
    seed : int
        Of mixtures, folds and splits. They are the same at every checkpoint: changes compare like with like.
    device : str, optional
        Where the estimators run; by default the GPU where there is one.
    name : str
        First part of every reading's name.

    Raises
    ------
    ValueError
        For parameters out of range, an unknown name, or a mixture that a set's pool cannot fill.

    Notes
    -----
    Readings of each group on all its pairs (purity 1):

    - ``s_hat``: cross-fitted Mahalanobis separation; ``s_change``: minus the reference's. Jackknife intervals over
      cells.
    - ``auc``: mean over seeds of the pooled out-of-fold AUC of a logistic probe (interval: clustered DeLong, 1.4 times
      as wide for pooled cross-validation); ``auc_change``: minus the reference's; ``auc_p``: one-sided p against 1.4
      σ₀, and where cells hold several pairs, which may share what sets their members apart, the larger of that and of
      Student's t over cells (`monitor.geometry.clusters`), so that repeating a contrast proves nothing;
      ``auc_p_adjusted``: corrected for the family; ``predicted_auc``: Φ(ŝ/√2).
    - ``verdict``: 1 detected, 0 not detected (the smallest effect would have been found), -1 underpowered (it might
      have been missed: the null result says nothing); in words in the note. ``planted_power``: share of effects of the
      smallest size, planted in these very activations, that the probe finds; read where nothing was detected.
    - ``offset``: where neutral texts lie from the groups' midpoint, in standard deviations.
    - ``intrinsic_dimension``, ``two_nn_dimension``, ``curvature``, ``concentration_index`` (the label-free β_B, on 50
      components) and ``s_from_concentration``, its inversion: the geometry of the marked texts.
    - ``neutral_leakage``, where the set knows stereotypes of neutral texts: AUC at which the probe of the marked texts,
      which never saw a neutral one, tells them.

    In the mixture, with suffix ``_mixed``: the probe's readings and the verdict as above; ``predicted_auc`` is the
    purity law at ŝ and the measured offset; ``purity_gap``, prediction minus AUC, is what finite samples cost or the
    law leaves out; ``alpha_star``, the smallest purity that is detected at this n and ŝ with the wanted power, by a
    probe that knows the direction; ``grouped_minus_random``, the AUC of grouped minus random folds, below 0 where
    contexts leak.

    For group ``""``: means over the groups that have it of ``s_hat``, ``s_change``, ``auc`` and ``auc_mixed``, and
    ``n_detected``, the number of groups detected by one of their two tests.

    Source: arXiv 2609.22337, Sec. V and Thms. 3-4. Planted effects, intervals and changes are additions: the closed
    forms are those of a probe that need not be trained, and call a null conclusive where a trained probe would have
    missed it.
    """

    headline = ("s_hat", "s_change", "auc", "auc_mixed", "n_detected")

    def __init__(
        self,
        sets: Mapping[str, CounterfactualSet] | None = None,
        *,
        layer: int | float = 0.5,
        scan: bool = False,
        pooling: str = "mean_no_sink",
        purity: float = 0.3,
        n: int = 300,
        smallest_effect: float = 1.0,
        level: float = 0.05,
        power: float = 0.8,
        correction: str = "bonferroni",
        probes: Sequence[str] = ("linear",),
        n_folds: int = 5,
        n_seeds: int = 5,
        seed: int = 0,
        device: str | None = None,
        name: str = "detectability",
    ) -> None:
        if sets is None:
            sets = load_counterfactual_sets()
        elif not isinstance(sets, Mapping):
            raise ValueError(
                f"sets must be a mapping of group names to CounterfactualSet, got {type(sets).__name__}; the bundled "
                'ones by name are load_counterfactual_sets(("gender",)), one of your own is {"mine": my_set}.'
            )
        sets = dict(sets)
        probes = (probes,) if isinstance(probes, str) else tuple(probes)
        _check(sets, layer, smallest_effect, level, power, correction, probes)
        _check_device(device)
        self.name = name
        self.layer, self.scan = layer, scan
        self.smallest_effect, self.level, self.power, self.correction = smallest_effect, level, power, correction
        self.nonlinear = tuple(kind for kind in probes if kind != "linear")
        self.seed, self.device = seed, device
        self.settings = {
            "groups": list(sets), "layer": layer, "scan": scan, "pooling": pooling, "purity": purity, "n": n,
            "smallest_effect": smallest_effect, "level": level, "power": power, "correction": correction,
            "probes": list(probes), "n_folds": n_folds, "n_seeds": n_seeds, "seed": seed,
        }  # fmt: skip
        layers = "all" if scan else (layer,)
        self._designs: dict[str, Design] = {}
        for group, stimuli in sets.items():
            try:
                self._designs[group] = design(
                    stimuli,
                    States(stimuli.texts, layers, pooling),
                    n,
                    purity,
                    n_folds=n_folds,
                    n_seeds=n_seeds,
                    seed=seed,
                )
            except ValueError as error:
                raise ValueError(f"sets[{group!r}]: {error}") from None

    @property
    def stimuli(self) -> tuple[States, ...]:
        return tuple(plan.request for plan in self._designs.values())

    def read(self, now: Activations, reference: Activations) -> list[Reading]:
        """Readings of the model as it is now, and against the reference.

        What cannot be read of a group (states that are not finite or do not vary) is an invalid reading with the
        reason.
        """
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            return self._read(now, reference, device)
        except torch.OutOfMemoryError:
            warnings.warn(
                f"{self.name}: the GPU has no memory left beside the training, so the CPU reads it. To always do "
                "that, pass device='cpu'.",
                stacklevel=2,
            )
        return self._read(now, reference, torch.device("cpu"))

    def _read(self, now: Activations, reference: Activations, device: torch.device) -> list[Reading]:
        groups = []
        for name, plan in self._designs.items():
            indices = now.layers(plan.request)
            chosen = self._position(indices)
            order = [chosen, *(i for i in range(len(indices)) if i != chosen)]
            states = now.states(plan.request)[:, order].to(device)
            before = reference.states(plan.request)[:, self._position(reference.layers(plan.request))].to(device)
            group = GroupReadings(self.name, name, [indices[i] for i in order])
            read_group(group, plan.to(device), states, before, self.nonlinear, self.power, self.level, self.seed)
            groups.append(group)
        self._judge(groups)
        readings = [reading for group in groups for reading in group.readings]
        return [*self._over_groups(groups), *readings]

    def _position(self, indices: Sequence[int]) -> int:
        """Where the headline layer stands among the layers that were read."""
        return list(indices).index(resolve_layer(self.layer, indices[-1])) if self.scan else 0

    # --- the verdicts: over all groups, because the family is what one checkpoint tests ---------------------------

    def _judge(self, groups: Sequence[GroupReadings]) -> None:
        for family in (lambda test: test.layer == 0, lambda test: test.layer > 0):
            tests = [(group, test) for group in groups for test in group.tests if family(test)]
            adjusted = self._adjusted([test.p for _, test in tests])
            for (group, test), p in zip(tests, adjusted, strict=True):
                note = f"{self.correction}, {len(tests)} tests"
                group.add("auc_p_adjusted", p, test.regime.suffix, layer=test.layer, note=note)
                if test.layer == 0:
                    self._verdict(group, test, p, len(tests))

    def _adjusted(self, p_values: list[float]) -> list[float]:
        if self.correction == "none" or not p_values:
            return p_values
        correct = bonferroni if self.correction == "bonferroni" else benjamini_hochberg
        return correct(p_values).tolist()

    def _verdict(self, group: GroupReadings, test: DetectionTest, p: float, n_tests: int) -> None:
        regime, effect = test.regime, self.smallest_effect
        # A null has to be judged at the level it had to reach in its family. Of Benjamini-Hochberg's levels that is the
        # least a single signal has.
        level = self.level if self.correction == "none" else self.level / n_tests
        n = _effective_n(test)
        best = detection_power(n, regime.purity, effect, level=level, inflation=CV_INFLATION)
        threshold = detectable_auc(regime.n // 2, regime.n // 2, level=level, power=0.5)
        if test.standard_error:
            threshold = max(threshold, clustered_threshold(test.standard_error, regime.clusters, level))
        planted = None
        if p > self.level and best >= self.power:
            planted = group.attempt(
                "planted_power", regime.suffix,
                lambda: planted_power(
                    test.states, regime.labels, regime.folds, regime.n_marked, separation=effect, seed=self.seed,
                    threshold=threshold, groups=regime.groups,
                ),
            )  # fmt: skip
        if planted is not None:
            group.add("planted_power", planted, regime.suffix, note=f"of effects of s = {effect:g}")
        had = best if planted is None else min(best, planted)
        word = verdict(p, had, level=self.level, wanted_power=self.power)
        group.verdicts[regime.suffix] = word
        group.add("verdict", VERDICTS[word], regime.suffix, note=self._in_words(word, test, best, planted, level))

    def _in_words(self, word: str, test: DetectionTest, best: float, planted: float | None, level: float) -> str:
        regime, effect = test.regime, f"s = {self.smallest_effect:g}"
        where = f"AUC {test.auc:.3f} at purity {regime.purity:.3g}, n = {regime.n}"
        if word == DETECTED:
            return f"{word}: {where}"
        if word == NOT_DETECTED:
            had = best if planted is None else min(best, planted)
            return f"{word}: {where}; an effect of {effect} would have been found with power {had:.2f}"
        if planted is not None:
            why = f"this probe finds a planted {effect} with power {planted:.2f} only"
        else:
            why = f"no probe could find {effect} with power above {best:.2f}"
        return f"{word}: {where}; {why}, {self.power:g} wanted. {self._needed(test, level)}; this is no null result"

    def _needed(self, test: DetectionTest, level: float) -> str:
        regime = test.regime
        try:
            needed = sample_budget(
                regime.purity, self.smallest_effect, level=level, power=self.power, inflation=CV_INFLATION,
                dimension=min(test.states.shape[1], regime.n),
            )  # fmt: skip
        except ValueError as error:  # an effect so small that no number of texts is one
            return str(error).rstrip(".").capitalize()
        # Cells of several pairs are worth fewer texts than they hold.
        return f"About n = {math.ceil(needed * regime.n / _effective_n(test))} would be needed"

    def _over_groups(self, groups: Sequence[GroupReadings]) -> list[Reading]:
        """Means over groups, and the number of groups detected."""
        everything = GroupReadings(self.name, "", groups[0].layers[:1])
        for metric in ("s_hat", "s_change", "auc", "auc_mixed"):
            # A set without neutral texts has no mixture by design; a group whose mixture could not be read is missing.
            read = [g for g in groups if metric != "auc_mixed" or len(self._designs[g.group].regimes) > 1]
            if not read:
                continue
            values = [group.values.get(metric) for group in read]
            missing = [group.group for group, value in zip(read, values, strict=True) if value is None]
            if missing:
                everything.add(metric, None, note=f"not read for {', '.join(missing)}")
            else:
                everything.add(metric, sum(values) / len(values), note=f"mean of {len(values)} of {len(groups)} groups")
        # A group is detected where one of its tests says so, corrected as they are for being many.
        words = [next((word for word in VERDICTS if word in group.verdicts.values()), None) for group in groups]
        unread = [group.group for group, word in zip(groups, words, strict=True) if word is None]
        counted = ", ".join(f"{words.count(word)} {word}" for word in VERDICTS if word in words)
        everything.add("n_detected", None if unread else float(words.count(DETECTED)),
                       note=f"not read for {', '.join(unread)}" if unread else counted)  # fmt: skip
        return everything.readings


def _effective_n(test: DetectionTest) -> float:
    """Texts in cells of their own that would tell as much: fewer than there are where cells hold several pairs."""
    regime = test.regime
    if not test.standard_error:
        return regime.n
    return max(2.0, regime.n * min(1.0, (null_std(regime.n // 2, regime.n // 2) / test.standard_error) ** 2))


def _check_device(device: str | None) -> None:
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device must be one that this machine has, such as 'cpu'; got {device!r}: {reason}") from None


def _check(
    sets: Mapping[str, CounterfactualSet], layer: int | float, smallest_effect: float, level: float, power: float,
    correction: str, probes: Sequence[str],
) -> None:  # fmt: skip
    if not sets:
        raise ValueError("sets must name at least one group, got none; give {'group name': CounterfactualSet(...)}.")
    for group, stimuli in sets.items():
        if not isinstance(group, str) or not group or "/" in group:
            raise ValueError(f"sets must have names that are not empty and hold no '/', got {group!r}.")
        if not isinstance(stimuli, CounterfactualSet):
            raise ValueError(
                f"sets[{group!r}] must be a CounterfactualSet, got {type(stimuli).__name__}; see from_file."
            )
    if isinstance(layer, bool) or not isinstance(layer, (int, float)):
        raise ValueError(
            f"layer must be an index or a fraction of the depth, got {layer!r}; to read all, pass scan=True."
        )
    if isinstance(layer, float) and not 0.0 <= layer <= 1.0:
        raise ValueError(f"layer as a fraction of the depth must lie in [0, 1], got {layer}.")
    if not 0 < smallest_effect < math.inf:
        raise ValueError(f"smallest_effect must be a positive separation, got {smallest_effect!r}.")
    for name, value in (("level", level), ("power", power)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie strictly between 0 and 1, got {value!r}.")
    if power <= level:
        raise ValueError(f"power must be above level, or chance would do; got power {power} and level {level}.")
    if correction not in CORRECTIONS:
        raise ValueError(f"correction must be one of {', '.join(CORRECTIONS)}; got {correction!r}.")
    unknown = [kind for kind in probes if kind not in PROBES]
    if unknown:
        raise ValueError(f"probes must be among {', '.join(PROBES)}; got {unknown[0]!r}.")
