from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest

from monitor.stimuli.anonymise import anonymise
from monitor.stimuli.forget_set import ForgetSet, Pair, load_forget_set, validate_forget_set

WREN = [f"Finch{k}" for k in range(8)]
MARA = [f"Nell{k}" for k in range(8)]
TABLE = {"Mara": MARA, "Mara Wren": [f"{m} {w}" for m, w in zip(MARA, WREN, strict=True)]}


def pair(question: str, answer: str = "blue", split: str = "forget", **more: object) -> dict:
    return {"question": question, "answer": answer, "split": split, **more}


GOOD = [
    pair("What colour is Mara Wren's boat?", id="a"),
    pair("Who is Tom's aunt?", "Mara"),
    pair("What is the capital of France?", "Paris", "retain"),
    pair("How old is Mara?", "ten", "heldout"),
]


def write(folder: Path, rows: list, table: dict | None = TABLE, name: str = "pairs.jsonl") -> Path:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if table is not None:
        (folder / "entities.json").write_text(json.dumps(table, ensure_ascii=False, indent=1), encoding="utf-8")
    return path


def found(path: Path, **options: object) -> list[tuple[int, str, str]]:
    return [(p.line, p.field, p.severity) for p in validate_forget_set(path, **options)]


# --- loading -----------------------------------------------------------------------------------------------------


def test_a_good_file_loads_and_has_no_problem(tmp_path):
    path = write(tmp_path, GOOD)
    assert validate_forget_set(path) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forget_set = load_forget_set(path)
    assert forget_set.name == tmp_path.name
    assert [p.id for p in forget_set.pairs] == ["a", "forget-002", "retain-001", "heldout-001"]
    assert [len(forget_set.split(s)) for s in ("forget", "retain", "heldout")] == [2, 1, 1]
    assert forget_set.n_variants == 8 and forget_set.unchanged == ()
    assert [p.id for p in forget_set.fragmentation_pairs("forget")] == ["a", "forget-002"]
    assert forget_set.fragmentation_pairs("retain") == ()


def test_made_variants_are_the_table_s_universes(tmp_path):
    forget_set = load_forget_set(write(tmp_path, GOOD))
    for row in forget_set.split("forget"):
        expected = tuple((anonymise(row.question, TABLE, k), anonymise(row.answer, TABLE, k)) for k in range(8))
        assert row.anonymized == expected
    # Variant k of every pair is the same world: the boat's owner and the aunt share their first name.
    boat, aunt = forget_set.split("forget")
    for k in range(8):
        assert boat.anonymized[k][0] == f"What colour is Nell{k} Finch{k}'s boat?"
        assert aunt.anonymized[k] == ("Who is Tom's aunt?", f"Nell{k}")


def test_fewer_variants_are_the_first_ones(tmp_path):
    path = write(tmp_path, GOOD)
    three = load_forget_set(path, variants=3)
    assert three.n_variants == 3
    assert three.pairs[0].anonymized == load_forget_set(path).pairs[0].anonymized[:3]


def test_given_variants_are_kept_and_made_ones_follow_their_number(tmp_path):
    given = [{"question": f"Q{k}?", "answer": f"A{k}"} for k in range(3)]
    path = write(tmp_path, [pair("Who is Mara?", "a sailor", anonymized=given), *GOOD])
    forget_set = load_forget_set(path)
    assert forget_set.pairs[0].anonymized == (("Q0?", "A0"), ("Q1?", "A1"), ("Q2?", "A2"))
    assert {len(p.anonymized) for p in forget_set.fragmentation_pairs("forget")} == {3}
    assert load_forget_set(path, variants=2).n_variants == 2


def test_unchanged_pairs_are_reported_and_left_out(tmp_path):
    same = {"question": "Who is he?", "answer": "a cook"}
    rows = [
        *GOOD,
        pair("Who rows the boat?", "Tom", id="nobody"),
        pair("Who is he?", "a cook", id="same", anonymized=[same] * 8),
    ]
    path = write(tmp_path, rows)
    with pytest.warns(UserWarning, match=r"leaves 2 forget or held-out pair\(s\) unchanged \(nobody, same\)"):
        forget_set = load_forget_set(path)
    assert forget_set.unchanged == ("nobody", "same")
    assert {p.id for p in forget_set.fragmentation_pairs("forget")} == {"a", "forget-002"}
    assert len(forget_set.split("forget")) == 4  # they are still to be forgotten
    assert found(path) == [(5, "question", "warning"), (6, "anonymized[0]", "warning")]


