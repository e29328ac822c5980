"""Try to get back what a model was made to forget.

    latentwatch attack smollm2-135m runs/npo --quick
    latentwatch attack --model runs/npo --attacks membership relearning --forget_set my/pairs.jsonl --json -
    latentwatch attack smollm2-135m runs/ga runs/npo runs/rmu --attacks all --output_dir attacks
    latentwatch attack runs/npo --reference smollm2-135m --attacks sampling --concepts animals countries

Arguments are those of `AttackArguments`, from YAML by --config and overridden on the command line; unknown keys are an
error. Several models are attacked one after another, and stand side by side in the table: put the one that was not
unlearned first. Models are read from where they are, and never changed.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState

from monitor.attacks.result import AttackResult
from monitor.attacks.sampling import sampling
from monitor.stimuli.concepts import ConceptSet
from monitor.stimuli.forget_set import ForgetSet, load_forget_set
from recipes.arguments import option, parse
from recipes.attacks import ATTACKS, SAMPLING, Attack, chosen, wants_sampling
from recipes.concept_arguments import ConceptArguments
from recipes.forget_set_arguments import column_mapping, forget_set_source
from recipes.measures import parse_layer
from recipes.models import (
    ModelError,
    as_dtype,
    load_model,
    load_tokenizer,
    model_shape,
    resolve_model,
    tokenizer_source,
)
from recipes.outputs import check_writable
from recipes.processes import process_state
from recipes.sampling_attacks import check_concept_numbers, sampled_concepts, sampling_attacks
from recipes.summary import aligned, number, write_records


@dataclass
class AttackArguments(ConceptArguments):
    """Which models, which attacks, on what; what `sampling` brings back is in `ConceptArguments`.

    Parameters
    ----------
    model : list of str
        The models: folders (of a model or of an adapter), Hub ids or embedded names. Also the command's first words.
    attacks : list of str
        Which of `recipes.attacks.ATTACKS`, or "all".
    reference : str, optional
        The model before it forgot, whose geometry `sampling` injects; without it "all" leaves sampling out.
    quick : bool
        Small settings instead of the papers'.
    forget_set, columns, entities, variants
        As in `recipes.unlearn.UnlearnArguments`.
    seed : int
        Of every attack.
    dtype, use_cpu
        As in TRL's ModelConfig and in TrainingArguments.
    output_dir : str, optional
        Gets a JSON file an attack and model, with every detail that was kept.
    json : str, optional
        Also write the table to this file, as a list of flat records; "-" is standard output.
    """

    model: list[str] | None = field(
        default=None, metadata={"help": "Folders, adapter folders, Hub ids or embedded names; also the first words."}
    )
    attacks: list[str] = field(
        default_factory=lambda: ["all"], metadata={"help": "Which attacks.", "choices": [*ATTACKS, "all"]}
    )
    reference: str | None = field(
        default=None, metadata={"help": "The model before it forgot, whose geometry the attack sampling injects."}
    )
    quick: bool = field(default=False, metadata={"help": "Small settings instead of the papers'."})
    forget_set: str = field(
        default="harry_potter",
        metadata={"help": "Name of a bundled concept, a file of pairs, or forget=FILE,retain=FILE."},
    )
    columns: list[str] | None = field(
        default=None, metadata={"help": "Names that the files have for ours: question=prompt answer=response."}
    )
    entities: str | None = field(
        default=None, metadata={"help": "Table of names and substitutes; entities.json beside the file by default."}
    )
    variants: int = field(default=8, metadata={"help": "Anonymised variants a pair."})
    seed: int = field(default=42, metadata={"help": "Of every attack."})
    dtype: str = field(default="float32", metadata={"help": "Of the weights in memory; 'auto' keeps the saved one."})
    use_cpu: bool = field(default=False, metadata={"help": "Use the CPU even where there is an accelerator."})
    output_dir: str | None = field(
        default=None, metadata={"help": "Gets a JSON file an attack and model with every detail; nothing by default."}
    )
    json: str | None = field(
        default=None, metadata={"help": "Also write the table to this file as records; '-' is standard output."}
    )

    def __post_init__(self) -> None:
        if isinstance(self.model, str):  # a config file may name one
            self.model = [self.model]


def main(argv: Sequence[str] | None = None) -> None:
    """Attack, print and write.

    Exit status 0, or 1 where an attack could not be carried out: the table says which, and the others' results stand.
    """
    argv = models_first(sys.argv[1:] if argv is None else argv)
    (arguments,) = parse(argv, (AttackArguments,), prog="latentwatch attack")
    # Standard output is for the records alone, whatever else is printed.
    with redirect_stdout(sys.stderr) if arguments.json == "-" else nullcontext():
        records = run(arguments)
    if PartialState().is_main_process:
        write_records(records, arguments.json)
    if any(record["value"] is None for record in records):
        raise SystemExit(1)


def models_first(argv: Sequence[str]) -> list[str]:
    """The command line with its first words, the models, under that argument's own name."""
    argv = list(argv)
    n = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    if n == 0:
        return argv
    if option(argv, "--model") is not None:
        raise ValueError(f"The models are given twice: {' '.join(argv[:n])} and --model.")
    return ["--model", *argv]


