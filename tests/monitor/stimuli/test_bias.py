"""The bundled bias sentences are balanced, distinct and free of group words; bad sets are refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
import string
from collections import Counter
from importlib.resources import files

import pytest

from monitor.stimuli.bias import ATTRIBUTE_VARIANTS, TARGET_VARIANTS, BiasStimuli, load_bias_stimuli

FULL = load_bias_stimuli("full")
DATA = files("monitor.stimuli").joinpath("bias_data")

# Words that name or evoke a group, beyond the group names themselves. "people" is left out: the subject_noun variant
# says "some people", which singles out nobody.
GROUP_WORDS = {
    *"woman women man men girl girls boy boys female male lady gentleman".split(),
    *"mother father sister brother wife husband".split(),
    *"transgender trans gay lesbian homosexual straight heterosexual bisexual queer".split(),
    *"old elderly aged aging young youth teenager teenagers senior seniors child children".split(),
    *"black white brown asian african european latino hispanic indigenous native ethnic race racial".split(),
    *"muslim muslims christian christians jew jews jewish hindu hindus atheist atheists religion religious".split(),
    *"immigrant immigrants refugee refugees foreign foreigner foreigners border".split(),
    *"mexican mexicans russian russians nigerian nigerians chinese american americans".split(),
    *"disabled disability deaf blind lame crippled wheelchair wheelchairs".split(),
    *"poor poverty rich wealthy wealth homeless class police officer officers policeman nurse nurses".split(),
}


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in DATA.joinpath(name).read_text(encoding="utf-8").splitlines()]


def lines(name: str) -> list[str]:
    return DATA.joinpath(name).read_text(encoding="utf-8").splitlines()


def words(text: str) -> list[str]:
    return re.findall(r"[a-zé'-]+", text.lower())


def own(**changes) -> BiasStimuli:
    """A minimal valid set of a user's own, with some of its parts replaced."""
    sets = {
        "targets": {
            "bakers": ["Bakers sit here.", "Bakers stay there."],
            "poets": ["Poets sit here.", "Poets stay there."],
        },
        "positive": ["It was good."],
        "negative": ["It was bad."],
        "anchors": ["A table.", "A chair."],
        "controls": {"pens": ["Pens sit here.", "Pens stay there."]},
    }
    return BiasStimuli(**{**sets, **changes})


# --- sizes and selections ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "groups", "templates", "attributes", "anchors", "controls"),
    [("small", 8, 20, 40, 200, 4), ("full", 24, 50, 100, 1000, 8)],
)
def test_sizes(size, groups, templates, attributes, anchors, controls):
    s = load_bias_stimuli(size)
    assert (len(s.targets), len(s.controls)) == (groups, controls)
    assert {len(t) for t in (*s.targets.values(), *s.controls.values())} == {templates}
    assert (len(s.positive), len(s.negative), len(s.anchors)) == (attributes, attributes, anchors)
    assert list(s.topics) == list(s.targets)


def test_small_is_the_default_and_the_beginning_of_full():
    small = load_bias_stimuli()
    assert list(small.targets) == list(FULL.targets)[:8]
    assert all(FULL.targets[group][:20] == sentences for group, sentences in small.targets.items())
    assert all(FULL.controls[name][:20] == sentences for name, sentences in small.controls.items())
    assert (FULL.positive[:40], FULL.negative[:40]) == (small.positive, small.negative)
    assert FULL.anchors[:200] == small.anchors


def test_groups_select_any_of_the_24_in_the_order_asked_and_leave_the_anchors_alone():
    s = load_bias_stimuli("small", groups=["police officers", "women"])
    assert list(s.targets) == ["police officers", "women"]
    assert s.topics == {"police officers": "occupation", "women": "gender"}
    assert s.targets["women"] == FULL.targets["women"][:20]
    assert s.anchors == load_bias_stimuli("small").anchors


def test_ten_topics_and_no_group_twice():
    groups = rows("groups.jsonl")
    assert len({g["name"].lower() for g in groups}) == 24
    assert {g["topic"] for g in groups} == {
        *"gender age religion race nationality migration disability class orientation occupation".split()
    }


