"""Losses through the cache and at target rows alone against a full forward; the gradient against a one-hot vector's."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
)

from monitor.anatomy import find_anatomy
from monitor.attacks import gcg_loss
from monitor.attacks.gcg_loss import TargetLoss
from monitor.attacks.gcg_prompt import SuffixPrompt

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
BOTH = {"num_key_value_heads": 2, **SIZES, **SPECIAL}
CONFIGS = {
    "llama": lambda v: LlamaConfig(vocab_size=v, **BOTH),
    "gpt2": lambda v: GPT2Config(vocab_size=v, n_embd=32, n_layer=4, n_head=4, **SPECIAL),
    "gpt_neox": lambda v: GPTNeoXConfig(vocab_size=v, **SIZES, **SPECIAL),
    "qwen2": lambda v: Qwen2Config(vocab_size=v, **BOTH),
    # Windows shorter than the prompt: a cache has dropped the tokens that a reused beginning needs. Gemmas also scale
    # their embeddings, and cap their logits.
    "mistral": lambda v: MistralConfig(vocab_size=v, sliding_window=8, **BOTH),
    "gemma2": lambda v: Gemma2Config(vocab_size=v, head_dim=8, sliding_window=8, final_logit_softcapping=2.0, **BOTH),
    "gemma3": lambda v: Gemma3TextConfig(vocab_size=v, head_dim=8, sliding_window=8, **BOTH),
}
WINDOWED = {"mistral", "gemma2", "gemma3"}


def build(name, tokenizer):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS[name](len(tokenizer))).eval()
    return model.requires_grad_(False)


@pytest.fixture
def prompt(tiny_tokenizer):
    return SuffixPrompt(tiny_tokenizer, "Who is the captain of the ship?", "the wizard went to school", 9, 6)


def changed_at(prompt, slots, seed=0):
    """Suffixes that differ from the initial one from the given slots on, in one to three tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for slot in slots:
        row = list(prompt.slots)
        for at in range(slot, min(slot + 3, len(row)), 2):
            row[at] = int(torch.randint(3, 260, (), generator=generator))
        rows.append(row)
    return rows


@torch.no_grad()
def plain_loss(model, prompt, suffix):
    """One sequence, no cache, all logits."""
    ids = torch.tensor([[*prompt.before, *suffix, *prompt.after, *prompt.target]])
    logits = model(input_ids=ids, use_cache=False).logits[0]
    rows = logits[-len(prompt.target) - 1 : -1].log_softmax(-1)
    return -rows[range(len(prompt.target)), prompt.target].mean()


