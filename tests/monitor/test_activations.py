"""The pass against plain forwards: same numbers, whatever the batches, and the model left as it was."""

import random
import warnings

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen2Config,
    T5Config,
)

from monitor.activations import (
    Activations,
    Answers,
    States,
    measure_activations,
    plan_activations,
    run_plan,
)
from monitor.stimuli.encoding import encode_answer, encode_text

WORDS = "the wizard went to school and asked who is captain of a ship that sails by night".split()
TEXTS = tuple(" ".join(random.Random(i).choices(WORDS, k=2 + i % 9)) for i in range(40))
POOLINGS = ("mean", "last", "max", "mean_no_sink")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
CONFIGS = {
    "llama": lambda v: LlamaConfig(vocab_size=v, num_key_value_heads=2, **SIZES),
    "gpt2": lambda v: GPT2Config(vocab_size=v, n_embd=32, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2),
    "gpt_neox": lambda v: GPTNeoXConfig(vocab_size=v, **SIZES),
    "gemma2": lambda v: Gemma2Config(vocab_size=v, num_key_value_heads=2, head_dim=8, **SIZES),
    "gemma3": lambda v: Gemma3TextConfig(vocab_size=v, num_key_value_heads=2, head_dim=8, **SIZES),
    "qwen2": lambda v: Qwen2Config(vocab_size=v, num_key_value_heads=2, **SIZES),
    "bert": lambda v: BertConfig(vocab_size=v, **SIZES),
    "t5": lambda v: T5Config(vocab_size=v, d_model=32, d_kv=8, d_ff=48, num_layers=4, num_heads=4),
}
DECODERS = [name for name in CONFIGS if name not in ("bert", "t5")]


def build(name, tokenizer):
    torch.manual_seed(0)
    make = AutoModel if name in ("bert", "t5") else AutoModelForCausalLM
    return make.from_config(CONFIGS[name](len(tokenizer))).eval()


def plain_states(model, ids):
    """[L+1, T, d]: transformers' own hidden states of one unpadded text."""
    inner = model.get_encoder() if model.config.is_encoder_decoder else model
    with torch.no_grad():
        return torch.stack(inner(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states)[:, 0]


@pytest.mark.parametrize("name", CONFIGS)
def test_states_equal_a_plain_forward_of_each_text_alone(name, tiny_tokenizer):
    model = build(name, tiny_tokenizer)
    requests = {p: States(TEXTS, "all", p) for p in POOLINGS}
    activations = measure_activations(model, tiny_tokenizer, list(requests.values()), token_budget=64)
    for i, text in enumerate(TEXTS[:15]):
        states = plain_states(model, encode_text(tiny_tokenizer, text))
        with_bos = plain_states(model, encode_text(tiny_tokenizer, text, bos=True))
        expected = {
            "mean": states.mean(1),
            "last": states[:, -1],
            "max": states.amax(1),
            "mean_no_sink": with_bos[:, 1:].mean(1),
        }
        for pooling, request in requests.items():
            torch.testing.assert_close(activations.states(request)[i], expected[pooling], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS)
def test_answers_equal_a_plain_forward_including_softcapped_logits(name, tiny_tokenizer):
    model = build(name, tiny_tokenizer)
    answers = Answers(TEXTS, tuple(f" {w} ship" for w in (WORDS * 3)[: len(TEXTS)]), distribution=True)
    scores = measure_activations(model, tiny_tokenizer, [answers], token_budget=64).answers(answers)
    for i, (prompt, answer) in enumerate(zip(answers.prompts[:15], answers.answers, strict=False)):
        ids, start = encode_answer(tiny_tokenizer, prompt, answer)
        with torch.no_grad():
            rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)[start - 1 : -1]
        tokens = torch.tensor(ids[start:])
        torch.testing.assert_close(scores.log_distribution[i], rows, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scores.log_probs[i], rows.gather(1, tokens[:, None])[:, 0], rtol=1e-5, atol=1e-5)
        assert scores.greedy[i].equal(rows.argmax(-1) == tokens)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_values_do_not_depend_on_batch_composition_order_or_padding_side(name, tiny_tokenizer):
    model = build(name, tiny_tokenizer)
    request = States(TEXTS, "all", "mean")
    reference = measure_activations(model, tiny_tokenizer, [request], token_budget=1).states(request)
    for budget in (16, 100, 4096):
        states = measure_activations(model, tiny_tokenizer, [request], token_budget=budget).states(request)
        torch.testing.assert_close(states, reference, rtol=1e-5, atol=1e-5)
    backwards = States(TEXTS[::-1], "all", "mean")
    tiny_tokenizer.padding_side = "left"
    try:
        states = measure_activations(model, tiny_tokenizer, [backwards]).states(backwards)
    finally:
        tiny_tokenizer.padding_side = "right"
    torch.testing.assert_close(states.flip(0), reference, rtol=1e-5, atol=1e-5)


