"""What one pass read: pooled states and answer scores, addressed by request, and their file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from monitor.plan import Plan
from monitor.requests import Answers, States, TokenStates


@dataclass(frozen=True)
class AnswerScores:
    """Per-answer, per-token results, in the request's order.

    Attributes
    ----------
    log_probs : list of Tensor [T_i], float32
        log p(token | all tokens before it), nats.
    greedy : list of Tensor [T_i], bool
        Whether the token is the most likely one.
    log_distribution : list of Tensor [T_i, vocab_size], float32, or None
        The log-softmax rows, if the request asked for them.
    """

    log_probs: list[Tensor]
    greedy: list[Tensor]
    log_distribution: list[Tensor] | None = None


class Activations:
    """What one pass read, on the CPU, addressed by the requests it was planned for.

    Attributes
    ----------
    n_layers : int
        L; hidden states are 0..L.
    hidden_size, vocab_size : int
    tensors : dict of str to Tensor
        ``states.<slot>`` [n, n_layers, d] float32, ``answers.log_probs`` and ``answers.greedy`` [total tokens],
        ``answers.log_distribution`` [rows, vocab_size], ``tokens.<slot>`` [total tokens, d] float32.
    """

    def __init__(self, plan: Plan, tensors: dict[str, Tensor]) -> None:
        self.plan = plan
        self.tensors = tensors

    @property
    def n_layers(self) -> int:
        return self.plan.n_layers

    @property
    def hidden_size(self) -> int:
        states = [t for name, t in self.tensors.items() if name.startswith(("states.", "tokens."))]
        if not states:
            raise ValueError("No hidden states were requested in this pass.")
        return states[0].shape[-1]

    @property
    def vocab_size(self) -> int:
        return self.plan.vocab_size

    def layers(self, request: States) -> tuple[int, ...]:
        """Hidden-state indices of the request's layers, in its order."""
        slot, _ = self._slot(request)
        return self.plan.slots[slot].layers

    def states(self, request: States) -> Tensor:
        """Pooled states of a request, Tensor [n_texts, n_layers, d], float32."""
        slot, rows = self._slot(request)
        return self.tensors[f"states.{slot}"][rows]

    def token_states(self, request: TokenStates) -> list[Tensor]:
        """Hidden states of every token of ``prompt + answer``, one Tensor [T_i, d] float32 a pair, in its order."""
        if request not in self.plan.token_rows:
            raise KeyError("This request was not part of the pass; add it to what was planned.")
        slot, sequences = self.plan.token_rows[request]
        offsets = token_offsets(self.plan, slot)
        return [self.tensors[f"tokens.{slot}"][slice(*offsets[i])] for i in sequences]

    def answers(self, request: Answers) -> AnswerScores:
        """Per-token scores of a request's answers."""
        if request not in self.plan.answer_rows:
            raise KeyError("This request was not part of the pass; add it to the measure's `stimuli`.")
        offsets = answer_offsets(self.plan)
        spans = [slice(*offsets[row]) for row in self.plan.answer_rows[request]]
        log_probs, greedy = self.tensors["answers.log_probs"], self.tensors["answers.greedy"].bool()
        distribution = None
        if request.distribution:
            wide = answer_offsets(self.plan, distribution=True)
            rows = self.tensors["answers.log_distribution"]
            distribution = [rows[slice(*wide[row])] for row in self.plan.answer_rows[request]]
        return AnswerScores([log_probs[s] for s in spans], [greedy[s] for s in spans], distribution)

    def _slot(self, request: States) -> tuple[int, Tensor]:
        if request not in self.plan.slot_rows:
            raise KeyError("This request was not part of the pass; add it to the measure's `stimuli`.")
        return self.plan.slot_rows[request]

    def save(self, path: str | os.PathLike, **about: str) -> None:
        """Write ``path`` (safetensors) and its sidecar ``.json``; each appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        meta = {"plan": self.plan.fingerprint(), "n_layers": self.n_layers, "vocab_size": self.vocab_size, **about}
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            save_file(
                {k: t.contiguous() for k, t in self.tensors.items()}, partial, {k: str(v) for k, v in meta.items()}
            )
            os.replace(partial, path)
            partial.write_text(json.dumps(meta, indent=2) + "\n")
            os.replace(partial, path.with_suffix(".json"))
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike, plan: Plan) -> Activations:
        """Read what `save` wrote.

        Raises
        ------
        ValueError
            If the file was written for other texts, layers, poolings or another tokenizer than `plan`'s.
        """
        with safe_open(path, framework="pt") as file:
            stored = (file.metadata() or {}).get("plan")
            if stored != plan.fingerprint():
                raise ValueError(
                    f"{path} holds the activations of other stimuli (texts, layers, pooling or tokenizer differ) than "
                    "the measures ask for. Use the measures the file was written with, or another output directory."
                )
            return cls(plan, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def answer_offsets(plan: Plan, distribution: bool = False) -> dict[int, tuple[int, int]]:
    """Where each scored sequence's tokens lie in the flat answer tensors."""
    offsets, position = {}, 0
    for sequence in sorted(plan.distribution if distribution else plan.answer_start):
        end = position + plan.answer_length(sequence)
        offsets[sequence] = (position, end)
        position = end
    return offsets


def token_offsets(plan: Plan, slot: int) -> dict[int, tuple[int, int]]:
    """Where each sequence's tokens lie in the flat tensor of a token slot."""
    offsets, position = {}, 0
    for sequence in plan.token_slots[slot].sequences:
        end = position + len(plan.sequences[sequence])
        offsets[sequence] = (position, end)
        position = end
    return offsets
