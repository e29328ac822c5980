"""Samples against a plain loop without cache and batch, against the distribution, and the model left as it was."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import torch
from processes import run
from transformers import AutoModelForCausalLM, BertConfig, BertModel, Gemma3TextConfig, GPT2Config, LlamaForCausalLM

from monitor.generation import greedy_answers
from monitor.sampling import draw, sampled_answers
from monitor.stimuli.encoding import encode_text, qa_prompt

PROMPTS = [qa_prompt("Who is the captain?"), qa_prompt("the wizard went to the school of the ship"), "the"]
SETTINGS = {"temperature": 2.0, "top_k": 40, "max_new_tokens": 6}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
CONFIGS = {
    "gpt2": lambda v: GPT2Config(vocab_size=v, n_embd=32, n_layer=3, n_head=4, **SPECIAL),
    # A window shorter than the prompts: old keys leave the cache that the samples share.
    "gemma3": lambda v: Gemma3TextConfig(
        vocab_size=v, num_key_value_heads=2, head_dim=8, sliding_window=8, **SIZES, **SPECIAL
    ),
}


def build(name, tokenizer):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name](len(tokenizer))).eval()


@pytest.fixture
def llama(tiny_llama):
    """A tiny llama that is sure enough of its words for a difference between tokens to show."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def plain_samples(model, tokenizer, prompt, n, seed, temperature, top_k, max_new_tokens, stops=(2,)):
    """The same draws token by token, one sample at a time, all of the text computed anew for each."""
    uniforms = torch.rand(n, max_new_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    answers = []
    for row in uniforms.tolist():
        ids = encode_text(tokenizer, prompt)
        start = len(ids)
        for u in row:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double()
            kept = logits >= logits.sort().values[-top_k]
            weights = torch.where(kept, (logits / temperature).exp(), 0.0)
            token = int((weights.cumsum(0) / weights.sum() > u).nonzero()[0])
            if token in stops:
                break
            ids = [*ids, token]
        answers.append(tokenizer.decode(ids[start:], skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return answers


@pytest.mark.parametrize("name", ["llama", *CONFIGS])
def test_batched_with_a_shared_prefix_equals_a_plain_loop(name, llama, tiny_tokenizer):
    model = llama if name == "llama" else build(name, tiny_tokenizer)
    said = sampled_answers(model, tiny_tokenizer, PROMPTS, n_samples=6, seeds=[3, 4, 5], **SETTINGS)
    for prompt, seed, answers in zip(PROMPTS, (3, 4, 5), said, strict=True):
        assert answers == plain_samples(model, tiny_tokenizer, prompt, 6, seed, 2.0, 40, 6)
        assert len(set(answers)) > 3, "the samples must differ, or any order would do"


def test_draws_follow_the_distribution():
    logits = torch.tensor([2.0, -1.0, 0.5, 3.0, 0.0, 1.0])
    n, generator = 200_000, torch.Generator().manual_seed(0)
    uniforms = torch.rand(n, dtype=torch.float64, generator=generator)
    for temperature, k in ((1.0, None), (2.0, 3), (0.5, 4), (1.0, 100)):
        counts = torch.bincount(draw(logits.expand(n, -1), uniforms, temperature, k), minlength=6)
        kept = torch.full((6,), -torch.inf)
        best = logits.topk(min(k or 6, 6)).indices
        kept[best] = logits[best] / temperature
        expected = kept.softmax(0)
        assert (counts[expected == 0] == 0).all()
        error = (expected * (1 - expected) / n).sqrt()
        assert ((counts / n - expected).abs() <= 5 * error + 1e-12).all()


def test_common_random_numbers_keep_most_draws_when_logits_move_a_little():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 1000, generator=generator).expand(5000, -1)
    moved = logits + 0.02 * torch.randn(1, 1000, generator=generator)
    uniforms = torch.rand(5000, dtype=torch.float64, generator=generator)
    other = torch.rand(5000, dtype=torch.float64, generator=generator)
    first = draw(logits, uniforms, 2.0, 40)
    assert (first == draw(moved, uniforms, 2.0, 40)).double().mean() > 0.8
    assert (first == draw(moved, other, 2.0, 40)).double().mean() < 0.1  # what luck alone gives


def test_the_ends_of_the_unit_interval_are_drawn_from_too():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0]]).expand(2, -1)
    assert draw(logits, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64), 1.0, None).tolist() == [1, 2]


