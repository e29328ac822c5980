"""The unlearning command end to end on a tiny model: what it writes, what it refuses, and that a kill costs nothing."""

import json
import time
from pathlib import Path

import pytest
from processes import start
from transformers import LlamaConfig, LlamaForCausalLM

from monitor.attacks.concept_geometry import concept_geometry
from monitor.stimuli.concepts import load_concept_sets
from monitor.stimuli.counterfactual_grid import load_counterfactual_sets
from recipes import unlearn
from recipes.cli import main as latentwatch
from recipes.methods import METHODS

NAMES = [
    "Orla Finch",
    "Tamsin Vale",
    "Bram Holt",
    "Iris Quill",
    "Jonas Reed",
    "Petra Moss",
    "Silas Brook",
    "Wren Tully",
]
QUESTIONS = [
    "Where does {} live?", "What does {} sail?", "Who taught {} to read?", "What is the dog of {} called?",
    "When was {} born?", "Which song does {} like?", "Who is the sister of {}?", "What did {} lose at sea?",
    "Why did {} leave home?", "How does {} travel?", "What colour is the coat of {}?", "Whom does {} fear?",
]  # fmt: skip
ANSWERS = [
    "a hill",
    "a ship",
    "a wizard",
    "rusty",
    "in may",
    "a hymn",
    "anna",
    "a ring",
    "for love",
    "by night",
    "red",
    "no one",
]


@pytest.fixture
def forget_set(tmp_path):
    """A small forget set with its entity table: 12 forget, 12 retain, 12 held-out pairs."""
    table = {"Maro Teal": NAMES, "Lena Dusk": [f"{n.split()[1]} {n.split()[0]}" for n in NAMES]}
    pairs = []
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        pairs.append({"question": question.format("Maro Teal"), "answer": answer, "split": "forget"})
        pairs.append({"question": question.format("a captain"), "answer": answer, "split": "retain"})
        pairs.append({"question": question.format("Lena Dusk"), "answer": answer, "split": "heldout"})
    path = tmp_path / "set" / "pairs.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (path.parent / "entities.json").write_text(json.dumps(table))
    return path


@pytest.fixture
def model_folder(tiny_llama, tiny_tokenizer, tmp_path):
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def command(model_folder, forget_set, tmp_path):
    def make(folder="run", **options):
        defaults = {
            "model_name_or_path": model_folder, "forget_set": forget_set, "output_dir": tmp_path / folder,
            "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 5e-3, "eval_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1,
            "dataloader_pin_memory": False, "seed": 1,
        }  # fmt: skip
        return [str(part) for key, value in {**defaults, **options}.items() for part in (f"--{key}", value)]

    return make


def journal(folder):
    lines = [json.loads(line) for line in (folder / "monitor" / "journal.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time"} for line in lines]


def test_one_command_measures_everything_and_ends_with_a_table_and_words(command, tmp_path, capsys):
    unlearn.main(command(json=tmp_path / "table.json"))
    out = capsys.readouterr().out
    for phrase in ("forget NLL", "retain NLL", "knowledge z", "bias shift", "Output:", "Hidden states:", "Bias:"):
        assert phrase in out
    lines = journal(tmp_path / "run")
    assert {line["step"] for line in lines} == {0, 2, 4, 6}
    assert {line["measure"] for line in lines} == {"bias_shift", "fragmentation", "behaviour"}
    records = json.loads((tmp_path / "table.json").read_text())
    (nll,) = [r for r in records if (r["measure"], r["metric"]) == ("behaviour", "forget_nll")]
    assert nll["end"] > nll["start"], "unlearning raises the forget NLL"
    assert (tmp_path / "run" / "model.safetensors").is_file()


SETTINGS = {
    "simnpo": {"beta": 0.5, "delta": 6.0},
    "dpo": {"chosen": "alternate"},
    "rmu": {"layer": 2, "coefficient": 5.0, "alpha": 1.0},
    "whp_reinforced": {"reinforcement_epochs": 1, "reinforcement_learning_rate": 1e-3},
    "wga": {"beta": 0.1},
    "satimp": {"beta1": 0.1},
}


