"""The frozen side: what it is, that it is kept, and that asking for it changes nothing."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from monitor import reference as reference_module
from monitor.activations import States, measure_activations
from monitor.reference import adapter_off, load_stored, other_reference, weights_fingerprint

TEXTS = ("the wizard went to the school", "who is the captain", "the ship")
REQUEST = States(TEXTS, (0.5, -1))
CPU = {"dtype": torch.float32, "device": torch.device("cpu")}


def lora(model, **options):
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return model


def test_the_adapter_is_off_inside_and_back_outside(tiny_llama, tiny_tokenizer):
    base = measure_activations(tiny_llama(), tiny_tokenizer, [REQUEST]).states(REQUEST)
    model = lora(tiny_llama())
    frozen = next(n for n, p in model.named_parameters() if "lora_A" in n)
    model.get_parameter(frozen).requires_grad_(False)
    gradients = {n: p.requires_grad for n, p in model.named_parameters()}
    on = measure_activations(model, tiny_tokenizer, [REQUEST]).states(REQUEST)
    with adapter_off(model):
        off = measure_activations(model, tiny_tokenizer, [REQUEST]).states(REQUEST)
    torch.testing.assert_close(off, base)
    assert (on - base).abs().max() > 1e-3
    assert measure_activations(model, tiny_tokenizer, [REQUEST]).states(REQUEST).equal(on)
    assert {n: p.requires_grad for n, p in model.named_parameters()} == gradients


def test_adapter_off_refuses_what_it_cannot_undo(tiny_llama):
    with pytest.raises(ValueError, match="no adapter"), adapter_off(tiny_llama()):
        pass
    with pytest.raises(ValueError, match="bias"), adapter_off(lora(tiny_llama(), bias="all")):
        pass


def test_a_stored_reference_that_is_missing_says_how_to_go_on(tmp_path):
    with pytest.raises(ValueError, match="cannot be measured any more"):
        load_stored(tmp_path / "reference.safetensors", None)


def test_another_checkpoint_is_measured_once_and_found_again_by_content(
    tiny_llama, tiny_tokenizer, tmp_path, monkeypatch
):
    tiny_llama(1).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    cache = tmp_path / "cache"
    expected = measure_activations(tiny_llama(1), tiny_tokenizer, [REQUEST]).states(REQUEST)
    first = other_reference(tmp_path / "model", [REQUEST], None, cache=cache, **CPU)
    torch.testing.assert_close(first.states(REQUEST), expected)

    monkeypatch.setattr(reference_module, "run_plan", lambda *a, **k: pytest.fail("measured again"))
    again = other_reference(str(tmp_path / "model"), [REQUEST], None, cache=cache, **CPU)
    assert again.states(REQUEST).equal(first.states(REQUEST))
    monkeypatch.undo()

    tiny_llama(2).save_pretrained(tmp_path / "model")  # the same path, other weights
    other = other_reference(tmp_path / "model", [REQUEST], None, cache=cache, **CPU)
    assert not other.states(REQUEST).equal(first.states(REQUEST))
    other_texts = States(TEXTS[:2], (0.5, -1))
    assert (
        other_reference(tmp_path / "model", [other_texts], None, cache=cache, **CPU).states(other_texts).shape[0] == 2
    )
    assert len(list(cache.glob("*.safetensors"))) == 3


def test_the_config_is_part_of_the_content(tiny_llama, tiny_tokenizer, tmp_path):
    model = tiny_llama(1)
    for name in ("a", "b"):
        model.config.rms_norm_eps = 1e-6 if name == "a" else 0.5
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer.save_pretrained(tmp_path / name)
    first, second = (other_reference(tmp_path / n, [REQUEST], None, cache=tmp_path / "c", **CPU) for n in "ab")
    assert not first.states(REQUEST).equal(second.states(REQUEST))


def test_an_adapter_alone_is_no_reference(tiny_llama, tmp_path):
    lora(tiny_llama()).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="merge_and_unload"):
        other_reference(tmp_path / "adapter", [REQUEST], None, **CPU)


def test_a_model_object_is_a_reference_too(tiny_llama, tiny_tokenizer, tmp_path):
    model = tiny_llama(3)
    first = other_reference(model, [REQUEST], tiny_tokenizer, cache=tmp_path, **CPU)
    expected = measure_activations(tiny_llama(3), tiny_tokenizer, [REQUEST]).states(REQUEST)
    assert first.states(REQUEST).equal(expected)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1.0
    changed = other_reference(model, [REQUEST], tiny_tokenizer, cache=tmp_path, **CPU)
    assert not changed.states(REQUEST).equal(first.states(REQUEST))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fingerprint_sees_any_bit_and_any_order(tiny_llama, dtype):
    fingerprint = weights_fingerprint(tiny_llama().to(dtype))
    assert weights_fingerprint(tiny_llama().to(dtype)) == fingerprint
    bumped, swapped = tiny_llama().to(dtype), tiny_llama().to(dtype)
    with torch.no_grad():
        weight = bumped.model.layers[2].mlp.up_proj.weight
        weight[3, 4] = torch.nextafter(weight[3, 4], weight[3, 4] + 1)
        weight = swapped.model.layers[2].mlp.up_proj.weight
        weight[[0, 1]] = weight[[1, 0]].clone()
    assert len({fingerprint, weights_fingerprint(bumped), weights_fingerprint(swapped)}) == 3
