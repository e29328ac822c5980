"""Every token's state at one layer, against transformers' own hidden states of each text alone."""

import random
from pathlib import Path

import pytest
import torch
from processes import run
from transformers import AutoModelForCausalLM, BertConfig, BertModel, Gemma2Config, GPT2Config

from monitor.activations import (
    Activations,
    Answers,
    States,
    TokenStates,
    measure_activations,
    plan_activations,
    run_plan,
)
from monitor.stimuli.encoding import encode_answer

WORDS = "the wizard went to school and asked who is captain of a ship that sails by night".split()
PROMPTS = tuple(" ".join(random.Random(i).choices(WORDS, k=2 + i % 9)) for i in range(20))
ANSWERS = tuple(f" {word} ship" for word in (WORDS * 2)[: len(PROMPTS)])


def plain(model, tokenizer, prompt, answer, layer):
    ids, _ = encode_answer(tokenizer, prompt, answer)
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0]


def build(name, tiny_llama, tokenizer):
    torch.manual_seed(0)
    size = len(tokenizer)
    if name == "gpt2":
        config = GPT2Config(vocab_size=size, n_embd=32, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2)
        return AutoModelForCausalLM.from_config(config).eval()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    if name == "gemma2":
        config = Gemma2Config(vocab_size=size, num_key_value_heads=2, head_dim=8, **sizes)
        return AutoModelForCausalLM.from_config(config).eval()
    return BertModel(BertConfig(vocab_size=size, **sizes)).eval() if name == "bert" else tiny_llama()


@pytest.mark.parametrize("budget", [1, 64, 4096])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "bert"])
def test_states_equal_a_plain_forward_of_each_text_alone(name, budget, tiny_llama, tiny_tokenizer):
    model = build(name, tiny_llama, tiny_tokenizer)
    requests = {layer: TokenStates(PROMPTS, ANSWERS, layer) for layer in (0, 2, 4)}
    result = measure_activations(model, tiny_tokenizer, list(requests.values()), token_budget=budget)
    for layer, request in requests.items():
        states = result.token_states(request)
        assert len(states) == len(PROMPTS)
        for found, prompt, answer in zip(states, PROMPTS, ANSWERS, strict=True):
            assert found.dtype == torch.float32
            expected = plain(model, tiny_tokenizer, prompt, answer, layer)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    deep, final = result.token_states(requests[2])[0], result.token_states(requests[4])[0]
    assert (deep - final).abs().max() > 0.01  # or the comparison above would not tell layers apart


def test_fractions_and_negative_layers(tiny_llama, tiny_tokenizer):
    by_name = {layer: TokenStates(PROMPTS, ANSWERS, layer) for layer in (1, 0.25, -1, -3, 0.5)}
    result = measure_activations(tiny_llama(), tiny_tokenizer, list(by_name.values()))
    states = {layer: torch.cat(result.token_states(request)) for layer, request in by_name.items()}
    assert states[1].equal(states[0.25]) and states[-3].equal(states[0.5])
    expected = torch.cat([plain(tiny_llama(), tiny_tokenizer, p, a, 4) for p, a in zip(PROMPTS, ANSWERS, strict=True)])
    torch.testing.assert_close(states[-1], expected, rtol=1e-5, atol=1e-5)


def test_the_whole_depth_is_not_the_first_layer(tiny_llama, tiny_tokenizer):
    """1 == 1.0 in Python, and the two mean the first block's output and the last."""
    one, whole = TokenStates(PROMPTS, ANSWERS, 1), TokenStates(PROMPTS, ANSWERS, 1.0)
    result = measure_activations(tiny_llama(), tiny_tokenizer, [one, whole])
    for request, layer in ((one, 1), (whole, 4)):
        expected = plain(tiny_llama(), tiny_tokenizer, PROMPTS[0], ANSWERS[0], layer)
        torch.testing.assert_close(result.token_states(request)[0], expected, rtol=1e-5, atol=1e-5)
    pooled = [States(PROMPTS, (1,)), States(PROMPTS, (1.0,))]
    result = measure_activations(tiny_llama(), tiny_tokenizer, pooled)
    assert [result.layers(request) for request in pooled] == [(1,), (4,)]


