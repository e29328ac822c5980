"""Fragmentation on a toy model whose knowledge is known: bags of words, with or without a concept direction."""

from __future__ import annotations

import math
import time
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from monitor.activations import States, resolve_layer
from monitor.geometry.dispersion import auss_l2, batch_directions, partition
from monitor.geometry.gram import gram_entropy
from monitor.measures.fragmentation import Fragmentation

K = 8


@dataclass(frozen=True)
class Pair:
    id: str
    question: str
    answer: str
    anonymized: tuple[tuple[str, str], ...]


def make_pairs(n: int = 30, prefix: str = "real", variants: int = K) -> list[Pair]:
    """A forget set of ten names, the first few in most pairs. Name e of universe k is the word ``<prefix>k<k>e<e>``."""
    generator = torch.Generator().manual_seed(zlib.crc32(prefix.encode()))
    popularity = 1 / torch.arange(1, 11, dtype=torch.float64)

    def sentence(i: int, names: list[int], world: str) -> tuple[str, str]:
        return f"what q{prefix}{i} did {world}e{names[0]} do with {world}e{names[1]}", f"{world}e{names[2]}"

    pairs = []
    for i in range(n):
        names = torch.multinomial(popularity, 3, generator=generator).tolist()
        others = tuple(sentence(i, names, f"{prefix}k{k}") for k in range(variants))
        pairs.append(Pair(f"{prefix}-{i}", *sentence(i, names, prefix), others))
    return pairs


class ToyActivations:
    """Pooled states of a model that adds up word vectors, and a concept for each word of its own world `knows`.

    The deeper a layer the more of the concept it has; layer 0 is lexical, as an embedding table is.
    """

    n_layers = 5
    hidden_size = 48
    vocab_size = 1000

    def __init__(self, requests: Sequence[States], knows: str | None = None, seed: int = 0, strength: float = 1.5):
        self.requests, self.knows, self.seed, self.strength = tuple(requests), knows, seed, strength
        self.broken: dict[int, float] = {}  # layer -> value that everything there is
        self.vectors: dict[str, torch.Tensor] = {}

    def vector(self, word: str) -> torch.Tensor:
        if word not in self.vectors:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{word}/{self.seed}".encode()))
            self.vectors[word] = torch.randn(self.n_layers + 1, self.hidden_size, generator=generator)
        return self.vectors[word]

    def text(self, text: str) -> torch.Tensor:
        words = text.split()
        state = sum(self.vector(word) for word in words) / len(words)
        if self.knows and any(word.startswith(f"{self.knows}e") for word in words):
            depth = torch.linspace(0, self.strength, self.n_layers + 1)[:, None]
            state = state + depth * self.vector("the concept")
        for layer, value in self.broken.items():
            state[layer] = value
        return state

    def layers(self, request: States) -> tuple[int, ...]:
        assert request in self.requests
        if request.layers == "all":
            return tuple(range(self.n_layers + 1))
        return tuple(resolve_layer(layer, self.n_layers) for layer in request.layers)

    def states(self, request: States) -> torch.Tensor:
        return torch.stack([self.text(text) for text in request.texts])[:, list(self.layers(request))]


def read(measure: Fragmentation, now: ToyActivations | None = None, reference: ToyActivations | None = None, **toy):
    now = now or ToyActivations(measure.stimuli, **toy)
    return measure.read(now, reference or now)


def first(readings, metric, group=""):
    return next(r for r in readings if r.metric == metric and r.group == group)


def test_texts_and_request():
    measure = Fragmentation(make_pairs(12, variants=3), pooling="mean")
    (request,) = measure.stimuli
    assert request.layers == (0.8,) and request.pooling == "mean"
    assert len(request.texts) == 12 * 4
    pair = make_pairs(12, variants=3)[0]
    assert request.texts[0] == f"{pair.question}\nAnswer: {pair.answer}"
    assert request.texts[12:15] == tuple(f"{q}\nAnswer: {a}" for q, a in pair.anonymized)


def test_values_are_the_definitions():
    pairs = make_pairs(23)
    measure = Fragmentation(pairs, batches=5)
    toy = ToyActivations(measure.stimuli, knows="real")
    readings = measure.read(toy, toy)

    def state(question, answer):
        return toy.text(f"{question}\nAnswer: {answer}")[4].double()

    query = torch.stack([state(p.question, p.answer) for p in pairs])
    baseline = torch.stack([torch.stack([state(*v) for v in p.anonymized]).mean(0) for p in pairs])
    difference = query - baseline
    expected = {
        "auss_l2": auss_l2(batch_directions(difference, partition(23, 5))),
        "reg_s2": gram_entropy(query),
        "anon_diff_s2": gram_entropy(difference),
        "norm_anon_diff_s2": gram_entropy(torch.nn.functional.normalize(difference, dim=-1)),
        "anon_diff_mean_norm": difference.norm(dim=-1).mean(),
    }
    for metric, value in expected.items():
        assert first(readings, metric).value == pytest.approx(float(value), rel=1e-5), metric


