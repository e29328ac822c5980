"""Read every measure once on a model, without training it.

    latentwatch audit smollm2-135m
    latentwatch audit runs/npo --reference smollm2-135m --forget_set harry_potter --output_dir audits/npo
    latentwatch audit minilm --measures detectability --dimensions gender my/pairs.jsonl --json -
    accelerate launch -m recipes.audit my/model --reference my/base

Arguments are those of `AuditArguments`, from YAML by --config and overridden on the command line; unknown keys are an
error. Decoders and encoders alike; what only a causal language model can do is left out on the others, with a line that
says so.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from accelerate import PartialState

from monitor.activations import DEFAULT_TOKEN_BUDGET, Activations, Answers, measure_activations
from monitor.anatomy import find_anatomy
from monitor.journal import Journal
from monitor.measures.measure import Measure
from monitor.readings import Reading
from monitor.reference import other_reference
from monitor.requests import POOLINGS
from monitor.stimuli.forget_set import ForgetSet, load_forget_set
from recipes.arguments import parse
from recipes.audit_report import audit_report
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
)
from recipes.models import adapter_base, load_model, load_tokenizer, resolve_model, tokenizer_source
from recipes.outputs import check_writable
from recipes.processes import process_state
from recipes.summary import write_records

# What a reading says of two models; of one model compared with itself it is a constant, or another reading's double.
AGAINST_REFERENCE = {
    "bias_shift": ("delta_b", "delta_b_corrected", "seat", "procrustes_seat", "cka_drift"),
    "fragmentation": ("cka", "pca_similarity", "pca_shift"),
    "behaviour": ("forget_nll_change", "retain_nll_change", "heldout_nll_change"),
    "detectability": ("s_change", "auc_change", "auc_change_mixed"),
    "concept_recovery": (
        "coverage_reference",
        "exclusion_reference",
        "angle_mean",
        "angle_max",
        "offset_drift",
    ),
}


@dataclass
class AuditArguments(DetectabilityArguments, ConceptArguments):
    """Which model, against what, and what to read; detectability's own as in `DetectabilityArguments`, concept
    recovery's as in `ConceptArguments`.

    Parameters
    ----------
    model_name_or_path : str
        The model: a folder (of a model or of an adapter), a Hub id or an embedded name. Also the command's first word.
    reference : str, optional
        The model to compare with, likewise; "adapter_off" is an adapter's own base. Without one only what a model shows
        by itself is read.
    measures : list of str, optional
        By default bias_shift and detectability, and with a forget set fragmentation and behaviour. concept_recovery is
        read where it is named.
    forget_set, columns, entities, variants
        As in `recipes.unlearn.UnlearnArguments`; there is no forget set by default.
    fragmentation_layer, bias_size
        As in `recipes.unlearn.UnlearnArguments`.
    scan_layers : bool
        Read detectability and fragmentation at every layer.
    pooling : str, optional
        One for all measures; by default each has its own.
    dtype, model_revision, attn_implementation
        As in TRL's ModelConfig. The reference is loaded in the model's dtype.
    use_cpu : bool
        As in TrainingArguments.
    token_budget : int
        Padded tokens in a batch.
    output_dir : str, optional
        Gets ``monitor/journal.jsonl``, with the readings at step 0.
    json : str, optional
        Also write the readings to this file, as a list of flat records; "-" is standard output.
    """

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "The model: folder, adapter folder, Hub id or embedded name; also the command's first word."},
    )
    reference: str | None = field(
        default=None,
        metadata={"help": "The model to compare with, likewise; 'adapter_off' is an adapter's base. None by default."},
    )
    measures: list[str] | None = field(
        default=None,
        metadata={
            "help": "What to read (default: bias_shift detectability; with --forget_set fragmentation behaviour too).",
            "choices": list(MEASURES),
        },
    )
    forget_set: str | None = field(
        default=None, metadata={"help": "Name of a bundled concept, a file of pairs, or forget=FILE,retain=FILE."}
    )
    columns: list[str] | None = field(
        default=None, metadata={"help": "Names that the files have for ours: question=prompt answer=response."}
    )
    entities: str | None = field(
        default=None, metadata={"help": "Table of names and substitutes; entities.json beside the file by default."}
    )
    variants: int = field(default=8, metadata={"help": "Anonymised variants a pair."})
    fragmentation_layer: str = field(
        default="0.8",
        metadata={"help": "Hidden-state index, fraction of the depth, 'all', 'argmax_auss_l2' or 'argmin_s2'."},
    )
    bias_size: str = field(
        default="small", metadata={"help": "Size of the bias-shift stimuli.", "choices": ["small", "full"]}
    )
    pooling: str | None = field(
        default=None, metadata={"help": "Pooling of all measures (default: each its own).", "choices": list(POOLINGS)}
    )
    dtype: str = field(default="float32", metadata={"help": "Of the weights in memory; 'auto' keeps the saved one."})
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model on the Hub."})
    attn_implementation: str | None = field(default=None, metadata={"help": "Which attention implementation to use."})
    use_cpu: bool = field(default=False, metadata={"help": "Use the CPU even where there is an accelerator."})
    token_budget: int = field(default=DEFAULT_TOKEN_BUDGET, metadata={"help": "Padded tokens in a batch."})
    output_dir: str | None = field(default=None, metadata={"help": "Gets monitor/journal.jsonl; nothing by default."})
    json: str | None = field(
        default=None, metadata={"help": "Also write the readings to this file as records; '-' is standard output."}
    )


def main(argv: Sequence[str] | None = None) -> None:
    argv = model_first(sys.argv[1:] if argv is None else argv)
    (arguments,) = parse(argv, (AuditArguments,), prog="latentwatch audit")
    # Standard output is for the records alone, whatever else is printed.
    with redirect_stdout(sys.stderr) if arguments.json == "-" else nullcontext():
        records = run(arguments)
    if PartialState().is_main_process:  # the others have no records, and would write over these
        write_records(records, arguments.json)


def model_first(argv: Sequence[str]) -> list[str]:
    """The command line with a model as its first word under that argument's own name."""
    argv = list(argv)
    if not argv or argv[0].startswith("-"):
        return argv
    if any(word.split("=")[0].replace("-", "_") == "__model_name_or_path" for word in argv):
        raise ValueError(f"The model is given twice: {argv[0]!r} and --model_name_or_path.")
    return ["--model_name_or_path", *argv]


