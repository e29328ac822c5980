"""Weights between two models, or away from one: a series of checkpoints from full models or LoRA adapters.

    latentwatch merge --model_a runs/safe --model_b runs/harmful --output_dir runs/merged
    latentwatch merge --model_a BASE --model_b FINETUNED --negate 0.5 1 --output_dir runs/negated

The first writes `runs/merged/ratio-0.30` and so on, (1 - ratio) * A + ratio * B; the second `runs/negated/negate-0.50`,
A - scale * (B - A), which makes the base A forget what B was fine-tuned on. Each folder is a complete checkpoint (or a
complete adapter), with A's config and tokenizer and a `merge.json` that says what it was made from. No model is loaded:
weights are read and written shard by shard, on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from recipes.arguments import parse
from recipes.checkpoint_files import (
    ADAPTER,
    ADAPTER_CONFIG,
    COMPANIONS,
    CONFIG,
    INDEX,
    SINGLE,
    Checkpoint,
    fetch,
    is_adapter,
    load_adapter,
    read_json,
    weight_map,
)
from recipes.models import resolve_model
from recipes.summary import write_records
from trainers.weights import (
    LoraAdapter,
    check_ratio,
    check_same_layout,
    check_scale,
    linear_merge,
    lora_linear_merge,
    lora_task_vector_negation,
    task_vector_negation,
)

logger = logging.getLogger(__name__)

# Both ends and the five mixtures of arXiv 2609.10060, appendix C.
RATIOS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0)
FORMULAS = {"ratio": "(1 - ratio) * model_a + ratio * model_b", "negate": "model_a - negate * (model_b - model_a)"}

LABELS = ("model_a", "model_b")
RECORD = "merge.json"
# Companions of A's weights that do not go into a merge: they are of its own weights, or of its run.
NOT_COMPANIONS = (
    "*.index.json",
    ADAPTER_CONFIG,
    RECORD,
    "trainer_state.json",
    "*_results.json",
    "verification.json",
    "task_vector.json",
    "unlearn.json",
)
# Config fields that do not shape the weights or what is computed from them.
NEUTRAL = re.compile(
    r"dropout|_token_id$|^(_name_or_path|transformers_version|dtype|torch_dtype|use_cache|initializer_range|id2label|"
    r"label2id|problem_type|return_dict|output_.*|_attn_implementation.*|pretraining_tp|architectures)$"
)


@dataclass
class MergeArguments:
    """Which two models, how much of each, and where to.

    Parameters
    ----------
    model_a, model_b : str
        Two full models of one architecture or two LoRA adapters of one base: a folder, a Hub id or an embedded name.
        With `negate`, A is the base and B what was fine-tuned from it; if B is an adapter, A may be its base model.
    output_dir : str
        Gets one folder a ratio or scale. A folder that is already there from the same merge is kept, so an interrupted
        command continues.
    ratios : list of float, optional
        Shares of B in [0, 1]; 0 0.1 0.3 0.5 0.7 0.9 1 by default.
    negate : list of float, optional
        Scales of the task vector B - A that is subtracted from A, instead of `ratios`.
    json : str, optional
        Also write what was made as a list of flat records; "-" is standard output.
    """

    model_a: str = field(metadata={"help": "Folder, Hub id or embedded name; with --negate, the base."})
    model_b: str = field(
        metadata={"help": "The same for the second; with --negate, what was fine-tuned from the base."}
    )
    output_dir: str = field(metadata={"help": "Gets one complete checkpoint or adapter a ratio or scale."})
    ratios: list[float] | None = field(
        default=None, metadata={"help": f"Shares of model_b in [0, 1] (default: {' '.join(f'{r:g}' for r in RATIOS)})."}
    )
    negate: list[float] | None = field(
        default=None, metadata={"help": "Subtract the task vector model_b - model_a from model_a, at these scales."}
    )
    json: str | None = field(
        default=None, metadata={"help": "Also write what was made to this file as records; '-' is standard output."}
    )


def main(argv: list[str] | None = None) -> None:
    (arguments,) = parse(sys.argv[1:] if argv is None else argv, (MergeArguments,), prog="latentwatch merge")
    if os.environ.get("RANK", "0") != "0":
        return  # under a launcher one process does it all
    if arguments.json == "-":
        with redirect_stdout(sys.stderr):
            records = run(arguments)
        write_records(records, "-")
    else:
        write_records(run(arguments), arguments.json)


def run(arguments: MergeArguments) -> list[dict]:
    """Check everything, then write what is not there yet; returns a record for each ratio or scale."""
    amounts = plan(arguments)
    kind, _ = next(iter(amounts.values()))
    if arguments.json is not None and Path(arguments.json).is_dir():
        raise ValueError(f"`json` must be a file or '-', {arguments.json} is a folder.")
    pair = open_pair(arguments.model_a, arguments.model_b, negate=kind == "negate")
    output = Path(arguments.output_dir).expanduser()
    done = find_done(output, amounts, pair)
    needed = pair.size * (len(amounts) - len(done))
    if needed and needed > (free := shutil.disk_usage(_nearest(output)).free):
        raise ValueError(
            f"`output_dir`: {needed / 1e9:.1f} GB are needed in {output}, {free / 1e9:.1f} GB are free. Make fewer at "
            "a time, or give another folder."
        )

    records = []
    for name, (kind, amount) in amounts.items():
        record = pair.record | {kind: amount, "formula": FORMULAS[kind]}
        if name not in done:
            with _whole(output / name) as folder:
                _write(folder, pair, kind, amount, record)
        print(f"{kind} {amount:<6g} {output / name}{' (was there)' if name in done else ''}", flush=True)
        records.append(
            {
                "measure": "merge", "metric": kind, "group": pair.kind, "value": amount,
                "model_a": arguments.model_a, "model_b": arguments.model_b, "path": str(output / name),
            }
        )  # fmt: skip
    return records


def plan(arguments: MergeArguments) -> dict[str, tuple[str, float]]:
    """What to make: folder name -> ("ratio" or "negate", amount)."""
    if arguments.ratios is not None and arguments.negate is not None:
        raise ValueError("`ratios` and `negate` are two operations: give one of them.")
    kind, given = "ratio", arguments.ratios
    if arguments.negate is not None:
        kind, given = "negate", arguments.negate
    given = list(RATIOS) if given is None else given if isinstance(given, list) else [given]
    parameter = "ratios" if kind == "ratio" else "negate"
    amounts = {}
    for value in given:
        try:
            amount = (check_ratio if kind == "ratio" else check_scale)(float(value))
        except (TypeError, ValueError) as error:
            raise ValueError(f"`{parameter}`: {error}") from error
        if amount < 0:
            raise ValueError(
                f"`negate` takes the task vector away, {amount:g} would add it: give a positive scale, or go towards "
                "`model_b` with `ratios`."
            )
        # Two digits where they say it all, so that folders sort by their amount.
        text = f"{amount:.2f}" if amount == round(amount, 2) else repr(amount)
        if f"{kind}-{text}" in amounts:
            raise ValueError(f"`{parameter}` has {amount:g} twice.")
        amounts[f"{kind}-{text}"] = (kind, amount)
    if not amounts:
        raise ValueError(f"`{parameter}` is empty.")
    return amounts


@dataclass
class FullPair:
    """Two checkpoints of one architecture."""

    a: Checkpoint
    b: Checkpoint
    record: dict
    kind = "full"

    @property
    def size(self) -> int:
        return sum((self.a.folder / file).stat().st_size for file in self.a.shards)

    @property
    def companions(self) -> Path:
        return self.a.folder

    def write(self, folder: Path, kind: str, amount: float) -> None:
        operation = linear_merge if kind == "ratio" else task_vector_negation
        for file, names in self.a.shards.items():
            # Not kept in a variable, which would hold one shard while the next is made.
            save_file(
                operation(self.a.only(names), self.b.only(names), amount, labels=LABELS),
                folder / file,
                metadata=self.a.metadata(file),
            )
        if (self.a.folder / INDEX).is_file():
            shutil.copyfile(self.a.folder / INDEX, folder / INDEX)


@dataclass
class AdapterPair:
    """Two adapters of one base; `a` is None where it is that base itself."""

    a: LoraAdapter | None
    b: LoraAdapter
    companions: Path
    record: dict
    kind = "adapter"

    @property
    def size(self) -> int:
        adapters = [adapter for adapter in (self.a, self.b) if adapter is not None]
        return sum(tensor.nbytes for adapter in adapters for tensor in adapter.tensors.values())

    def make(self, kind: str, amount: float) -> LoraAdapter:
        if kind == "negate":
            return lora_task_vector_negation(self.b, amount, self.a, labels=LABELS)
        return lora_linear_merge(self.a, self.b, amount, labels=LABELS)

    def write(self, folder: Path, kind: str, amount: float) -> None:
        adapter = self.make(kind, amount)
        save_file({name: t.contiguous() for name, t in adapter.tensors.items()}, folder / ADAPTER, {"format": "pt"})
        _write_json(folder / ADAPTER_CONFIG, dict(adapter.config))


def open_pair(model_a: str, model_b: str, *, negate: bool) -> FullPair | AdapterPair:
    """Both models, found, opened and checked against each other.

    Raises
    ------
    ModelError
        When a model is not there or cannot be reached.
    ValueError
        When one is not safetensors, is damaged or quantised; when they are of two kinds, architectures or bases.
    """
    source_a = resolve_model(model_a)  # not fetched yet: a base model may not be needed
    folder_b = fetch(model_b, "model_b")
    b_is_adapter = is_adapter(folder_b)
    if negate and b_is_adapter and not (Path(source_a).is_dir() and is_adapter(Path(source_a))):
        b = load_adapter(folder_b, "model_b")
        base = b.config.get("base_model_name_or_path")
        if _canonical(base) in (_canonical(model_a), _canonical(source_a)):
            record = {"model_a": {"name": model_a}, "model_b": _source(model_b, folder_b)}
            pair = AdapterPair(None, b, folder_b, record)
            pair.make("negate", 1.0)  # whatever cannot be done is said before anything is written
            return pair
        if Path(source_a).is_dir():
            raise ValueError(
                f"`model_b` is an adapter of {base!r}, `model_a` is {model_a!r}. Give its base as `model_a`, or the "
                "adapter that it was trained from. If they are one model, write that name into "
                f"{folder_b / ADAPTER_CONFIG}."
            )
    folder_a = fetch(model_a, "model_a")
    if is_adapter(folder_a) != b_is_adapter:
        kinds = ("a full model", "an adapter")
        raise ValueError(
            f"`model_a` is {kinds[is_adapter(folder_a)]} and `model_b` {kinds[b_is_adapter]}: give two of one kind. "
            "peft's merge_and_unload, then save_pretrained, makes a full model of an adapter."
        )
    if b_is_adapter:
        a, b = load_adapter(folder_a, "model_a"), load_adapter(folder_b, "model_b")
        bases = [adapter.config.get("base_model_name_or_path") for adapter in (a, b)]
        if _canonical(bases[0]) == _canonical(bases[1]):  # one folder may be written in several ways
            b = LoraAdapter(dict(b.config) | {"base_model_name_or_path": bases[0]}, b.tensors)
        record = {"model_a": _source(model_a, folder_a), "model_b": _source(model_b, folder_b)}
        pair = AdapterPair(a, b, folder_a, record)
        pair.make("negate" if negate else "ratio", 0.5)
    else:
        a, b = Checkpoint(folder_a, "model_a"), Checkpoint(folder_b, "model_b")
        _check_architecture(folder_a, folder_b)
        check_same_layout(a.layout(), b.layout(), LABELS)
        # Integer buffers are few and small: what cannot be merged is found here, not in the last shard.
        whole = [name for name, (_, dtype) in a.layout().items() if dtype not in ("F16", "BF16", "F32", "F64")]
        linear_merge(a.only(whole), b.only(whole), 0.5, labels=LABELS)
        pair = FullPair(a, b, {"model_a": _source(model_a, folder_a), "model_b": _source(model_b, folder_b)})
    _check_vocabulary(folder_a, folder_b)
    if pair.record["model_a"]["sha256"] == pair.record["model_b"]["sha256"]:
        logger.warning("`model_a` and `model_b` are the same weights: everything between them is, too.")
    return pair


def find_done(output: Path, amounts: Mapping[str, tuple[str, float]], pair: FullPair | AdapterPair) -> set[str]:
    """The folders that are there already, from this very merge; ValueError when the output holds anything else."""
    done = set()
    if output.exists() and not output.is_dir():
        raise ValueError(f"`output_dir`: {output} is a file.")
    if any((output / file).exists() for file in (CONFIG, ADAPTER_CONFIG)):
        raise ValueError(f"`output_dir`: {output} holds a model. Give another folder.")
    for folder in sorted(output.iterdir()) if output.is_dir() else ():
        if not re.match(r"(ratio|negate)-", folder.name):
            continue
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            same = [_identity(record[key]) == _identity(pair.record[key]) for key in LABELS]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"`output_dir`: {folder} is not from a merge. Give another folder.") from error
        if not all(same):
            raise ValueError(
                f"`output_dir`: {folder} is a merge of other weights ({record['model_a'].get('name')} and "
                f"{record['model_b'].get('name')}). Give another folder, or remove this one."
            )
        if folder.name in amounts:
            done.add(folder.name)
    return done


def _write(folder: Path, pair: FullPair | AdapterPair, kind: str, amount: float, record: Mapping) -> None:
    # A config.json in an adapter's folder is the base's, and would make a full model of it.
    left_out = [*NOT_COMPANIONS, CONFIG] if pair.kind == "adapter" else NOT_COMPANIONS
    for pattern in COMPANIONS:
        for path in sorted(pair.companions.glob(pattern)):
            if path.is_file() and not any(path.match(other) for other in left_out):
                target = folder / path.relative_to(pair.companions)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
    pair.write(folder, kind, amount)
    _write_json(folder / RECORD, record)


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """`folder` appears by one rename, complete; a killed run leaves a hidden one, which the next run removes."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_json(path: Path, content: Mapping) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_architecture(folder_a: Path, folder_b: Path) -> None:
    from transformers import AutoConfig

    for folder, parameter in zip((folder_a, folder_b), LABELS, strict=True):
        if read_json(folder / CONFIG, parameter).get("quantization_config"):
            raise ValueError(
                f"`{parameter}`: {folder} is quantised; the stored numbers are no weights by themselves. Give the "
                "checkpoint it was made from, or dequantise it (model.dequantize()) and save it."
            )
    # Read by transformers, so that old and new spellings of one setting are equal.
    a, b = (AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict() for folder in (folder_a, folder_b))
    if different := list(_differences(a, b)):
        shown = ", ".join(f"{name} ({x!r} and {y!r})" for name, x, y in different[:3])
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise ValueError(
            f"`model_a` and `model_b` differ in config.json: {shown}{more}. Merge two models of one architecture. If a "
            "difference does not matter, write the same value into both."
        )


