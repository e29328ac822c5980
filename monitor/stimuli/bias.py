"""Sentences for the bias shift: targets, positive and negative attributes, anchors and group-free controls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Literal

ATTRIBUTE_VARIANTS = ("base", "subject_they", "subject_noun", "synonyms_1", "synonyms_2", "synonyms_3")
TARGET_VARIANTS = ("base", "passive", "passive_rephrased", "synonyms_1", "synonyms_2", "synonyms_3")

# size -> how many of each; the small sets are the beginnings of the full ones.
_SIZES = {
    "small": {"groups": 8, "templates": 20, "attributes": 40, "anchors": 200, "controls": 4},
    "full": {"groups": 24, "templates": 50, "attributes": 100, "anchors": 1000, "controls": 8},
}

# subject -> (subject form, possessive inside the sentence, possessive that opens it, past of "to be")
_PRONOUNS = {
    "she": ("she", "her", "her", "was"),
    "he": ("he", "his", "his", "was"),
    "we": ("we", "our", "our", "were"),
    "they": ("they", "their", "their", "were"),
    "some people": ("some people", "their", "some people's", "were"),
}


@dataclass(frozen=True)
class BiasStimuli:
    """The sentence sets of a bias-shift measurement.

    Parameters
    ----------
    targets : mapping of group name to sentences
        One entry per audited group. The i-th sentence of every group must come from the same template: bootstraps
        resample templates jointly over groups.
    positive, negative : sequence of str
        Attribute sentences of the two polarities. They should name none of the groups.
    anchors : sequence of str
        Sentences or words that span the relative representation, at least two; neutral, and neither targets nor
        attributes.
    controls : mapping of subject to sentences, optional
        The same templates filled with subjects that are no social groups; their ΔB is subtracted in the
        control-corrected reading. Empty: no correction.
    topics : mapping of group name to topic, optional
        What kind of group it is (``"gender"``, ``"religion"``, ...), for tables; no formula uses it.

    Raises
    ------
    ValueError
        A set or a group is empty, a sentence is blank, a sentence is both positive and negative, there are fewer than
        two distinct anchors, groups or controls have unequal numbers of sentences, a name is both a group and a
        control, or a topic belongs to no group.
    TypeError
        A set is not a sequence of strings, or not a mapping where one is needed.

    Notes
    -----
    Any sequences and mappings are accepted; they are stored as tuples and new dicts, in the order given. The sets are
    those of arXiv:2609.10060, Section 3.1 and Appendix F; controls are an addition.
    """

    targets: dict[str, tuple[str, ...]]
    positive: tuple[str, ...]
    negative: tuple[str, ...]
    anchors: tuple[str, ...]
    controls: dict[str, tuple[str, ...]] = field(default_factory=dict)
    topics: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("positive", "negative", "anchors"):
            object.__setattr__(self, name, _sentences(getattr(self, name), name))
        for name in ("targets", "controls"):
            object.__setattr__(self, name, _sentence_groups(getattr(self, name), name))
        if not self.targets:
            raise ValueError("targets must name at least one group, got none; give {'group name': [sentences]}.")
        if not isinstance(self.topics, Mapping):
            raise TypeError(f"topics must map group names to topics, got {type(self.topics).__name__}.")
        object.__setattr__(self, "topics", dict(self.topics))
        self._check_attributes_and_anchors()
        self._check_groups()

    def _check_attributes_and_anchors(self) -> None:
        shared = [s for s in self.positive if s in set(self.negative)]
        if shared:
            raise ValueError(
                f"positive and negative must not share sentences, but {len(shared)} are in both, first {shared[0]!r}; "
                "remove each from one of the two."
            )
        if len(set(self.anchors)) < 2:
            raise ValueError(
                f"anchors must hold at least 2 different texts, got {len(set(self.anchors))}; add neutral sentences "
                "(200 or more give a stable relative representation)."
            )

    def _check_groups(self) -> None:
        first = next(iter(self.targets))
        expected = len(self.targets[first])
        for kind, sets in (("targets", self.targets), ("controls", self.controls)):
            for name, sentences in sets.items():
                if len(sentences) != expected:
                    raise ValueError(
                        f"{kind}[{name!r}] has {len(sentences)} sentences but targets[{first!r}] has {expected}; "
                        "fill the same templates, in the same order, for every group and control."
                    )
        both = [name for name in self.controls if name in self.targets]
        if both:
            raise ValueError(f"{both[0]!r} is both a target and a control; remove it from controls, or rename one.")
        stray = [name for name in self.topics if name not in self.targets]
        if stray:
            raise ValueError(
                f"topics names {stray[0]!r}, which is no target group; remove it or rename it to one of "
                f"{', '.join(self.targets)}."
            )

    @classmethod
    def from_file(cls, path: str | Path) -> BiasStimuli:
        """Read sentence sets from a JSON object whose keys are this class's parameters.

        Parameters
        ----------
        path : str or Path
            A UTF-8 JSON file with ``targets``, ``positive``, ``negative``, ``anchors`` and, if wanted, ``controls``
            and ``topics``. ``json.dumps(dataclasses.asdict(stimuli))`` writes one.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        ValueError
            The file is no JSON object, a key is missing or unknown, or the sets do not hold together.
        TypeError
            A set in the file is not a list of strings.
        """
        path = Path(path)
        try:
            loaded = json.loads(path.read_text(encoding="utf-8-sig"))  # accept a byte order mark
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not valid JSON: {error.msg} in line {error.lineno}; correct it.") from error
        if not isinstance(loaded, dict):
            raise ValueError(f"{path} must hold one JSON object, got a {type(loaded).__name__}; see BiasStimuli.")
        known = [f.name for f in fields(cls)]
        unknown = [key for key in loaded if key not in known]
        if unknown:
            raise ValueError(f"{path} has unknown keys {unknown}; the keys are {', '.join(known)}.")
        missing = [key for key in ("targets", "positive", "negative", "anchors") if key not in loaded]
        if missing:
            raise ValueError(f"{path} lacks the keys {missing}; add them (lists of sentences, targets by group).")
        return cls(**loaded)


def load_bias_stimuli(
    size: Literal["small", "full"] = "small",
    *,
    groups: Sequence[str] | None = None,
    anchors: Literal["sentences", "words"] = "sentences",
    attribute_variant: str = "base",
    target_variant: str = "base",
) -> BiasStimuli:
    """Load the bundled sentence sets.

    Parameters
    ----------
    size : {"small", "full"}
        ``"small"``: 8 groups × 20 templates, 40 + 40 attributes, 200 anchors, 4 controls. ``"full"``: 24 × 50,
        100 + 100, 1,000, 8. Each small set is the beginning of the full one;
        the values of the two sizes are not comparable, because distances grow with the number of anchors.
    groups : sequence of str, optional
        Names of the groups to audit, any of the 24 whatever the size; default: the first 8 or all 24.
    anchors : {"sentences", "words"}
        Neutral in-domain sentences (default), or common English words (200 or 300). The anchors do not depend on
        ``groups``, so readings of different selections share their coordinates.
    attribute_variant : str
        One of ``ATTRIBUTE_VARIANTS``: ``"base"``; ``"subject_they"`` and ``"subject_noun"`` replace the personal
        subjects by "they", or by "the person" and "some people" in turn; ``"synonyms_1"`` to ``"synonyms_3"`` replace
        the evaluative word. Positive and negative sentences always change together.
    target_variant : str
        One of ``TARGET_VARIANTS``: ``"base"``; ``"passive"`` inverts the sentence; ``"passive_rephrased"`` is a
        freer passive; ``"synonyms_1"`` to ``"synonyms_3"`` replace the other words. Controls change with the targets.

    Returns
    -------
    BiasStimuli

    Raises
    ------
    ValueError
        A size, group, kind of anchors or variant that does not exist; the message lists those that do.

    Notes
    -----
    The i-th positive and the i-th negative sentence are one frame with opposite evaluations, so subjects, topics and
    lengths are matched between the two sets. Templates take any plural noun; most begin with it, because in a causal
    model only the tokens after a name can depend on it. The four templates whose verb cannot be inverted have the
    nearest passive verb in ``"passive"``. Anchor k is frame k mod 43 filled with group k mod 24: as 43 and 24 are
    coprime all are different, and every prefix holds each group equally often, give or take one.
    Designed after arXiv:2609.10060, Appendices E.1, E.2 and F; the sentences are this project's own.
    """
    count = _SIZES[_one_of(size, _SIZES, "size")]
    wording = _one_of(target_variant, TARGET_VARIANTS, "target_variant")
    topics = {row["name"]: row["topic"] for row in _rows("groups.jsonl")}
    templates = [row[wording] for row in _rows("templates.jsonl")[: count["templates"]]]
    chosen = list(topics)[: count["groups"]] if groups is None else _chosen_groups(groups, topics)
    positive, negative = _attributes(_one_of(attribute_variant, ATTRIBUTE_VARIANTS, "attribute_variant"))
    if _one_of(anchors, ("sentences", "words"), "anchors") == "words":
        anchor_texts = _lines("anchor_words.txt")
    else:
        frames, names = _lines("anchor_frames.txt"), list(topics)
        anchor_texts = [_fill(frames[k % len(frames)], names[k % len(names)]) for k in range(count["anchors"])]
    return BiasStimuli(
        targets={name: [_fill(template, name) for template in templates] for name in chosen},
        positive=positive[: count["attributes"]],
        negative=negative[: count["attributes"]],
        anchors=anchor_texts[: count["anchors"]],
        controls={
            subject: [_fill(template, subject) for template in templates]
            for subject in _lines("controls.txt")[: count["controls"]]
        },
        topics={name: topics[name] for name in chosen},
    )


def _attributes(variant: str) -> tuple[list[str], list[str]]:
    """All positive and all negative attribute sentences in one wording, paired by index."""
    column = int(variant[-1]) if variant.startswith("synonyms_") else 0
    positive, negative = [], []
    for index, row in enumerate(_rows("attributes.jsonl")):
        subject = row["subject"]
        if subject is not None and variant == "subject_they":
            subject = "they"
        elif subject is not None and variant == "subject_noun":
            subject = ("the person", "some people")[index % 2]
        # Subjects that are noun phrases are singular: "the guest", "their" (singular they), "the guest's", "was".
        they, their, whose, were = _PRONOUNS.get(subject, (subject, "their", f"{subject}'s", "was"))
        for sentences, words in ((positive, row["positive"]), (negative, row["negative"])):
            sentence = row["frame"].format(they=they, their=their, whose=whose, were=were, word=words[column])
            sentences.append(_capitalised(sentence))
    return positive, negative


def _chosen_groups(groups: Sequence[str], topics: Mapping[str, str]) -> list[str]:
    if isinstance(groups, str):
        raise ValueError(f"groups must be a sequence of names, got the string {groups!r}; write [{groups!r}].")
    chosen = list(groups)
    if not chosen:
        raise ValueError(f"groups must name at least one group, got none; choose from {', '.join(topics)}.")
    for name in chosen:
        _one_of(name, topics, "groups")
    repeated = [name for name in dict.fromkeys(chosen) if chosen.count(name) > 1]
    if repeated:
        raise ValueError(f"groups names {', '.join(repeated)} more than once; name each group once.")
    return chosen


def _sentences(texts: Sequence[str], where: str) -> tuple[str, ...]:
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise TypeError(f"{where} must be a list or tuple of sentences, got {type(texts).__name__}; put it in a list.")
    if not texts:
        raise ValueError(f"{where} must hold at least one sentence, got none; add sentences or leave it out.")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{where}[{index}] must be a string, got {type(text).__name__} {text!r}.")
        if not text.strip():
            raise ValueError(f"{where}[{index}] is blank ({text!r}); remove it or write the sentence.")
    return tuple(texts)


def _sentence_groups(sets: Mapping[str, Sequence[str]], where: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(sets, Mapping):
        raise TypeError(f"{where} must map names to lists of sentences, got {type(sets).__name__}.")
    return {name: _sentences(texts, f"{where}[{name!r}]") for name, texts in sets.items()}


def _one_of(value: str, valid: Sequence[str] | Mapping[str, object], where: str) -> str:
    if value not in valid:
        raise ValueError(f"{where} must be one of {', '.join(valid)}; got {value!r}.")
    return value


def _fill(template: str, name: str) -> str:
    return _capitalised(template.format(group=name))


def _capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _lines(name: str) -> list[str]:
    return files("monitor.stimuli").joinpath("bias_data", name).read_text(encoding="utf-8").splitlines()


def _rows(name: str) -> list[dict]:
    return [json.loads(line) for line in _lines(name)]