def run(arguments: AuditArguments) -> list[dict]:
    """Read, print and write; returns the records, on the first process only."""
    name = arguments.model_name_or_path
    if not name:
        raise ValueError(
            "No model: latentwatch audit MODEL, a path, a Hub id or an embedded name (latentwatch models)."
        )
    # Everything that can be wrong with the input is found before a model is loaded or a file written.
    measures = build_measures(arguments)
    journal = new_journal(arguments.output_dir)
    if arguments.json not in (None, "-"):
        check_writable(Path(arguments.json).parent, "json")
        if Path(arguments.json).is_dir():
            raise ValueError(f"`json` must be a file or '-', {arguments.json} is a folder.")
    if arguments.token_budget < 1:
        raise ValueError(f"`token_budget` must be at least 1, got {arguments.token_budget}.")
    reference = find_reference(arguments)
    tokenizer = load_tokenizer(tokenizer_source(name), revision=arguments.model_revision)

    state = process_state(arguments.use_cpu)
    options = {"dtype": arguments.dtype, "revision": arguments.model_revision}
    if arguments.attn_implementation is not None:
        options["attn_implementation"] = arguments.attn_implementation
    model = load_model(name, **options)
    if not getattr(model, "is_quantized", False):  # those are where they were loaded, and cannot be moved
        model.to(state.device)
    measures, lines = readable(measures, model)
    about = f"{name}: {type(model).__name__}, {find_anatomy(model).n_layers} layers, {model.dtype}".replace(
        "torch.", ""
    )
    requests = [request for measure in measures for request in measure.stimuli]
    now = measure_activations(
        model, tokenizer, requests, token_budget=arguments.token_budget, progress=f"Audit: {name}"
    )
    dtype = model.dtype
    del model  # one model in memory at a time
    gc.collect()
    if state.device.type == "cuda":
        torch.cuda.empty_cache()
    before = now
    if reference is not None:
        before = other_reference(
            reference, requests, tokenizer, dtype=dtype, device=state.device, token_budget=arguments.token_budget,
            progress=f"Audit: {arguments.reference}",
        )  # fmt: skip
    if not state.is_main_process:
        return []

    readings = read(measures, now, before)
    if reference is None:
        readings = by_itself(readings)
    if journal is not None:
        journal.append(0, 0.0, readings)
        lines.append(f"Every reading: {journal.path}")
    against = "without a reference" if reference is None else f"against {arguments.reference}"
    print(audit_report(readings, f"{about}; {against}", arguments, lines, compared=reference is not None))
    return [_record(arguments, reading) for reading in readings]