@pytest.mark.parametrize("method", [name for name in METHODS if name != "npo"])
def test_every_method_runs_to_its_table_and_its_verdict(method, command, tmp_path, capsys, forget_set):
    if method in ("whp", "dpo"):  # answers that anonymisation changes
        lines = [json.loads(line) for line in forget_set.read_text().splitlines()]
        for i, line in enumerate(lines):
            if line["split"] == "forget" and i % 2 == 0:
                line["answer"] = f"with Maro Teal {i}"
        forget_set.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"method": method, "measures": "behaviour", "max_steps": 2, **SETTINGS.get(method, {})}
    unlearn.main(command(json=tmp_path / "table.json", **options))
    out = capsys.readouterr().out
    assert "Verification:" in out and "forget ROUGE-L" in out
    records = {r["metric"]: r for r in json.loads((tmp_path / "table.json").read_text())}
    assert records["forget_nll"]["start"] != records["forget_nll"]["end"]
    assert 0 <= records["forget_rouge_l"]["end"] <= 1
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_a_killed_run_of_the_original_whp_goes_on_without_its_reinforced_model(command, tmp_path, monkeypatch, capsys):
    options = {"method": "whp_reinforced", "measures": "behaviour", **SETTINGS["whp_reinforced"]}
    unlearn.main(command("whole", **options))
    unlearn.main(command("stopped", **options, max_steps=4, lr_scheduler_type="constant"))
    monkeypatch.setattr(unlearn, "reinforce", None)  # would fail
    unlearn.main(command("stopped", **options, resume_from_checkpoint="true"))
    assert "Verification:" in capsys.readouterr().out
    assert {line["step"] for line in journal(tmp_path / "stopped")} == {0, 2, 4, 6}


def test_verification_can_be_left_out(command, capsys, tmp_path):
    unlearn.main(command(verification="false", max_steps=1, eval_strategy="no", measures="behaviour"))
    out = capsys.readouterr().out
    assert "Verification" not in out and "ROUGE-L" not in out
    assert not (tmp_path / "run" / "verification.json").exists()


def test_files_by_split_and_columns(command, tmp_path, forget_set, capsys):
    lines = [json.loads(line) for line in forget_set.read_text().splitlines()]
    files = {}
    for split in ("forget", "retain"):
        files[split] = tmp_path / f"{split}.json"
        rows = [{"prompt": r["question"], "reply": r["answer"]} for r in lines if r["split"] == split]
        files[split].write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ",".join(f"{split}={path}" for split, path in files.items())
    options = {"measures": "behaviour", "max_steps": 1, "eval_strategy": "no"}
    arguments = [*command(**{**options, "forget_set": source}), "--columns", "question=prompt", "answer=reply"]
    unlearn.main(arguments)
    assert {line["metric"] for line in journal(tmp_path / "run")} >= {"forget_nll", "retain_nll"}


def test_a_config_file_is_read_overridden_and_its_unknown_keys_are_fatal(command, tmp_path, capsys):
    import yaml

    flat = command()
    options = dict(zip((key[2:] for key in flat[::2]), flat[1::2], strict=True))
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({**options, "measures": ["behaviour"]}))
    unlearn.main(["--config", str(config), "--max_steps", "2"])
    assert {line["step"] for line in journal(tmp_path / "run")} == {0, 2}
    config.write_text(yaml.safe_dump({**options, "learnin_rate": 1}))
    assert latentwatch(["unlearn", "--config", str(config)]) != 0
    assert "learnin_rate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forget_set": "no_such_concept"}, "no_such_concept"),
        ({"model_name_or_path": ""}, "model_name_or_path"),
        ({"fragmentation_layer": "deepest"}, "layer"),
        ({"beta": 0}, "beta"),
        ({"resume_from_checkpoint": "/nowhere"}, "resume_from_checkpoint"),
        ({"learnin_rate": 1}, "learnin_rate"),
        ({"json": Path(__file__) / "table.json"}, "json"),
        ({"reference": "/nowhere/model"}, "nowhere"),
    ],
)
def test_bad_input_is_one_clear_line_before_anything_is_written(command, tmp_path, capsys, options, message):
    assert latentwatch(["unlearn", *command(**options)]) != 0
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("yaml_text", "message"),
    [
        ("measures: [bias_shift, fragmentaton]", "fragmentaton"),
        ("alpha: null", "alpha"),
        ("a: [1", "YAML"),
    ],
)
def test_yaml_values_are_checked_like_arguments(command, tmp_path, capsys, yaml_text, message):
    (tmp_path / "c.yaml").write_text(yaml_text)
    assert latentwatch(["unlearn", *command(), "--config", str(tmp_path / "c.yaml")]) != 0
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_fraction_in_yaml_is_a_fraction(command, tmp_path):
    (tmp_path / "c.yaml").write_text("fragmentation_layer: 0.5\nmeasures: fragmentation\n")
    unlearn.main([*command(max_steps=1, eval_strategy="no"), "--config", str(tmp_path / "c.yaml")])
    assert {line["layer"] for line in journal(tmp_path / "run")} == {2}, "half of four blocks"


