"""Membership: can facts that were to be forgotten be told from facts never seen, by how likely their answers are?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from monitor.activations import Answers, measure_activations
from monitor.anatomy import find_anatomy
from monitor.attacks.result import AttackResult
from monitor.geometry.auc import auc, auc_interval
from monitor.geometry.membership import (
    log_prob_moments,
    loss_score,
    min_k_plus_plus_score,
    min_k_score,
    reference_score,
    tpr_at_fpr,
    zlib_score,
)
from monitor.ranks import rank
from monitor.reference import other_reference
from monitor.stimuli.encoding import encode_answer, qa_answer, qa_prompt
from monitor.stimuli.forget_set import ForgetSet, Pair

# Whole rows of log-probabilities are held for as many answers at once: 64 MiB of them.
_MAX_ROW_VALUES = 2**24
_RATES = (0.01, 0.05)

Reference = nn.Module | str | os.PathLike | Mapping[str, float]


@dataclass(frozen=True)
class MembershipConfig:
    """Settings of :func:`membership`.

    Parameters
    ----------
    pairs : int, >= 2
        Pairs of each class, chosen with `seed` where there are more; 50 and 50 as in arXiv 2611.05272, App. B.6.
    k : float in (0, 1]
        Share of an answer's tokens that Min-K% and Min-K%++ look at; 0.2 as in arXiv 2310.16789.
    seed : int
    """

    pairs: int = 50
    k: float = 0.2
    seed: int = 42

    def __post_init__(self) -> None:
        if self.pairs < 2:
            raise ValueError(f"`pairs` must be at least 2, got {self.pairs}: an AUC needs several of each class")
        if not 0.0 < self.k <= 1.0:
            raise ValueError(f"`k` is the share of an answer's tokens to look at and must be in (0, 1], got {self.k}")

    @classmethod
    def quick(cls) -> MembershipConfig:
        """25 pairs of each class: an AUC of 0.5 is known to about 0.16."""
        return cls(pairs=25)


def membership(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    forget_set: ForgetSet,
    config: MembershipConfig | None = None,
    *,
    reference: Reference | None = None,
    progress: bool = False,
) -> AttackResult:
    """Tell the forget pairs from never-seen facts of the same form, by how likely the model finds their answers.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, optionally under PEFT, DDP or FSDP; left as it was found. Under
        several ranks all must call.
    tokenizer : PreTrainedTokenizerBase
    forget_set : ForgetSet
        Its forget pairs are the members, its held-out pairs the controls.
    config : MembershipConfig, optional
    reference : model, path or Hub id, or mapping of pair id to number, optional
        A model that was not trained on the members, with the same tokenizer, or its token-mean log-likelihood of each
        answer (``loss`` of an earlier result's records). Without it there is no reference score.
    progress : bool
        Show a bar on standard error.

    Returns
    -------
    AttackResult
        score : AUC of the members against the controls by log-likelihood (LOSS), 0 to 1, with DeLong's interval.
        0.5: no trace of the members; higher: their answers are more likely than those of facts never seen; clearly
        *lower* is a trace as well, of answers that were pushed away. baseline: 0.5, chance.

        details : ``scores``, for each of loss, zlib, min_k, min_k_plus_plus and reference its ``auc``, interval and
        ``tpr_at_fpr`` at 1 % and 5 % (None where there are too few controls to see such a rate); ``form``, the AUC of
        the answers' token counts, with interval, which is 0.5 where members and controls are of one form; ``pairs``,
        a record a pair with all scores; ``settings``.

    Raises
    ------
    ValueError
        If fewer than two forget or held-out pairs are there, the model has no head, the reference lacks a pair or
        divides answers into other tokens, or log-likelihoods are not finite.

    Notes
    -----
    Texts are ``"{question}\\nAnswer: {answer}"``, scores of the answer's tokens given the question
    (`monitor.geometry.membership`), each oriented so that more is more like a member.

    Controls are facts of the same form that no model has seen, invented ones, and not retain questions. Membership is
    asked against "never trained on it": a model that has forgotten *must* find its retain set likelier than what it
    has forgotten, and one that never knew either topic may find one of them likelier for its words alone. Neither says
    anything about a trace. arXiv 2611.05272 scores forget against retain pairs with −log P, the forget pairs being
    positive (App. B.6), and calls AUC > 0.5 "the forget set is still more probable"; by its own definition a model
    that gives the forget set a *lower* probability scores above 0.5. Here the score is log P and the positive class is
    the members, so that the sentence holds.
    """
    config = config or MembershipConfig()
    anatomy = find_anatomy(model)
    members, controls = (_chosen(forget_set, split, config) for split in ("forget", "heldout"))
    pairs = (*members, *controls)
    if isinstance(reference, Mapping):
        absent = [pair.id for pair in pairs if pair.id not in reference]
        if absent:
            raise ValueError(
                f"`reference` must have a number for every pair, {len(absent)} of {len(pairs)} are not in it: "
                f"{', '.join(absent[:5])}"
            )

    log_probs: list[Tensor] = []
    moments: list[tuple[Tensor, Tensor]] = []
    lengths = [_answer_length(tokenizer, pair) for pair in pairs]
    with tqdm(
        total=len(pairs), desc="membership", unit="answer", leave=False, disable=not progress or rank() != 0
    ) as bar:
        for chunk in _chunks(pairs, lengths, anatomy.vocab_size):
            request = _request(chunk, distribution=True)
            answers = measure_activations(model, tokenizer, [request]).answers(request)
            log_probs += answers.log_probs
            moments += [log_prob_moments(rows) for rows in answers.log_distribution]
            bar.update(len(chunk))
    scores = {
        "loss": loss_score(log_probs),
        "zlib": zlib_score(log_probs, [pair.answer for pair in pairs]),
        "min_k": min_k_score(log_probs, config.k),
        "min_k_plus_plus": min_k_plus_plus_score(log_probs, moments, config.k),
    }
    broken = int((~torch.isfinite(scores["loss"])).sum())
    if broken:
        raise ValueError(
            f"log-likelihoods must be finite, {broken} of {len(pairs)} answers have none: the model has diverged, or "
            "its dtype overflows; load it in bfloat16 or float32"
        )
    if reference is not None:
        scores["reference"] = reference_score(log_probs, _likelihood_of(reference, pairs, log_probs, model, tokenizer))

    is_member = torch.tensor([1] * len(members) + [0] * len(controls))
    described = {name: _described(values, is_member) for name, values in scores.items()}
    for name, values in scores.items():
        described[name]["tpr_at_fpr"] = {f"{rate:g}": tpr_at_fpr(values, is_member, rate) for rate in _RATES}
    records = [
        {"id": pair.id, "split": pair.split, "tokens": length} | {name: float(s[i]) for name, s in scores.items()}
        for i, (pair, length) in enumerate(zip(pairs, lengths, strict=True))
    ]
    return AttackResult(
        "membership",
        score=described["loss"]["auc"],
        low=described["loss"]["low"],
        high=described["loss"]["high"],
        baseline=0.5,
        n=len(pairs),
        details={
            "scores": described,
            "form": _described(torch.tensor(lengths, dtype=torch.float64), is_member),
            "pairs": records,
            "settings": asdict(config),
        },
    )


def _chosen(forget_set: ForgetSet, split: str, config: MembershipConfig) -> tuple[Pair, ...]:
    """At most `config.pairs` pairs of a split, in the set's order."""
    pairs = forget_set.split(split)
    if len(pairs) < 2:
        advice = (
            'add lines with "split": "heldout" to it, questions and answers of the same form about invented names, '
            "which no model has seen"
            if split == "heldout"
            else "an AUC needs several of each class"
        )
        raise ValueError(
            f"`forget_set` {forget_set.name} must have at least 2 {split} pairs, got {len(pairs)}: {advice}"
        )
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(config.seed))
    return tuple(pairs[i] for i in order[: config.pairs].sort().values.tolist())


