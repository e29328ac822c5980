"""Make a model forget a concept, and watch what it still encodes while it does.

    latentwatch unlearn --config recipes/configs/npo.yaml
    latentwatch unlearn --method rmu --model_name_or_path my/model --forget_set my/pairs.jsonl --output_dir runs/rmu
    accelerate launch -m recipes.unlearn --config recipes/configs/npo.yaml --model_name_or_path my/model

Arguments are those of `UnlearnArguments`, of the method's config (`trainers.npo_config.NPOConfig`, ...; each is a
TrainingArguments) and TRL's ModelConfig, from YAML by --config and overridden on the command line. Unknown keys are an
error.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import PartialState
from transformers import TrainerState
from trl import ModelConfig, get_peft_config, get_quantization_config

from monitor.callback import FOLDER, Monitor
from monitor.journal import Journal
from monitor.stimuli.concepts import ConceptSet
from monitor.stimuli.forget_set import ForgetSet, load_forget_set
from recipes.arguments import parse
from recipes.attacks import Attack, wants_sampling
from recipes.audit_concepts import recovery_sentence
from recipes.concept_arguments import ConceptArguments
from recipes.detectability_arguments import DetectabilityArguments
from recipes.forget_set_arguments import column_mapping, forget_set_source
from recipes.measures import (
    MEASURES,
    behaviour,
    bias_shift,
    check_names,
    concept_recovery,
    detectability,
    fragmentation,
    parse_layer,
)
from recipes.methods import DEFAULT, METHODS, method_name
from recipes.models import load_model, load_tokenizer, resolve_model
from recipes.outputs import check_writable
from recipes.reinforcement import ReinforcementArguments, reinforce
from recipes.resuming import check_same_run, find_checkpoint, is_finished, run_record, write_record
from recipes.rule_arguments import RuleArguments, build_rules
from recipes.sampling_attacks import check_concept_numbers, sampled_concepts, sampled_names, sampling_attacks
from recipes.summary import events, print_summary, summarise, write_records
from recipes.verification import scores_at_start, scores_now, verdict_lines, verdict_sentence, verify
from trainers.unlearning_config import UnlearningConfig
from trainers.unlearning_trainer import UnlearningTrainer

logger = logging.getLogger(__name__)

DEFAULT_MEASURES = ("bias_shift", "fragmentation", "behaviour")


@dataclass
class UnlearnArguments(DetectabilityArguments, ConceptArguments, RuleArguments):
    """What to forget, how, and what to watch meanwhile.

    Detectability's own arguments are described in `DetectabilityArguments`, concept recovery's in `ConceptArguments`,
    what stops the run and starts attacks in `RuleArguments`.

    Parameters
    ----------
    method : str
        The objective, one of `recipes.methods.METHODS`; it decides which further arguments there are.
    forget_set : str
        Name of a bundled concept, or a file of pairs (JSONL, JSON, Parquet), or one a split with a comma between:
        ``forget=FILE,retain=FILE``; `latentwatch check` says what is wrong with them.
    columns : list of str, optional
        Names that the files have for ours, ``question=prompt answer=response``; see
        :func:`monitor.stimuli.forget_set.load_forget_set`.
    entities : str, optional
        The table of names and their substitutes; by default ``entities.json`` beside the forget file.
    measures : list of str
        Which of bias_shift, fragmentation, behaviour, detectability and concept_recovery to read; the last two are off
        by default.
    variants : int
        Anonymised variants a pair, made from the entity table where the file has none.
    fragmentation_layer : str
        A hidden-state index, a fraction of the depth, "all", "argmax_auss_l2" or "argmin_s2".
    bias_size : str
        Size of the bias-shift stimuli, "small" or "full".
    reference : str
        What readings are compared with: "initial", "adapter_off", a path or a Hub id.
    verification : bool
        Ask for greedy answers before and after, and report whether the run forgot by ROUGE-L (arXiv 2611.05272).
    json : str, optional
        Also write the final table to this file, as a list of flat records; "-" is standard output.
    """

    method: str = field(default=DEFAULT, metadata={"help": "The unlearning objective.", "choices": list(METHODS)})
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
    measures: list[str] = field(
        default_factory=lambda: list(DEFAULT_MEASURES), metadata={"help": "What to measure.", "choices": list(MEASURES)}
    )
    variants: int = field(default=8, metadata={"help": "Anonymised variants a pair."})
    fragmentation_layer: str = field(
        default="0.8",
        metadata={"help": "Hidden-state index, fraction of the depth, 'all', 'argmax_auss_l2' or 'argmin_s2'."},
    )
    bias_size: str = field(
        default="small", metadata={"help": "Size of the bias-shift stimuli.", "choices": ["small", "full"]}
    )
    reference: str = field(
        default="initial",
        metadata={"help": "What readings are compared with: 'initial', 'adapter_off', a path or a Hub id."},
    )
    verification: bool = field(
        default=True, metadata={"help": "Report whether the run forgot, by ROUGE-L of greedy answers."}
    )
    json: str | None = field(
        default=None, metadata={"help": "Also write the final table to this file as records; '-' is standard output."}
    )


def main(argv: list[str] | None = None) -> None:
    parsed = parse_arguments(argv)
    to_stdout = parsed[0].json == "-"
    # Standard output is for the records alone; the Trainer and the table print there too.
    with redirect_stdout(sys.stderr) if to_stdout else nullcontext():
        records = run(*parsed)
    if PartialState().is_main_process:  # the others have no records, and would write over these
        write_records(records, parsed[0].json)


def parse_arguments(argv: list[str] | None) -> tuple:
    """TRL's parser, with the method's own config."""
    argv = sys.argv[1:] if argv is None else argv
    method = method_name(argv)
    further = (ReinforcementArguments,) if method == "whp_reinforced" else ()
    classes = (UnlearnArguments, METHODS[method].config_class, ModelConfig, *further)
    return parse(argv, classes, prog=f"latentwatch unlearn --method {method}")


def run(
    arguments: UnlearnArguments,
    training: UnlearningConfig,
    model_arguments: ModelConfig,
    reinforcement: ReinforcementArguments | None = None,
) -> list[dict]:
    """Train and measure; returns the records of the final table, on the first process only."""
    if not model_arguments.model_name_or_path:
        raise ValueError("`model_name_or_path` is missing: a path, a Hub id or an embedded name (latentwatch models).")
    # Everything that can be wrong with the input is found before a model is loaded or a file written.
    if arguments.concepts is not None and not (
        "concept_recovery" in arguments.measures or wants_sampling(arguments.attacks or ())
    ):
        raise ValueError(
            "`concepts` are for the measure concept_recovery and the attack sampling: add one of them, or leave "
            "--concepts out."
        )
    check_concept_numbers(arguments)
    forget_set = read_forget_set(arguments)
    measures = build_measures(arguments, forget_set)
    retain = forget_set.split("retain") if training.needs_retain else None
    if retain is not None and not retain:
        how = ", or pass --retain_loss none" if getattr(training, "retain_loss", "none") != "none" else ""
        raise ValueError(
            f"The loss of {arguments.method} has a retain part and {forget_set.name} has no pair with split 'retain'. "
            f"Add some{how}."
        )
    checkpoint = find_checkpoint(training)
    check_writable(Path(training.output_dir), "output_dir")
    if arguments.json not in (None, "-"):
        check_writable(Path(arguments.json).parent, "json")
    reference = arguments.reference
    if reference not in ("initial", "adapter_off"):
        reference = resolve_model(reference)
    folder = Path(resolve_model(model_arguments.model_name_or_path))
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(
            f"`model_name_or_path` {folder} is an adapter without its base model. Merge it into the base first (peft's "
            "merge_and_unload, then save_pretrained), or start from the base with --use_peft."
        )

    if folder.is_dir() and folder.resolve() == Path(training.output_dir).resolve():
        raise ValueError(
            f"`output_dir` {training.output_dir} is the model's own folder, which the run would overwrite."
        )
    forget = forget_pairs(forget_set, arguments.method, training)
    peft_config = adapter_config(model_arguments)
    record = run_record(arguments.method, training, model_arguments)
    check_same_run(checkpoint, record)
    concepts = sampled_concepts(arguments.concepts, forget_set) if wants_sampling(arguments.attacks or ()) else {}
    rules = build_rules(
        arguments, forget_set, measures, training.seed, sampled_names(concepts),
        lambda: sampling_from_start(arguments, forget_set, concepts, training, model_arguments),
    )  # fmt: skip
    monitor = Monitor(measures, reference, rules=rules, progress=not training.disable_tqdm)

    tokenizer = load_tokenizer(model_arguments.model_name_or_path)
    further = {}
    if reinforcement is not None and checkpoint is None:
        further["reinforced_model"] = reinforced_model(
            reinforcement, model_arguments, training, tokenizer, forget, peft_config
        )
    trainer = METHODS[arguments.method](
        model=load_model(model_arguments.model_name_or_path, **model_options(model_arguments)),
        args=training,
        forget_dataset=forget,
        retain_dataset=retain,
        processing_class=tokenizer,
        peft_config=peft_config,
        **further,
    )
    further.clear()  # the trainer lets go of the reinforced model once it has read it
    monitor.attach(trainer)
    before = None
    if arguments.verification:
        before = scores_at_start(
            **asked(trainer, tokenizer, forget_set),
            path=Path(training.output_dir) / "verification.json",
            resumed=checkpoint is not None,
        )
    if is_finished(checkpoint, training):
        logger.warning("The run in %s has ended: nothing is trained, its table follows.", training.output_dir)
        trainer.state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
        best = trainer.state.best_model_checkpoint if training.load_best_model_at_end else None
        trainer._load_from_checkpoint(best or checkpoint)
        trainer.save_model()  # a kill may have come between the last checkpoint and this
    else:
        if trainer.is_world_process_zero():
            write_record(training, record)
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
    after = scores_now(**asked(trainer, tokenizer, forget_set)) if before is not None else None

    if not trainer.is_world_process_zero():
        return []
    lines = Journal(Path(training.output_dir) / FOLDER / "journal.jsonl").lines
    if training.load_best_model_at_end and trainer.state.best_global_step:
        # The model that was saved is the best one: the table is about that one, not about the last step.
        lines = [line for line in lines if line["step"] <= trainer.state.best_global_step]
    words = [*filter(None, [recovery_sentence(summarise(lines))]), *events(lines)]
    if after is not None:
        broke = {line["step"]: line["value"] for line in lines if line["metric"] == "collapsed"}
        steps = min(broke, default=0), max(broke, default=trainer.state.global_step)
        collapsed = broke[steps[1]] > broke[steps[0]] if broke else None
        verdict = verify(before.forget, after.forget, before.retain, after.retain, collapsed)
        lines = [*lines, *verdict_lines(verdict, *steps)]
        words.append(verdict_sentence(verdict))
        if arguments.method in ("whp", "whp_reinforced"):
            words.append(
                "WHP teaches other answers instead of none, and those may share words with the true ones: ROUGE-L says "
                "less of it than of the other methods (arXiv 2611.05272 marks such runs and leaves them out)."
            )
    records = summarise(lines)
    print_summary(records, training.output_dir, words)
    return records


def read_forget_set(arguments: UnlearnArguments) -> ForgetSet:
    with warnings.catch_warnings():
        if not {"fragmentation", "detectability"} & set(check_names(arguments.measures)):  # others do not anonymise
            warnings.filterwarnings("ignore", message=".*anonymisation leaves")
        return load_forget_set(
            forget_set_source(arguments.forget_set),
            variants=arguments.variants,
            columns=column_mapping(arguments.columns),
            entities=arguments.entities,
        )


def forget_pairs(forget_set: ForgetSet, method: str, training: UnlearningConfig) -> list:
    """The forget pairs as the method's trainer takes them."""
    pairs = list(forget_set.split("forget"))
    if method != "whp" and getattr(training, "chosen", None) != "alternate":
        return pairs
    # The anonymised answer to the same question; a pair that has none is its own, and left out with a warning.
    alternates = [pair.anonymized[0][1] if pair.anonymized else pair.answer for pair in pairs]
    if all(alternate == pair.answer for alternate, pair in zip(alternates, pairs, strict=True)):
        raise ValueError(
            f"{method} teaches anonymised answers, and {forget_set.name} has none: put an entities.json beside it "
            "(names and their substitutes), or give its pairs `anonymized`."
        )
    return [
        {"question": pair.question, "answer": pair.answer, "alternate": alternate}
        for pair, alternate in zip(pairs, alternates, strict=True)
    ]


