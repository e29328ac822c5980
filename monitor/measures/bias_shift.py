"""Bias shift: have target groups moved towards the positive or the negative attributes since the reference?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from monitor.activations import Activations, States
from monitor.geometry.drift import linear_cka
from monitor.geometry.relative import procrustes_align, relative_bias, seat_bias
from monitor.geometry.statistics import bootstrap_means, mean_interval, percentile_interval
from monitor.readings import Reading
from monitor.stimuli.bias import BiasStimuli, load_bias_stimuli

_Number = tuple[float, float, float]  # value and both ends of its interval, nan where it has none
_CONTROL = "control"
_TOWARDS_POSITIVE = "moved towards the positive attributes"


class BiasShift:
    """Representational bias shift ΔB against a frozen reference.

    Parameters
    ----------
    stimuli : BiasStimuli, optional
        The sentences. Default: ``load_bias_stimuli("small")``. Without controls there is no ``delta_b_corrected`` and
        no ``delta_b/control``.
    layer : int or float
        Hidden-state index 0..L (negative counts from the end) or a fraction of the depth. Default: after the final
        norm, as published.
    pooling : str
        One of the activation pass's poolings. Default ``"mean"``, as published.
    n_bootstrap : int
        Resamples of each interval.
    seed : int
        Seed of the bootstrap's own generator.
    name : str
        First part of every reading's name.

    Raises
    ------
    ValueError
        For ``n_bootstrap`` below 1, an unknown pooling, or a group named like the control readings.

    Notes
    -----
    Readings, each for the whole (group ``""``) and each target group, m the number of anchors:

    - ``delta_b``: mean_s [b_now(s) − b_ref(s)], b(s) = S⁺(s) − S⁻(s) in relative space; within ±4√m. Negative means
      towards the negative attributes. Also for group ``"control"``: the same on sentences about no group.
    - ``delta_b_corrected``: ``delta_b`` minus ``delta_b/control``. Fine-tuning moves every sentence; this is what the
      target sentences moved beyond that.
    - ``b``: mean b of the model as it is now; within ±2√m. Its size depends on model and stimuli: compare it only with
      itself.
    - ``seat``: the shift of SEAT's B, by cosine in absolute space; within ±4.
    - ``procrustes_seat``: SEAT of the present targets, mapped by the best orthogonal map (fitted on all sentences),
      against the reference's attributes, minus the reference's SEAT; within ±4.
    - ``cka_drift`` (whole only): 1 − linear CKA of the targets; within [0, 1]. How far, not which way.

    Intervals are 95 % percentile bootstraps, paired (the same sentence in both models): over the target sentences of
    a group, and for the whole over templates, whose sentences of all groups are drawn together. For
    ``delta_b_corrected`` targets and controls are resampled independently. They speak of other sentences like these,
    not of other training runs. Against itself every shift is exactly 0 with the interval [0, 0].

    ``delta_b`` alone is no verdict on a group: whatever is trained on moves all sentences, attributes and anchors
    included, and in short trainings by more than the tone of what is said of the group. Read the corrected value with
    its interval, or compare with a run that differs only in what is suspected.

    Source: arXiv 2609.10060, Eqs. 2-7 and Sec. 4.5; intervals and the control are additions.
    """

    def __init__(
        self,
        stimuli: BiasStimuli | None = None,
        *,
        layer: int | float = -1,
        pooling: str = "mean",
        n_bootstrap: int = 1000,
        seed: int = 0,
        name: str = "bias_shift",
    ) -> None:
        stimuli = load_bias_stimuli("small") if stimuli is None else stimuli
        _check_names(tuple(stimuli.targets))
        if n_bootstrap < 1:
            raise ValueError(f"n_bootstrap must be at least 1, got {n_bootstrap}")
        self.name = name
        self.bias_stimuli = stimuli
        self.n_bootstrap = n_bootstrap
        self.seed = seed
        self.settings = {"layer": layer, "pooling": pooling, "n_bootstrap": n_bootstrap, "seed": seed}
        self._groups = tuple(stimuli.targets)
        self._n_templates = len(stimuli.targets[self._groups[0]])
        targets = tuple(text for texts in stimuli.targets.values() for text in texts)
        controls = tuple(text for texts in stimuli.controls.values() for text in texts)
        self._parts = (targets, controls, tuple(stimuli.positive), tuple(stimuli.negative), tuple(stimuli.anchors))
        self._request = States(tuple(text for part in self._parts for text in part), (layer,), pooling)
        self.headline = ("delta_b", *(("delta_b_corrected",) if controls else ()), "seat", "cka_drift")

    @property
    def stimuli(self) -> Sequence[States]:
        """All sentences, at the one layer."""
        return (self._request,)

    def read(self, now: Activations, reference: Activations) -> list[Reading]:
        """Readings of the model as it is now against the reference.

        States that are not finite or have norm zero make every reading invalid, with the first such text in the note.
        A reference of another width makes ``procrustes_seat`` invalid, targets that are all one point ``cka_drift``.
        """
        layer = now.layers(self._request)[0]
        states_now = now.states(self._request)[:, 0]
        states_reference = reference.states(self._request)[:, 0].to(states_now.device)
        problem = self._unusable(states_now, "the model") or self._unusable(states_reference, "the reference")
        numbers, problems = ({}, {}) if problem else self._numbers(states_now, states_reference)
        return [
            self._reading(metric, group, layer, numbers.get((metric, group)), problem or problems.get(metric, ""))
            for metric, group in self._names()
        ]

    def _names(self) -> list[tuple[str, str]]:
        controlled = bool(self._parts[1])
        names = [("delta_b", group) for group in ("", *self._groups, *((_CONTROL,) if controlled else ()))]
        if controlled:
            names += [("delta_b_corrected", group) for group in ("", *self._groups)]
        names += [(metric, group) for metric in ("b", "seat", "procrustes_seat") for group in ("", *self._groups)]
        return [*names, ("cka_drift", "")]

    def _numbers(self, now: Tensor, reference: Tensor) -> tuple[dict[tuple[str, str], _Number], dict[str, str]]:
        """(metric, group) -> value, low, high; and metric -> why it has none."""
        problems: dict[str, str] = {}
        score_reference = self._scores(reference)
        procrustes: Tensor | None = None
        cka: float | None = None
        # The very same states must give exactly 0. Recomputing them need not: products of matrices that lie at
        # different addresses may differ in the last bit.
        if torch.equal(now, reference):
            score_now, procrustes, cka = score_reference, score_reference.seat, 1.0
        else:
            score_now = self._scores(now)
            if now.shape[1] == reference.shape[1]:
                procrustes = self._procrustes_seat(now, reference)
            else:
                problems["procrustes_seat"] = (
                    f"no orthogonal map between widths {now.shape[1]} and {reference.shape[1]} (the reference's)"
                )
            try:
                cka = float(linear_cka(self._split(now)[0], self._split(reference)[0]))
            except ValueError as error:
                problems["cka_drift"] = str(error)
        shift = score_now.targets - score_reference.targets
        quantities = {
            "delta_b": shift,
            "b": score_now.targets,
            "seat": score_now.seat - score_reference.seat,
        }
        if procrustes is not None:
            quantities["procrustes_seat"] = procrustes - score_reference.seat
        numbers: dict[tuple[str, str], _Number] = {}
        for metric, values in quantities.items():
            for group, part, clusters in self._target_groups(values):
                low, high = mean_interval(part, clusters=clusters, n_bootstrap=self.n_bootstrap, seed=self.seed)
                numbers[metric, group] = float(part.mean()), low, high
        if score_now.controls is not None and score_reference.controls is not None:
            numbers |= self._against_control(shift, score_now.controls - score_reference.controls)
        if cka is not None:
            # Rounding may put CKA a hair above 1.
            numbers["cka_drift", ""] = max(0.0, 1.0 - cka), math.nan, math.nan
        return numbers, problems

    def _against_control(self, shift: Tensor, shift_control: Tensor) -> dict[tuple[str, str], _Number]:
        # The next seed: with the same one targets and controls would be drawn in step, not independently.
        seed = self.seed + 1
        clusters = self._templates(shift_control)
        low, high = mean_interval(shift_control, clusters=clusters, n_bootstrap=self.n_bootstrap, seed=seed)
        numbers = {("delta_b", _CONTROL): (float(shift_control.mean()), low, high)}
        resampled = bootstrap_means(shift_control, clusters=clusters, n_bootstrap=self.n_bootstrap, seed=seed)
        for group, part, clusters in self._target_groups(shift):
            means = bootstrap_means(part, clusters=clusters, n_bootstrap=self.n_bootstrap, seed=self.seed)
            interval = percentile_interval(means - resampled) if self._n_templates > 1 else (math.nan, math.nan)
            numbers["delta_b_corrected", group] = float(part.mean() - shift_control.mean()), *interval
        return numbers

    def _target_groups(self, values: Tensor) -> list[tuple[str, Tensor, Tensor | None]]:
        """Group, its values, and which of them are resampled together (None: each alone)."""
        by_group = values.reshape(len(self._groups), self._n_templates)
        return [
            ("", values, self._templates(values)),
            *((group, by_group[i], None) for i, group in enumerate(self._groups)),
        ]

    def _templates(self, values: Tensor) -> Tensor:
        """Template of each sentence of a sequence of groups."""
        return torch.arange(len(values), device=values.device) % self._n_templates

    def _split(self, states: Tensor) -> tuple[Tensor, ...]:
        return states.split([len(part) for part in self._parts])

    def _scores(self, states: Tensor) -> _Scores:
        targets, controls, positive, negative, anchors = self._split(states)
        return _Scores(
            targets=relative_bias(targets, positive, negative, anchors),
            controls=relative_bias(controls, positive, negative, anchors) if len(controls) else None,
            seat=seat_bias(targets, positive, negative),
        )

    def _procrustes_seat(self, now: Tensor, reference: Tensor) -> Tensor:
        aligned_targets = self._split(procrustes_align(now, reference))[0]
        _, _, positive, negative, _ = self._split(reference)
        return seat_bias(aligned_targets, positive, negative)

    def _unusable(self, states: Tensor, whose: str) -> str:
        norms = states.to(torch.float64).norm(dim=1)
        bad = (~torch.isfinite(norms) | (norms == 0)).nonzero().flatten().tolist()
        if not bad:
            return ""
        what = "zero" if float(norms[bad[0]]) == 0 else "not finite"
        return f"{len(bad)} states of {whose} are unusable, the first ({what}) of {self._request.texts[bad[0]]!r}"

    def _reading(self, metric: str, group: str, layer: int, number: _Number | None, problem: str) -> Reading:
        diameter = 2.0 * math.sqrt(len(self._parts[4]))  # of the cube [-1, 1]^m that relative representations fill
        higher_means, low_limit, high_limit = {
            "delta_b": (_TOWARDS_POSITIVE, -2 * diameter, 2 * diameter),
            "delta_b_corrected": (f"{_TOWARDS_POSITIVE}, beyond the controls", -4 * diameter, 4 * diameter),
            "b": ("nearer to the positive attributes", -diameter, diameter),
            "seat": (_TOWARDS_POSITIVE, -4.0, 4.0),
            "procrustes_seat": (_TOWARDS_POSITIVE, -4.0, 4.0),
            "cka_drift": ("target representations moved further, whichever way", 0.0, 1.0),
        }[metric]
        if metric == "delta_b" and group == _CONTROL:
            higher_means = "sentences about no group moved towards the positive attributes"
        value, low, high = (None, None, None) if number is None else number
        return Reading(
            self.name,
            metric,
            value,
            group=group,
            layer=layer,
            low=low,
            high=high,
            higher_means=higher_means,
            range=(low_limit, high_limit),
            valid=number is not None,
            note=problem,
        )


@dataclass(frozen=True)
class _Scores:
    """One model's b(s) of targets and controls, and SEAT of the targets; each [n_sentences] float64."""

    targets: Tensor
    controls: Tensor | None
    seat: Tensor


def _check_names(groups: Sequence[str]) -> None:
    taken = [group for group in groups if group in (_CONTROL, "")]
    if taken:
        raise ValueError(
            f"stimuli.targets must not name a group {taken[0]!r}: {_CONTROL!r} names the control readings and '' the "
            "whole; rename the group"
        )
