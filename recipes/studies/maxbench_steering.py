"""One case of the MAxBench study: points of a geometry, the strength they steer best with, and what the model says.

Strengths are in **typical state norms**: at strength s the points are added times alpha = s t / m, with t the median
norm of the model's states at the end of instructions and m the median norm of 500 points of the geometry. At s = 1 what
is added at the first step is as long as the state it is added to, whatever the method, its rank, or whether the point
is L z or L z + b. Sigma decides how far the points of one geometry lie apart against its offset; s decides how hard
they push.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from monitor.generation import greedy_answers
from monitor.geometry.concept_scores import score_outputs
from monitor.geometry.sampling_scale import calibrate_sigma
from monitor.geometry.splines import Spline
from monitor.judges.judgement import Judge, Judgement, judge_grid
from monitor.judges.records import append_records, judgement_of, judgement_records, read_records
from monitor.steered_generation import instruction_prompt, steered_answers
from monitor.stimuli.concepts import ConceptSet
from recipes.studies.maxbench_arguments import MaxBenchArguments
from recipes.studies.maxbench_geometries import Case, Geometry

_N_SIZE = 500  # points whose median norm says how long a geometry's points are
VALIDATION, TEST = "validation", "test"

# Greedy decoding gives one answer a prompt: the prompting baseline has as many wordings as others have points.
_VERBS = ("mention", "name", "talk about", "bring in", "include")
_REQUESTS = (
    "{instruction} In your answer, {verb} {concept}.",
    "{instruction} Please {verb} some {concept}.",
    "{instruction} Be sure to {verb} one or more {concept}.",
    "In your answer, {verb} {concept}. {instruction}",
    "Please {verb} some {concept} when you answer this: {instruction}",
    "{instruction} The first sentence must {verb} {concept}.",
)
_CALLED = {"days": "days of the week", "years": "years such as those in history books"}


@dataclass(frozen=True)
class Steerable:
    """The model, and what every case shares."""

    model: torch.nn.Module
    tokenizer: object
    arguments: MaxBenchArguments
    layer: int | float
    low: float
    high: float
    typical: float


def steer_case(
    steerable: Steerable, judge: Judge, concept: ConceptSet, split: str, case: Case, geometry: Geometry
) -> list[dict]:
    """Sample, choose the strength on the validation instructions, steer the test instructions, judge all.

    Returns
    -------
    list of dict
        Flat records of every answer, see `monitor.judges.records.judgement_records`. The same split and rank gives the
        same normal draws in every method and form.
    """
    arguments = steerable.arguments
    sigma = in_range = None
    if not isinstance(geometry, Spline):
        sigma, in_range = calibrate_sigma(
            geometry, steerable.low, steerable.high, generator=_generator(arguments, concept, split, "sigma"),
            n_values=arguments.n_sigmas, lowest=arguments.lowest_sigma * steerable.low,
        )  # fmt: skip

    def points(role: str, n: int) -> Tensor:
        generator = _generator(arguments, concept, split, role)
        return geometry.sample(n, generator) if sigma is None else geometry.sample(n, sigma, generator)

    size = float(points("size", _N_SIZE).norm(dim=1).median())
    unit = steerable.typical / max(size, 1e-12)
    about = {
        "split": split, "method": case.method, "form": case.form, "rank": case.rank, "dimension": geometry.rank,
        "sigma": sigma, "in_range": in_range,
    }  # fmt: skip
    asked = arguments.instructions
    cloud = points(VALIDATION, arguments.validation_points)
    tried = torch.cat([strength * unit * cloud for strength in arguments.strengths])
    rows = _judged(judge, asked.validation, _answers(steerable, asked.validation, tried), concept)
    records, found = [], []
    n = arguments.validation_points
    for i, strength in enumerate(arguments.strengths):
        part = [row[i * n : (i + 1) * n] for row in rows]
        records += _records(judge, concept, asked.validation, part, role=VALIDATION, strength=strength, **about)
        found.append((_merit(part, judge, concept, arguments.select_by), -strength))
    strength = -max(found)[1]
    answers = _answers(steerable, asked.test, strength * unit * points(TEST, arguments.points))
    rows = _judged(judge, asked.test, answers, concept)
    return records + _records(judge, concept, asked.test, rows, role=TEST, strength=strength, **about)


def ask_case(steerable: Steerable, judge: Judge, concept: ConceptSet, split: str, case: Case) -> list[dict]:
    """The baselines without steering: the instruction as it is, or with a request for the concept."""
    arguments, asked = steerable.arguments, steerable.arguments.instructions.test
    wordings = requests(concept, arguments.points) if case.method == "prompting" else ["{instruction}"]
    prompts = [
        instruction_prompt(steerable.tokenizer, wording.format(instruction=instruction))
        for instruction in asked
        for wording in wordings
    ]
    said = greedy_answers(
        steerable.model, steerable.tokenizer, prompts, max_new_tokens=arguments.max_new_tokens, one_line=False,
        batch_tokens=arguments.batch_tokens,
    )  # fmt: skip
    answers = [said[i * len(wordings) : (i + 1) * len(wordings)] for i in range(len(asked))]
    rows = _judged(judge, asked, answers, concept)
    about = {
        "split": split, "method": case.method, "form": case.form, "rank": None, "dimension": None, "sigma": None,
        "in_range": None,
    }  # fmt: skip
    return _records(judge, concept, asked, rows, role=TEST, strength=0.0, **about)


def requests(concept: ConceptSet, n: int) -> list[str]:
    """`n` wordings of a request for the concept around ``{instruction}``; at most 30 are different."""
    name = _CALLED.get(concept.name, concept.name).replace("{", "{{").replace("}", "}}")
    wordings = [text.replace("{verb}", verb).replace("{concept}", name) for verb in _VERBS for text in _REQUESTS]
    return [wordings[(7 * i) % len(wordings)] for i in range(n)]  # 7 and 30: verbs and texts both change early


def judge_again(records: Sequence[dict], judge: Judge, concept: ConceptSet) -> list[dict]:
    """The test answers of a stored case, judged by another judge."""
    test = [record for record in records if record["role"] == TEST]
    asked = [record["instruction_text"] for record in test]
    said = [record["response"] for record in test]
    judgements = judge.judge(asked, said, concept)
    kept = ("split", "method", "form", "rank", "dimension", "sigma", "in_range", "role", "strength", "n_points")
    about = {name: test[0][name] for name in kept}
    return judgement_records(
        judge.name, concept.name, asked, said, judgements, **about, names_others=float(judge.names_others(concept))
    )


class Cells:
    """The records of every case on disk, one file a case: it is there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, concept: str, split: str, case: Case, judge: str) -> Path:
        return self.folder / _safe(concept) / _safe(split) / f"{case.name}.{_safe(judge)}.jsonl"

    def has(self, *key) -> bool:
        return self.path(*key).is_file()

    def read(self, *key) -> list[dict]:
        return read_records(self.path(*key))

    def write(self, records: Sequence[dict], *key) -> None:
        path = self.path(*key)
        partial = path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        append_records(partial, records)
        partial.replace(path)


