"""ReFT-r1 on a model in which a word's direction is planted: it is found, it tells, it steers, and no weight moves."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertModel, LlamaForCausalLM

from monitor.activations import TokenStates, measure_activations
from monitor.reft import reft_r1
from monitor.steered_generation import steered_answers
from monitor.stimuli.encoding import encode_answer, qa_prompt

WORDS = "wizard went to school captain of".split()
CONCEPT, CONFOUND = torch.eye(32)[5], torch.eye(32)[9]


def pairs(n, seed=0):
    """Positives are negatives with three words of eight replaced by the concept's."""
    draw, found = random.Random(seed), []
    for _ in range(n):
        negative = draw.choices(WORDS, k=8)
        positive = [word if i not in (1, 4, 6) else "ship" for i, word in enumerate(negative)]
        found.append(
            SimpleNamespace(
                instruction=" ".join(draw.choices(WORDS, k=4)),
                positive=" ".join(positive),
                negative=" ".join(negative),
            )
        )
    return found


@pytest.fixture
def planted(tiny_llama, tiny_tokenizer):
    """A llama that sees "ship" along two directions, and says it along one; the other only makes it say nonsense."""
    model = tiny_llama()
    (ship,) = tiny_tokenizer(" ship")["input_ids"]
    (nonsense,) = tiny_tokenizer("Z")["input_ids"]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, [5, 9]] = 0
        model.model.embed_tokens.weight[ship] = CONCEPT + CONFOUND
        model.lm_head.weight[:, [5, 9]] = 0
        model.lm_head.weight[ship, 5] = model.lm_head.weight[nonsense, 9] = 1.0
    return model


def nll(model, tokenizer, pair, name, direction=None, layer=2, k=8):
    """Mean NLL of a response, pushed along the direction: the definition written down for one text."""
    ids, first = encode_answer(tokenizer, qa_prompt(pair.instruction), " " + getattr(pair, name))

    def push(module, args, output):
        latents = (output[0, 1:] @ direction).relu()
        return torch.cat(
            (output[:, :1], output[:, 1:] + latents.topk(min(k, len(latents))).values.mean() * direction), 1
        )

    handle = None if direction is None else model.model.layers[layer - 1].register_forward_hook(push)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    if handle:
        handle.remove()
    return float(cross_entropy(logits[first - 1 : -1], torch.tensor(ids[first:])))


def mean_nll(model, tokenizer, held, name, direction=None):
    return sum(nll(model, tokenizer, pair, name, direction) for pair in held) / len(held)


def latents(model, tokenizer, held, name, direction, k=8):
    """The mean of each response's top latents."""
    request = TokenStates(tuple(qa_prompt(p.instruction) for p in held), tuple(" " + getattr(p, name) for p in held), 2)
    states = measure_activations(model, tokenizer, [request]).token_states(request)
    return torch.stack([(rows[1:] @ direction).relu().topk(k).values.mean() for rows in states])


def test_a_planted_direction_is_found_tells_and_steers(planted, tiny_tokenizer):
    found = reft_r1(planted, tiny_tokenizer, pairs(12), layer=2, epochs=15)
    assert found.method == "reft_r1" and found.basis.shape == (32, 1) and not found.offset.any()
    direction = found.basis[:, 0]
    held = pairs(10, seed=1)
    assert mean_nll(planted, tiny_tokenizer, held, "positive", direction) < 0.9 * mean_nll(
        planted, tiny_tokenizer, held, "positive"
    )
    with_it = latents(planted, tiny_tokenizer, held, "positive", direction)
    without = latents(planted, tiny_tokenizer, held, "negative", direction)
    assert with_it.min() > 2 * without.max()
    # What the two differ in is more than what makes the word likelier; the language-model loss takes that part out.
    start = reft_r1(planted, tiny_tokenizer, pairs(12), layer=2, learning_rate=1e-9).basis[:, 0]
    assert float(direction @ CONCEPT) > float(start @ CONCEPT) + 0.1
    assert float(direction @ CONFOUND) < float(start @ CONFOUND) - 0.2
    options = {"layer": 2, "strength": 5.0, "decay": 1.0, "max_new_tokens": 3}
    (answers,) = steered_answers(planted, tiny_tokenizer, [qa_prompt("went to")], found.basis.T, **options)
    assert answers == ["ship ship ship"]


def test_without_a_concept_nothing_is_told(planted, tiny_tokenizer):
    """The negative control: responses that differ by chance alone give a direction that tells none from none."""
    even = pairs(12)
    for pair, other in zip(even, pairs(12, seed=5), strict=True):
        pair.positive = other.negative
    direction = reft_r1(planted, tiny_tokenizer, even, layer=2).basis[:, 0]
    held = pairs(30, seed=1)
    for pair, other in zip(held, pairs(30, seed=6), strict=True):
        pair.positive = other.negative
    more = latents(planted, tiny_tokenizer, held, "positive", direction) > latents(
        planted, tiny_tokenizer, held, "negative", direction
    )
    assert 0.2 < more.float().mean() < 0.8


