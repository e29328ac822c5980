"""Weight operations against theorems, float64 sums written out, and peft's own merging and loading."""

from __future__ import annotations

import json
import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from trainers.weights import (
    LoraAdapter,
    linear_merge,
    lora_linear_merge,
    lora_task_vector_negation,
    task_vector_negation,
)

ATTENTION = ["q_proj", "v_proj"]


def state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(5, 7, generator=generator).to(dtype) for name in ("first.weight", "second.weight")}
    return weights | {"steps": torch.tensor(3), "mask": torch.tensor([True, False])}


# Full weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_endpoints_are_bit_equal_and_new(dtype):
    a, b = state(0, dtype), state(1, dtype)
    a["first.weight"][0, 0], b["first.weight"][0, 0] = -0.0, math.inf  # what arithmetic would not keep
    for ratio, expected in ((0, a), (1, b)):
        merged = linear_merge(a, b, ratio)
        assert list(merged) == list(a)
        for name, tensor in merged.items():
            assert tensor.dtype == expected[name].dtype and tensor.data_ptr() != expected[name].data_ptr()
            assert torch.equal(tensor, expected[name])
            assert torch.equal(tensor.signbit(), expected[name].signbit())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 0.9])
def test_a_merge_is_the_float64_sum_rounded_to_the_dtype(dtype, ratio):
    a, b = state(0, dtype), state(1, dtype)
    for name, tensor in linear_merge(a, b, ratio).items():
        if tensor.is_floating_point():
            exact = (1 - ratio) * a[name].double() + ratio * b[name].double()
            size = (a[name].abs() + b[name].abs()).double()
            # One rounding to the dtype, and for the wide dtypes those of the sum itself.
            unit = torch.finfo(dtype).eps * (0.5001 if dtype.itemsize == 2 else 2)
            bound = unit * (exact.abs() if dtype.itemsize == 2 else size) + 1e-6 * size * (dtype.itemsize == 2)
            assert tensor.dtype == dtype and ((tensor.double() - exact).abs() <= bound).all()


def test_sums_in_the_narrow_dtype_would_fail_the_test_above():
    a, b = state(0, torch.bfloat16)["first.weight"], state(1, torch.bfloat16)["first.weight"]
    exact = 0.7 * a.double() + 0.3 * b.double()
    error = (0.7 * a + 0.3 * b).double() - exact
    assert (error.abs() > 0.5001 * torch.finfo(torch.bfloat16).eps * exact.abs() + 1e-6).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_merge_with_itself_is_itself(dtype, ratio):
    a = state(0, dtype)
    assert all(torch.equal(tensor, a[name]) for name, tensor in linear_merge(a, dict(a), ratio).items())


