"""Activation steering: does pushing the model along "this concept, not an invented one" bring the answers back?

After Seyitoğlu et al., arXiv 2411.02631, as set out in arXiv 2611.05272, App. B.6.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from monitor.activations import TokenStates, measure_activations, resolve_layer
from monitor.anatomy import Anatomy, find_anatomy
from monitor.attacks.intact import intact
from monitor.attacks.result import AttackResult
from monitor.attacks.word_frequency import content_words, word_frequency
from monitor.geometry.auc import auc, auc_interval
from monitor.geometry.statistics import mean_interval
from monitor.sampling import sampled_answers
from monitor.stimuli.encoding import asked_prompt, encode_answer, qa_answer, qa_prompt
from monitor.stimuli.forget_set import ForgetSet, Pair

POSITIONS = ("last", "first")


@dataclass(frozen=True)
class SteeringConfig:
    """Settings of `steering`; the defaults are the paper's.

    Parameters
    ----------
    n_pairs : int, >= 2
        Forget pairs to ask about, at most, drawn without replacement from those that can be steered and scored.
    n_samples : int, >= 1
        Answers a pair, with and without steering each.
    temperature : float, > 0
    top_k : int, >= 1
    max_new_tokens : int, >= 2
    layer : int or float
        Hidden state to read and to push, as in `monitor.activations.States`. -3 is L - 2 of the hidden states 0..L.
    position : {"last", "first"}
        The prompt's token that the vector is read at; see `steering`.
    pushed_token : {1, 2}
        The new token whose logits the vector is the first to reach; see `steering`.
    coefficient : float
        What the vector is multiplied by. 0 does nothing.
    chat_template : bool
        Ask in the tokenizer's chat template where there is one; False: as ``"{question}\\nAnswer:"``.
    seed : int
        Of the draw of pairs and of every sample.
    batch_tokens : int, >= 1
        Tokens in a batch of samples; halved for as long as the device runs out of memory.
    """

    n_pairs: int = 25
    n_samples: int = 500
    temperature: float = 2.0
    top_k: int = 40
    max_new_tokens: int = 10
    layer: int | float = -3
    position: str = "last"
    pushed_token: int = 2
    coefficient: float = 2.0
    chat_template: bool = True
    seed: int = 42
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        least = {"n_pairs": 2, "n_samples": 1, "top_k": 1, "max_new_tokens": 2, "batch_tokens": 1}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise ValueError(f"`{name}` of SteeringConfig must be at least {limit}, got {getattr(self, name)}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"`temperature` of SteeringConfig must be positive and finite, got {self.temperature}: samples without "
                "noise are all the same"
            )
        if not math.isfinite(self.coefficient):
            raise ValueError(f"`coefficient` of SteeringConfig must be finite, got {self.coefficient}")
        if self.pushed_token not in (1, 2):
            raise ValueError(f"`pushed_token` of SteeringConfig must be 1 or 2, got {self.pushed_token!r}")
        if self.position not in POSITIONS:
            raise ValueError(
                f"`position` of SteeringConfig must be one of {', '.join(POSITIONS)}, got {self.position!r}"
            )

    @classmethod
    def quick(cls) -> SteeringConfig:
        """10 pairs, 40 samples each: with fewer pairs no AUC whatever has an interval above 0.5."""
        return cls(n_pairs=10, n_samples=40)


def steering(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    forget_set: ForgetSet,
    config: SteeringConfig | None = None,
    *,
    progress: bool = False,
) -> AttackResult:
    """Push the model along h(question) - h(anonymised question) as it begins to answer, and count the right words.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, optionally under PEFT or DDP. Left as it was found.
    tokenizer : PreTrainedTokenizerBase
    forget_set : ForgetSet
        Its forget split is read: the pairs whose question has variants that differ from it, and whose answer has
        content words that the question has not (`content_words`). The others are listed in the details.
    config : SteeringConfig, optional
        The paper's by default.
    progress : bool
        Progress bars on standard error.

    Returns
    -------
    AttackResult
        ``score``: AUC of the pairs' word frequencies with steering (positive) against those without, [0, 1]; above
        the ``baseline`` of 0.5 steering brings answers back, at 0.5 it does nothing, below it disturbs. ``low``,
        ``high``: 95 %, for pairs drawn anew; the two scores of a pair are dependent, and taken as such. ``n``: pairs.
        ``details``: ``mean_steered`` and ``mean_unsteered`` word frequency; ``difference``, their paired difference
        with ``difference_low`` and ``difference_high``; ``more``, ``less``, ``equal`` pairs; ``layer``;
        ``unsteerable`` and ``unscorable``, ids of the pairs left out; ``pairs``, a record each with its words, both
        frequencies, the norms of the vector and of the state it is added to, and the first sample with and without.

    Raises
    ------
    ValueError
        For too few usable pairs, a model without a head or sharded, a layer that no block reads, prompts that do not
        fit, or vectors or logits that are not finite.

    Notes
    -----
    With hidden state h at layer ℓ and variants q^(1..K) of the question q, all that the forget set has:

        S(q) = 1/K Σ_k (h_ℓ(q) - h_ℓ(q^(k))),

    not normalised. ``coefficient`` · S(q) is added to hidden state ℓ in the first decode step, which reads an answer's
    first token, and nowhere else: not in the prefill, so that the cache of the prompt stays that of the model, and
    once an answer. A pair's score is the largest share of its samples that say one and the same content word of the
    answer (`word_frequency`).

    **Position.** The paper reads h "at the first token position". Of a prompt's own tokens that cannot be meant: a
    causal model has seen nothing but that token there, so for questions that begin alike, and in a chat template for
    all, S = 0. Read here (``position="last"``) is the token that the first new token is predicted from, the only one
    that has seen the whole question. ``"first"`` is the paper to the letter.

    **Token.** The paper's first decode step is said to generate "the first new token" and to have a hidden state of
    length 1. In transformers these are two steps: the first new token comes out of the prefill, and the first step of
    length 1 reads it and gives the second. The default (``pushed_token=2``) is the step of length 1, so steering can
    change an answer from its second token on only, and the vector, read where the first token is predicted, asks
    for that one again (SmolLM2-135M-Instruct: "Severus Snape" becomes "S Severus Snape"). With ``pushed_token=1`` it
    is added to the very state it was read from: the prompt is prefilled up to its last token, and that one is the step
    of length 1. What the layers above keep of that token in the cache is then steered too.

    Both arms draw with common random numbers, a generator a pair: with coefficient 0 their answers are the same. The
    AUC compares all pairs with all pairs, so differences between questions dilute it; the paired difference is the more
    sensitive number.
    """
    config = config or SteeringConfig()
    anatomy = find_anatomy(model)
    layer = _check_model(anatomy, config)
    pairs, unsteerable, unscorable = _choose_pairs(forget_set, config)
    ask = partial(asked_prompt, tokenizer) if config.chat_template else qa_prompt
    prompts = [ask(pair.question) for pair in pairs]

    with intact(model):
        vectors, state_norms = _steering_vectors(model, tokenizer, pairs, ask, layer, config, progress)
        pushes = [
            partial(added, anatomy.blocks[layer], config.coefficient * vector.to(anatomy.device)) for vector in vectors
        ]
        # Unsteered first, then steered: a prompt's two arms have one seed.
        said = sampled_answers(
            model,
            tokenizer,
            prompts * 2,
            n_samples=config.n_samples,
            seeds=[random.Random(f"{config.seed}/{pair.id}").getrandbits(63) for pair in pairs] * 2,
            temperature=config.temperature,
            top_k=config.top_k,
            max_new_tokens=config.max_new_tokens,
            first_steps=[nullcontext] * len(pairs) + pushes,
            first_step_token=config.pushed_token,
            batch_tokens=config.batch_tokens,
            progress="steering" if progress else None,
        )
    records = [
        {
            "id": pair.id,
            "question": pair.question,
            "answer": pair.answer,
            "words": list(content_words(pair.answer, pair.question)),
            "steered": word_frequency(steered, content_words(pair.answer, pair.question)),
            "unsteered": word_frequency(unsteered, content_words(pair.answer, pair.question)),
            "vector_norm": float(vector.norm()),
            "state_norm": state_norm,
            "steered_sample": steered[0],
            "unsteered_sample": unsteered[0],
        }
        for pair, vector, state_norm, unsteered, steered in zip(
            pairs, vectors, state_norms, said[: len(pairs)], said[len(pairs) :], strict=True
        )
    ]
    details = {"layer": layer, "unsteerable": unsteerable, "unscorable": unscorable, "settings": asdict(config)}
    return _result(records, details, config.seed)


@contextmanager
def added(block: nn.Module, delta: Tensor) -> Iterator[None]:
    """Add `delta` [d] to every token of the hidden state that enters `block`, inside the block of code."""

    def push(module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden = hidden + delta.to(hidden.device, hidden.dtype)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    handle = block.register_forward_pre_hook(push, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _check_model(anatomy: Anatomy, config: SteeringConfig) -> int:
    """The hidden state to push, after checking that the model can be pushed and can speak."""
    name = type(anatomy.model).__name__
    if anatomy.head is None:
        raise ValueError(
            f"`model` must be a causal language model to be steered, got {name}, which has no head to speak with: load "
            "it with AutoModelForCausalLM"
        )
    if anatomy.sharded:
        raise ValueError(
            "`model` must not be sharded (FSDP) to be steered: run the attack on the saved checkpoint, in one process"
        )
    layer = resolve_layer(config.layer, anatomy.n_layers)
    if layer == anatomy.n_layers:
        raise ValueError(
            f"`layer` of SteeringConfig must be a hidden state that a block reads, 0 to {layer - 1} for {name}, got "
            f"{config.layer}: hidden state {layer} comes after the last block"
        )
    return layer


def _choose_pairs(forget_set: ForgetSet, config: SteeringConfig) -> tuple[list[Pair], list[str], list[str]]:
    """Pairs in the file's order, and the ids of those without a vector and of those without a word to score by."""
    usable, unsteerable, unscorable = [], [], []
    steerable = {pair.id for pair in forget_set.fragmentation_pairs()}
    for pair in forget_set.split("forget"):
        if pair.id not in steerable or all(question == pair.question for question, _ in pair.anonymized):
            unsteerable.append(pair.id)
        elif not content_words(pair.answer, pair.question):
            unscorable.append(pair.id)
        else:
            usable.append(pair)
    if len(usable) < 2:
        raise ValueError(
            f"`forget_set` {forget_set.name!r} must have at least 2 forget pairs to steer by, got {len(usable)}; "
            f"{len(unsteerable)} more have no variant with another question (add `anonymized` or an entity table) and "
            f"{len(unscorable)} no word in the answer that the question has not"
        )
    chosen = random.Random(config.seed).sample(range(len(usable)), min(config.n_pairs, len(usable)))
    return [usable[i] for i in sorted(chosen)], unsteerable, unscorable


