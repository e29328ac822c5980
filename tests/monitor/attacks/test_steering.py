"""Steering on a model made by hand, where the vector's effect is known, and the model left as it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertModel, GPT2Config, LlamaConfig, LlamaForCausalLM

from monitor import sampling
from monitor.attacks import steering as module
from monitor.attacks.steering import SteeringConfig, added, steering
from monitor.geometry.auc import auc, auc_interval
from monitor.stimuli.encoding import encode_text, qa_prompt
from monitor.stimuli.forget_set import ForgetSet, Pair

FACTS = {"alpha": "wizard", "bravo": "captain", "foxtrot": "school", "delta": "ship", "juliet": "went"}
INVENTED = ("zuzzy", "quexx")
CONFIG = SteeringConfig(n_pairs=5, n_samples=60, temperature=1.0, top_k=1000, max_new_tokens=3)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}


def question(name):
    return f"Who is {name}?"


def pairs(split="forget"):
    return tuple(
        Pair(f"{split}-{name}", question(name), answer, split, tuple((question(n), answer) for n in INVENTED))
        for name, answer in FACTS.items()
    )


FORGET = ForgetSet("letters", pairs())


@pytest.fixture(scope="module")
def knowing(tiny_tokenizer):
    """A llama in which every token sees the mean of the embeddings up to it, and whose head knows the `FACTS` by it.

    Attention of block 0 is uniform and copies; everything after it lets the hidden state through. The head gives the
    answer's token the component of the hidden state along what tells its question from the invented ones, and all
    other tokens nothing: S lifts just the answer.
    """
    width = 128
    config = LlamaConfig(
        vocab_size=len(tiny_tokenizer), hidden_size=width, intermediate_size=8, num_hidden_layers=4,
        num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        embed = model.model.embed_tokens.weight
        embed.data = torch.randn(embed.shape)
    with torch.no_grad():
        for block in model.model.layers:
            for linear in (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.o_proj, block.mlp.down_proj):
                linear.weight.zero_()
        attention = model.model.layers[0].self_attn
        attention.v_proj.weight.copy_(torch.eye(width))
        attention.o_proj.weight.copy_(torch.eye(width))
        model.lm_head.weight.zero_()

        def mean(name):
            return embed[tiny_tokenizer(qa_prompt(question(name)))["input_ids"]].mean(0)

        for name, answer in FACTS.items():
            (token,) = tiny_tokenizer(f" {answer}")["input_ids"]
            direction = mean(name) - torch.stack([mean(invented) for invented in INVENTED]).mean(0)
            model.lm_head.weight[token] = direction / direction.norm()
    return model


@pytest.fixture
def spoken(monkeypatch):
    """What `sampled_answers` returned, and was asked, a call."""
    calls = []

    def spy(*args, **kwargs):
        calls.append((module_sampled(*args, **kwargs), kwargs))
        return calls[-1][0]

    module_sampled = module.sampled_answers
    monkeypatch.setattr(module, "sampled_answers", spy)
    return calls


def test_the_vector_brings_the_answers_back(knowing, tiny_tokenizer):
    result = steering(knowing, tiny_tokenizer, FORGET, CONFIG)
    details = result.details
    assert (result.name, result.n, result.baseline) == ("steering", 5, 0.5)
    assert result.score == 1.0
    assert details["more"] == 5 and details["difference_low"] > 0.1
    assert details["mean_steered"] - details["mean_unsteered"] == pytest.approx(details["difference"])
    assert details["layer"] == 2 and details["unsteerable"] == details["unscorable"] == []
    assert [record["words"] for record in details["pairs"]] == [[answer] for answer in FACTS.values()]
    json.dumps(details)


def test_the_vector_added_where_it_was_read_is_in_the_first_token(knowing, tiny_tokenizer, spoken):
    config = replace(CONFIG, pushed_token=1, max_new_tokens=2)
    result = steering(knowing, tiny_tokenizer, FORGET, config)
    assert result.score == 1.0 and result.details["more"] == 5
    ((said, _),) = spoken
    words = [f" {answer}" for answer in FACTS.values()]
    begins = [
        [sum(text.startswith(word) for text in texts) for word, texts in zip(words, arm, strict=True)]
        for arm in (said[:5], said[5:])
    ]
    assert all(steered > unsteered for unsteered, steered in zip(*begins, strict=True))
    assert sum(begins[1]) > 100 > 30 > sum(begins[0]), "of 300"
    assert steering(knowing, tiny_tokenizer, FORGET, replace(config, coefficient=0.0)).score == 0.5
    assert spoken[1][0][:5] == spoken[1][0][5:] == said[:5]


@pytest.mark.parametrize("coefficient", [0.0, -2.0])
def test_no_vector_does_exactly_nothing_and_its_opposite_hides_the_answers(
    coefficient, knowing, tiny_tokenizer, spoken
):
    result = steering(knowing, tiny_tokenizer, FORGET, replace(CONFIG, coefficient=coefficient, n_samples=200))
    ((said, _),) = spoken
    if coefficient == 0:
        assert said[:5] == said[5:] and result.score == 0.5 and result.low < 0.5 < result.high
        assert result.details["difference"] == 0 and result.details["equal"] == 5
    else:
        assert said[:5] != said[5:] and result.score < 0.5 and result.details["difference"] < 0


def test_the_first_token_of_a_sample_is_not_steered(knowing, tiny_tokenizer, spoken, monkeypatch):
    drawn = []
    draw = sampling.draw
    monkeypatch.setattr(sampling, "draw", lambda *args: drawn.append(draw(*args)) or drawn[-1])
    steering(knowing, tiny_tokenizer, FORGET, CONFIG)
    ((_, options),) = spoken
    assert options["seeds"][:5] == options["seeds"][5:] and len(set(options["seeds"])) == 5
    first, second = drawn[0::3], drawn[1::3]
    assert all(torch.equal(a, b) for a, b in zip(first[:5], first[5:], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(second[:5], second[5:], strict=True))


def test_the_papers_first_token_has_not_seen_the_question(knowing, tiny_tokenizer):
    result = steering(knowing, tiny_tokenizer, FORGET, replace(CONFIG, position="first"))
    assert result.score == 0.5
    assert all(record["vector_norm"] == 0 < record["state_norm"] for record in result.details["pairs"])


@pytest.mark.parametrize("layer", [-3, 0, 1, 0.75])
def test_the_vector_is_the_mean_difference_of_hidden_states(layer, tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    config = replace(CONFIG, layer=layer)
    index = {-3: 2, 0.75: 3}.get(layer, layer)
    assert module._check_model(module.find_anatomy(model), config) == index
    vectors, norms = module._steering_vectors(model, tiny_tokenizer, FORGET.pairs, qa_prompt, index, config, False)

    def last(text):
        ids = torch.tensor([encode_text(tiny_tokenizer, qa_prompt(text))])
        with torch.no_grad():
            return model(input_ids=ids, output_hidden_states=True).hidden_states[index][0, -1]

    for name, vector, norm in zip(FACTS, vectors, norms, strict=True):
        others = [last(question(invented)) for invented in INVENTED]
        expected = sum(last(question(name)) - other for other in others) / 2
        torch.testing.assert_close(vector, expected, atol=1e-6, rtol=1e-4)
        assert norm == pytest.approx(float(last(question(name)).norm()), rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_is_added_is_in_the_hidden_state_and_gone_afterwards(name, tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    if name == "gpt2":
        config = GPT2Config(vocab_size=len(tiny_tokenizer), n_embd=32, n_layer=4, n_head=4)
        model = AutoModelForCausalLM.from_config(config).eval()
    blocks = module.find_anatomy(model).blocks
    ids = torch.tensor([tiny_tokenizer("the wizard")["input_ids"]])
    delta = torch.linspace(-1, 1, 32)

    def states():
        with torch.no_grad():
            return model(input_ids=ids, output_hidden_states=True).hidden_states

    before = states()
    with pytest.raises(RuntimeError, match="in the middle"), added(blocks[2], delta):
        # Read by a hook: what transformers collects as hidden state 2 is taken before the block's own hooks.
        seen = []
        handle = blocks[2].register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        pushed = states()
        handle.remove()
        raise RuntimeError("in the middle")
    torch.testing.assert_close(seen[0], before[2] + delta)
    assert torch.equal(pushed[1], before[1]) and not torch.allclose(pushed[4], before[4])
    assert all(torch.equal(a, b) for a, b in zip(states(), before, strict=True))


def test_the_result_does_not_depend_on_the_batch_but_on_the_seed(knowing, tiny_tokenizer, spoken):
    config = replace(CONFIG, n_samples=6)
    results = [
        steering(knowing, tiny_tokenizer, FORGET, replace(config, batch_tokens=tokens)).details["pairs"]
        for tokens in (1, 150, 16384)
    ]
    assert results[0] == results[1] == results[2]
    assert spoken[0][0] == spoken[2][0]
    steering(knowing, tiny_tokenizer, FORGET, replace(config, seed=1))
    assert spoken[-1][0] != spoken[0][0]


def test_fewer_pairs_are_a_subset_in_the_files_order(knowing, tiny_tokenizer):
    result = steering(knowing, tiny_tokenizer, FORGET, replace(CONFIG, n_pairs=3, n_samples=2))
    ids = [pair.id for pair in FORGET.pairs]
    asked = [record["id"] for record in result.details["pairs"]]
    assert len(asked) == 3 and asked == sorted(asked, key=ids.index)


def test_the_interval_is_that_of_pairs_drawn_anew():
    """It holds the true AUC as often as it says, and knows that the two scores of a pair go together."""
    generator = torch.Generator().manual_seed(0)

    def scores(n):
        base = torch.rand(n, generator=generator, dtype=torch.float64)
        return base + 0.1 + 0.05 * torch.randn(n, generator=generator, dtype=torch.float64), base

    labels = torch.tensor([1] * 25 + [0] * 25)
    truth = float(auc(torch.cat(scores(20_000)), torch.tensor([1, 0]).repeat_interleave(20_000)))
    held, width, width_if_independent = 0, 0.0, 0.0
    for _ in range(200):
        steered, base = scores(25)
        records = [{"steered": float(s), "unsteered": float(u)} for s, u in zip(steered, base, strict=True)]
        result = module._result(records, {}, seed=0)
        held += result.low <= truth <= result.high
        width += result.high - result.low
        low, high = auc_interval(torch.cat((steered, base)), labels)
        width_if_independent += float(high - low)
    assert 180 <= held <= 200 and width < width_if_independent / 2


def state_of(model):
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        [module.training for module in model.modules()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        torch.get_rng_state(),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails, tiny_llama, tiny_tokenizer, monkeypatch):
    model = tiny_llama()
    model.train()
    model.model.layers[1].eval()
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    before = state_of(model)
    if fails:
        # In the middle of the steered step, with the hook in place.
        def broken(*args):
            assert sum(len(block._forward_pre_hooks) for block in model.model.layers) == 1
            raise RuntimeError("the block failed")

        real = module.added
        monkeypatch.setattr(module, "added", lambda block, delta: _then(real(block, delta), model, broken))
        with pytest.raises(RuntimeError, match="the block failed"):
            steering(model, tiny_tokenizer, FORGET, replace(CONFIG, n_samples=3))
    else:
        steering(model, tiny_tokenizer, FORGET, replace(CONFIG, n_samples=3))
    after = state_of(model)
    assert all(torch.equal(tensor, after[0][name]) for name, tensor in before[0].items())
    assert before[1:3] == after[1:3] and torch.equal(before[3], after[3])
    assert first.grad.eq(1).all() and all(p.grad is None for p in list(model.parameters())[1:])


class _then:
    """A context whose inside fails in the head, after the pushed block has run."""

    def __init__(self, context, model, broken):
        self.context, self.model, self.broken = context, model, broken

    def __enter__(self):
        self.context.__enter__()
        self.handle = self.model.lm_head.register_forward_pre_hook(self.broken)

    def __exit__(self, *error):
        self.handle.remove()
        return self.context.__exit__(*error)


def test_adapters_are_steered_as_part_of_the_model(knowing, tiny_tokenizer, spoken):
    import copy

    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(
        copy.deepcopy(knowing), LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False)
    )
    config = replace(CONFIG, n_samples=10)
    steering(knowing, tiny_tokenizer, FORGET, config)
    steering(adapted, tiny_tokenizer, FORGET, config)
    steering(adapted.merge_and_unload(), tiny_tokenizer, FORGET, config)
    base, with_adapter, merged = (said for said, _ in spoken)
    assert with_adapter == merged != base


def test_half_precision_works(knowing, tiny_tokenizer):
    import copy

    model = copy.deepcopy(knowing).to(torch.bfloat16)
    assert steering(model, tiny_tokenizer, FORGET, CONFIG).score > 0.9


def test_a_chat_template_is_asked_in_unless_told_not_to(knowing, tiny_tokenizer, monkeypatch):
    asked = []
    monkeypatch.setattr(module, "sampled_answers", lambda m, t, prompts, **kw: asked.append(prompts) or [["x"]] * 10)
    monkeypatch.setattr(tiny_tokenizer, "chat_template", "{{ '<s>user: ' + messages[0]['content'] + ' bot:' }}")
    steering(knowing, tiny_tokenizer, FORGET, CONFIG)
    steering(knowing, tiny_tokenizer, FORGET, replace(CONFIG, chat_template=False))
    assert asked[0][0] == asked[0][5] == "<s>user: Who is alpha? bot:"
    assert asked[1][0] == qa_prompt("Who is alpha?")


def test_pairs_without_a_vector_or_a_word_are_left_out_and_named(knowing, tiny_tokenizer):
    extra = (
        Pair("bare", "Who is kilo?", "a lima", "forget"),
        Pair("answer-only", "Who?", "alpha", "forget", (("Who?", "zuzzy"), ("Who?", "quexx"))),
        Pair("echo", "Who is mike?", "Mike is", "forget", (("Who is zuzzy?", "Zuzzy is"),) * 2),
        *pairs("heldout"),
    )
    result = steering(knowing, tiny_tokenizer, ForgetSet("letters", FORGET.pairs + extra), CONFIG)
    assert result.details["unsteerable"] == ["bare", "answer-only"] and result.details["unscorable"] == ["echo"]
    more = steering(knowing, tiny_tokenizer, ForgetSet("letters", FORGET.pairs + extra), replace(CONFIG, n_pairs=25))
    assert more.n == len(FORGET.pairs) == 5
    with pytest.raises(ValueError, match="at least 2 forget pairs.*got 1; 2 more have no variant.*1 no word"):
        steering(knowing, tiny_tokenizer, ForgetSet("letters", FORGET.pairs[:1] + extra), CONFIG)
    with pytest.raises(ValueError, match="'empty' must have at least 2 forget pairs"):
        steering(knowing, tiny_tokenizer, ForgetSet("empty", ()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_pairs": 1}, "`n_pairs`.*at least 2, got 1"),
        ({"n_samples": 0}, "`n_samples`.*at least 1"),
        ({"top_k": 0}, "`top_k`.*at least 1"),
        ({"max_new_tokens": 1}, "`max_new_tokens`.*at least 2"),
        ({"batch_tokens": 0}, "`batch_tokens`"),
        ({"temperature": 0.0}, "`temperature`"),
        ({"temperature": float("inf")}, "`temperature`"),
        ({"coefficient": float("nan")}, "`coefficient`"),
        ({"pushed_token": 3}, "`pushed_token`.*1 or 2, got 3"),
        ({"position": "middle"}, "`position`.*last, first.*'middle'"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        SteeringConfig(**options)
    assert SteeringConfig.quick().n_samples < SteeringConfig().n_samples == 500


def test_models_that_cannot_be_steered_are_refused_before_any_work(knowing, tiny_llama, tiny_tokenizer, spoken):
    headless = BertModel(BertConfig(vocab_size=len(tiny_tokenizer), **SIZES))
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        steering(headless, tiny_tokenizer, FORGET, CONFIG)
    with pytest.raises(ValueError, match="`layer`.*that a block reads, 0 to 3"):
        steering(knowing, tiny_tokenizer, FORGET, replace(CONFIG, layer=-1))
    with pytest.raises(ValueError, match="out of range"):
        steering(knowing, tiny_tokenizer, FORGET, replace(CONFIG, layer=9))
    diverged = tiny_llama()
    with torch.no_grad():
        diverged.model.layers[0].mlp.down_proj.weight.fill_(torch.nan)
    with pytest.warns(UserWarning, match="not finite"), pytest.raises(ValueError, match="cannot be steered"):
        steering(diverged, tiny_tokenizer, FORGET, CONFIG)
    assert spoken == []


def test_progress_is_shown_only_when_asked_for(knowing, tiny_tokenizer, capsys):
    config = replace(CONFIG, n_samples=2)
    steering(knowing, tiny_tokenizer, FORGET, config)
    assert capsys.readouterr() == ("", "")
    steering(knowing, tiny_tokenizer, FORGET, config, progress=True)
    assert "steering" in capsys.readouterr().err
