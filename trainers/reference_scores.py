"""What the frozen model says about the answers, read once before training and kept on disk by content.

The reference model itself is not kept: NPO and its kin need a number an answer, KL terms a distribution an answer
token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from monitor.activations import Answers, measure_activations
from trainers.data import Example

FILE_NAME = "reference_scores.safetensors"


class ReferenceScores:
    """The frozen model's scores by example key (:attr:`trainers.data.Example.key`).

    Attributes
    ----------
    nll : dict of str to float
        L_ref, the NLL summed over the answer's tokens, nats.
    log_probs : dict of str to Tensor [T_i, V] float32
        log-softmax rows at the answer's tokens, on the CPU.
    """

    def __init__(self) -> None:
        self.nll: dict[str, float] = {}
        self.log_probs: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self.nll or self.log_probs)

    def missing(self, nll: Iterable[Example], log_probs: Iterable[Example]) -> tuple[list[Example], list[Example]]:
        """Those of the examples, without repeats, whose NLL, and whose distribution, is not known yet."""
        return (
            list({e.key: e for e in nll if e.key not in self.nll}.values()),
            list({e.key: e for e in log_probs if e.key not in self.log_probs}.values()),
        )

    def measure(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        nll: Sequence[Example] = (),
        log_probs: Sequence[Example] = (),
        max_bytes: int | None = None,
        progress: str | None = None,
    ) -> None:
        """Read the scores of examples that lack them, in one activation pass over `model` as it is now.

        Raises
        ------
        ValueError
            If the distributions would take more than `max_bytes`.
        """
        nll, log_probs = self.missing(nll, log_probs)
        if not nll and not log_probs:
            return
        if log_probs and max_bytes is not None:
            _check_size(log_probs, model, max_bytes)
        requests = {
            distribution: _request(examples, distribution)
            for distribution, examples in ((False, nll), (True, log_probs))
            if examples
        }
        read = measure_activations(model, tokenizer, list(requests.values()), progress=progress)
        if nll:
            for example, scores in zip(nll, read.answers(requests[False]).log_probs, strict=True):
                _check_tokens(example, scores)
                self.nll[example.key] = -float(scores.double().sum())
        if log_probs:
            for example, scores in zip(log_probs, read.answers(requests[True]).log_distribution, strict=True):
                _check_tokens(example, scores)
                self.log_probs[example.key] = scores.float().clone()

    def sequence_nll(self, keys: Sequence[str], device: torch.device) -> Tensor:
        """L_ref of the examples, [B] float32."""
        return torch.tensor([self.nll[key] for key in keys], dtype=torch.float32, device=device)

    def answer_log_probs(self, keys: Sequence[str], device: torch.device) -> Tensor:
        """log-softmax rows of the examples' answer tokens one after the other, [n, V] float32."""
        return torch.cat([self.log_probs[key] for key in keys]).to(device, non_blocking=True)

    def save(self, path: str | os.PathLike) -> None:
        """Write whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"log_probs.{key}": rows.contiguous() for key, rows in self.log_probs.items()}
        tensors["nll"] = torch.tensor(list(self.nll.values()), dtype=torch.float32)
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        save_file(tensors, partial, metadata={"nll_keys": json.dumps(list(self.nll))})
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> ReferenceScores:
        scores = cls()
        with safe_open(path, framework="pt") as file:
            keys = json.loads(file.metadata()["nll_keys"])
            scores.nll = dict(zip(keys, file.get_tensor("nll").tolist(), strict=True))
            for name in file.keys():  # noqa: SIM118 - no mapping
                if name.startswith("log_probs."):
                    scores.log_probs[name.removeprefix("log_probs.")] = file.get_tensor(name)
        return scores


def _request(examples: Sequence[Example], distribution: bool) -> Answers:
    return Answers(
        tuple(example.prompt for example in examples), tuple(example.answer for example in examples), distribution
    )


def _check_size(examples: Sequence[Example], model: nn.Module, max_bytes: int) -> None:
    vocabulary = model.get_output_embeddings().weight.shape[0]
    rows = sum(example.n_answer_tokens for example in examples)
    needed = 4 * rows * vocabulary
    if needed > max_bytes:
        raise ValueError(
            f"`reference_max_bytes` is {max_bytes:,}, and the reference's distributions over {rows:,} answer tokens x "
            f"{vocabulary:,} words take {needed:,} bytes. Raise it if memory and disk allow, use a smaller retain "
            "set, or use retain_loss='nll', which needs no reference"
        )


def _check_tokens(example: Example, scores: Tensor) -> None:
    if len(scores) != example.n_answer_tokens:
        raise RuntimeError(
            f"the activation pass scored {len(scores)} tokens of an answer that has {example.n_answer_tokens}: "
            f"{example.answer[:60]!r}; both must tokenise alike"
        )
