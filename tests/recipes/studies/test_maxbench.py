"""The MAxBench study end to end on a tiny model, and its tables on planted answers whose order is known."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from monitor.geometry.subspace_fits import pca
from monitor.judges.judgement import Judgement
from monitor.judges.mentions import MentionFinder, named
from monitor.judges.records import read_records
from monitor.stimuli.concepts import CONCEPTS, load_concept_sets
from monitor.stimuli.instructions import Instructions
from recipes.cli import main as command
from recipes.models import ModelError
from recipes.studies import maxbench, maxbench_arguments, maxbench_states, maxbench_steering, maxbench_tables
from recipes.studies.maxbench_arguments import MaxBenchArguments
from recipes.studies.maxbench_geometries import METHODS, Case, cases, seen_pairs, splits_of
from recipes.studies.maxbench_scores import Results, Scored, interval
from recipes.studies.maxbench_text import in_words

SHORT = Instructions(
    validation=("Say hello.", "Tell me more."),
    test=("Write a line.", "Who is it?", "Go on."),
    norms=("Why?", "How are you?", "Tell a joke.", "Sing.", "Where to?", "Be brief."),
)
ENTITIES = {
    "mammal": ("lion", "horse", "mouse", "whale"),
    "bird": ("robin", "eagle", "goose", "raven"),
    "fish": ("salmon", "shark", "tuna", "trout"),
}


class PlainJudge:
    """Mentions by word lists; everything is fluent and to the point."""

    name = "plain"

    def __init__(self) -> None:
        self.judged = 0

    def judge(self, instruction, responses, concept):
        self.judged += len(responses)
        found = [named(MentionFinder(concept).find(response)) for response in responses]
        return [Judgement(2 if mentions else 0, 2.0, 2.0, mentions) for mentions in found]

    def names_others(self, concept):
        return False


@pytest.fixture
def study(tmp_path, monkeypatch, tiny_llama, tiny_tokenizer):
    """Arguments of a study of two tiny concepts, one of them a cycle, on a tiny model."""
    for module in (maxbench_arguments, maxbench_states):
        monkeypatch.setattr(module, "load_instructions", lambda: SHORT)
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)

    def write(name, rows, **header):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if header:
            (tmp_path / f"{name}.json").write_text(json.dumps(header))
        return str(tmp_path / f"{name}.jsonl")

    def contexts(word):
        return [f"{opening} {word[::-1]} is" for opening in ("Here", "Then the", "Who says that", "A")]

    beasts = [
        {"entity": entity, "category": category, "forms": [entity, entity + "s"], "contexts": contexts(entity)}
        for category, of_category in ENTITIES.items() for entity in of_category
    ]  # fmt: skip
    hours = [{"entity": word, "contexts": contexts(word)} for word in ("dawn", "lunch", "dusk", "night", "late")]
    things = [{"entity": word, "contexts": contexts(word)} for word in ("mirror", "ladder", "candle")]
    return MaxBenchArguments(
        model=str(folder), output_dir=str(tmp_path / "study"), control=write("things", things),
        concepts=[write("beasts", beasts), write("hours", hours, ordered=True, cyclic=True)], task=False,
        methods=["unsteered", "prompting", "diff_mean", "pca", "diff_mean_pairs", "isotropic", "spline"], ranks=[1, 4],
        splits=1, layer="2", strengths=[0.5, 1.0], validation_prompts=1, validation_points=2, test_prompts=2, points=3,
        max_new_tokens=2, n_bootstrap=50, lowest_sigma=0.1,
    )  # fmt: skip


def planted(monkeypatch):
    """Steered answers that name as many entities as the points have dimensions, where these have an offset."""

    def answers(steerable, instructions, points):
        affine = points.mean(0).norm() > 0.5 * points.norm(dim=1).mean()
        spread = int((torch.linalg.svdvals(points - points.mean(0)) > 0.05 * points.norm(dim=1).mean()).sum())
        words = [word for of in zip(*ENTITIES.values(), strict=True) for word in of][: 1 + spread * 2]
        said = [f"The {words[i % len(words)]} and the {words[-1 - i % len(words)]}." for i in range(len(points))]
        # Without the offset, half of the answers are about nothing.
        return [[text if affine or i % 2 else "Nothing." for i, text in enumerate(said)] for _ in instructions]

    monkeypatch.setattr(maxbench_steering, "_answers", answers)


# --- end to end ---------------------------------------------------------------------------------------------------


def test_a_study_runs_and_goes_on_where_it_was_killed(study, capsys, monkeypatch):
    judge, second = PlainJudge(), PlainJudge()
    second.name = "other"
    records = maxbench.run(study, judge, second)
    out = capsys.readouterr().out
    n = judge.judged
    folder = Path(study.output_dir) / "cells"
    files = sorted(folder.rglob("*.jsonl"))
    # beasts: 2 + 2 splits x (1 + 4 + 4 + 1); hours: 2 + 2 x (1 + 4 + 4 + 1 + 1), each by two judges.
    assert len(files) == 2 * (22 + 24) and n == second.judged + (20 + 22) * 4
    assert all(json.dumps(record) for record in records)
    assert {r["table"] for r in records} == set(maxbench_tables.TABLES) - {"task"}
    assert "splits: beasts 2, hours 2\n" in out and "Affine beats linear" in out and "prompting" in out
    exact = {r["metric"]: r["value"] for r in records if r["table"] == "agreement"}
    assert exact["concept_exact"] == 1.0
    stored = read_records(folder / "beasts" / "entity-0" / "pca-affine-4.plain.jsonl")
    assert {r["role"] for r in stored} == {"validation", "test"} and len(stored) == 2 * 2 + 2 * 3
    assert {r["strength"] for r in stored if r["role"] == "validation"} == {0.5, 1.0}

    # Nothing is computed twice, whatever the kill left; a lost case is made anew, the same.
    assert maxbench.run(study, judge, second) == records and judge.judged == n
    lost = files[-1].parent / "pca-linear-1.plain.jsonl"
    before = lost.read_text()
    lost.unlink()
    lost.with_suffix(".partial").write_text("half a rec")
    assert maxbench.run(study, judge, second) == records
    assert lost.read_text() == before and judge.judged == n + 4 / 2 + 6 + 2

    # Tables alone need no model.
    monkeypatch.setattr(maxbench, "load_model", None)
    assert maxbench.run(replace(study, only_tables=True), judge, second) == records
    with pytest.raises(ValueError, match="cases of another setting .*points 3, now 4"):
        maxbench.run(replace(study, points=4), judge)


# --- what is run --------------------------------------------------------------------------------------------------

SETS = load_concept_sets(("animals", "days"))


def test_splits_take_turns_and_more_of_them_begin_with_the_same():
    both = splits_of(SETS["animals"], 2, ("category", "entity"), 0)
    assert [split.kind for split in both.values()] == ["category", "entity"] * 2 and len(both) == 4
    assert set(splits_of(SETS["animals"], 1, ("category",), 0)) == {next(iter(both))}
    for name in ("animals", "days"):
        few, many = (splits_of(SETS[name], n, ("category", "entity"), 3) for n in (1, 5))
        assert few.items() <= many.items() and len(many) == 10 - (name == "days") * 3  # seven days, seven splits


def test_cases_are_those_that_exist():
    days = SETS["days"]
    split = splits_of(days, 1, ("category",), 0)["value-0"]
    found = cases(days, split, list(METHODS), ("linear", "affine"), (1, 2, 8, 16))
    assert len(set(found)) == len(found)
    of = {name: [(case.form, case.rank) for case in found if case.method == name] for name in METHODS}
    assert of["diff_mean"] == of["reft_r1"] == [("linear", 1)]
    assert of["pca"] == [(form, rank) for form in ("linear", "affine") for rank in (1, 2, 8, 16)]
    # Six seen days have five directions between them, seven have six; a curve in one dimension is a line.
    assert [rank for form, rank in of["diff_mean_pairs"] if form == "affine"] == [1, 2, 5]
    assert of["spline"] == [("affine", 2), ("affine", 5)] and of["spline_all"] == [("affine", 2), ("affine", 6)]
    assert of["isotropic"] == [("affine", None)] and of["unsteered"] == of["prompting"] == []
    animals = SETS["animals"]
    split = splits_of(animals, 1, ("entity",), 0)["entity-0"]
    assert cases(animals, split, ["spline"], ("linear", "affine"), (1, 8)) == []


def test_paired_responses_name_no_entity_that_is_held_out():
    split = splits_of(SETS["animals"], 1, ("category",), 0).popitem()[1]
    heldout = [form for i in split.heldout for form in SETS["animals"].entities[i].forms]
    pairs = seen_pairs(SETS["animals"], split)
    assert 4 <= len(pairs) < 14
    assert not [form for pair in pairs for form in heldout if re.search(rf"\b{form}\b", pair.positive, re.I)]


def test_every_method_finds_a_geometry(study):
    """On the states of a tiny model; each form has the offset it says, each rank the columns."""
    sets = load_concept_sets(study.concepts)
    (control,) = load_concept_sets([study.control]).values()
    model, tokenizer = maxbench.load_model(study.model), maxbench.load_tokenizer(study.model)
    folder = Path(study.output_dir) / "states"
    asked = tokenizer, [*sets.values(), control], 2, folder
    states = maxbench_states.read_states(model, *asked, of="a", embedding=True, mixed=False)
    again = maxbench_states.read_states(None, *asked, of="a", embedding=True, mixed=False)
    assert states.keys() == again.keys() and all(torch.equal(states[name], again[name]) for name in states)
    with pytest.raises(ValueError, match="must be a transformers model"):  # those of another model are read anew
        maxbench_states.read_states(None, *asked, of="another", embedding=True, mixed=False)
    states["mixed"] = torch.cat([states[name] for name in (*sets, control.name)])
    methods = [name for name in METHODS if name not in ("sae", "reft_r1", "prompting", "unsteered")]
    for concept in sets.values():
        _, split = splits_of(concept, 1, ("entity",), 0).popitem()
        found = cases(concept, split, methods, ("linear", "affine"), (1, 3))
        material = maxbench.material_of(concept, split, states, control.name)
        assert set(material.labels.tolist()) == set(split.seen)
        fits = maxbench.Fits(material, found, None, 2, 0, None)
        for case in found:
            geometry = fits.geometry(case)
            assert geometry.dim == 32
            assert bool((geometry.offset == 0).all()) == (case.form == "linear")
            if case.method != "schatten_probe" and case.rank is not None:
                assert geometry.rank == case.rank, case
        nested = fits.geometry(Case("pca", "affine", 1))
        assert torch.allclose(nested.basis, pca(material.x, 1).basis, atol=1e-4)


def test_wordings_of_the_request_differ_and_name_no_entity():
    wordings = maxbench_steering.requests(SETS["animals"], 30)
    assert len(set(wordings)) == 30 and all("{instruction}" in text and "animals" in text for text in wordings)
    assert not [text for text in wordings if MentionFinder(SETS["animals"]).find(text.format(instruction="Go on."))]
    assert maxbench_steering.requests(SETS["animals"], 4) == wordings[:4]


# --- what is chosen and concluded ---------------------------------------------------------------------------------


def test_planted_answers_are_ranked_as_they_were_planted(study, monkeypatch, capsys):
    planted(monkeypatch)
    study = replace(
        study, concepts=study.concepts[:1], split_kinds=["entity"], splits=2, points=12, ranks=[1, 4],
        methods=["unsteered", "diff_mean", "pca", "diff_mean_pairs"], n_bootstrap=200,
    )  # fmt: skip
    records = maxbench.run(study, PlainJudge())
    capsys.readouterr()
    places = {r["method"] + "-" + r["form"]: r["value"] for r in records if r["metric"] == "place"}
    assert {name for name, place in places.items() if place <= 2} == {"pca-affine", "diff_mean_pairs-affine"}
    assert max(places, key=places.get) == "unsteered-none"
    best = {(r["method"], r["form"]): r["rank"] for r in records if r["table"] == "scores"}
    assert best["pca", "affine"] == best["diff_mean_pairs", "affine"] == 4
    (offset,) = [r for r in records if r["form"] == "affine - linear" and not r["method"]]
    assert offset["value"] > offset["low"] > 0 and offset["high"] >= offset["value"]
    several = {r["metric"]: r for r in records if r["table"] == "dimensions"}
    assert several["same_method"]["low"] > 0 and several["affine_less_single"]["low"] > 0
    words = in_words(records)
    assert "Affine beats linear for 1 of 1 concepts" in words[0] and "the paper has 6 concepts" in words[0]


def test_the_strength_is_chosen_on_the_validation_instructions(study, monkeypatch, capsys):
    """The answers mention an entity at the second strength alone, and of equal strengths the weakest is taken."""
    study = replace(study, concepts=study.concepts[:1], methods=["pca"], forms=["affine"], ranks=[2], n_bootstrap=5)
    study = replace(study, split_kinds=["entity"], strengths=[0.2, 0.4, 0.8])
    used = []

    def answers(steerable, instructions, points):
        used.append((tuple(instructions), points))
        n = len(points) // 3
        if tuple(instructions) == SHORT.validation[:1]:
            return [["Nothing."] * n + ["A lion.", "An eagle."] * (n // 2) + ["Nothing."] * n] * len(instructions)
        return [["A lion."] * len(points)] * len(instructions)

    monkeypatch.setattr(maxbench_steering, "_answers", answers)
    maxbench.run(study, PlainJudge())
    (stored,) = Path(study.output_dir).rglob("cells/**/*.jsonl")
    assert {r["strength"] for r in read_records(stored) if r["role"] == "test"} == {0.4}
    assert [asked for asked, _ in used] == [SHORT.validation[:1], SHORT.test[:2]]
    states = maxbench_states._load(next(Path(study.output_dir).glob("states/instructions*")), *digest_of(study))
    # In typical state norms: the points' norms are the strengths times the median norm of states, give or take.
    ratio = used[1][1].norm(dim=1).median() / states.norm(dim=1).median()
    assert 0.2 < ratio < 0.8

    monkeypatch.setattr(maxbench_steering, "_answers", lambda s, i, points: [["Nothing."] * len(points)] * len(i))
    maxbench.run(replace(study, output_dir=study.output_dir + "-none"), PlainJudge())
    (stored,) = Path(study.output_dir + "-none").rglob("cells/**/*.jsonl")
    assert {r["strength"] for r in read_records(stored) if r["role"] == "test"} == {0.2}
    capsys.readouterr()


def digest_of(study):
    from safetensors import safe_open

    with safe_open(Path(study.output_dir) / "states" / "instructions.safetensors", framework="pt") as file:
        return (file.metadata()["texts"],)


def scored(value: float, spread: float = 0.01, seed: int = 0) -> Scored:
    draws = value + spread * torch.randn(200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = {name: value for name in ("concept", "fluency", "instruction", "diversity", "axbench", "maxbench")}
    values |= {"entity_diversity": value / 2, "category_diversity": value / 2}
    return Scored(values, draws - draws.mean() + value, 3, 2, 1.0, 1.0, 1.0, 1)


def results(affine: dict[str, float], linear: dict[str, float], spread: float = 0.01) -> Results:
    cells = {}
    for concept, of in affine.items():
        for split in ("a", "b"):
            cells[concept, split, ("pca", "affine", 2)] = scored(of, spread, seed=1)
            cells[concept, split, ("pca", "linear", 2)] = scored(linear[concept], spread, seed=2)
            cells[concept, split, ("pca", "affine", 1)] = scored(of - 0.2, spread, seed=3)
            cells[concept, split, ("diff_mean", "linear", 1)] = scored(0.9, spread, seed=4)
        cells[concept, "none", ("unsteered", "none", None)] = scored(0.0, 0.0)
    return Results(cells, 200, 0)


def test_sentences_say_what_the_numbers_say():
    names = CONCEPTS
    for sign, surely, below in ((1, 6, 0), (-1, 0, 6)):
        found = results(dict.fromkeys(names, 1.0 + 0.3 * sign), dict.fromkeys(names, 1.0))
        words = in_words(maxbench_tables.all_tables(found))
        wins = 6 if sign > 0 else 0
        expected = (
            f"Affine beats linear for {wins} of 6 concepts (95 % intervals: the offset is a gain for {surely}, a "
        )
        assert words[0] == f"{expected}loss for {below})."
        assert words[1].startswith("Several dimensions beat one of the same method for 6 of 6")
    # A difference that is smaller than its interval is none that is sure.
    found = results(dict.fromkeys(names, 1.01), dict.fromkeys(names, 1.0), spread=0.3)
    words = in_words(maxbench_tables.all_tables(found))
    assert words[0].startswith("Affine beats linear for 6 of 6") and "a gain for 0, a loss for 0" in words[0]
    equal = maxbench_tables.all_tables(results(dict.fromkeys(names, 1.0), dict.fromkeys(names, 1.0)))
    scores = {r["value"] for r in equal if r["table"] == "ranking" and r["metric"] == "maxbench"}
    assert (len(scores) == 1) == any(text.endswith("by MAxBench: none, all are equal.") for text in in_words(equal))
    task = [maxbench_tables.record("task", "top5", name, value) for name, value in (("days", 0.9), ("years", 0.2))]
    assert in_words(task)[-1].startswith("Of 2 concepts that it was asked about, the model names")
    assert "contexts or more for 1; not for years (20%)" in in_words(task)[-1]
    unread = [
        maxbench_tables.record("agreement", f"{score}_exact", "all", None, n=0) for score in ("concept", "fluency")
    ]
    assert in_words(unread) == ["The second judge gave no rating that could be read: another model is needed for that."]
    assert not in_words([unread[0], unread[1] | {"n": 3}])


def test_intervals_are_paired_and_of_the_value():
    """Noise that two cases share cancels in a difference; intervals hold the value, and what resamples often are."""
    same = results({"days": 1.0}, {"days": 0.9})
    shared = torch.randn(200, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    for key, cell in list(same.cells.items()):
        same.cells[key] = replace(cell, draws=cell.values["maxbench"] + shared - shared.mean())
    (found,) = [r for r in maxbench_tables.forms(same) if not r["method"]]
    assert found["low"] is found["high"] is None or (found["low"], found["high"]) == pytest.approx((0.1, 0.1))
    # What is the same in every resample has no interval.
    assert interval(0.0, torch.zeros(100).double()) == interval(2.0, torch.full((100,), 2.0).double()) == (None, None)
    low, high = interval(1.0, torch.linspace(2.0, 3.0, 101).double())
    assert low == pytest.approx(0.525, abs=0.01) and high == pytest.approx(2.975, abs=0.01)
    # A score that is 0 in every third resample is not surely above 0.
    low, high = interval(0.6, torch.tensor([0.0, 0.3, 0.6]).double().repeat(100))
    assert low == 0.0 and high == pytest.approx(0.9)


def test_another_model_judges_the_same_answers(study, monkeypatch, capsys):
    """Its judgements are stored beside the first judge's, what it cannot read is left out and counted."""

    class Unsure(PlainJudge):
        name = "language_model"

        def __init__(self, model, tokenizer) -> None:
            super().__init__()

        def judge(self, instruction, responses, concept):
            found = super().judge(instruction, responses, concept)
            return [replace(one, fluency=None if i == 0 else 1.0) for i, one in enumerate(found)]

    monkeypatch.setattr(maxbench, "LanguageModelJudge", Unsure)
    study = replace(study, judge=study.model, concepts=study.concepts[:1], methods=["pca"], ranks=[1], forms=["affine"])
    records = maxbench.run(study, PlainJudge())
    assert "Agreement of two judges" in capsys.readouterr().out
    found = {r["metric"]: r for r in records if r["table"] == "agreement"}
    assert found["concept_exact"]["n"] == 2 * 6 and found["fluency_exact"]["n"] == 2 * 5
    assert found["fluency_exact"]["value"] == 0.0 and "2 of 12 answers left out" in found["fluency_exact"]["note"]