def _request(pairs: Sequence[Pair], distribution: bool = False) -> Answers:
    prompts = tuple(qa_prompt(pair.question) for pair in pairs)
    return Answers(prompts, tuple(qa_answer(pair.answer) for pair in pairs), distribution)


def _answer_length(tokenizer: PreTrainedTokenizerBase, pair: Pair) -> int:
    ids, first = encode_answer(tokenizer, qa_prompt(pair.question), qa_answer(pair.answer))
    return len(ids) - first


def _chunks(pairs: Sequence[Pair], lengths: Sequence[int], vocab_size: int) -> Iterator[list[Pair]]:
    """Pairs in order, as many at once as their rows over the vocabulary may take memory."""
    chunk: list[Pair] = []
    rows = 0
    for pair, length in zip(pairs, lengths, strict=True):
        if chunk and (rows + length) * vocab_size > _MAX_ROW_VALUES:
            yield chunk
            chunk, rows = [], 0
        chunk.append(pair)
        rows += length
    yield chunk


def _likelihood_of(
    reference: Reference, pairs: Sequence[Pair], log_probs: Sequence[Tensor], model: nn.Module, tokenizer
) -> Tensor:
    """Token-mean log-likelihood of the answers under the reference, [n] float64."""
    if isinstance(reference, Mapping):
        return torch.tensor([float(reference[pair.id]) for pair in pairs], dtype=torch.float64)
    request = _request(pairs)
    if isinstance(reference, nn.Module):
        activations = measure_activations(reference, tokenizer, [request])
    else:
        parameter = next(p for p in model.parameters() if p.is_floating_point())
        activations = other_reference(
            reference, [request], tokenizer, dtype=parameter.dtype, device=find_anatomy(model).device
        )
    theirs = activations.answers(request).log_probs
    other = [pair.id for pair, a, b in zip(pairs, log_probs, theirs, strict=True) if len(a) != len(b)]
    if other:
        raise ValueError(
            f"`reference` must have the model's tokenizer, but it divides {len(other)} of {len(pairs)} answers into "
            f"another number of tokens, the first {other[0]}: means over other tokens cannot be compared"
        )
    return loss_score(theirs)


def _described(scores: Tensor, is_member: Tensor) -> dict:
    low, high = auc_interval(scores, is_member)
    return {"auc": float(auc(scores, is_member)), "low": float(low), "high": float(high)}