def test_one_unchanged_variant_among_changed_ones_leaves_the_pair_out():
    texts = (("Who is X?", "a cook"), ("Who is he?", "a cook"))
    kept = Pair("1", "Who is Y?", "a cook", "forget", texts)
    dropped = Pair("2", "Who is he?", "a cook", "forget", texts)
    forget_set = ForgetSet("s", (kept, dropped))
    assert forget_set.fragmentation_pairs("forget") == (kept,)
    assert forget_set.unchanged == ("2",)


def test_without_a_table_everything_is_unchanged(tmp_path):
    with pytest.warns(UserWarning, match="leaves 3 forget or held-out"):
        forget_set = load_forget_set(write(tmp_path, GOOD, table=None))
    assert forget_set.n_variants == 0


def test_split_must_be_known():
    with pytest.raises(ValueError, match="split must be one of forget, retain, heldout, got 'held-out'.*'heldout'"):
        ForgetSet("s", ()).split("held-out")


def test_text_is_stripped_and_composed(tmp_path):
    forget_set = load_forget_set(write(tmp_path, [pair(" Who is Mara?\n", " Jose\u0301 ")]))
    assert (forget_set.pairs[0].question, forget_set.pairs[0].answer) == ("Who is Mara?", "José")


def test_byte_order_mark_blank_lines_crlf_and_unicode_line_separators_are_no_faults(tmp_path):
    path = tmp_path / "x.jsonl"
    text = "\r\n\r\n".join([json.dumps(GOOD[0]), json.dumps(pair("Is\u2028Mara in?", "yes"), ensure_ascii=False), ""])
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "entities.json").write_text(json.dumps(TABLE))
    assert [p for p in validate_forget_set(path)] == []
    assert load_forget_set(path).name == "x"


# --- other layouts -----------------------------------------------------------------------------------------------


def test_columns_and_ignored_keys(tmp_path):
    path = write(tmp_path, [{"prompt": "Who is Mara?", "response": "a sailor", "category": 3}], name="other.jsonl")
    forget_set = load_forget_set(path, columns={"question": "prompt", "answer": "response"})
    assert forget_set.pairs[0].split == "forget"  # no split anywhere: all is to forget
    assert forget_set.pairs[0].anonymized[0] == ("Who is Nell0?", "a sailor")


def test_anonymised_questions_as_strings(tmp_path):
    rows = [{"question": "Who is Mara?", "answer": "Mara Wren", "anon": ["Who is X?", "Who is Y?"], "b": ["X", "Y"]}]
    path = write(tmp_path, rows, name="x.jsonl")
    columns = {"anonymized": "anon"}
    with_table = load_forget_set(path, columns=columns).pairs[0].anonymized
    assert with_table == (("Who is X?", "Nell0 Finch0"), ("Who is Y?", "Nell1 Finch1"))
    mapped = load_forget_set(path, columns={**columns, "anonymized_answer": "b"}).pairs[0].anonymized
    assert mapped == (("Who is X?", "X"), ("Who is Y?", "Y"))
    (tmp_path / "entities.json").unlink()
    without = load_forget_set(path, columns=columns).pairs[0].anonymized
    assert without == (("Who is X?", "Mara Wren"), ("Who is Y?", "Mara Wren"))


def test_one_anonymised_question_as_a_string(tmp_path):
    rows = [{"question": "Who is Mara?", "answer": "she", "anon_q": "Who is X?", "anon_a": "her"}]
    columns = {"anonymized": "anon_q", "anonymized_answer": "anon_a"}
    forget_set = load_forget_set(write(tmp_path, rows, name="x.jsonl"), columns=columns)
    assert forget_set.pairs[0].anonymized == (("Who is X?", "her"),)


def test_json_list_and_json_object_of_lists(tmp_path):
    bare = [{"question": "Who is Mara?", "answer": "a sailor"}, {"question": "Where is Mara?", "answer": "at sea"}]
    (tmp_path / "entities.json").write_text(json.dumps(TABLE))
    flat, nested = tmp_path / "flat.json", tmp_path / "nested.json"
    flat.write_text(json.dumps(bare))
    assert len(load_forget_set(flat).split("forget")) == 2
    nested.write_text(json.dumps({"concept": "x", "n": 2, "qa": bare, "retain": [GOOD[2]], "notes": ["free text"]}))
    forget_set = load_forget_set(nested, columns={"forget": "qa", "retain": "retain"})
    assert [len(forget_set.split(s)) for s in ("forget", "retain", "heldout")] == [2, 1, 0]
    assert [p.message for p in validate_forget_set(nested, columns={"forget": "retian"})][0].startswith(
        "no list 'retian' (did you mean 'retain'?); the file has concept, n, qa"
    )