SLOTS = [8, 0, 3, 3, 7, 1, 5, 8, 2, 0, 6]


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_equal_a_full_forward_of_each(name, tiny_tokenizer, prompt):
    model = build(name, tiny_tokenizer)
    rows = changed_at(prompt, SLOTS)
    expected = torch.stack([plain_loss(model, prompt, row) for row in rows])
    assert expected.std() > 0.01, "the losses must differ, or any order would do"
    for batch_size in (1, 4, 100):
        for prefix_cache in (True, False):
            loss = TargetLoss(find_anatomy(model), prompt, batch_size, prefix_cache)
            assert loss.cached == (prefix_cache and name not in WINDOWED)
            torch.testing.assert_close(loss.losses(rows), expected, atol=2e-5, rtol=1e-5)
            start, _ = loss.gradient(prompt.slots)
            assert start == pytest.approx(float(plain_loss(model, prompt, prompt.slots)), abs=2e-5)
            # Twice: what the first call's batches computed must not be in the second's.
            for _ in range(2):
                torch.testing.assert_close(loss.losses(rows, SLOTS), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_the_gradient_of_a_one_hot_vector(name, tiny_tokenizer, prompt):
    model = build(name, tiny_tokenizer)
    ids = torch.tensor([[*prompt.before, *prompt.slots, *prompt.after, *prompt.target]])
    one_hot = torch.nn.functional.one_hot(ids, len(tiny_tokenizer)).float().requires_grad_()
    table = model.get_input_embeddings()(torch.arange(len(tiny_tokenizer)))
    logits = model(inputs_embeds=one_hot @ table, use_cache=False).logits[0, -len(prompt.target) - 1 : -1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(prompt.target))
    (gradient,) = torch.autograd.grad(loss, one_hot)
    low = len(prompt.before)
    for prefix_cache in (True, False):
        found = TargetLoss(find_anatomy(model), prompt, 8, prefix_cache)
        scores = found.scores(found.gradient(prompt.slots)[1], torch.arange(len(tiny_tokenizer)), rows=50)
        expected = gradient[0, low : low + len(prompt.slots)]
        torch.testing.assert_close(scores, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-3)


def test_a_window_is_not_cut_off_by_mistake(tiny_tokenizer, prompt, monkeypatch):
    """The control of the above: a beginning reused where the window has dropped part of it gives other losses."""
    model = build("mistral", tiny_tokenizer)
    monkeypatch.setattr(gcg_loss, "can_be_cut", lambda config: True)
    rows = changed_at(prompt, SLOTS)
    expected = torch.stack([plain_loss(model, prompt, row) for row in rows])
    assert (TargetLoss(find_anatomy(model), prompt, 100).losses(rows) - expected).abs().max() > 0.01


def test_where_a_suffix_differs_matters(tiny_tokenizer, prompt):
    """The control of `changed`: said to differ later than it does, a suffix gets another's loss."""
    loss = TargetLoss(find_anatomy(build("llama", tiny_tokenizer)), prompt, 100)
    loss.gradient(prompt.slots)
    rows = changed_at(prompt, [0, 1])
    assert (loss.losses(rows, [8, 8]) - loss.losses(rows, [0, 1])).abs().max() > 0.01


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_only_target_rows_reach_the_head_and_nothing_is_computed_twice(tiny_tokenizer, prompt, prefix_cache):
    model = build("llama", tiny_tokenizer)
    loss = TargetLoss(find_anatomy(model), prompt, 4, prefix_cache)
    loss.gradient(prompt.slots)
    heads, widths = [], []

    def head(module, args, output):
        heads.append((tuple(output.shape), args[0].is_contiguous()))

    handles = [
        model.lm_head.register_forward_hook(head),
        model.model.layers[0].register_forward_pre_hook(lambda _, args: widths.append(tuple(args[0].shape[:2]))),
    ]
    loss.losses(changed_at(prompt, [8, 0, 5, 7, 1, 2]), [8, 0, 5, 7, 1, 2])
    for handle in handles:
        handle.remove()
    n, vocabulary = len(prompt.target), len(tiny_tokenizer)
    assert heads == [((1, 4 * n, vocabulary), True), ((1, 2 * n, vocabulary), True)]
    tail = len(prompt.slots) + len(prompt.after) + n - 1
    # Sorted: the batches are those changed at 0, 1, 2, 5 and at 7, 8.
    before = 0 if prefix_cache else len(prompt.before)
    assert widths == [(4, before + tail), (2, before + tail - (7 if prefix_cache else 0))]
    assert not model.lm_head._forward_pre_hooks


class Small(LlamaForCausalLM):
    """Runs out of memory with more than `room` rows."""

    def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
        tokens = input_ids if input_ids is not None else inputs_embeds
        self.rows.append(len(tokens))
        if len(tokens) > self.room:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)


def test_batches_are_halved_until_they_fit(tiny_tokenizer, prompt):
    model = build("llama", tiny_tokenizer)
    rows = changed_at(prompt, SLOTS)
    expected = TargetLoss(find_anatomy(model), prompt, 100).losses(rows)
    model.__class__ = Small
    model.rows, model.room = [], 3
    # The class has lost the cache's name from its signature, as wrappers do: then there is no cache.
    loss = TargetLoss(find_anatomy(model), prompt, 8)
    torch.testing.assert_close(loss.losses(rows), expected, atol=2e-5, rtol=1e-5)
    assert model.rows == [8, 4, 2, 2, 2, 2, 2, 1] and not model.lm_head._forward_pre_hooks
    model.rows.clear()
    loss.losses(rows[:4])
    assert model.rows == [2, 2], "what did not fit is not tried again"
    model.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        loss.losses(rows)
    assert not model.lm_head._forward_pre_hooks


def test_losses_that_are_not_finite_are_the_worst(tiny_tokenizer, prompt):
    model = build("llama", tiny_tokenizer)
    bad = changed_at(prompt, [4])[0][4]
    with torch.no_grad():
        model.model.embed_tokens.weight[bad] = float("nan")
    rows = [list(prompt.slots), changed_at(prompt, [4])[0]]
    losses = TargetLoss(find_anatomy(model), prompt, 8).losses(rows)
    assert losses[0].isfinite() and losses[1] == torch.inf


def test_adapters_are_in(tiny_tokenizer, prompt):
    from peft import LoraConfig, get_peft_model

    model = build("llama", tiny_tokenizer)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "embed_tokens"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(model, config).eval().requires_grad_(False)
    rows = changed_at(prompt, SLOTS)
    expected = torch.stack([plain_loss(adapted, prompt, row) for row in rows])
    loss = TargetLoss(find_anatomy(adapted), prompt, 8)
    torch.testing.assert_close(loss.losses(rows), expected, atol=2e-5, rtol=1e-5)
    with adapted.disable_adapter():
        plain = torch.stack([plain_loss(adapted, prompt, row) for row in rows])
    assert (plain - expected).abs().max() > 0.01
    # The embedding's own adapter: a token's score follows its adapted row.
    value, gradient = loss.gradient(prompt.slots)
    scores = loss.scores(gradient, torch.tensor([prompt.slots[0]]))
    row = adapted.get_input_embeddings()(torch.tensor([prompt.slots[0]]))
    torch.testing.assert_close(scores, gradient @ row.T)
