"""The bundled concepts are whole, balanced and give nothing away; one's own files are read, and refused by name."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from monitor.stimuli.concepts import CONCEPTS, CONTROL, ConceptSet, Context, Entity, load_concept_sets, mentions

SETS = load_concept_sets((*CONCEPTS, CONTROL))
HIERARCHICAL = ("animals", "countries", "vehicles", "plants")
TEMPLATES = {"templates": ["The tool that {clue} is"], "article": "the", "question": "Which tool {clue}?"}
SAW = {"entity": "saw", "clues": ["cuts wood"]}
AXE = {"entity": "axe", "clues": ["fells trees"]}


def entity(name: str, *texts: str, **changes) -> Entity:
    fields = {"category": name, "forms": (name,), "contexts": tuple(Context(text, i) for i, text in enumerate(texts))}
    return Entity(name, **{**fields, **changes})


@pytest.fixture
def load(tmp_path):
    """Write rows, and a header unless it is None, and load them as one concept."""

    def load(*rows, header=TEMPLATES) -> ConceptSet:
        path = tmp_path / "tools.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        if header is not None:
            path.with_suffix(".json").write_text(header if isinstance(header, str) else json.dumps(header))
        (concept,) = load_concept_sets([path]).values()
        return concept

    return load


# --- what is bundled ----------------------------------------------------------------------------------------------


def test_sizes():
    assert tuple(load_concept_sets()) == CONCEPTS and CONTROL not in CONCEPTS
    for name in HIERARCHICAL:
        sizes = Counter(e.category for e in SETS[name].entities)
        assert len(sizes) >= 6 and set(sizes.values()) == {8}, name
    assert len(SETS["days"].entities) == 7
    assert len(SETS["years"].entities) >= 24 and len(SETS[CONTROL].entities) >= 24
    for concept in SETS.values():
        for e in concept.entities:
            assert len(e.contexts) >= 10, e.name
            assert len(e.questions) == len({c.clue for c in e.contexts}) >= 4, e.name


def test_order():
    ordered = {name: (concept.ordered, concept.cyclic) for name, concept in SETS.items() if concept.ordered}
    assert ordered == {"days": (True, True), "years": (True, False)}
    assert [e.name for e in SETS["days"].entities][::6] == ["Monday", "Sunday"]
    years = [int(e.name) for e in SETS["years"].entities]
    assert years == sorted(years) and years[0] < 1910 and years[-1] > 1990
    assert {year // 10 for year in years} == set(range(190, 200)), "a decade without a year"


@pytest.mark.parametrize("name", SETS)
def test_no_text_mentions_its_entity_or_another_of_an_unordered_concept(name):
    """A context that names another entity would put that one into the state; days can hardly do without."""
    concept = SETS[name]
    for e in concept.entities:
        for text in (*(context.text for context in e.contexts), *e.questions):
            named = [other.name for other in concept.entities if mentions(text, other.forms)]
            assert e.name not in named, text
            assert concept.ordered or not named, text


def test_no_context_names_a_year():
    for context in SETS["years"].texts:
        assert not any(word.strip(".,").isdigit() and len(word) == 4 for word in context.split()), context


@pytest.mark.parametrize("name", SETS)
def test_texts_read_as_sentences_and_are_all_different(name):
    concept = SETS[name]
    questions = [question for e in concept.entities for question in e.questions]
    for texts in (list(concept.texts), questions):
        assert len(set(texts)) == len(texts)
        for text in texts:
            assert text[0].isupper() and text == " ".join(text.split()) and "{" not in text, text
            assert not text.endswith((".", ",")), text
    assert all(question.endswith("?") for question in questions)


@pytest.mark.parametrize("name", SETS)
def test_labels_and_clues_go_with_the_texts(name):
    concept = SETS[name]
    assert len(concept.texts) == len(concept.labels) == len(concept.clues)
    pairs = list(zip(concept.labels, concept.clues, strict=True))
    assert [concept.entities[label].contexts[0].text for label in dict.fromkeys(concept.labels)] == [
        concept.texts[concept.labels.index(label)] for label in range(len(concept.entities))
    ]
    # A clue belongs to one entity, and the numbers are 0, 1, ... over the set.
    assert all(len({label for label, clue in pairs if clue == number}) == 1 for number in set(concept.clues))
    assert sorted(set(concept.clues)) == list(range(len(set(concept.clues))))
    assert set(Counter(concept.clues).values()) == {3}


def test_concepts_that_share_words_share_no_entity():
    """Off-concept mentions are counted: a word that is both an animal and a plant could be counted as either."""
    owner: dict[str, str] = {}
    for name in (*CONCEPTS, CONTROL):
        for e in SETS[name].entities:
            for form in e.forms:
                assert owner.setdefault(form.casefold(), name) == name, form


# --- mentions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "forms", "expected"),
    [
        ("The Lions sleep.", ["lion", "lions"], True),
        ("a million reasons", ["lion"], False),
        ("lion-hearted", ["lion"], True),
        ("It was 1969.", ["1969"], True),
        ("It was 19690.", ["1969"], False),
        ("in South Korea's capital", ["South Korea"], True),
        ("in Korea", ["South Korea"], False),
        ("a.b", ["axb"], False),
        ("axb", ["a.b"], False),
    ],
)
def test_mentions_are_whole_words_in_any_case(text, forms, expected):
    assert mentions(text, forms) is expected


# --- files of one's own -------------------------------------------------------------------------------------------


def test_clues_fill_templates(load):
    header = {**TEMPLATES, "templates": ["The tool that {clue} is", "{clue}: this is"], "concept": "mine"}
    concept = load({**SAW, "forms": ["saws"], "category": "cutters"}, {**AXE, "article": ""}, header=header)
    assert concept.name == "mine" and concept.categories == ("cutters", "axe")
    saw, axe = concept.entities
    assert saw.forms == ("saw", "saws") and axe.forms == ("axe",)
    assert saw.contexts == (Context("The tool that cuts wood is the", 0), Context("Cuts wood: this is the", 0))
    assert [c.text for c in axe.contexts] == ["The tool that fells trees is", "Fells trees: this is"]
    assert axe.questions == ("Which tool fells trees?",)
    assert concept.labels == (0, 0, 1, 1) and concept.clues == (0, 0, 1, 1)


def test_whole_contexts_need_no_header_and_each_is_a_clue(load):
    rows = [
        {"entity": "saw", "contexts": ["Wood is cut with a", "It has teeth, the"], "questions": ["What cuts wood?"]},
        {"entity": "axe", "contexts": ["Trees are felled with an"]},
    ]
    concept = load(*rows, header=None)
    assert concept.name == "tools" and not concept.ordered
    assert concept.clues == (0, 1, 2) and concept.labels == (0, 0, 1)
    assert [e.questions for e in concept.entities] == [("What cuts wood?",), ()]


def test_bundled_names_and_files_together(load, tmp_path):
    load(SAW, AXE)
    assert list(load_concept_sets(["days", tmp_path / "tools.jsonl"])) == ["days", "tools"]
    with pytest.raises(ValueError, match="two concepts named 'days'"):
        load_concept_sets(["days", "days"])
    for names in ("days", None, 3):
        with pytest.raises(ValueError, match="put it in a list"):
            load_concept_sets(names)
    for name in (3, None, "", " "):
        with pytest.raises(ValueError, match="`names` must hold names .animals, .* or files, got"):
            load_concept_sets(["days", name])
    with pytest.raises(FileNotFoundError, match="animals, .*random, or a JSON .*'Animal': did you mean 'animals'"):
        load_concept_sets(["Animal"])
    with pytest.raises(FileNotFoundError, match="got 'my/cities.jsonl'$"):
        load_concept_sets(["my/cities.jsonl"])
    with pytest.raises(ValueError, match="at least one name or file, got none"):
        load_concept_sets(())


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        ([SAW], TEMPLATES, "at least 2 entities, got 1"),
        ([], TEMPLATES, "at least 2 entities, got 0"),
        ([SAW, SAW], TEMPLATES, "'saw' is there twice"),
        ([SAW, {**AXE, "entity": "Saw"}], TEMPLATES, "'Saw' is there twice"),
        ([SAW, "{"], TEMPLATES, "line 2: .*invalid JSON"),
        ([SAW, "[1]"], TEMPLATES, "line 2: .*got list"),
        ([SAW, {"clues": ["fells trees"]}], TEMPLATES, "line 2: .*'entity'.*got none"),
        ([SAW, {"entity": "axe"}], TEMPLATES, "line 2: .*either 'clues' or 'contexts', got neither"),
        ([SAW, {**AXE, "contexts": ["An"]}], TEMPLATES, "line 2: .*got both"),
        ([SAW, {**AXE, "clue": "x"}], TEMPLATES, "line 2: .*got 'clue'"),
        ([SAW, {**AXE, "clues": "fells trees"}], TEMPLATES, "line 2: .*a list of texts for 'clues'"),
        ([SAW, {**AXE, "clues": []}], TEMPLATES, "line 2: .*at least one text for 'clues'"),
        ([SAW, {**AXE, "clues": [" "]}], TEMPLATES, "line 2: .*a blank in"),
        ([SAW, {**AXE, "entity": ""}], TEMPLATES, "line 2: .*a blank in"),
        ([SAW, {**AXE, "clues": ["is an Axe"]}], TEMPLATES, "'axe' is mentioned by its own context"),
        ([SAW, {**AXE, "forms": ["hatchet"], "clues": ["is no hatchet"]}], TEMPLATES, "mentioned by its own context"),
        ([SAW, {**AXE, "clues": ["cuts wood"]}], TEMPLATES, "belongs to both 'saw' and 'axe'"),
        ([SAW, {**AXE, "clues": ["fells trees"] * 2}], TEMPLATES, "'axe' has the context .* twice"),
        ([SAW, {**AXE, "forms": ["SAW"]}], TEMPLATES, "the form 'saw' belongs to both"),
        ([SAW, {**AXE, "questions": ["Which?"]}], TEMPLATES, "'questions' only beside 'contexts'"),
        ([SAW, AXE], None, "templates for the clues in a header beside the file"),
        ([SAW, AXE], {"templates": ["The tool is"]}, "hold {clue} once, got 'The tool is'"),
        ([SAW, AXE], {**TEMPLATES, "question": "Which?"}, "hold {clue} once, got 'Which\\?'"),
        ([SAW, AXE], {**TEMPLATES, "ordered": 1}, "true or false for 'ordered'"),
        ([SAW, AXE], {**TEMPLATES, "cyclic": True}, "`cyclic` but not `ordered`"),
        ([SAW, AXE], "", "tools.json: .*invalid JSON"),
        ([SAW, {"entity": "axe", "contexts": ["It is the "]}], TEMPLATES, "ends in white space"),
        ([SAW, {**AXE, "entity": " axe "}], TEMPLATES, "a name with white space around it"),
        ([SAW, {**AXE, "forms": ["ax\x00"]}], TEMPLATES, "a form with .* cannot be printed"),
        ([SAW, {**AXE, "entity": "\ud800"}], TEMPLATES, "cannot be printed"),
        ([SAW, {**AXE, "entity": "!!!"}], TEMPLATES, "a name without a letter or digit"),
        ([SAW, '{"entity": "axe", "entity": "adze", "clues": ["fells trees"]}'], TEMPLATES, "line 2: .*'entity' twice"),
        ([SAW, AXE], {**TEMPLATES, "concept": "a/b"}, "without '/'.*got 'a/b'"),
    ],
)
def test_a_file_with_a_fault_is_refused(load, rows, header, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(*rows, header=header)
    assert "tools.json" in str(caught.value), "the message does not say which file"


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "tools.jsonl"
    path.write_bytes(b'{"entity": "\xe9"}')
    with pytest.raises(ValueError, match="tools.jsonl must be UTF-8, got the byte 0xe9"):
        load_concept_sets([path])
    path.with_suffix(".json").write_bytes(b'{"concept": "\xe9"}')
    with pytest.raises(ValueError, match="tools.json must be UTF-8, got the byte 0xe9"):
        load_concept_sets([path])


def test_what_only_memory_can_get_wrong():
    with pytest.raises(ValueError, match="name as the first of its `forms`"):
        ConceptSet("tools", (entity("saw", "A", forms=("saws", "saw")), entity("axe", "B")))
    with pytest.raises(ValueError, match="has no context"):
        ConceptSet("tools", (entity("saw"), entity("axe", "B")))
