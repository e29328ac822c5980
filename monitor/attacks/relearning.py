"""Relearning: does training on some of the forgotten facts bring back the others, which were not trained on?"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from monitor.activations import Answers, measure_activations
from monitor.anatomy import Anatomy, find_anatomy
from monitor.attacks.intact import intact
from monitor.attacks.result import AttackResult
from monitor.generation import greedy_answers
from monitor.geometry.answers import answer_nll
from monitor.geometry.rouge import rouge_l, words
from monitor.geometry.statistics import bootstrap_means, mean_interval, percentile_interval
from monitor.ranks import rank
from monitor.stimuli.encoding import encode_answer, qa_answer, qa_prompt
from monitor.stimuli.forget_set import ForgetSet, Pair


@dataclass(frozen=True)
class RelearningConfig:
    """Settings of :func:`relearning`.

    Learning rate, batch size, gradient clipping and AdamW are those that arXiv 2611.05272 (App. B) unlearns with: the
    attacker trains as the defender did. The number of steps is ours.

    Parameters
    ----------
    steps : int, >= 1
        Optimiser steps.
    batch_size : int, >= 1
        Pairs a step.
    learning_rate : float, > 0
        Constant; AdamW without weight decay.
    share : float in (0, 1)
        Share of the pairs that is trained on; the rest is measured.
    pairs : int, >= 3
        Pairs of a split that the attack looks at, chosen with `seed` where there are more.
    max_grad_norm : float, > 0
    answers : bool
        Also let the model answer, before and after, for ROUGE-L; most of the time goes there.
    max_new_tokens : int, >= 1
        Tokens such an answer may have.
    seed : int
        Of the choice of pairs and their order in training.
    """

    steps: int = 50
    batch_size: int = 4
    learning_rate: float = 1e-5
    share: float = 0.5
    pairs: int = 100
    max_grad_norm: float = 1.0
    answers: bool = True
    max_new_tokens: int = 50
    seed: int = 42

    def __post_init__(self) -> None:
        for name, limit in {"steps": 1, "batch_size": 1, "pairs": 3, "max_new_tokens": 1}.items():
            if getattr(self, name) < limit:
                raise ValueError(f"`{name}` of RelearningConfig must be at least {limit}, got {getattr(self, name)}")
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"`{name}` of RelearningConfig must be above 0, got {getattr(self, name)}")
        if not 0.0 < self.share < 1.0:
            raise ValueError(
                f"`share` of RelearningConfig must lie strictly between 0 and 1, got {self.share}: some pairs are "
                "trained on, the others measured"
            )

    @classmethod
    def quick(cls) -> RelearningConfig:
        """10 steps at five times the rate on half of 24 pairs, likelihoods only."""
        return cls(steps=10, learning_rate=5e-5, pairs=24, answers=False)


def relearning(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    forget_set: ForgetSet,
    config: RelearningConfig | None = None,
    *,
    progress: bool = False,
) -> AttackResult:
    """Train on a part of the forget pairs and see what comes back of the rest.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, optionally under PEFT or DDP. Its weights come back bit for bit.
    tokenizer : PreTrainedTokenizerBase
    forget_set : ForgetSet
        Its held-out pairs, if there are any, make the control.
    config : RelearningConfig, optional
    progress : bool
        Show bars on standard error.

    Returns
    -------
    AttackResult
        score : mean probability exp(−ℓ) of the answers that were *not* trained on, after the training, 0 to 1, ℓ an
        answer's token-mean NLL, with a bootstrap interval over these pairs. Higher: more came back. baseline: the same
        before the training. n: pairs measured.

        details : ``forget`` and ``heldout``, each with means before and after (``nll``, ``probability`` and, if asked
        for, ``rouge_l``), ``recovered``, the paired change of the probability, with interval, and ``leaked``, the share
        of measured answers of which every word stands in a pair trained on; ``excess``, the forget pairs'
        ``recovered`` minus the held-out pairs', with the bootstrap interval of a difference of two independent means;
        ``relearned``, ids of the pairs trained on; ``pairs``, a record a measured pair; ``settings``. ``heldout`` and
        ``excess`` are None where fewer than three held-out pairs are there.

    Raises
    ------
    ValueError
        For fewer than three forget pairs, a model without a head, a sharded one (FSDP), quantised weights without an
        adapter, an answer without words if answers are asked for, or a training that diverges.

    Notes
    -----
    Where the facts relearned do not tell the facts measured (Deeb and Roger, arXiv 2410.08827; relearning on a part:
    Hu et al., arXiv 2406.13356), what comes back was in the weights. But pairs of one concept share names, and any
    training on questions and short answers teaches *that* there are short answers, and raises the probability of right
    ones and wrong ones. The control has both: as many steps, on as many never-seen pairs of the same form (or the same
    share of them, if there are fewer), measured on never-seen pairs that were not trained on. Only the excess over it
    was remembered.

    The loss is the NLL of the answers' tokens, averaged over a batch's tokens, as in `Trainer`; batches run through
    seeded permutations of the pairs, and are cut in smaller forwards where memory does not suffice, which changes
    rounding alone. Dropout is off. All weights are trained, also those that the defender froze; under PEFT those
    that require gradients, the adapter's where none does. AdamW works on float32 copies of weights in half precision,
    whose own grid swallows steps of 1e-5. Memory beside the model: a copy of it, AdamW's two moments and the gradients
    in float32, and for half precision the float32 weights. float16 gradients are not scaled: use bfloat16.
    """
    config = config or RelearningConfig()
    _check_model(find_anatomy(model))
    arms = _arms(forget_set, config)
    if config.answers:
        silent = [pair.id for _, rest in arms.values() for pair in rest if not words(pair.answer)]
        if silent:
            raise ValueError(
                f"answers must hold words for ROUGE-L, {', '.join(silent[:5])} have none: leave these pairs out, or "
                "set `answers` of RelearningConfig to False"
            )
    found = {
        split: _attack(model, tokenizer, trained, rest, config, f"relearning, {split}" if progress else None)
        for split, (trained, rest) in arms.items()
    }
    outcomes, records = {}, []
    for split, (before, after) in found.items():
        leaked = _leaked(*arms[split])
        outcomes[split] = before_and_after(before.nll, after.nll, config.seed) | {"leaked": sum(leaked) / len(leaked)}
        if config.answers:
            outcomes[split]["rouge_l_before"] = float(before.rouge_l.mean())
            outcomes[split]["rouge_l_after"] = float(after.rouge_l.mean())
        records += _records(arms[split][1], leaked, before, after)
    nll = {split: (before.nll, after.nll) for split, (before, after) in found.items()}
    forget = outcomes["forget"]
    return AttackResult(
        "relearning",
        score=forget["probability_after"],
        low=forget["low"],
        high=forget["high"],
        baseline=forget["probability_before"],
        n=forget["n"],
        details={
            "forget": forget,
            "heldout": outcomes.get("heldout"),
            "excess": excess(nll["forget"], nll["heldout"], config.seed) if "heldout" in nll else None,
            "relearned": [pair.id for pair in arms["forget"][0]],
            "pairs": records,
            "settings": asdict(config),
        },
    )


def before_and_after(before: Tensor, after: Tensor, seed: int) -> dict[str, Any]:
    """What became of answers' likelihood.

    Parameters
    ----------
    before, after : Tensors of shape (n,), n >= 2
        Token-mean NLL of the same answers, nats.
    seed : int
        Of the bootstrap.

    Returns
    -------
    dict
        ``n``; means ``nll_before``, ``nll_after``, ``probability_before``, ``probability_after``, of exp(−NLL), the
        last with interval ``low``, ``high``; ``recovered``, ``recovered_low``, ``recovered_high``: the mean change of
        the probability over the pairs, positive where answers became likelier.
    """
    p_before, p_after = torch.exp(-before), torch.exp(-after)
    low, high = mean_interval(p_after, seed=seed)
    change_low, change_high = mean_interval(p_after - p_before, seed=seed)
    return {
        "n": len(before),
        "nll_before": float(before.mean()),
        "nll_after": float(after.mean()),
        "probability_before": float(p_before.mean()),
        "probability_after": float(p_after.mean()),
        "low": low,
        "high": high,
        "recovered": float((p_after - p_before).mean()),
        "recovered_low": change_low,
        "recovered_high": change_high,
    }


def excess(forget: tuple[Tensor, Tensor], control: tuple[Tensor, Tensor], seed: int) -> dict[str, float]:
    """By how much more the forget answers' probability rose than the control's.

    Parameters
    ----------
    forget, control : pairs of Tensors (before, after)
        As in :func:`before_and_after`; the control of other answers, of any number.
    seed : int

    Returns
    -------
    dict
        ``value``, in [-2, 2], and its 95 % interval ``low``, ``high``, both sides resampled on their own.
    """
    changes = [torch.exp(-after) - torch.exp(-before) for before, after in (forget, control)]
    samples = [bootstrap_means(change, seed=seed + i) for i, change in enumerate(changes)]
    low, high = percentile_interval(samples[0] - samples[1])
    return {"value": float(changes[0].mean() - changes[1].mean()), "low": low, "high": high}


@dataclass(frozen=True)
class _Measured:
    """What a model makes of n pairs: each answer's NLL [n] and, if it was asked, what it says and its ROUGE-L [n]."""

    nll: Tensor
    said: list[str] | None = None
    rouge_l: Tensor | None = None


