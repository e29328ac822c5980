"""The frozen side of every comparison: initial weights, adapter off, or another checkpoint.

The first two never hold a second model: only activations and log-probabilities are kept. Another checkpoint is loaded,
measured once, cached by content, and released.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from monitor.activations import DEFAULT_TOKEN_BUDGET, Activations, Answers, States, plan_activations, run_plan
from monitor.cache import cache_folder
from monitor.plan import Plan
from monitor.ranks import everywhere, rank


def load_stored(path: str | os.PathLike, plan: Plan) -> Activations:
    """The reference a run stored when it started.

    Raises
    ------
    ValueError
        If there is none, or it was measured with other stimuli.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"The run resumes after its first step, and the reference of its start is missing: {path}. It cannot be "
            "measured any more. Restore the file, or give `reference` the path of the model the run started from."
        )
    return Activations.load(path, plan)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Switch a PEFT model's adapters off inside the block; `requires_grad` comes back as it was.

    Raises
    ------
    ValueError
        If the model has no adapter, or trains biases of the base model (switching it off would not undo those).
    """
    peft_model = next((m for m in model.modules() if hasattr(m, "disable_adapter") and hasattr(m, "peft_config")), None)
    if peft_model is None:
        raise ValueError(
            "`reference='adapter_off'` needs a PEFT model; this one has no adapter. Use reference='initial'."
        )
    biased = [name for name, c in peft_model.peft_config.items() if getattr(c, "bias", "none") not in ("none", None)]
    if biased:
        raise ValueError(
            f"`reference='adapter_off'` is wrong for adapter {biased[0]!r}: its config trains the base model's biases "
            f"(bias={peft_model.peft_config[biased[0]].bias!r}), which stay changed with the adapter off. Use "
            "reference='initial'."
        )
    gradients = [(p, p.requires_grad) for p in peft_model.parameters()]
    try:
        with peft_model.disable_adapter():
            yield
    finally:
        for parameter, requires_grad in gradients:
            parameter.requires_grad_(requires_grad)


def other_reference(
    source: str | os.PathLike | nn.Module,
    requests: Sequence[States | Answers],
    tokenizer,
    *,
    dtype: torch.dtype,
    device: torch.device,
    token_budget: int = DEFAULT_TOKEN_BUDGET,
    cache: str | os.PathLike | None = None,
    progress: str | None = None,
) -> Activations:
    """Activations of another model, from the cache if its content was measured before.

    Parameters
    ----------
    source : path, Hub id or model
        A path or Hub id is loaded with its own tokenizer, in `dtype` on `device`, and released after the pass. A model
        is read where it is, with `tokenizer`.
    requests : sequence of States or Answers
    tokenizer : PreTrainedTokenizerBase
        For a `source` that is a model.
    cache : path-like, optional
        Folder of cached references; by default ``references`` in the user's cache.
    """
    folder = Path(cache) if cache is not None else cache_folder() / "references"
    if isinstance(source, nn.Module):
        plan = plan_activations(source, tokenizer, requests)
        path = folder / f"{_key(weights_fingerprint(source), plan, str(next(source.parameters()).dtype))}.safetensors"
        if everywhere(path.is_file()):
            return Activations.load(path, plan)
        activations = run_plan(source, plan, token_budget=token_budget, progress=progress)
        if rank() == 0:
            activations.save(path)
        return activations

    from transformers import AutoConfig, AutoTokenizer

    source = os.fspath(source)
    if (Path(source) / "adapter_config.json").is_file() and not (Path(source) / "config.json").is_file():
        raise ValueError(
            f"`reference` {source} is an adapter without its base model. Merge it first (peft's merge_and_unload), or "
            "give the base model."
        )
    config = AutoConfig.from_pretrained(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    content = _checkpoint_fingerprint(source, config)
    # Layers and vocabulary come from the config alone, so a cached reference is found without loading any weights.
    with torch.device("meta"):
        skeleton = _auto_class(config).from_config(config)
    plan = plan_activations(skeleton, tokenizer, requests)
    path = folder / f"{_key(content, plan, str(dtype))}.safetensors"
    if content and everywhere(path.is_file()):
        return Activations.load(path, plan)
    model = _auto_class(config).from_pretrained(source, dtype=dtype).to(device)
    activations = run_plan(model, plan, token_budget=token_budget, progress=progress)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if content and rank() == 0:
        activations.save(path, source=source)
    return activations


def weights_fingerprint(model: nn.Module) -> str:
    """Hash of a model's parameters and buffers as they are now: names, shapes, dtypes and every byte.

    Read on the model's device: the bits of each tensor enter two position-weighted sums modulo 2^64, in pieces, and
    only those two integers a tensor leave the device, in one transfer at the end.
    """
    digest = hashlib.sha256()
    sums = []
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
        for start, piece in enumerate(tensor.detach().contiguous().view(-1).view(bits).split(1 << 22)):
            position = torch.arange(len(piece), device=tensor.device) + (start << 22)
            for k, (multiplier, modulus) in enumerate(((2654435761, 2147483647), (40503, 1000003))):
                total[k] += ((piece.long() + 1) * (position * multiplier % modulus + 1)).sum()
        sums.append(total.to(next(model.parameters()).device))
    digest.update(str(torch.stack(sums).tolist()).encode())
    return digest.hexdigest()


def _auto_class(config):
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = (config.architectures or [""])[0]
    causal = named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return AutoModelForCausalLM if causal else AutoModel


def _checkpoint_fingerprint(source: str, config) -> str:
    """Hash of a checkpoint folder's weight files, or the commit of a Hub id; empty if neither is known."""
    folder = Path(source)
    if not folder.is_dir():
        return getattr(config, "_commit_hash", None) or ""
    digest = hashlib.sha256()
    files = sorted(
        p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin") or p.name.endswith("config.json")
    )
    for file in files:
        digest.update(file.name.encode())
        with open(file, "rb") as stream:
            while chunk := stream.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def _key(content: str, plan: Plan, dtype: str) -> str:
    return hashlib.sha256(json.dumps([content, plan.fingerprint(), dtype]).encode()).hexdigest()[:32]