def _differences(a: Mapping, b: Mapping, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key in sorted({*a, *b}, key=str):
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            yield from _differences(x, y, f"{path}{key}.")
        elif x != y and not NEUTRAL.search(str(key)):
            yield f"{path}{key}", x, y


def _check_vocabulary(folder_a: Path, folder_b: Path) -> None:
    def vocabulary(folder: Path) -> Any:
        try:
            content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            return content["model"]["vocab"], [token["content"] for token in content.get("added_tokens", [])]
        except (OSError, ValueError, KeyError, TypeError):
            return None  # kept in other files: nothing to compare

    a, b = vocabulary(folder_a), vocabulary(folder_b)
    if a is not None and b is not None and a != b:
        logger.warning(
            "The tokenizers of `model_a` and `model_b` have different vocabularies: one row of the embeddings may "
            "stand for two tokens. The merges get that of `model_a`."
        )


def _source(name: str, folder: Path) -> dict[str, str]:
    """Where weights came from, and a hash of them and of the config they are read with."""
    digest = hashlib.sha256()
    files = [ADAPTER, ADAPTER_CONFIG]
    if not is_adapter(folder):
        files = [*sorted(set((weight_map(folder, "model") or {"": SINGLE}).values())), CONFIG]
    for file in files:
        with (folder / file).open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return {"name": name, "folder": str(folder.resolve()), "sha256": digest.hexdigest()}


def _identity(source: Mapping[str, str]) -> str:
    return source.get("sha256") or _canonical(source["name"])


def _canonical(name: str | None) -> str:
    """One spelling for a folder; other names as they are."""
    path = Path(name or "").expanduser()
    return str(path.resolve()) if name and path.is_dir() else name or ""


def _nearest(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())


if __name__ == "__main__":
    main()
