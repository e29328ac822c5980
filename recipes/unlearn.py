"""Make a model forget a concept by NPO, and watch what it still encodes while it does.

    latentwatch unlearn --config recipes/configs/npo.yaml
    accelerate launch -m recipes.unlearn --config recipes/configs/npo.yaml --model_name_or_path my/model

Arguments are those of `UnlearnArguments`, `trainers.npo_config.NPOConfig` (a TrainingArguments) and TRL's ModelConfig,
from YAML by --config and overridden on the command line. Unknown keys are an error.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import PartialState
from peft import PeftModel
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from monitor.callback import FOLDER, Monitor
from monitor.journal import Journal
from monitor.measures.behaviour import Behaviour
from monitor.measures.bias_shift import BiasShift
from monitor.measures.fragmentation import Fragmentation
from monitor.stimuli.bias import load_bias_stimuli
from monitor.stimuli.forget_set import ForgetSet, load_forget_set
from recipes.concepts import concept_path
from recipes.models import load_model, load_tokenizer
from recipes.summary import print_summary, summarise, write_records
from trainers.checkpoints import last_complete_checkpoint
from trainers.npo import NPOTrainer
from trainers.npo_config import NPOConfig

logger = logging.getLogger(__name__)

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
    parser = TrlParser((UnlearnArguments, NPOConfig, ModelConfig), prog="latentwatch unlearn")
    arguments, training, model_arguments = parser.parse_args_and_config(argv)
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

    model = load_model(model_arguments.model_name_or_path, **model_options(model_arguments))
    tokenizer = load_tokenizer(model_arguments.model_name_or_path)
    trainer = NPOTrainer(
        model=model,
        args=training,
        forget_dataset=forget_set.split("forget"),
        retain_dataset=retain,
        processing_class=tokenizer,
        peft_config=None if isinstance(model, PeftModel) else get_peft_config(model_arguments),
    )
    Monitor(measures, arguments.reference, progress=not training.disable_tqdm).attach(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()

    if trainer.is_world_process_zero():
        records = summarise(Journal(Path(training.output_dir) / FOLDER / "journal.jsonl").lines)
        print_summary(records, training.output_dir)
        write_records(records, arguments.json)


def build_measures(arguments: UnlearnArguments, forget_set: ForgetSet) -> list:
    """The measures that were asked for, on the forget set's own texts."""
    measures = []
    if "bias_shift" in arguments.measures:
        measures.append(BiasShift(load_bias_stimuli(arguments.bias_size)))
    if "fragmentation" in arguments.measures:
        heldout = forget_set.fragmentation_pairs("heldout")
        layer = parse_layer(arguments.fragmentation_layer)
        controls = {"heldout": heldout} if heldout else None
        measures.append(Fragmentation(forget_set.fragmentation_pairs("forget"), layer=layer, controls=controls))
    if "behaviour" in arguments.measures:
        splits = {split: forget_set.split(split) for split in ("forget", "retain", "heldout")}
        measures.append(Behaviour({split: pairs for split, pairs in splits.items() if pairs}))
    if not measures:
        raise ValueError(f"`measures` is empty; choose from {', '.join(MEASURES)}.")
    return measures


def parse_layer(text: str) -> int | float | str:
    """A layer from the command line: "24" is an index, "0.8" a fraction, anything else a rule's name."""
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
        return str(wanted)
    newest = last_complete_checkpoint(training.output_dir)
    if newest is None:
        logger.warning("No complete checkpoint in %s yet: the run starts at its first step.", training.output_dir)
    return newest


if __name__ == "__main__":
    main()