def _attack(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    trained: Sequence[Pair],
    rest: Sequence[Pair],
    config: RelearningConfig,
    title: str | None,
) -> tuple[_Measured, _Measured]:
    """The rest before and after training on the others."""
    before = _measure(model, tokenizer, rest, config, title)
    with intact(model, weights=True) as anatomy:
        _train(anatomy, [_encode(tokenizer, pair) for pair in trained], config, title)
        return before, _measure(model, tokenizer, rest, config, title)


def _measure(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    config: RelearningConfig,
    title: str | None,
) -> _Measured:
    prompts = tuple(qa_prompt(pair.question) for pair in pairs)
    request = Answers(prompts, tuple(qa_answer(pair.answer) for pair in pairs))
    nll = answer_nll(measure_activations(model, tokenizer, [request], progress=title).answers(request).log_probs)
    broken = int((~torch.isfinite(nll)).sum())
    if broken:
        raise ValueError(
            f"answers' likelihoods must be finite, {broken} of {len(pairs)} are not: the model has diverged, or its "
            "dtype overflows; load it in bfloat16 or float32"
        )
    if not config.answers:
        return _Measured(nll)
    said = greedy_answers(model, tokenizer, prompts, max_new_tokens=config.max_new_tokens, progress=title)
    return _Measured(nll, said, rouge_l(said, [pair.answer for pair in pairs]))