def test_a_pad_token_is_never_needed(tiny_llama, tiny_tokenizer):
    model, request = tiny_llama(), States(TEXTS, (0.8, -1), "last")
    expected = measure_activations(model, tiny_tokenizer, [request]).states(request)
    pad, tiny_tokenizer.pad_token = tiny_tokenizer.pad_token, None
    try:
        states = measure_activations(model, tiny_tokenizer, [request], token_budget=100).states(request)
    finally:
        tiny_tokenizer.pad_token = pad
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def test_texts_are_read_once_however_often_they_are_asked_for(tiny_llama, tiny_tokenizer):
    twice = [States(TEXTS + TEXTS, (1,)), States(TEXTS, (-1,)), States(TEXTS[:3], (1, 2), "max")]
    plan = plan_activations(tiny_llama(), tiny_tokenizer, twice)
    assert len(plan.sequences) == len(set(TEXTS))
    result = run_plan(tiny_llama(), plan)
    assert result.states(twice[0]).shape == (2 * len(TEXTS), 1, 32)
    assert result.states(twice[0])[0].equal(result.states(twice[0])[len(TEXTS)])


def test_blocks_after_the_deepest_layer_do_not_run(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    ran = []
    for i, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    measure_activations(model, tiny_tokenizer, [States(TEXTS, (0, 2))])
    assert set(ran) == {0, 1}
    ran.clear()
    measure_activations(model, tiny_tokenizer, [States(TEXTS, (0,))])
    assert not ran


def test_the_head_sees_only_the_rows_that_predict_answers(tiny_llama, tiny_tokenizer):
    model, seen = tiny_llama(), []
    answers = Answers(TEXTS, (" the ship",) * len(TEXTS))
    measure_activations(model, tiny_tokenizer, [States(TEXTS)])
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape[:-1].numel()))
    measure_activations(model, tiny_tokenizer, [States(TEXTS)])
    assert not seen, "states alone must not reach the head"
    result = measure_activations(model, tiny_tokenizer, [answers]).answers(answers)
    distinct = dict(zip(answers.prompts, result.log_probs, strict=True))
    assert sum(seen) == sum(map(len, distinct.values()))