def test_order_of_the_two_is_the_ratio_turned_round():
    a, b = state(0), state(1)
    forth, back = linear_merge(a, b, 0.3), linear_merge(b, a, 0.7)
    torch.testing.assert_close(forth, back, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(forth["first.weight"], linear_merge(a, b, 0.7)["first.weight"])


def test_logits_of_a_linear_model_are_merged_and_those_of_a_deep_one_are_not():
    x = torch.randn(11, 7, generator=torch.Generator().manual_seed(2))
    a, b = state(0), state(1)
    merged = linear_merge(a, b, 0.3)

    def deep(weights):
        return torch.relu(x @ weights["first.weight"].T) @ weights["second.weight"][:, :5].T

    def linear(weights):
        return x @ weights["first.weight"].T

    torch.testing.assert_close(linear(merged), 0.7 * linear(a) + 0.3 * linear(b), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(deep(merged), 0.7 * deep(a) + 0.3 * deep(b), atol=0.1)


def test_task_vector_negation_is_its_equation():
    base, finetuned = state(0), state(1)
    for scale in (0.3, 1.0, 2.5, -0.4):
        for name, tensor in task_vector_negation(base, finetuned, scale).items():
            if tensor.is_floating_point():
                exact = base[name].double() - scale * (finetuned[name].double() - base[name].double())
                torch.testing.assert_close(tensor.double(), exact, rtol=1e-5, atol=1e-5)
    for scale, expected in ((0, base), (-1, finetuned)):
        got = task_vector_negation(base, finetuned, scale)
        assert all(torch.equal(got[name], expected[name]) for name in base)


def test_negation_undoes_a_task_and_adding_it_back_restores_the_base():
    base = state(0, torch.float64)
    task = {name: t + 0.5 if t.is_floating_point() else t for name, t in base.items()}
    away = task_vector_negation(base, task, 1.0)
    torch.testing.assert_close(away["first.weight"], base["first.weight"] - 0.5)
    torch.testing.assert_close(linear_merge(away, task, 0.5)["first.weight"], base["first.weight"])


def test_tensors_are_read_one_at_a_time():
    class Counting(dict):
        read: list[str] = []

        def __getitem__(self, name):
            self.read.append(name)
            return super().__getitem__(name)

    a, b = Counting(state(0)), Counting(state(1))
    Counting.read.clear()
    linear_merge(a, b, 0.5)
    assert Counting.read == [name for name in a for _ in range(2)]  # a's, b's, then the next


@pytest.mark.parametrize("operation", [linear_merge, task_vector_negation])
@pytest.mark.parametrize(
    "change, message",
    [
        ({"third.weight": torch.zeros(2)}, r"only in `\w+`: nothing; only in `\w+`: third.weight"),
        ({"first.weight": torch.zeros(5, 8)}, r"first.weight has shape \[5, 7\] in `\w+` and \[5, 8\]"),
        ({"first.weight": torch.zeros(5, 7, dtype=torch.float16)}, "dtype float32 .* and float16 .* Save both in one"),
        ({"steps": torch.tensor(4)}, r"steps \(int64\) differs between .* no mean of integers"),
    ],
)
def test_weights_that_do_not_belong_together(operation, change, message):
    with pytest.raises(ValueError, match=message):
        operation(state(0), state(1) | change, 0.5)


def test_quantised_floats_are_refused():
    a = {"weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}
    with pytest.raises(ValueError, match="weight is float8_e4m3fn: expected float16"):
        linear_merge(a, dict(a), 0.5)


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan, math.inf])
def test_ratios_that_are_no_shares(ratio):
    with pytest.raises(ValueError, match="`ratio` is the share of the second model, between 0 and 1"):
        linear_merge(state(0), state(1), ratio)


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_scales_that_are_no_numbers(scale):
    with pytest.raises(ValueError, match="`scale` must be a finite number"):
        task_vector_negation(state(0), state(1), scale)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_the_gpu_too():
    a, b = state(0, torch.bfloat16), state(1, torch.bfloat16)
    merged = linear_merge({n: t.cuda() for n, t in a.items()}, b, 0.3)
    expected = linear_merge(a, b, 0.3)
    assert all(t.is_cuda and torch.equal(t.cpu(), expected[n]) for n, t in merged.items())


# Adapters


@pytest.fixture(scope="module")
def base(tiny_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_llama(0).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def make(tiny_llama, base, tmp_path_factory):
    """A function from a LoRA config to a saved adapter with random factors: (folder, LoraAdapter)."""

    def make(seed: int, **options):
        from transformers import AutoModelForCausalLM

        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(task_type="CAUSAL_LM", **options))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
        folder = tmp_path_factory.mktemp("adapter")
        model.save_pretrained(folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        return folder, LoraAdapter(config, load_file(folder / "adapter_model.safetensors"))

    return make


def save(adapter: LoraAdapter, folder) -> str:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file({name: t.contiguous() for name, t in adapter.tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config))
    return str(folder)


def load(base, folder) -> PeftModel:
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)


def updates(model: PeftModel, adapter: str = "default") -> dict[str, torch.Tensor]:
    """peft's own Delta W of every module that has the adapter."""
    return {
        name: module.get_delta_weight(adapter).detach()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight") and adapter in module.lora_A
    }


def weighted(a: dict, b: dict, weight_a: float, weight_b: float) -> dict[str, torch.Tensor]:
    return {
        name: weight_a * a.get(name, torch.zeros(())) + weight_b * b.get(name, torch.zeros(())) for name in {*a, *b}
    }


IDS = torch.arange(3, 27).reshape(2, 12)

PAIRS = {
    "same": (dict(r=4, lora_alpha=8, target_modules=ATTENTION), dict(r=4, lora_alpha=8, target_modules=ATTENTION)),
    "rank and alpha": (
        dict(r=2, lora_alpha=16, target_modules=ATTENTION),
        dict(r=5, lora_alpha=3, target_modules=ATTENTION),
    ),
    "rslora": (
        dict(r=4, lora_alpha=8, use_rslora=True, target_modules=ATTENTION),
        dict(r=2, lora_alpha=8, target_modules=ATTENTION),
    ),
    "modules": (dict(r=4, target_modules=ATTENTION), dict(r=3, target_modules=["q_proj", "down_proj"])),
    "disjoint": (dict(r=4, target_modules=["o_proj"]), dict(r=4, target_modules=["gate_proj"])),
    "layers": (
        dict(r=4, target_modules=ATTENTION, layers_to_transform=[0, 2]),
        dict(r=4, target_modules="all-linear"),
    ),
    "regex": (dict(r=4, target_modules=r".*layers\.[01]\..*q_proj"), dict(r=4, target_modules=["q_proj"])),
    "patterns": (
        dict(r=4, target_modules=ATTENTION, rank_pattern={"q_proj": 2}, alpha_pattern={"^model.layers.1.*v_proj": 5}),
        dict(r=3, target_modules=ATTENTION, use_rslora=True, rank_pattern={r"layers.2.self_attn.v_proj": 6}),
    ),
    "whole weights": (
        dict(r=4, target_modules=ATTENTION, modules_to_save=["lm_head"]),
        dict(r=2, target_modules=ATTENTION, modules_to_save=["lm_head"]),
    ),
}


@pytest.fixture(scope="module", params=PAIRS)
def pair(request, make):
    options_a, options_b = PAIRS[request.param]
    return make(1, **options_a), make(2, **options_b)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_a_merged_adapter_loads_and_adds_the_weighted_sum_of_updates(pair, base, tmp_path, ratio):
    (folder_a, a), (folder_b, b) = pair
    merged = load(base, save(lora_linear_merge(a, b, ratio), tmp_path / "merged"))
    model_a, model_b = load(base, folder_a), load(base, folder_b)
    expected = weighted(updates(model_a), updates(model_b), 1 - ratio, ratio)
    got = updates(merged)
    for name, update in expected.items():
        torch.testing.assert_close(got.pop(name, torch.zeros_like(update)), update, rtol=1e-5, atol=1e-5)
    assert not got

    # The same in logits: the base with the weighted updates added by hand.
    from transformers import AutoModelForCausalLM

    byhand = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, update in expected.items():
            byhand.get_submodule(name.removeprefix("base_model.model.")).weight += update
        if "base_model.model.lm_head.weight" in a.tensors:
            heads = [adapter.tensors["base_model.model.lm_head.weight"] for adapter in (a, b)]
            byhand.lm_head.weight.copy_((1 - ratio) * heads[0] + ratio * heads[1])
        torch.testing.assert_close(merged(IDS).logits, byhand(IDS).logits, rtol=1e-4, atol=1e-4)
        if 0 < ratio < 1:  # and it is neither of the two
            assert not torch.allclose(merged(IDS).logits, model_a(IDS).logits, atol=1e-3)
            assert not torch.allclose(merged(IDS).logits, model_b(IDS).logits, atol=1e-3)


def test_trained_biases_are_merged_as_whole_weights(tiny_llama, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    config = tiny_llama(0).config
    config.attention_bias = True
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    adapters = []
    for seed in (1, 2):
        options = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], bias="lora_only")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), options)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(folder := tmp_path / str(seed))
        config = json.loads((folder / "adapter_config.json").read_text())
        adapters.append(LoraAdapter(config, load_file(folder / "adapter_model.safetensors")))
    merged = load(tmp_path / "base", save(lora_linear_merge(*adapters, 0.3), tmp_path / "merged"))
    a, b = (load(tmp_path / "base", tmp_path / str(seed)) for seed in (1, 2))
    name = "base_model.model.model.layers.1.self_attn.q_proj.base_layer"
    biases = [model.get_submodule(name).bias for model in (a, b, merged)]
    assert not torch.allclose(biases[0], biases[1])
    torch.testing.assert_close(biases[2], 0.7 * biases[0] + 0.3 * biases[1])


