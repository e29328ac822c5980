"""The states that the MAxBench study fits its geometries to: read in one pass, kept in files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from monitor.activations import States, measure_activations
from monitor.ranks import from_first, rank
from monitor.steered_generation import instruction_prompt
from monitor.stimuli.concepts import CONCEPTS, ConceptSet, load_concept_sets
from monitor.stimuli.instructions import load_instructions

INSTRUCTIONS = "instructions"
_EMBEDDING = ".embedding"


def read_states(
    model: nn.Module, tokenizer: PreTrainedTokenizerBase, sets: Sequence[ConceptSet], layer: int | float, folder: Path,
    *, of: str, embedding: bool, mixed: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """States of contexts, names and instructions.

    Parameters
    ----------
    model, tokenizer
    sets : sequence of ConceptSet
        The concepts and the control.
    layer : int or float
    folder : Path
        A file a concept; what is there, and of the same texts, is not read again.
    of : str
        What the states are of, beside the texts: the model's name and dtype.
    embedding : bool
        Read the embeddings of the entities' forms as well.
    mixed : bool
        Put together what a mixture of factor analysers is fitted to.

    Returns
    -------
    dict of str to Tensor [n, d], float32, on the CPU
        By a concept's name: the last token's state, one row a context. ``"instructions"``: the same at the end of
        the prompts (`instruction_prompt`) of the instructions for norms. ``"<name>.embedding"``: one row a form, the
        mean over its tokens at layer 0. ``"mixed"``: contexts of all bundled concepts, of the sets and instructions.
    """
    requests: dict[str, States] = {}
    known = {concept.name: concept for concept in sets}
    others = load_concept_sets(CONCEPTS) if mixed else {}
    for name, concept in (known | {name: other for name, other in others.items() if name not in known}).items():
        requests[name] = States(concept.texts, layers=(layer,), pooling="last")
    prompts = tuple(instruction_prompt(tokenizer, text) for text in load_instructions().norms)
    requests[INSTRUCTIONS] = States(prompts, layers=(layer,), pooling="last")
    if embedding:
        for concept in sets[:-1]:
            # With the space in front that they have in a sentence; without it the tokens are others.
            forms = tuple(f" {form}" for entity in concept.entities for form in entity.forms)
            requests[concept.name + _EMBEDDING] = States(forms, layers=(0,), pooling="mean_no_sink")
    states = _read(model, tokenizer, requests, folder, of)
    if mixed:
        states["mixed"] = torch.cat([rows for name, rows in states.items() if not name.endswith(_EMBEDDING)])
    return states


def typical_norm(states: Mapping[str, Tensor]) -> float:
    """Median norm of the states at the end of instructions: the unit of steering strengths."""
    return float(states[INSTRUCTIONS].norm(dim=1).median())


def _read(model, tokenizer, requests: Mapping[str, States], folder: Path, of: str) -> dict[str, Tensor]:
    stored = from_first({name: _load(folder / f"{name}.safetensors", _digest(r, of)) for name, r in requests.items()})
    missing = {name: request for name, request in requests.items() if stored[name] is None}
    if missing:
        read = measure_activations(model, tokenizer, list(missing.values()), progress="States")
        for name, request in missing.items():
            stored[name] = read.states(request)[:, 0].float().cpu().contiguous()
            if rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{name}.safetensors"
                partial = path.with_suffix(".partial")
                save_file({"states": stored[name]}, partial, metadata={"texts": _digest(request, of)})
                partial.replace(path)
    return {name: stored[name] for name in requests}


def _load(path: Path, digest: str) -> Tensor | None:
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        return file.get_tensor("states") if (file.metadata() or {}).get("texts") == digest else None


def _digest(request: States, of: str) -> str:
    """Of the model's name, the texts, the layer and the pooling."""
    said = repr((of, tuple(request.texts), tuple(request.layers), request.pooling))
    return hashlib.sha256(said.encode()).hexdigest()