def test_the_sparsity_term_shrinks_the_latents_that_do_not_push(planted, tiny_tokenizer):
    def spare(direction):
        request = TokenStates(
            tuple(qa_prompt(p.instruction) for p in pairs(12)), tuple(" " + p.positive for p in pairs(12)), 2
        )
        states = measure_activations(planted, tiny_tokenizer, [request]).token_states(request)
        return sum(float((rows[1:] @ direction).relu().sort().values[:-2].sum()) for rows in states)

    free, sparse = (
        reft_r1(planted, tiny_tokenizer, pairs(12), layer=2, k=2, sparsity=weight, epochs=12).basis[:, 0]
        for weight in (0.0, 30.0)
    )
    assert spare(sparse) < 0.9 * spare(free)


def test_the_same_seed_gives_the_same_direction_whatever_the_memory(planted, tiny_tokenizer):
    first = reft_r1(planted, tiny_tokenizer, pairs(6), layer=2, seed=3, epochs=2).basis
    torch.manual_seed(123)
    assert torch.equal(reft_r1(planted, tiny_tokenizer, pairs(6), layer=2, seed=3, epochs=2).basis, first)
    assert not torch.equal(reft_r1(planted, tiny_tokenizer, pairs(6), layer=2, seed=4, epochs=2).basis, first)
    planted.__class__ = Cramped
    planted.seen, planted.room = [], 2
    again = reft_r1(planted, tiny_tokenizer, pairs(6), layer=2, seed=3, epochs=2).basis
    assert max(planted.seen) == 6 and planted.seen.count(6) == 1, "what did not fit is not tried again"
    torch.testing.assert_close(again, first, rtol=0, atol=1e-4)


class Cramped(LlamaForCausalLM):
    """Runs out of memory for more than `room` rows."""

    def forward(self, input_ids, **kwargs):
        self.seen.append(len(input_ids))
        if len(input_ids) > self.room:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(input_ids, **kwargs)


def test_the_model_is_left_as_it_was(planted, tiny_tokenizer):
    planted.train()
    planted.model.norm.weight.requires_grad_(False)
    planted.lm_head.weight.grad = torch.ones_like(planted.lm_head.weight)
    planted.forward = lambda **kwargs: pytest.fail("a trainer's own forward was called")
    before, state = copy.deepcopy(planted.state_dict()), torch.get_rng_state()
    with torch.no_grad():  # as callers may be
        reft_r1(planted, tiny_tokenizer, pairs(3), layer=1, epochs=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in planted.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and planted.training
    assert [name for name, p in planted.named_parameters() if not p.requires_grad] == ["model.norm.weight"]
    assert torch.equal(planted.lm_head.weight.grad, torch.ones_like(planted.lm_head.weight))
    assert sum(p.grad is not None for p in planted.parameters()) == 1
    planted.__class__ = Cramped
    planted.seen, planted.room = [], 0
    with pytest.raises(torch.OutOfMemoryError):
        reft_r1(planted, tiny_tokenizer, pairs(3), layer=1, epochs=1)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in planted.modules())


def test_bfloat16_and_adapters(planted, tiny_tokenizer):
    adapted = get_peft_model(copy.deepcopy(planted), LoraConfig(r=2, target_modules=["q_proj"]))
    plain = reft_r1(planted, tiny_tokenizer, pairs(6), layer=2, epochs=2).basis
    # A fresh adapter adds nothing.
    torch.testing.assert_close(reft_r1(adapted, tiny_tokenizer, pairs(6), layer=2, epochs=2).basis, plain)
    half = reft_r1(planted.to(torch.bfloat16), tiny_tokenizer, pairs(6), layer=2, epochs=2).basis
    assert half.dtype == torch.float32 and float((half * plain).sum()) > 0.99


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pairs": []}, "`pairs` is empty"),
        ({"pairs": None}, "`pairs` must be a sequence of PairedResponse, got NoneType"),
        ({"pairs": [("a", "b", "c")]}, "`pairs` must hold PairedResponse objects .* instruction of pair 0 is None"),
        ({"k": 1.5}, "`k` must be a whole number of at least 1, got 1.5"),
        ({"sparsity": "0.1"}, "`sparsity` must be a finite number, got '0.1'"),
        ({"pairs": [SimpleNamespace(instruction="a", positive=" ", negative="b")]}, "positive of pair 0"),
        ({"pairs": [SimpleNamespace(instruction="a", positive="b", negative="school " * 200)]}, "pair 0.*negative"),
        ({"pairs": [SimpleNamespace(instruction="a", positive="ship of", negative="ship of")]}, "differ"),
        ({"layer": 4}, "`layer`.*0 to 3.*got 4"),
        ({"k": 0}, "`k`.*got 0"),
        ({"epochs": 0}, "`epochs`.*got 0"),
        ({"batch_size": 0}, "`batch_size`.*got 0"),
        ({"sparsity": -1.0}, "`sparsity`.*got -1.0"),
        ({"learning_rate": 0.0}, "`learning_rate`.*got 0.0"),
    ],
)
def test_bad_arguments_are_named(options, message, planted, tiny_tokenizer):
    with pytest.raises(ValueError, match=message):
        reft_r1(planted, tiny_tokenizer, **{"pairs": pairs(2), "layer": 2, **options})


def test_a_model_without_a_head_or_that_has_diverged_is_told(planted, tiny_tokenizer):
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        reft_r1(BertModel(BertConfig(vocab_size=len(tiny_tokenizer), **sizes)), tiny_tokenizer, pairs(2), layer=1)
    with torch.no_grad():
        planted.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="loss that is not finite"):
        reft_r1(planted, tiny_tokenizer, pairs(2), layer=2)