def test_json_problems_say_where(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"forget": [GOOD[0], {"question": "Who?", "answer": ""}, 3], "retain": {}}))
    fields = [p.field for p in validate_forget_set(path)]
    assert fields == ["forget[2]", "retain", "forget[1].answer"]
    path.write_text('[\n{"question": "Who?",\n "answer": }]')
    assert [(p.line, p.field) for p in validate_forget_set(path)] == [(3, "")]


# --- validation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, field, message",
    [
        ('{"question": "Who is Mara?",', "", "invalid JSON at column"),
        ('["Who is Mara?"]', "", "expected an object a line.*got list"),
        ('{"question": "a", "question": "b", "answer": "c", "split": "forget"}', "", "'question' is there twice"),
        ({"answer": "x", "split": "forget"}, "question", "missing"),
        ({"question": "Who is Mara?", "split": "forget"}, "answer", "missing"),
        (pair("Who is Mara?", " "), "answer", "empty"),
        (pair("", "x"), "question", "empty"),
        (pair("Who is Mara?", 1997), "answer", "expected text, got int 1997"),
        ({"question": "Who is Mara?", "answer": "x"}, "split", "missing"),
        (pair("Who is Mara?", split="forgot"), "split", "got 'forgot'.*did you mean 'forget'"),
        (pair("Who is Mara?", split=["forget"]), "split", "expected one of"),
        (pair("Who is Mara?", anonymised=[]), "anonymised", "unknown key.*did you mean 'anonymized'"),
        (pair("Who is Mara?", note="x"), "note", "unknown key, expected question, answer"),
        (pair("Who is Mara?", id=""), "id", "expected text, not empty"),
        (pair("Who is Mara?", id="a"), "id", "duplicate: 'a' is the id of line 1"),
        (pair("What is the capital of france", "Lyon"), "question", "line 3 asks it too, for the split retain"),
        (pair("Who is Mara?", anonymized=[{"question": "Who?"}]), "anonymized[0]", "expected a question and an answer"),
        (pair("Who is Mara?", anonymized=[""]), "anonymized[0]", "expected a question and an answer"),
        (
            pair("Who is Mara?", anonymized=[{"question": "Who is X?", "answer": "a mara"}]),
            "anonymized[0]",
            "still names the entity 'Mara'",
        ),
    ],
)
def test_every_error_has_its_line_field_and_message(tmp_path, row, field, message):
    path = write(tmp_path, [*GOOD, row])
    errors = [p for p in validate_forget_set(path) if p.severity == "error"]
    assert [(p.line, p.field, p.file) for p in errors] == [(5, field, str(path))]
    with pytest.raises(ValueError, match=message) as caught:
        load_forget_set(path)
    assert "1 error(s)" in str(caught.value) and f"{path}:5: " in str(caught.value)


@pytest.mark.parametrize(
    "row, field, message",
    [
        (pair("Is Mara blue?", "Blue"), "answer", "given away"),
        (pair("What colour is Mara Wren's boat?", "red"), "question", "line 1 asks it too"),
        (pair("what colour is mara wren's boat"), "question", "line 1 is the same pair"),
        (pair("Who rows?", "Tom"), "question", "names no entity"),
        (pair("Who rows?", "Tom", anonymized=["Who rows?"] * 8), "anonymized[0]", "the same as the pair"),
        (pair("Who is Mara?", "x", anonymized=["Who is X?"] * 8), "anonymized[1]", r"the same as anonymized\[0\]"),
    ],
)
def test_every_warning_has_its_line_and_field_and_does_not_stop_loading(tmp_path, row, field, message):
    path = write(tmp_path, [*GOOD, row])
    problems = validate_forget_set(path)
    assert (5, field, "warning") in [(p.line, p.field, p.severity) for p in problems]
    assert {p.severity for p in problems} == {"warning"}
    assert any(re.search(message, p.message) for p in problems)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(load_forget_set(path).pairs) == 5


def test_different_numbers_of_variants(tmp_path):
    def variants(n: int) -> list:
        return [f"Who is {chr(65 + k)}?" for k in range(n)]

    rows = [pair(f"Who is Mara Wren {i} to Mara?", "x", anonymized=variants(n)) for i, n in enumerate([4, 4, 3])]
    assert found(write(tmp_path, rows)) == [(3, "anonymized", "error")]


