"""Concept recovery on planted states: a concept that stays, one that is gone, one that has moved."""

import math
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import binomtest

from monitor.activations import measure_activations
from monitor.geometry.concept_coverage import EntityProbe
from monitor.measures.concept_recovery import ConceptRecovery
from monitor.stimuli.concepts import ConceptSet, Context, Entity, load_concept_sets

WIDTH, RANK, ENTITIES, CLUES = 48, 3, 20, 4


def concept(name, n_entities=ENTITIES):
    def entity(i):
        contexts = tuple(
            Context(f"{name} number {i} by its clue {c} in form {t} is the", c) for c in range(CLUES) for t in range(3)
        )
        return Entity(f"{name}ling {i}", "any", (f"{name}ling {i}",), contexts)

    return ConceptSet(name, tuple(entity(i) for i in range(n_entities)))


def planted(measure, *, signal=3.0, noise=0.3, seed=0, turn=None, shift=0.0):
    """States of every text: centres of entities in a plane of RANK dimensions of their concept, noise around them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    table = {}
    for group, request in measure._requests.items():
        labels = torch.tensor(measure._concepts[group].labels)
        n = int(labels.max()) + 1
        basis, offset = torch.linalg.qr(draw(WIDTH, RANK)).Q, 5 * draw(WIDTH) / WIDTH**0.5
        centres = signal * draw(n, RANK) @ basis.mT
        states = centres[labels] + offset + noise * draw(len(labels), WIDTH)
        table[request] = ((states if turn is None else states @ turn) + shift)[:, None]
    negatives = measure._negatives
    table[negatives] = 5 * draw(len(negatives.texts), 1, WIDTH) / WIDTH**0.5 + noise * draw(1, 1, WIDTH)
    return SimpleNamespace(n_layers=4, states=table.__getitem__, table=table)


@pytest.fixture
def measure():
    sets = {"animals": concept("beast"), "plants": concept("plant")}
    return ConceptRecovery(sets, negatives=[f"no. {i}" for i in range(40)], rank=RANK, n_permutations=100)


def values(readings, group="animals"):
    return {r.metric: r for r in readings if r.group == group}


def test_what_has_not_changed_reads_the_same_under_both_subspaces(measure):
    states = planted(measure)
    found = values(measure.read(states, states))
    assert found["coverage"].value == found["coverage_reference"].value > 0.95
    assert found["exclusion"].value == found["exclusion_reference"].value > 0.95
    assert found["angle_max"].value < 0.1 and found["offset_drift"].value == 0
    assert found["probe_accuracy"].value > 0.5 and found["probe_p"].value == pytest.approx(1 / 101)
    assert found["probe_null"].value == pytest.approx(1 / ENTITIES, abs=0.03)
    for metric in ("coverage", "exclusion", "probe_accuracy"):
        assert found[metric].low <= found[metric].value <= found[metric].high


def test_the_effective_rank_is_that_of_the_plane(measure):
    states = planted(measure, noise=1e-3)
    assert 2 < values(measure.read(states, states))["effective_rank"].value <= RANK + 0.1


def test_a_concept_that_is_gone_covers_by_chance_and_is_not_told_apart(measure):
    start, gone = planted(measure), planted(measure, signal=0.0)
    found = values(measure.read(gone, start))
    assert found["probe_p"].value > 0.01
    assert found["probe_accuracy"].value == pytest.approx(1 / ENTITIES, abs=0.05)
    for metric in ("coverage", "coverage_reference"):
        assert found[metric].value < 0.25 < values(measure.read(start, start))[metric].value


def test_a_concept_that_has_moved_is_found_by_its_own_subspace_only(measure):
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5))).Q
    start, moved = planted(measure), planted(measure, turn=turn)
    before, found = values(measure.read(start, start)), values(measure.read(moved, start))
    assert found["coverage"].value == pytest.approx(before["coverage"].value, abs=1e-4)
    assert found["probe_accuracy"].value == pytest.approx(before["probe_accuracy"].value, abs=0.02)
    assert found["coverage_reference"].value < 0.3
    assert found["angle_max"].value > 45


def test_a_shift_of_everything_is_drift_of_the_offset_and_no_turn(measure):
    start, shifted = planted(measure), planted(measure, shift=2.0)
    found = values(measure.read(shifted, start))
    apart = (
        start.states(measure._requests["animals"])[:, 0].mean(0)
        - torch.cat([start.table[r][:, 0] for r in (measure._negatives, measure._requests["plants"])]).mean(0)
    ).norm()
    assert found["offset_drift"].value == pytest.approx(2.0 * WIDTH**0.5 / float(apart), rel=1e-4)
    assert found["angle_max"].value < 0.1
    assert found["coverage"].value == pytest.approx(values(measure.read(start, start))["coverage"].value, abs=1e-4)


def test_noise_without_a_concept_is_never_told_apart(measure):
    """The negative control: over twenty draws of nothing the p-values reject at their level."""
    rejected = 0
    for seed in range(10):
        nothing = planted(measure, signal=0.0, seed=seed)
        for group in ("animals", "plants"):
            rejected += values(measure.read(nothing, nothing), group)["probe_p"].value <= 0.05
    assert rejected <= 4  # P = 0.003 for a test at its level


def test_the_headlines_are_means_over_the_concepts(measure):
    states = planted(measure)
    readings = measure.read(states, states)
    whole = values(readings, "")
    assert set(whole) == set(measure.headline)
    for metric in measure.headline:
        of_groups = [values(readings, group)[metric].value for group in ("animals", "plants")]
        assert whole[metric].value == pytest.approx(sum(of_groups) / 2)
    assert [r.metric for r in readings[: len(whole)]] == list(measure.headline)


def test_a_concept_of_few_values_is_read_at_a_lower_rank_and_says_so():
    days = ConceptRecovery({"days": concept("day", 7)}, negatives=["a", "b", "c"], rank=8)
    states = planted(days)
    found = values(days.read(states, states), "days")
    assert "rank 4" in found["coverage"].note and found["coverage"].valid


def test_states_that_are_not_finite_give_invalid_readings_of_that_concept_alone(measure):
    start, broken = planted(measure), planted(measure)
    broken.table[measure._requests["animals"]][3] = math.nan
    readings = measure.read(broken, start)
    animals = values(readings)
    assert all(not r.valid and r.value is None and "not finite" in r.note for r in animals.values())
    # The animals' texts are negatives of the plants.
    assert all(not r.valid for r in values(readings, "plants").values())
    assert not any(r.valid for r in values(readings, "").values())


def test_readings_do_not_depend_on_a_generator_outside_and_move_none(measure):
    states = planted(measure)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = measure.read(states, states)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert measure.read(states, states) == first


def test_it_reads_a_model(tiny_llama, tiny_tokenizer):
    concepts = load_concept_sets(("animals",))
    measure = ConceptRecovery(concepts, n_permutations=20)
    now, start = (measure_activations(tiny_llama(s), tiny_tokenizer, measure.stimuli) for s in (1, 0))
    readings = measure.read(now, start)
    assert all(r.valid and r.layer == 3 for r in readings)
    assert values(readings)["angle_max"].value > 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concepts": {}}, "`concepts` is empty"),
        ({"concepts": {"a/b": concept("x")}}, "without '/'"),
        ({"concepts": {"few": concept("x", 4)}}, "few has 4 entities; at least 5"),
        ({"rank": 0}, "`rank` must be a whole number of at least 1, got 0"),
        ({"n_folds": 1}, "`n_folds`"),
        ({"n_permutations": 3}, "`n_permutations`"),
        ({"pooling": "first"}, "`pooling` must be one of"),
        ({"negatives": ["one"]}, "`negatives` must hold at least two"),
        ({"negatives": ["one", "one"]}, "at least two different texts, got 1"),
        ({"negatives": "text"}, "`negatives` must be a sequence of texts, got one string"),
        ({"negatives": [3, 4]}, "must hold non-blank strings"),
        ({"n_bootstrap": 1}, "`n_bootstrap` must be a whole number of at least 100, got 1"),
        ({"seed": "x"}, "`seed` must be a whole number of at least 0, got 'x'"),
        ({"seed": -1}, "`seed`"),
        ({"seed": 2**70}, "`seed` must be below"),
        ({"layer": "0.8"}, "`layer` must be an int or a fraction"),
        ({"layer": 1.5}, r"`layer` as a fraction of the depth must be in \[0, 1\], got 1.5"),
        ({"layer": float("nan")}, "`layer` as a fraction"),
        ({"layer": True}, "`layer` must be an int"),
    ],
)
def test_bad_parameters_are_named(options, message):
    given = {"concepts": {"animals": concept("beast")}, "negatives": ["a", "b"]} | options
    with pytest.raises(ValueError, match=message):
        ConceptRecovery(**given)


@pytest.mark.parametrize("concepts", [("days",), "days", {"days": 1}, [concept("beast")]])
def test_what_is_no_mapping_of_concept_sets_is_refused(concepts):
    with pytest.raises(ValueError, match="mapping of names to ConceptSets, as load_concept_sets"):
        ConceptRecovery(concepts)


def test_a_reference_of_another_architecture_is_said(measure):
    now = planted(measure)
    narrow = SimpleNamespace(n_layers=4, states=lambda request: now.states(request)[..., :20])
    with pytest.raises(
        ValueError, match="4 layers of width 20 and the model 4 of width 48.*leave concept_recovery out"
    ):
        measure.read(now, narrow)
    with pytest.raises(ValueError, match="9 layers of width 48 and the model 4"):
        measure.read(now, SimpleNamespace(n_layers=9, states=now.states))


def collapsed(states, jitter=0.0):
    """One state for all texts of a request, but for the rounding of a pass."""

    def first(request):
        every = states.states(request)
        noise = torch.randn(every.shape, generator=torch.Generator().manual_seed(5))
        return every[:1].expand_as(every) * (1 + jitter * noise)

    return SimpleNamespace(n_layers=4, states=first)


@pytest.mark.parametrize("jitter", [0.0, 1e-7])
def test_a_collapsed_model_gives_invalid_readings_and_no_error(measure, jitter):
    whole = planted(measure)
    flat = collapsed(whole, jitter)
    for now, reference in ((flat, whole), (whole, flat), (flat, flat)):
        readings = measure.read(now, reference)
        assert {(r.metric, r.group) for r in readings} == {(r.metric, r.group) for r in measure.read(whole, whole)}
        assert all(r.value is None or math.isfinite(r.value) for r in readings)
        found = values(readings)
        for metric in ("coverage", "exclusion", "angle_mean", "offset_drift"):
            assert not found[metric].valid and "must vary" in found[metric].note
        assert found["probe_p"].valid
    assert values(measure.read(whole, flat))["effective_rank"].valid, "it is of the model alone"
    blind = values(measure.read(flat, whole))
    assert not blind["effective_rank"].valid
    assert blind["probe_accuracy"].value < 0.2 and blind["probe_p"].value > 0.05


def test_no_value_told_apart_is_no_certainty(measure, monkeypatch):
    states = planted(measure)

    def probe(*_):
        return EntityProbe(0.0, 0.05, 0.01, 1.0, torch.zeros(ENTITIES, dtype=torch.float64))

    monkeypatch.setattr("monitor.measures.concept_recovery.entity_probe", probe)
    found = values(measure.read(states, states))["probe_accuracy"]
    expected = binomtest(0, ENTITIES).proportion_ci(method="wilson")
    assert (found.low, found.high) == (pytest.approx(expected.low), pytest.approx(expected.high)) and found.high > 0.1


def test_an_entity_of_one_clue_is_named():
    single = Entity("owl", "bird", ("owl",), (Context("It hoots: the", 0), Context("It hoots, the", 0)))
    few = ConceptSet("beasts", (*concept("beast", 6).entities, single))
    with pytest.raises(ValueError, match="owl of beasts"):
        ConceptRecovery({"beasts": few}, negatives=["a", "b"])