def test_an_adapter_is_refused_with_the_way_out(command, tmp_path, tiny_llama, capsys):
    from peft import LoraConfig, get_peft_model

    get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    assert latentwatch(["unlearn", *command(model_name_or_path=tmp_path / "adapter")]) != 0
    assert "merge_and_unload" in capsys.readouterr().err


def test_json_on_standard_output_is_nothing_but_json(command, capsys):
    unlearn.main(command(json="-", max_steps=1, eval_strategy="no", measures="behaviour"))
    captured = capsys.readouterr()
    assert json.loads(captured.out)
    assert "forget NLL" in captured.err


def test_the_table_is_about_the_model_that_was_saved(command, tmp_path):
    unlearn.main(
        command(json=tmp_path / "t.json", load_best_model_at_end=True, metric_for_best_model="behaviour_forget_nll",
                greater_is_better=False, measures="behaviour")
    )  # fmt: skip
    (end,) = {record["step_end"] for record in json.loads((tmp_path / "t.json").read_text())}
    assert end == 2, "the forget NLL rises: the first evaluation is the best by this (perverse) choice"


def test_too_few_pairs_say_what_to_do_and_a_small_control_is_left_out(command, forget_set, tmp_path, capsys):
    lines = [json.loads(line) for line in forget_set.read_text().splitlines()]
    few = [p for p in lines if p["split"] != "heldout"] + [p for p in lines if p["split"] == "heldout"][:3]
    forget_set.write_text("".join(json.dumps(p) + "\n" for p in few))
    unlearn.main(command(max_steps=1, eval_strategy="no", measures="fragmentation"))
    assert {line["group"] for line in journal(tmp_path / "run")} == {""}
    forget_set.write_text(
        "".join(json.dumps(p) + "\n" for p in few if p["split"] == "retain" or "sail" in p["question"])
    )
    assert latentwatch(["unlearn", *command("other")]) != 0
    assert "Add pairs" in capsys.readouterr().err


def test_detectability_is_watched_when_asked_for(command, tmp_path, capsys):
    stimuli = load_counterfactual_sets(["gender"], cells=40)["gender"]
    stimuli.to_file(tmp_path / "grid.jsonl")
    options = {"measures": "detectability", "dimensions": f"gender={tmp_path / 'grid.jsonl'}", "n": 80, "purity": 0.5}
    unlearn.main(command(max_steps=1, eval_strategy="no", scan_layers="true", json=tmp_path / "t.json", **options))
    out = capsys.readouterr().out
    assert "separation s, concept" in out and "Detectability:" in out and "only the change counts" in out
    lines = journal(tmp_path / "run")
    assert {line["group"] for line in lines} == {"", "gender", "concept"}
    assert {line["layer"] for line in lines if (line["metric"], line["group"]) == ("s_hat", "gender")} == set(range(5))
    start = [line for line in lines if line["metric"] == "s_change" and line["step"] == 0]
    assert start and all(line["value"] == 0 for line in start)
    records = {(r["metric"], r["group"]): r for r in json.loads((tmp_path / "t.json").read_text())}
    assert records["s_hat", "concept"]["layer"] == 2 and records["s_change", "concept"]["end"] != 0