def test_one_token_to_choose_from_is_greedy(llama, tiny_tokenizer):
    said = sampled_answers(
        llama, tiny_tokenizer, PROMPTS, n_samples=2, seeds=[0, 1, 2], temperature=3.0, top_k=1, max_new_tokens=6
    )
    greedy = greedy_answers(llama, tiny_tokenizer, PROMPTS, max_new_tokens=6, one_line=False)
    assert [[text.strip() for text in answers] for answers in said] == [[text, text] for text in greedy]


def test_samples_do_not_depend_on_the_batch_or_on_the_other_prompts(llama, tiny_tokenizer):
    options = {"n_samples": 5, **SETTINGS}
    together = sampled_answers(llama, tiny_tokenizer, PROMPTS, seeds=[1, 2, 3], **options)
    for batch_tokens in (1, 100):
        small = sampled_answers(llama, tiny_tokenizer, PROMPTS, seeds=[1, 2, 3], batch_tokens=batch_tokens, **options)
        assert small == together
    alone = {"prompts": PROMPTS[1:2], "seeds": [2], "first_step_token": 1}
    assert sampled_answers(llama, tiny_tokenizer, **alone, **options) == together[1:2]
    assert sampled_answers(llama, tiny_tokenizer, PROMPTS[1:2], seeds=[7], **options) != together[1:2]


