"""The command: complete checkpoints, the same from any layout of files, nothing half written, refusals in words."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections import namedtuple

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import merge
from recipes.embedded import ModelError
from recipes.merge import RATIOS, Checkpoint, main

IDS = torch.arange(3, 27).reshape(2, 12)


@pytest.fixture(scope="module")
def models(tiny_llama, tiny_tokenizer, tmp_path_factory):
    """Two full models with the tokenizer, and two adapters of the first: the folders by name."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("a", 0), ("b", 1)):
        tiny_llama(seed).save_pretrained(folder / name)
        tiny_tokenizer.save_pretrained(folder / name)
    for name, seed, r in (("lora_a", 2, 2), ("lora_b", 3, 4)):
        model = AutoModelForCausalLM.from_pretrained(folder / "a")
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=r, target_modules=["q_proj", "down_proj"]))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder / name)
        tiny_tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def copies(models, tmp_path):
    """Copies of the four models that a test may change."""
    return shutil.copytree(models, tmp_path / "models")


def run(a, b, output, *more) -> None:
    main(["--model_a", str(a), "--model_b", str(b), "--output_dir", str(output), *map(str, more)])


def weights(folder) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def change(path, **values) -> None:
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


# What is written


def test_the_published_series(models, tmp_path, capsys):
    run(models / "a", models / "b", tmp_path / "out")
    folders = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert folders == [f"ratio-{ratio:.2f}" for ratio in RATIOS] and len(folders) == 7
    a, b = weights(models / "a"), weights(models / "b")
    assert equal(weights(tmp_path / "out" / "ratio-0.00"), a) and equal(weights(tmp_path / "out" / "ratio-1.00"), b)
    for ratio in RATIOS:
        folder = tmp_path / "out" / f"ratio-{ratio:.2f}"
        expected = {name: (1 - ratio) * a[name].double() + ratio * b[name].double() for name in a}
        model = AutoModelForCausalLM.from_pretrained(folder)
        got = model.state_dict()
        assert got.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(got[name].double(), expected[name], rtol=1e-6, atol=1e-7)
        # The command's folder computes what the same weights compute in a model of A's.
        byhand = AutoModelForCausalLM.from_pretrained(models / "a")
        byhand.load_state_dict({name: tensor.float() for name, tensor in expected.items()})
        torch.testing.assert_close(model(IDS).logits, byhand(IDS).logits)
        assert AutoTokenizer.from_pretrained(folder)("the wizard").input_ids
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 7 and "ratio 0.3" in out


def test_the_record_says_what_was_merged(models, tmp_path):
    run(models / "a", models / "b", tmp_path / "out", "--ratios", 0.3)
    record = json.loads((tmp_path / "out" / "ratio-0.30" / "merge.json").read_text())
    assert record["ratio"] == 0.3 and record["formula"] == "(1 - ratio) * model_a + ratio * model_b"
    for key, name in (("model_a", "a"), ("model_b", "b")):
        assert record[key]["name"] == record[key]["folder"] == str(models / name) and len(record[key]["sha256"]) == 64
    assert record["model_a"]["sha256"] != record["model_b"]["sha256"]


def test_negation(models, tmp_path):
    run(models / "a", models / "b", tmp_path / "out", "--negate", 0.5, 1)
    a, b = weights(models / "a"), weights(models / "b")
    for scale, name in ((0.5, "negate-0.50"), (1, "negate-1.00")):
        got = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / name).state_dict()
        for key in a:
            torch.testing.assert_close(got[key], a[key] - scale * (b[key] - a[key]), rtol=1e-5, atol=1e-6)
        assert json.loads((tmp_path / "out" / name / "merge.json").read_text())["negate"] == scale