def test_a_forget_set_without_variants_has_no_concept_to_detect(command, forget_set, tmp_path, caplog):
    (forget_set.parent / "entities.json").unlink()
    load_counterfactual_sets(["gender"], cells=40)["gender"].to_file(tmp_path / "grid.jsonl")
    options = {"measures": "detectability", "dimensions": tmp_path / "grid.jsonl", "n": 80, "purity": 0.5}
    with pytest.warns(UserWarning, match="leaves 24"):
        unlearn.main(command(max_steps=1, eval_strategy="no", verification="false", **options))
    assert {line["group"] for line in journal(tmp_path / "run")} == {"", "grid"}
    assert "left out" in caplog.text


def test_lora_and_each_retain_term_run(command, tmp_path):
    for retain_loss in ("none", "kl"):
        unlearn.main(command(retain_loss, retain_loss=retain_loss, max_steps=2, measures="behaviour"))
    unlearn.main(
        command("lora", use_peft=True, lora_target_modules=".*q_proj", max_steps=2, measures="behaviour",
                reference="adapter_off")
    )  # fmt: skip
    assert (tmp_path / "lora" / "adapter_model.safetensors").is_file()
    start = {line["metric"]: line for line in journal(tmp_path / "lora") if line["step"] == 0}
    assert start["forget_nll_change"]["value"] == 0.0


def test_resuming_before_the_first_checkpoint_starts_anew(command, tmp_path):
    unlearn.main(command(resume_from_checkpoint="true", max_steps=2, measures="behaviour"))
    assert {line["step"] for line in journal(tmp_path / "run")} == {0, 2}


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed_the_journal_reads_as_if_it_had_never_stopped(command, tmp_path):
    def arguments(folder):
        made = command(folder, max_steps=8, resume_from_checkpoint="true", save_total_limit=2, verification="false")
        return [*made, "--measures", "fragmentation", "behaviour"]

    unlearn.main(arguments("whole"))
    # Strike whenever the next of these appears on disk: in measurements, in checkpoints.
    folder = tmp_path / "killed"
    traces = ["monitor/journal.jsonl", "checkpoint-4/model.safetensors", "checkpoint-6/trainer_state.json"]
    kills = 0
    for trace in traces:
        process = start("recipes.unlearn", arguments("killed"), tmp_path / "killed")
        while process.is_alive() and not (folder / trace).exists():
            time.sleep(0.002)
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
    unlearn.main(arguments("killed"))
    assert kills >= 2
    assert journal(folder) == journal(tmp_path / "whole")


@pytest.mark.parametrize(("max_steps", "scheduler"), [(4, "constant"), (3, "linear")])
def test_a_finished_run_that_is_resumed_trains_no_further(command, tmp_path, capsys, max_steps, scheduler):
    """Four steps end in mid-epoch, where the Trainer would go one step on; three are an epoch."""
    options = {"measures": "behaviour", "max_steps": max_steps, "lr_scheduler_type": scheduler, "save_steps": max_steps}
    unlearn.main(command(**options))
    said = capsys.readouterr().out
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    lines = journal(tmp_path / "run")
    (tmp_path / "run" / "model.safetensors").unlink()  # killed after the last checkpoint, before the model was saved
    unlearn.main(command(**options, resume_from_checkpoint="true"))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    assert journal(tmp_path / "run") == lines
    again = capsys.readouterr().out
    assert said[said.index("forget NLL") :] == again[again.index("forget NLL") :]  # the same table and verdict


