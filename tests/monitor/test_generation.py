"""Greedy answers against transformers' own decoding of one prompt, whatever the batch, and the model left as it was."""

import random

import pytest
import torch
from processes import run
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from monitor.generation import greedy_answers
from monitor.stimuli.encoding import encode_text, qa_prompt

WORDS = "the wizard went to school and asked who is captain of a ship that sails by night".split()
PROMPTS = [qa_prompt(" ".join(random.Random(i).choices(WORDS, k=1 + 3 * (i % 4)))) for i in range(14)]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
CONFIGS = {
    "llama": lambda v: LlamaConfig(vocab_size=v, num_key_value_heads=2, **SIZES, **SPECIAL),
    "gpt2": lambda v: GPT2Config(vocab_size=v, n_embd=32, n_layer=4, n_head=4, **SPECIAL),
    "gpt_neox": lambda v: GPTNeoXConfig(vocab_size=v, **SIZES, **SPECIAL),
    "qwen2": lambda v: Qwen2Config(vocab_size=v, num_key_value_heads=2, **SIZES, **SPECIAL),
    # A window shorter than the prompts: old keys leave the cache, and the mask must follow.
    "gemma3": lambda v: Gemma3TextConfig(
        vocab_size=v, num_key_value_heads=2, head_dim=8, sliding_window=8, **SIZES, **SPECIAL
    ),
}


def build(name, tokenizer):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name](len(tokenizer))).eval()


def generated(model, tokenizer, prompt, n):
    """transformers' own greedy decoding of one prompt, without padding; the whole text."""
    ids = torch.tensor([encode_text(tokenizer, prompt)])
    config = GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=2, pad_token_id=0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def first_line(text):
    return next((line.strip() for line in text.split("\n") if line.strip()), "")