def reinforced_model(
    reinforcement: ReinforcementArguments, model_arguments: ModelConfig, training, tokenizer, forget, peft_config
):
    """The model trained further on the forget set: loaded, or made here."""
    options = model_options(model_arguments)
    if reinforcement.reinforced_model is not None:
        return load_model(reinforcement.reinforced_model, **options)
    model = load_model(model_arguments.model_name_or_path, **options)
    return reinforce(model, tokenizer, forget, reinforcement, training, peft_config)


def sampling_from_start(
    arguments: UnlearnArguments, forget_set: ForgetSet, concepts: Mapping[str, ConceptSet],
    training: UnlearningConfig, model_arguments: ModelConfig,
) -> list[Attack]:  # fmt: skip
    """Attacks by sampling, with the geometry of the model that training starts from.

    It is loaded for that and let go of: when an attack is due, or a run resumed, the model in training is another.
    """
    name = model_arguments.model_name_or_path
    model = load_model(name, **model_options(model_arguments))
    if not getattr(model, "is_quantized", False):
        model.to(training.device)
    return sampling_attacks(
        model, load_tokenizer(name), forget_set, concepts, layer=parse_layer(arguments.concept_layer),
        rank=arguments.concept_rank, quick=arguments.quick_attacks, seed=training.seed,
        progress=not training.disable_tqdm,
    )  # fmt: skip


