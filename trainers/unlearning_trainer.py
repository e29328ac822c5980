"""What all unlearning trainers share: nested batches, one concatenated forward, reference scores, exact normalisation.

A method is a subclass that says which reference scores it needs and returns its loss as :class:`Term` s.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback

from trainers.answer_logits import answer_logits
from trainers.answer_rows import IGNORE, AnswerRows
from trainers.checkpoints import last_complete_checkpoint
from trainers.data import Example, ForgetRetainPairs, PairByEpoch, PairCollator, encode_pairs
from trainers.reference_scores import FILE_NAME, ReferenceScores
from trainers.unlearning_config import UnlearningConfig

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger(__name__)


class Term(NamedTuple):
    """A part of the loss: weight · Σ values / number of (sequences | answer tokens) of one part of the batch.

    Attributes
    ----------
    values : Tensor [B], float32
        One a sequence; the sum over its answer tokens where the mean goes over tokens.
    part : str
        "forget" or "retain".
    per : {"sequence", "token"}
        What the mean goes over.
    weight : float, default 0.0
        0 is logged and not trained on.
    """

    values: Tensor
    part: str
    per: str
    weight: float = 0.0


class UnlearningTrainer(Trainer):
    """Base of the unlearning trainers. See :class:`trainers.npo.NPOTrainer` for the parameters.

    Notes
    -----
    **Accumulation and ranks.** A loss is a sum of ratios, such as (Σ over forget sequences) / N or (Σ over retain
    tokens) / T. N and T are counted over the whole optimizer step, all accumulated batches and all ranks, before its
    first forward; each batch then contributes its own numerator. 1 × 8 accumulated, 8 × 1 and two ranks of 4 hence
    give the same update, also where answers differ in length, which a mean of batch means does not.

    **Reference.** The scores are read from the weights in memory before the first step and written to
    ``<output_dir>/reference_scores.safetensors``. A resumed run reads that file; it never takes trained weights for
    the reference. With PEFT the reference is the model with its adapters off.

    **Evaluation.** ``eval_loss`` is the training objective over the evaluation pairs, exact whatever the batch size
    (the Trainer's own mean of batch means is not), next to ``eval_<term>``. Retain terms are read on the retain pairs
    that epoch 0 gives to the evaluation pairs.
    """

    # The loss is normalised over the accumulated batch in `compute_loss`.
    loss_is_scaled_for_ga = True

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
        _check_arguments(model, args, processing_class)
        tokenizer = processing_class
        limit = _length_limit(model, args.max_length)
        self._retain = None
        if retain_dataset is not None:
            self._retain = encode_pairs(retain_dataset, tokenizer, limit, "retain_dataset")
        self._limit = limit
        self._tokenizer = tokenizer
        self._pair_seed = args.data_seed if args.data_seed is not None else args.seed
        train_pairs = self._pairs(forget_dataset, "forget_dataset")
        if eval_dataset is None:
            eval_pairs = ForgetRetainPairs(train_pairs.forget, self._retain, self._pair_seed)
        elif isinstance(eval_dataset, Mapping):
            eval_pairs = {key: self._pairs(pairs, f"eval_dataset[{key!r}]") for key, pairs in eval_dataset.items()}
        else:
            eval_pairs = self._pairs(eval_dataset, "eval_dataset")

        if peft_config is not None:
            model = _with_adapters(model, peft_config)
        if is_peft_model(model) and _checkpoints_activations(args):
            # Without it checkpointed blocks see no input that needs a gradient, and the adapters train nothing.
            model.enable_input_require_grads()
        if args.disable_dropout:
            _disable_dropout(model)

        super().__init__(
            model=model,
            args=args,
            data_collator=PairCollator(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0),
            train_dataset=train_pairs,
            eval_dataset=eval_pairs,
            processing_class=tokenizer,
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

        self.reference = ReferenceScores()
        evaluated = eval_pairs.values() if isinstance(eval_pairs, dict) else [eval_pairs]
        self._pair_sets: list[ForgetRetainPairs] = [train_pairs, *evaluated]
        self._reference_is_complete = False
        self._weights_are_initial = True
        self._logged: dict[str, Tensor] = {}  # term -> [sum, count] since the last log
        self._evaluated: list[dict[str, Tensor]] = []  # term -> [B, (value, count)], batch by batch
        self._weights: dict[str, float] = {}

    # What a method is

    def terms(self, model: nn.Module, inputs: dict[str, dict[str, Any]]) -> dict[str, Term]:
        """The loss on a batch, term by term; those of weight 0 are only logged."""
        raise NotImplementedError

    def reference_needs(self, pairs: ForgetRetainPairs) -> tuple[Sequence[Example], Sequence[Example]]:
        """The examples whose reference NLL, and those whose reference distribution, the terms will ask for."""
        return (), ()

    def answer_rows(self, model: nn.Module, parts: Sequence[dict[str, Tensor]]) -> tuple[AnswerRows, ...]:
        """One forward over the concatenated parts; the rows that predict answer tokens, part by part."""
        return answer_logits(model, self._bare_model().get_output_embeddings(), parts)

    # The loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self._measure_reference()
        terms = self.terms(model, inputs)
        totals, ranks = num_items_in_batch, self.accelerator.num_processes
        if not isinstance(totals, Mapping):  # called by hand, on a batch of its own
            totals, ranks = _count([inputs]), 1
        loss = sum(term.weight * term.values.sum() / totals[term.part, term.per] for term in _trained(terms))
        if model.training:
            if self._weights_are_initial and self.args.should_save and self.reference:
                self.reference.save(Path(self.args.output_dir) / FILE_NAME)
            self._weights_are_initial = False
            self._keep_for_log(terms, _count([inputs]))
        # The ranks' gradients are averaged, the totals already hold all ranks.
        loss = loss * ranks
        return (loss, {"loss": loss, **{name: term.values for name, term in terms.items()}}) if return_outputs else loss

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = _count(batches)
        if not counts:
            return batches, None
        total = self.accelerator.reduce(torch.stack([count.to(device) for count in counts.values()]), reduction="sum")
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
        counts = {name: _counts_by_sequence(inputs[term.part]["labels"], term.per) for name, term in terms.items()}
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
            self._pair_sets.append(eval_dataset)
            self._reference_is_complete = False
        return super().get_eval_dataloader(eval_dataset)

    # The reference

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        if resume_from_checkpoint is True:
            # Not the newest folder, which a kill may have left half-written. None at all is the Trainer's error.
            resume_from_checkpoint = last_complete_checkpoint(self.args.output_dir) or True
        if resume_from_checkpoint:
            self._load_reference(resume_from_checkpoint)
        elif not self._sharded:
            # Sharded models are not ready yet: theirs is read before the first loss.
            self._measure_reference()
        if self.accelerator.num_processes > 1 and not self._sharded and self.model_wrapped is self.model:
            # An `evaluate()` before training prepares the model for evaluation, and accelerate then takes it for
            # prepared and leaves it without DDP: every rank would train a model of its own.
            self.model._is_accelerate_prepared = False
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _wanted_scores(self) -> tuple[list[Example], list[Example]]:
        needs = [self.reference_needs(pairs) for pairs in self._pair_sets]
        return [example for need in needs for example in need[0]], [example for need in needs for example in need[1]]

    def _measure_reference(self) -> None:
        """Read the scores that the pairs seen so far lack."""
        if self._reference_is_complete:
            return
        nll, log_probs = self.reference.missing(*self._wanted_scores())
        self._reference_is_complete = True
        if not nll and not log_probs:
            return
        bare = self._bare_model()
        frozen = nullcontext()
        if is_peft_model(bare):
            # Trained biases stay on when the adapter is off: then only the initial weights are the reference.
            biases = {getattr(config, "bias", "none") for config in bare.peft_config.values()}
            frozen = bare.disable_adapter() if biases == {"none"} or self._weights_are_initial else None
        elif not self._weights_are_initial:
            frozen = None
        if frozen is None:
            self._pair_sets.pop()  # the late one: the others can still be evaluated
            raise RuntimeError(
                f"{len(nll) + len(log_probs)} pairs have no reference scores, and the weights that they would be read "
                "from have been trained since. Give these pairs as `eval_dataset` when the trainer is built"
            )
        with frozen, self.accelerator.autocast():
            self.reference.measure(
                self.model_wrapped if self._sharded else bare,
                self._tokenizer,
                nll,
                log_probs,
                max_bytes=self.args.reference_max_bytes,
                progress=None if self.args.disable_tqdm or not self.is_world_process_zero() else "reference scores",
            )

    def _load_reference(self, checkpoint: str | bool) -> None:
        self._weights_are_initial = False
        nll, log_probs = self._wanted_scores()
        if not nll and not log_probs:
            return
        folders = [] if checkpoint is True else [Path(checkpoint).absolute().parent]
        folders.append(Path(self.args.output_dir).absolute())
        found = next((folder / FILE_NAME for folder in folders if (folder / FILE_NAME).is_file()), None)
        if found is None:
            raise FileNotFoundError(
                f"`resume_from_checkpoint` needs the reference scores that the run wrote at its start, and there is no "
                f"{FILE_NAME} in {' or '.join(map(str, dict.fromkeys(folders)))}. They cannot be read from trained "
                "weights: put the file back, or start again without resuming"
            )
        stored = ReferenceScores.load(found)
        lacking = sum(map(len, stored.missing(nll, log_probs)))
        if lacking:
            raise ValueError(
                f"{found} lacks the scores of {lacking} pairs: data, tokenizer or loss differ from the run that is to "
                "be resumed. Use those of that run, or start again without resuming"
            )
        self.reference = stored  # in place of what an evaluation may have read from the weights of this process
        self._reference_is_complete = True
        if self.args.should_save and found.parent != folders[-1]:
            self.reference.save(folders[-1] / FILE_NAME)

    # Odds and ends

    @property
    def _sharded(self) -> bool:
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def _pairs(self, dataset: Sequence, name: str) -> ForgetRetainPairs:
        return ForgetRetainPairs(
            encode_pairs(dataset, self._tokenizer, self._limit, name), self._retain, self._pair_seed
        )

    def _bare_model(self) -> nn.Module:
        return self.accelerator.unwrap_model(self.model)


def _trained(terms: dict[str, Term]) -> list[Term]:
    return [term for term in terms.values() if term.weight]


def _counts_by_sequence(labels: Tensor, per: str) -> Tensor:
    """[B]: 1 each, or the number of answer tokens."""
    return (labels[:, 1:] != IGNORE).sum(1) if per == "token" else torch.ones_like(labels[:, 0])


def _count(batches: Sequence[Mapping[str, dict[str, Any]]]) -> dict[tuple[str, str], Tensor]:
    """Sequences and answer tokens of each part over several batches, as int64 scalars."""
    return {
        (part, per): sum(_counts_by_sequence(batch[part]["labels"], per).sum() for batch in batches)
        for part in (batches[0] if batches else ())
        for per in ("sequence", "token")
    }


def _check_arguments(model: nn.Module, args: UnlearningConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"`model` must be a loaded model, got {type(model).__name__}; load it with from_pretrained")
    if not isinstance(args, UnlearningConfig):
        raise ValueError(f"`args` must be the method's own config (such as NPOConfig), got {type(args).__name__}")
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
