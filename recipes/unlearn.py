"""Make a model forget a concept by NPO, and watch what it still encodes while it does.

    latentwatch unlearn --config recipes/configs/npo.yaml
    accelerate launch -m recipes.unlearn --config recipes/configs/npo.yaml --model_name_or_path my/model

Arguments are those of `UnlearnArguments`, `trainers.npo_config.NPOConfig` (a TrainingArguments) and TRL's ModelConfig,
from YAML by --config and overridden on the command line. Unknown keys are an error.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from accelerate import PartialState
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from monitor.callback import FOLDER, Monitor
from monitor.journal import Journal
from monitor.measures.behaviour import Behaviour
from monitor.measures.bias_shift import BiasShift
from monitor.measures.fragmentation import Fragmentation
from monitor.stimuli.bias import load_bias_stimuli
from monitor.stimuli.forget_set import ForgetSet, load_forget_set
from recipes.concepts import concept_path
from recipes.models import load_model, load_tokenizer, resolve_model
from recipes.summary import print_summary, summarise, write_records
from trainers.checkpoints import last_complete_checkpoint
from trainers.npo import NPOTrainer
from trainers.npo_config import NPOConfig

logger = logging.getLogger(__name__)

BATCHES = 10  # of fragmentation, as published
MEASURES = ("bias_shift", "fragmentation", "behaviour")


@dataclass
class UnlearnArguments:
    """What to forget, and what to watch meanwhile.

    Parameters
    ----------
    forget_set : str
        Name of a bundled concept, or a JSONL file of pairs; `latentwatch check FILE` says what is wrong with one.
    measures : list of str
        Which of bias_shift, fragmentation and behaviour to read.
    variants : int
        Anonymised variants a pair, made from the entity table where the file has none.
    fragmentation_layer : str
        A hidden-state index, a fraction of the depth, "all", "argmax_auss_l2" or "argmin_s2".
    bias_size : str
        Size of the bias-shift stimuli, "small" or "full".
    reference : str
        What readings are compared with: "initial", "adapter_off", a path or a Hub id.
    json : str, optional
        Also write the final table to this file, as a list of flat records; "-" is standard output.
    """

    forget_set: str = field(
        default="harry_potter", metadata={"help": "Name of a bundled concept, or a JSONL file of pairs."}
    )
    measures: list[str] = field(
        default_factory=lambda: list(MEASURES), metadata={"help": "What to measure.", "choices": list(MEASURES)}
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
    json: str | None = field(
        default=None, metadata={"help": "Also write the final table to this file as records; '-' is standard output."}
    )


def main(argv: list[str] | None = None) -> None:
    arguments, training, model_arguments = parse_arguments(argv)
    if arguments.json == "-":
        # Standard output is for the records alone; the Trainer and the table print there too.
        with redirect_stdout(sys.stderr):
            records = run(arguments, training, model_arguments)
        write_records(records, "-")
    else:
        write_records(run(arguments, training, model_arguments), arguments.json)


def parse_arguments(argv: list[str] | None) -> tuple[UnlearnArguments, NPOConfig, ModelConfig]:
    """TRL's parser, with a malformed YAML file reported as what it is."""
    parser = TrlParser((UnlearnArguments, NPOConfig, ModelConfig), prog="latentwatch unlearn")
    try:
        return parser.parse_args_and_config(argv)
    except yaml.YAMLError as error:
        raise ValueError(f"`--config` is not valid YAML: {error}") from error


