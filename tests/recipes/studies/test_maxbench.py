"""The MAxBench study end to end on a tiny model, and its tables on planted answers whose order is known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from monitor.judges.judgement import Judgement
from monitor.judges.mentions import MentionFinder, named
from monitor.judges.records import read_records
from monitor.stimuli.instructions import Instructions
from recipes.studies import maxbench, maxbench_arguments, maxbench_states, maxbench_steering, maxbench_tables
from recipes.studies.maxbench_arguments import MaxBenchArguments

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
    folder = maxbench.Path(study.output_dir) / "cells"
    files = sorted(folder.rglob("*.jsonl"))
    # beasts: 2 + 2 splits x (1 + 4 + 4 + 1); hours: 2 + 1 x (1 + 4 + 4 + 1 + 1), each by two judges.
    assert len(files) == 2 * (22 + 13) and n == second.judged + (20 + 11) * 4
    assert all(json.dumps(record) for record in records)
    assert {r["table"] for r in records} == set(maxbench_tables.TABLES) - {"task"}
    assert "Affine beats linear" in out and "prompting" in out
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
