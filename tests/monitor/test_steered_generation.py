"""Steered answers against a plain loop, with a direction that must show and one that cannot, and the model intact."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, BertConfig, BertModel, Gemma3TextConfig, GPT2Config, LlamaForCausalLM

from monitor.generation import encode_prompt, greedy_answers
from monitor.steered_generation import instruction_prompt, steered_answers
from monitor.stimuli.encoding import encode_text, qa_prompt

PROMPTS = [qa_prompt("Who is the captain?"), "t", qa_prompt("the wizard went to the school of the ship"), "the ship"]
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
SIZES = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
CONFIGS = {
    "gpt2": lambda v: GPT2Config(vocab_size=v, n_embd=32, n_layer=3, n_head=4, **SPECIAL),
    # A window shorter than the prompts: old keys leave the cache that the points share.
    "gemma3": lambda v: Gemma3TextConfig(
        vocab_size=v, num_key_value_heads=2, head_dim=8, sliding_window=8, **SIZES, **SPECIAL
    ),
}
SETTINGS = {"layer": 2, "strength": 1.5, "decay": 0.8, "max_new_tokens": 6}


def build(name, tokenizer):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name](len(tokenizer))).eval()


def cloud(n, seed=0, scale=3.0):
    return scale * torch.randn(n, 32, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def llama(tiny_llama):
    """A tiny llama that is sure enough of its words for a difference between tokens to show."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
    return model


def blocks_of(model):
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def plain(model, tokenizer, prompt, point, *, layer, strength, decay, max_new_tokens, mode="add"):
    """One answer without cache or batch: all of the text anew for each token, steered at what leaves block layer-1."""
    ids = encode_text(tokenizer, prompt)
    last = len(ids) - 1

    def steer(module, args, output):
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        for t in range(hidden.shape[1] - last):
            alpha = strength * decay**t
            weight = min(1.0, max(0.0, alpha))
            state = hidden[0, last + t]
            hidden[0, last + t] = state + alpha * point if mode == "add" else (1 - weight) * state + weight * point
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = blocks_of(model)[layer - 1].register_forward_hook(steer)
    for _ in range(max_new_tokens):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token == 2:
            break
        ids = [*ids, token]
    handle.remove()
    said = tokenizer.decode(ids[last + 1 :], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return said.strip()


@pytest.mark.parametrize("mode", ["add", "replace"])
@pytest.mark.parametrize("name", ["llama", *CONFIGS])
def test_batched_with_shared_prompts_equals_a_plain_loop(name, mode, llama, tiny_tokenizer):
    model = llama if name == "llama" else build(name, tiny_tokenizer)
    points, settings = cloud(4), SETTINGS | {"mode": mode, "strength": 1.5 if mode == "add" else 0.9}
    said = steered_answers(model, tiny_tokenizer, PROMPTS, points, **settings)
    expected = [[plain(model, tiny_tokenizer, prompt, point, **settings) for point in points] for prompt in PROMPTS]
    assert said == expected
    assert sum(len(set(answers)) for answers in said) > 8, "the points must matter, or any order would do"


@pytest.mark.parametrize("name", ["llama", *CONFIGS])
def test_strength_zero_is_the_models_own_answer(name, llama, tiny_tokenizer):
    model = llama if name == "llama" else build(name, tiny_tokenizer)
    own = greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=8, one_line=False)
    for mode in ("add", "replace"):
        said = steered_answers(
            model, tiny_tokenizer, PROMPTS, cloud(3), layer=1, strength=0.0, mode=mode, max_new_tokens=8
        )
        assert said == [[answer] * 3 for answer in own]
    assert steered_answers(model, tiny_tokenizer, PROMPTS, cloud(3), layer=1, strength=4.0, max_new_tokens=8) != said


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_answers_do_not_depend_on_the_batch_the_order_or_the_other_points(name, llama, tiny_tokenizer):
    model = llama if name == "llama" else build(name, tiny_tokenizer)
    points = cloud(5)
    together = steered_answers(model, tiny_tokenizer, PROMPTS, points, **SETTINGS)
    for batch_tokens in (1, 100):
        assert together == steered_answers(
            model, tiny_tokenizer, PROMPTS, points, batch_tokens=batch_tokens, **SETTINGS
        )
    assert steered_answers(model, tiny_tokenizer, PROMPTS[::-1], points.flip(0), **SETTINGS) == [
        answers[::-1] for answers in together[::-1]
    ]
    own = [points[i : i + 1 + i] for i in range(len(PROMPTS))]  # each prompt its own points, of different number
    assert steered_answers(model, tiny_tokenizer, PROMPTS, own, **SETTINGS) == [
        answers[i : i + 1 + i] for i, answers in enumerate(together)
    ]
    assert steered_answers(model, tiny_tokenizer, PROMPTS, points.double(), **SETTINGS) == together


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_direction_that_raises_a_token_makes_the_model_say_it(dtype, llama, tiny_tokenizer):
    llama = llama.to(dtype)
    (token,) = tiny_tokenizer("Z")["input_ids"]
    with torch.no_grad():
        llama.lm_head.weight[token] = llama.lm_head.weight.norm(dim=1).mean() * torch.eye(32)[5].to(dtype)
    towards = torch.eye(32)[5:6]
    own = greedy_answers(llama, tiny_tokenizer, PROMPTS, max_new_tokens=4, one_line=False)
    assert not any("Z" in answer for answer in own)
    options = {"layer": 3, "max_new_tokens": 4}
    always = steered_answers(llama, tiny_tokenizer, PROMPTS, towards, strength=100.0, decay=1.0, **options)
    assert always == [["ZZZZ"]] * len(PROMPTS)
    once = steered_answers(llama, tiny_tokenizer, PROMPTS, towards, strength=100.0, decay=0.0, **options)
    assert all(answer.startswith("Z") and answer != "ZZZZ" for (answer,) in once)
    away = steered_answers(llama, tiny_tokenizer, PROMPTS, towards, strength=-100.0, decay=1.0, **options)
    assert not any("Z" in answer for (answer,) in away)
    replaced = steered_answers(
        llama, tiny_tokenizer, PROMPTS, 100 * towards, strength=1.0, decay=1.0, mode="replace", **options
    )
    assert replaced == always


