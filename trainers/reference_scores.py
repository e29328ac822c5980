"""What the frozen model says about the examples, read once before training and kept on disk by content.

The reference model itself is not kept: NPO and its kin need a number an answer, KL terms a distribution an answer
token, RMU a hidden state a token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from monitor.activations import Answers, TokenStates, measure_activations
from monitor.anatomy import find_anatomy
from trainers.data import Example

FILE_NAME = "reference_scores.safetensors"
KINDS = ("nll", "log_probs", "states", "generic")


class ReferenceNeeds(NamedTuple):
    """The parts of a batch that a loss wants the frozen model's word on.

    Attributes
    ----------
    nll : tuple of str
        Parts whose sequence NLL is wanted.
    log_probs : tuple of str
        Parts whose log-softmax rows at the answer tokens are wanted.
    states : tuple of str
        Parts whose hidden states are wanted, at the layer of the method.
    generic : tuple of str
        Parts whose generic labels are wanted (:func:`trainers.objectives.generic_labels`).
    """

    nll: tuple[str, ...] = ()
    log_probs: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    generic: tuple[str, ...] = ()


class Frozen(NamedTuple):
    """The frozen model's word on one batch, by part.

    Attributes
    ----------
    nll : dict of str to Tensor [B]
        L_ref, nats.
    log_probs : dict of str to Tensor [n, V] float32
        In the order of the part's :class:`trainers.answer_rows.AnswerRows`.
    states : dict of str to Tensor [B, T, d] float32
        0 at padding.
    generic : dict of str to Tensor [n], int64
    """

    nll: dict[str, Tensor]
    log_probs: dict[str, Tensor]
    states: dict[str, Tensor]
    generic: dict[str, Tensor]


class ReferenceScores:
    """The frozen model's scores by example key (:attr:`trainers.data.Example.key`).

    Attributes
    ----------
    nll : dict of str to float
        L_ref, the NLL summed over the answer's tokens, nats.
    log_probs : dict of str to Tensor [T_i, V] float32
        log-softmax rows at the answer's tokens, on the CPU.
    states : dict of str to Tensor [T_i, d] float32
        Hidden states of all tokens at `layer`, on the CPU.
    generic : dict of str to Tensor [T_i], int64
        Generic labels of the answer's tokens, on the CPU.
    layer : int or None
        The hidden-state index of `states`.
    live : str
        Empty, or what is run beside the model for what is not kept here: "adapters off", or a copy of the weights that
        have this fingerprint.
    """

    def __init__(self, layer: int | None = None) -> None:
        self.nll: dict[str, float] = {}
        self.log_probs: dict[str, Tensor] = {}
        self.states: dict[str, Tensor] = {}
        self.generic: dict[str, Tensor] = {}
        self.layer = layer
        self.live = ""

    def __bool__(self) -> bool:
        return bool(self.live or any(getattr(self, kind) for kind in KINDS))

    def missing(self, wanted: Mapping[str, Sequence[Example]]) -> dict[str, list[Example]]:
        """Of the examples wanted of each kind, without repeats, those that are not known yet; kinds that lack none
        are left out."""
        lacking = {
            kind: list({e.key: e for e in examples if e.key not in getattr(self, kind)}.values())
            for kind, examples in wanted.items()
        }
        return {kind: examples for kind, examples in lacking.items() if examples}

    def measure(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        wanted: Mapping[str, Sequence[Example]],
        progress: str | None = None,
    ) -> None:
        """Read what is missing of "nll", "log_probs" and "states", in one activation pass over `model` as it is."""
        requests = {
            kind: _request(kind, examples, self.layer)
            for kind, examples in self.missing(wanted).items()
            if kind != "generic"
        }
        if not requests:
            return
        read = measure_activations(model, tokenizer, list(requests.values()), progress=progress)
        for kind, examples in self.missing(wanted).items():
            if kind == "nll":
                for example, scores in zip(examples, read.answers(requests[kind]).log_probs, strict=True):
                    _check_tokens(example, len(scores), example.n_answer_tokens)
                    self.nll[example.key] = -float(scores.double().sum())
            elif kind == "log_probs":
                for example, rows in zip(examples, read.answers(requests[kind]).log_distribution, strict=True):
                    _check_tokens(example, len(rows), example.n_answer_tokens)
                    self.log_probs[example.key] = rows.float().clone()
            elif kind == "states":
                for example, states in zip(examples, read.token_states(requests[kind]), strict=True):
                    _check_tokens(example, len(states), len(example.input_ids))
                    self.states[example.key] = states.float().clone()

    def sequence_nll(self, keys: Sequence[str], device: torch.device) -> Tensor:
        """L_ref of the examples, [B] float32."""
        return torch.tensor([self.nll[key] for key in keys], dtype=torch.float32, device=device)

    def answer_log_probs(self, keys: Sequence[str], device: torch.device) -> Tensor:
        """log-softmax rows of the examples' answer tokens one after the other, [n, V] float32."""
        return torch.cat([self.log_probs[key] for key in keys]).to(device, non_blocking=True)

    def token_states(self, keys: Sequence[str], width: int, device: torch.device) -> Tensor:
        """Hidden states of the examples, padded with 0 on the right to `width`: [B, width, d] float32."""
        rows = [nn.functional.pad(self.states[key], (0, 0, 0, width - len(self.states[key]))) for key in keys]
        return torch.stack(rows).to(device, non_blocking=True)

    def generic_labels(self, keys: Sequence[str], device: torch.device) -> Tensor:
        """Generic labels of the examples' answer tokens one after the other, [n], int64."""
        return torch.cat([self.generic[key] for key in keys]).to(device, non_blocking=True)

    def save(self, path: str | os.PathLike) -> None:
        """Write whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            f"{kind}.{key}": tensor.contiguous()
            for kind in ("log_probs", "states", "generic")
            for key, tensor in getattr(self, kind).items()
        }
        tensors["nll"] = torch.tensor(list(self.nll.values()), dtype=torch.float32)
        metadata = {"nll_keys": list(self.nll), "layer": self.layer, "live": self.live}
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        save_file(tensors, partial, metadata={name: json.dumps(value) for name, value in metadata.items()})
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> ReferenceScores:
        with safe_open(path, framework="pt") as file:
            metadata = {name: json.loads(value) for name, value in file.metadata().items()}
            scores = cls(metadata.get("layer"))
            scores.live = metadata.get("live", "")
            scores.nll = dict(zip(metadata["nll_keys"], file.get_tensor("nll").tolist(), strict=True))
            for name in file.keys():  # noqa: SIM118 - no mapping
                kind, _, key = name.partition(".")
                if key:
                    getattr(scores, kind)[key] = file.get_tensor(name)
        return scores


def bytes_needed(model: nn.Module, wanted: Mapping[str, Sequence[Example]]) -> int:
    """What the distributions and hidden states of the examples take in memory and on disk."""
    anatomy = find_anatomy(model)
    rows = sum(example.n_answer_tokens for example in {e.key: e for e in wanted.get("log_probs", ())}.values())
    states = sum(len(example.input_ids) for example in {e.key: e for e in wanted.get("states", ())}.values())
    return 4 * (rows * anatomy.vocab_size + states * anatomy.hidden_size)


def _request(kind: str, examples: Sequence[Example], layer: int | None) -> Answers | TokenStates:
    prompts, answers = tuple(e.prompt for e in examples), tuple(e.answer for e in examples)
    if kind == "states":
        return TokenStates(prompts, answers, layer)
    return Answers(prompts, answers, distribution=kind == "log_probs")


def _check_tokens(example: Example, found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(
            f"the activation pass read {found} tokens of a text that has {expected}: {example.answer[:60]!r}; both "
            "must tokenise alike"
        )