def test_readings_are_complete_in_range_and_inside_their_intervals():
    measure = Fragmentation(make_pairs(), controls={"heldout": make_pairs(20, "held")})
    now = ToyActivations(measure.stimuli, knows="real", strength=0.8)
    readings = measure.read(now, ToyActivations(measure.stimuli, knows="real"))
    own = [r.metric for r in readings if r.group == ""]
    assert len(own) == len(set(own)) == 21
    assert {"auss_cos", "cov_trace", "centroid_norm"}.isdisjoint(own)  # the same number as auss_l2, in its note
    assert {r.metric for r in readings if r.group == "heldout"} == {
        "auss_l2", "norm_anon_diff_s2", "knowledge_z", "knowledge_p", "cka"
    }  # fmt: skip
    for r in readings:
        assert r.valid and r.higher_means and r.layer == 4 and r.measure == "fragmentation", r
        assert r.range[0] <= r.value <= r.range[1] + 1e-9, r
        if r.metric == "knowledge_p":
            assert r.low is None
        else:
            assert r.range[0] - 1e-9 <= r.low <= r.value <= r.high <= r.range[1] + 1e-9, r
    assert first(readings, "auss_l2").range == (0, pytest.approx(20 / 9))
    for name in measure.headline:
        assert first(readings, name).valid
    note = first(readings, "auss_l2").note
    assert all(dual in note for dual in ("auss_cos", "cov_trace", "centroid_norm", "B = 10"))
    assert "effective rank" in first(readings, "reg_s1").note


def test_a_known_concept_stands_out_from_its_null_and_an_unknown_one_does_not():
    measure = Fragmentation(make_pairs(60), controls={"heldout": make_pairs(60, "held")})
    known = read(measure, knows="real")
    assert first(known, "knowledge_z").value > 2
    assert first(known, "knowledge_p").value == pytest.approx(1 / 9)
    assert abs(first(known, "knowledge_z", "heldout").value) <= 2
    # What makes the null necessary: without any knowledge, shared names alone keep the directions together.
    unknown = read(measure)
    assert first(unknown, "auss_l2").value < 1
    assert abs(first(unknown, "knowledge_z").value) <= 2


@pytest.mark.slow
def test_twenty_models_that_know_nothing():
    measure = Fragmentation(make_pairs(60))
    unknown = [first(read(measure, seed=seed), "knowledge_z").value for seed in range(20)]
    assert sum(abs(z) <= 2 for z in unknown) >= 18


def test_drift_against_the_reference():
    measure = Fragmentation(make_pairs())
    reference = ToyActivations(measure.stimuli, knows="real")
    same = measure.read(reference, reference)
    assert first(same, "cka").value == pytest.approx(1)
    assert first(same, "pca_similarity").value == pytest.approx(1)
    assert first(same, "pca_shift").value == pytest.approx(0, abs=1e-6)
    other = measure.read(ToyActivations(measure.stimuli, seed=1), reference)
    assert first(other, "cka").value < 0.9


@pytest.mark.parametrize("layer", ["all", "argmax_auss_l2", "argmin_s2"])
def test_layer_choices(layer):
    measure = Fragmentation(make_pairs(), layer=layer)
    assert measure.stimuli[0].layers == "all"
    now, reference = ToyActivations(measure.stimuli), ToyActivations(measure.stimuli, knows="real")
    readings = measure.read(now, reference)
    assert len({(r.metric, r.layer) for r in readings}) == len(readings)
    chosen = readings[0].layer
    if layer == "all":
        assert chosen == 4  # 0.8 of 5
        assert {r.layer for r in readings if r.metric == "knowledge_z"} == set(range(6))
        assert all(r.low is None for r in readings if r.layer != 4)
        return
    assert {r.layer for r in readings} == {chosen}
    # Chosen on the reference, whatever the model does now.
    every = Fragmentation(make_pairs(), layer="all").read(reference, reference)
    metric, best = ("auss_l2", max) if layer == "argmax_auss_l2" else ("reg_s2", min)
    assert chosen == best((r for r in every if r.metric == metric), key=lambda r: r.value).layer
    moved = {r.layer: r.value for r in Fragmentation(make_pairs(), layer="all").read(now, now) if r.metric == metric}
    assert chosen != best(moved, key=moved.get)


def test_layers_agree_with_one_another():
    every = read(Fragmentation(make_pairs(), layer="all"), knows="real")
    one = read(Fragmentation(make_pairs(), layer=2), knows="real")
    for r in one:
        other = next(x for x in every if x.metric == r.metric and x.layer == 2)
        assert other.value == pytest.approx(r.value), r.metric