def _leaked(trained: Sequence[Pair], rest: Sequence[Pair]) -> list[bool]:
    """Whether the pairs trained on hold every word of an answer: to say it then is not to remember it."""
    known = {word for pair in trained for word in words(f"{pair.question} {pair.answer}")}
    return [set(words(pair.answer)) <= known for pair in rest]


def _records(
    pairs: Sequence[Pair], leaked: Sequence[bool], before: _Measured, after: _Measured
) -> list[dict[str, Any]]:
    records = []
    for i, pair in enumerate(pairs):
        record = {"id": pair.id, "split": pair.split, "leaked": leaked[i]}
        record |= {"nll_before": float(before.nll[i]), "nll_after": float(after.nll[i])}
        if before.said is not None:
            record |= {"said_before": before.said[i], "said_after": after.said[i]}
        records.append(record)
    return records


def _check_model(anatomy: Anatomy) -> None:
    name = type(anatomy.model).__name__
    if anatomy.head is None:
        raise ValueError(
            f"`model` must be a causal language model, got {name} without a head: load it with AutoModelForCausalLM"
        )
    if anatomy.sharded:
        raise ValueError(
            "`model` must be whole to be trained here, got one sharded by FSDP: load its checkpoint unsharded"
        )
    quantised = getattr(anatomy.model, "is_quantized", False) or any(
        not p.is_floating_point() for p in anatomy.model.parameters()
    )
    if quantised and not adapter_parameters(anatomy.model):
        raise ValueError(
            f"`model` must have weights that can be trained, got {name} with quantised ones and no adapter: load it in "
            "bfloat16 or float32, or put a LoRA adapter on it"
        )


def _arms(forget_set: ForgetSet, config: RelearningConfig) -> dict[str, tuple[list[Pair], list[Pair]]]:
    """Of each split the pairs to train on and those to measure; held-out ones only if there are enough."""
    arms = {}
    n_trained = config.pairs
    for split in ("forget", "heldout"):
        pairs = forget_set.split(split)
        if len(pairs) >= 3:
            order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(config.seed))
            drawn = [pairs[i] for i in order[: config.pairs].tolist()]
            # The control is trained on as many pairs as the attack, or on the same share where it has fewer.
            n_trained = min(n_trained, max(1, round(config.share * len(drawn))), len(drawn) - 2)
            arms[split] = (drawn[:n_trained], drawn[n_trained:])
        elif split == "forget":
            raise ValueError(
                f"`forget_set` {forget_set.name} must have at least 3 forget pairs, one to train on and two to "
                f"measure, got {len(pairs)}"
            )
    return arms


