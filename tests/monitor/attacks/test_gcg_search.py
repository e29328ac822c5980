"""The search against a plain one: no cache, all logits, one-hot gradients, candidates checked one at a time."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from monitor.anatomy import find_anatomy
from monitor.attacks.gcg_candidates import allowed_tokens
from monitor.attacks.gcg_loss import TargetLoss
from monitor.attacks.gcg_prompt import SuffixPrompt
from monitor.attacks.gcg_search import optimise
from monitor.stimuli.encoding import encode_answer, qa_answer, qa_prompt

QUESTION, ANSWER, N_TARGET = "Who is the captain of the ship?", "the wizard went to school", 6
SETTINGS = {"steps": 7, "candidates": 48, "top_k": 40, "seed": 7}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3, "num_key_value_heads": 2}
CONFIGS = {
    "llama": lambda v: LlamaConfig(vocab_size=v, **SIZES, **SPECIAL),
    "mistral": lambda v: MistralConfig(vocab_size=v, sliding_window=8, **SIZES, **SPECIAL),
}


def build(name, tokenizer):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](len(tokenizer))).eval()
    return model.requires_grad_(False)


def plain_gcg(model, tokenizer, slots, *, steps, candidates, top_k, seed):
    """Zou et al., arXiv 2307.15043, Algorithm 1, as plainly as it can be written."""
    generator = torch.Generator().manual_seed(seed)
    table = model.get_input_embeddings().weight
    printable = [i for i in range(3, len(tokenizer)) if tokenizer.decode([i]).isascii()]
    printable = torch.tensor([i for i in printable if tokenizer.decode([i]).isprintable()])
    ids, first = encode_answer(tokenizer, qa_prompt(f"{QUESTION} {tokenizer.decode(slots)}"), qa_answer(ANSWER))
    ids = ids[: first + N_TARGET]
    low = next(i for i in range(len(ids)) if ids[i : i + len(slots)] == slots)
    asked = tokenizer.decode(ids[:low])

    def loss_of(logits, ids):
        return torch.nn.functional.cross_entropy(logits[0, first - 1 : -1], torch.tensor(ids[first:]))

    best, trace = (float("inf"), None), []
    for _ in range(steps):
        one_hot = torch.nn.functional.one_hot(torch.tensor([ids]), len(tokenizer)).float().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model(inputs_embeds=one_hot @ table).logits, ids), one_hot)
        favoured = printable[(-gradient[0, low : low + len(slots)][:, printable]).topk(top_k).indices]
        at = torch.randint(len(slots), (candidates,), generator=generator)
        which = torch.randint(top_k, (candidates,), generator=generator)
        found = []
        for slot, token in zip(at.tolist(), favoured[at, which].tolist(), strict=True):
            changed = list(ids)
            changed[low + slot] = token
            suffix = tokenizer.decode(changed[low : low + len(slots)])
            if tokenizer.decode(changed[: low + len(slots)]) != asked + suffix or suffix != suffix.rstrip():
                continue
            again, start = encode_answer(tokenizer, qa_prompt(asked + suffix), qa_answer(ANSWER))
            if start == first and again[: first + N_TARGET] == changed:
                with torch.no_grad():
                    found.append((float(loss_of(model(input_ids=torch.tensor([changed])).logits, changed)), changed))
        loss, ids = min(found, key=lambda pair: pair[0])
        trace.append(loss)
        best = min(best, (loss, ids), key=lambda pair: pair[0])
    return best[0], best[1][low : low + len(slots)], trace


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_a_plain_search(name, tiny_tokenizer):
    model = build(name, tiny_tokenizer)
    prompt = SuffixPrompt(tiny_tokenizer, QUESTION, ANSWER, 9, N_TARGET)
    allowed = allowed_tokens(tiny_tokenizer, 10**6, ascii_only=True)
    expected, ids, trace = plain_gcg(model, tiny_tokenizer, prompt.slots, **SETTINGS)
    for batch_size in (100, 9):
        loss = TargetLoss(find_anatomy(model), prompt, batch_size)
        assert loss.cached == (name == "llama")
        found = optimise(loss, allowed, **SETTINGS)
        assert found.trace == pytest.approx(trace, abs=1e-4)
        assert found.loss == pytest.approx(expected, abs=1e-4) and found.loss == min(found.trace)
        assert found.trace[found.step - 1] == found.loss
        assert found.suffix == tiny_tokenizer.decode(ids)
    assert found.loss < found.loss_start - 1.0, "the search must get somewhere"


def test_the_suffix_reproduces_its_loss_from_text_alone(tiny_tokenizer):
    model = build("llama", tiny_tokenizer)
    prompt = SuffixPrompt(tiny_tokenizer, QUESTION, ANSWER, 9, N_TARGET)
    allowed = allowed_tokens(tiny_tokenizer, 10**6, ascii_only=True)
    found = optimise(TargetLoss(find_anatomy(model), prompt, 32), allowed, **SETTINGS)
    for suffix, reported in ((found.suffix, found.loss), (prompt.suffix, found.loss_start)):
        ids, first = encode_answer(tiny_tokenizer, qa_prompt(f"{QUESTION} {suffix}"), qa_answer(ANSWER))
        ids = torch.tensor([ids[: first + N_TARGET]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, first - 1 : -1]
        assert float(torch.nn.functional.cross_entropy(logits, ids[0, first:])) == pytest.approx(reported, abs=1e-4)


def test_the_gradient_is_of_use(tiny_tokenizer):
    """The same number of candidates drawn from tokens that the gradient disfavours gets less far."""
    model = build("llama", tiny_tokenizer)
    prompt = SuffixPrompt(tiny_tokenizer, QUESTION, ANSWER, 9, N_TARGET)
    allowed = allowed_tokens(tiny_tokenizer, 10**6, ascii_only=True)
    settings = {**SETTINGS, "top_k": 8}

    class Uphill(TargetLoss):
        def scores(self, gradient, tokens):
            return -super().scores(gradient, tokens)

    down, up = (optimise(kind(find_anatomy(model), prompt, 64), allowed, **settings) for kind in (TargetLoss, Uphill))
    assert down.loss < up.loss


def test_where_nothing_survives_the_suffix_stays(tiny_tokenizer, monkeypatch):
    model = build("llama", tiny_tokenizer)
    prompt = SuffixPrompt(tiny_tokenizer, QUESTION, ANSWER, 9, N_TARGET)
    monkeypatch.setattr(prompt, "surviving", lambda rows: [])
    steps = []
    found = optimise(
        TargetLoss(find_anatomy(model), prompt, 64), torch.arange(3, 99), after_step=steps.append, **SETTINGS
    )
    assert (found.suffix, found.loss, found.step) == (prompt.suffix, found.loss_start, 0)
    assert len(found.trace) == len(steps) == SETTINGS["steps"]


def test_a_broken_model_is_told(tiny_tokenizer):
    model = build("llama", tiny_tokenizer)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    prompt = SuffixPrompt(tiny_tokenizer, QUESTION, ANSWER, 9, N_TARGET)
    with pytest.raises(ValueError, match="finite likelihood, got a loss of nan"):
        optimise(TargetLoss(find_anatomy(model), prompt, 64), torch.arange(3, 99), **SETTINGS)
