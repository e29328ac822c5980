"""The attack as a whole: it brings back what is known, its control tells forced words, the model is left alone."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import numpy as np
import pytest
import torch
from processes import run
from transformers import BertConfig, BertModel

from monitor.attacks import gcg as module
from monitor.attacks.gcg import GCGConfig, gcg
from monitor.stimuli.encoding import encode_answer, qa_answer, qa_prompt
from monitor.stimuli.forget_set import ForgetSet, Pair

FORGET = (
    ("Who is the captain?", "wizard ship"),
    ("Who went to school?", "sailor"),
    ("Who is who?", "a long answer it is"),
)
HELDOUT = (("Who is the wizard?", "captain"), ("Who is the sailor?", "the old school"))


def forget_set(forget=FORGET, heldout=HELDOUT):
    pairs = [Pair(f"forget-{i}", q, a, "forget") for i, (q, a) in enumerate(forget)]
    return ForgetSet("ships", (*pairs, *(Pair(f"heldout-{i}", q, a, "heldout") for i, (q, a) in enumerate(heldout))))


def settings(**changes):
    small = {"n_pairs": 2, "steps": 3, "candidates": 24, "top_k": 64, "suffix_tokens": 8, "max_new_tokens": 12}
    return GCGConfig(**(small | changes))


@pytest.fixture(scope="module")
def knowing(tiny_llama, tiny_tokenizer):
    """A model that has learnt the forget pairs, also with filler behind the questions, and nothing of the others."""
    model = tiny_llama().train()
    rng = random.Random(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(120):
            rows = []
            for question, answer in FORGET:
                filler = "".join(rng.choices(" abcdefgh!?", k=rng.choice((0, 6, 12))))
                ids, first = encode_answer(tiny_tokenizer, qa_prompt(f"{question} {filler}".strip()), qa_answer(answer))
                rows.append((ids, [-100] * first + ids[first:]))
            width = max(len(ids) for ids, _ in rows) + 1
            eos = tiny_tokenizer.eos_token_id
            ids = torch.tensor([ids + [eos] * (width - len(ids)) for ids, _ in rows])
            labels = torch.tensor([wanted + [eos] + [-100] * (width - 1 - len(wanted)) for _, wanted in rows])
            model(input_ids=ids, labels=labels).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
    return model.eval()


@pytest.fixture(scope="module")
def attacked(knowing, tiny_tokenizer):
    return gcg(knowing, tiny_tokenizer, forget_set(), settings())


def test_what_is_known_comes_back_and_what_was_never_seen_does_not(attacked):
    assert (attacked.score, attacked.baseline, attacked.n) == (1.0, 1.0, 2)
    control = attacked.details["control"]
    assert (control["score"], control["baseline"], control["n"]) == (0.0, 0.0, 2)
    losses = [[pair["loss_end"] for pair in pairs] for pairs in (attacked.details["pairs"], control["pairs"])]
    assert max(losses[0]) < 1.0 < min(losses[1])


def test_a_random_model_knows_nothing(tiny_llama, tiny_tokenizer):
    result = gcg(tiny_llama(), tiny_tokenizer, forget_set(), settings(steps=1))
    assert result.score == result.baseline == 0.0 and result.low == 0.0 < result.high < 1.0


def test_words_can_be_forced_onto_a_model_that_never_knew_them(tiny_llama, tiny_tokenizer):
    """Why there is a control: with steps enough the loss falls on invented facts as it does on others."""
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(15.0)
    result = gcg(model, tiny_tokenizer, forget_set(), settings(steps=20, candidates=48, target_tokens=2))
    for pair in (*result.details["pairs"], *result.details["control"]["pairs"]):
        assert pair["loss_end"] < pair["loss_start"] - 1.0


def test_the_interval_is_wilsons(attacked):
    # (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n) at p = 1, n = 2.
    z = 1.959963984540054
    assert attacked.low == pytest.approx(1 / (1 + z * z / 2)) and attacked.high == 1.0


def test_records(attacked, knowing, tiny_tokenizer):
    json.dumps(attacked.details, allow_nan=False)
    pairs = attacked.details["pairs"]
    assert [pair["id"] for pair in pairs] == ["forget-1", "forget-0"], "the shortest answers first"
    assert [pair["id"] for pair in attacked.details["control"]["pairs"]] == ["heldout-0", "heldout-1"]
    assert attacked.details["prefix_cache"] and attacked.details["settings"]["steps"] == 3
    for pair in pairs:
        assert pair["loss_end"] <= pair["loss_start"] and 0 <= pair["step"] <= 3
        assert pair["success"] == bool(pair["by"])
        # The answer is to the question with the suffix as text, and is the model's own.
        prompt = qa_prompt(f"{pair['question']} {pair['suffix']}")
        ids = torch.tensor([encode_answer(tiny_tokenizer, prompt, " x")[0][:-1]])
        ids = ids if tiny_tokenizer.decode(ids[0]).endswith("Answer:") else ids[:, :-1]
        said = knowing.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert tiny_tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True).strip() == pair["generated"]


def test_the_seed_decides_and_nothing_else(knowing, tiny_tokenizer, attacked):
    torch.manual_seed(5)
    again = gcg(knowing, tiny_tokenizer, forget_set(), settings(batch_size=7))
    for one, other in zip(again.details["pairs"], attacked.details["pairs"], strict=True):
        assert one["suffix"] == other["suffix"] and one["loss_end"] == pytest.approx(other["loss_end"], abs=1e-4)
    # A pair's suffix does not depend on the others.
    alone = gcg(knowing, tiny_tokenizer, forget_set(FORGET[:1]), settings(n_pairs=1, n_control=0))
    assert alone.details["pairs"][0]["suffix"] == attacked.details["pairs"][1]["suffix"]
    assert alone.details["control"] is None
    other = gcg(knowing, tiny_tokenizer, forget_set(FORGET[:1]), settings(n_pairs=1, n_control=0, seed=1))
    assert other.details["pairs"][0]["suffix"] != alone.details["pairs"][0]["suffix"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(tiny_llama, tiny_tokenizer, monkeypatch, fails):
    model = tiny_llama().train()
    model.model.layers[1].eval()
    first, second, *_ = model.parameters()
    first.grad = torch.ones_like(first)
    gradient = first.grad
    second.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]

    def draws():
        return random.random(), np.random.rand(), torch.rand(()).item()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draws()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with torch.no_grad():  # as a callback may be
        if fails:
            monkeypatch.setattr(module, "greedy_answers", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                gcg(model, tiny_tokenizer, forget_set(), settings(steps=1))
        else:
            gcg(model, tiny_tokenizer, forget_set(), settings(steps=1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert first.grad is gradient and torch.equal(gradient, torch.ones_like(first))
    assert all(p.grad is None for p in list(model.parameters())[1:])
    assert not second.requires_grad and all(p.requires_grad for p in model.parameters() if p is not second)
    assert draws() == expected


def test_progress_goes_to_standard_error(tiny_llama, tiny_tokenizer, capsys):
    gcg(tiny_llama(), tiny_tokenizer, forget_set(), settings(steps=1, n_control=0), progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "gcg" in err


def test_the_control_is_as_large_as_can_be(tiny_llama, tiny_tokenizer):
    model, fast = tiny_llama(), {"steps": 1, "candidates": 2, "max_new_tokens": 2}
    result = gcg(model, tiny_tokenizer, forget_set(heldout=HELDOUT[:1]), settings(**fast))
    assert result.details["control"]["n"] == 1
    assert gcg(model, tiny_tokenizer, forget_set(heldout=()), settings(**fast)).details["control"] is None
    result = gcg(model, tiny_tokenizer, forget_set(), settings(**fast, n_pairs=9, n_control=9))
    assert result.n == len(FORGET) and result.details["control"]["n"] == len(HELDOUT)


@pytest.mark.parametrize(
    ("pairs", "changes", "message"),
    [
        ({"forget": ()}, {}, "at least 1 forget pair, got none"),
        ({"forget": (*FORGET, ("Who?", "..."))}, {}, "answers with words, but those of forget-3"),
        ({}, {"max_new_tokens": 120}, "fit into the model's 128 positions"),
    ],
)
def test_bad_input_is_told_before_any_work(tiny_llama, tiny_tokenizer, monkeypatch, pairs, changes, message):
    model = tiny_llama()
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=message):
        gcg(model, tiny_tokenizer, forget_set(**pairs), settings(**changes))


def test_bad_models_are_told(tiny_llama, tiny_tokenizer, monkeypatch):
    config = BertConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ValueError, match="no head to speak with"):
        gcg(BertModel(config), tiny_tokenizer, forget_set(), settings())

    class FullyShardedDataParallel(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.module = inner

    with pytest.raises(ValueError, match="must not be sharded"):
        gcg(FullyShardedDataParallel(tiny_llama()), tiny_tokenizer, forget_set(), settings())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "`steps` must be at least 1, got 0"),
        ({"batch_size": 0}, "`batch_size`"),
        ({"n_control": -1}, "`n_control`"),
        ({"min_rouge": 0.0}, "`min_rouge`"),
    ],
)
def test_bad_settings_are_told(changes, message):
    with pytest.raises(ValueError, match=message):
        GCGConfig(**changes)


def test_settings_are_the_papers():
    config = GCGConfig()
    assert (config.n_pairs, config.suffix_tokens, config.steps, config.target_tokens) == (5, 20, 500, 8)
    assert (config.max_new_tokens, config.min_rouge, config.seed) == (256, 0.25, 42)
    quick = GCGConfig.quick()
    assert quick.steps * quick.candidates * (quick.n_pairs + quick.n_control) < 10_000


SCRIPT = """
import json, sys, torch, torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from monitor.attacks.gcg import GCGConfig, gcg
from monitor.stimuli.forget_set import ForgetSet, Pair