@pytest.mark.parametrize("name", ["rank and alpha", "modules"])
def test_pefts_own_concatenation_agrees(name, make, base, tmp_path):
    (folder_a, a), (folder_b, b) = (make(seed, **options) for seed, options in zip((1, 2), PAIRS[name], strict=True))
    model = load(base, folder_a)
    model.load_adapter(folder_b, "b")
    model.add_weighted_adapter(["default", "b"], [0.7, 0.3], "cat", combination_type="cat")
    got = updates(load(base, save(lora_linear_merge(a, b, 0.3), tmp_path / "merged")))
    torch.testing.assert_close(got, updates(model, "cat"), rtol=1e-5, atol=1e-5)


def test_averaged_factors_are_something_else(make, base, tmp_path):
    options = dict(r=4, lora_alpha=4, target_modules=ATTENTION)
    (folder_a, a), (folder_b, b) = make(1, **options), make(2, **options)
    averaged = LoraAdapter(a.config, linear_merge(a.tensors, b.tensors, 0.5))
    wrong = updates(load(base, save(averaged, tmp_path / "averaged")))
    right = weighted(updates(load(base, folder_a)), updates(load(base, folder_b)), 0.5, 0.5)
    error = max((wrong[name] - right[name]).norm() / right[name].norm() for name in right)
    assert error > 0.5
    # It is what the docstring says: a quarter of each update, and the cross terms.
    for module in right:
        factors = [[t.tensors[f"{module}.lora_{f}.weight"] for f in "AB"] for t in (a, b)]
        (a_a, b_a), (a_b, b_b) = factors
        torch.testing.assert_close(wrong[module], (b_a @ a_a + b_b @ a_b + b_a @ a_b + b_b @ a_a) / 4)