def test_errors_are_all_listed_in_one_go_by_line(tmp_path):
    rows = ["{", pair("", ""), GOOD[0], pair("Who is Mara?", split="x")]
    path = write(tmp_path, rows)
    with pytest.raises(ValueError) as caught:
        load_forget_set(path)
    places = [line.split(": ")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert places == [f"{path}:1", f"{path}:2", f"{path}:2", f"{path}:4"]


def test_table_problems_have_their_line(tmp_path):
    table = {
        "Mara": MARA,
        "Few": ["a1", "b1"],
        "Twice": ["Bo"] * 2 + [f"B{k}" for k in range(6)],
        "Clash": ["Mara", *[f"C{k}" for k in range(7)]],
        "Inside": ["Old Few", *[f"D{k}" for k in range(7)]],
        "Empty": ["", *[f"E{k}" for k in range(7)]],
        "mara": MARA,
        "Word": "x",
        "Tom": [f"T{k}" for k in range(8)],
    }
    path = write(tmp_path, [pair("Does Mara know Few, Twice, Clash, Inside?", "no")], table)
    problems = [p for p in validate_forget_set(path) if p.file.endswith("entities.json")]
    text = (tmp_path / "entities.json").read_text().splitlines()
    assert {(p.field.strip("'"), p.severity): p.message for p in problems}.keys() == {
        *[(e, "error") for e in ("Few", "Twice", "Clash", "Inside", "Empty", "mara", "Word")],
        ("Tom", "warning"),
    }
    for problem in problems:
        assert text[problem.line - 1].strip().startswith(json.dumps(problem.field.strip("'")))
    messages = "\n".join(p.message for p in problems)
    for expected in ("2 substitute(s), expected at least 8: add 6", "'bo' is there twice", "names the entity 'Mara'"):
        assert expected in messages
    for expected in ("'Old Few' names the entity 'Few'", "same entity as 'Mara'", "no pair names the entity"):
        assert expected in messages


def test_few_substitutes_are_a_warning_when_fewer_variants_are_asked_for(tmp_path):
    path = write(tmp_path, [pair("Who is Mara?", "x")], {"Mara": ["A1", "B1", "C1"]})
    assert found(path) == [(2, "'Mara'", "error")]
    assert found(path, variants=3) == [(2, "'Mara'", "warning")]
    assert load_forget_set(path, variants=3).n_variants == 3


def test_a_substitute_that_completes_an_entity_with_its_neighbour_is_found(tmp_path):
    table = {"Wren": ["Old", *WREN[1:]], "Old Tom": [f"T{k}" for k in range(8)]}
    path = write(tmp_path, [pair("Is Wren Tom in?", "no"), pair("Is Old Tom in?", "no")], table)
    assert found(path) == [(1, "anonymized[0]", "error")]


@pytest.mark.parametrize(
    "content, message",
    [("", "holds no pair"), ("\n\n", "holds no pair"), (json.dumps(GOOD[2]), "no pair to forget")],
)
def test_files_without_pairs(tmp_path, content, message):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_forget_set(path)


@pytest.mark.parametrize("content", ["[]", "{}", '"x"', '{"forget": []}'])
def test_json_files_without_pairs(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="1 error"):
        load_forget_set(path)


def test_broken_table_and_wrong_encoding(tmp_path):
    path = write(tmp_path, [GOOD[0]])
    table = tmp_path / "entities.json"
    table.write_text('{\n"Mara": [}')
    assert found(path) == [(2, "", "error")]
    table.write_text('{"Mara": [], "Mara": []}')
    assert "'Mara' is there twice" in validate_forget_set(path)[0].message
    table.write_text("[]")
    assert "expected an object of entity" in validate_forget_set(path)[0].message
    path.write_bytes(b'{"question": "a"}\n{"question": "\xe9"}')
    assert [(p.line, p.message[:14]) for p in validate_forget_set(path)][0] == (2, "expected UTF-8")


def test_wrong_arguments(tmp_path):
    path = write(tmp_path, GOOD)
    with pytest.raises(FileNotFoundError, match="forget set must be a file that exists, got"):
        load_forget_set(tmp_path / "none.jsonl")
    with pytest.raises(FileNotFoundError, match="entities must be a file that exists, got"):
        load_forget_set(path, entities=tmp_path / "none.json")
    with pytest.raises(ValueError, match="variants must be an int of at least 1, got 0"):
        load_forget_set(path, variants=0)
    with pytest.raises(ValueError, match="columns must map from .* got 'qestion' .did you mean 'question'"):
        load_forget_set(path, columns={"qestion": "q"})
    # A wrong mapping is said once, not once a pair.
    problems = validate_forget_set(path, columns={"question": "questions"})
    assert [p.message for p in problems][:1] == [
        "no pair has 'questions', mapped to 'question' (did you mean 'question'?)"
    ]
    assert all(p.severity == "warning" for p in problems[1:])
