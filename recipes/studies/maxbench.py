"""MAxBench: recover the geometry of concepts of many values, steer by points sampled from it, score what is said.

    latentwatch study --config recipes/configs/maxbench.yaml
    latentwatch study --config recipes/configs/smollm2/maxbench.yaml          # two cores are enough
    latentwatch study maxbench --model my/model --quick

Arguments are those of `MaxBenchArguments`, from YAML by --config and overridden on the command line. Every answer and
judgement is stored in `output_dir`, one file a case (method, form, rank of a concept's split); a study that was stopped
at any moment goes on with the cases that are missing when it is started again. More concepts, methods, ranks, forms
and splits can be added to a study in the same way.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from accelerate import PartialState
from tqdm.auto import tqdm

from monitor.anatomy import find_anatomy
from monitor.concept_task import concept_task
from monitor.geometry.sae import load_sparse_autoencoder
from monitor.geometry.sampling_scale import norm_range
from monitor.judges.agreement import agreement
from monitor.judges.judgement import Judge
from monitor.judges.language_model import LanguageModelJudge
from monitor.judges.word_list import WordListJudge
from monitor.ranks import from_first, rank
from monitor.reft import reft_r1
from monitor.steered_generation import steerable_layer
from monitor.stimuli.concept_splits import Split
from monitor.stimuli.concepts import ConceptSet, load_concept_sets
from monitor.stimuli.paired_responses import load_paired_responses
from recipes.arguments import parse
from recipes.models import load_model, load_tokenizer, resolve_model
from recipes.outputs import check_writable
from recipes.processes import process_state
from recipes.studies.maxbench_arguments import MaxBenchArguments, check, layer_of, quick
from recipes.studies.maxbench_geometries import SPLIT_FREE, Case, Fits, cases, material_of, splits_of
from recipes.studies.maxbench_scores import Results, score_case
from recipes.studies.maxbench_states import INSTRUCTIONS, read_states, typical_norm
from recipes.studies.maxbench_steering import Cells, Steerable, ask_case, judge_again, steer_case, test_grid
from recipes.studies.maxbench_tables import ALL, all_tables, record
from recipes.studies.maxbench_text import print_tables
from recipes.summary import write_records

TITLE = "MAxBench (002): recover concepts, steer with points sampled from them, score completeness and exclusivity"

OFFLINE, SECOND = "word_list", "language_model"
# What a stored case depends on; the rest of the arguments says which cases there are, and how they are shown.
_FIXED = (
    "model", "dtype", "layer", "control", "sae", "components", "lowest_sigma", "n_sigmas", "strengths", "decay",
    "select_by", "validation_prompts", "validation_points", "test_prompts", "points", "max_new_tokens", "seed",
)  # fmt: skip

Planned = tuple[str, str, Case]  # concept, split, case


def main(argv: Sequence[str] | None = None) -> None:
    (arguments,) = parse(
        sys.argv[1:] if argv is None else argv, (MaxBenchArguments,), prog="latentwatch study maxbench"
    )
    # Standard output is for the records alone, whatever else is printed.
    with redirect_stdout(sys.stderr) if arguments.json == "-" else nullcontext():
        records = run(arguments)
    if PartialState().is_main_process:  # the others have no records, and would write over these
        write_records(records, arguments.json)


def run(arguments: MaxBenchArguments, judge: Judge | None = None, second: Judge | None = None) -> list[dict]:
    """Run the cases that are missing, and print the tables of all; records on the first process only.

    Parameters
    ----------
    arguments : MaxBenchArguments
    judge : Judge, optional
        Instead of the offline judge, which the strength is chosen by and which all tables are of.
    second : Judge, optional
        Instead of the one by `arguments.judge`, whose agreement with the first is reported.
    """
    process_state()  # ranks know of each other from here on
    check(arguments)
    if arguments.quick:
        arguments = quick(arguments)
    sets = load_concept_sets(arguments.concepts)
    (control,) = load_concept_sets([arguments.control]).values()
    if control.name in sets:
        raise ValueError(f"`control` must be none of the `concepts`, got {control.name!r} for both")
    asked = arguments.splits, arguments.split_kinds, arguments.seed
    splits = {name: splits_of(concept, *asked) for name, concept in sets.items()}
    if "reft_r1" in arguments.methods:
        for name in sets:
            load_paired_responses(name)  # refuses a concept that has none
    folder = Path(arguments.output_dir)
    check_writable(folder, "output_dir")
    if arguments.json not in (None, "-"):
        check_writable(Path(arguments.json).parent, "json")
    check_same_study(arguments, folder)

    if not arguments.only_tables:
        compute(arguments, sets, control, splits, judge, second)
    if rank() != 0:
        return []
    first_name = OFFLINE if judge is None else judge.name
    second_name = (SECOND if arguments.judge else None) if second is None else second.name
    records = tables(arguments, sets, splits, first_name, second_name)
    print_tables(records, arguments)
    return records


def compute(
    arguments: MaxBenchArguments, sets: Mapping[str, ConceptSet], control: ConceptSet,
    splits: Mapping[str, Mapping[str, Split]], judge: Judge | None, second: Judge | None,
) -> None:  # fmt: skip
    """Run what is not there yet."""
    tokenizer = load_tokenizer(arguments.model)
    model = load_model(arguments.model, dtype=arguments.dtype)
    model.to(PartialState().device)
    anatomy = find_anatomy(model)
    layer = steerable_layer(anatomy, layer_of(arguments))
    if max(arguments.ranks) > anatomy.hidden_size:
        raise ValueError(
            f"`ranks` must be at most the width of the model, {anatomy.hidden_size}, got {arguments.ranks}"
        )
    sae = load_sparse_autoencoder(arguments.sae) if arguments.sae else None
    if sae is not None and sae.W_enc.shape[0] != anatomy.hidden_size:
        raise ValueError(
            f"`sae` {arguments.sae} reads states of width {sae.W_enc.shape[0]}, the model has {anatomy.hidden_size}: "
            "give an autoencoder of this model's layer"
        )
    if arguments.judge and second is None:
        resolve_model(arguments.judge)
    folder = Path(arguments.output_dir)
    cells = Cells(folder / "cells")
    judge = judge or WordListJudge(
        model, tokenizer, max_new_tokens=arguments.max_new_tokens, batch_tokens=arguments.batch_tokens // 2
    )
    plan = planned(arguments, sets, splits)
    if not plan:
        raise ValueError(
            f"`methods` {', '.join(arguments.methods)} have no case for the concepts {', '.join(sets)}: a spline needs "
            "an ordered concept"
        )
    todo = from_first([item for item in plan if not cells.has(*item, judge.name)])

    if todo:
        states = read_states(
            model, tokenizer, [*sets.values(), control], layer, folder / "states",
            of=f"{arguments.model} {arguments.dtype}",
            embedding="embedding" in arguments.methods, mixed="factor_mixture" in arguments.methods,
        )  # fmt: skip
        low, high = norm_range(states[INSTRUCTIONS])
        steerable = Steerable(model, tokenizer, arguments, layer, low, high, typical_norm(states))

        def learn(pairs):
            return reft_r1(model, tokenizer, pairs, layer=layer, seed=arguments.seed)

        fits: tuple[tuple[str, str], Fits] | None = None
        for name, split, case in (bar := tqdm(todo, desc="MAxBench", unit="case", disable=None)):
            bar.set_postfix_str(f"{name} {split} {case.name}")
            concept = sets[name]
            if case.method in SPLIT_FREE:
                records = ask_case(steerable, judge, concept, split, case)
            else:
                if fits is None or fits[0] != (name, split):
                    of_split = [c for n, s, c in plan if (n, s) == (name, split)]
                    material = material_of(concept, splits[name][split], states, control.name)
                    fits = (name, split), Fits(material, of_split, sae, arguments.components, arguments.seed, learn)
                records = steer_case(steerable, judge, concept, split, case, fits[1].geometry(case))
            write_settings(arguments, folder)  # not before: a folder without a case is of no setting yet
            if rank() == 0:
                cells.write(records, name, split, case, judge.name)
    if arguments.task:
        ask_tasks(arguments, model, tokenizer, sets)
    if arguments.judge or second is not None:
        if second is None:
            judging = load_model(arguments.judge, dtype=arguments.dtype).to(PartialState().device)
            second = LanguageModelJudge(judging, load_tokenizer(arguments.judge))
        again = from_first([item for item in plan if not cells.has(*item, second.name)])
        for name, split, case in tqdm(again, desc="Second judge", unit="case", disable=None):
            records = judge_again(cells.read(name, split, case, judge.name), second, sets[name])
            if rank() == 0:
                cells.write(records, name, split, case, second.name)


def planned(
    arguments: MaxBenchArguments, sets: Mapping[str, ConceptSet], splits: Mapping[str, Mapping[str, Split]]
) -> list[Planned]:
    """All cases: first those without a geometry, then the concepts' first splits, their second ones, and so on."""
    plan = [
        (name, "none", Case(method, "none", None))
        for name in sets for method in arguments.methods if method in SPLIT_FREE
    ]  # fmt: skip
    by_turn = sorted(
        (turn, place, name, split) for place, name in enumerate(sets) for turn, split in enumerate(splits[name])
    )
    for _, _, name, split in by_turn:
        of_split = cases(sets[name], splits[name][split], arguments.methods, arguments.forms, arguments.ranks)
        plan += [(name, split, case) for case in of_split]
    return plan