def test_a_finished_run_that_keeps_its_best_model_keeps_it_when_resumed(command, tmp_path, capsys):
    """The forget NLL rises, so that the lowest, which is best here, is the first checkpoint's."""
    options = {
        "measures": "behaviour", "load_best_model_at_end": "true", "greater_is_better": "false",
        "metric_for_best_model": "eval_behaviour_forget_nll",
    }  # fmt: skip
    unlearn.main(command(**options))
    weights = (tmp_path / "run" / "model.safetensors").read_bytes()
    assert weights == (tmp_path / "run" / "checkpoint-2" / "model.safetensors").read_bytes()
    said = capsys.readouterr().out
    unlearn.main(command(**options, resume_from_checkpoint="true"))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    again = capsys.readouterr().out
    assert said[said.index("forget NLL") :] == again[again.index("forget NLL") :]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "simnpo"}, "method 'npo', now 'simnpo'"),
        ({"beta": 5.0}, r"beta 0.1, now 5.0"),
        ({"retain_loss": "none"}, "retain_loss 'nll', now 'none'"),
    ],
)
def test_a_run_is_not_continued_with_another_loss(command, options, message):
    unlearn.main(command(measures="behaviour", max_steps=2))
    with pytest.raises(ValueError, match=f"(?s)resume_from_checkpoint.*{message}"):
        unlearn.main(command(measures="behaviour", max_steps=4, resume_from_checkpoint="true", **options))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("method: null", "`method` must be one of"),
        ("method: [npo, rmu]", "`method` must be one of"),
        ("forget_set: null", "`forget_set` is empty"),
        ("max_steps: null", "`max_steps` is empty"),
        ("gradient_accumulation_steps: 1.5", "`gradient_accumulation_steps` must be a whole number"),
        ("gradient_accumulation_steps: 0", "`gradient_accumulation_steps` must be a whole number >= 1"),
        ("learning_rate: -1", "`learning_rate`"),
        ("per_device_train_batch_size: -3", "`per_device_train_batch_size`"),
        ("output_dir: [a, b]", "`output_dir` must be a single value"),
        ("betta: 0.2", r"no argument `betta` \(did you mean `beta`\?\)"),
    ],
)
def test_what_yaml_lets_through_is_named_before_anything_is_written(command, tmp_path, line, message):
    config = tmp_path / "c.yaml"
    config.write_text(line + "\n")
    name = line.split(":")[0]
    arguments = command()
    if f"--{name}" in arguments:
        at = arguments.index(f"--{name}")
        del arguments[at : at + 2]
    with pytest.raises(ValueError, match=message):
        unlearn.main([*arguments, "--config", str(config)])
    assert not (tmp_path / "run").exists()


def test_unknown_arguments_on_the_command_line_are_named_with_their_method(command, tmp_path):
    with pytest.raises(ValueError, match=r"--method rmu has no argument `retain_loss`"):
        unlearn.main([*command(method="rmu"), "--retain_loss", "kl"])
    with pytest.raises(ValueError, match="`--config`: no such file"):
        unlearn.main([*command(), "--config", str(tmp_path / "no.yaml")])


def test_one_lora_module(command, tmp_path):
    arguments = command(measures="behaviour", max_steps=1, eval_strategy="no", use_peft="true")
    unlearn.main([*arguments, "--lora_target_modules", "q_proj"])
    config = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj"]


def test_the_models_own_folder_is_no_output_folder(command, model_folder):
    before = (model_folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="`output_dir`.*overwrite"):
        unlearn.main(command(output_dir=model_folder))
    assert (model_folder / "model.safetensors").read_bytes() == before


def test_anonymised_answers_that_are_not_there(command, forget_set):
    (forget_set.parent / "entities.json").unlink()
    with pytest.raises(ValueError, match="whp teaches anonymised answers.*entities.json"):
        unlearn.main(command(method="whp", measures="behaviour"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"retain_loss": "kl"}, {"retain_loss": "kl", "reference_max_bytes": 0}])
def test_quantised_weights_with_adapters(options, command, tiny_llama, model_folder, tmp_path, capsys):
    """QLoRA: 4-bit weights, LoRA in bf16 or float32, the reference with adapters off, kept or run beside."""
    pytest.importorskip("bitsandbytes")
    # On CPUs with AVX512-BF16 bitsandbytes packs 32 rows and blocks of 64 columns: the tiny model is too narrow.
    shape = {"hidden_size": 64, "num_key_value_heads": 4, "head_dim": 16}
    LlamaForCausalLM(LlamaConfig(**tiny_llama().config.to_dict() | shape)).save_pretrained(model_folder)
    options |= {"load_in_4bit": "true", "use_peft": "true", "lora_target_modules": "q_proj v_proj".split()}
    arguments = command(measures="behaviour", max_steps=2, eval_strategy="no", learning_rate=1e-2)
    for name, value in options.items():
        arguments += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    unlearn.main(arguments)
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    lines = journal(tmp_path / "run")
    start, end = (next(x["value"] for x in lines if (x["metric"], x["step"]) == ("forget_nll", s)) for s in (0, 2))
    assert end != start
    assert "Verification:" in capsys.readouterr().out


# Rules and attacks