def test_shards_change_nothing_and_keep_the_layout_of_the_first(models, tmp_path):
    for name in "ab":
        model = AutoModelForCausalLM.from_pretrained(models / name)
        model.save_pretrained(tmp_path / name, max_shard_size="60KB" if name == "a" else "100KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > len(list((tmp_path / "b").glob("*.safetensors"))) > 1
    run(models / "a", models / "b", tmp_path / "whole", "--ratios", 0.3)
    expected = weights(tmp_path / "whole" / "ratio-0.30")
    for first, second in (
        (tmp_path / "a", tmp_path / "b"),
        (tmp_path / "a", models / "b"),
        (models / "a", tmp_path / "b"),
    ):
        output = tmp_path / f"out-{first.parent.name}-{second.parent.name}"
        run(first, second, output, "--ratios", 0.3)
        folder = output / "ratio-0.30"
        assert equal(weights(folder), expected)
        layout = {path.name: set(load_file(path)) for path in first.glob("*.safetensors")}
        assert {path.name: set(load_file(path)) for path in folder.glob("*.safetensors")} == layout
        assert equal(AutoModelForCausalLM.from_pretrained(folder).state_dict(), expected)


def test_one_shard_is_in_memory_at_a_time(models, tmp_path, monkeypatch):
    AutoModelForCausalLM.from_pretrained(models / "a").save_pretrained(tmp_path / "a", max_shard_size="60KB")
    pair = merge.open_pair(str(tmp_path / "a"), str(models / "b"), negate=False)
    handed, alive = [], []

    def save(tensors, path, metadata):
        assert not any(reference() is not None for reference in alive)  # the shard before is gone
        alive[:] = [weakref.ref(tensor) for tensor in tensors.values()]
        handed.append(set(tensors))

    monkeypatch.setattr(merge, "save_file", save)
    (tmp_path / "out").mkdir()
    pair.write(tmp_path / "out", "ratio", 0.5)
    assert handed == [set(names) for names in pair.a.shards.values()] and len(handed) > 2


def test_bfloat16_stays_and_is_rounded_once(models, tmp_path):
    for name in "ab":
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.bfloat16).save_pretrained(tmp_path / name)
    run(tmp_path / "a", tmp_path / "b", tmp_path / "out", "--ratios", 0, 0.3)
    a, b, got = (weights(tmp_path / name) for name in ("a", "b", "out/ratio-0.30"))
    assert equal(weights(tmp_path / "out" / "ratio-0.00"), a)
    for name in a:
        exact = torch.lerp(a[name].double(), b[name].double(), 0.3)
        assert got[name].dtype == torch.bfloat16 and ((got[name] - exact).abs() <= 2**-8 * exact.abs() + 1e-7).all()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "ratio-0.30").dtype == torch.bfloat16


def test_tied_heads(models, tmp_path):
    for name in "ab":
        model = AutoModelForCausalLM.from_pretrained(models / name)
        model.config.tie_word_embeddings = True
        tied = type(model)(model.config)
        tied.load_state_dict({n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}, strict=False)
        tied.save_pretrained(tmp_path / name)
    assert "lm_head.weight" not in weights(tmp_path / "a")
    run(tmp_path / "a", tmp_path / "b", tmp_path / "out", "--ratios", 0.5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "ratio-0.50")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    run(tmp_path / "a", tmp_path / "a", tmp_path / "itself", "--ratios", 0.3)
    assert equal(weights(tmp_path / "itself" / "ratio-0.30"), weights(tmp_path / "a"))


def test_only_configuration_and_tokenizer_go_along(models, copies, tmp_path):
    for name in (
        "optimizer.pt",
        "training_args.bin",
        "trainer_state.json",
        "modeling_custom.py",
        "merge.json",
        "README.md",
    ):
        (copies / "a" / name).write_text("{}")
    (copies / "a" / "additional_chat_templates").mkdir()
    (copies / "a" / "additional_chat_templates" / "tool.jinja").write_text("x")
    run(copies / "a", copies / "b", tmp_path / "out", "--ratios", 0.5)
    folder = tmp_path / "out" / "ratio-0.50"
    got = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    expected = {path.name for path in (models / "a").iterdir()} | {"merge.json", "additional_chat_templates/tool.jinja"}
    assert got == expected
    assert json.loads((folder / "merge.json").read_text())["ratio"] == 0.5


