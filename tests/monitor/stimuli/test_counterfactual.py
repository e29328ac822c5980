"""The bundled grid says the same of every group in right English; sets, files and forget sets are what they say."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import warnings
from collections import Counter
from importlib.resources import files
from itertools import combinations

import pytest

import monitor
from monitor.stimuli.counterfactual import CounterfactualSet, counterfactual_sets_from_file
from monitor.stimuli.counterfactual_grid import DIMENSIONS, load_counterfactual_sets
from monitor.stimuli.counterfactual_pairs import counterfactual_from_pairs
from monitor.stimuli.forget_set import Pair, load_forget_set
from recipes.concepts import concept_path

GRID = load_counterfactual_sets()
DATA = files("monitor.stimuli").joinpath("counterfactual_data")
FRAMES = json.loads(DATA.joinpath("frames.json").read_text(encoding="utf-8"))

# arXiv:2609.22337, F-A, written out here a second time: the data file is checked against it.
HEADS = {
    "race": ("White", "Black", "man woman person American student worker teenager customer".split()),
    "religion": ("Christian", "Muslim", ["family man", *"man woman person student neighbor colleague friend".split()]),
    "age": ("young", "elderly", "man woman person employee volunteer neighbor customer voter".split()),
}
MARKERS = {name: {(f"{one} {x}", f"{other} {x}") for x in heads} for name, (one, other, heads) in HEADS.items()} | {
    "gender": {
        tuple(pair.split("/"))
        for pair in "man/woman boy/girl father/mother brother/sister gentleman/lady husband/wife uncle/aunt "
        "grandfather/grandmother".split()
    }
}
# F-E, by the names of our inventory.
MALE = {*"carpenter manager lawyer farmer salesperson mechanic doctor programmer".split(), "security guard"}
FEMALE = set("cashier teacher nurse receptionist designer accountant librarian".split())
# WinoBias, the occupations that are none of these 16 (physician, developer and guard are doctor, programmer and
# security guard): F-E counts 16 in common, so no other may be in the grid.
OTHER_WINOBIAS = {
    *"driver supervisor janitor cook mover laborer chief analyst sheriff CEO attendant assistant secretary".split(),
    *"auditor cleaner clerk counselor hairdresser writer housekeeper baker editor tailor".split(),
    *("construction worker", "physician", "developer", "guard"),
}


def marker_of(sentence: str, dimension: str, side: int) -> str:
    """The marker in a sentence: the longest one that stands there as whole words after "the"."""
    found = [p[side] for p in MARKERS[dimension] if re.search(rf"\b[Tt]he {p[side]}\b", sentence)]
    assert found, sentence
    return max(found, key=len)


def own(**changes) -> CounterfactualSet:
    """A minimal valid set, with some of its parts replaced."""
    parts = {
        "positive": ["he sat", "he ran"],
        "negative": ["she sat", "she ran"],
        "cells": ["sit", "run"],
        "neutral": ["it sat", "it stood", "it ran"],
        "neutral_cells": ["sit", "stand", "run"],
    }
    return CounterfactualSet(**(parts | changes))


# --- counts -----------------------------------------------------------------------------------------------------------


def test_counts_of_the_paper():
    assert tuple(GRID) == DIMENSIONS == ("gender", "race", "religion", "age")
    for stimuli in GRID.values():
        assert (stimuli.n_pairs, stimuli.n_neutral, len(stimuli.texts)) == (340, 680, 1360)
        kinds = Counter(cell.split("/")[0] for cell in stimuli.cells)
        assert kinds == {"profession": 44 * 5, "trait": 20 * 3, "activity": 20 * 3}
        assert len(set(stimuli.cells)) == 340
        assert Counter(stimuli.neutral_cells) == dict.fromkeys(stimuli.cells, 2)
    assert len({text for stimuli in GRID.values() for text in stimuli.texts}) == 4 * 680 + 680 == 3400
    assert len({stimuli.neutral for stimuli in GRID.values()}) == 1
    assert len({stimuli.cells for stimuli in GRID.values()}) == 1


def test_contents_are_distinct_and_share_16_professions_with_winobias():
    contents = {kind: {c.split("/")[1] for c in GRID["age"].cells if c.startswith(kind)} for kind in FRAMES}
    assert {kind: len(words) for kind, words in contents.items()} == {"profession": 44, "trait": 20, "activity": 20}
    assert MALE | FEMALE <= contents["profession"]
    assert not contents["profession"] & OTHER_WINOBIAS
    assert {kind: len(set(frames)) for kind, frames in FRAMES.items()} == {"profession": 5, "trait": 3, "activity": 3}


def test_stereotypes_are_of_gender_and_of_16_professions():
    gender = GRID["gender"]
    labelled = [(c, v) for c, v in zip(gender.neutral_cells, gender.stereotypes, strict=True) if v != -1]
    assert (len(labelled), len({cell for cell, _ in labelled})) == (160, 80)
    for value, professions in ((1, MALE), (0, FEMALE)):
        assert {cell.split("/")[1] for cell, v in labelled if v == value} == professions
    assert (len(MALE), len(FEMALE)) == (9, 7)
    assert (gender.positive_name, gender.negative_name) == ("male", "female")
    assert all(GRID[name].stereotypes == () for name in ("race", "religion", "age"))


# --- the sentences ----------------------------------------------------------------------------------------------------


def test_every_sentence_is_written_as_one():
    for text in {text for stimuli in GRID.values() for text in stimuli.texts}:
        assert re.fullmatch(r"[A-Z][A-Za-z ,]*[a-z]\.", text), text
        assert "  " not in text and " ," not in text
        assert not re.search(r"\b([Aa]n) (?![aeiou])|\b[Aa] (?=[aeiou])", text), text
        # Only what names a group has a capital inside the sentence.
        inside = set(re.findall(r"(?<=[a-z,] )[A-Z]\w*", text))
        assert inside <= {"White", "Black", "American", "Christian", "Muslim"}, text
        assert not re.search(r"\b(white|black|american|christian|muslim)\b", text), text
        # Heads of kinship and "person" alike: a context may not say which gender its subject has.
        assert not re.search(r"\b(he|she|him|his|her|hers|himself|herself|they|their)\b", text), text


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_marker_is_all_that_differs(dimension):
    stimuli = GRID[dimension]
    heads = ["person", "individual"] * 340
    neutral = {(c, head): text for c, head, text in zip(stimuli.neutral_cells, heads, stimuli.neutral, strict=True)}
    for one, other, cell in zip(stimuli.positive, stimuli.negative, stimuli.cells, strict=True):
        markers = marker_of(one, dimension, 0), marker_of(other, dimension, 1)
        assert markers in MARKERS[dimension]
        contexts = [
            re.sub(rf"\b([Tt]he) {marker}\b", r"\1 _", text)
            for marker, text in zip(
                (*markers, "person", "individual"),
                (one, other, neutral[cell, "person"], neutral[cell, "individual"]),
                strict=True,
            )
        ]
        assert len(set(contexts)) == 1 and contexts[0].count("_") == 1
        kind, content, frame = cell.split("/")
        template = FRAMES[kind][int(frame) - 1]
        article = "an " if content[0] in "aeiou" else "a "
        assert contexts[0] == template.format(marker="_", content=content, a_content=article + content)


def test_neutral_sentences_and_contexts_name_no_group():
    group_words = {word for pairs in MARKERS.values() for pair in pairs for text in pair for word in text.split()}
    group_words -= {"person"}
    for text in GRID["gender"].neutral:
        assert not group_words & set(re.findall(r"\w+", text)), text


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_rotation_is_balanced(dimension):
    """Every marker pair is used 42 or 43 times, and as often as any other, give or take one, in every frame."""
    stimuli = GRID[dimension]
    used = [marker_of(text, dimension, 0) for text in stimuli.positive]
    assert set(Counter(used).values()) == {42, 43}
    frames = {(cell.split("/")[0], cell.split("/")[2]) for cell in stimuli.cells}
    assert len(frames) == 11
    for kind, frame in frames:
        here = Counter(
            m for m, c in zip(used, stimuli.cells, strict=True) if (c.split("/")[0], c.split("/")[2]) == (kind, frame)
        )
        assert len(here) == 8 and max(here.values()) - min(here.values()) <= 1


def test_the_marker_stands_at_the_start_inside_and_at_the_end():
    """A causal model carries a marker from its token on, so no kind of context may have it at one place alone."""
    for frames in FRAMES.values():
        before = [len(frame.split("{marker}")[0].split()) for frame in frames]
        after = [len(frame.split("{marker}")[1].strip(".").split()) for frame in frames]
        assert min(before) == 1 and max(before) >= 4
        assert min(after) <= 1 and max(after) >= 3


# --- parts of the grid ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cells", [10, 17, 34, 40, 85, 170, 231, 339, 340])
def test_a_part_of_the_grid_keeps_its_proportions(cells):
    stimuli = load_counterfactual_sets(["religion"], cells=cells)["religion"]
    whole = dict(zip(GRID["religion"].cells, GRID["religion"].positive, strict=True))
    assert all(whole[c] == text for c, text in zip(stimuli.cells, stimuli.positive, strict=True))
    assert (stimuli.n_pairs, stimuli.n_neutral) == (cells, 2 * cells)
    kinds, frames = Counter(), Counter()
    for cell in stimuli.cells:
        kind, _, frame = cell.split("/")
        kinds[kind] += 1
        frames[kind, frame] += 1
    assert all(abs(kinds[kind] - cells * n / 340) < 1 for kind, n in (("profession", 220), ("trait", 60)))
    for kind, n_frames in (("profession", 5), ("trait", 3), ("activity", 3)):
        counts = [frames[kind, str(f + 1)] for f in range(n_frames)]
        assert max(counts) - min(counts) <= 1
    markers = Counter(marker_of(text, "religion", 0) for text in stimuli.positive)
    assert len(markers) == 8 and max(markers.values()) - min(markers.values()) <= 2


def test_parts_are_nested_equal_over_dimensions_and_in_the_order_of_the_grid():
    parts = [load_counterfactual_sets(cells=n) for n in (10, 11, 50, 51)]
    for smaller, larger in combinations(parts, 2):
        assert set(smaller["age"].cells) < set(larger["age"].cells)
    assert len({stimuli.cells for stimuli in parts[2].values()}) == 1
    order = {cell: i for i, cell in enumerate(GRID["age"].cells)}
    places = [order[cell] for cell in parts[2]["age"].cells]
    assert places == sorted(places)
    assert max(b - a for a, b in zip(places, places[1:], strict=False)) < 3 * 340 / 50
    assert load_counterfactual_sets(cells=340) == GRID


@pytest.mark.parametrize("cells", [9, 341, 0, -1, 20.0, True, "20"])
def test_a_part_that_the_grid_does_not_have(cells):
    with pytest.raises(ValueError, match=r"cells must be an int from 10 to 340, or None for all; got "):
        load_counterfactual_sets(cells=cells)


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        ("gender", r"write \['gender'\]"),
        ([], "at least one of gender, race, religion, age; got none"),
        (["gendre"], r"got 'gendre' \(did you mean 'gender'\?\)"),
        (["age", "age"], "'age' is there 2 times"),
    ],
)
def test_dimensions_that_do_not_exist(dimensions, message):
    with pytest.raises(ValueError, match=f"dimensions must .*{message}"):
        load_counterfactual_sets(dimensions)


def test_dimensions_come_in_the_order_asked():
    assert list(load_counterfactual_sets(["race", "gender"])) == ["race", "gender"]


# --- a set ------------------------------------------------------------------------------------------------------------


def test_rows_groups_and_labels():
    stimuli = own()
    assert stimuli.texts == ("he sat", "he ran", "she sat", "she ran", "it sat", "it stood", "it ran")
    assert stimuli.groups == [0, 1, 0, 1, 0, 2, 1]
    assert stimuli.labels == [1, 1, 0, 0]
    assert (stimuli.n_pairs, stimuli.n_neutral) == (2, 3)
    assert own(neutral=[], neutral_cells=[]).groups == [0, 1, 0, 1]


def test_it_is_exported_and_imports_neither_torch_nor_transformers():
    assert monitor.CounterfactualSet is CounterfactualSet
    assert monitor.load_counterfactual_sets is load_counterfactual_sets
    code = "import sys, monitor; monitor.load_counterfactual_sets(); print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positive": "he sat"}, "positive must be a list or tuple of str, got str"),
        ({"negative": None}, "negative must be a list or tuple of str, got NoneType"),
        ({"positive": ["he sat", 3]}, r"positive\[1\] must be text, got int 3"),
        ({"negative": ["she sat", " \u200b"]}, r"negative\[1\] must be text, got the blank"),
        ({"neutral": ["a", "b", "\ud800"]}, r"neutral\[2\] must be text, got half of a surrogate pair"),
        ({"cells": ["sit", 1]}, r"cells\[1\] must be text, got int 1"),
        ({"positive": [], "negative": [], "cells": []}, "positive must hold at least one text, got none"),
        ({"negative": ["she sat"]}, "negative must be as many as positive, 2; got 1"),
        ({"cells": ["sit"]}, "cells must be as many as positive, 2; got 1"),
        ({"neutral_cells": ["sit"]}, "neutral_cells must be as many as neutral, 3; got 1"),
        ({"stereotypes": [1, 0]}, "stereotypes must be one a neutral text, 3, or none; got 2"),
        ({"stereotypes": [1, 0, 2]}, "stereotypes must be 1 .*; got 2"),
        ({"stereotypes": [1, 0, True]}, "stereotypes must be 1 .*; got True"),
        ({"negative": ["she sat", "he  ran "]}, r"positive\[1\] and negative\[1\] are the same text, 'he ran'"),
        ({"neutral": ["it sat", "she ran", "it ran"]}, r"neutral\[1\] is a marked text too, 'she ran'"),
        ({"positive_name": " "}, "positive_name must be a name, got the blank"),
        ({"positive_name": "negative"}, "positive_name and negative_name must differ, both are 'negative'"),
    ],
)
def test_a_set_that_does_not_hold_together(changes, message):
    with pytest.raises(ValueError, match=message):
        own(**changes)


# --- files ------------------------------------------------------------------------------------------------------------


def lines(n: int = 10, **changes) -> list[dict]:
    """n good lines, the fourth with some keys replaced, or removed where the value is ...."""
    records = [
        {"cell": f"c{i}", "positive": f"he {i}", "negative": f"she {i}", "neutral": [f"it {i}", f"one {i}"]}
        for i in range(n)
    ]
    if changes:
        records[3] = {key: value for key, value in (records[3] | changes).items() if value is not ...}
    return records


def written(path, records: list) -> str:
    texts = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def strict():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("dimension", [None, "gender"])
def test_the_grid_comes_back_from_a_file(tmp_path, strict, dimension):
    path = tmp_path / "grid.jsonl"
    for stimuli in (GRID["gender"], GRID["age"]):
        stimuli.to_file(path, dimension)
        assert CounterfactualSet.from_file(path) == stimuli
        assert len(path.read_text(encoding="utf-8").splitlines()) == 340
        assert list(counterfactual_sets_from_file(path)) == [dimension or "grid"]


UNTIDY = {
    "several pairs a cell": {"cells": ["sit", "sit"]},
    "neutral texts before, between and of no pair": {
        "neutral": ["a", "b", "c", "d", "e"],
        "neutral_cells": ["run", "sit", "sit", "x", "run"],
        "stereotypes": [-1, 1, 0, -1, -1],
    },
    "no stereotype at all": {"stereotypes": [-1, -1, -1]},
    "no neutral text": {"neutral": [], "neutral_cells": []},
    "any character": {"positive": ['He said "a"\n\u2028b\t', "\u00e9te\u0301\\"], "positive_name": "日本"},
}


@pytest.mark.parametrize("changes", UNTIDY.values(), ids=UNTIDY)
def test_any_set_comes_back_from_a_file(tmp_path, changes):
    few = own(**changes)
    filler = [f"{i}" for i in range(10)]
    stimuli = dataclasses.replace(
        few,
        positive=[*few.positive, *(f"he {i}" for i in filler)],
        negative=[*few.negative, *(f"she {i}" for i in filler)],
        cells=[*few.cells, *filler],
    )
    path = tmp_path / "set.jsonl"
    stimuli.to_file(path)
    assert CounterfactualSet.from_file(path) == stimuli


def test_datasets_reads_and_writes_the_format(tmp_path, strict):
    datasets = pytest.importorskip("datasets")
    GRID["gender"].to_file(tmp_path / "a.jsonl", "gender")
    records = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text(encoding="utf-8").splitlines()]
    # Through a Dataset, lines that lack a key get null.
    records[0] |= {"stereotype": None}
    datasets.Dataset.from_list(records).to_json(tmp_path / "b.jsonl")
    again = CounterfactualSet.from_file(tmp_path / "b.jsonl")
    assert again.texts == GRID["gender"].texts and again.groups == GRID["gender"].groups


def test_several_dimensions_in_one_file(tmp_path, strict):
    for name, stimuli in GRID.items():
        stimuli.to_file(tmp_path / name, name)
    path = tmp_path / "all.jsonl"
    path.write_text("".join((tmp_path / name).read_text(encoding="utf-8") for name in ("race", "gender")))
    assert counterfactual_sets_from_file(path) == {name: GRID[name] for name in ("race", "gender")}
    assert CounterfactualSet.from_file(path, "gender") == GRID["gender"]
    with pytest.raises(ValueError, match="dimension must be chosen, .*all.jsonl holds 2: race, gender"):
        CounterfactualSet.from_file(path)
    with pytest.raises(ValueError, match=r"holds, race, gender; got 'gendre' \(did you mean 'gender'\?\)"):
        CounterfactualSet.from_file(path, dimension="gendre")


def test_what_a_line_may_leave_out(tmp_path, strict):
    records = lines()
    records[0] = {"cell": 7, "positive": "he", "negative": "she", "neutral": "it", "stereotype": "negative"}
    records[1] |= {"neutral": None, "positive_name": "men", "dimension": None}
    records += [{"cell": "c2", "neutral": ["it too"]}, ""]
    path = written(tmp_path / "mine.jsonl", records)
    stimuli = CounterfactualSet.from_file(path, dimension="mine")
    assert (stimuli.cells[0], stimuli.positive_name, stimuli.negative_name) == ("7", "men", "negative")
    assert stimuli.neutral[:2] == ("it", "it 2") and stimuli.neutral[-1] == "it too"
    assert stimuli.stereotypes == (0, *[-1] * 17)
    assert stimuli.groups[2 * 10 + 17] == stimuli.groups[2]


def test_a_byte_order_mark_and_windows_line_ends(tmp_path, strict):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, lines())).encode())
    assert CounterfactualSet.from_file(path).n_pairs == 10


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("{", r":4: expected a JSON object, got invalid JSON at column 2: Expecting property name"),
        ("[1]", r":4: expected a JSON object, got list: write one a line"),
        ('{"cell": "a", "cell": "b"}', r":4: expected a JSON object, .*: the key 'cell' is there twice: keep one"),
        ({"posititve": "x"}, r":4: posititve: expected one of cell, positive, .*did you mean 'positive'"),
        ({"xyz": 1}, r":4: xyz: expected one of .*, got 'xyz': remove it"),
        ({"cell": ...}, r":4: cell: expected the context's name, got none"),
        ({"cell": 1.5}, r":4: cell: expected text, got float 1.5"),
        ({"cell": True}, r":4: cell: expected text, got bool True"),
        ({"positive": 5}, r":4: positive: expected text, got int 5: correct it or remove the line"),
        ({"positive": "  "}, r":4: positive: expected text, got the blank '  '"),
        ({"negative": "\ud800"}, r":4: negative: expected text, got half of a surrogate pair"),
        ({"negative": ...}, r":4: negative: expected the counterpart of positive, got none: give it"),
        ({"positive": None}, r":4: positive: expected the counterpart of negative, got none"),
        ({"positive": ..., "negative": ..., "neutral": []}, r":4: positive: expected positive and negative, or"),
        ({"negative": "he  3"}, r":4: negative: expected a text that differs in its marker, got the text of positive"),
        ({"neutral": 3}, r":4: neutral: expected a text or a list of texts, got int: write one"),
        ({"neutral": ""}, r":4: neutral: expected text, got the blank ''"),
        ({"neutral": ["a", None]}, r":4: neutral\[1\]: expected text, got NoneType None"),
        ({"neutral": "she 7"}, r":4: neutral: expected a text without a marker, got negative of line 8, 'she 7'"),
        ({"stereotype": "male"}, r":4: stereotype: expected one of positive, negative, none, got 'male': write"),
        ({"stereotype": "negativ"}, r":4: stereotype: .*got 'negativ' \(did you mean 'negative'\?\)"),
        ({"dimension": "age"}, r":1: dimension: expected a dimension, as on line 4 \('age'\), got none here and on"),
        ({"dimension": " "}, r":4: dimension: expected text, got the blank"),
        ({"positive_name": "negative"}, r":4: negative_name: expected another name than the positive group's"),
    ],
)  # fmt: skip
def test_every_fault_of_a_file_has_its_line_and_says_what_to_do(tmp_path, fault, message):
    records = lines(**fault) if isinstance(fault, dict) else [*lines()[:3], fault, *lines(11)[4:]]
    with pytest.raises(ValueError, match=r"f.jsonl is not a usable counterfactual file; (?s:.*)f.jsonl" + message):
        CounterfactualSet.from_file(written(tmp_path / "f.jsonl", records))


def test_names_that_disagree(tmp_path):
    records = lines(positive_name="men")
    records[6]["positive_name"] = "man"
    message = ":7: positive_name: expected 'men', as on line 4, got 'man': write one of the two"
    with pytest.raises(ValueError, match=message):
        CounterfactualSet.from_file(written(tmp_path / "f.jsonl", records))
    # Of two dimensions each has its own.
    records = [line | {"dimension": "a"} for line in lines(positive_name="men")]
    records += [line | {"dimension": "b"} for line in lines(positive_name="man")]
    sets = counterfactual_sets_from_file(written(tmp_path / "f.jsonl", records))
    assert [sets[name].positive_name for name in "ab"] == ["men", "man"]


def test_all_faults_at_once_up_to_ten(tmp_path):
    records = lines(30)
    for i in range(12):
        records[2 * i]["negative"] = ""
    with pytest.raises(ValueError, match=r"; 12 error\(s\):\n") as caught:
        CounterfactualSet.from_file(written(tmp_path / "f.jsonl", records))
    shown = str(caught.value).splitlines()[1:]
    assert [int(re.search(r":(\d+):", line)[1]) for line in shown[:-1]] == list(range(1, 21, 2))
    assert shown[-1].strip() == "and 2 more"


@pytest.mark.parametrize("pairs_a_cell", [1, 3])
def test_too_few_cells_for_grouped_folds(tmp_path, pairs_a_cell):
    records = [
        {"cell": f"c{i}", "positive": f"he {i} {k}", "negative": f"she {i} {k}"}
        for i in range(9)
        for k in range(pairs_a_cell)
    ]
    message = "f.jsonl: cell: expected pairs in at least 10 cells, got 9: 5-fold grouped cross-validation .*needs more"
    with pytest.raises(ValueError, match=message):
        CounterfactualSet.from_file(written(tmp_path / "f.jsonl", records))
    many = [line | {"dimension": "many"} for line in lines()]
    few = [line | {"dimension": "few"} for line in records]
    with pytest.raises(ValueError, match="1 error.*\n.*expected pairs of 'few' in at least 10 cells, got 9"):
        CounterfactualSet.from_file(written(tmp_path / "f.jsonl", many + few), "many")


def test_no_file_an_empty_one_and_one_that_is_no_text(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be a file that exists, got '.*none.jsonl'"):
        CounterfactualSet.from_file(tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError):
        CounterfactualSet.from_file(tmp_path)
    with pytest.raises(ValueError, match="expected a JSON object a line, .*got no line"):
        CounterfactualSet.from_file(written(tmp_path / "e.jsonl", ["", ""]))
    (tmp_path / "l.jsonl").write_bytes(b"\n\n\xe9")
    with pytest.raises(ValueError, match="l.jsonl:3: expected UTF-8, got the byte 0xe9"):
        CounterfactualSet.from_file(tmp_path / "l.jsonl")
    with pytest.raises(ValueError, match="dimension must be a name or None, got the blank"):
        own().to_file(tmp_path / "x.jsonl", " ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cell": "c2", "positive": "he 2", "negative": "she  2"},
         ":4: positive: duplicate: line 3 is the same pair in this cell; it counts twice"),
        ({"positive": "he 2"}, ":4: positive: line 3 has it in the cell 'c2': folds cannot keep the two apart"),
        ({"positive": "she 2"}, ":4: positive: line 3 has it as negative: it carries both labels"),
        ({"neutral": ["it 2"]}, ":4: neutral: line 3 has it in the cell 'c2': folds cannot keep the two apart"),
        ({"neutral": ["it 2"], "cell": "c2"}, ":4: neutral: duplicate: line 3 has 'it 2' in this cell"),
        ({"neutral": ["a", "a"]}, ":4: neutral: duplicate: 'a' is there twice; it counts twice"),
        ({"neutral": [], "stereotype": "none"}, ":4: stereotype: it is of neutral texts, and the line has none"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("read", [CounterfactualSet.from_file, counterfactual_sets_from_file])
def test_what_is_doubtful_in_a_file_is_a_warning_where_it_is_read(tmp_path, changes, message, read):
    path = written(tmp_path / "f.jsonl", lines(11, **changes))
    with pytest.warns(UserWarning, match=rf"f.jsonl: 1 warning(?s:.*)f.jsonl{message}") as caught:
        read(path)
    assert [warning.filename for warning in caught] == [__file__]


# --- forget sets ------------------------------------------------------------------------------------------------------


def pairs(n: int, variants: int = 3, unchanged: tuple[int, ...] = ()) -> list[Pair]:
    def made(i: int) -> Pair:
        told = [(f"Who is X{k} of {i}?", f"Y{k}.") for k in range(variants)]
        if i in unchanged:
            told[-1] = (f"Who is Harry of {i}?", "Potter.")
        return Pair(f"forget-{i}", f"Who is Harry of {i}?", "Potter.", "forget", tuple(told))

    return [made(i) for i in range(n)]


def test_pairs_take_their_variants_in_turn_and_leave_out_the_unchanged():
    with pytest.warns(UserWarning, match="pairs: 2 of 14 left out, .*: forget-1, forget-6$") as caught:
        stimuli = counterfactual_from_pairs(pairs(14, unchanged=(1, 6)))
    assert caught[0].filename == __file__
    kept = [i for i in range(14) if i not in (1, 6)]
    assert stimuli.cells == tuple(f"forget-{i}" for i in kept)
    assert stimuli.positive == tuple(f"Who is Harry of {i}?\nAnswer: Potter." for i in kept)
    assert stimuli.negative == tuple(f"Who is X{j % 3} of {i}?\nAnswer: Y{j % 3}." for j, i in enumerate(kept))
    assert (stimuli.positive_name, stimuli.negative_name, stimuli.neutral) == ("original", "anonymised", ())


def test_the_bundled_concept_with_its_retain_pairs(strict, tmp_path):
    forget_set = load_forget_set(concept_path("harry_potter"))
    forget, retain = forget_set.split("forget"), forget_set.split("retain")
    stimuli = counterfactual_from_pairs(forget, retain)
    assert stimuli.n_pairs == len(forget) - len(set(forget_set.unchanged) & {p.id for p in forget})
    assert stimuli.n_neutral == len(retain)
    for i, pair in enumerate(forget_set.fragmentation_pairs()):
        question, answer = pair.anonymized[i % forget_set.n_variants]
        assert stimuli.positive[i] == f"{pair.question}\nAnswer: {pair.answer}"
        assert stimuli.negative[i] == f"{question}\nAnswer: {answer}"
    assert len(set(stimuli.groups)) == len(stimuli.cells) + len(retain)
    stimuli.to_file(tmp_path / "concept.jsonl")
    assert CounterfactualSet.from_file(tmp_path / "concept.jsonl") == stimuli


def test_the_bundled_concept_in_part_unanonymised():
    """Variants that anonymisation did not change are left out, as `Fragmentation` leaves them out."""
    forget = list(load_forget_set(concept_path("harry_potter")).split("forget"))
    for i in (0, 5):
        original = (forget[i].question, forget[i].answer)
        forget[i] = dataclasses.replace(forget[i], anonymized=(original, *forget[i].anonymized[1:]))
    with pytest.warns(UserWarning, match=f"2 of {len(forget)} left out, .*: {forget[0].id}, {forget[5].id}"):
        stimuli = counterfactual_from_pairs(forget)
    assert stimuli.cells == tuple(pair.id for i, pair in enumerate(forget) if i not in (0, 5))
    assert len(set(stimuli.negative)) == len(stimuli.negative)


def test_pairs_that_cannot_be_used():
    with pytest.raises(ValueError, match="pairs must have anonymised variants; none for forget-0, .* and 7 more"):
        counterfactual_from_pairs(pairs(12, variants=0))
    with pytest.raises(ValueError, match="pairs must be at least 10 that anonymisation changes, .*; got 9. Give more"):
        counterfactual_from_pairs(pairs(9))
    with pytest.raises(ValueError, match=r"got 9 \(1 of 10 left out, .*: forget-4\). Give more pairs"):
        counterfactual_from_pairs(pairs(10, unchanged=(4,)))
    with pytest.raises(ValueError, match=r"neutral\[0\] is a marked text too"):
        counterfactual_from_pairs(pairs(10), pairs(1))