def run(arguments: AttackArguments) -> list[dict]:
    """Attack every model and print the table; returns the records."""
    process_state(arguments.use_cpu)  # ranks know of each other from here on
    if not arguments.model:
        raise ValueError("No model: latentwatch attack MODEL ..., paths, Hub ids or embedded names.")
    # Everything that can be wrong with the input is found before a model is loaded or a file written.
    repeated = [name for i, name in enumerate(arguments.model) if name in arguments.model[:i]]
    if repeated:
        raise ValueError(f"`model`: {repeated[0]} is given twice.")
    attacks = chosen(arguments.attacks, quick=arguments.quick, seed=arguments.seed)
    forget_set = read_forget_set(arguments)
    check_concept_numbers(arguments)
    as_dtype(arguments.dtype)
    samples = reference_is_there(arguments)
    concepts = sampled_concepts(arguments.concepts, forget_set) if samples else {}
    folder = None if arguments.output_dir is None else Path(arguments.output_dir)
    if folder is not None:
        check_writable(folder, "output_dir")
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"`output_dir` {folder} is not empty; its results would be mixed with others.")
    if arguments.json not in (None, "-"):
        check_writable(Path(arguments.json).parent, "json")
    for name in [*arguments.model, *([arguments.reference] if samples else [])]:
        resolve_model(name)
    if samples:
        check_shapes(arguments.reference, arguments.model)
        attacks += of_reference(arguments, forget_set, concepts)
    records = []
    for name in arguments.model:
        records += of_model(name, attacks, forget_set, arguments, folder)
    if PartialState().is_main_process:
        print(report(records, attacks, forget_set))
    return records


def read_forget_set(arguments: AttackArguments) -> ForgetSet:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*anonymisation leaves")  # steering leaves such pairs out
        return load_forget_set(
            forget_set_source(arguments.forget_set),
            variants=arguments.variants,
            columns=column_mapping(arguments.columns),
            entities=arguments.entities,
        )


def reference_is_there(arguments: AttackArguments) -> bool:
    """Whether sampling is asked for and can be had."""
    wanted = wants_sampling(arguments.attacks)
    if arguments.reference == "adapter_off":
        raise ValueError("`reference` must be a model here: name the adapter's base model, in place of adapter_off.")
    if wanted and arguments.reference is None:
        if SAMPLING in arguments.attacks:
            raise ValueError(
                "`reference` is missing: sampling injects what the model held before it forgot; name that model by "
                "--reference."
            )
        say("sampling is left out: it needs the model before it forgot, by --reference.")
    if arguments.reference is not None and not wanted:
        raise ValueError("`reference` is for the attack sampling: add it to --attacks, or leave --reference out.")
    wanted = wanted and arguments.reference is not None
    if arguments.concepts is not None and not wanted:
        raise ValueError("`concepts` are for the attack sampling: add it to --attacks, and --reference.")
    return wanted


def check_shapes(reference: str, models: Sequence[str]) -> None:
    """Refuse a reference of another architecture before its geometry is read."""
    expected = model_shape(reference)
    for name in models:
        try:
            shape = model_shape(name)
        except (ModelError, ValueError):
            continue  # it cannot be loaded either, and costs its own rows alone
        if any(None not in pair and pair[0] != pair[1] for pair in zip(shape, expected, strict=True)):
            raise ValueError(
                f"`reference` {reference} has {expected[1]} blocks of width {expected[0]}, {name} {shape[1]} of width "
                f"{shape[0]}: sampling needs the very model that {name} was before it forgot."
            )


def of_reference(arguments: AttackArguments, forget_set: ForgetSet, concepts: Mapping[str, ConceptSet]) -> list[Attack]:
    """The attacks by sampling, made from the reference, which is in memory only meanwhile."""
    say(f"{arguments.reference}: reading its geometry ...")
    model, tokenizer = loaded(arguments.reference, arguments)
    attacks = sampling_attacks(
        model, tokenizer, forget_set, concepts, layer=parse_layer(arguments.concept_layer),
        rank=arguments.concept_rank, quick=arguments.quick, seed=arguments.seed, progress=True,
    )  # fmt: skip
    del model
    free_memory()
    return attacks


def loaded(name: str, arguments: AttackArguments) -> tuple:
    """A model, on its device, and its tokenizer."""
    state = process_state(arguments.use_cpu)
    tokenizer = load_tokenizer(tokenizer_source(name))
    model = load_model(name, dtype=arguments.dtype)
    if not getattr(model, "is_quantized", False):  # those are where they were loaded, and cannot be moved
        model.to(state.device)
    return model, tokenizer