def test_pairs_are_read_once_and_shared_with_answers(tiny_llama, tiny_tokenizer):
    twice = TokenStates(PROMPTS[::-1] + PROMPTS, ANSWERS[::-1] + ANSWERS, 2)
    answers = Answers(PROMPTS, ANSWERS)
    plan = plan_activations(tiny_llama(), tiny_tokenizer, [answers, twice])
    assert len(plan.sequences) == len(set(zip(PROMPTS, ANSWERS, strict=True)))
    model, tokens = tiny_llama(), []
    model.model.register_forward_hook(lambda module, args, output: tokens.append(output[0].shape[0]))
    result = run_plan(model, plan)
    assert sum(tokens) == len(plan.sequences)
    states = result.token_states(twice)
    assert all(a.equal(b) for a, b in zip(states, states[::-1], strict=True))
    apart = measure_activations(tiny_llama(), tiny_tokenizer, [answers]).answers(answers)
    for found, expected in zip(result.answers(answers).log_probs, apart.log_probs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_pooled_states_and_token_states_of_one_pass_agree(tiny_llama, tiny_tokenizer):
    pairs = TokenStates(PROMPTS, ANSWERS, 3)
    texts = States(tuple(p + a for p, a in zip(PROMPTS, ANSWERS, strict=True)), (1, 3))
    result = measure_activations(tiny_llama(), tiny_tokenizer, [pairs, texts])
    means = torch.stack([states.mean(0) for states in result.token_states(pairs)])
    torch.testing.assert_close(means, result.states(texts)[:, 1], rtol=1e-5, atol=1e-5)


def test_blocks_after_the_layer_do_not_run(tiny_llama, tiny_tokenizer):
    model, ran = tiny_llama(), []
    for i, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("the head ran"))
    measure_activations(model, tiny_tokenizer, [TokenStates(PROMPTS, ANSWERS, 2)])
    assert set(ran) == {0, 1}
    ran.clear()
    measure_activations(model, tiny_tokenizer, [TokenStates(PROMPTS, ANSWERS, 0)])
    assert not ran
    measure_activations(model, tiny_tokenizer, [TokenStates(PROMPTS, ANSWERS, 4)])
    assert set(ran) == {0, 1, 2, 3}