def test_pairs_that_anonymisation_leaves_unchanged_are_left_out_with_a_warning():
    pairs = make_pairs(20)
    same = [Pair(f"same-{i}", "what is it", "this", (("what is it", "this"), ("what", "this"))) for i in range(2)]
    with pytest.warns(UserWarning, match=r"pairs: 2 of 22 pairs left out, a variant equals the original: same-0, sam"):
        measure = Fragmentation([same[0], *pairs, same[1]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = read(Fragmentation(pairs))
    for got, want in zip(read(measure), expected, strict=True):
        assert got.value == pytest.approx(want.value), got.metric


def test_structural_errors():
    pairs = make_pairs(20)
    with pytest.raises(ValueError, match="pairs that anonymisation changes: .*the number of batches, 10; got 9"):
        Fragmentation(pairs[:9])
    with pytest.raises(ValueError, match="batches must be at least 2"):
        Fragmentation(pairs, batches=1)
    with pytest.raises(ValueError, match="pairs must have anonymised variants; none for bare"):
        Fragmentation([*pairs, Pair("bare", "q", "a", ())])
    with pytest.raises(ValueError, match=r"controls\['heldout'\] that anonymisation changes"):
        Fragmentation(pairs, controls={"heldout": pairs[:5]})
    with pytest.raises(ValueError, match="controls must have names"):
        Fragmentation(pairs, controls={"": pairs})
    for layer in ("deepest", 1.5, True, None):
        with pytest.raises(ValueError, match="layer must be"):
            Fragmentation(pairs, layer=layer)
    with pytest.raises(ValueError, match="pooling"):
        Fragmentation(pairs, pooling="median")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="got 5"):
        Fragmentation([*pairs[:5], *[Pair(f"s{i}", "q", "a", (("q", "a"),)) for i in range(20)]])


def test_too_few_variants_take_away_knowledge_only():
    readings = read(Fragmentation(make_pairs(variants=2)))
    for metric in ("knowledge_z", "knowledge_p"):
        reading = first(readings, metric)
        assert not reading.valid and reading.value is None and "at least 3 anonymised variants" in reading.note
    assert all(r.valid for r in readings if not r.metric.startswith("knowledge"))


def test_unequal_numbers_of_variants_use_the_universes_all_pairs_have():
    pairs = make_pairs(20)
    shorter = [Pair(p.id, p.question, p.answer, p.anonymized[: 5 + i % 3]) for i, p in enumerate(pairs)]
    readings = read(Fragmentation(shorter))
    assert all(r.valid for r in readings)
    assert "in 5 invented universes" in first(readings, "knowledge_z").note
    fewer = [Pair(p.id, p.question, p.answer, p.anonymized[:5]) for p in pairs]
    assert first(read(Fragmentation(fewer)), "knowledge_z").value == pytest.approx(first(readings, "knowledge_z").value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_states_are_invalid_readings_with_a_note(value):
    measure = Fragmentation(make_pairs())
    now = ToyActivations(measure.stimuli)
    now.broken[4] = value
    readings = measure.read(now, ToyActivations(measure.stimuli))
    assert len(readings) == 21
    for r in readings:
        assert not r.valid and r.value is None and r.low is None and "finite" in r.note, r


def test_a_broken_reference_takes_away_drift_only():
    measure = Fragmentation(make_pairs())
    reference = ToyActivations(measure.stimuli)
    reference.broken[4] = math.nan
    readings = measure.read(ToyActivations(measure.stimuli), reference)
    assert {r.metric for r in readings if not r.valid} == {"cka", "pca_similarity", "pca_shift"}
    assert all("reference must be finite" in r.note for r in readings if not r.valid)


@pytest.mark.parametrize("layer", ["all", "argmax_auss_l2", "argmin_s2"])
def test_collapsed_states_never_raise(layer):
    measure = Fragmentation(make_pairs(), layer=layer)
    now, reference = ToyActivations(measure.stimuli), ToyActivations(measure.stimuli)
    for i in range(6):
        now.broken[i] = 0.0  # all states zero: no directions, no spectrum
        reference.broken[i] = 0.0
    readings = measure.read(now, reference)
    assert first(readings, "auss_l2").layer == 4 and not first(readings, "auss_l2").valid
    assert "anonymised text equal to the original" in first(readings, "auss_l2").note
    assert first(readings, "reg_mean_norm").value == 0


def test_read_is_deterministic_and_leaves_the_global_generator_alone():
    measure = Fragmentation(make_pairs())
    before = torch.random.get_rng_state()
    assert read(measure) == read(measure)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.slow
def test_read_is_quick_at_full_size():
    class Random(ToyActivations):
        n_layers, hidden_size = 30, 576

        def states(self, request):
            generator = torch.Generator().manual_seed(0)
            return torch.randn(len(request.texts), len(self.layers(request)), self.hidden_size, generator=generator)

    for layer, limit in ((0.8, 2.0), ("all", 20.0)):  # four times what one idle core takes
        measure = Fragmentation(make_pairs(64), layer=layer)
        now = Random(measure.stimuli)
        start = time.process_time()
        measure.read(now, now)
        assert time.process_time() - start < limit
