"""Negative preference optimisation (NPO)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback

from trainers.answer_rows import sum_by_sequence
from trainers.data import Example, ForgetRetainPairs
from trainers.npo_config import NPOConfig
from trainers.objectives import npo, sequence_nll, token_kl
from trainers.unlearning_trainer import Term, UnlearningTrainer, logger

if TYPE_CHECKING:
    from peft import PeftConfig


class NPOTrainer(UnlearningTrainer):
    """Make a model forget question-answer pairs by NPO, holding a retain set.

    Parameters
    ----------
    model : nn.Module
        A causal language model, or a PeftModel (its reference is then the model with adapters off).
    args : NPOConfig
    forget_dataset : datasets.Dataset or sequence of mappings or objects
        Pairs with ``question`` and ``answer``, or ``prompt`` and ``answer``; see :func:`trainers.data.encode_pairs`.
    retain_dataset : likewise, optional
        Needed unless ``args.retain_loss`` is "none". Cycled in its own seeded order.
    eval_dataset : likewise, or a dict of them, optional
        Forget pairs to evaluate on; the forget set by default.
    processing_class : PreTrainedTokenizerBase
        The tokenizer; padding side and pad token do not matter.
    peft_config : PeftConfig, optional
        Train adapters of this kind instead of the weights.
    callbacks, optimizers
        As in `transformers.Trainer`.

    Raises
    ------
    ValueError
        For bad pairs, a missing retain set, a model without a head, and settings that do not go together.

    Notes
    -----
    loss = gamma · (1/N) Σᵢ (2/β) log(1 + (π_θ(yᵢ|xᵢ)/π_ref(yᵢ|xᵢ))^β) + alpha · R over N forget pairs (Zhang et al.,
    arXiv 2404.05868, Eq. 3; with R its NPO+RT and NPO+KL variants). R is the retain NLL or KL(ref ‖ θ), both means
    over the retain answer tokens of the optimizer step. Sign: minimising it raises the forget NLL; at the start, where
    θ = ref, the NPO term is (2/β) ln 2.

    Logged with the loss: ``npo_loss`` (mean over forget pairs), ``forget_nll``, ``retain_nll`` and ``retain_loss``
    (means over answer tokens, nats), since the last log.
    """

    def __init__(
        self,
        model: nn.Module,
        args: NPOConfig,
        forget_dataset: Sequence,
        retain_dataset: Sequence | None = None,
        eval_dataset: Sequence | Mapping[str, Sequence] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ) -> None:
        if not isinstance(args, NPOConfig):
            raise ValueError(f"`args` must be an NPOConfig, got {type(args).__name__}")
        if args.retain_loss != "none" and retain_dataset is None:
            raise ValueError(
                f"`retain_loss={args.retain_loss!r}` needs a `retain_dataset`, got None; give one, or set "
                "retain_loss='none'"
            )
        if args.retain_loss == "none" and retain_dataset is not None:
            logger.warning("`retain_dataset` is not used: `retain_loss` is 'none'.")
            retain_dataset = None
        super().__init__(
            model,
            args,
            forget_dataset,
            retain_dataset,
            eval_dataset,
            processing_class,
            peft_config,
            callbacks,
            optimizers,
        )

    def reference_needs(self, pairs: ForgetRetainPairs) -> tuple[Sequence[Example], Sequence[Example]]:
        return pairs.forget, pairs.retain if self.args.retain_loss == "kl" else ()

    def terms(self, model: nn.Module, inputs: dict[str, dict[str, Any]]) -> dict[str, Term]:
        args, forget = self.args, inputs["forget"]
        if "retain" not in inputs:
            (forget_rows,) = self.answer_rows(model, [forget])
            return self._forget_terms(forget_rows, forget["keys"])
        retain = inputs["retain"]
        forget_rows, retain_rows = self.answer_rows(model, [forget, retain])
        terms = self._forget_terms(forget_rows, forget["keys"])
        if args.retain_loss == "kl":
            with torch.no_grad():
                terms["retain_nll"] = Term(sequence_nll(retain_rows), "retain", "token")
            frozen = self.reference.answer_log_probs(retain["keys"], retain_rows.logits.device)
            divergence = sum_by_sequence(token_kl(retain_rows, frozen), retain_rows.sequence, retain_rows.n_sequences)
            terms["retain_loss"] = Term(divergence, "retain", "token", args.alpha)
        else:
            nll = sequence_nll(retain_rows)
            terms["retain_nll"] = Term(nll.detach(), "retain", "token")
            terms["retain_loss"] = Term(nll, "retain", "token", args.alpha)
        return terms

    def _forget_terms(self, rows, keys: list[str]) -> dict[str, Term]:
        nll = sequence_nll(rows)
        frozen = self.reference.sequence_nll(keys, nll.device)
        return {
            "npo_loss": Term(npo(nll, frozen, self.args.beta), "forget", "sequence", self.args.gamma),
            "forget_nll": Term(nll.detach(), "forget", "token"),
        }