def build_measures(arguments: AuditArguments) -> list[Measure]:
    """The measures that were asked for, or those there are stimuli for."""
    wanted = arguments.measures
    if wanted is None:
        wanted = ["bias_shift", "detectability"]
        if arguments.forget_set is not None:
            wanted += ["fragmentation", "behaviour"]
    wanted = check_names(wanted)
    of_pairs = [measure for measure in ("fragmentation", "behaviour") if measure in wanted]
    if of_pairs and arguments.forget_set is None:
        raise ValueError(
            f"`measures` {' and '.join(of_pairs)} read a forget set: give --forget_set a bundled concept or a file."
        )
    forget_set = read_forget_set(arguments, wanted)
    measures: list[Measure] = []
    if "bias_shift" in wanted:
        measures.append(bias_shift(arguments.bias_size, arguments.pooling))
    if "detectability" in wanted:
        measures.append(detectability(arguments, forget_set, arguments.pooling))
    if "concept_recovery" in wanted:
        measures.append(concept_recovery(arguments, arguments.pooling))
    if "fragmentation" in wanted:
        layer = "all" if arguments.scan_layers else arguments.fragmentation_layer
        measures.append(fragmentation(forget_set, layer, arguments.pooling))
    if "behaviour" in wanted:
        measures.append(behaviour(forget_set))
    return measures


def read_forget_set(arguments: AuditArguments, wanted: Sequence[str]) -> ForgetSet | None:
    if arguments.forget_set is None:
        return None
    with warnings.catch_warnings():
        if not {"fragmentation", "detectability"} & set(wanted):  # the others do not anonymise
            warnings.filterwarnings("ignore", message=".*anonymisation leaves")
        return load_forget_set(
            forget_set_source(arguments.forget_set),
            variants=arguments.variants,
            columns=column_mapping(arguments.columns),
            entities=arguments.entities,
        )


def new_journal(output_dir: str | None) -> Journal | None:
    """The journal that will be written, refused where there is one."""
    if output_dir is None:
        return None
    check_writable(Path(output_dir), "output_dir")
    path = Path(output_dir) / "monitor" / "journal.jsonl"
    if path.exists():
        raise ValueError(f"`output_dir`: {path} holds earlier readings. Give another folder, or move that file away.")
    return Journal(path)


def find_reference(arguments: AuditArguments) -> str | None:
    """What `other_reference` takes for the argument, found to be there.

    Raises
    ------
    ModelError
        When there is no such model.
    ValueError
        When it cannot be compared with: an adapter, or what only a training run has.
    """
    name = arguments.reference
    if name is None:
        return None
    if name == "initial":
        raise ValueError("`reference` 'initial' is the start of a training run; an audit has none. Give a model.")
    if name == "adapter_off":
        name = adapter_base(arguments.model_name_or_path)
        if name is None:
            raise ValueError(f"`reference` 'adapter_off': {arguments.model_name_or_path} is no adapter.")
    source = resolve_model(name)
    if adapter_base(source) is not None:
        raise ValueError(
            f"`reference` {source} is an adapter without its base model. Merge it first (peft's merge_and_unload), or "
            "give the base model."
        )
    load_tokenizer(source)  # an id that cannot be reached is better known now than after the model's pass
    return source


def readable(measures: Sequence[Measure], model: torch.nn.Module) -> tuple[list[Measure], list[str]]:
    """The measures that this model can be read with, and a sentence on each that it cannot."""
    if find_anatomy(model).head is not None:
        return list(measures), []
    scored = [m for m in measures if any(isinstance(request, Answers) for request in m.stimuli)]
    sentences = [
        f"{measure.name} is left out: it scores answers, which takes a causal language model, and "
        f"{type(model).__name__} is none."
        for measure in scored
    ]
    if len(scored) == len(measures):
        raise ValueError(f"Nothing is left to read. {' '.join(sentences)}")
    return [measure for measure in measures if measure not in scored], sentences


def read(measures: Sequence[Measure], now: Activations, before: Activations) -> list[Reading]:
    return [reading for measure in measures for reading in measure.read(now, before)]


def by_itself(readings: Sequence[Reading]) -> list[Reading]:
    """What is left where a model was compared with itself."""
    kept = []
    for reading in readings:
        if reading.metric in AGAINST_REFERENCE.get(reading.measure, ()):
            continue
        if reading.metric == "collapsed" and not reading.note:
            reading = replace(reading, note="without a reference, judged by the forget NLL alone")
        kept.append(reading)
    return kept


def _record(arguments: AuditArguments, reading: Reading) -> dict:
    """A reading under the journal's names, and of which models."""
    names = ("measure", "metric", "group", "layer", "value", "low", "high", "valid", "note")
    about = {"model": arguments.model_name_or_path, "reference": arguments.reference}
    return about | {name: getattr(reading, name) for name in names}


if __name__ == "__main__":
    from recipes.cli import main as command

    sys.exit(command(["audit", *sys.argv[1:]]))