def test_the_result_has_scaling_one_and_the_summed_rank(make):
    (_, a), (_, b) = make(1, r=2, target_modules=ATTENTION), make(2, r=3, target_modules=["q_proj"])
    config = lora_linear_merge(a, b, 0.3).config
    assert config["r"] == config["lora_alpha"] and not config["use_rslora"]
    assert config["rank_pattern"] == config["alpha_pattern"]
    assert {config["r"], *config["rank_pattern"].values()} == {2, 5}
    same = lora_linear_merge(a, a, 0.3).config
    assert same["r"] == 4 and same["rank_pattern"] == {} and sorted(same["target_modules"]) == ATTENTION


def test_sixteen_bit_factors_keep_their_dtype_and_mixed_ones_widen(make):
    (_, a), (_, b) = make(1, r=2, target_modules=["q_proj"]), make(2, r=2, target_modules=["q_proj"])
    narrow = LoraAdapter(a.config, {name: t.bfloat16() for name, t in a.tensors.items()})
    assert {t.dtype for t in lora_linear_merge(narrow, narrow, 0.5).tensors.values()} == {torch.bfloat16}
    assert {t.dtype for t in lora_linear_merge(narrow, b, 0.5).tensors.values()} == {torch.float32}


def test_endpoints_of_adapters_are_the_adapters(make):
    (_, a), (_, b) = make(1, r=2, target_modules=["q_proj"]), make(2, r=3, target_modules=["v_proj"])
    assert lora_linear_merge(a, b, 0) is a and lora_linear_merge(a, b, 1) is b


def test_negation_turns_the_update_round(make, base, tmp_path):
    folder, adapter = make(1, r=4, lora_alpha=9, use_rslora=True, target_modules=ATTENTION, rank_pattern={"v_proj": 2})
    before = updates(load(base, folder))
    after = updates(load(base, save(lora_task_vector_negation(adapter, 0.5), tmp_path / "negated")))
    assert before.keys() == after.keys()
    for name in before:
        torch.testing.assert_close(after[name], -0.5 * before[name])
    same = lora_task_vector_negation(adapter, -1)
    assert all(torch.equal(same.tensors[name], tensor) for name, tensor in adapter.tensors.items())