class Parrot(LlamaForCausalLM):
    """Says `after[token]` after each token; notes how many rows each forward has."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, logits_to_keep=0, **kwargs):
        self.rows.append(len(input_ids))
        if len(input_ids) > self.room:
            raise torch.OutOfMemoryError("out of memory")
        choice = self.after[input_ids[:, -1:]]
        return CausalLMOutputWithPast(logits=torch.nn.functional.one_hot(choice, len(self.after)).float())


@pytest.fixture
def parrot(tiny_llama, tiny_tokenizer):
    """A function from two-character texts "ab", "bc", ... (what follows what; "." is EOS) to a model that says them."""

    def make(*steps):
        model = tiny_llama()
        model.__class__ = Parrot
        model.rows, model.room = [], 10**6
        model.after = torch.arange(len(tiny_tokenizer))  # a character without a step is said for ever
        for step in steps:
            token, following = (tiny_tokenizer(character)["input_ids"][0] for character in step)
            model.after[token] = tiny_tokenizer.eos_token_id if step[1] == "." else following
        return model

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_batched_equals_transformers_own_greedy_decoding_one_by_one(name, tiny_tokenizer):
    model = build(name, tiny_tokenizer)
    whole = [generated(model, tiny_tokenizer, prompt, 20) for prompt in PROMPTS]
    assert len(set(whole)) > 5, "the answers must differ, or any order would do"
    assert greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=20, one_line=False) == [
        text.strip() for text in whole
    ]
    assert greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=20) == [first_line(text) for text in whole]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_answers_do_not_depend_on_the_batch(name, tiny_tokenizer):
    model = build(name, tiny_tokenizer)
    alone = [greedy_answers(model, tiny_tokenizer, [p], max_new_tokens=20, one_line=False)[0] for p in PROMPTS]
    for batch_tokens in (1, 100, 10_000):
        said = greedy_answers(
            model, tiny_tokenizer, PROMPTS[::-1], max_new_tokens=20, one_line=False, batch_tokens=batch_tokens
        )
        assert said[::-1] == alone


def test_the_padding_matters_when_it_is_not_masked(tiny_tokenizer, monkeypatch):
    """The control of the two tests above: without mask and positions the same prompts get other answers."""
    model = build("gpt2", tiny_tokenizer)
    alone = [greedy_answers(model, tiny_tokenizer, [p], max_new_tokens=20, one_line=False)[0] for p in PROMPTS]
    forward = type(model).forward

    def blind(self, attention_mask=None, position_ids=None, cache=None, **kwargs):
        return forward(self, cache=cache, **kwargs)

    monkeypatch.setattr(type(model), "forward", blind)
    assert greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=20, one_line=False) != alone


def test_an_answer_ends_at_eos_or_at_the_end_of_its_first_line(parrot, tiny_tokenizer):
    model = parrot("ax", "xy", "y\n", "bz", "z.", "\n!", "cw", "d\n")
    said = greedy_answers(model, tiny_tokenizer, ["a", "b", "c", "d"], max_new_tokens=6)
    # "d" begins with a line break: its answer is on the next line.
    assert said == ["xy", "z", "wwwwww", "!!!!!"]
    assert greedy_answers(model, tiny_tokenizer, ["a", "d"], max_new_tokens=5, one_line=False) == ["xy\n!!", "!!!!"]


def test_decoding_stops_with_the_last_answer_and_rows_that_ended_are_not_computed(parrot, tiny_tokenizer):
    model = parrot("a.", "bx", "x.", "cy", "yz", "z\n")
    assert greedy_answers(model, tiny_tokenizer, ["a", "b", "c"], max_new_tokens=50) == ["", "x", "yz"]
    assert model.rows == [3, 2, 1]


def test_never_more_than_max_new_tokens(parrot, tiny_tokenizer):
    model = parrot()
    for n in (1, 2, 7):
        model.rows.clear()
        assert greedy_answers(model, tiny_tokenizer, ["a"], max_new_tokens=n) == ["a" * n]
        assert model.rows == [1] * n


def test_every_eos_of_the_generation_config_ends_an_answer(parrot, tiny_tokenizer):
    model = parrot("ax", "x!", "!y")
    model.generation_config.eos_token_id = [2, tiny_tokenizer("!")["input_ids"][0]]
    assert greedy_answers(model, tiny_tokenizer, ["a"]) == ["x"]


def test_decoding_is_greedy_whatever_the_checkpoints_generation_config_says(tiny_tokenizer):
    model = build("llama", tiny_tokenizer)
    plain = greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=12, one_line=False)
    before = generated(model, tiny_tokenizer, PROMPTS[0], 12)
    said = tiny_tokenizer(before)["input_ids"]
    config = model.generation_config
    config.do_sample, config.temperature, config.repetition_penalty, config.suppress_tokens = True, 5.0, 3.0, said[:3]
    as_found = config.to_dict()
    # `generate` takes what an explicit greedy configuration leaves unset from the checkpoint.
    assert generated(model, tiny_tokenizer, PROMPTS[0], 12) != before
    assert greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=12, one_line=False) == plain
    assert model.generation_config.to_dict() == as_found


def test_prompts_are_encoded_as_in_training(parrot, tiny_llama, tiny_tokenizer, monkeypatch):
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    with_specials = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer.backend_tokenizer.from_str(tiny_tokenizer.backend_tokenizer.to_str()),
        pad_token="<pad>", bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
    with_specials.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    seen = []
    forward = LlamaForCausalLM.forward

    def spy(self, input_ids=None, position_ids=None, cache=None, logits_to_keep=0, **kwargs):
        seen.append(input_ids)
        return forward(
            self, input_ids=input_ids, position_ids=position_ids, cache=cache, logits_to_keep=logits_to_keep, **kwargs
        )

    monkeypatch.setattr(LlamaForCausalLM, "forward", spy)
    prompt = qa_prompt("Who is the captain?")
    for text in (prompt, "<s>" + prompt):
        seen.clear()
        greedy_answers(tiny_llama(), with_specials, [text], max_new_tokens=1)
        assert seen[0].tolist() == [[1, *tiny_tokenizer(prompt)["input_ids"]]]


def test_the_tokenizers_padding_side_and_pad_token_do_not_matter(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    expected = greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=8)
    pad, tiny_tokenizer.pad_token, tiny_tokenizer.padding_side = tiny_tokenizer.pad_token, None, "right"
    try:
        assert greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=8) == expected
    finally:
        tiny_tokenizer.pad_token = pad


def test_batches_are_halved_when_memory_runs_out(parrot, tiny_tokenizer):
    model = parrot("ax", "x.", "by", "y.", "cz", "z.")
    model.room = 2
    prompts = ["a", "b", "c", "a", "b"]
    assert greedy_answers(model, tiny_tokenizer, prompts) == ["x", "y", "z", "x", "y"]
    assert max(size for size in model.rows if size <= 2) == 2 and 5 in model.rows
    model.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        greedy_answers(model, tiny_tokenizer, prompts)


def train(model, tokenizer, measure, steps=4):
    """Weights after a few dropout-noisy steps of Adam, with `measure` called between backward-free moments."""
    torch.manual_seed(3)
    model.train()
    model.model.embed_tokens.eval()  # a mode of its own, which must come back
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = torch.tensor([tokenizer(PROMPTS[3])["input_ids"]])
    for _ in range(steps):
        if measure:
            modes = [module.training for module in model.modules()]
            asks = [p.requires_grad for p in model.parameters()]
            config, generation = model.config.to_dict(), model.generation_config.to_dict()
            greedy_answers(model, tokenizer, PROMPTS, max_new_tokens=5)
            assert modes == [module.training for module in model.modules()]
            assert asks == [p.requires_grad for p in model.parameters()]
            assert (config, generation) == (model.config.to_dict(), model.generation_config.to_dict())
            assert all(p.grad is None for p in model.parameters())
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def draw(module, args):
    """What a module does that draws random numbers in evaluation mode too."""
    torch.rand(3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_goes_on_bit_equal(checkpointing, tiny_tokenizer):
    def model():
        torch.manual_seed(0)
        config = CONFIGS["llama"](len(tiny_tokenizer))
        config.attention_dropout, config.use_cache = 0.3, False
        made = AutoModelForCausalLM.from_config(config)
        if checkpointing:
            made.gradient_checkpointing_enable()
        made.model.norm.weight.requires_grad_(False)
        made.model.register_forward_pre_hook(draw)
        return made

    alone = train(model(), tiny_tokenizer, measure=False)
    assert train(model(), tiny_tokenizer, measure=True).equal(alone)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_training_mode_checkpointing_and_patched_forwards_do_not_change_the_answers(name, tiny_tokenizer):
    torch.manual_seed(0)
    config = CONFIGS[name](len(tiny_tokenizer))
    config.attention_dropout = config.attn_pdrop = 0.5
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config).eval()
    expected = greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=8)
    assert len(set(expected)) > 3
    model.gradient_checkpointing_enable()
    model.train()
    model.forward = lambda **kwargs: pytest.fail("a trainer's own forward was called")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=8) == expected


def test_an_adapter_speaks_and_its_absence_too(tiny_tokenizer):
    from peft import LoraConfig, get_peft_model

    model = build("llama", tiny_tokenizer)
    base = greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=8)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    said = greedy_answers(adapted, tiny_tokenizer, PROMPTS, max_new_tokens=8)
    with adapted.disable_adapter():
        assert greedy_answers(adapted, tiny_tokenizer, PROMPTS, max_new_tokens=8) == base
    merged = adapted.merge_and_unload()
    assert said == greedy_answers(merged, tiny_tokenizer, PROMPTS, max_new_tokens=8) != base


def test_bfloat16_works(tiny_tokenizer):
    model = build("llama", tiny_tokenizer).to(torch.bfloat16)
    assert len(set(greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=8))) > 3


def test_progress_is_shown_only_when_asked_for(tiny_llama, tiny_tokenizer, capsys):
    greedy_answers(tiny_llama(), tiny_tokenizer, PROMPTS[:2], max_new_tokens=2)
    assert capsys.readouterr() == ("", "")
    greedy_answers(tiny_llama(), tiny_tokenizer, PROMPTS[:2], max_new_tokens=2, progress="answers")
    assert "answers" in capsys.readouterr().err


def test_no_prompts_no_answers(tiny_llama, tiny_tokenizer):
    assert greedy_answers(tiny_llama(), tiny_tokenizer, []) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("a text", {}, "`prompts`.*one string"),
        (["a", " "], {}, "`prompts`.*at 1"),
        (["a"], {"max_new_tokens": 0}, "`max_new_tokens`.*got 0"),
        (["a"], {"batch_tokens": 0}, "`batch_tokens`.*got 0"),
        (["a", "the school " * 45], {}, "128 positions, but prompt 1"),
    ],
)
def test_bad_arguments_are_named(prompts, options, message, tiny_llama, tiny_tokenizer):
    with pytest.raises(ValueError, match=message):
        greedy_answers(tiny_llama(), tiny_tokenizer, prompts, **options)


def test_a_model_without_a_head_cannot_speak(tiny_tokenizer):
    model = BertModel(BertConfig(vocab_size=len(tiny_tokenizer), **SIZES))
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        greedy_answers(model, tiny_tokenizer, ["a"])


SCRIPT = """
import json, sys, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from monitor.generation import greedy_answers

folder, what = sys.argv[1:]
dist.init_process_group("gloo")
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
model = AutoModelForCausalLM.from_pretrained(folder + "/model")
if what == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (2,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
prompts = json.load(open(folder + "/prompts.json"))
said = greedy_answers(model, tokenizer, prompts, max_new_tokens=12, batch_tokens=150, progress="speaking")
json.dump(said, open(f"{folder}/{what}-{dist.get_rank()}.json", "w"))
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["ddp", "fsdp2"])
def test_every_rank_gets_what_one_process_gets(what, tiny_tokenizer, tmp_path):
    import json

    model = build("llama", tiny_tokenizer)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.json").write_text(json.dumps(PROMPTS))
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(tmp_path / "script.py", [tmp_path, what], tmp_path, ranks=2)
    expected = greedy_answers(model, tiny_tokenizer, PROMPTS, max_new_tokens=12)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"{what}-{rank}.json").read_text()) == expected
    assert done.stderr.count("speaking: 100%") <= 1, "only the first rank shows progress"