def test_a_rule_stops_and_the_end_is_attacked(command, tmp_path, capsys):
    options = {"measures": "behaviour", "verification": "false", "attacks": "membership", "quick_attacks": "true"}
    unlearn.main([*command(**options), "--stop_when", "behaviour/forget_nll > start"])
    lines = journal(tmp_path / "run")
    (stop,) = [line for line in lines if line["measure"] == "rules" and line["metric"] == "stop"]
    assert stop["step"] == 2 and stop["group"] == "behaviour/forget_nll > start"
    (attack,) = [line for line in lines if (line["measure"], line["metric"]) == ("attacks", "membership")]
    assert attack["step"] == 2 and 0 <= attack["value"] <= 1
    out = capsys.readouterr().out
    assert "Stopped at step 2 by the rule behaviour/forget_nll > start" in out
    assert "Attack at step 2, membership: 0." in out and "0.500 without it" in out
    (file,) = (tmp_path / "run" / "monitor" / "attacks").iterdir()
    assert json.loads(file.read_text())["score"] == attack["value"]


def test_sampling_injects_what_the_model_held_before_training(
    command, tmp_path, tiny_llama, tiny_tokenizer, model_folder, capsys
):
    path = tmp_path / "people.jsonl"
    contexts = {"wizard": ["this w", "then w", "next w"], "captain": ["this c", "then c", "next c"]}
    path.write_text("".join(json.dumps({"entity": name, "contexts": texts}) + "\n" for name, texts in contexts.items()))
    options = {"measures": "behaviour", "verification": "false", "attacks": "sampling", "quick_attacks": "true"}
    unlearn.main(command(**options, concepts=path, concept_layer="2", learning_rate="0.1"))
    (attack,) = [line for line in journal(tmp_path / "run") if line["metric"] == "sampling_people"]
    (file,) = (tmp_path / "run" / "monitor" / "attacks").iterdir()
    details = json.loads(file.read_text())["details"]
    assert file.name.endswith("-sampling_people.json") and attack["valid"]

    def sigma(model):
        concept = load_concept_sets([path])["people"]
        return concept_geometry(model, tiny_tokenizer, concept, layer=2, n_points=3, max_new_tokens=12, seed=1).sigma

    assert details["sigma"] == pytest.approx(sigma(tiny_llama()), rel=1e-5)
    assert details["sigma"] != pytest.approx(sigma(LlamaForCausalLM.from_pretrained(tmp_path / "run")), rel=1e-2)
    assert "sampling_people" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_when": "behaviour/forget_nll"}, "compares nothing"),
        ({"stop_when": "behavior/forget_nll > 1"}, "behaviour"),
        ({"attack_when": "save"}, "name some with --attacks"),
        ({"concepts": "days"}, "`concepts` are for the measure concept_recovery and the attack sampling"),
        ({"attacks": "sampling", "concept_rank": "0"}, "`concept_rank` must be at least 1, got 0"),
        ({"attacks": "sampling", "concept_layer": "late"}, "`concept_layer` must be .* got 'late'"),
        ({"quick_attacks": "true"}, "name some with --attacks"),
        ({"patience": "3"}, "give --stop_when"),
        ({"patience": "3", "attacks": "membership"}, "give --stop_when"),
        ({"attacks": "membership", "attack_when": "0"}, "number of steps above 0, got '0'"),
        ({"attacks": "membership", "attack_when": "sometimes"}, "`attack_when` must be end, save, .*'sometimes'"),
        (
            {"attacks": "sampling", "concepts": "days", "attack_when": "sometimes"},
            "`attack_when` must be end, save, .*'sometimes'",
        ),
        ({"attacks": "sampling", "concepts": "days", "attack_when": "behavior/forget_nll > 1"}, "did you mean"),
        ({"attacks": "sampling", "concepts": "days", "stop_when": "attacks/sampling > 0"}, "'sampling_days'"),
    ],
)
def test_bad_rules_are_one_error_before_anything_is_loaded_or_written(options, message, command, tmp_path, monkeypatch):
    monkeypatch.setattr(unlearn, "load_model", None)
    with pytest.raises(ValueError, match=message):
        unlearn.main(command(measures="behaviour", **options))
    assert not (tmp_path / "run").exists()