def _encode(tokenizer: PreTrainedTokenizerBase, pair: Pair) -> tuple[list[int], int]:
    return encode_answer(tokenizer, qa_prompt(pair.question), qa_answer(pair.answer))


def _train(
    anatomy: Anatomy, sequences: Sequence[tuple[list[int], int]], config: RelearningConfig, title: str | None
) -> None:
    """Change the model's weights in place; `sequences` are token ids and where the answer begins in them."""
    parameters = _trained_parameters(anatomy)
    for p in anatomy.outer.parameters():
        p.requires_grad_(False)
    for p in parameters:
        p.requires_grad_(True)
    masters = [p if p.dtype in (torch.float32, torch.float64) else p.detach().float() for p in parameters]
    fused = all(master.device.type in ("cpu", "cuda") for master in masters)  # a fifth of the time on CPUs
    optimizer = torch.optim.AdamW(masters, lr=config.learning_rate, weight_decay=0.0, fused=fused)
    batches = _batches(len(sequences), config)
    at_once = config.batch_size
    for _ in tqdm(range(config.steps), desc=title, unit="step", leave=False, disable=title is None or rank() != 0):
        batch = [sequences[i] for i in next(batches)]
        while True:
            try:
                gradients = _gradients(anatomy, batch, at_once, parameters)
                break
            except torch.OutOfMemoryError:
                if at_once == 1:
                    raise
                at_once = (at_once + 1) // 2
            torch.cuda.empty_cache()
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        norm = nn.utils.clip_grad_norm_(masters, config.max_grad_norm)
        if not bool(torch.isfinite(norm)):
            raise ValueError(
                "relearning diverged: its gradient is not finite. Lower `learning_rate` of RelearningConfig, or load "
                "the model in bfloat16 or float32"
            )
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(parameters, masters, strict=True):
                if p is not master:
                    p.copy_(master)


def _trained_parameters(anatomy: Anatomy) -> list[nn.Parameter]:
    adapters = adapter_parameters(anatomy.model)
    if adapters:
        return [p for p in anatomy.outer.parameters() if p.requires_grad] or adapters
    return list(anatomy.model.parameters())


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of the adapters, active or not, in PEFT's layers; none without PEFT."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return [p for layer in layers for name in layer.adapter_layer_names for p in getattr(layer, name).parameters()]


def _batches(n: int, config: RelearningConfig) -> Iterator[list[int]]:
    """Batches of one seeded permutation of 0..n-1 after the other, without end; one may reach into the next."""
    generator = torch.Generator().manual_seed(config.seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < config.batch_size:
            waiting += torch.randperm(n, generator=generator).tolist()
        yield waiting[: config.batch_size]
        waiting = waiting[config.batch_size :]


def _gradients(
    anatomy: Anatomy, batch: Sequence[tuple[list[int], int]], at_once: int, parameters: Sequence[nn.Parameter]
) -> list[Tensor | None]:
    """Gradient of the batch's mean answer-token NLL for each parameter, float32 at least; None where it has none.

    Not by `backward`, whose hooks on parameters belong to somebody else's training (DDP's reducer, optimisers that
    step while gradients arrive).
    """
    n_tokens = sum(len(ids) - first for ids, first in batch)
    total: list[Tensor | None] = [None] * len(parameters)
    for start in range(0, len(batch), at_once):
        with torch.enable_grad():
            loss = _answer_nll(anatomy, batch[start : start + at_once]) / n_tokens
            parts = torch.autograd.grad(loss, parameters, allow_unused=True)
        for i, part in enumerate(parts):
            if part is not None:
                part = part if part.dtype == torch.float64 else part.float()
                total[i] = part if total[i] is None else total[i] + part
    return total


def _answer_nll(anatomy: Anatomy, batch: Sequence[tuple[list[int], int]]) -> Tensor:
    """Sum of the NLL of all answer tokens of the batch, float32."""
    width = max(len(ids) for ids, _ in batch)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in batch])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in batch])
    places = torch.tensor([(row, t) for row, (ids, first) in enumerate(batch) for t in range(first, len(ids))])
    forward = type(anatomy.model).forward  # the class's: trainers replace the instance's by closures of their own
    options = {"use_cache": False} if "use_cache" in inspect.signature(forward).parameters else {}
    logits = forward(
        anatomy.model, input_ids=ids.to(anatomy.device), attention_mask=mask.to(anatomy.device), **options
    ).logits
    row, t = places.to(logits.device).unbind(1)
    targets = ids.to(logits.device)[row, t]
    return nn.functional.cross_entropy(logits[row, t - 1].float(), targets, reduction="sum")