def test_places_are_as_sure_as_the_scores():
    """A method that is first by a few mentions, and level with another in every third resample, is not surely first."""
    found = results({"days": 1.0}, {"days": 0.0})
    for (concept, split, key), cell in list(found.cells.items()):
        draws = torch.tensor([0.0, 1.0, 2.0]).double().repeat(100)[:200] if key[1] == "affine" else torch.zeros(200)
        found.cells[concept, split, key] = replace(cell, draws=draws.double())
    of = {r["method"] + r["form"]: r for r in maxbench_tables.ranking(found) if r["metric"] == "place"}
    assert (of["pcaaffine"]["value"], of["pcaaffine"]["low"], of["pcaaffine"]["high"]) == (1.0, 1.0, 4.0)
    sure = results({"days": 1.9}, {"days": 0.5})
    of = {r["method"] + r["form"]: r for r in maxbench_tables.ranking(sure) if r["metric"] == "place"}
    assert (of["pcaaffine"]["low"], of["pcaaffine"]["high"]) == (1.0, 1.0)
    assert (of["unsteerednone"]["low"], of["unsteerednone"]["high"]) == (4.0, 4.0)


def test_a_split_that_is_not_finished_does_not_count():
    there = {("a", "s1"): (True, True), ("a", "s2"): (True, False), ("b", "s1"): (True, False)}
    plan = [
        ((concept, split, Case("pca", "affine", i)), done)
        for (concept, split), of in there.items() for i, done in enumerate(of)
    ]  # fmt: skip
    kept = maxbench.whole_splits(plan)
    assert [(c, s, case.rank) for c, s, case in kept] == [("a", "s1", 0), ("a", "s1", 1), ("b", "s1", 0)]


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ["pca", "umap"]}, "`methods` must be some of .*umap"),
        ({"methods": ["sae"]}, "`methods` has sae and there is no `sae`"),
        ({"strengths": [0.0]}, "`strengths` must be one or more positive"),
        ({"ranks": [0]}, "`ranks`"),
        ({"layer": "deep"}, "`layer` must be a hidden-state index or a fraction of the depth, got 'deep'"),
        ({"points": 0}, "`points` must be at least 1, got 0"),
        ({"seed": -5}, "`seed` must lie in 0 to .*, got -5"),
        ({"test_prompts": 9}, "`test_prompts` must be at most 5, got 9"),
        ({"concepts": ["random"]}, "`control` must be none of the `concepts`"),
        ({"concepts": ["random"], "control": "days", "methods": ["reft_r1"]}, "concept must be one of .*'random'"),
        ({"only_tables": True}, "has no case of this study yet"),
    ],
)
def test_wrong_arguments_are_refused_before_a_model_is_loaded(changes, message, tmp_path, monkeypatch):
    monkeypatch.setattr(maxbench, "load_model", None)
    arguments = replace(MaxBenchArguments(concepts=["days"], output_dir=str(tmp_path / "out")), **changes)
    with pytest.raises(ValueError, match=message):
        maxbench.run(arguments)