def test_adapters(models, tmp_path):
    run(models / "lora_a", models / "lora_b", tmp_path / "out", "--ratios", 0, 0.3, 1)

    def delta(folder) -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(models / "a")
        merged = PeftModel.from_pretrained(model, folder).merge_and_unload().state_dict()
        base = weights(models / "a")
        return {name: merged[name] - base[name] for name in base}

    a, b = delta(models / "lora_a"), delta(models / "lora_b")
    for ratio in (0, 0.3, 1):
        got = delta(tmp_path / "out" / f"ratio-{ratio:.2f}")
        for name in got:
            torch.testing.assert_close(got[name], (1 - ratio) * a[name] + ratio * b[name], rtol=1e-4, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out" / "ratio-0.30")("the wizard").input_ids
    # From the base model itself, which need not be read.
    run(models / "a", models / "lora_b", tmp_path / "negated", "--negate", 1)
    got = delta(tmp_path / "negated" / "negate-1.00")
    for name in got:
        torch.testing.assert_close(got[name], -b[name], rtol=1e-4, atol=1e-5)
    # From an adapter.
    run(models / "lora_a", models / "lora_b", tmp_path / "further", "--negate", 1)
    got = delta(tmp_path / "further" / "negate-1.00")
    for name in got:
        torch.testing.assert_close(got[name], 2 * a[name] - b[name], rtol=1e-4, atol=1e-5)


def test_an_adapter_with_its_bases_config_beside_it_is_an_adapter(models, copies, tmp_path):
    shutil.copyfile(models / "a" / "config.json", copies / "lora_a" / "config.json")
    run(copies / "lora_a", copies / "lora_b", tmp_path / "out", "--ratios", 0.5)
    run(models / "lora_a", models / "lora_b", tmp_path / "plain", "--ratios", 0.5)
    folder = tmp_path / "out" / "ratio-0.50"
    assert equal(weights(folder), weights(tmp_path / "plain" / "ratio-0.50")) and not (folder / "config.json").exists()


def test_under_a_launcher_one_process_writes(models, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    run(models / "a", models / "b", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_json_and_yaml(models, tmp_path, capsys):
    config = tmp_path / "merge.yaml"
    config.write_text(
        f"model_a: {models / 'a'}\nmodel_b: {models / 'b'}\noutput_dir: {tmp_path / 'out'}\nratios: [0, 0.5]"
    )
    main(["--config", str(config), "--json", "-"])
    captured = capsys.readouterr()
    records = json.loads(captured.out)
    assert [(r["measure"], r["metric"], r["group"], r["value"]) for r in records] == [
        ("merge", "ratio", "full", 0.0),
        ("merge", "ratio", "full", 0.5),
    ]
    assert all(os.path.isdir(r["path"]) for r in records) and "ratio 0.5" in captured.err
    main(["--config", str(config), "--ratios", "1", "--json", str(tmp_path / "records.json")])
    assert [r["value"] for r in json.loads((tmp_path / "records.json").read_text())] == [1.0]
    config.write_text("model_a: [")
    with pytest.raises(ValueError, match="`--config` is not valid YAML"):
        main(["--config", str(config)])
    with pytest.raises(ValueError, match="no argument `ratio_s` .did you mean `ratios`"):
        main(["--model_a", "x", "--model_b", "y", "--output_dir", "z", "--ratio_s", "1"])


def test_models_of_the_hub_are_downloaded_without_pickles(models, tmp_path, monkeypatch):
    asked = []

    def download(name, allow_patterns, ignore_patterns):
        asked.append((name, allow_patterns))
        return str(models / name.split("/")[1])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    run("org/a", "org/b", tmp_path / "out", "--ratios", 0.5)
    assert [name for name, _ in asked] == ["org/b", "org/a"]
    assert not any(pattern.endswith((".bin", ".py", "*")) for _, patterns in asked for pattern in patterns)
    # An adapter's base is only compared by name.
    asked.clear()
    with pytest.raises(ValueError, match="`model_a` is a full model and `model_b` an adapter"):
        run("org/a", "org/lora_a", tmp_path / "no", "--negate", 1)


# Nothing half written, nothing overwritten


def test_a_failure_leaves_nothing_and_the_next_run_continues(models, tmp_path, monkeypatch, capsys):
    calls = []

    def failing(tensors, path, metadata=None):
        save_file(tensors, path, metadata)
        assert path.parent.name.startswith(".")  # the real name is given when all is there
        calls.append(path)
        if len(calls) == 2:
            raise OSError("disk full")

    monkeypatch.setattr(merge, "save_file", failing)
    with pytest.raises(OSError, match="disk full"):
        run(models / "a", models / "b", tmp_path / "out", "--ratios", 0, 0.5, 1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ratio-0.00"]
    monkeypatch.undo()
    before = (tmp_path / "out" / "ratio-0.00" / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    run(models / "a", models / "b", tmp_path / "out", "--ratios", 0, 0.5, 1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["ratio-0.00", "ratio-0.50", "ratio-1.00"]
    assert (tmp_path / "out" / "ratio-0.00" / "model.safetensors").stat().st_mtime_ns == before
    assert [line.endswith("(was there)") for line in capsys.readouterr().out.splitlines()] == [True, False, False]


@pytest.mark.slow
def test_a_killed_run_leaves_no_folder_that_reads_as_a_merge(models, tmp_path):
    script = (
        "import sys, time\nfrom recipes import merge\nsave = merge.save_file\n"
        "def slow(tensors, path, metadata=None):\n    save(tensors, path, metadata)\n    print('here', flush=True)\n"
        "    time.sleep(60)\nmerge.save_file = slow\nmerge.main(sys.argv[1:])"
    )
    arguments = [
        "--model_a",
        models / "a",
        "--model_b",
        models / "b",
        "--output_dir",
        tmp_path / "out",
        "--ratios",
        "0.5",
    ]
    process = subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(0.1)
    left = list((tmp_path / "out").iterdir())
    assert [path.name for path in left] == [".ratio-0.50.partial"] and (left[0] / "model.safetensors").is_file()
    run(models / "a", models / "b", tmp_path / "out", "--ratios", 0.5)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ratio-0.50"]


def test_another_merge_in_the_same_folder_is_refused(models, tmp_path):
    run(models / "a", models / "b", tmp_path / "out", "--ratios", 0.5)
    before = weights(tmp_path / "out" / "ratio-0.50")
    for ratio in (0.5, 0.7):
        with pytest.raises(ValueError, match="`output_dir`: .*ratio-0.50 is a merge of other weights"):
            run(models / "b", models / "a", tmp_path / "out", "--ratios", ratio)
    run(models / "a", models / "b", tmp_path / "out", "--negate", 1)  # the same two models: welcome
    assert equal(weights(tmp_path / "out" / "ratio-0.50"), before)
    (tmp_path / "out" / "ratio-0.50" / "merge.json").write_text("[]")
    with pytest.raises(ValueError, match="ratio-0.50 is not from a merge"):
        run(models / "a", models / "b", tmp_path / "out")


def test_an_output_folder_that_cannot_be_one(models, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="`output_dir`: .*file is a file"):
        run(models / "a", models / "b", tmp_path / "file")
    with pytest.raises(ValueError, match="`output_dir`: .* holds a model"):
        run(models / "a", models / "b", models / "a")
    with pytest.raises(ValueError, match="`json` must be a file"):
        run(models / "a", models / "b", tmp_path / "out", "--json", tmp_path)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(merge.shutil, "disk_usage", lambda path: usage(10, 0, 10))
    with pytest.raises(ValueError, match="GB are needed .* Make fewer"):
        run(models / "a", models / "b", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# What is refused, before anything is written


@pytest.mark.parametrize(
    "more, message",
    [
        (["--ratios", "1.5"], "`ratios`: `ratio` is the share of the second model, between 0 and 1; got 1.5"),
        (["--ratios", "-0.5"], "`ratios`: .* use task-vector negation"),
        (["--ratios", "0.5", "0.50"], "`ratios` has 0.5 twice"),
        (["--negate", "-1"], "`negate` takes the task vector away, -1 would add it"),
        (["--negate", "inf"], "`negate`: `scale` must be a finite number"),
        (["--negate", "1", "--ratios", "0.5"], "two operations: give one"),
    ],
)
def test_wrong_amounts(more, message, models, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(models / "a", models / "b", tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


def test_amounts_are_told_apart_in_the_names_of_folders(tmp_path):
    arguments = merge.MergeArguments("a", "b", "out", ratios=[0.3, 0.301, 1])
    assert list(merge.plan(arguments)) == ["ratio-0.30", "ratio-0.301", "ratio-1.00"]
    arguments.ratios = 0.5  # what YAML gives for one number
    assert merge.plan(arguments) == {"ratio-0.50": ("ratio", 0.5)}
    arguments.ratios = ["a lot"]
    with pytest.raises(ValueError, match="`ratios`: could not convert"):
        merge.plan(arguments)
    arguments.ratios = []
    with pytest.raises(ValueError, match="`ratios` is empty"):
        merge.plan(arguments)


def refused(copies, tmp_path, message, a="a", b="b", error=ValueError, more=()) -> None:
    with pytest.raises(error, match=message):
        run(copies / a, copies / b, tmp_path / "out", *more)
    assert not (tmp_path / "out").exists()


def test_models_that_are_not_there(copies, tmp_path):
    refused(copies, tmp_path, "no such folder", b="c", error=ModelError)
    with pytest.raises(ModelError, match="`model_b`: cannot get 'no-such/model' from the Hub"):
        run(copies / "a", "no-such/model", tmp_path / "out")


@pytest.mark.parametrize("name", ["a", "b"])
def test_pickles_are_refused_unread(copies, tmp_path, name):
    (copies / name / "model.safetensors").rename(copies / name / "pytorch_model.bin")
    refused(
        copies, tmp_path, f"`model_{name}`: .*only pytorch_model.bin. Pickled .*save_pretrained, which writes safete"
    )


def test_pickled_adapters_are_refused_unread(copies, tmp_path):
    (copies / "lora_b" / "adapter_model.safetensors").rename(copies / "lora_b" / "adapter_model.bin")
    refused(copies, tmp_path, "`model_b`: .*adapter_model.safetensors, only adapter_model.bin", "lora_a", "lora_b")


def test_damaged_files(copies, tmp_path):
    path = copies / "b" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    refused(copies, tmp_path, "`model_b`: .*model.safetensors cannot be read")
    path.unlink()
    refused(copies, tmp_path, "`model_b`: .* has no model.safetensors. Load the model")
    (copies / "lora_b" / "adapter_model.safetensors").write_bytes(b"nothing")
    refused(copies, tmp_path, "`model_b`: .*adapter_model.safetensors cannot be read", "lora_a", "lora_b")
    (copies / "lora_b" / "adapter_config.json").write_text("{")
    refused(copies, tmp_path, "`model_b`: .*adapter_config.json cannot be read", "lora_a", "lora_b")


@pytest.mark.parametrize(
    "index, message",
    [
        ({}, "has no weight_map"),
        ({"weight_map": {"x": "../../elsewhere.safetensors"}}, "names '../../elsewhere.safetensors', expected"),
        ({"weight_map": {"x": "pytorch_model.bin"}}, "names 'pytorch_model.bin', expected"),
        ({"weight_map": {"x": "model-00001-of-00002.safetensors"}}, "lacks model-00001-of-00002.safetensors"),
        ({"weight_map": {"x": "model.safetensors"}}, "does not say what its shards hold"),
        ([], "is not a JSON object"),
    ],
)
def test_wrong_indices(index, message, copies, tmp_path):
    (copies / "b" / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(copies, tmp_path, f"`model_b`: .*{message}")


@pytest.mark.parametrize(
    "values, message",
    [
        ({"rms_norm_eps": 0.1}, r"differ in config.json: rms_norm_eps \(1e-06 and 0.1\)"),
        ({"num_attention_heads": 8, "head_dim": 4}, "differ in config.json: head_dim .*num_attention_heads"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "`model_b`: .* is quantised"),
    ],
)
def test_other_architectures(values, message, copies, tmp_path):
    change(copies / "b" / "config.json", **values)
    refused(copies, tmp_path, message)


def test_settings_that_do_not_shape_the_weights_may_differ(copies, tmp_path):
    change(
        copies / "b" / "config.json", use_cache=False, pad_token_id=5, attention_dropout=0.1, transformers_version="4"
    )
    run(copies / "a", copies / "b", tmp_path / "out", "--ratios", 0.5)


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda w: w | {"more": torch.zeros(1)}, "only in `model_a`: nothing; only in `model_b`: more"),
        (lambda w: {n: t for n, t in w.items() if n != "lm_head.weight"}, "only in `model_a`: lm_head.weight"),
        (lambda w: w | {"lm_head.weight": torch.zeros(3, 32)}, r"lm_head.weight has shape \[299, 32\] in `model_a`"),
        (
            lambda w: {n: t.bfloat16() for n, t in w.items()},
            "has dtype F32 in `model_a` and BF16 in `model_b`. Save both",
        ),
    ],
)
def test_other_weights(edit, message, copies, tmp_path):
    path = copies / "b" / "model.safetensors"
    save_file({name: t.clone() for name, t in edit(load_file(path)).items()}, path)
    refused(copies, tmp_path, message)


def test_integer_buffers_must_be_equal_and_are_checked_first(copies, tmp_path):
    for name, value in (("a", 1), ("b", 2)):
        path = copies / name / "model.safetensors"
        save_file(load_file(path) | {"steps": torch.tensor(value)}, path)
    refused(copies, tmp_path, "steps .* differs between `model_a` and `model_b`")


def test_two_kinds(copies, tmp_path):
    refused(copies, tmp_path, "`model_a` is a full model and `model_b` an adapter.*merge_and_unload", b="lora_b")
    refused(copies, tmp_path, "`model_a` is an adapter and `model_b` a full model", a="lora_a", more=["--negate", "1"])


def test_adapters_of_other_bases(copies, tmp_path):
    change(copies / "lora_b" / "adapter_config.json", base_model_name_or_path=str(copies / "b"))
    refused(copies, tmp_path, "the adapters differ in `base_model_name_or_path`", "lora_a", "lora_b")
    refused(copies, tmp_path, "`model_b` is an adapter of .* Give its base", "a", "lora_b", more=["--negate", "1"])
    change(copies / "lora_b" / "adapter_config.json", use_dora=True)
    refused(copies, tmp_path, "adapter `model_b` uses use_dora", "b", "lora_b", more=["--negate", "1"])


def test_one_base_under_two_spellings(copies, tmp_path):
    for name, spelling in (("lora_a", "a"), ("lora_b", "b/../a")):
        change(copies / name / "adapter_config.json", base_model_name_or_path=str(copies / spelling))
    run(copies / "lora_a", copies / "lora_b", tmp_path / "out", "--ratios", 0.5)
    config = json.loads((tmp_path / "out" / "ratio-0.50" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(copies / "a")


# What is doubtful, and what is not


def test_warnings(copies, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="recipes.merge"):
        run(copies / "a", copies / "b", tmp_path / "silent", "--ratios", 0.5)
        assert not caplog.records
        run(copies / "a", copies / "a", tmp_path / "same", "--ratios", 0.5)
        assert "are the same weights" in caplog.text
        caplog.clear()
        content = json.loads((copies / "b" / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        first, second = list(vocabulary)[-2:]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        (copies / "b" / "tokenizer.json").write_text(json.dumps(content))
        run(copies / "a", copies / "b", tmp_path / "other", "--ratios", 0.5)
        assert "different vocabularies" in caplog.text


def test_a_checkpoint_reads_as_a_mapping(models):
    checkpoint = Checkpoint(models / "a", "model_a")
    assert equal(dict(checkpoint), weights(models / "a"))
    assert dict(checkpoint.only(["model.norm.weight"])).keys() == {"model.norm.weight"}
    assert checkpoint.layout()["model.norm.weight"] == ((32,), "F32")


def test_help_through_the_command(capsys):
    from recipes.cli import main as command

    with pytest.raises(SystemExit, match="0"):
        command(["merge", "--help"])
    assert "--negate" in capsys.readouterr().out
