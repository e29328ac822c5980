"""What all unlearning trainers share: nested batches, one concatenated forward, the reference, exact normalisation.

A method is a subclass that says what it needs of the reference and returns its loss as :class:`trainers.terms.Term` s.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback

from trainers.answer_logits import answer_logits
from trainers.answer_rows import AnswerRows
from trainers.checkpoints import last_complete_checkpoint
from trainers.data import Example, ForgetRetainPairs, PairByEpoch, PairCollator, encode_pairs
from trainers.frozen_reference import FrozenReference
from trainers.objectives import sequence_nll, token_kl
from trainers.reference_scores import Frozen, ReferenceNeeds
from trainers.terms import Term, count, counts_by_sequence, token_term
from trainers.unlearning_config import UnlearningConfig

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger(__name__)


class UnlearningTrainer(Trainer):
    """Base of the unlearning trainers: each is this class with a loss on the forget part of the batch.

    Parameters
    ----------
    model : nn.Module
        A causal language model, or a PeftModel (its reference is then the model with adapters off).
    args : UnlearningConfig
        The config of the method, such as NPOConfig.
    forget_dataset : datasets.Dataset or sequence of mappings or objects
        Pairs with ``question`` and ``answer``, or ``prompt`` and ``answer``; see :func:`trainers.data.encode_pairs`.
        Some methods read more fields.
    retain_dataset : likewise, optional
        Needed where the loss has a retain part. Cycled in its own seeded order.
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
    **Loss.** gamma · forget term + alpha · retain term, where the retain term is ℓ_r, the retain NLL, or KL(ref ‖ θ),
    both means over retain answer tokens, or nothing. Logged with the loss: ``forget_loss``, ``retain_loss`` (the terms
    without their weights), ``forget_nll``, ``retain_nll`` (means over answer tokens, nats), since the last log.

    **Accumulation and ranks.** A loss is a sum of ratios, such as (Σ over forget sequences) / N or (Σ over retain
    tokens) / T. N and T are counted over the whole optimizer step, all accumulated batches and all ranks, before its
    first forward; each batch then contributes its own numerator. 1 × 8 accumulated, 8 × 1 and two ranks of 4 hence
    give the same update, also where answers differ in length, which a mean of batch means does not.

    **Reference.** What the loss needs of the frozen model is read from the weights in memory before the first step and
    written to ``<output_dir>/reference_scores.safetensors``. A resumed run reads that file; it never takes trained
    weights for the reference. With PEFT the reference is the model with its adapters off. Distributions and hidden
    states that would take more than ``reference_max_bytes`` are computed batch by batch instead, by the model with its
    adapters off or, without PEFT, by a frozen copy.

    **Evaluation.** ``eval_loss`` is the training objective over the evaluation pairs, exact whatever the batch size
    (the Trainer's own mean of batch means is not), next to ``eval_<term>``. Retain terms are read on the retain pairs
    that epoch 0 gives to the evaluation pairs.
    """

    # The loss is normalised over the accumulated batch in `compute_loss`.
    loss_is_scaled_for_ga = True
    # The config class of the method.
    config_class: type[UnlearningConfig] = UnlearningConfig

    def __init__(
        self,
        model: nn.Module,
        args: UnlearningConfig,
        forget_dataset: Sequence,
        retain_dataset: Sequence | None = None,
        eval_dataset: Sequence | Mapping[str, Sequence] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
    ) -> None:
        _check_arguments(model, args, self.config_class, processing_class)
        self._tokenizer = processing_class
        self._limit = _length_limit(model, args.max_length)
        self._pair_seed = args.data_seed if args.data_seed is not None else args.seed
        self._retain = self._checked_retain(args, retain_dataset)
        self.args = args  # read by what a method sets beside the forget pairs
        train_pairs = self._pairs(forget_dataset, "forget_dataset")
        if eval_dataset is None:
            eval_pairs = ForgetRetainPairs(train_pairs.forget, self._retain, self._pair_seed, train_pairs.beside)
        elif isinstance(eval_dataset, Mapping):
            eval_pairs = {key: self._pairs(pairs, f"eval_dataset[{key!r}]") for key, pairs in eval_dataset.items()}
        else:
            eval_pairs = self._pairs(eval_dataset, "eval_dataset")

        if peft_config is not None:
            model = _with_adapters(model, peft_config)
        self.choose_parameters(model)
        if _checkpoints_activations(args) and not all(p.requires_grad for p in model.parameters()):
            # Without it checkpointed blocks see no input that needs a gradient, and adapters train nothing.
            model.enable_input_require_grads()
        if args.disable_dropout:
            _disable_dropout(model)

        pad = processing_class.pad_token_id
        super().__init__(
            model=model,
            args=args,
            data_collator=PairCollator(pad if pad is not None else 0),
            train_dataset=train_pairs,
            eval_dataset=eval_pairs,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        if self.args.n_gpu > 1:
            raise ValueError(
                f"{self.args.n_gpu} GPUs in one process (DataParallel) are not supported; start one process a GPU "
                "with `torchrun` or `accelerate launch`, or show one GPU by CUDA_VISIBLE_DEVICES"
            )
        self.add_callback(PairByEpoch(train_pairs))
        # transformers before 5.19 asks this instead of `loss_is_scaled_for_ga`.
        self.model_accepts_loss_kwargs = True

        needs = self.reference_needs()
        if getattr(args, "retain_loss", "none") == "kl":
            needs = needs._replace(log_probs=(*needs.log_probs, "retain"))
        self.reference = FrozenReference(needs, self.reference_layer(), args.reference_max_bytes)
        for pairs in (train_pairs, *(eval_pairs.values() if isinstance(eval_pairs, dict) else [eval_pairs])):
            self.reference.add(pairs)
        self._weights_are_initial = True
        self._logged: dict[str, Tensor] = {}  # term -> [sum, count] since the last log
        self._evaluated: list[dict[str, Tensor]] = []  # term -> [B, (value, count)], batch by batch
        self._weights: dict[str, float] = {}

    # What a method is

    def forget_terms(self, rows: Mapping[str, AnswerRows], frozen: Frozen) -> dict[str, Term]:
        """The forget side of the loss on a batch, from the answer rows of its parts; weight 0 is only logged."""
        raise NotImplementedError

    def reference_needs(self) -> ReferenceNeeds:
        """What the forget side needs of the reference."""
        return ReferenceNeeds()

    def reference_layer(self) -> int | None:
        """The hidden-state index of the states the method needs of the reference."""
        return None

    def beside(self, dataset: Sequence, name: str) -> dict[str, list[Example]]:
        """Parts that the method sets beside the forget pairs, one example a pair."""
        return {}

    def usable(self, dataset: Sequence, name: str) -> Sequence:
        """The pairs of a forget set that the method can use."""
        return dataset

    def choose_parameters(self, model: nn.Module) -> None:
        """Freeze what the method does not train; all that needs a gradient is trained by default."""

    def terms(self, model: nn.Module, inputs: dict[str, dict[str, Any]]) -> dict[str, Term]:
        """The loss on a batch, term by term, after one forward over all parts."""
        # Before the forward: where the reference is run beside the model, the graph is not alive yet.
        frozen = self.reference.batch(inputs)
        rows = dict(zip(inputs, self.answer_rows(model, list(inputs.values())), strict=True))
        terms = self.forget_terms(rows, frozen)
        if getattr(self.args, "retain_loss", "none") != "none":
            terms |= self.retain_terms(rows["retain"], frozen)
        return terms

    def retain_terms(self, rows: AnswerRows, frozen: Frozen) -> dict[str, Term]:
        """alpha · ℓ_r or alpha · KL_r, by ``args.retain_loss``."""
        if self.args.retain_loss == "kl":
            with torch.no_grad():
                nll = sequence_nll(rows)
            loss = token_term(token_kl(rows, frozen.log_probs["retain"]), rows, "retain", self.args.alpha)
        else:
            nll = sequence_nll(rows)
            loss = Term(nll, "retain", "token", self.args.alpha)
        return {"retain_nll": Term(nll.detach(), "retain", "token"), "retain_loss": loss}

    def answer_rows(self, model: nn.Module, parts: Sequence[dict[str, Tensor]]) -> tuple[AnswerRows, ...]:
        """One forward over the concatenated parts; the rows that predict answer tokens, part by part."""
        return answer_logits(model, self.bare_model().get_output_embeddings(), parts)

    def bare_model(self) -> nn.Module:
        """The model without DDP and its like; a PeftModel stays one."""
        return self.accelerator.unwrap_model(self.model)

    # The loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self._measure_reference()
        terms = self.terms(model, inputs)
        totals, ranks = num_items_in_batch, self.accelerator.num_processes
        if not isinstance(totals, Mapping):  # called by hand, on a batch of its own
            totals, ranks = count([inputs]), 1
        loss = sum(term.weight * term.values.sum() / totals[term.part, term.per] for term in _trained(terms))
        if model.training:
            if self._weights_are_initial and self.args.should_save:
                self.reference.save(self.args.output_dir)
            self._weights_are_initial = False
            self._keep_for_log(terms, count([inputs]))
        # The ranks' gradients are averaged, the totals already hold all ranks.
        loss = loss * ranks
        return (loss, {"loss": loss, **{name: term.values for name, term in terms.items()}}) if return_outputs else loss

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = count(batches)
        if not counts:
            return batches, None
        total = self.accelerator.reduce(torch.stack([n.to(device) for n in counts.values()]), reduction="sum")
        return batches, dict(zip(counts, total.unbind(), strict=True))

    # Logs and evaluation

    def _keep_for_log(self, terms: dict[str, Term], counts: dict[tuple[str, str], Tensor]) -> None:
        for name, term in terms.items():
            total = term.values.detach().sum()
            kept = torch.stack([total, counts[term.part, term.per].to(total)])
            self._logged[name] = self._logged.get(name, 0.0) + kept

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Only in the Trainer's own train log, which all ranks write: a callback may log on one rank.
        if "loss" in logs and self._logged:
            sums = self.accelerator.reduce(torch.stack(list(self._logged.values())), reduction="sum")
            means = (sums[:, 0] / sums[:, 1]).tolist()
            logs.update(dict(zip(self._logged, means, strict=True)))
            self._logged = {}
        super().log(logs, start_time)

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        self._measure_reference()
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            terms = self.terms(model, inputs)
        counts = {name: counts_by_sequence(inputs[term.part], term.per) for name, term in terms.items()}
        table = {name: torch.stack([term.values, counts[name].to(term.values)], 1) for name, term in terms.items()}
        self._evaluated.append(self.accelerator.gather_for_metrics(table))
        self._weights = {name: term.weight for name, term in terms.items()}
        loss = sum(term.weight * term.values.sum() / counts[name].sum() for name, term in terms.items())
        return loss.detach(), None, None

    def evaluation_loop(self, dataloader, *args, metric_key_prefix: str = "eval", **kwargs):
        self._evaluated = []
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self._evaluated:
            means = {}
            for name in self._evaluated[0]:
                sums = torch.cat([table[name] for table in self._evaluated]).double().sum(0)
                means[name] = float(sums[0] / sums[1])
            output.metrics[f"{metric_key_prefix}_loss"] = sum(self._weights[name] * means[name] for name in means)
            output.metrics.update({f"{metric_key_prefix}_{name}": mean for name, mean in means.items()})
        self._evaluated = []
        return output

    def get_eval_dataloader(self, eval_dataset=None):
        if eval_dataset is not None and not isinstance(eval_dataset, (str, ForgetRetainPairs)):
            eval_dataset = self._pairs(eval_dataset, "eval_dataset")
            self.reference.add(eval_dataset)
        return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset):
        if not isinstance(test_dataset, ForgetRetainPairs):
            test_dataset = self._pairs(test_dataset, "test_dataset")
            self.reference.add(test_dataset)
        return super().get_test_dataloader(test_dataset)

    # The reference

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        if resume_from_checkpoint is True:
            # Not the newest folder, which a kill may have left half-written. None at all is the Trainer's error.
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir) or True
        if resume_from_checkpoint:
            self._restore_reference(resume_from_checkpoint)
        elif not self._sharded:
            # Sharded models are not ready yet: theirs is read before the first loss.
            self._measure_reference()
        if self.accelerator.num_processes > 1 and not self._sharded and self.model_wrapped is self.model:
            # An `evaluate()` before training prepares the model for evaluation, and accelerate then takes it for
            # prepared and leaves it without DDP: every rank would train a model of its own.
            self.model._is_accelerate_prepared = False
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def measure_frozen(self, model: nn.Module, lacking: Mapping[str, Sequence[Example]], progress: str | None) -> None:
        """Read what the reference scores lack; `model` is the frozen one inside this call."""
        self.reference.scores.measure(model, self._tokenizer, lacking, progress=progress)

    def _measure_reference(self) -> None:
        """Read the scores that the pairs seen so far lack."""
        if self.reference.complete:
            return
        bare, initial = self.bare_model(), self._weights_are_initial
        lacking = self.reference.lacking(bare, initial, self._sharded)
        if lacking:
            progress = None if self.args.disable_tqdm or not self.is_world_process_zero() else "reference scores"
            with self.reference.frozen(bare, initial), self.accelerator.autocast():
                self.measure_frozen(self.model_wrapped if self._sharded else bare, lacking, progress)
        self.reference.complete = True

    def _restore_reference(self, checkpoint: str | bool) -> None:
        folders = [] if checkpoint is True else [Path(checkpoint).absolute().parent]
        folders.append(Path(self.args.output_dir).absolute())
        found = self.reference.restore(folders, self.bare_model())
        self._weights_are_initial = False
        if found is not None and self.args.should_save and found.parent != folders[-1]:
            self.reference.save(self.args.output_dir)

    # Odds and ends

    def encode(self, dataset: Sequence, name: str, answer: str = "answer") -> list[Example]:
        """Tokenised pairs; see :func:`trainers.data.encode_pairs`."""
        return encode_pairs(dataset, self._tokenizer, self._limit, name, answer)

    @property
    def _sharded(self) -> bool:
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _checked_retain(self, args: UnlearningConfig, dataset: Sequence | None) -> list[Example] | None:
        if args.needs_retain:
            if dataset is None:
                has_term = getattr(args, "retain_loss", "none") != "none"
                what = f"`retain_loss={args.retain_loss!r}`" if has_term else f"{type(args).__name__} as it is set"
                how = ", or set retain_loss='none'" if has_term else ""
                raise ValueError(f"{what} needs a `retain_dataset`, got None; give one{how}")
            return self.encode(dataset, "retain_dataset")
        if dataset is not None:
            logger.warning("`retain_dataset` is not used: %s has no retain term as it is set.", type(args).__name__)
        return None

    def _pairs(self, dataset: Sequence, name: str) -> ForgetRetainPairs:
        dataset = self.usable(dataset, name)
        forget = self.encode(dataset, name)
        return ForgetRetainPairs(forget, self._retain, self._pair_seed, self.beside(dataset, name))


def _trained(terms: dict[str, Term]) -> list[Term]:
    return [term for term in terms.values() if term.weight]


def _check_arguments(
    model: nn.Module, args: UnlearningConfig, config_class: type, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"`model` must be a loaded model, got {type(model).__name__}; load it with from_pretrained")
    if not isinstance(args, config_class):
        raise ValueError(f"`args` must be of {config_class.__name__}, got {type(args).__name__}")
    if tokenizer is None:
        raise ValueError("`processing_class` must be the model's tokenizer, got None")
    if getattr(model, "get_output_embeddings", lambda: None)() is None:
        raise ValueError(
            f"`model` must be a causal language model with an output head, got {type(model).__name__}; load it with "
            "AutoModelForCausalLM"
        )


def _with_adapters(model: nn.Module, peft_config: PeftConfig) -> nn.Module:
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise ImportError("`peft_config` needs the package peft: pip install peft") from error
    if is_peft_model(model) or getattr(model, "peft_config", None):
        raise ValueError("`peft_config` was given and `model` is a PeftModel already; give only one of the two")
    return get_peft_model(model, peft_config)


def _checkpoints_activations(args: UnlearningConfig) -> bool:
    # The second is the name in earlier releases of transformers 5.
    return bool(getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", None))


def _length_limit(model: nn.Module, max_length: int | None) -> int | None:
    positions = getattr(model.config, "max_position_embeddings", None)
    limits = [limit for limit in (max_length, positions) if limit is not None]
    return min(limits, default=None)


def _disable_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "attention_dropout", None), float):  # read by functional attention
            module.attention_dropout = 0.0
