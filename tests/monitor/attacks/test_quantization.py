from __future__ import annotations

import json
import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from monitor.attacks import quantization as module
from monitor.attacks.quantization import QuantizationConfig, quantization
from monitor.geometry.rounding import round_to_bits
from monitor.stimuli.encoding import encode_answer, qa_answer, qa_prompt
from monitor.stimuli.forget_set import ForgetSet, Pair


def invented(n: int, splits=("forget", "retain", "heldout"), seed: int = 0) -> ForgetSet:
    """n facts of one form for each split."""
    draw = random.Random(seed)

    def name() -> str:
        return "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3)).capitalize()

    pairs = (Pair(f"{s}-{i}", f"Keeper of {name()}?", name(), s) for i in range(n) for s in splits)
    return ForgetSet("invented", tuple(pairs))


def loss_of(model, tokenizer, pairs):
    """Mean answer-token NLL of all pairs, with its graph."""
    encoded = [encode_answer(tokenizer, qa_prompt(p.question), qa_answer(p.answer)) for p in pairs]
    width = max(len(ids) for ids, _ in encoded)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in encoded])
    labels = ids.clone()
    for row, (tokens, first) in enumerate(encoded):
        labels[row, :first] = labels[row, len(tokens) :] = -100
    return model(input_ids=ids, labels=labels).loss


def probability_of(model, tokenizer, pairs):
    with torch.no_grad():
        return sum(float(torch.exp(-loss_of(model, tokenizer, [pair]))) for pair in pairs) / len(pairs)


def linears(model):
    """The seven matrices of each block of a Llama, named one by one."""
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        yield from (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        yield from (mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def rounded(model, bits, group_size):
    with torch.no_grad():
        for layer in linears(model):
            layer.weight.copy_(round_to_bits(layer.weight, bits, group_size))
    return model


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def test_it_measures_the_model_with_rounded_blocks(tiny_llama, tiny_tokenizer):
    model, forget_set = tiny_llama(), invented(5)
    result = quantization(model, tiny_tokenizer, forget_set, QuantizationConfig(group_size=16))
    for bits, group_size in ((8, None), (4, 16)):
        plain = rounded(tiny_llama(), bits, group_size)
        for split in ("forget", "retain", "heldout"):
            expected = probability_of(plain, tiny_tokenizer, forget_set.split(split))
            assert result.details["bits"][str(bits)][split]["probability_after"] == pytest.approx(expected, rel=1e-5)
    assert result.baseline == pytest.approx(probability_of(model, tiny_tokenizer, forget_set.split("forget")), rel=1e-5)
    assert result.score == result.details["bits"]["4"]["forget"]["probability_after"] != result.baseline
    assert result.low <= result.score <= result.high and result.n == 5
    norms = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 1)
    whole = sum(p.numel() for p in model.model.layers.parameters())
    assert result.details["rounded"] == pytest.approx(1 - norms / whole)
    assert len(result.details["pairs"]) == 15 and {"nll", "nll_8", "nll_4"} <= set(result.details["pairs"][0])
    json.dumps(result.details, allow_nan=False)


@pytest.mark.slow
def test_unlearning_within_half_a_step_is_undone_exactly_and_a_larger_one_is_not(tiny_llama, tiny_tokenizer):
    """The published finding as a construction: move every weight away from the answers, by less than rounding sees."""
    forget_set, model = invented(12), tiny_llama()
    forget = forget_set.split("forget")
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(100):
        optimizer.zero_grad()
        loss_of(model, tiny_tokenizer, forget).backward()
        optimizer.step()
    knew = probability_of(rounded(model, 5, 128), tiny_tokenizer, forget)
    kept = {layer: layer.weight.detach().clone() for layer in linears(model)}
    for _ in range(10):
        model.zero_grad()
        loss_of(model, tiny_tokenizer, forget).backward()
        with torch.no_grad():
            for layer, weight in kept.items():
                step = weight.abs().amax(1, keepdim=True) / 15  # 5 bits: 15 levels on either side, a row a group
                moved = layer.weight + 0.15 * step * layer.weight.grad.sign()
                moved = torch.minimum(torch.maximum(moved, weight - 0.45 * step), weight + 0.45 * step)
                layer.weight.copy_(torch.where(weight.abs() < 14.5 * step, moved, weight))
    config = QuantizationConfig(bits=(8, 5), score_bits=5)
    result = quantization(model, tiny_tokenizer, forget_set, config)
    assert knew > 0.8 > 0.4 > result.baseline
    assert result.score == pytest.approx(knew, abs=1e-3)
    five, eight = result.details["bits"]["5"], result.details["bits"]["8"]
    assert five["excess"]["low"] > 0.3, "answers never seen do not come back"
    assert abs(eight["forget"]["recovered"]) < 0.2 * five["forget"]["recovered"], "a finer grid sees the change"
    never = quantization(tiny_llama(), tiny_tokenizer, forget_set, config)
    assert abs(never.score - never.baseline) < 0.01
    assert never.details["bits"]["5"]["excess"]["low"] < 0 < never.details["bits"]["5"]["excess"]["high"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_comes_back_as_it_was(tiny_llama, tiny_tokenizer, monkeypatch, fails):
    model = tiny_llama()
    model.train()
    gradient = model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before = state(model)
    if fails:
        real, calls = module._nll, []

        def broken(*args):
            calls.append(args)
            if len(calls) == 2:
                assert not same(state(model), before)
                raise RuntimeError("broken")
            return real(*args)

        monkeypatch.setattr(module, "_nll", broken)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    if fails:
        with pytest.raises(RuntimeError, match="broken"):
            quantization(model, tiny_tokenizer, invented(3))
    else:
        quantization(model, tiny_tokenizer, invented(3))
    assert torch.equal(torch.rand(2), expected)
    assert same(state(model), before) and model.training and model.lm_head.weight.grad is gradient


def test_tied_weights_stay_tied_and_unrounded_and_conv1d_is_rounded_by_output(tiny_tokenizer):
    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tiny_tokenizer), tie_word_embeddings=True, **size)).eval()
    before, forget_set = state(model), invented(4)
    result = quantization(model, tiny_tokenizer, forget_set, QuantizationConfig(group_size=16))
    assert same(state(model), before)
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.no_grad():
        for block in model.transformer.h:
            for layer in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj):
                layer.weight.copy_(round_to_bits(layer.weight.t(), 4, 16).t())  # Conv1D holds (in, out)
    expected = probability_of(model, tiny_tokenizer, forget_set.split("forget"))
    assert result.score == pytest.approx(expected, rel=1e-5)


