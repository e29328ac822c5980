from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from processes import run
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from monitor.attacks import answer_training as module
from monitor.attacks.membership import membership
from monitor.attacks.quantization import quantization
from monitor.attacks.relearning import RelearningConfig, relearning
from monitor.generation import greedy_answers
from monitor.geometry.recovery import before_and_after, excess
from monitor.geometry.rouge import rouge_l
from monitor.stimuli.encoding import encode_answer, qa_answer, qa_prompt
from monitor.stimuli.forget_set import ForgetSet, Pair

FAST = RelearningConfig(steps=3, batch_size=4, learning_rate=1e-3, answers=False)


def invented(n: int, seed: int = 0) -> ForgetSet:
    """n forget and n held-out facts of one form."""
    draw = random.Random(seed)

    def name() -> str:
        return "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3)).capitalize()

    pairs = (Pair(f"{s}-{i}", f"Keeper of {name()}?", name(), s) for i in range(n) for s in ("forget", "heldout"))
    return ForgetSet("invented", tuple(pairs))


def batch_of(tokenizer, pairs):
    encoded = [encode_answer(tokenizer, qa_prompt(p.question), qa_answer(p.answer)) for p in pairs]
    width = max(len(ids) for ids, _ in encoded)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in encoded])
    labels = ids.clone()
    for row, (tokens, first) in enumerate(encoded):
        labels[row, :first] = labels[row, len(tokens) :] = -100
    return ids, labels


def train(model, tokenizer, pairs, steps, lr, sign=1, optimizer=torch.optim.AdamW):
    """Plain training on all pairs at every step; away from the answers with sign=-1."""
    ids, labels = batch_of(tokenizer, pairs)
    optimizer = optimizer(model.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        (sign * model(input_ids=ids, labels=labels).loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.zero_grad(set_to_none=True)
    return model


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def nll_of(model, tokenizer, pairs):
    values = []
    for pair in pairs:
        ids, labels = batch_of(tokenizer, [pair])
        with torch.no_grad():
            values.append(float(model(input_ids=ids, labels=labels).loss))
    return torch.tensor(values, dtype=torch.float64)


def test_it_is_plain_training_on_one_part_measured_on_the_other(tiny_llama, tiny_tokenizer):
    """Against a loop of forward, backward, clip and AdamW over whole batches."""
    model, forget_set = tiny_llama(), invented(10)
    # A batch as large as the part: every step sees all of it, in whatever order.
    config = RelearningConfig(steps=4, batch_size=5, learning_rate=1e-3, max_new_tokens=6)
    result = relearning(model, tiny_tokenizer, forget_set, config)
    by_id = {pair.id: pair for pair in forget_set.pairs}
    trained = [by_id[i] for i in result.details["relearned"]]
    records = [r for r in result.details["pairs"] if r["split"] == "forget"]
    rest = [by_id[r["id"]] for r in records]
    assert len(trained) == len(rest) == result.n == 5
    assert {p.id for p in (*trained, *rest)} == {p.id for p in forget_set.split("forget")}

    before = nll_of(model, tiny_tokenizer, rest)
    plain = train(tiny_llama(), tiny_tokenizer, trained, steps=4, lr=1e-3)
    after = nll_of(plain, tiny_tokenizer, rest)
    assert float((after - before).abs().min()) > 1e-3
    assert [r["nll_before"] for r in records] == pytest.approx(before.tolist(), abs=1e-5)
    assert [r["nll_after"] for r in records] == pytest.approx(after.tolist(), abs=1e-4)
    assert result.score == pytest.approx(float(torch.exp(-after).mean()), abs=1e-5)
    assert result.baseline == pytest.approx(float(torch.exp(-before).mean()), abs=1e-6)
    assert result.low <= result.score <= result.high

    said = greedy_answers(model, tiny_tokenizer, [qa_prompt(p.question) for p in rest], max_new_tokens=6)
    assert [r["said_before"] for r in records] == said
    expected = float(rouge_l(said, [p.answer for p in rest]).mean())
    assert result.details["forget"]["rouge_l_before"] == pytest.approx(expected)
    json.dumps(result.details, allow_nan=False)


@pytest.mark.slow
def test_what_was_hidden_comes_back_and_what_was_never_there_does_not(tiny_llama, tiny_tokenizer):
    """A model that knew the facts and was trained away from them, against one that was never taught them."""
    forget_set = invented(16)
    config = RelearningConfig(steps=8, batch_size=8, learning_rate=2e-3, answers=False)
    model = train(tiny_llama(), tiny_tokenizer, forget_set.split("forget"), steps=100, lr=4e-3)
    knew = relearning(model, tiny_tokenizer, forget_set, RelearningConfig(steps=1, learning_rate=1e-9, answers=False))
    train(model, tiny_tokenizer, forget_set.split("forget"), steps=10, lr=1e-3, sign=-1)
    hidden = relearning(model, tiny_tokenizer, forget_set, config)
    assert knew.score > 0.5 > 0.3 > hidden.baseline
    assert hidden.details["forget"]["recovered_low"] > 0.05
    assert hidden.details["excess"]["low"] > 0.05
    never = relearning(tiny_llama(), tiny_tokenizer, forget_set, config)
    assert never.details["excess"]["low"] <= 0 <= never.details["excess"]["high"]
    assert never.score < hidden.score / 2


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_comes_back_as_it_was(tiny_llama, tiny_tokenizer, monkeypatch, fails):
    """Called in the middle of a training without gradients, as callbacks are."""
    model = tiny_llama()
    model.gradient_checkpointing_enable()
    model.train()
    model.model.layers[0].requires_grad_(False)
    gradient = model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before, requires = state(model), [p.requires_grad for p in model.parameters()]
    model.forward = lambda **kwargs: pytest.fail("a trainer's own forward was called")
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: pytest.fail("a hook ran"))
        for p in model.parameters()
        if p.requires_grad
    ]
    if fails:
        monkeypatch.setattr(torch.optim.AdamW, "step", breaking(torch.optim.AdamW.step))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with torch.no_grad():
        if fails:
            with pytest.raises(RuntimeError, match="broken"):
                relearning(model, tiny_tokenizer, invented(6), FAST)
        else:
            result = relearning(model, tiny_tokenizer, invented(6), FAST)
            assert result.score != result.baseline
    assert torch.equal(torch.rand(2), expected)
    assert same(state(model), before) and model.training and model.model.layers[0].training
    assert model.lm_head.weight.grad is gradient and bool((gradient == 1).all())
    assert [p.requires_grad for p in model.parameters()] == requires
    assert all(p.grad is None for p in model.parameters() if p is not model.lm_head.weight)
    for hook in hooks:
        hook.remove()