def test_grid(records: Sequence[dict]) -> list[list[Judgement]]:
    """The judgements of the test answers, prompt by prompt."""
    test = [record for record in records if record["role"] == TEST]
    n = int(test[0]["n_points"])
    judgements = [judgement_of(record) for record in test]
    return [judgements[start : start + n] for start in range(0, len(judgements), n)]


def _answers(steerable: Steerable, instructions: Sequence[str], points: Tensor) -> list[list[str]]:
    arguments = steerable.arguments
    return steered_answers(
        steerable.model, steerable.tokenizer, [instruction_prompt(steerable.tokenizer, text) for text in instructions],
        points, layer=steerable.layer, strength=1.0, decay=arguments.decay, max_new_tokens=arguments.max_new_tokens,
        batch_tokens=arguments.batch_tokens,
    )  # fmt: skip


Answered = list[list[tuple[str, Judgement]]]  # prompt by prompt


def _judged(judge: Judge, instructions, answers, concept: ConceptSet) -> Answered:
    judgements = judge_grid(judge, instructions, answers, concept)
    return [list(zip(*pair, strict=True)) for pair in zip(answers, judgements, strict=True)]


def _merit(rows: Answered, judge: Judge, concept: ConceptSet, score: str) -> tuple[float, ...]:
    """What a strength is chosen by; where the score is 0 for all, what it is made of."""
    judgements = [[judgement for _, judgement in row] for row in rows]
    found = score_outputs(judgements, concept, other=judge.names_others(concept), n_bootstrap=1)
    return tuple(-1.0 if found[name].value is None else found[name].value for name in (score, "axbench", "concept"))


def _records(judge: Judge, concept: ConceptSet, instructions, rows: Answered, **about) -> list[dict]:
    asked = [text for text, row in zip(instructions, rows, strict=True) for _ in row]
    said, judgements = zip(*(pair for row in rows for pair in row), strict=True)
    others = float(judge.names_others(concept))
    return judgement_records(
        judge.name, concept.name, asked, said, judgements, **about, n_points=float(len(rows[0])), names_others=others
    )


def _generator(arguments: MaxBenchArguments, concept: ConceptSet, split: str, role: str) -> torch.Generator:
    """Of one role's draws, alike for all methods of a concept's split."""
    said = json.dumps([arguments.seed, concept.name, split, role])
    return torch.Generator().manual_seed(zlib.crc32(said.encode()))


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)