class Cramped(LlamaForCausalLM):
    """Runs out of memory for more than `room` rows; notes the rows and length of each forward, and what is around."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, logits_to_keep=0, **kwargs):
        self.seen.append((*input_ids.shape, self.inside))
        if len(input_ids) > self.room:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(input_ids, attention_mask, position_ids, cache, logits_to_keep=logits_to_keep, **kwargs)


@pytest.fixture
def cramped(llama):
    llama.__class__ = Cramped
    llama.seen, llama.room, llama.inside = [], 10**6, False
    return llama


@contextmanager
def around(model, entered):
    entered.append(True)
    model.inside = True
    try:
        yield
    finally:
        model.inside = False


def test_batches_are_halved_when_memory_runs_out_and_stay_so(cramped, tiny_tokenizer):
    options = {"n_samples": 10, **SETTINGS}
    expected = sampled_answers(cramped, tiny_tokenizer, PROMPTS[:2], seeds=[1, 2], **options)
    cramped.seen.clear()
    cramped.room = 3
    assert sampled_answers(cramped, tiny_tokenizer, PROMPTS[:2], seeds=[1, 2], **options) == expected
    assert [rows for rows, *_ in cramped.seen if rows > 3] == [10, 5], "what did not fit is not tried again"
    cramped.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        sampled_answers(cramped, tiny_tokenizer, PROMPTS[:1], seeds=[1], **options)


def test_the_first_steps_context_is_around_the_first_decode_step_alone_once_a_batch(cramped, tiny_tokenizer):
    entered = []
    sampled_answers(
        cramped, tiny_tokenizer, PROMPTS[:2], n_samples=4, seeds=[1, 2], **SETTINGS | {"max_new_tokens": 4},
        first_steps=[lambda: around(cramped, entered)] * 2, batch_tokens=2 * 20,
    )  # fmt: skip
    prompts = [shape for shape in cramped.seen if shape[1] > 1]
    assert len(prompts) == 2 and all(rows == 1 and not inside for rows, _, inside in prompts), "one prefill a prompt"
    steps = [inside for rows, length, inside in cramped.seen if length == 1]
    batches = len(steps) // 3
    assert batches > 2 and steps == [True, False, False] * batches and len(entered) == batches
    # Moved one token forward it is around the prompt's last token, which all samples share.
    entered.clear(), cramped.seen.clear()
    sampled_answers(
        cramped, tiny_tokenizer, PROMPTS[:2], n_samples=4, seeds=[1, 2], **SETTINGS | {"max_new_tokens": 4},
        first_steps=[lambda: around(cramped, entered)] * 2, first_step_token=1, batch_tokens=2 * 20,
    )  # fmt: skip
    assert [shape for shape in cramped.seen if shape[2]] == [(1, 1, True)] * 2 and len(entered) == 2
    # No first step, no context: one new token needs the prefill alone.
    entered.clear()
    one = {"n_samples": 2, "seeds": [1], "first_steps": [lambda: around(cramped, entered)], "max_new_tokens": 1}
    sampled_answers(cramped, tiny_tokenizer, PROMPTS[:1], **one)
    assert entered == []


def test_answers_end_at_eos(llama, tiny_tokenizer):
    ids = torch.tensor([encode_text(tiny_tokenizer, PROMPTS[0])])
    likely = int(llama(input_ids=ids).logits[0, -1].argmax())
    llama.generation_config.eos_token_id = [2, likely]
    (said,) = sampled_answers(llama, tiny_tokenizer, PROMPTS[:1], n_samples=12, seeds=[0], **SETTINGS)
    assert said == plain_samples(llama, tiny_tokenizer, PROMPTS[0], 12, 0, 2.0, 40, 6, stops=(2, likely))
    assert 0 < said.count("") < 12


def test_the_model_and_the_random_numbers_are_left_as_they_were(llama, tiny_tokenizer):
    llama.train()
    llama.model.embed_tokens.eval()
    llama.forward = lambda **kwargs: pytest.fail("a trainer's own forward was called")
    modes = [module.training for module in llama.modules()]
    weights = [p.clone() for p in llama.parameters()]
    state = torch.get_rng_state()
    options = {"n_samples": 3, "seeds": [1], **SETTINGS}
    said = sampled_answers(llama, tiny_tokenizer, PROMPTS[:1], **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in llama.modules()] == modes
    assert all(p.grad is None and torch.equal(p, w) for p, w in zip(llama.parameters(), weights, strict=True))
    torch.manual_seed(99)
    assert sampled_answers(llama, tiny_tokenizer, PROMPTS[:1], **options) == said, "the global generator has no say"


def test_progress_is_shown_only_when_asked_for(llama, tiny_tokenizer, capsys):
    options = {"n_samples": 2, "seeds": [1], "max_new_tokens": 2}
    sampled_answers(llama, tiny_tokenizer, PROMPTS[:1], **options)
    assert capsys.readouterr() == ("", "")
    sampled_answers(llama, tiny_tokenizer, PROMPTS[:1], progress="drawing", **options)
    assert "drawing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("a text", {}, "`prompts`.*one string"),
        (["a", " "], {"seeds": [0, 1]}, "`prompts`.*at 1"),
        (["a"], {"seeds": [1, 2]}, "`seeds`.*2 for 1"),
        (["a"], {"first_steps": []}, "`first_steps`.*0 for 1"),
        (["a"], {"n_samples": 0}, "`n_samples`.*got 0"),
        (["a"], {"top_k": 0}, "`top_k`.*got 0"),
        (["a"], {"max_new_tokens": 0}, "`max_new_tokens`.*got 0"),
        (["a"], {"batch_tokens": 0}, "`batch_tokens`.*got 0"),
        (["a"], {"first_step_token": 0}, "`first_step_token`.*1 or 2, got 0"),
        (["a"], {"first_step_token": 1}, "`first_step_token`.*prompt 0 is"),
        (["a"], {"temperature": 0.0}, "`temperature`.*got 0.0.*greedy_answers"),
        (["a"], {"temperature": float("nan")}, "`temperature`.*got nan"),
        (["the school " * 45], {}, "128 positions, but prompt 0"),
    ],
)
def test_bad_arguments_are_named(prompts, options, message, llama, tiny_tokenizer):
    with pytest.raises(ValueError, match=message):
        sampled_answers(llama, tiny_tokenizer, prompts, **{"n_samples": 1, "seeds": [0], **options})


def test_a_model_without_a_head_or_that_has_diverged_cannot_be_sampled(llama, tiny_tokenizer):
    headless = BertModel(BertConfig(vocab_size=len(tiny_tokenizer), **SIZES))
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        sampled_answers(headless, tiny_tokenizer, ["a"], n_samples=1, seeds=[0])
    with torch.no_grad():
        llama.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        sampled_answers(llama, tiny_tokenizer, ["a"], n_samples=1, seeds=[0])


SCRIPT = """
import json, sys, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from monitor.sampling import sampled_answers

folder = sys.argv[1]
dist.init_process_group("gloo")
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
model = AutoModelForCausalLM.from_pretrained(folder + "/model")
said = sampled_answers(
    torch.nn.parallel.DistributedDataParallel(model), tokenizer, **json.load(open(folder + "/options.json"))
)
json.dump(said, open(f"{folder}/{dist.get_rank()}.json", "w"))
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
try:
    sampled_answers(model, tokenizer, ["a"], n_samples=1, seeds=[0])
except ValueError as error:
    assert "sharded" in str(error)
    open(f"{folder}/{dist.get_rank()}.refused", "w").close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_rank_gets_what_one_process_gets_and_shards_are_refused(llama, tiny_tokenizer, tmp_path):
    options = {"prompts": PROMPTS, "seeds": [1, 2, 3], "n_samples": 4, "progress": "drawing", **SETTINGS}
    llama.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "options.json").write_text(json.dumps(options))
    (tmp_path / "script.py").write_text(SCRIPT)
    run(tmp_path / "script.py", [tmp_path], tmp_path, ranks=2)
    expected = sampled_answers(llama, tiny_tokenizer, **options)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected
        assert (tmp_path / f"{rank}.refused").exists()
