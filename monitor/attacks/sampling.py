"""Sampling: does injecting points of the subspace, where the reference kept a concept, bring the concept back?

Sampling-based steering (MAxBench, arXiv 2609, Sec. 3.2) with the geometry of the model before it forgot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from monitor.anatomy import Anatomy, find_anatomy
from monitor.attacks.concept_geometry import ConceptGeometry
from monitor.attacks.forget_set_geometry import ForgetSetGeometry, answered, distinct_questions
from monitor.attacks.geometry_reading import check_concept
from monitor.attacks.intact import intact
from monitor.attacks.result import AttackResult
from monitor.attacks.sampling_points import concept_points, isotropic_points
from monitor.generation import Decoder, greedy_answers
from monitor.geometry.diversity import diversity
from monitor.geometry.statistics import share_gain, share_gain_interval, share_interval
from monitor.geometry.two_way import two_way_interval
from monitor.judges.mentions import MentionFinder, named
from monitor.steered_generation import instruction_prompt, steerable_layer, steered_answers
from monitor.stimuli.concepts import ConceptSet
from monitor.stimuli.encoding import asked_prompt
from monitor.stimuli.forget_set import ForgetSet
from monitor.stimuli.instructions import load_instructions

_HOW = (
    "read it from the reference, the model before it forgot: concept_geometry(reference, tokenizer, concept) with "
    "SamplingConfig(geometry, concept), or forget_set_geometry(reference, tokenizer, forget_set) with "
    "SamplingConfig(geometry)"
)


@dataclass(frozen=True, eq=False)
class SamplingConfig:
    """Settings of `sampling`.

    Parameters
    ----------
    geometry : ConceptGeometry or ForgetSetGeometry
        Of the reference, from `monitor.attacks.concept_geometry.concept_geometry` or
        `monitor.attacks.forget_set_geometry.forget_set_geometry`.
    concept : ConceptSet, optional
        What outputs are searched for; needs a ConceptGeometry. Without it the forget set's own questions are asked,
        which needs a ForgetSetGeometry.
    control : ConceptGeometry, optional
        Of another concept in the same reference: its points should not bring `concept`.
    n_points : int, >= 2
        Points sampled; for the forget set: for each question.
    prompts : sequence of str, optional
        Instructions; by default the bundled test ones. For a concept only.
    n_questions : int, >= 2, optional
        Of the forget set, the first ones; all by default. For the forget set only.
    strength, decay : float, optional
        By default the geometry's, which were chosen on the reference.
    max_new_tokens : int, >= 1
    seed : int
        Of the points.
    batch_tokens : int, >= 1
        Tokens in a batch; halved for as long as the device runs out of memory.
    """

    geometry: ConceptGeometry | ForgetSetGeometry
    concept: ConceptSet | None = None
    control: ConceptGeometry | None = None
    n_points: int = 30
    prompts: Sequence[str] | None = None
    n_questions: int | None = None
    strength: float | None = None
    decay: float | None = None
    max_new_tokens: int = 20
    seed: int = 42
    batch_tokens: int = 16384

    def __post_init__(self) -> None:
        if self.concept is not None:
            check_concept(self.concept)
        wanted = ForgetSetGeometry if self.concept is None else ConceptGeometry
        if not isinstance(self.geometry, wanted):
            what = "without a `concept`" if self.concept is None else "with a `concept`"
            raise ValueError(
                f"`geometry` of SamplingConfig must be a {wanted.__name__} {what}, got "
                f"{type(self.geometry).__name__}; {_HOW}"
            )
        if self.control is not None and not (self.concept is not None and isinstance(self.control, ConceptGeometry)):
            raise ValueError(
                "`control` of SamplingConfig must be the ConceptGeometry of a concept other than `concept`"
            )
        for name, least in (("n_points", 2), ("max_new_tokens", 1), ("batch_tokens", 1), ("n_questions", 2)):
            number = getattr(self, name)
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
                raise ValueError(
                    f"`{name}` of SamplingConfig must be a whole number of at least {least}, got {number!r}"
                )
        if self.prompts is not None:
            if self.concept is None:
                raise ValueError(
                    "`prompts` of SamplingConfig are for a `concept`; a forget set's are its own questions"
                )
            if isinstance(self.prompts, str) or not self.prompts:
                raise ValueError(
                    f"`prompts` of SamplingConfig must be a list of at least one text, got {self.prompts!r}"
                )
        if self.concept is not None and self.n_questions is not None:
            raise ValueError(
                "`n_questions` of SamplingConfig is for a forget set; a `concept` is asked for by `prompts`"
            )

    @classmethod
    def quick(
        cls,
        geometry: ConceptGeometry | ForgetSetGeometry,
        concept: ConceptSet | None = None,
        control: ConceptGeometry | None = None,
    ) -> SamplingConfig:
        """10 points and 12 tokens; for the forget set 5 points for each of the first 10 questions."""
        if concept is None:
            return cls(geometry, n_points=5, n_questions=10)
        return cls(geometry, concept, control, n_points=10, max_new_tokens=12)

    @property
    def name(self) -> str:
        """That of the result: ``"sampling"``, or ``"sampling_<concept>"``."""
        return "sampling" if self.concept is None else f"sampling_{self.concept.name}"


def sampling(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    forget_set: ForgetSet,
    config: SamplingConfig | None = None,
    *,
    progress: bool = False,
) -> AttackResult:
    """Inject points of the reference's subspace, and count what comes back.

    Parameters
    ----------
    model : nn.Module
        A causal language model of transformers, optionally under PEFT or DDP. Left as it was found.
    tokenizer : PreTrainedTokenizerBase
    forget_set : ForgetSet
        Its forget questions are asked where `config` has no concept; else it is not read.
    config : SamplingConfig
        Not optional in effect: without the reference's geometry there is nothing to inject.
    progress : bool
        Progress bars on standard error.

    Returns
    -------
    AttackResult
        **With a concept** (name ``sampling_<concept>``): ``score``: share of steered outputs, points × prompts, that
        mention the concept, [0, 1]; ``low``, ``high``: 95 %, points and prompts drawn anew; ``baseline``: the share
        for the same prompts without injection; ``n``: outputs. ``details``:

        - ``isotropic``, ``isotropic_low``, ``isotropic_high``: the share with as many points of the same lengths and
          uniform directions. Any push of this size brings this much. ``gain`` with its interval: score minus that,
          paired by prompt and point. **The concept came back if this is above 0**, not if the score is;
        - ``control`` likewise: the share with points of another concept's subspace (None without one), and
          ``control_concept``;
        - ``entities``, ``categories``: how many different ones were mentioned; ``entity_diversity``,
          ``category_diversity``, [0, 1] (`monitor.geometry.diversity.diversity`), and ``mentions``, how often
          each entity: one word again and again is not a concept;
        - ``strength``, ``decay``, ``layer``, ``sigma`` in use, ``reference_share``, what the same push brought out of
          the reference itself, ``settings``, and ``outputs``, a record a prompt.

        **Without** (name ``sampling``): ``score``: share of the forget questions that one of the points at least
        brings to an answer with ROUGE-L F1 of at least 0.30, [0, 1]; ``low``, ``high``: 95 % Wilson interval over
        questions; ``baseline``: the same with as many isotropic points of the same lengths, as the best of many
        attempts is helped by luck; ``n``: questions. ``details``: ``unsteered``, the share answered without injection;
        ``gain`` with its interval, score minus baseline, paired; ``mean_steered``, ``mean_isotropic``: share of all
        single outputs; ``questions``, a record each.

    Raises
    ------
    ValueError
        Without a config; for a model of another width or depth than the reference, without a head or sharded; for a
        forget set with fewer than four different questions.

    Notes
    -----
    A point p = L z + b, z ~ N(0, σ² I), is injected as `monitor.steered_generation.steered_answers` says: strength ·
    decay^t · p is added to the hidden state at the prompt's last token (t = 0) and at each new one.

    Nothing is tuned on the attacked model. A question's subspace is fitted to the *other* questions' states in the
    reference, so that it says what the concept's questions have in common, and nothing of this one's answer.

    A score above the isotropic share says that the model still reads the concept's directions as the reference did. One
    that is not says that it does not read them there: it may keep the concept elsewhere.

    A share of exactly 0 or 1 leaves a bootstrap nothing to vary; its interval is Wilson's for as many outcomes as there
    are points, and that of a gain in which all outcomes agree Newcombe's.
    """
    if config is None:
        raise ValueError(f"`config` of sampling must hold the geometry to sample from: {_HOW}")
    anatomy = find_anatomy(model)
    Decoder(anatomy, tokenizer)  # says what is missing for it to speak
    _check_fit(anatomy, config)
    attack = _questions if config.concept is None else _concept
    with intact(model):
        return attack(model, tokenizer, forget_set, config, progress)


def _check_fit(anatomy: Anatomy, config: SamplingConfig) -> None:
    for name, geometry in (("geometry", config.geometry), ("control", config.control)):
        if geometry is None:
            continue
        width = geometry.states.shape[1] if isinstance(geometry, ForgetSetGeometry) else geometry.subspace.dim
        if width != anatomy.hidden_size:
            raise ValueError(
                f"`{name}` of SamplingConfig was read from a model with hidden states of width {width}, the model has "
                f"{anatomy.hidden_size}: read it from the model's own reference"
            )
        if geometry.n_layers != anatomy.n_layers:
            raise ValueError(
                f"`{name}` of SamplingConfig was read from a model of {geometry.n_layers} blocks, the model has "
                f"{anatomy.n_layers}: read it from the model's own reference"
            )
        steerable_layer(anatomy, geometry.layer)


def _concept(model, tokenizer, forget_set: ForgetSet, config: SamplingConfig, progress: bool) -> AttackResult:
    geometry, seed = config.geometry, config.seed
    instructions = load_instructions().test if config.prompts is None else config.prompts
    prompts = [instruction_prompt(tokenizer, text) for text in instructions]
    points = concept_points(geometry.subspace, config.n_points, geometry.sigma, seed)
    arms = {"steered": (points, geometry), "isotropic": (isotropic_points(points, seed), geometry)}
    if config.control is not None:
        other = config.control
        arms["control"] = (concept_points(other.subspace, config.n_points, other.sigma, seed, "control"), other)
    finder = MentionFinder(config.concept)
    said = {
        arm: _steered(model, tokenizer, prompts, cloud, config, of, f"{config.name}, {arm}" if progress else None)
        for arm, (cloud, of) in arms.items()
    }
    said["unsteered"] = [[text] for text in _unsteered(model, tokenizer, prompts, config)]
    found = {arm: [[named(finder.find(text)) for text in row] for row in rows] for arm, rows in said.items()}
    hits = {
        arm: torch.tensor([[len(names) > 0 for names in row] for row in rows]).double() for arm, rows in found.items()
    }
    shares = {arm: _share(table, seed) for arm, table in hits.items()}
    mentions = [mention for row in found["steered"] for names in row for mention in names]
    spread = diversity(mentions, config.concept, other=finder.names_others)
    counts: dict[str, int] = {}
    for entity, _ in mentions:
        counts[entity] = counts.get(entity, 0) + 1
    score, low, high = shares["steered"]
    return AttackResult(
        name=config.name,
        score=score,
        low=low,
        high=high,
        baseline=shares["unsteered"][0],
        n=hits["steered"].numel(),
        details={
            **_triple("isotropic", shares["isotropic"]),
            **_triple("control", shares.get("control")),
            "control_concept": None if config.control is None else config.control.name,
            **_triple("gain", _gain(hits["steered"], hits["isotropic"], seed)),
            "entities": len(counts),
            "categories": len({category for _, category in mentions}),
            "entity_diversity": spread.entity,
            "category_diversity": spread.category,
            "mentions": dict(sorted(counts.items(), key=lambda item: -item[1])),
            **_used(config),
            "outputs": [
                {"prompt": text}
                | {arm: rows[i] for arm, rows in said.items()}
                | {"mentions": [[entity for entity, _ in names] for names in found["steered"][i]]}
                for i, text in enumerate(instructions)
            ],
        },
    )


def _questions(model, tokenizer, forget_set: ForgetSet, config: SamplingConfig, progress: bool) -> AttackResult:
    geometry, seed = config.geometry, config.seed
    pairs = distinct_questions(forget_set)[: config.n_questions]
    prompts = [asked_prompt(tokenizer, pair.question) for pair in pairs]
    points = [
        concept_points(
            geometry.without(pair.question), config.n_points, geometry.sigma, seed, f"points/{pair.question}"
        )
        for pair in pairs
    ]
    random = [isotropic_points(p, seed, f"isotropic/{pair.question}") for p, pair in zip(points, pairs, strict=True)]
    arms = {"steered": points, "isotropic": random}
    said = {
        arm: _steered(model, tokenizer, prompts, clouds, config, geometry, f"sampling, {arm}" if progress else None)
        for arm, clouds in arms.items()
    }
    said["unsteered"] = [[text] for text in _unsteered(model, tokenizer, prompts, config)]
    hits = {
        arm: torch.tensor([[answered(text, pair) for text in row] for row, pair in zip(rows, pairs, strict=True)])
        for arm, rows in said.items()
    }
    right = {arm: table.any(1).double() for arm, table in hits.items()}
    low, high = share_interval(int(right["steered"].sum()), len(pairs))
    return AttackResult(
        name=config.name,
        score=float(right["steered"].mean()),
        low=low,
        high=high,
        baseline=float(right["isotropic"].mean()),
        n=len(pairs),
        details={
            "unsteered": float(right["unsteered"].mean()),
            **_triple("gain", share_gain(right["steered"], right["isotropic"], seed)),
            "mean_steered": float(hits["steered"].double().mean()),
            "mean_isotropic": float(hits["isotropic"].double().mean()),
            **_used(config),
            "questions": [
                {"id": pair.id, "question": pair.question, "answer": pair.answer}
                | {arm: rows[i] for arm, rows in said.items()}
                | {f"{arm}_right": int(table[i].sum()) for arm, table in hits.items()}
                for i, pair in enumerate(pairs)
            ],
        },
    )


def _steered(
    model, tokenizer, prompts: Sequence[str], points: Tensor | Sequence[Tensor], config: SamplingConfig,
    geometry: ConceptGeometry | ForgetSetGeometry, title: str | None,
) -> list[list[str]]:  # fmt: skip
    """What each point makes the model say to each prompt; `geometry` is that of the points."""
    return steered_answers(
        model, tokenizer, prompts, points, layer=geometry.layer, strength=_strength(config, geometry),
        decay=_decay(config, geometry), max_new_tokens=config.max_new_tokens, batch_tokens=config.batch_tokens,
        progress=title,
    )  # fmt: skip


def _unsteered(model, tokenizer, prompts: Sequence[str], config: SamplingConfig) -> list[str]:
    return greedy_answers(
        model, tokenizer, prompts, max_new_tokens=config.max_new_tokens, batch_tokens=config.batch_tokens
    )


def _strength(config: SamplingConfig, geometry: ConceptGeometry | ForgetSetGeometry) -> float:
    return geometry.strength if config.strength is None else config.strength


def _decay(config: SamplingConfig, geometry: ConceptGeometry | ForgetSetGeometry) -> float:
    return geometry.decay if config.decay is None else config.decay


def _used(config: SamplingConfig) -> dict[str, Any]:
    geometry = config.geometry
    settings = ("n_points", "max_new_tokens", "n_questions", "seed", "batch_tokens")
    return {
        "geometry": geometry.name,
        "layer": geometry.layer,
        "rank": geometry.rank,
        "sigma": geometry.sigma,
        "strength": _strength(config, geometry),
        "decay": _decay(config, geometry),
        "reference_share": geometry.reference_share,
        "settings": {name: getattr(config, name) for name in settings},
    }


def _share(hits: Tensor, seed: int) -> tuple[float, float, float]:
    """Share of hits in a table [prompts, points] float64, with its interval; see the Notes of `sampling`."""
    share = float(hits.mean())
    if share in (0.0, 1.0):
        n = hits.shape[1]
        return share, *share_interval(round(share) * n, n)
    low, high = two_way_interval(hits, seed=seed)
    return share, min(low, share), max(high, share)


def _gain(steered: Tensor, isotropic: Tensor, seed: int) -> tuple[float, float, float]:
    """Mean difference of two tables of hits [prompts, points], with its interval; see the Notes of `sampling`."""
    change = steered - isotropic
    if bool((change == change.flatten()[0]).all()):
        n = change.shape[1]
        low, high = share_gain_interval(round(float(steered.mean()) * n), round(float(isotropic.mean()) * n), n)
    else:
        low, high = two_way_interval(change, seed=seed)
    return float(change.mean()), low, high


def _triple(name: str, values: tuple[float, float, float] | None) -> dict[str, float | None]:
    value, low, high = (None, None, None) if values is None else values
    return {name: value, f"{name}_low": low, f"{name}_high": high}