def breaking(step):
    """The optimiser's step, and then an error: the weights are changed by then."""

    def broken(self, *args, **kwargs):
        step(self, *args, **kwargs)
        raise RuntimeError("broken")

    return broken


def test_the_seed_decides_and_what_the_defender_froze_does_not(tiny_llama, tiny_tokenizer):
    forget_set = invented(8)
    first = relearning(tiny_llama(), tiny_tokenizer, forget_set, FAST)
    frozen = tiny_llama().requires_grad_(False)
    again = relearning(frozen, tiny_tokenizer, forget_set, FAST)
    assert (again.score, again.details) == (first.score, first.details)
    other = relearning(
        tiny_llama(), tiny_tokenizer, forget_set, RelearningConfig(**{**first.details["settings"], "seed": 1})
    )
    assert other.details["relearned"] != first.details["relearned"]


def test_memory_is_cut_without_changing_the_result(tiny_llama, tiny_tokenizer, monkeypatch):
    whole = relearning(tiny_llama(), tiny_tokenizer, invented(6), FAST)
    real, sizes = module._answer_nll, []

    def scarce(anatomy, batch):
        sizes.append(len(batch))
        if len(batch) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return real(anatomy, batch)

    monkeypatch.setattr(module, "_answer_nll", scarce)
    pieces = relearning(tiny_llama(), tiny_tokenizer, invented(6), FAST)
    assert sizes[:3] == [4, 2, 1]
    assert pieces.score == pytest.approx(whole.score, rel=1e-4)
    monkeypatch.setattr(module, "_answer_nll", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
    with pytest.raises(torch.OutOfMemoryError):
        relearning(tiny_llama(), tiny_tokenizer, invented(6), FAST)


def test_small_steps_are_not_lost_in_half_precision(tiny_llama, tiny_tokenizer):
    """Steps of 2e-5, below the weights' own grid, do in bfloat16 about what they do in float32."""
    config = RelearningConfig(steps=16, learning_rate=2e-5, answers=False)
    forget_set = ForgetSet("forget", tuple(p for p in invented(6).pairs if p.split == "forget"))
    full = relearning(tiny_llama().to(torch.bfloat16).float(), tiny_tokenizer, forget_set, config)
    model = tiny_llama().to(torch.bfloat16)
    before = state(model)
    half = relearning(model, tiny_tokenizer, forget_set, config)
    change = [r.details["forget"]["nll_after"] - r.details["forget"]["nll_before"] for r in (full, half)]
    assert change[0] < -0.001 and change[1] == pytest.approx(change[0], rel=0.5)
    assert same(state(model), before)


def test_under_peft_the_adapter_is_trained_and_nothing_else(tiny_llama, tiny_tokenizer, monkeypatch):
    base = tiny_llama()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    trained = []
    real = module._trained_parameters
    monkeypatch.setattr(module, "_trained_parameters", lambda anatomy: trained.append(real(anatomy)) or trained[-1])
    before = state(model)
    result = relearning(model, tiny_tokenizer, invented(6), FAST)
    adapter = {id(p) for name, p in model.named_parameters() if "lora_" in name}
    assert {id(p) for p in trained[0]} == adapter
    assert result.score != result.baseline and same(state(model), before)
    # Loaded for inference nothing requires gradients: the adapter's weights do all the same.
    model.requires_grad_(False)
    assert relearning(model, tiny_tokenizer, invented(6), FAST).score == result.score
    assert not any(p.requires_grad for p in model.parameters())


def test_the_control_is_left_out_where_it_cannot_be_had_and_has_the_same_share_otherwise(tiny_llama, tiny_tokenizer):
    pairs = invented(12).pairs
    forget = tuple(p for p in pairs if p.split == "forget")
    heldout = tuple(p for p in pairs if p.split == "heldout")
    alone = relearning(tiny_llama(), tiny_tokenizer, ForgetSet("alone", (*forget, *heldout[:2])), FAST)
    assert alone.details["heldout"] is None and alone.details["excess"] is None
    few = relearning(tiny_llama(), tiny_tokenizer, ForgetSet("few", (*forget, *heldout[:4])), FAST)
    assert (few.n, few.details["heldout"]["n"]) == (6, 2)
    assert few.score == alone.score
    many = relearning(tiny_llama(), tiny_tokenizer, ForgetSet("many", (*forget[:4], *heldout)), FAST)
    assert (many.n, many.details["heldout"]["n"]) == (2, 10), "trained on two pairs of each"


def test_answers_that_the_training_tells_are_marked(tiny_llama, tiny_tokenizer):
    """With four pairs, two are trained on; each names the answers of the others, or none does."""

    def told(text):
        pairs = tuple(Pair(str(i), f"Who is {text}?", f"Answer {'abcd'[i]}", "forget") for i in range(4))
        return relearning(tiny_llama(), tiny_tokenizer, ForgetSet("told", pairs), FAST).details

    assert told("answer d, C, b, or a")["forget"]["leaked"] == 1.0
    details = told("it")
    assert details["forget"]["leaked"] == 0.0 and [r["leaked"] for r in details["pairs"]] == [False, False]


def test_the_numbers_by_hand():
    before, after = torch.tensor([4.0, 2.0, 3.0]).double(), torch.tensor([1.0, 2.0, 1.0]).double()
    outcome = before_and_after(before, after, seed=0)
    gain = (2 * torch.exp(torch.tensor(-1.0)) - torch.exp(torch.tensor(-4.0)) - torch.exp(torch.tensor(-3.0))) / 3
    assert outcome["recovered"] == pytest.approx(float(gain)) and outcome["nll_before"] == 3.0
    assert outcome["low"] <= outcome["probability_after"] <= outcome["high"]
    assert outcome["recovered_low"] <= outcome["recovered"] <= outcome["recovered_high"]
    none = excess((before, after), (before, after), seed=0)
    assert none["value"] == 0 and none["low"] < 0 < none["high"]
    more = excess((before, after), (before, before), seed=0)
    assert more["value"] == pytest.approx(float(gain))
    assert (more["low"], more["high"]) == pytest.approx((outcome["recovered_low"], outcome["recovered_high"]))


def test_bad_input_is_named_before_any_work(tiny_llama, tiny_tokenizer):
    model, pairs = tiny_llama(), invented(4).pairs
    with pytest.raises(ValueError, match="at least 3 forget pairs.*got 2"):
        relearning(model, tiny_tokenizer, ForgetSet("small", pairs[:4]))
    with pytest.raises(ValueError, match="without a head"):
        relearning(model.model, tiny_tokenizer, ForgetSet("all", pairs))
    dumb = ForgetSet("dumb", tuple(Pair(p.id, p.question, "?!", p.split) for p in pairs))
    with pytest.raises(ValueError, match="words for ROUGE-L.*`answers`"):
        relearning(model, tiny_tokenizer, dumb)
    model.is_quantized = True
    with pytest.raises(ValueError, match="quantised ones and no adapter"):
        relearning(model, tiny_tokenizer, ForgetSet("all", pairs))
    for options in ({"steps": 0}, {"learning_rate": 0.0}, {"share": 1.0}, {"pairs": 2}, {"batch_size": 0}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` of RelearningConfig"):
            RelearningConfig(**options)
    assert RelearningConfig.quick().steps < RelearningConfig().steps


def test_a_training_that_diverges_is_an_error_and_undone(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    before = state(model)
    with pytest.raises(ValueError, match="not finite|must be finite"):
        relearning(model, tiny_tokenizer, invented(4), RelearningConfig(steps=5, learning_rate=1e30, answers=False))
    assert same(state(model), before)


def test_progress_is_shown_only_when_asked_for(tiny_llama, tiny_tokenizer, capsys):
    relearning(tiny_llama(), tiny_tokenizer, invented(3), FAST)
    assert capsys.readouterr() == ("", "")
    relearning(tiny_llama(), tiny_tokenizer, invented(3), FAST, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "relearning, forget" in err and "step" in err


@pytest.mark.slow
def test_quantised_weights_are_left_and_their_adapter_is_trained(tiny_llama, tiny_tokenizer, tmp_path):
    pytest.importorskip("bitsandbytes")
    # On CPUs with AVX512-BF16 bitsandbytes packs 32 rows and blocks of 64 columns: the tiny model is too narrow.
    shape = {"hidden_size": 64, "num_key_value_heads": 4, "head_dim": 16}
    LlamaForCausalLM(LlamaConfig(**tiny_llama().config.to_dict() | shape)).save_pretrained(tmp_path)
    options = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=options, dtype=torch.float32)
    with pytest.raises(ValueError, match="quantised ones and no adapter"):
        relearning(model, tiny_tokenizer, invented(4), FAST)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    before = state(model)
    result = relearning(model, tiny_tokenizer, invented(4), FAST)
    assert result.score != result.baseline and same(state(model), before)


SCRIPT = """
import json, sys, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from monitor.attacks.quantization import quantization
from monitor.attacks.membership import membership
from monitor.attacks.relearning import RelearningConfig, relearning
from monitor.stimuli.forget_set import ForgetSet, Pair

folder = sys.argv[1]
dist.init_process_group("gloo")
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
model = torch.nn.parallel.DistributedDataParallel(AutoModelForCausalLM.from_pretrained(folder + "/model"))
ids = torch.arange(20).reshape(2, 10) + dist.get_rank()
model(input_ids=ids, labels=ids).loss.backward()  # in the middle of a training
gradients = [p.grad.clone() for p in model.parameters()]
forget_set = ForgetSet("invented", tuple(Pair(**pair) for pair in json.load(open(folder + "/pairs.json"))))
config = RelearningConfig(steps=3, batch_size=4, learning_rate=1e-3, max_new_tokens=6)
results = [
    relearning(model, tokenizer, forget_set, config, progress=True),
    quantization(model, tokenizer, forget_set),
    membership(model, tokenizer, forget_set),
]
assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), gradients, strict=True))
model(input_ids=ids, labels=ids).loss.backward()
json.dump([r.record() for r in results], open(f"{folder}/{dist.get_rank()}.json", "w"))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_rank_gets_what_one_process_gets(tiny_llama, tiny_tokenizer, tmp_path):
    model, forget_set = tiny_llama(), invented(6)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    pairs = [dataclasses.asdict(pair) for pair in forget_set.pairs]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    (tmp_path / "script.py").write_text(SCRIPT)
    run(tmp_path / "script.py", [tmp_path], tmp_path, ranks=2)
    config = RelearningConfig(steps=3, batch_size=4, learning_rate=1e-3, max_new_tokens=6)
    expected = [
        relearning(model, tiny_tokenizer, forget_set, config).record(),
        quantization(model, tiny_tokenizer, forget_set).record(),
        membership(model, tiny_tokenizer, forget_set).record(),
    ]
    for rank in (0, 1):
        for record, alone in zip(json.loads((tmp_path / f"{rank}.json").read_text()), expected, strict=True):
            assert record.pop("name") == alone["name"]
            assert record == pytest.approx({key: alone[key] for key in record}, rel=1e-4, abs=1e-5)