def test_configs_and_command_line_reach_the_study(monkeypatch, tmp_path, capsys):
    got = []
    monkeypatch.setattr(maxbench, "run", lambda arguments: got.append(arguments) or [])
    configs = Path(__file__).parents[3] / "recipes" / "configs"
    for config in (configs / "maxbench.yaml", configs / "smollm2" / "maxbench.yaml"):
        assert config.read_text().startswith(
            f"# latentwatch study --config recipes/{config.relative_to(configs.parent)}"
        )
        assert command(["study", "--config", str(config), "--points", "7"]) == 0
        maxbench_arguments.check(got[-1])
        assert got[-1].points == 7 and got[-1].model == yaml.safe_load(config.read_text())["model"]
    assert got[0].ranks == [1, 2, 4, 8, 16] and got[0].splits == 5 and "sae" not in got[0].methods
    assert command(["study", "maxbench", "--model", "my/model", "--quick"]) == 0
    assert got[-1].quick and got[-1].model == "my/model"
    assert command(["study", "maxbench", "--rnks", "3"]) == 1
    assert "has no argument `rnks` (did you mean `ranks`?)" in capsys.readouterr().err
    assert command(["study"]) == 0
    assert f"maxbench  {maxbench.TITLE}" in capsys.readouterr().out


def test_quick_is_less_of_the_same_in_a_folder_of_its_own():
    arguments = maxbench_arguments.quick(MaxBenchArguments(quick=True))
    maxbench_arguments.check(arguments)
    assert arguments.concepts == ["animals", "countries"] and arguments.output_dir == "runs/maxbench-quick"
    assert (arguments.points, arguments.ranks, arguments.strengths) == (6, [1, 4], [0.3, 0.6])
    own = maxbench_arguments.quick(MaxBenchArguments(points=3, ranks=[2], strengths=[1.0], max_new_tokens=50))
    assert (own.points, own.ranks, own.strengths, own.max_new_tokens) == (3, [2], [1.0], 10)