def test_the_model_and_the_generators_are_left_as_they_were(tiny_llama, tiny_tokenizer):
    model = tiny_llama().train()
    model.model.layers[1].eval()
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    state, py_state = torch.get_rng_state(), random.getstate()
    requests = [States(TEXTS, "all"), Answers(TEXTS, (" ship",) * len(TEXTS))]
    measure_activations(model, tiny_tokenizer, requests)
    assert [m.training for m in model.modules()] == modes
    assert torch.get_rng_state().equal(state) and random.getstate() == py_state
    assert all(model.state_dict()[k].equal(v) for k, v in weights.items())
    assert all(p.grad is None for p in model.parameters())
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_dropout_is_off_and_the_mode_survives_an_error(tiny_tokenizer):
    config = CONFIGS["gpt2"](len(tiny_tokenizer))  # GPT-2's default dropout is 0.1
    model = AutoModelForCausalLM.from_config(config).train()
    request = States(TEXTS)
    first = measure_activations(model, tiny_tokenizer, [request]).states(request)
    assert first.equal(measure_activations(model, tiny_tokenizer, [request]).states(request))
    model.transformer.h[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        measure_activations(model, tiny_tokenizer, [request])
    assert all(m.training for m in model.modules())
    assert not model.transformer._forward_hooks


def test_a_patched_instance_forward_is_not_what_is_measured(tiny_llama, tiny_tokenizer):
    """TRL replaces `model.forward` by a closure; answers must still come from the model's own forward."""
    model, answers = tiny_llama(), Answers(TEXTS, (" ship",) * len(TEXTS))
    expected = measure_activations(model, tiny_tokenizer, [answers]).answers(answers)
    model.forward = lambda *args, **kwargs: pytest.fail("the patched forward was called")
    scores = measure_activations(model, tiny_tokenizer, [answers]).answers(answers)
    assert all(a.equal(b) for a, b in zip(scores.log_probs, expected.log_probs, strict=True))


def test_running_out_of_memory_halves_the_batches(tiny_llama, tiny_tokenizer):
    model, request = tiny_llama(), States(TEXTS)
    expected = measure_activations(model, tiny_tokenizer, [request]).states(request)
    sizes = []

    def refuse(module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        sizes.append(len(hidden))
        if len(hidden) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    model.model.layers[0].register_forward_pre_hook(refuse, with_kwargs=True)
    states = measure_activations(model, tiny_tokenizer, [request]).states(request)
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)
    assert max(sizes) > 3
    tail = sizes[sizes.index(next(s for s in sizes if s <= 3)) :]
    assert max(tail) <= 3, "once halved, later batches are small as well"


def test_a_text_too_large_alone_raises_the_devices_own_error(tiny_llama, tiny_tokenizer):
    model = tiny_llama()

    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.model.layers[0].register_forward_pre_hook(refuse)
    with pytest.raises(torch.OutOfMemoryError):
        measure_activations(model, tiny_tokenizer, [States(TEXTS)])


def test_half_precision_is_pooled_in_float32(tiny_llama, tiny_tokenizer):
    request = States(TEXTS, "all", "mean")
    exact = measure_activations(tiny_llama(), tiny_tokenizer, [request]).states(request)
    half = measure_activations(tiny_llama().bfloat16(), tiny_tokenizer, [request]).states(request)
    assert half.dtype == torch.float32
    assert ((half - exact).norm() / exact.norm()) < 0.02
    assert not half.equal(half.bfloat16().float()), "the mean itself was rounded to bfloat16"


def test_lora_is_measured_with_its_adapter(tiny_llama, tiny_tokenizer):
    from peft import LoraConfig, get_peft_model

    requests = [States(TEXTS), Answers(TEXTS, (" ship",) * len(TEXTS))]
    base = measure_activations(tiny_llama(), tiny_tokenizer, requests)
    model = get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    start = measure_activations(model, tiny_tokenizer, requests)
    torch.testing.assert_close(start.states(requests[0]), base.states(requests[0]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    changed = measure_activations(model, tiny_tokenizer, requests)
    assert (changed.states(requests[0]) - base.states(requests[0])).abs().max() > 1e-3


def test_what_was_stored_is_what_was_read(tiny_llama, tiny_tokenizer, tmp_path):
    requests = [States(TEXTS, "all"), Answers(TEXTS, (" ship",) * len(TEXTS), distribution=True)]
    plan = plan_activations(tiny_llama(), tiny_tokenizer, requests)
    activations = run_plan(tiny_llama(), plan)
    activations.save(tmp_path / "deep" / "r.safetensors")
    loaded = Activations.load(tmp_path / "deep" / "r.safetensors", plan)
    assert loaded.tensors.keys() == activations.tensors.keys()
    assert all(t.equal(activations.tensors[k]) for k, t in loaded.tensors.items())
    other = plan_activations(tiny_llama(), tiny_tokenizer, [States(TEXTS[1:], "all")])
    with pytest.raises(ValueError, match="other stimuli"):
        Activations.load(tmp_path / "deep" / "r.safetensors", other)


# --- bad input, each with its message ---------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [5, -6, 1.2, "last", True])
def test_a_layer_out_of_range_is_refused(layer, tiny_llama, tiny_tokenizer):
    with pytest.raises(ValueError, match="layer"):
        measure_activations(tiny_llama(), tiny_tokenizer, [States(TEXTS, (layer,))])


def test_an_unknown_pooling_is_refused():
    with pytest.raises(ValueError, match="mean_no_sink"):
        States(TEXTS, (-1,), "average")


@pytest.mark.parametrize("texts", [(), ("fine", "  "), "one string"])
def test_empty_texts_are_refused(texts):
    with pytest.raises(ValueError, match="texts"):
        States(texts)


def test_empty_answers_are_refused_by_position():
    with pytest.raises(ValueError, match=r"`answers`.*\[1\]"):
        Answers(("a", "b"), (" x", " "))


def test_prompts_and_answers_must_pair():
    with pytest.raises(ValueError, match="same length"):
        Answers(("a", "b"), (" x",))


def test_a_text_that_is_cut_is_said_and_a_cut_answer_is_refused(tiny_llama, tiny_tokenizer):
    with pytest.warns(UserWarning, match="were cut"):
        measure_activations(tiny_llama(), tiny_tokenizer, [States(("ship " * 300, "ship"))])
    with pytest.raises(ValueError, match="would be cut"):
        measure_activations(tiny_llama(), tiny_tokenizer, [Answers(("ship " * 300,), (" night",))])


def test_answers_need_a_causal_head(tiny_tokenizer):
    with pytest.raises(ValueError, match="language-model head"):
        measure_activations(build("bert", tiny_tokenizer), tiny_tokenizer, [Answers(("a",), (" b",))])


def test_states_that_are_not_finite_are_said_with_their_layers(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj.weight.data.fill_(torch.inf)
    with pytest.warns(UserWarning, match=r"not finite at layers \[2, 3, 4\]"):
        measure_activations(model, tiny_tokenizer, [States(TEXTS, "all")])


def test_no_bos_token_is_said_for_decoders(tiny_llama, tiny_tokenizer):
    bos, tiny_tokenizer.bos_token = tiny_tokenizer.bos_token, None
    try:
        with pytest.warns(UserWarning, match="no BOS"):
            request = States(TEXTS, (-1,), "mean_no_sink")
            measure_activations(tiny_llama(), tiny_tokenizer, [request])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            measure_activations(tiny_llama(), tiny_tokenizer, [States(TEXTS, (-1,), "mean")])
    finally:
        tiny_tokenizer.bos_token = bos


def test_a_model_that_is_no_transformer_is_refused(tiny_tokenizer):
    with pytest.raises(ValueError, match="transformers model"):
        measure_activations(torch.nn.Linear(2, 2), tiny_tokenizer, [States(TEXTS)])


def test_an_unplanned_request_is_refused(tiny_llama, tiny_tokenizer):
    result = measure_activations(tiny_llama(), tiny_tokenizer, [States(TEXTS)])
    with pytest.raises(KeyError, match="stimuli"):
        result.states(States(TEXTS[:2]))