def test_negation_from_an_adapter_that_was_trained_further(make, base, tmp_path):
    (folder_a, a), (folder_b, b) = (make(seed, r=seed, target_modules=ATTENTION) for seed in (2, 3))
    got = updates(load(base, save(lora_task_vector_negation(b, 0.5, base=a), tmp_path / "negated")))
    expected = weighted(updates(load(base, folder_a)), updates(load(base, folder_b)), 1.5, -0.5)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert lora_task_vector_negation(b, 0, base=a) is a and lora_task_vector_negation(b, -1, base=a) is b


def plain(**changes) -> LoraAdapter:
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"], "base_model_name_or_path": "base"}
    tensors = {
        "base_model.model.q.lora_A.weight": torch.ones(2, 3),
        "base_model.model.q.lora_B.weight": torch.ones(4, 2),
    }
    return LoraAdapter(config | changes.pop("config", {}), tensors | changes)


@pytest.mark.parametrize(
    "adapter, message",
    [
        (plain(config={"peft_type": "IA3"}), "`b` is of type 'IA3', expected 'LORA'"),
        (plain(config={"use_dora": True}), "`b` uses use_dora"),
        (plain(config={"lora_bias": True}), "`b` uses lora_bias"),
        (plain(config={"target_parameters": ["experts"]}), "`b` uses target_parameters"),
        (plain(config={"trainable_token_indices": [1]}), "`b` uses trainable_token_indices"),
        (plain(config={"an_option_of_tomorrow": 1}), "`b` uses an_option_of_tomorrow.*merge_and_unload"),
        (
            plain(config={"init_lora_weights": "pissa_niter_4"}),
            "initialised by 'pissa_niter_4', which changes the base",
        ),
        (plain(config={"base_model_name_or_path": "other"}), "differ in `base_model_name_or_path`: 'base' and 'other'"),
        (plain(config={"revision": "v2"}), "differ in `revision`: 'main' and 'v2'"),
        (plain(config={"bias": "all"}), "differ in `bias`: 'none' and 'all'"),
        (plain(config={"r": 3}), r"`b`, module q: expected lora_A \[3, in\] and lora_B \[out, 3\]"),
        (plain(**{"q.lora_embedding_A": torch.ones(2, 3)}), "`b` holds q.lora_embedding_A: only the factors"),
        (plain(**{"base_model.model.p.lora_A.weight": torch.ones(2, 3)}), "module p: expected lora_A"),
        (plain(**{"base_model.model.head.weight": torch.ones(2)}), "one adapter alone also holds whole weights .*head"),
        (plain(**{"base_model.model.q.lora_A.weight": torch.ones(2, 5)}), "lora_A is for layers of 3 and 5 features"),
        (LoraAdapter(plain().config, {}), "`b` holds no LoRA factors"),
    ],
)
def test_adapters_that_cannot_be_merged(adapter, message):
    with pytest.raises(ValueError, match=message):
        lora_linear_merge(plain(), adapter, 0.5)


def test_whole_weights_cannot_be_negated_without_the_base():
    with pytest.raises(ValueError, match="whole weights .*head.weight.*merge_and_unload"):
        lora_task_vector_negation(plain(**{"base_model.model.head.weight": torch.ones(2)}), 1.0)


@pytest.mark.parametrize("options", [dict(use_dora=True), dict(lora_bias=True)])
def test_adapters_that_peft_saves_with_more_than_factors_are_refused(make, options):
    _, adapter = make(1, r=2, target_modules=ATTENTION, **options)
    with pytest.raises(ValueError, match=next(iter(options))):
        lora_linear_merge(adapter, adapter, 0.5)


def test_embedding_adapters_are_refused(make):
    _, adapter = make(1, r=2, target_modules=["embed_tokens"])
    with pytest.raises(ValueError, match="lora_embedding_A"):
        lora_linear_merge(adapter, adapter, 0.5)
