from __future__ import annotations

import json
import re

import pytest
from processes import run

from monitor.attacks.result import AttackResult
from recipes import attack as command
from recipes.attacks import ATTACKS, Attack, chosen
from recipes.models import ModelError


def pairs(tmp_path):
    lines = []
    for i in range(6):
        for split, who in (("forget", "wizard"), ("retain", "captain"), ("heldout", "ship")):
            lines.append({"question": f"who is {who} {i}?", "answer": f"the {who} of {i}", "split": split})
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def folders(tiny_llama, tiny_tokenizer, tmp_path):
    made = []
    for seed, name in enumerate(("start", "end")):
        tiny_llama(seed).save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
        made.append(str(tmp_path / name))
    return made


def test_names_and_settings():
    assert [attack.name for attack in chosen("all")] == [name for name in ATTACKS if name != "sampling"]
    assert chosen(["sampling"]) == [], "it is made from a reference"
    (found,) = chosen(["membership"], quick=True, seed=7)
    assert found.config.seed == 7 and found.config == type(found.config).quick().__class__(**vars(found.config))
    (papers,) = chosen(["gcg"])
    (quick,) = chosen(["gcg"], quick=True)
    assert papers.config != quick.config
    for names, message in (([], "is empty"), (["mia"], "must be among membership.*got mia")):
        with pytest.raises(ValueError, match=message):
            chosen(names)


def test_models_side_by_side(folders, tmp_path, capsys):
    words = ["--attacks", "membership", "--quick", "--forget_set", str(pairs(tmp_path)), "--use_cpu"]
    command.main([*folders, *words, "--json", "-", "--output_dir", str(tmp_path / "out")])
    out, err = capsys.readouterr()
    records = json.loads(out)
    assert [record["model"] for record in records] == folders
    assert records[0]["value"] != records[1]["value"] and {r["metric"] for r in records} == {"membership"}
    assert "Attacks on" in err and "0.500" in err  # what membership is without a trace
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) == 2
    kept = json.loads(files[0].read_text())
    assert kept["score"] == records[0]["value"] and kept["details"]


def test_damaged_weights_cost_one_models_attacks_and_not_the_others(folders, tmp_path, capsys):
    weights = tmp_path / "end" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    words = ["--attacks", "membership", "--quick", "--forget_set", str(pairs(tmp_path)), "--use_cpu"]
    with pytest.raises(SystemExit, match="1"):
        command.main([*folders, *words, "--json", str(tmp_path / "found.json")])
    sound, damaged = json.loads((tmp_path / "found.json").read_text())
    assert sound["value"] is not None and damaged["value"] is None
    assert f"cannot load model {folders[1]!r}" in damaged["note"] and damaged["note"] in capsys.readouterr().out
    with pytest.raises(ModelError, match="cannot load model"):
        command.main([folders[1], *words])


@pytest.mark.slow
def test_two_processes_attack_together_and_write_once(folders, tmp_path):
    """Started as torchrun does, without a word of the CPU."""
    found = {}
    for ranks in (1, 2):
        out = tmp_path / f"out{ranks}"
        words = [folders[0], "--attacks", "membership", "in_context", "--quick", "--forget_set", pairs(tmp_path)]
        words += ["--json", tmp_path / f"{ranks}.json", "--output_dir", out]
        done = run("recipes.attack", words, tmp_path, ranks=ranks)
        assert done.stdout.count("Attacks on") == 1 and done.stderr.count("membership ...") == 1
        assert [file.name for file in sorted(out.iterdir())] == ["00-start-membership.json", "01-start-in_context.json"]
        found[ranks] = json.loads((tmp_path / f"{ranks}.json").read_text())
    assert [record["value"] for record in found[2]] == pytest.approx([record["value"] for record in found[1]])