def _steering_vectors(
    model: nn.Module, tokenizer, pairs: Sequence[Pair], ask, layer: int, config: SteeringConfig, progress: bool
) -> tuple[Tensor, list[float]]:
    """S of each pair, [n_pairs, d] float32 on the CPU, and the norm of h(question)."""
    prompts = [ask(question) for pair in pairs for question in (pair.question, *(q for q, _ in pair.anonymized))]
    # Read with something of an answer behind it, which a causal model's prompt has not seen, so that its tokens are
    # those that are answered: alone, a tokenizer may append EOS to it.
    request = TokenStates(tuple(prompts), (qa_answer("x"),) * len(prompts), layer)
    title = "steering vectors" if progress else None
    tokens = measure_activations(model, tokenizer, [request], progress=title).token_states(request)
    if config.position == "first":
        states = [rows[0] for rows in tokens]
    else:
        ends = [encode_answer(tokenizer, prompt, qa_answer("x"))[1] for prompt in prompts]
        states = [rows[end - 1] for rows, end in zip(tokens, ends, strict=True)]
    vectors, norms, at = [], [], 0
    for pair in pairs:
        own, others = states[at], states[at + 1 : at + 1 + len(pair.anonymized)]
        vectors.append((own - torch.stack(others)).mean(0))
        norms.append(float(own.norm()))
        at += 1 + len(pair.anonymized)
    if not torch.isfinite(torch.stack(vectors)).all():
        raise ValueError(
            f"`model` has hidden states at layer {layer} that are not finite, so it cannot be steered: it has "
            "diverged, or its dtype overflows (float16 does on models with massive activations): load it in bfloat16 "
            "or float32"
        )
    return torch.stack(vectors), norms


def _result(records: list[dict], details: dict, seed: int) -> AttackResult:
    n = len(records)
    steered = torch.tensor([record["steered"] for record in records], dtype=torch.float64)
    unsteered = torch.tensor([record["unsteered"] for record in records], dtype=torch.float64)
    scores, labels = torch.cat((steered, unsteered)), torch.tensor([1] * n + [0] * n)
    low, high = auc_interval(scores, labels, groups=torch.arange(n).repeat(2))
    change = steered - unsteered
    change_low, change_high = mean_interval(change, seed=seed)
    return AttackResult(
        name="steering",
        score=float(auc(scores, labels)),
        low=float(low),
        high=float(high),
        baseline=0.5,
        n=n,
        details={
            "mean_steered": float(steered.mean()),
            "mean_unsteered": float(unsteered.mean()),
            "difference": float(change.mean()),
            "difference_low": change_low,
            "difference_high": change_high,
            "more": int((change > 0).sum()),
            "less": int((change < 0).sum()),
            "equal": int((change == 0).sum()),
            **details,
            "pairs": records,
        },
    )
