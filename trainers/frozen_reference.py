"""The reference of a run: what the frozen model says, kept, or the frozen model itself where that is too large."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate.utils import is_peft_model
from torch import nn

from monitor.reference import weights_fingerprint
from trainers.data import Example, ForgetRetainPairs
from trainers.live_reference import LiveReference
from trainers.reference_scores import FILE_NAME, KINDS, Frozen, ReferenceNeeds, ReferenceScores, bytes_needed

logger = logging.getLogger(__name__)


class FrozenReference:
    """What a loss needs of the frozen model, for all pairs of a run.

    Parameters
    ----------
    needs : ReferenceNeeds
    layer : int or None
        Hidden-state index of the states needed.
    max_bytes : int
        What distributions and hidden states may take. Beyond, the reference is run beside the model.

    Attributes
    ----------
    scores : ReferenceScores
    live : LiveReference or None
    complete : bool
        Whether nothing is lacking for the pairs added so far.
    """

    def __init__(self, needs: ReferenceNeeds, layer: int | None, max_bytes: int) -> None:
        self.needs = needs
        self.max_bytes = max_bytes
        self.scores = ReferenceScores(layer)
        self.live: LiveReference | None = None
        self.complete = False
        self._pair_sets: list[ForgetRetainPairs] = []

    def add(self, pairs: ForgetRetainPairs) -> None:
        self._pair_sets.append(pairs)
        self.complete = False

    def lacking(self, bare: nn.Module, initial: bool, sharded: bool) -> dict[str, list[Example]]:
        """Examples still to be read, by kind, after it is decided what is run beside the model.

        Parameters
        ----------
        bare : nn.Module
            The model without DDP and its like; a PeftModel stays one.
        initial : bool
            Whether its weights are those of the start.
        sharded : bool
            Whether they are sharded over ranks.

        Raises
        ------
        ValueError
            If a reference would have to be copied that cannot be.
        RuntimeError
            If it would have to be copied from weights that have been trained.
        """
        wanted = self._wanted()
        missing, needed = self.scores.missing(wanted), bytes_needed(bare, wanted)
        if not missing or needed <= self.max_bytes:
            return missing
        if not initial and not _comes_back(bare):
            raise self._too_late()
        what = f"`reference_max_bytes` is {self.max_bytes:,}, and the loss needs {needed:,} bytes of the reference"
        if not is_peft_model(bare) and sharded:
            raise ValueError(
                f"{what}: a sharded model cannot be copied, so that it cannot be run beside. Raise "
                "`reference_max_bytes`"
            )
        how = "the model with its adapters off" if is_peft_model(bare) else "a frozen copy of the model"
        logger.warning("%s: it is computed in every step by %s, which is slower.", what, how)
        self._run_beside(bare)
        return self.scores.missing(self._wanted())

    def frozen(self, bare: nn.Module, initial: bool) -> AbstractContextManager:
        """A context in which `bare` is the frozen model.

        Raises
        ------
        RuntimeError
            If its weights have been trained since, and no switching off brings the frozen ones back.
        """
        if not initial and not _comes_back(bare):
            raise self._too_late()
        return _adapters_off(bare) if is_peft_model(bare) else nullcontext()

    def batch(self, inputs: Mapping[str, dict[str, Any]]) -> Frozen:
        """The frozen model's word on a batch."""
        device = next(iter(inputs.values()))["input_ids"].device
        word = Frozen({}, {}, {}, {})
        for part in self.needs.nll:
            word.nll[part] = self.scores.sequence_nll(inputs[part]["keys"], device)
        for part in self.needs.generic:
            word.generic[part] = self.scores.generic_labels(inputs[part]["keys"], device)
        for part in self.needs.log_probs:
            if self.live is not None:
                word.log_probs[part] = self.live.log_probs(inputs[part])
            else:
                word.log_probs[part] = self.scores.answer_log_probs(inputs[part]["keys"], device)
        for part in self.needs.states:
            if self.live is not None:
                word.states[part] = self.live.states(inputs[part], self.scores.layer)
            else:
                width = inputs[part]["input_ids"].shape[1]
                word.states[part] = self.scores.token_states(inputs[part]["keys"], width, device)
        return word

    def save(self, output_dir: str) -> None:
        if self.scores:
            self.scores.save(Path(output_dir) / FILE_NAME)

    def restore(self, folders: Sequence[Path], bare: nn.Module) -> Path | None:
        """Take up the reference of the run that is resumed, in place of what was read from the weights of this process.

        Parameters
        ----------
        folders : sequence of Path
            Where its file may be, the likeliest first.
        bare : nn.Module
            The model as it was given: the checkpoint is loaded into it afterwards.

        Returns
        -------
        Path or None
            The file; None if the loss needs no reference.

        Raises
        ------
        FileNotFoundError
            If there is no file.
        ValueError
            If it is of other data, or of another initial model where that one has to be run.
        """
        if not any(self._wanted().values()) and self.live is None:
            return None
        found = next((folder / FILE_NAME for folder in folders if (folder / FILE_NAME).is_file()), None)
        if found is None:
            raise FileNotFoundError(
                f"`resume_from_checkpoint` needs the reference scores that the run wrote at its start, and there is no "
                f"{FILE_NAME} in {' or '.join(map(str, dict.fromkeys(folders)))}. They cannot be read from trained "
                "weights: put the file back, or start again without resuming"
            )
        stored = ReferenceScores.load(found)
        if stored.live:
            if self.live is None:
                self._run_beside(bare)
            if self.scores.live != stored.live:
                raise ValueError(
                    f"the run that wrote {found} ran its reference beside the model, and the `model` given is not the "
                    "one that it started from. Give that one; the checkpoint is loaded into it afterwards"
                )
        else:
            self.live = None
        lacking = sum(map(len, stored.missing(self._wanted()).values()))
        if lacking or stored.layer != self.scores.layer:
            why = f"lacks the scores of {lacking} pairs" if lacking else f"was read at layer {stored.layer}"
            raise ValueError(
                f"{found} {why}: data, tokenizer or loss differ from the run that is to be resumed. Use those of that "
                "run, or start again without resuming"
            )
        self.scores = stored
        self.complete = True
        return found

    def _wanted(self) -> dict[str, list[Example]]:
        wanted = {
            kind: [e for pairs in self._pair_sets for part in getattr(self.needs, kind) for e in pairs.part(part)]
            for kind in KINDS
        }
        if self.live is not None:
            wanted["log_probs"] = wanted["states"] = []
        return wanted

    def _too_late(self) -> RuntimeError:
        n = sum(map(len, self.scores.missing(self._wanted()).values()))
        self._pair_sets.pop()  # the late one: the others can still be evaluated
        return RuntimeError(
            f"{n} pairs have no reference scores, and the weights that they would be read from have been trained "
            "since. Give these pairs as `eval_dataset` when the trainer is built"
        )

    def _run_beside(self, bare: nn.Module) -> None:
        self.scores.live = "adapters off" if is_peft_model(bare) else weights_fingerprint(bare)
        self.live = LiveReference(bare)


def _comes_back(model: nn.Module) -> bool:
    """Whether the initial model can be had again from the trained one: trained biases stay on with the adapter off."""
    return is_peft_model(model) and {getattr(c, "bias", "none") for c in model.peft_config.values()} == {"none"}


@contextmanager
def _adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch adapters off inside the block; peft would switch them on again with all of them to be trained."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with model.disable_adapter():
            yield
    finally:
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