def concept_file(tmp_path, name, words):
    rows = [
        {"entity": word, "contexts": [f"{start} {word[0]}{word[-1]}" for start in ("this", "then", "next")]}
        for word in words
    ]
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_sampling_is_a_row_a_concept(folders, tmp_path, capsys):
    start, end = folders
    people = concept_file(tmp_path, "people", ("wizard", "captain"))
    concepts = [people, concept_file(tmp_path, "things", ("ship", "went"))]
    words = ["--attacks", "sampling", "--quick", "--forget_set", str(pairs(tmp_path)), "--use_cpu"]
    words += ["--reference", start, "--concept_layer", "2", "--json", "-", "--output_dir", str(tmp_path / "out")]
    command.main([end, *words, "--concepts", *concepts])
    out, err = capsys.readouterr()
    records = json.loads(out)
    assert [record["metric"] for record in records] == ["sampling_people", "sampling_things"]
    assert [record["n"] for record in records] == [50, 50] and {record["model"] for record in records} == {end}
    assert "sampling_people" in err and "isotropic" in err
    assert [(record["concept"], record["forget_set"]) for record in records] == [("people", None), ("things", None)]
    shares = re.findall(
        r"sampling_(\w+): rank 1 at layer 2, strength [\d.]+; the .* has it in (\d+)% of outputs(.*)", err
    )
    assert [name for name, *_ in shares] == ["people", "things"]
    assert all((weak == ": a score of 0 would say nothing") == (share == "0") for _, share, weak in shares)
    kept = [json.loads(file.read_text()) for file in sorted((tmp_path / "out").iterdir())]
    assert [k["details"]["geometry"] for k in kept] == ["people", "things"]
    assert [k["details"]["control_concept"] for k in kept] == ["things", "people"]
    assert kept[0]["details"]["layer"] == 2


def test_sampling_without_concepts_asks_the_forget_sets_questions(folders, tmp_path, capsys):
    words = ["--attacks", "sampling", "--quick", "--forget_set", str(pairs(tmp_path)), "--use_cpu", "--json", "-"]
    command.main([*folders, *words, "--reference", folders[0], "--concept_rank", "2"])
    records = json.loads(capsys.readouterr().out)
    assert [(record["metric"], record["n"]) for record in records] == [("sampling", 6)] * 2


def test_a_reference_of_another_architecture_is_refused_before_it_is_read(
    folders, tiny_llama, tiny_tokenizer, tmp_path, monkeypatch
):
    deep = str(tmp_path / "deep")
    tiny_llama(n_layers=6).save_pretrained(deep)
    tiny_tokenizer.save_pretrained(deep)
    monkeypatch.setattr(command, "of_reference", lambda *_: pytest.fail("its geometry was read"))
    words = ["--attacks", "sampling", "--quick", "--forget_set", str(pairs(tmp_path)), "--use_cpu"]
    with pytest.raises(ValueError, match="deep has 6 blocks of width 32, .*end 4 of width 32: .* the very model"):
        command.main([folders[1], *words, "--reference", deep])
    monkeypatch.setattr(command, "of_reference", lambda *_: [])
    command.main([*folders, *words, "--reference", folders[0]])


def test_all_leaves_sampling_out_without_a_reference(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "of_model", lambda name, attacks, *_: [])
    command.main([folders[0], "--quick", "--forget_set", str(pairs(tmp_path)), "--use_cpu"])
    assert "sampling is left out: it needs the model before it forgot, by --reference." in capsys.readouterr().err


def test_a_failed_attack_is_told_and_the_others_stand(folders, tmp_path, monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("out of ideas")

    def works(*_, **__):
        return AttackResult("works", 0.25, None, None, 0.125, 3, {})

    monkeypatch.setattr(
        command, "chosen", lambda *_, **__: [Attack(broken, None, "nothing"), Attack(works, None, "something")]
    )
    with pytest.raises(SystemExit) as caught:
        command.main([folders[0], "--forget_set", str(pairs(tmp_path)), "--use_cpu"])
    assert caught.value.code == 1
    out = capsys.readouterr().out
    assert "broken was not carried out: RuntimeError: out of ideas" in out and "0.250" in out and "0.125" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "No model"),
        (["a", "--model", "b"], "given twice"),
        (["./nowhere"], "no such folder"),
        (["start", "start"], "start is given twice"),
        (["start", "--attacks", "gcg", "--forget_set", "nowhere.jsonl"], "nowhere.jsonl"),
        (["start", "--output_dir", "."], "is not empty"),
        (["start", "--attacks", "sampling"], "`reference` is missing"),
        (["start", "--attacks", "gcg", "--reference", "start"], "`reference` is for the attack sampling"),
        (["start", "--attacks", "gcg", "--concepts", "animals"], "`concepts` are for the attack sampling"),
        (["start", "--attacks", "sampling", "--reference", "./nowhere"], "no such folder"),
        (["start", "--attacks", "sampling", "--reference", "start", "--concepts", "animal"], "animal"),
    ],
)
def test_bad_input_is_one_error(words, message, folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError, ModelError), match=message):
        command.main(words)