@pytest.mark.parametrize(
    ("argument", "value", "listed"),
    [
        ("size", "tiny", "small, full"),
        ("groups", ["martians"], "women, men"),
        ("groups", [], "women, men"),
        ("groups", "women", r"\['women'\]"),
        ("groups", ["men", "men"], "men more than once"),
        ("anchors", "images", "sentences, words"),
        ("attribute_variant", "passive", "base, subject_they, subject_noun, synonyms_1, synonyms_2, synonyms_3"),
        ("target_variant", "subject_they", "base, passive, passive_rephrased, synonyms_1, synonyms_2, synonyms_3"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_with_those_that_do(argument, value, listed):
    with pytest.raises(ValueError, match=rf"{argument}.*{listed}"):
        load_bias_stimuli(**{argument: value})


# --- the sentences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", TARGET_VARIANTS)
def test_templates_have_one_slot_and_are_the_same_for_every_group_and_control(variant):
    templates = [row[variant] for row in rows("templates.jsonl")]
    assert len(set(templates)) == len(templates) == 50
    assert all(
        [slot for _, slot, _, _ in string.Formatter().parse(t) if slot is not None] == ["group"] for t in templates
    )
    s = load_bias_stimuli("full", target_variant=variant)
    for name, sentences in (*s.targets.items(), *s.controls.items()):
        for template, sentence in zip(templates, sentences, strict=True):
            assert sentence.lower() == template.replace("{group}", name).lower()
            assert name in sentence or name[0].upper() + name[1:] in sentence


@pytest.mark.parametrize("variant", TARGET_VARIANTS[1:])
def test_every_template_changes_in_every_variant(variant):
    assert all(
        row[variant] not in (row["base"], *(row[v] for v in TARGET_VARIANTS if v != variant))
        for row in rows("templates.jsonl")
    )


def test_voice_of_the_templates():
    irregular = "found|brought|kept|given|built|led|held|begun|set|left|made|spent"
    passive = re.compile(rf"\b(is|are|was|were|be) (still |no longer |often )?(\w+ed|\w+wn|\w+en|{irregular})\b")
    for row in rows("templates.jsonl"):
        for variant in TARGET_VARIANTS:
            assert bool(passive.search(row[variant])) == variant.startswith("passive"), row[variant]
    # The name comes first wherever the voice is active, so that later tokens of a causal model can depend on it.
    active = [v for v in TARGET_VARIANTS if not v.startswith("passive")]
    assert all(row[v].startswith("{group} ") for row in rows("templates.jsonl") for v in active)


@pytest.mark.parametrize("variant", ATTRIBUTE_VARIANTS)
def test_attributes_are_distinct_and_of_equal_length(variant):
    s = load_bias_stimuli("full", attribute_variant=variant)
    assert len({*s.positive, *s.negative}) == 200
    for small_or_full in (40, 100):
        for size in (len, lambda sentence: len(words(sentence))):
            positive = sum(map(size, s.positive[:small_or_full]))
            negative = sum(map(size, s.negative[:small_or_full]))
            assert abs(positive - negative) <= 0.1 * min(positive, negative)


@pytest.mark.parametrize("variant", ATTRIBUTE_VARIANTS)
def test_pairs_differ_in_the_evaluation_only(variant):
    column = int(variant[-1]) if variant.startswith("synonyms") else 0
    s = load_bias_stimuli("full", attribute_variant=variant)
    for row, positive, negative in zip(rows("attributes.jsonl"), s.positive, s.negative, strict=True):
        good, bad = row["positive"][column], row["negative"][column]
        swapped = re.sub(rf"\b{good}\b", bad, positive, flags=re.IGNORECASE)
        assert swapped.lower() == negative.lower()


def test_no_wording_has_both_polarities_and_synonyms_differ():
    attributes = rows("attributes.jsonl")
    for row in attributes:
        assert len({*row["positive"], *row["negative"]}) == 8, row
    positive = {word.removeprefix("a ").removeprefix("an ") for row in attributes for word in row["positive"]}
    negative = {word.removeprefix("a ").removeprefix("an ") for row in attributes for word in row["negative"]}
    assert not positive & negative


@pytest.mark.parametrize("variant", ATTRIBUTE_VARIANTS)
def test_attributes_and_controls_and_word_anchors_name_no_group(variant):
    s = load_bias_stimuli("full", attribute_variant=variant, anchors="words")
    named = {word for group in s.targets for word in words(group)} - {"people"}
    for text in (*s.positive, *s.negative, *s.anchors, *(t for texts in s.controls.values() for t in texts)):
        assert not set(words(text)) & (named | GROUP_WORDS), text


def test_subjects_are_balanced_between_she_and_he():
    subjects = Counter(row["subject"] for row in rows("attributes.jsonl")[:40])
    assert subjects["she"] == subjects["he"] == 12
    subjects = Counter(row["subject"] for row in rows("attributes.jsonl"))
    assert subjects["she"] == subjects["he"] == 30
    assert subjects[None] == 20


def test_subject_variants_leave_no_personal_subject():
    for variant, allowed in (("subject_they", r"They|Their"), ("subject_noun", r"The person('s)?|Some people('s)?")):
        s = load_bias_stimuli("full", attribute_variant=variant)
        for row, sentence in zip(rows("attributes.jsonl"), s.positive, strict=True):
            assert not {"she", "he", "her", "his", "we", "our"} & set(words(sentence)), sentence
            assert bool(re.match(rf"({allowed})\b", sentence)) == (row["subject"] is not None), sentence


@pytest.mark.parametrize(
    ("variant", "sentence"),
    [
        ("base", "She was praised for the work."),
        ("base", "His voice was full of love."),
        ("base", "The guest was polite throughout the visit."),
        ("subject_they", "They were praised for the work."),
        ("subject_they", "Their voice was full of love."),
        ("subject_noun", "The person's voice was full of love."),
        ("subject_noun", "Some people were praised for the work."),
        ("subject_noun", "Some people were remembered for their generosity."),
        ("synonyms_1", "She made a wise choice at the end."),
        ("synonyms_2", "She made an excellent choice at the end."),
    ],
)
def test_agreement_and_possessives(variant, sentence):
    assert sentence in load_bias_stimuli("full", attribute_variant=variant).positive


def test_every_text_is_a_clean_sentence():
    for attribute_variant, target_variant in zip(ATTRIBUTE_VARIANTS, TARGET_VARIANTS, strict=True):
        s = load_bias_stimuli("full", attribute_variant=attribute_variant, target_variant=target_variant)
        grouped = [t for sets in (s.targets, s.controls) for texts in sets.values() for t in texts]
        for text in (*s.positive, *s.negative, *s.anchors, *grouped):
            assert re.fullmatch(r"[A-Z][\w ,'é-]*\w\.", text), text
            assert "  " not in text and not re.search(r"\b(\w+) \1\b", text), text
            assert not re.search(r"\ba [aeiou]|\ban [^aeioh]", text), text
            assert 4 <= len(text.split()) <= 15, text


def test_articles_before_h_follow_the_sound():
    texts = " ".join(t for v in ATTRIBUTE_VARIANTS for t in load_bias_stimuli("full", attribute_variant=v).positive)
    assert re.findall(r"\ban (h\w+)", texts) and set(re.findall(r"\ban (h\w+)", texts)) <= {
        "honest",
        "honourable",
        "hour",
    }


def test_targets_attributes_anchors_and_controls_do_not_overlap():
    texts = Counter()
    for variant in TARGET_VARIANTS:
        s = load_bias_stimuli("full", target_variant=variant)
        texts.update({t.lower() for sets in (s.targets, s.controls) for group in sets.values() for t in group})
        assert len({t for group in s.targets.values() for t in group}) == 24 * 50
    attributes = {
        t.lower()
        for v in ATTRIBUTE_VARIANTS
        for s in [load_bias_stimuli("full", attribute_variant=v)]
        for t in (*s.positive, *s.negative)
    }
    anchors = {t.lower() for t in FULL.anchors}
    assert not attributes & set(texts) and not attributes & anchors and not anchors & set(texts)


# --- anchors ----------------------------------------------------------------------------------------------------------


def test_anchors_are_distinct_and_every_prefix_is_balanced_over_groups():
    assert len(set(FULL.anchors)) == 1000
    frames = lines("anchor_frames.txt")
    filled = {frame.replace("{group}", g): g for g in FULL.targets for frame in frames}
    filled = {text[0].upper() + text[1:]: g for text, g in filled.items()}
    counts = dict.fromkeys(FULL.targets, 0)
    for anchor in FULL.anchors:
        counts[filled[anchor]] += 1
        assert max(counts.values()) - min(counts.values()) <= 1


def test_anchors_use_every_frame_within_the_small_set():
    tails = {re.sub(r"^(Many|Some)? ?", "", frame).replace("{group} ", "") for frame in lines("anchor_frames.txt")}
    assert len(tails) == 43
    used = Counter(tail for anchor in FULL.anchors[:200] for tail in tails if anchor.endswith(f" {tail}"))
    assert set(used) == tails
    assert max(used.values()) - min(used.values()) <= 1


def test_no_evaluative_word_in_templates_and_anchors():
    evaluative = {
        w for row in rows("attributes.jsonl") for phrase in row["positive"] + row["negative"] for w in words(phrase)
    }
    # Of the attributes' vocabulary only these are neutral elsewhere (the article, prepositions, verbs of giving).
    evaluative -= set("a an to gave provided raised found told kept held won followed fresh".split())
    texts = [row[v] for row in rows("templates.jsonl") for v in TARGET_VARIANTS] + lines("anchor_frames.txt")
    for text in (*texts, *lines("anchor_words.txt"), *lines("controls.txt")):
        assert not set(words(text)) & evaluative, text


def test_word_anchors():
    small, full = load_bias_stimuli("small", anchors="words"), load_bias_stimuli("full", anchors="words")
    assert (len(small.anchors), len(full.anchors)) == (200, 300)
    assert full.anchors[:200] == small.anchors
    assert len(set(full.anchors)) == 300
    assert all(re.fullmatch(r"[a-z]+", word) for word in full.anchors)
    assert small.targets == load_bias_stimuli("small").targets


# --- a user's own sets ------------------------------------------------------------------------------------------------


def test_own_sets_are_copied_into_tuples():
    targets = {"bakers": ["Bakers sit here."]}
    s = own(targets=targets, controls={})
    targets["bakers"].append("Bakers stay there.")
    assert s.targets == {"bakers": ("Bakers sit here.",)}
    assert (s.positive, s.negative, s.controls, s.topics) == (("It was good.",), ("It was bad.",), {}, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.positive = ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": {}}, r"targets must name at least one group"),
        ({"targets": {"bakers": []}}, r"targets\['bakers'\] must hold at least one sentence"),
        ({"targets": {"bakers": ["Bakers sit here.", " "]}}, r"targets\['bakers'\]\[1\] is blank"),
        (
            {"targets": {"bakers": ["Bakers sit."], "poets": ["Poets sit.", "Poets stay."]}},
            r"targets\['poets'\] has 2 sentences but targets\['bakers'\] has 1; fill the same templates",
        ),
        (
            {"controls": {"pens": ["Pens sit here."]}},
            r"controls\['pens'\] has 1 sentences but targets\['bakers'\] has 2",
        ),
        ({"controls": {"pens": []}}, r"controls\['pens'\] must hold at least one sentence"),
        ({"controls": {"poets": ["Poets sit here.", "Poets stay there."]}}, r"'poets' is both a target and a control"),
        ({"positive": []}, r"positive must hold at least one sentence"),
        ({"negative": ["It was bad.", ""]}, r"negative\[1\] is blank"),
        ({"negative": ["It was good.", "It was bad."]}, r"share sentences.*'It was good\.'; remove each"),
        ({"anchors": ["A table."]}, r"anchors must hold at least 2 different texts, got 1"),
        ({"anchors": ["A table.", "A table."]}, r"anchors must hold at least 2 different texts, got 1"),
        ({"anchors": ["A table.", "\n"]}, r"anchors\[1\] is blank"),
        ({"topics": {"cooks": "occupation"}}, r"topics names 'cooks'.*bakers, poets"),
    ],
)
def test_sets_that_cannot_be_measured_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        own(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positive": "It was good."}, r"positive must be a list or tuple of sentences, got str"),
        ({"targets": {"bakers": "Bakers sit here."}}, r"targets\['bakers'\] must be a list or tuple"),
        ({"targets": ["Bakers sit here."]}, r"targets must map names to lists of sentences, got list"),
        ({"anchors": ["A table.", 3]}, r"anchors\[1\] must be a string, got int 3"),
        ({"topics": ["occupation"]}, r"topics must map group names to topics, got list"),
    ],
)
def test_sets_of_the_wrong_type_are_refused_by_name(changes, message):
    with pytest.raises(TypeError, match=message):
        own(**changes)


@pytest.mark.parametrize("stimuli", [own(), own(topics={"poets": "occupation"}), FULL], ids=["own", "topics", "full"])
def test_file_round_trip(tmp_path, stimuli):
    path = tmp_path / "sets.json"
    path.write_text(json.dumps(dataclasses.asdict(stimuli)), encoding="utf-8")
    assert BiasStimuli.from_file(path) == stimuli
    assert list(BiasStimuli.from_file(str(path)).targets) == list(stimuli.targets)


def test_file_with_byte_order_mark(tmp_path):
    path = tmp_path / "sets.json"
    path.write_text(json.dumps(dataclasses.asdict(own())), encoding="utf-8-sig")
    assert BiasStimuli.from_file(path) == own()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n'targets'", r"sets\.json is not valid JSON.*line 2"),
        ("[]", r"must hold one JSON object, got a list"),
        ('{"target": {}}', r"unknown keys \['target'\]; the keys are targets, positive"),
        ('{"targets": {"a": ["A b."]}, "positive": ["C."]}', r"lacks the keys \['negative', 'anchors'\]"),
        ('{"targets": {"a": []}, "positive": ["C."], "negative": ["D."], "anchors": ["e", "f"]}', r"targets\['a'\]"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, text, message):
    path = tmp_path / "sets.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        BiasStimuli.from_file(path)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.json"):
        BiasStimuli.from_file(tmp_path / "nowhere.json")