def test_quick_hides_no_bad_argument(tmp_path):
    for changes, message in (({"points": 0}, "`points`"), ({"ranks": [0]}, "`ranks`"), ({"splits": 0}, "`splits`")):
        with pytest.raises(ValueError, match=message):
            maxbench.run(MaxBenchArguments(quick=True, output_dir=str(tmp_path / "out"), **changes))
    assert not list(tmp_path.iterdir())


def test_what_fails_before_the_first_case_leaves_no_setting_behind(study, tmp_path):
    """The corrected command goes on in the same folder."""
    (tmp_path / "text.safetensors").write_text("no weights at all")
    weights = {"W_enc": torch.zeros(9, 12), "b_enc": torch.zeros(12), "W_dec": torch.zeros(12, 9)}
    save_file(weights, tmp_path / "narrow.safetensors")
    beasts = [name for name in study.concepts if "days" not in name][:1]
    for changes, message in (
        ({"layer": "31"}, "`layer`"),
        ({"dtype": "bf17"}, "dtype"),
        ({"judge": str(tmp_path / "no-model")}, "no such folder"),
        ({"methods": ["sae"], "sae": str(tmp_path / "none.safetensors")}, "there is none"),
        ({"methods": ["sae"], "sae": str(tmp_path / "text.safetensors")}, "must be a safetensors file"),
        ({"methods": ["sae"], "sae": str(tmp_path / "narrow.safetensors")}, "`sae` .* width 9, the model has 32"),
        ({"methods": ["spline"], "concepts": beasts}, "a spline needs an ordered concept"),
    ):
        with pytest.raises((ValueError, OSError, ModelError), match=message):
            maxbench.run(replace(study, **changes), judge=PlainJudge())
        assert not Path(study.output_dir).exists(), changes
    broken = PlainJudge()
    broken.judge = lambda *_: (_ for _ in ()).throw(RuntimeError("killed"))
    with pytest.raises(RuntimeError, match="killed"):
        maxbench.run(replace(study, methods=["unsteered"], points=2), judge=broken)
    assert maxbench.run(replace(study, methods=["unsteered"], points=3), judge=PlainJudge())
