"""A geometry's file: tensors and one JSON object in safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


def write_geometry(path: str | os.PathLike, kind: str, tensors: Mapping[str, Tensor], numbers: Mapping) -> None:
    """Write whole or not at all; folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    save_file(own, partial, metadata={"kind": kind, "numbers": json.dumps(dict(numbers), allow_nan=False)})
    os.replace(partial, path)


def read_geometry(path: str | os.PathLike, kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors on the CPU, and the JSON object.

    Raises
    ------
    FileNotFoundError
    ValueError
        For a file that is no geometry, or one of another kind.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    except SafetensorError as error:
        raise ValueError(f"{path} is no geometry's file: {error}") from error
    if metadata.get("kind") != kind:
        raise ValueError(f"{path} must hold a {kind}, got {metadata.get('kind', 'a file without a kind')}")
    return tensors, json.loads(metadata["numbers"])