def ask_tasks(arguments: MaxBenchArguments, model, tokenizer, sets: Mapping[str, ConceptSet]) -> None:
    """Task performance of each concept, asked once."""
    for name, concept in sets.items():
        path = Path(arguments.output_dir) / "task" / f"{name}.json"
        if from_first(path.is_file()):
            continue
        found = concept_task(model, tokenizer, concept, progress=f"Task: {name}")
        if rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            rates = {
                metric: [getattr(found, metric).value, getattr(found, metric).low, getattr(found, metric).high]
                for metric in ("top1", "top5", "continuation")
            }
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(rates | {"n": found.n}), encoding="utf-8")
            partial.replace(path)


def tables(
    arguments: MaxBenchArguments, sets: Mapping[str, ConceptSet], splits: Mapping[str, Mapping[str, Split]],
    judge: str, second: str | None,
) -> list[dict]:  # fmt: skip
    """Records of every table, from the cases that are there."""
    folder = Path(arguments.output_dir)
    cells = Cells(folder / "cells")
    found = {}
    plan = whole_splits([(item, cells.has(*item, judge)) for item in planned(arguments, sets, splits)])
    if not plan:
        raise ValueError(f"`output_dir` {folder} has no case of this study yet: run it without `only_tables`")
    pairs = []
    for name, split, case in plan:
        seen = splits[name][split].seen if split != "none" else None
        stored = cells.read(name, split, case, judge)
        key = case.method, case.form, case.rank
        found[name, split, key] = score_case(stored, sets[name], seen, arguments.n_bootstrap, arguments.seed)
        if second is not None and cells.has(name, split, case, second):
            both = (stored, cells.read(name, split, case, second))
            pairs.append([[one for row in test_grid(records) for one in row] for records in both])
    records = all_tables(Results(found, arguments.n_bootstrap, arguments.seed))
    for name in sets:
        path = folder / "task" / f"{name}.json"
        if path.is_file():
            task = json.loads(path.read_text(encoding="utf-8"))
            records += [
                record("task", metric, name, *task[metric], n=task["n"]) for metric in ("top1", "top5", "continuation")
            ]
    if pairs:
        of_first, of_second = ([one for pair in pairs for one in pair[i]] for i in (0, 1))
        for one in agreement(of_first, of_second):
            for metric in ("exact", "kappa", "spearman"):
                note = (
                    f"{judge} and {second}; {one.left_out} of {one.n + one.left_out} answers left out, unrated by one"
                )
                value = getattr(one, metric)
                records.append(record("agreement", f"{one.score}_{metric}", ALL, value, n=one.n, note=note))
    return [found | {"model": arguments.model, "layer": layer_of(arguments)} for found in records]