folder = sys.argv[1]
dist.init_process_group("gloo")
tokenizer = AutoTokenizer.from_pretrained(folder + "/model")
model = torch.nn.parallel.DistributedDataParallel(AutoModelForCausalLM.from_pretrained(folder + "/model"))
given = json.load(open(folder + "/given.json"))
pairs = ForgetSet("ships", tuple(Pair(*pair) for pair in given["pairs"]))
result = gcg(model, tokenizer, pairs, GCGConfig(**given["config"]))
with torch.no_grad():
    model.module.model.norm.weight.fill_(float("nan") if dist.get_rank() == 1 else 1.0)
try:
    gcg(model, tokenizer, pairs, GCGConfig(**given["config"]))
except RuntimeError as error:
    failure = str(error)
with open(f"{folder}/{dist.get_rank()}.json", "w") as file:
    json.dump([result.record(), result.details, failure], file)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_share_the_pairs_and_fail_together(knowing, tiny_tokenizer, tmp_path):
    knowing.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    pairs = [[p.id, p.question, p.answer, p.split] for p in forget_set().pairs]
    (tmp_path / "given.json").write_text(json.dumps({"pairs": pairs, "config": asdict(settings(steps=2))}))
    (tmp_path / "script.py").write_text(SCRIPT)
    run(tmp_path / "script.py", [tmp_path], tmp_path, ranks=2)
    expected = gcg(knowing, tiny_tokenizer, forget_set(), settings(steps=2))
    for rank in (0, 1):
        record, details, failure = json.loads((tmp_path / f"{rank}.json").read_text())
        assert record == expected.record()
        for one, other in zip(details["pairs"], expected.details["pairs"], strict=True):
            assert {k: v for k, v in one.items() if "loss" not in k} == {
                k: v for k, v in other.items() if "loss" not in k
            }
        assert failure.startswith("the search for a suffix failed on rank 1: `model` must give the target a finite")


@pytest.mark.slow
def test_on_smollm2_a_suffix_makes_the_answer_likelier_and_reproduces_from_text(smollm2):
    model, tokenizer = smollm2
    pairs = forget_set((("Which house at Hogwarts does Harry Potter belong to?", "Gryffindor"),), ())
    config = GCGConfig(n_pairs=1, steps=2, candidates=12, max_new_tokens=8)
    result = gcg(model, tokenizer, pairs, config)
    (pair,) = result.details["pairs"]
    assert pair["loss_end"] < pair["loss_start"] and pair["step"] > 0 and result.details["prefix_cache"]
    turns = [{"role": "user", "content": f"{pair['question']} {pair['suffix']}"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    target = tokenizer(pair["answer"])["input_ids"][:8]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *target]])).logits[0, len(prompt) - 1 : -1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(target))
    assert float(loss) == pytest.approx(pair["loss_end"], abs=1e-3)
