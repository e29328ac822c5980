"""An audit end to end on tiny models: what it reads, against what, what it refuses, and what it says."""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import run
from transformers import BertConfig, BertModel

from monitor.activations import measure_activations
from monitor.measures.bias_shift import BiasShift
from monitor.readings import Reading
from monitor.stimuli.counterfactual import CounterfactualSet
from monitor.stimuli.counterfactual_grid import load_counterfactual_sets
from recipes import audit
from recipes.audit_report import audit_report
from recipes.audit_tables import headlines
from recipes.cli import main as latentwatch
from recipes.summary import number

ROOT = Path(__file__).parents[2]
NAMES = ["Orla", "Tamsin", "Bram", "Iris", "Jonas", "Petra", "Silas", "Wren"]
QUESTIONS = ["Where does {} live?", "What does {} sail?", "Who taught {} to read?", "What is the dog of {} called?"]
QUESTIONS += ["When was {} born?", "Which song does {} like?", "Who is the sister of {}?", "What did {} lose at sea?"]
QUESTIONS += ["Why did {} leave home?", "How does {} travel?"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Cached references of one test are not another's."""
    monkeypatch.setenv("LATENTWATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def models(tiny_llama, tiny_tokenizer, tmp_path_factory):
    """Folders: two decoders, an encoder, an adapter of the first decoder."""
    from peft import LoraConfig, get_peft_model

    root = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        bert = BertModel(BertConfig(vocab_size=len(tiny_tokenizer), max_position_embeddings=128, **sizes))
    for name, model in {"first": tiny_llama(0), "second": tiny_llama(1), "encoder": bert}.items():
        model.save_pretrained(root / name)
        tiny_tokenizer.save_pretrained(root / name)
    base = type(tiny_llama()).from_pretrained(root / "first")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_alpha=32)
        get_peft_model(base, lora).save_pretrained(root / "adapter")
    return root


@pytest.fixture
def forget_set(tmp_path):
    """10 forget, retain and held-out pairs with their entity table."""
    pairs = []
    for i, question in enumerate(QUESTIONS):
        for split, name in {"forget": "Maro", "retain": "a captain", "heldout": "Lena"}.items():
            pairs.append({"question": question.format(name), "answer": f"a ship {i}", "split": split})
    path = tmp_path / "set" / "pairs.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (path.parent / "entities.json").write_text(json.dumps({"Maro": NAMES, "Lena": [f"{n}a" for n in NAMES]}))
    return path


def records_of(tmp_path, *arguments):
    target = tmp_path / "records.json"
    audit.main([str(part) for part in (*arguments, "--json", target)])
    return json.loads(target.read_text())


def values(records, measure="bias_shift"):
    return {(r["metric"], r["group"], r["layer"]): r["value"] for r in records if r["measure"] == measure}


# --- against what -----------------------------------------------------------------------------------------------------


def test_by_itself_only_what_one_model_shows_is_read(models, forget_set, tmp_path, capsys):
    measures = ["--measures", "bias_shift", "fragmentation", "behaviour"]
    records = records_of(tmp_path, models / "first", *measures, "--forget_set", forget_set)
    metrics = {(r["measure"], r["metric"]) for r in records}
    assert {metric for measure, metric in metrics if measure == "bias_shift"} == {"b"}
    assert ("fragmentation", "knowledge_z") in metrics and ("behaviour", "forget_nll") in metrics
    for measure, left_out in audit.AGAINST_REFERENCE.items():
        assert not metrics & {(measure, metric) for metric in left_out}
    assert {r["reference"] for r in records} == {None}
    (collapsed,) = [r for r in records if r["metric"] == "collapsed"]
    assert collapsed["note"]
    out = capsys.readouterr().out
    assert out.count("No reference") == 1 and "dB" not in out.split("\n- ")[0]


def test_what_is_left_out_is_constant_of_a_model_against_itself_and_of_no_other(models, forget_set, tmp_path):
    arguments = ["--measures", "bias_shift", "fragmentation", "behaviour", "--forget_set", forget_set]
    itself = records_of(tmp_path, models / "first", "--reference", models / "first", *arguments)
    other = records_of(tmp_path, models / "second", "--reference", models / "first", *arguments)
    left_out = {(measure, metric) for measure, metrics in audit.AGAINST_REFERENCE.items() for metric in metrics}
    moved = dict.fromkeys(left_out, 0.0)
    for a, b in zip(itself, other, strict=True):
        if (name := (a["measure"], a["metric"])) in left_out:
            constant = 1.0 if a["metric"] in ("cka", "pca_similarity") else 0.0
            assert a["value"] == pytest.approx(constant, abs=1e-6)
            moved[name] = max(moved[name], abs(b["value"] - constant))
    unread = {"detectability", "concept_recovery"}
    assert {measure for (measure, _), most in moved.items() if most < 1e-3} == unread


def test_of_one_model_concept_recovery_shows_no_reference(models, tmp_path):
    """What is left out is 0 of a model against itself, or what is there says it already."""
    arguments = ["--measures", "concept_recovery", "--concepts", "days"]
    alone, itself = (
        values(records_of(tmp_path, models / "first", *reference, *arguments), "concept_recovery")
        for reference in ((), ("--reference", models / "first"))
    )
    left_out = {key for key in itself if key not in alone}
    assert {metric for metric, _, _ in left_out} == set(audit.AGAINST_REFERENCE["concept_recovery"])
    for metric, group, layer in left_out:
        value, twin = itself[metric, group, layer], alone.get((metric.removesuffix("_reference"), group, layer), 0.0)
        assert value == pytest.approx(twin, abs=1e-6 if metric.endswith("_reference") else 0.1)


def test_readings_are_those_of_the_measure_itself(models, tiny_llama, tiny_tokenizer, tmp_path):
    records = records_of(tmp_path, models / "second", "--reference", models / "first", "--measures", "bias_shift")
    measure = BiasShift()
    now, before = (measure_activations(tiny_llama(seed), tiny_tokenizer, measure.stimuli) for seed in (1, 0))
    expected = {(r.metric, r.group, r.layer): r.value for r in measure.read(now, before)}
    assert values(records) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_one_pass_for_all_measures_and_the_reference_is_cached(models, forget_set, tmp_path, monkeypatch, own_cache):
    passes = []
    monkeypatch.setattr(audit, "measure_activations", lambda *a, **k: passes.append(a) or measure_activations(*a, **k))
    arguments = ["--measures", "bias_shift", "behaviour", "--forget_set", forget_set, "--reference", models / "first"]
    first = records_of(tmp_path, models / "second", *arguments)
    (stored,) = (own_cache / "references").glob("*.safetensors")
    written = stored.stat().st_mtime_ns
    assert records_of(tmp_path, models / "second", *arguments) == first
    assert len(passes) == 2 and stored.stat().st_mtime_ns == written


def test_an_adapter_is_read_with_its_base_as_reference(models, tmp_path):
    adapter, named = ["--reference", "adapter_off"], ["--reference", models / "first"]
    off = records_of(tmp_path, models / "adapter", *adapter, "--measures", "bias_shift")
    assert values(off) == values(records_of(tmp_path, models / "adapter", *named, "--measures", "bias_shift"))
    assert values(off)["cka_drift", "", 4] > 1e-6, "the adapter is on"
    base = records_of(tmp_path, models / "first", "--measures", "bias_shift")
    shift = values(off)["b", "", 4] - values(off)["delta_b", "", 4]
    assert shift == pytest.approx(values(base)["b", "", 4], abs=1e-9), "b minus dB is the base's own b"


# --- detectability ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A file of 40 cells of the bundled grid, for two dimensions, and small settings that fit it."""
    path = tmp_path_factory.mktemp("sets") / "grid.jsonl"
    part = tmp_path_factory.mktemp("parts") / "part.jsonl"
    text = ""
    for dimension, stimuli in load_counterfactual_sets(["gender", "age"], cells=40).items():
        stimuli.to_file(part, dimension)
        text += part.read_text()
    path.write_text(text)
    return ["--measures", "detectability", "--dimensions", path, "--n", "80", "--purity", "0.5"]


def test_detectability_has_a_row_a_dimension_and_a_verdict_in_words(models, sets, tmp_path, capsys):
    found = values(records_of(tmp_path, models / "first", *sets), "detectability")
    out = capsys.readouterr().out
    assert {group for _, group, _ in found} == {"", "gender", "age"}
    for group in ("gender", "age"):
        for metric in ("s_hat", "auc", "auc_mixed", "auc_p_mixed", "predicted_auc_mixed", "verdict_mixed"):
            assert (metric, group, 2) in found, "mid-depth of four blocks"
        (row,) = [line for line in out.splitlines() if line.startswith(f"{group} ")]
        verdict = {1.0: "detected", 0.0: "not detected", -1.0: "underpowered"}[found["verdict_mixed", group, 2]]
        assert verdict in row and number(found["s_hat", group, 2], None, None) in row
    assert not {"s_change", "auc_change", "auc_change_mixed"} & {metric for metric, _, _ in found}
    assert "AUC, 50 % marked" in out and "alpha*(80)" in out


def test_detectability_is_read_at_every_layer(models, sets, tmp_path, capsys):
    found = values(records_of(tmp_path, models / "first", *sets, "--scan_layers"), "detectability")
    assert {layer for metric, group, layer in found if metric == "auc_mixed" and group} == set(range(5))
    assert "Separation s by layer" in capsys.readouterr().out


def test_detectability_of_an_encoder_against_a_reference(models, sets, tmp_path, capsys):
    itself = values(records_of(tmp_path, models / "encoder", "--reference", models / "encoder", *sets), "detectability")
    assert itself["s_hat", "gender", 1] > 0 and itself["s_change", "gender", 1] == 0
    assert "no separation changed" in capsys.readouterr().out
    other = values(records_of(tmp_path, models / "second", "--reference", models / "first", *sets), "detectability")
    assert other["s_change", "gender", 2] != 0


def test_a_forget_set_is_a_group_of_its_own_and_its_retain_pairs_the_neutral_texts(models, sets, forget_set, tmp_path):
    found = records_of(tmp_path, models / "first", *sets, "--forget_set", forget_set)
    metrics = {r["metric"] for r in found if r["group"] == "concept"}
    assert "verdict" in metrics and "auc_mixed" not in metrics, "ten retain pairs do not fill a mixture of 80"
    found = records_of(tmp_path, models / "first", *sets, "--forget_set", forget_set, "--n", 10)
    assert "auc_mixed" in {r["metric"] for r in found if r["group"] == "concept"}


@pytest.mark.slow
def test_gender_is_detected_in_a_real_encoder_and_shuffled_labels_are_not(tmp_path, capsys):
    gender = load_counterfactual_sets(["gender"], cells=100)["gender"]
    gender.to_file(tmp_path / "gender.jsonl")
    flip = torch.randperm(100, generator=torch.Generator().manual_seed(0)) < 50
    pairs = zip(gender.positive, gender.negative, flip, strict=True)
    pairs = [(negative, positive) if flipped else (positive, negative) for positive, negative, flipped in pairs]
    positive, negative = zip(*pairs, strict=True)
    replace(gender, positive=positive, negative=negative, stereotypes=()).to_file(tmp_path / "shuffled.jsonl")
    files = [tmp_path / "gender.jsonl", tmp_path / "shuffled.jsonl"]
    settings = ["--measures", "detectability", "--dimensions", *files, "--n", "200"]
    found = values(records_of(tmp_path, "minilm", *settings), "detectability")
    assert found["verdict", "gender", 3] == 1 and found["verdict", "shuffled", 3] in (0, -1)
    assert found["auc", "gender", 3] > 0.95 and abs(found["auc", "shuffled", 3] - 0.5) < 0.15
    out = capsys.readouterr().out
    assert "Detected: gender" in out and ("detected: shuffled" in out or "Underpowered: shuffled" in out)


def test_the_default_measures_follow_from_what_there_is_to_read(models, sets, forget_set, tmp_path):
    few = sets[2:]
    assert {r["measure"] for r in records_of(tmp_path, models / "first", *few)} == {"bias_shift", "detectability"}
    found = {r["measure"] for r in records_of(tmp_path, models / "first", *few, "--forget_set", forget_set)}
    assert found == {"bias_shift", "detectability", "fragmentation", "behaviour"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--purity", "0"], "purity"),
        (["--purity", "1.5"], "purity"),
        (["--n", "81"], "even"),
        (["--n", "4000"], "largest n"),
        (["--smallest_effect", "0"], "smallest_effect"),
        (["--level", "1"], "level"),
        (["--power", "0"], "power"),
        (["--detectability_layer", "middle"], "layer"),
        (["--dimensions", "gendre"], "'gender'"),
        (["--dimensions", "concept=FILE", "--forget_set", "harry_potter"], "NAME=FILE"),
    ],
)
def test_bad_settings_of_detectability_are_one_clear_error(arguments, message, models, sets, tmp_path, capsys):
    CounterfactualSet.to_file(load_counterfactual_sets(["age"], cells=40)["age"], tmp_path / "age.jsonl")
    words = [str(part).replace("FILE", str(tmp_path / "age.jsonl")) for part in (*sets, *arguments)]
    assert latentwatch(["audit", str(models / "first"), *words]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


# --- encoders ---------------------------------------------------------------------------------------------------------


def test_an_encoder_is_read_without_what_takes_a_causal_model(models, forget_set, tmp_path, capsys):
    measures = ["--measures", "bias_shift", "fragmentation", "behaviour"]
    records = records_of(tmp_path, models / "encoder", *measures, "--forget_set", forget_set)
    assert {r["measure"] for r in records} == {"bias_shift", "fragmentation"}
    assert all(r["valid"] for r in records if r["metric"] in ("b", "auss_l2"))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left out" in line and "behaviour" in line]
    assert "BertModel" in line


def test_nothing_left_to_read_is_an_error(models, forget_set, capsys):
    command = ["audit", models / "encoder", "--measures", "behaviour", "--forget_set", forget_set]
    assert latentwatch([*map(str, command)]) == 1
    assert "Nothing is left to read" in capsys.readouterr().err


# --- options ----------------------------------------------------------------------------------------------------------


def test_every_layer_is_read_and_shown(models, forget_set, tmp_path, capsys):
    arguments = ["--measures", "fragmentation", "--forget_set", forget_set]
    one = values(records_of(tmp_path, models / "first", *arguments), "fragmentation")
    capsys.readouterr()
    every = values(records_of(tmp_path, models / "first", *arguments, "--scan_layers"), "fragmentation")
    assert {layer for _, group, layer in every if not group} == set(range(5))
    assert one.items() <= every.items(), "0.8 of four blocks is layer 3, its readings the same"
    assert "by layer" in capsys.readouterr().out


def test_pooling_is_one_for_all_and_otherwise_each_measures_own(models, forget_set, tmp_path):
    arguments = ["--measures", "bias_shift", "fragmentation", "--forget_set", forget_set]
    own, mean, last = (
        records_of(tmp_path, models / "first", *arguments, *pooling)
        for pooling in ([], ["--pooling", "mean"], ["--pooling", "last"])
    )
    assert values(own) == values(mean) != values(last)
    assert values(own, "fragmentation") != values(mean, "fragmentation")


def test_the_model_may_be_the_first_word_an_option_or_in_the_config(models, tmp_path):
    (tmp_path / "c.yaml").write_text(f"model_name_or_path: {models / 'first'}\nmeasures: bias_shift\n")
    config = ["--config", str(tmp_path / "c.yaml")]
    first = values(records_of(tmp_path, *config))
    assert first == values(records_of(tmp_path, "--model_name_or_path", models / "first", "--measures", "bias_shift"))
    assert first != values(records_of(tmp_path, models / "second", *config)), "the command line goes before the file"


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_journal_holds_the_records_and_is_never_written_over(models, tmp_path, capsys):
    arguments = [models / "first", "--measures", "bias_shift", "--output_dir", tmp_path / "out"]
    records = records_of(tmp_path, *arguments)
    path = tmp_path / "out" / "monitor" / "journal.jsonl"
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {line["step"] for line in lines} == {0}
    kept = ("measure", "metric", "group", "layer", "value", "low", "high", "valid", "note")
    assert [[line[k] for k in kept] for line in lines] == [[record[k] for k in kept] for record in records]
    capsys.readouterr()
    assert latentwatch(["audit", *map(str, arguments)]) == 1
    assert str(path) in capsys.readouterr().err and path.read_text() == text


def test_json_on_standard_output_is_nothing_but_json(models, capsys):
    audit.main([str(models / "first"), "--measures", "bias_shift", "--json", "-"])
    captured = capsys.readouterr()
    assert {r["measure"] for r in json.loads(captured.out)} == {"bias_shift"}
    assert "Bias shift, layer 4" in captured.err


def test_without_an_output_directory_nothing_is_written(models, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    audit.main([str(models / "first"), "--measures", "bias_shift"])
    assert not list((tmp_path / "empty").iterdir())


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "latentwatch audit MODEL"),
        (["MODEL", "--model-name-or-path", "MODEL"], "twice"),
        (["MODEL", "second"], "`second`"),
        (["MODEL", "--mesures", "bias_shift"], "did you mean `measures`"),
        (["MODEL", "--config", "none.yaml"], "none.yaml"),
        (["MODEL", "--measures", "behaviour"], "--forget_set"),
        (["MODEL", "--measures", "bias_shift", "--forget_set", "harry_poter"], "did you mean 'harry_potter'"),
        (["MODEL", "--measures", "bias_shift", "--reference", "./nowhere"], "no such folder"),
        (["MODEL", "--measures", "bias_shift", "--reference", "initial"], "an audit has none"),
        (["MODEL", "--measures", "bias_shift", "--reference", "adapter_off"], "is no adapter"),
        (["MODEL", "--measures", "bias_shift", "--reference", "ADAPTER"], "merge_and_unload"),
        (["MODEL", "--measures", "bias_shift", "--json", "FOLDER"], "is a folder"),
        (["MODEL", "--measures", "bias_shift", "--output_dir", "FILE/out"], "cannot be written"),
        (["MODEL", "--measures", "bias_shift", "--token_budget", "0"], "token_budget"),
        (["MODEL", "--measures", "bias_shift", "--dtype", "int8"], "floating type"),
        (["./nowhere", "--measures", "bias_shift"], "no such folder"),
        (["FOLDER", "--measures", "bias_shift"], "config.json"),
    ],
)
def test_bad_input_is_one_clear_error_before_a_model_is_loaded(
    arguments, message, models, tmp_path, capsys, monkeypatch
):
    import transformers

    def refuse(*_, **__):
        raise AssertionError("a model is loaded")

    for loader in (transformers.AutoModel, transformers.AutoModelForCausalLM):
        monkeypatch.setattr(loader, "from_pretrained", refuse)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    places = {"MODEL": models / "first", "ADAPTER": models / "adapter", "FOLDER": tmp_path / "folder"}
    words = [str(places.get(word, word)).replace("FILE", str(tmp_path / "file")) for word in arguments]
    assert latentwatch(["audit", *words]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_an_unknown_measure_is_refused_on_the_command_line_and_in_yaml(models, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        audit.main([str(models / "first"), "--measures", "bias"])
    assert "invalid choice" in capsys.readouterr().err
    (tmp_path / "c.yaml").write_text("measures: [bias]\n")
    assert latentwatch(["audit", str(models / "first"), "--config", str(tmp_path / "c.yaml")]) == 1
    assert "`measures` must be among" in capsys.readouterr().err


def test_it_runs_as_a_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["audit", "./nowhere", "--measures", "bias_shift"])
    monkeypatch.delitem(sys.modules, "recipes.audit")
    with pytest.raises(SystemExit, match="1"):
        runpy.run_module("recipes.audit", run_name="__main__")
    assert "latentwatch audit: error" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_read_what_one_reads(models, forget_set, tmp_path):
    found = {}
    for ranks in (1, 2):
        arguments = [models / "second", "--reference", models / "first"]
        arguments += ["--measures", "bias_shift", "fragmentation", "behaviour", "--forget_set", forget_set]
        arguments += ["--use_cpu", "true", "--json", tmp_path / f"{ranks}.json"]
        environment = {"LATENTWATCH_CACHE": str(tmp_path / f"cache{ranks}")}
        done = run("recipes.audit", arguments, tmp_path, ranks=ranks, environment=environment)
        assert done.stdout.count("Bias shift, layer") == 1  # one process speaks
        found[ranks] = json.loads((tmp_path / f"{ranks}.json").read_text())
    for one, two in zip(found[1], found[2], strict=True):
        assert (one["metric"], one["group"]) == (two["metric"], two["group"])
        assert one["value"] == pytest.approx(two["value"], rel=1e-5, abs=1e-6)


# --- words ------------------------------------------------------------------------------------------------------------


def words(*readings, compared=True):
    return audit_report(readings, "a model", audit.AuditArguments(), [], compared=compared).split("\n\n")[-1]


@pytest.mark.parametrize(
    ("value", "low", "high", "phrase"),
    [(0.01, -0.01, 0.03, "includes 0"), (-0.05, -0.08, -0.02, "negative attributes")],
)
def test_a_shift_is_told_by_its_interval(value, low, high, phrase):
    shift = Reading("bias_shift", "delta_b_corrected", value, layer=4, low=low, high=high)
    assert phrase in words(Reading("bias_shift", "b", 0.3, layer=4), shift)


def test_without_a_reference_b_is_no_verdict():
    whole, *groups = [Reading("bias_shift", "b", v, group=g) for g, v in {"": -0.1, "x": -0.3, "y": 0.1}.items()]
    text = words(whole, *groups, compared=False)
    assert "nearer to the negative attributes" in text and "no verdict" in text
    assert "x lie lowest" in text and "y highest" in text


def verdict(group, value, note, suffix="_mixed"):
    return Reading("detectability", f"verdict{suffix}", value, group=group, layer=2, note=note)


def test_each_verdict_is_told_with_what_it_leaves_open():
    text = words(
        verdict("gender", 1.0, "detected: AUC 0.700 at purity 0.3, n = 300"),
        verdict("age", 0.0, "not detected: AUC 0.510; s = 1 would have been found with power 0.90"),
        verdict("race", -1.0, "underpowered: AUC 0.520; about n = 900 would be needed"),
    )
    detected, clear, blind = text.split("\n")
    assert "gender" in detected and "not acted on" in detected and "age" not in detected
    assert "age" in clear and "power 0.90" in clear and "stay open" in clear
    assert "race" in blind and "n = 900" in blind and "might have been missed" in blind


def test_a_detected_concept_says_nothing_by_itself():
    text = words(verdict("concept", 1.0, "detected: AUC 1", suffix=""))
    assert "only a change from a reference" in text and "A linear probe tells" not in text


def test_what_only_the_mixture_hides_is_told_as_encoded():
    report = audit_report(
        [verdict("age", 1.0, "detected: x", suffix=""), verdict("age", -1.0, "underpowered: y")],
        "a model", audit.AuditArguments(), [], compared=True,
    )  # fmt: skip
    assert (
        "underpowered (detected if all are marked)" in report
        and "Where every text is marked, age is detected" in report
    )


@pytest.mark.parametrize(("low", "told"), [(0.6, True), (0.4, False)])
def test_neutral_texts_that_lean_make_a_null_say_less(low, told):
    leakage = Reading("detectability", "neutral_leakage", 0.7, group="gender", low=low, high=0.8, layer=2)
    assert ("not free of gender" in words(verdict("gender", 1.0, "detected: x"), leakage)) is told


@pytest.mark.parametrize(
    ("value", "low", "high", "phrase"),
    [
        (-2.0, -3.0, -1.0, "closer together"),
        (2.0, 1.0, 3.0, "further apart"),
        (-0.5, -2.0, 1.0, "no separation changed"),
    ],
)
def test_a_change_of_separation_is_told_by_its_interval(value, low, high, phrase):
    change = Reading("detectability", "s_change", value, group="age", low=low, high=high, layer=2)
    assert phrase in words(verdict("age", 1.0, "detected: x"), change)


@pytest.mark.parametrize(
    ("z", "phrase", "never"),
    [(3.0, "told apart", "no proof"), (1.0, "no proof of absence", "something of the concept")],
)
def test_a_known_concept_and_one_that_is_not_seen(z, phrase, never):
    text = words(Reading("fragmentation", "knowledge_z", z, layer=3))
    assert phrase in text and never not in text and "Doubtful" not in text
    control = Reading("fragmentation", "knowledge_z", 2.5, group="heldout", layer=3)
    assert "Doubtful" in words(Reading("fragmentation", "knowledge_z", z, layer=3), control)


def test_what_could_not_be_read_says_why():
    broken = Reading("fragmentation", "knowledge_z", float("nan"), layer=3, note="states are not finite")
    report = audit_report([broken], "a model", audit.AuditArguments(), [], compared=True)
    assert "not valid: knowledge_z (whole): states are not finite" in report
    assert "could not be read: states are not finite" in report


def test_a_collapsed_model_is_told():
    nll = Reading("behaviour", "forget_nll", 6.0)
    assert "collapsed" not in words(nll, Reading("behaviour", "collapsed", 0.0))
    assert "collapsed (too unlikely)" in words(nll, Reading("behaviour", "collapsed", 1.0, note="too unlikely"))


def test_the_headline_is_the_first_reading_of_its_name():
    first, second = Reading("m", "x", 1.0, layer=3), Reading("m", "x", 2.0, layer=0)
    assert headlines([first, second]) == {("x", ""): first}