def whole_splits(plan: Sequence[tuple[Planned, bool]]) -> list[Planned]:
    """The cases that are there, of the splits where none is missing; of a concept without such a split, all."""
    missing = {(name, split) for (name, split, _), there in plan if not there}
    whole = {name for (name, split, _), _ in plan if split != "none" and (name, split) not in missing}
    return [
        (name, split, case) for (name, split, case), there in plan
        if there and (split == "none" or name not in whole or (name, split) not in missing)
    ]  # fmt: skip


def check_same_study(arguments: MaxBenchArguments, folder: Path) -> None:
    """Cases in a folder are of one setting: refuse another one."""
    path = folder / "settings.json"
    settings = {name: getattr(arguments, name) for name in _FIXED}
    if path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name in _FIXED if stored.get(name) != settings[name]]
        if changed:
            said = ", ".join(f"{name} {stored.get(name)!r}, now {settings[name]!r}" for name in changed)
            raise ValueError(f"`output_dir` {folder} has cases of another setting ({said}): give another folder")


def write_settings(arguments: MaxBenchArguments, folder: Path) -> None:
    """Write down the setting that the folder's cases will be of."""
    path = folder / "settings.json"
    if rank() == 0 and not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({name: getattr(arguments, name) for name in _FIXED}, indent=1), encoding="utf-8")
        partial.replace(path)