def test_half_precision_comes_as_float32_and_the_model_keeps_no_hooks(tiny_llama, tiny_tokenizer):
    request, model = TokenStates(PROMPTS, ANSWERS, 2), tiny_llama().bfloat16()
    states = torch.cat(measure_activations(model, tiny_tokenizer, [request]).token_states(request))
    exact = torch.cat(measure_activations(tiny_llama(), tiny_tokenizer, [request]).token_states(request))
    assert states.dtype == torch.float32 and states.equal(states.bfloat16().float())
    assert (states - exact).norm() < 0.02 * exact.norm()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_running_out_of_memory_changes_nothing(tiny_llama, tiny_tokenizer):
    request, model = TokenStates(PROMPTS, ANSWERS, 2), tiny_llama()
    expected = measure_activations(model, tiny_tokenizer, [request]).token_states(request)
    refused = []

    def refuse(module, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        if len(hidden) > 2:
            refused.append(len(hidden))
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.model.layers[1].register_forward_pre_hook(refuse, with_kwargs=True)
    found = measure_activations(model, tiny_tokenizer, [request]).token_states(request)
    assert refused
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_what_was_stored_is_what_was_read(tiny_llama, tiny_tokenizer, tmp_path):
    request = TokenStates(PROMPTS, ANSWERS, 2)
    plan = plan_activations(tiny_llama(), tiny_tokenizer, [request])
    activations = run_plan(tiny_llama(), plan)
    assert activations.hidden_size == 32
    activations.save(tmp_path / "r.safetensors")
    loaded = Activations.load(tmp_path / "r.safetensors", plan).token_states(request)
    assert all(a.equal(b) for a, b in zip(loaded, activations.token_states(request), strict=True))
    for other in (
        TokenStates(PROMPTS, ANSWERS, 1),
        TokenStates(PROMPTS[1:], ANSWERS[1:], 2),
        Answers(PROMPTS, ANSWERS),
    ):
        with pytest.raises(ValueError, match="other stimuli"):
            Activations.load(tmp_path / "r.safetensors", plan_activations(tiny_llama(), tiny_tokenizer, [other]))


def test_fingerprints_of_plans_without_token_states_stay_what_they_were(tiny_llama, tiny_tokenizer):
    """A literal from before token states existed: references that were stored then are still found."""
    texts = ("the wizard went", "who is the captain of the ship", "by night a ship sails", "the wizard went")
    requests = [
        States(texts, "all"),
        States(texts, (0.8, -1), "mean_no_sink"),
        Answers(texts, (" ship",) * 4, distribution=True),
        Answers(texts[:2], (" at night",) * 2),
    ]
    fingerprint = plan_activations(tiny_llama(), tiny_tokenizer, requests).fingerprint()
    assert fingerprint == "51c4bcdda54fc3f5488ded139b65c59d083d5df9bd715ba4acb26aa053f73822"
    more = [*requests, TokenStates(texts, (" ship",) * 4, 2)]
    assert plan_activations(tiny_llama(), tiny_tokenizer, more).fingerprint() != fingerprint


RANKS = """
import sys, torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from monitor.activations import Answers, TokenStates, measure_activations
sys.path.insert(0, sys.argv[2])
from test_token_states import ANSWERS, PROMPTS

folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
model = AutoModelForCausalLM.from_pretrained(folder + "/model")
dist.init_process_group("gloo")
requests = [TokenStates(PROMPTS, ANSWERS, 2), Answers(PROMPTS[:3], ANSWERS[:3]), TokenStates(PROMPTS, ANSWERS, -1)]
measure_activations(model, tokenizer, requests, token_budget=40).save(f"{folder}/{dist.get_rank()}.safetensors")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_rank_gets_what_one_process_gets(tiny_llama, tiny_tokenizer, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "script.py").write_text(RANKS)
    run(tmp_path / "script.py", [tmp_path, Path(__file__).parent], tmp_path, ranks=2)
    requests = [TokenStates(PROMPTS, ANSWERS, 2), Answers(PROMPTS[:3], ANSWERS[:3]), TokenStates(PROMPTS, ANSWERS, -1)]
    plan = plan_activations(tiny_llama(), tiny_tokenizer, requests)
    expected = run_plan(tiny_llama(), plan)
    for rank in (0, 1):
        result = Activations.load(tmp_path / f"{rank}.safetensors", plan)
        for request in (requests[0], requests[2]):
            found, alone = result.token_states(request), expected.token_states(request)
            torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


# --- bad input, each with its message ---------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [5, -6, 1.2, "last", True])
def test_a_layer_out_of_range_is_refused(layer, tiny_llama, tiny_tokenizer):
    with pytest.raises(ValueError, match="layer"):
        measure_activations(tiny_llama(), tiny_tokenizer, [TokenStates(PROMPTS, ANSWERS, layer)])


@pytest.mark.parametrize(
    ("prompts", "answers", "message"),
    [
        ((), (), "`prompts` is empty"),
        (("a",), (" b", " c"), "same length"),
        (("a", "b"), (" x", " "), r"`answers`.*\[1\]"),
        ("a", (" b",), "`prompts` must be a sequence of strings"),
        (("a",), " b", "`answers` must be a sequence of strings"),
    ],
)
def test_bad_pairs_are_refused(prompts, answers, message):
    for make in (Answers, lambda p, a: TokenStates(p, a, 1)):
        with pytest.raises(ValueError, match=message):
            make(prompts, answers)


def test_a_pair_that_would_be_cut_is_refused(tiny_llama, tiny_tokenizer):
    with pytest.raises(ValueError, match="would be cut"):
        measure_activations(tiny_llama(), tiny_tokenizer, [TokenStates(("ship " * 300,), (" night",), 1)])


def test_states_that_are_not_finite_are_said_with_their_layer(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    model.model.layers[1].mlp.down_proj.weight.data.fill_(torch.inf)
    with pytest.warns(UserWarning, match=r"tokens are not finite at layers \[2\]"):
        measure_activations(model, tiny_tokenizer, [TokenStates(PROMPTS, ANSWERS, 2)])


def test_an_unplanned_request_is_refused(tiny_llama, tiny_tokenizer):
    result = measure_activations(tiny_llama(), tiny_tokenizer, [TokenStates(PROMPTS, ANSWERS, 2)])
    with pytest.raises(KeyError, match="not part of the pass"):
        result.token_states(TokenStates(PROMPTS, ANSWERS, 3))