def test_a_direction_that_no_block_reads_changes_nothing(tiny_tokenizer):
    """GPT-2's layer norms take out the mean, so the all-ones direction is invisible; another as long is not."""
    model = build("gpt2", tiny_tokenizer)
    own = greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=8, one_line=False)
    options = {"layer": 1, "strength": 5.0, "decay": 1.0, "max_new_tokens": 8}
    null = torch.ones(1, 32)
    assert steered_answers(model, tiny_tokenizer, PROMPTS, null, **options) == [[answer] for answer in own]
    other = null * (1 - 2 * (torch.arange(32) % 2))
    assert steered_answers(model, tiny_tokenizer, PROMPTS, other, **options) != [[answer] for answer in own]


class Cramped(LlamaForCausalLM):
    """Runs out of memory for more than `room` rows; notes the rows and length of each forward."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, logits_to_keep=0, **kwargs):
        self.seen.append(tuple(input_ids.shape))
        if len(input_ids) > self.room:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(input_ids, attention_mask, position_ids, cache, logits_to_keep=logits_to_keep, **kwargs)


@pytest.fixture
def cramped(llama):
    llama.__class__ = Cramped
    llama.seen, llama.room = [], 10**6
    return llama


def test_a_prompt_is_prefilled_once_and_ended_rows_are_dropped(cramped, tiny_tokenizer):
    prompts = [PROMPTS[0], PROMPTS[2]]
    steered_answers(cramped, tiny_tokenizer, prompts, cloud(7), **SETTINGS)
    assert [shape[0] for shape in cramped.seen if shape[1] > 1] == [2], "one prefill of both prompts for all 7 points"
    assert [shape for shape in cramped.seen if shape[1] == 1] == [(14, 1)] * 6
    # A token that some of the points have said at first: ends these rows, and no others.
    first = {}
    for point in range(7):
        said = plain(cramped, tiny_tokenizer, prompts[0], cloud(7)[point], **SETTINGS | {"max_new_tokens": 1})
        first.setdefault(said, []).append(point)
    text, ended = next((text, points) for text, points in first.items() if text and len(points) < 7)
    (token,) = tiny_tokenizer(text)["input_ids"]
    cramped.generation_config.eos_token_id = [2, token]
    cramped.seen.clear()
    (said,) = steered_answers(cramped, tiny_tokenizer, prompts[:1], cloud(7), **SETTINGS)
    assert [point for point, answer in enumerate(said) if answer == ""] == ended
    rows = [shape[0] for shape in cramped.seen if shape[1] == 1]
    assert rows[0] == 7 and rows[1] <= 7 - len(ended) and rows == sorted(rows, reverse=True)


def test_batches_are_halved_when_memory_runs_out_and_stay_so(cramped, tiny_tokenizer):
    prompts = [PROMPTS[0], PROMPTS[2]]
    expected = steered_answers(cramped, tiny_tokenizer, prompts, cloud(6), **SETTINGS)
    cramped.seen.clear()
    cramped.room = 3
    assert steered_answers(cramped, tiny_tokenizer, prompts, cloud(6), **SETTINGS) == expected
    assert [rows for rows, _ in cramped.seen if rows > 3] == [12, 6], "what did not fit is not tried again"
    cramped.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        steered_answers(cramped, tiny_tokenizer, prompts, cloud(6), **SETTINGS)
    assert not any(module._forward_pre_hooks for module in cramped.modules())


def test_the_model_and_the_random_numbers_are_left_as_they_were(llama, tiny_tokenizer):
    llama.train()
    llama.model.embed_tokens.eval()
    llama.forward = lambda **kwargs: pytest.fail("a trainer's own forward was called")
    llama.lm_head.weight.grad = torch.ones_like(llama.lm_head.weight)
    before = copy.deepcopy(llama.state_dict())
    modes = [module.training for module in llama.modules()]
    state = torch.get_rng_state()
    points = cloud(3)
    kept = points.clone()
    steered_answers(llama, tiny_tokenizer, PROMPTS, points, **SETTINGS)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(points, kept)
    assert [module.training for module in llama.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in llama.state_dict().items())
    assert torch.equal(llama.lm_head.weight.grad, torch.ones_like(llama.lm_head.weight))
    assert sum(p.grad is not None for p in llama.parameters()) == 1
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in llama.modules())


def test_adapters_stay_active(llama, tiny_tokenizer):
    adapted = get_peft_model(copy.deepcopy(llama), LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)
    said = steered_answers(adapted, tiny_tokenizer, PROMPTS, cloud(3), **SETTINGS)
    assert said != steered_answers(llama, tiny_tokenizer, PROMPTS, cloud(3), **SETTINGS)
    assert said == steered_answers(adapted.merge_and_unload(), tiny_tokenizer, PROMPTS, cloud(3), **SETTINGS)


def test_an_instruction_is_put_into_the_template_once_with_one_bos(tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    assert instruction_prompt(tokenizer, "Write a line.") == "Write a line.\nAnswer:"
    tokenizer.chat_template = (
        "{{ bos_token }}{% for turn in messages %}[{{ turn['role'] }}] {{ turn['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    prompt = instruction_prompt(tokenizer, "Write a line.")
    assert prompt == "<s>[user] Write a line.\n[assistant] "
    assert tokenizer(prompt)["input_ids"][:2] == [1, 1], "the control: the tokenizer alone doubles it"
    ids = encode_prompt(tokenizer, prompt)
    assert ids.count(1) == 1 and ids[0] == 1 and 2 not in ids
    with pytest.raises(ValueError, match="`instruction`"):
        instruction_prompt(tokenizer, " \n")


def test_progress_is_shown_only_when_asked_for(llama, tiny_tokenizer, capsys):
    steered_answers(llama, tiny_tokenizer, PROMPTS, cloud(2), **SETTINGS)
    assert capsys.readouterr() == ("", "")
    steered_answers(llama, tiny_tokenizer, PROMPTS, cloud(2), progress="steering", **SETTINGS)
    assert "steering" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": "a text"}, "`prompts`.*one string"),
        ({"prompts": ["a", " "]}, "`prompts`.*at 1"),
        ({"prompts": ["the school " * 80]}, "128 positions, but prompt 0"),
        ({"points": torch.zeros(3, 31)}, r"`points`.*\[n, 32\].*got \[3, 31\]"),
        ({"points": torch.zeros(0, 32)}, r"`points`.*n >= 1.*got \[0, 32\]"),
        ({"points": torch.zeros(32)}, r"`points`.*\[n, 32\].*got \[32\]"),
        ({"points": torch.zeros(2, 32, dtype=torch.long)}, "`points`.*floating dtype, got torch.int64"),
        ({"points": [[0.0] * 32]}, "`points` of prompt 0.*floating dtype, got list"),
        ({"max_new_tokens": 2.5}, "`max_new_tokens`.*whole number.*got 2.5"),
        ({"points": [cloud(1), cloud(1)]}, "`points`.*got 2 for 1 prompts"),
        ({"points": [torch.zeros(2, 5)]}, r"`points` of prompt 0.*got \[2, 5\]"),
        ({"points": torch.tensor([[0.0] * 32, [torch.nan] * 32])}, "`points`.*finite, point 1"),
        ({"prompts": [3]}, "`prompts` must hold text, got 3 at 0"),
        ({"points": None}, "`points` must be one tensor .*, got None"),
        ({"strength": "1"}, "`strength` must be a finite number, got '1'"),
        ({"decay": None}, "`decay` must be a finite number, got None"),
        ({"strength": float("inf")}, "`strength`.*got inf"),
        ({"mode": "replace", "strength": -0.5}, "`strength` must be at least 0 where `mode` is 'replace'"),
        ({"mode": "project"}, "`mode`.*add, replace.*'project'"),
        ({"decay": 1.1}, r"`decay`.*\[0, 1\], got 1.1"),
        ({"max_new_tokens": 0}, "`max_new_tokens`.*got 0"),
        ({"batch_tokens": 0}, "`batch_tokens`.*got 0"),
        ({"layer": 4}, "`layer`.*0 to 3.*got 4"),
        ({"layer": 1.0}, "`layer`.*after the last block"),
        ({"layer": 9}, "`layer` 9 is out of range"),
    ],
)
def test_bad_arguments_are_named(options, message, llama, tiny_tokenizer):
    with pytest.raises(ValueError, match=message):
        steered_answers(
            llama, tiny_tokenizer, **{"prompts": ["a"], "points": cloud(2), "layer": 2, "strength": 1.0, **options}
        )


def test_what_cannot_be_steered_is_told(llama, tiny_tokenizer):
    headless = BertModel(BertConfig(vocab_size=len(tiny_tokenizer), **SIZES))
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        steered_answers(headless, tiny_tokenizer, ["a"], cloud(1), layer=1, strength=1.0)
    with pytest.raises(ValueError, match="not finite.*`strength` 1e\\+38"):
        steered_answers(llama, tiny_tokenizer, PROMPTS, 1e4 * cloud(1), layer=1, strength=1e38)
    assert not any(module._forward_pre_hooks for module in llama.modules())


SCRIPT = """
import json, sys, torch, torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from monitor.steered_generation import steered_answers

folder = sys.argv[1]
dist.init_process_group("gloo")
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
model = AutoModelForCausalLM.from_pretrained(folder + "/model")
points = load_file(folder + "/points.safetensors")["points"]
options = json.load(open(folder + "/options.json"))
said = steered_answers(torch.nn.parallel.DistributedDataParallel(model), tokenizer, points=points, **options)
json.dump(said, open(f"{folder}/{dist.get_rank()}.json", "w"))
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
try:
    steered_answers(model, tokenizer, points=points, **options)
except ValueError as error:
    assert "sharded" in str(error)
    open(f"{folder}/{dist.get_rank()}.refused", "w").close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_rank_gets_what_one_process_gets_and_shards_are_refused(llama, tiny_tokenizer, tmp_path):
    from safetensors.torch import save_file

    options = {"prompts": PROMPTS[:3], **SETTINGS}
    llama.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    save_file({"points": cloud(3)}, tmp_path / "points.safetensors")
    (tmp_path / "options.json").write_text(json.dumps(options))
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    expected = steered_answers(llama, tiny_tokenizer, points=cloud(3), **options)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected
        assert (tmp_path / f"{rank}.refused").exists()
