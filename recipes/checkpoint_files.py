"""The weights of a saved model or adapter as they lie on disk, in safetensors alone, read one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from recipes.embedded import ModelError
from recipes.models import resolve_model
from trainers.weights import LoraAdapter

SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
# What belongs to a checkpoint beside its weights: configuration and tokenizer. Not code, not pickles.
COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "additional_chat_templates/*.jinja")


class Checkpoint(Mapping):
    """The weights of a saved model, read from its safetensors files one tensor at a time.

    Attributes
    ----------
    folder : Path
    shards : dict of str to list of str
        File -> the names of the tensors in it.
    """

    def __init__(self, folder: Path, parameter: str) -> None:
        self.folder = folder
        index = weight_map(folder, parameter)
        files = sorted(set(index.values())) if index else [SINGLE]
        self._handles = {file: _open(folder / file, parameter) for file in files}
        self.shards = {file: list(handle.keys()) for file, handle in self._handles.items()}
        self._file_of = {name: file for file, names in self.shards.items() for name in names}
        if index and index != self._file_of:
            raise ValueError(
                f"`{parameter}`: {folder / INDEX} does not say what its shards hold. Save the model again."
            )

    def __getitem__(self, name: str) -> Tensor:
        return self._handles[self._file_of[name]].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def only(self, names: list[str]) -> Mapping[str, Tensor]:
        """Some of the tensors, still unread."""
        return _Some(self, names)

    def layout(self) -> dict[str, tuple]:
        """Name -> (shape, dtype as safetensors writes it), from the files' headers."""
        slices = {name: self._handles[file].get_slice(name) for name, file in self._file_of.items()}
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}

    def metadata(self, file: str) -> dict[str, str]:
        return self._handles[file].metadata() or {"format": "pt"}


class _Some(Mapping):
    def __init__(self, whole: Mapping[str, Tensor], names: list[str]) -> None:
        self._whole, self._names = whole, dict.fromkeys(names)

    def __getitem__(self, name: str) -> Tensor:
        return self._whole[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def fetch(name: str, parameter: str) -> Path:
    """The folder of a model; a Hub id is downloaded, safetensors only."""
    source = resolve_model(name)
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            source,
            allow_patterns=[*COMPANIONS, "*.safetensors"],
            ignore_patterns=["*/*.safetensors", "consolidated*.safetensors"],  # other copies of the same weights
        )
    except OSError as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(
            f"`{parameter}`: cannot get {name!r} from the Hub: {reason.rstrip('.')}. Give a folder or a Hub id that "
            "can be reached"
        ) from error
    return Path(folder)


def is_adapter(folder: Path) -> bool:
    """An adapter's config, and no full weights: some trainers leave the base's config.json beside an adapter."""
    return (folder / ADAPTER_CONFIG).is_file() and not any((folder / file).is_file() for file in (SINGLE, INDEX))


def load_adapter(folder: Path, parameter: str) -> LoraAdapter:
    if not (folder / ADAPTER).is_file():
        raise ValueError(_no_safetensors(folder, parameter, ADAPTER))
    config = read_json(folder / ADAPTER_CONFIG, parameter)
    try:
        return LoraAdapter(config, load_file(folder / ADAPTER))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"`{parameter}`: {folder / ADAPTER} cannot be read: {error}. Save it again.") from error


def weight_map(folder: Path, parameter: str) -> dict[str, str] | None:
    """Tensor name -> file of a sharded checkpoint; None for a single file."""
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise ValueError(_no_safetensors(folder, parameter, SINGLE))
        return None
    index = read_json(folder / INDEX, parameter).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"`{parameter}`: {folder / INDEX} has no weight_map. Save the model again.")
    for file in set(index.values()):
        # A name with a folder in it would be read, and written, outside the checkpoint.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"`{parameter}`: {folder / INDEX} names {file!r}, expected safetensors files beside it.")
        if not (folder / file).is_file():
            raise ValueError(f"`{parameter}`: {folder} lacks {file}, which {INDEX} names. Copy or save it again.")
    return index


def _open(path: Path, parameter: str) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"`{parameter}`: {path} cannot be read: {error}. Copy or save it again.") from error


def _no_safetensors(folder: Path, parameter: str, wanted: str) -> str:
    text = f"`{parameter}`: {folder} has no {wanted}"
    if pickles := sorted(path.name for path in folder.glob("*.bin") if path.name != "training_args.bin"):
        text += f", only {pickles[0]}. Pickled weights can run code when read and are not opened here"
    return text + ". Load the model where you trust it and save it with save_pretrained, which writes safetensors."


def read_json(path: Path, parameter: str) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"`{parameter}`: {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"`{parameter}`: {path} is not a JSON object.")
    return content
