"""Fragmentation: do differences between queries and their anonymised variants point one way (knowledge) or scatter?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from monitor.activations import Activations, States, resolve_layer
from monitor.geometry import dispersion, drift, gram
from monitor.geometry.knowledge import MIN_VARIANTS, knowledge_null, knowledge_z, permutation_p
from monitor.geometry.resampling import jackknife_interval, spread_groups
from monitor.readings import Reading
from monitor.stimuli.encoding import qa_answer, qa_prompt
from monitor.stimuli.forget_set import Pair

_DEFAULT_LAYER = 0.8
_EVERY_LAYER = ("all", "argmax_auss_l2", "argmin_s2")
# 20 groups: 19 degrees of freedom for the interval, and 20 cheap evaluations.
_GROUPS = 20
_OF_CONTROLS = ("auss_l2", "norm_anon_diff_s2", "knowledge_z", "knowledge_p", "cka")


class Fragmentation:
    """Geometry of Δv_i = h(q_i) - mean_k h(a_i^k) over a forget set.

    Parameters
    ----------
    pairs : sequence of Pair
        ``id``, ``question``, ``answer`` and ``anonymized``, a tuple of (question, answer) variants. Variant k of every
        pair must belong to one self-consistent invented universe. A pair with a variant equal to the original is left
        out, with a warning.
    layer : int, float or str
        Hidden-state index, fraction of the depth, or ``"all"`` (0.8 of the depth first, then every other layer),
        ``"argmax_auss_l2"`` or ``"argmin_s2"`` (the layer where that is so *on the reference*, the same one all
        through the run; S_2 is that of the raw states). The last three read every layer.
    pooling : str
        One of the activation pass's poolings. ``"mean"`` is the published one; the default leaves the first token's
        massive activation out, which otherwise is what gets measured.
    batches : int
        Disjoint batches whose mean directions are compared.
    seed : int
        Of the partition into batches; 42 is the published one.
    controls : mapping of str to sequence of Pair, optional
        Other pair sets, read in the same way and reported under their name as group: knowledge_z, knowledge_p,
        auss_l2, norm_anon_diff_s2 and cka.
    name : str
        First part of every reading's name.

    Raises
    ------
    ValueError
        For pairs without variants, fewer pairs than batches, a layer that is none, an empty name of a control group.

    Notes
    -----
    The text is ``"{question}\\nAnswer: {answer}"``. Definitions: arXiv 2611.05272, Sec. 3 and App. C, in
    `monitor.geometry.gram` and `monitor.geometry.dispersion`; knowledge_z in `monitor.geometry.knowledge`; drift
    against the reference on the queries, arXiv 2505.16831, in `monitor.geometry.drift`. Intervals: 95 %, delete-a-group
    jackknife over pairs, at the headline layer. They say how much depends on the choice of *pairs*, not of names.

    What cannot be computed from what was read (non-finite states, zero differences) is an invalid reading with a note,
    never an exception.
    """

    headline = ("auss_l2", "norm_anon_diff_s2", "knowledge_z")

    def __init__(
        self,
        pairs: Sequence[Pair],
        *,
        layer: int | float | str = _DEFAULT_LAYER,
        pooling: str = "mean_no_sink",
        batches: int = 10,
        seed: int = 42,
        controls: Mapping[str, Sequence[Pair]] | None = None,
        name: str = "fragmentation",
    ) -> None:
        self.name = name
        self.layer = _checked_layer(layer)
        self.settings = {
            "layer": layer,
            "pooling": pooling,
            "batches": batches,
            "seed": seed,
            "controls": [*(controls or {})],
        }
        self._stimuli = {"": _PairTexts(pairs, "pairs", self.layer, pooling, batches, seed)}
        for group, control in (controls or {}).items():
            if not group:
                raise ValueError("controls must have names that are not empty: '' stands for the forget pairs")
            self._stimuli[group] = _PairTexts(control, f"controls[{group!r}]", self.layer, pooling, batches, seed)

    @property
    def stimuli(self) -> tuple[States, ...]:
        return tuple(texts.request for texts in self._stimuli.values())

    def read(self, now: Activations, reference: Activations) -> list[Reading]:
        request = self._stimuli[""].request
        indices = now.layers(request)
        if self.layer in _EVERY_LAYER and now.n_layers != reference.n_layers:
            raise ValueError(
                f"`layer={self.layer!r}` compares layer with layer, and the model has {now.n_layers} blocks where the "
                f"reference has {reference.n_layers}. Give a fraction of the depth, such as 0.8."
            )
        chosen = indices.index(self._headline_layer(indices, reference))
        readings = []
        for group, texts in self._stimuli.items():
            states, before = now.states(texts.request), reference.states(texts.request)
            order = [chosen, *(i for i in range(len(indices)) if i != chosen)] if self.layer == "all" else [chosen]
            for i in order:
                cloud = texts.cloud(states[:, i], before[:, i])
                wanted = _METRICS if group == "" else [m for m in _METRICS if m.name in _OF_CONTROLS]
                readings += self._read_cloud(cloud, wanted, group, indices[i], interval=i == chosen)
        return readings

    def _read_cloud(
        self, cloud: _Cloud, wanted: Sequence[_Metric], group: str, layer: int, interval: bool
    ) -> list[Reading]:
        values, problems = {}, {}
        for metric in wanted:
            try:
                value = metric.compute(cloud)
                # A model that is falling apart can overflow to a number that says nothing: invalid, not an exception.
                if bool(torch.isfinite(value)):
                    values[metric.name] = value
                else:
                    problems[metric.name] = f"the value was {float(value)}"
            except (ValueError, torch.linalg.LinAlgError) as error:
                problems[metric.name] = str(error)
        bounds = _intervals(cloud, [m for m in wanted if m.name in values], values) if interval else {}
        readings = []
        for metric in wanted:
            valid = metric.name in values
            low, high = bounds.get(metric.name, (None, None))
            readings.append(
                Reading(
                    measure=self.name,
                    metric=metric.name,
                    value=float(values[metric.name]) if valid else None,
                    group=group,
                    layer=layer,
                    low=low,
                    high=high,
                    higher_means=metric.higher_means,
                    range=metric.range(cloud),
                    valid=valid,
                    note=metric.note(cloud, float(values[metric.name])) if valid else problems[metric.name],
                )
            )
        return readings

    def _headline_layer(self, indices: Sequence[int], reference: Activations) -> int:
        """Hidden-state index the headline readings are taken at."""
        if self.layer not in _EVERY_LAYER:
            return indices[0]
        texts = self._stimuli[""]
        default = resolve_layer(_DEFAULT_LAYER, indices[-1])  # every layer was read, so the last index is L
        if self.layer == "all":
            return default
        states = reference.states(texts.request)
        best = (-math.inf, default)
        for i, index in enumerate(indices):
            cloud = texts.cloud(states[:, i], states[:, i])
            try:
                score = dispersion.auss_l2(cloud.directions) if self.layer == "argmax_auss_l2" else -_reg_s2(cloud)
            except (ValueError, torch.linalg.LinAlgError):
                continue  # such a layer cannot be read; if none can, every reading says why at the default layer
            best = max(best, (float(score), index))
        return best[1]


class _PairTexts:
    """The texts of one pair set, in the order queries, variants of pair 0, of pair 1, ..., and the way back."""

    def __init__(
        self, pairs: Sequence[Pair], name: str, layer: int | float | str, pooling: str, batches: int, seed: int
    ) -> None:
        bare = [pair.id for pair in pairs if not pair.anonymized]
        if bare:
            raise ValueError(
                f"{name} must have anonymised variants; none for {_some(bare)}. Add `anonymized`, or an entity table"
            )
        unchanged = [any(_text(*variant) == _text(p.question, p.answer) for variant in p.anonymized) for p in pairs]
        changed = [pair for pair, left_out in zip(pairs, unchanged, strict=True) if not left_out]
        same = [pair.id for pair, left_out in zip(pairs, unchanged, strict=True) if left_out]
        if same:
            warnings.warn(
                f"{name}: {len(same)} of {len(pairs)} pairs left out, a variant equals the original: {_some(same)}",
                stacklevel=4,
            )
        try:
            self.batches = dispersion.partition(len(changed), batches, seed)
        except ValueError as error:
            raise ValueError(f"{name} that anonymisation changes: {error}") from None
        self.counts = [len(pair.anonymized) for pair in changed]
        queries = [_text(pair.question, pair.answer) for pair in changed]
        variants = [_text(*variant) for pair in changed for variant in pair.anonymized]
        layers = "all" if layer in _EVERY_LAYER else (layer,)
        self.request = States((*queries, *variants), layers=layers, pooling=pooling)

    def cloud(self, states: Tensor, reference: Tensor) -> _Cloud:
        """`states` and `reference`: [n_texts, d] of one layer."""
        n, universes = len(self.counts), min(self.counts)
        states = states.double()
        variants = states[n:].split(self.counts)
        return _Cloud(
            query=states[:n],
            mean_variant=torch.stack([v.mean(0) for v in variants]),
            universes=torch.stack([v[:universes] for v in variants], dim=1),
            reference=reference[:n].double(),
            batches=self.batches,
        )


@dataclass(frozen=True)
class _Cloud:
    """What all metrics of one pair set at one layer are computed from.

    query, mean_variant, reference : [n, d];  universes : [K, n, d];  batches : indices of pairs.
    """

    query: Tensor
    mean_variant: Tensor
    universes: Tensor
    reference: Tensor
    batches: Sequence[Tensor]

    @cached_property
    def differences(self) -> Tensor:
        return self.query - self.mean_variant

    @cached_property
    def unit_differences(self) -> Tensor:
        return gram.unit(gram.check_vectors(self.differences, "differences"), "differences")

    @cached_property
    def directions(self) -> Tensor:
        return dispersion.batch_directions(self.differences, self.batches)

    @cached_property
    def null(self) -> tuple[Tensor, Tensor]:
        if len(self.universes) < MIN_VARIANTS:
            raise ValueError(
                f"not reported: each pair needs at least {MIN_VARIANTS} anonymised variants for a null; "
                f"a pair has {len(self.universes)}"
            )
        return knowledge_null(self.query, self.universes, self.batches)

    def keep(self, pairs: Tensor) -> _Cloud:
        """The same with these pairs only; a batch that lost all its pairs is gone."""
        position = torch.full((len(self.query),), -1)
        position[pairs] = torch.arange(len(pairs))
        batches = [position[batch][position[batch] >= 0] for batch in self.batches]
        return _Cloud(
            self.query[pairs],
            self.mean_variant[pairs],
            self.universes[:, pairs],
            self.reference[pairs],
            [batch for batch in batches if len(batch)],
        )


@dataclass(frozen=True)
class _Metric:
    name: str
    compute: Callable[[_Cloud], Tensor]
    higher_means: str
    range: Callable[[_Cloud], tuple[float, float]]
    note: Callable[[_Cloud, float], str] = lambda cloud, value: ""


def _reg_s2(cloud: _Cloud) -> Tensor:
    return gram.gram_entropy(cloud.query)


def _bits(cloud: _Cloud) -> tuple[float, float]:
    return 0.0, math.log2(min(cloud.query.shape))


def _cosine(cloud: _Cloud) -> tuple[float, float]:
    return -1 / (len(cloud.query) - 1), 1.0


def _from(low: float, high: float = math.inf) -> Callable[[_Cloud], tuple[float, float]]:
    return lambda cloud: (low, high)


def _rank(cloud: _Cloud, entropy: float) -> str:
    return f"effective rank 2^S1 = {2**entropy:.2f} of at most {min(cloud.query.shape)}"


def _duals(cloud: _Cloud, value: float) -> str:
    b = len(cloud.batches)
    trace = value * (b - 1) / (2 * b)
    centroid = max(1 - trace, 0.0) ** 0.5
    return (
        f"B = {b} batches; the same number as auss_cos = auss_l2/2 = {value / 2:.4g}, "
        f"cov_trace = auss_l2 (B-1)/(2B) = {trace:.4g}, centroid_norm = sqrt(1 - cov_trace) = {centroid:.4g}"
    )


def _against_null(cloud: _Cloud, value: float) -> str:
    observed, null = cloud.null
    return (
        f"centroid norm {float(observed):.4g} against {float(null.mean()):.4g} ± {float(null.std(0)):.2g} (sd) in "
        f"{len(null)} invented universes, corrected for estimating that sd from {len(null)} values"
    )


_SPREAD = "differences spread over more directions"
_SCATTERED = "batch directions scatter more: less coherent, less known"
_COHERENT = "batch directions agree more: more coherent"
_METRICS = (
    _Metric("auss_l2", lambda c: dispersion.auss_l2(c.directions), _SCATTERED,
            lambda c: (0.0, 2 * len(c.batches) / (len(c.batches) - 1)), _duals),
    _Metric("auss_cos2", lambda c: dispersion.auss_cos2(c.directions), _SCATTERED, _from(0, 1)),
    _Metric("auss_jac", lambda c: dispersion.auss_jac(c.directions), _SCATTERED, _from(0, 1),
            lambda c, v: f"index sets of the {dispersion.JACCARD_COORDINATES} largest coordinates"),
    _Metric("auss_jac_soft", lambda c: dispersion.auss_jac_soft(c.directions), _SCATTERED, _from(0, 1)),
    _Metric("second_moment_top", lambda c: dispersion.second_moment_top(c.directions), _COHERENT,
            lambda c: (1 / len(c.batches), 1.0)),
    _Metric("cov_top", lambda c: dispersion.cov_top(c.directions), "batches disagree more along one axis",
            _from(0, 1)),
    _Metric("knowledge_z", lambda c: knowledge_z(*c.null), "the concept is more coherent than invented names make it",
            _from(-math.inf), _against_null),
    _Metric("knowledge_p", lambda c: permutation_p(*c.null), "the query is more like an invented universe",
            lambda c: (1 / (len(c.universes) + 1), 1.0),
            lambda c, v: f"permutation p, cannot be below 1/(K+1) = {1 / (len(c.universes) + 1):.3f}"),
    _Metric("norm_anon_diff_s2", lambda c: gram.gram_entropy(c.unit_differences), _SPREAD, _bits),
    _Metric("norm_anon_diff_s1", lambda c: gram.gram_entropy(c.unit_differences, 1.0), _SPREAD, _bits, _rank),
    _Metric("anon_diff_s2", lambda c: gram.gram_entropy(c.differences), _SPREAD, _bits),
    _Metric("anon_diff_s1", lambda c: gram.gram_entropy(c.differences, 1.0), _SPREAD, _bits, _rank),
    _Metric("anon_diff_mean_norm", lambda c: gram.mean_norm(c.differences), "names change the states more", _from(0)),
    _Metric("anon_diff_mean_cos", lambda c: gram.mean_cosine(c.differences), "differences point more one way", _cosine),
    _Metric("reg_s2", _reg_s2, "query states spread over more directions", _bits),
    _Metric("reg_s1", lambda c: gram.gram_entropy(c.query, 1.0), "query states spread over more directions", _bits,
            _rank),
    _Metric("reg_mean_norm", lambda c: gram.mean_norm(c.query), "larger query states", _from(0)),
    _Metric("reg_mean_cos", lambda c: gram.mean_cosine(c.query), "query states point more one way", _cosine),
    _Metric("cka", lambda c: drift.linear_cka(c.query, c.reference), "query states are more like the reference's",
            _from(0, 1)),
    _Metric("pca_similarity", lambda c: drift.pca_similarity(c.query, c.reference),
            "the first principal direction is more like the reference's", _from(0, 1)),
    _Metric("pca_shift", lambda c: drift.pca_shift(c.query, c.reference),
            "moved outwards along the reference's first principal direction", _from(-math.inf)),
)  # fmt: skip


def _intervals(
    cloud: _Cloud, metrics: Sequence[_Metric], values: Mapping[str, Tensor]
) -> dict[str, tuple[float, float]]:
    """Jackknife interval of each metric that has one, cut to the metric's range. A p-value has none."""
    metrics = [metric for metric in metrics if metric.name != "knowledge_p"]
    if not metrics:
        return {}

    def statistic(kept: Tensor) -> Tensor:
        part = cloud.keep(kept)
        numbers = []
        for metric in metrics:
            try:
                numbers.append(metric.compute(part))
            except (ValueError, torch.linalg.LinAlgError):  # one metric without an interval, not all of them
                numbers.append(torch.tensor(math.nan, dtype=torch.float64))
        return torch.stack(numbers)

    groups = spread_groups(cloud.batches, min(_GROUPS, len(cloud.query)))
    low, high = jackknife_interval(statistic, torch.stack([values[m.name] for m in metrics]), groups)
    found = {}
    for metric, bottom, top in zip(metrics, low.tolist(), high.tolist(), strict=True):
        if math.isfinite(bottom) and math.isfinite(top):
            least, most = metric.range(cloud)
            found[metric.name] = (max(bottom, least), min(top, most))
    return found


def _checked_layer(layer: int | float | str) -> int | float | str:
    fits = (
        layer in _EVERY_LAYER if isinstance(layer, str)
        else 0 <= layer <= 1 if isinstance(layer, float)
        else isinstance(layer, int) and not isinstance(layer, bool)
    )  # fmt: skip
    if not fits:
        raise ValueError(
            f"layer must be an index, a fraction of the depth between 0.0 and 1.0, or one of {_EVERY_LAYER}; "
            f"got {layer!r}"
        )
    return layer


def _text(question: str, answer: str) -> str:
    return qa_prompt(question) + qa_answer(answer)


def _some(ids: Sequence[str]) -> str:
    return ", ".join(map(str, ids[:5])) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