def run(arguments: UnlearnArguments, training: NPOConfig, model_arguments: ModelConfig) -> list[dict]:
    """Train and measure; returns the records of the final table, on the first process only."""
    if not model_arguments.model_name_or_path:
        raise ValueError("`model_name_or_path` is missing: a path, a Hub id or an embedded name (latentwatch models).")
    # Everything that can be wrong with the input is found before a model is loaded or a file written.
    forget_set = load_forget_set(concept_path(arguments.forget_set), variants=arguments.variants)
    measures = build_measures(arguments, forget_set)
    retain = forget_set.split("retain") if training.retain_loss != "none" else None
    if retain is not None and not retain:
        raise ValueError(
            f"`retain_loss` is {training.retain_loss!r} and {forget_set.name} has no pair with split 'retain'. Add "
            "some, or pass --retain_loss none."
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

    model = load_model(model_arguments.model_name_or_path, **model_options(model_arguments))
    tokenizer = load_tokenizer(model_arguments.model_name_or_path)
    trainer = NPOTrainer(
        model=model,
        args=training,
        forget_dataset=forget_set.split("forget"),
        retain_dataset=retain,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_arguments),
    )
    Monitor(measures, reference, progress=not training.disable_tqdm).attach(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()

    if not trainer.is_world_process_zero():
        return []
    lines = Journal(Path(training.output_dir) / FOLDER / "journal.jsonl").lines
    if training.load_best_model_at_end and trainer.state.best_global_step:
        # The model that was saved is the best one: the table is about that one, not about the last step.
        lines = [line for line in lines if line["step"] <= trainer.state.best_global_step]
    records = summarise(lines)
    print_summary(records, training.output_dir)
    return records


def build_measures(arguments: UnlearnArguments, forget_set: ForgetSet) -> list:
    """The measures that were asked for, on the forget set's own texts."""
    wanted = [arguments.measures] if isinstance(arguments.measures, str) else arguments.measures
    if unknown := [name for name in wanted if name not in MEASURES]:
        raise ValueError(f"`measures` must be among {', '.join(MEASURES)}, got {', '.join(map(str, unknown))}.")
    measures = []
    if "bias_shift" in wanted:
        measures.append(BiasShift(load_bias_stimuli(arguments.bias_size)))
    if "fragmentation" in wanted:
        forget, heldout = forget_set.fragmentation_pairs("forget"), forget_set.fragmentation_pairs("heldout")
        if len(forget) < BATCHES:
            raise ValueError(
                f"Fragmentation needs at least {BATCHES} forget pairs that anonymisation changes, {forget_set.name} "
                f"has {len(forget)}. Add pairs, or the names in them to its entities.json, or leave it out: --measures "
                "bias_shift behaviour."
            )
        if 0 < len(heldout) < BATCHES:
            logger.warning(
                "%s has %d held-out pairs that anonymisation changes; %d are needed to read them as a control of "
                "fragmentation, which goes without.", forget_set.name, len(heldout), BATCHES,
            )  # fmt: skip
        controls = {"heldout": heldout} if len(heldout) >= BATCHES else None
        layer = parse_layer(arguments.fragmentation_layer)
        measures.append(Fragmentation(forget, layer=layer, batches=BATCHES, controls=controls))
    if "behaviour" in wanted:
        splits = {split: forget_set.split(split) for split in ("forget", "retain", "heldout")}
        measures.append(Behaviour({split: pairs for split, pairs in splits.items() if pairs}))
    if not measures:
        raise ValueError(f"`measures` is empty; choose from {', '.join(MEASURES)}.")
    return measures


def parse_layer(text: str | int | float) -> int | float | str:
    """A layer from YAML or the command line: 24 is an index, 0.8 a fraction, anything else a rule's name."""
    if not isinstance(text, str):
        return text  # YAML gives numbers as numbers, and int(0.8) is 0
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


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
        options |= {"quantization_config": quantization, "device_map": {"": PartialState().local_process_index}}
    return {name: value for name, value in options.items() if value is not None}


def find_checkpoint(training: NPOConfig) -> str | None:
    """The checkpoint to resume from: a path, or the newest complete one of the output directory for "true".

    A run that was stopped before its first checkpoint starts anew, so that one command always continues.
    """
    wanted = training.resume_from_checkpoint
    if wanted is None or str(wanted).lower() in ("false", "none", ""):
        return None
    if str(wanted).lower() != "true":
        if not Path(wanted).is_dir():
            raise ValueError(f"`resume_from_checkpoint`: no such folder: {wanted}. Give a checkpoint folder, or true.")
        if Path(wanted).resolve().parent != Path(training.output_dir).resolve():
            raise ValueError(
                f"`resume_from_checkpoint` {wanted} is of another run than `output_dir` {training.output_dir}, where "
                f"its journal and reference are not. Pass --output_dir {Path(wanted).parent}."
            )
        return str(wanted)
    newest = last_complete_checkpoint(training.output_dir)
    if newest is None:
        logger.warning("No complete checkpoint in %s yet: the run starts at its first step.", training.output_dir)
    return newest


def check_writable(folder: Path, name: str) -> None:
    """Whether `folder` can be made and written to, before hours are spent on what should go there."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"`{name}`: {folder} cannot be written: {existing} is not a folder that you may write to.")


if __name__ == "__main__":
    main()