def asked(trainer: UnlearningTrainer, tokenizer, forget_set: ForgetSet) -> dict:
    """Whom verification asks, and what."""
    return {
        "model": trainer.model_wrapped if trainer.is_fsdp_enabled else trainer.bare_model(),
        "tokenizer": tokenizer,
        "forget": forget_set.split("forget"),
        "retain": forget_set.split("retain"),
        "progress": None if trainer.args.disable_tqdm else "greedy answers",
    }


def build_measures(arguments: UnlearnArguments, forget_set: ForgetSet) -> list:
    """The measures that were asked for, on the forget set's own texts."""
    wanted = check_names(arguments.measures)
    measures = []
    if "bias_shift" in wanted:
        measures.append(bias_shift(arguments.bias_size))
    if "fragmentation" in wanted:
        measures.append(fragmentation(forget_set, arguments.fragmentation_layer))
    if "behaviour" in wanted:
        measures.append(behaviour(forget_set))
    if "detectability" in wanted:
        measures.append(detectability(arguments, forget_set))
    if "concept_recovery" in wanted:
        measures.append(concept_recovery(arguments))
    return measures


def model_options(model_arguments: ModelConfig) -> dict:
    """`from_pretrained` options of TRL's model arguments."""
    options = {
        "dtype": model_arguments.dtype,
        "revision": model_arguments.model_revision,
        "attn_implementation": model_arguments.attn_implementation,
    }
    quantization = get_quantization_config(model_arguments)
    if quantization is not None:
        # A quantised model cannot be moved afterwards: each process loads it on its own device.
        options |= {"quantization_config": quantization, "device_map": {"": PartialState().device}}
    return {name: value for name, value in options.items() if value is not None}


def adapter_config(model_arguments: ModelConfig):
    """TRL's PEFT config of the model arguments."""
    targets = model_arguments.lora_target_modules
    if not model_arguments.use_peft and targets is not None:
        logger.warning("`lora_target_modules` is not used without `use_peft`: all weights are trained.")
    if isinstance(targets, str) and re.fullmatch(r"[\w.]+", targets) and targets != "all-linear":
        # TRL makes a list of one a string, which PEFT takes for a pattern of the whole name.
        model_arguments.lora_target_modules = [targets]
    return get_peft_config(model_arguments)


if __name__ == "__main__":
    from recipes.cli import main as command

    sys.exit(command(["unlearn", *sys.argv[1:]]))