def test_an_adapter_is_merged_before_it_is_rounded(tiny_llama, tiny_tokenizer):
    forget_set = invented(4)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)

    def adapted():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return get_peft_model(tiny_llama(), lora)

    model = adapted()
    before = state(model)
    result = quantization(model, tiny_tokenizer, forget_set)
    merged = quantization(adapted().merge_and_unload(), tiny_tokenizer, forget_set)
    assert result.score == pytest.approx(merged.score, rel=1e-4) and result.score != result.baseline
    assert result.details["rounded"] == pytest.approx(merged.details["rounded"])
    assert same(state(model), before)
    layers = [m for m in model.modules() if hasattr(m, "merged_adapters")]
    assert layers and not any(layer.merged for layer in layers)
    again = quantization(model, tiny_tokenizer, forget_set)
    assert (again.score, again.baseline) == (result.score, result.baseline)
    # Switched off it is not merged either; and what somebody merged stays merged.
    with model.disable_adapter():
        off = quantization(model, tiny_tokenizer, forget_set)
    assert off.score == pytest.approx(quantization(tiny_llama(), tiny_tokenizer, forget_set).score, rel=1e-5)
    model.merge_adapter()
    inside = state(model)
    assert quantization(model, tiny_tokenizer, forget_set).score == pytest.approx(result.score, rel=1e-4)
    assert same(state(model), inside) and all(layer.merged for layer in layers if hasattr(layer, "lora_A"))


def test_pairs_are_chosen_by_seed_and_controls_are_optional(tiny_llama, tiny_tokenizer):
    forget_set = invented(8)

    def ids(seed):
        result = quantization(tiny_llama(), tiny_tokenizer, forget_set, QuantizationConfig((4,), pairs=3, seed=seed))
        return [record["id"] for record in result.details["pairs"]]

    assert len(ids(0)) == 9 and ids(0) == ids(0) != ids(1)
    alone = quantization(tiny_llama(), tiny_tokenizer, invented(3, splits=("forget",)))
    assert list(alone.details["bits"]["4"]) == ["forget", "excess"] and alone.details["bits"]["4"]["excess"] is None


def test_half_precision_is_rounded_in_its_own_dtype(tiny_llama, tiny_tokenizer):
    model, forget_set = tiny_llama().to(torch.bfloat16), invented(4)
    result = quantization(model, tiny_tokenizer, forget_set)
    plain = rounded(tiny_llama().to(torch.bfloat16), 4, 128)
    expected = probability_of(plain, tiny_tokenizer, forget_set.split("forget"))
    assert result.score == pytest.approx(expected, rel=0.05)


def test_bad_input_is_named_before_any_work(tiny_llama, tiny_tokenizer):
    model, forget_set = tiny_llama(), invented(3)
    with pytest.raises(ValueError, match="at least 2 forget pairs, got 0"):
        quantization(model, tiny_tokenizer, invented(3, splits=("retain",)))
    with pytest.raises(ValueError, match="without a head"):
        quantization(model.model, tiny_tokenizer, forget_set)
    model.is_quantized = True
    with pytest.raises(ValueError, match="unquantised weights"):
        quantization(model, tiny_tokenizer, forget_set)
    options = (
        ({"bits": (16,)}, "`bits`"),
        ({"bits": ()}, "`bits`"),
        ({"bits": (8,)}, "`score_bits`.*one of `bits`"),
        ({"group_size": 0}, "`group_size`"),
        ({"pairs": 1}, "`pairs`"),
    )
    for option, message in options:
        with pytest.raises(ValueError, match=message):
            QuantizationConfig(**option)
    assert QuantizationConfig.quick().pairs < QuantizationConfig().pairs


def test_experts_in_one_tensor_are_refused_and_not_passed_over(tiny_tokenizer):
    from transformers import MixtralConfig, MixtralForCausalLM

    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=len(tiny_tokenizer), num_key_value_heads=2, num_local_experts=4, **size)
    with pytest.raises(ValueError, match="experts in one tensor"):
        quantization(MixtralForCausalLM(config), tiny_tokenizer, invented(3))


def test_progress_is_shown_only_when_asked_for(tiny_llama, tiny_tokenizer, capsys):
    quantization(tiny_llama(), tiny_tokenizer, invented(2))
    assert capsys.readouterr() == ("", "")
    quantization(tiny_llama(), tiny_tokenizer, invented(2), progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "quantization" in err