def say(what: str) -> None:
    """Tell how far the command is, on the first process."""
    if PartialState().is_main_process:
        print(what, file=sys.stderr, flush=True)


def free_memory() -> None:
    """Give back what a model that nobody holds any more has left."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def of_model(
    name: str, attacks: Sequence[Attack], forget_set: ForgetSet, arguments: AttackArguments, folder: Path | None
) -> list[dict]:
    """The records of one model's attacks, which is in memory only meanwhile."""
    try:
        model, tokenizer = loaded(name, arguments)
    except (ModelError, ValueError, RuntimeError, OSError) as error:
        if len(arguments.model) == 1:
            raise
        # What the other models' attacks found is worth having all the same.
        return [_record(name, attack, None, arguments, f"{type(error).__name__}: {error}") for attack in attacks]
    records = []
    for attack in attacks:
        say(f"{name}: {attack.name} ...")
        try:
            result = attack.function(model, tokenizer, forget_set, attack.config, progress=True)
        except (ValueError, RuntimeError, OSError) as error:  # the other attacks are worth having all the same
            records.append(_record(name, attack, None, arguments, f"{type(error).__name__}: {error}"))
            continue
        records.append(_record(name, attack, result, arguments))
        if folder is not None and PartialState().is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(result.record() | {"model": name, "details": result.details}, indent=2, allow_nan=False)
            file = folder / f"{len(list(folder.iterdir())):02d}-{Path(name).name}-{attack.name}.json"
            file.write_text(text + "\n", encoding="utf-8")
    del model  # one model in memory at a time
    free_memory()
    return records


_GAIN = ("gain", "gain_low", "gain_high")  # over the same without the knowledge, where an attack has that arm


def _record(
    model: str, attack: Attack, result: AttackResult | None, arguments: AttackArguments, note: str = ""
) -> dict:
    found = {} if result is None else result.record()
    concept = concept_of(attack)
    return {
        "measure": "attacks", "metric": attack.name, "group": "", "value": found.get("score"), "low": found.get("low"),
        "high": found.get("high"), "baseline": found.get("baseline"), "n": found.get("n"),
        **{key: None if result is None else result.details.get(key) for key in _GAIN}, "note": note,
        "model": model, "forget_set": None if concept else arguments.forget_set, "concept": concept,
        "quick": arguments.quick, "seed": arguments.seed,
    }  # fmt: skip


def attacked(attacks: Sequence[Attack], forget_set: ForgetSet) -> list[str]:
    """What is tried to get back: the forget set, concepts, or both."""
    concepts = [concept_of(attack) for attack in attacks]
    names = [forget_set.name] if None in concepts else []
    return names + [concept for concept in concepts if concept is not None]


def concept_of(attack: Attack) -> str | None:
    """The concept that it looks for, by its name; None where it asks the forget set's questions."""
    concept = getattr(attack.config, "concept", None)
    return None if concept is None else concept.name


def report(records: Sequence[dict], attacks: Sequence[Attack], forget_set: ForgetSet) -> str:
    """The table, the models of an attack below one another, and what its scores are."""
    table = [("attack", "model", "score", "without", "n")]
    failed = []
    for attack in attacks:
        for record in records:
            if record["metric"] != attack.name:
                continue
            if record["value"] is None:
                failed.append(f"- {record['model']}, {attack.name} was not carried out: {record['note']}")
                score, without, n = "failed", "", ""
            else:
                score = number(record["value"], record["low"], record["high"])
                without = "" if record["baseline"] is None else number(record["baseline"], None, None)
                n = str(record["n"])
            table.append((attack.name, record["model"], score, without, n))
    lines = [f"Attacks on {', '.join(attacked(attacks, forget_set))}: higher scores, more came back", ""]
    lines += [aligned(table), ""]
    lines += [f"- {attack.name}: {attack.score}" for attack in attacks]
    lines.append("- without: the same without the attack; intervals are 95 % over questions, or prompts and points.")
    for attack in attacks:
        for record in records:
            if record["metric"] == attack.name and record["gain"] is not None:
                gain = number(record["gain"], record["gain_low"], record["gain_high"])
                over = "points of no concept" if attack.function is sampling else "no examples"
                lines.append(f"- {attack.name}, {record['model']}: {gain} more than with {over}")
    for attack in attacks:
        if attack.function is sampling:
            of = attack.config.geometry
            said = f"the reference, pushed likewise, has it in {of.reference_share:.0%} of outputs"
            weak = "" if of.reference_share > 0 else ": a score of 0 would say nothing"
            lines.append(f"- {attack.name}: rank {of.rank} at layer {of.layer}, strength {of.strength}; {said}{weak}")
    if any(attack.function is sampling for attack in attacks):
        lines.append("- of sampling: what points of another concept bring is in the details (--output_dir).")
    return "\n".join(lines + failed)


if __name__ == "__main__":
    from recipes.cli import main as command

    raise SystemExit(command(["attack", *sys.argv[1:]]))
