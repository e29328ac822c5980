from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from trainers.answer_logits import answer_logits
from trainers.answer_rows import answer_rows
from trainers.objectives import sequence_nll

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _models():
    yield (
        "gpt2",
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
        ),
    )
    yield "gpt_neox", lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, initializer_range=0.3))
    yield "qwen2", lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2, initializer_range=0.3))
    # Soft-caps its logits hard here, so that a head called past the model's own forward would be caught.
    yield (
        "gemma2",
        lambda: Gemma2ForCausalLM(
            Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5, initializer_range=0.3)
        ),
    )


MODELS = dict(_models())


def _parts(seed: int = 0) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for batch in (3, 2):
        input_ids = torch.randint(64, (batch, 10), generator=generator)
        mask, labels = torch.ones_like(input_ids), torch.full_like(input_ids, -100)
        for i in range(batch):
            mask[i, 7 + i :] = 0
            labels[i, 3 + i : 7 + i] = input_ids[i, 3 + i : 7 + i]
        parts.append({"input_ids": input_ids, "attention_mask": mask, "labels": labels})
    return parts


@pytest.mark.parametrize("name", MODELS)
def test_equals_full_logits_with_gradients(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    parts = _parts()
    found = answer_logits(model, model.get_output_embeddings(), parts)
    sum(sequence_nll(rows).sum() for rows in found).backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()

    loss = 0.0
    for rows, part in zip(found, parts, strict=True):
        logits = model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits
        expected = answer_rows(logits, part["labels"])
        torch.testing.assert_close(rows.logits, expected.logits, atol=1e-5, rtol=1e-5)
        assert rows.targets.equal(expected.targets) and rows.sequence.equal(expected.sequence)
        assert rows.n_sequences == len(part["labels"])
        loss = loss + sequence_nll(expected).sum()
    loss.backward()
    for key, p in model.named_parameters():
        torch.testing.assert_close(gradients[key], p.grad, atol=2e-4, rtol=1e-4)


def test_the_head_sees_contiguous_answer_rows_only(llama):
    model, seen = llama(), []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append((args[0], output.shape)))
    parts = _parts()
    answer_logits(model, model.lm_head, parts)
    n = sum(int((part["labels"] != -100).sum()) for part in parts)
    ((hidden, shape),) = seen
    assert shape == (1, n, 64) and hidden.is_contiguous()
    assert not model.lm_head._forward_pre_hooks


def test_the_hook_goes_when_the_forward_fails(llama):
    model, parts = llama(), _parts()
    parts[0]["input_ids"][0, 0] = 10_000
    with pytest.raises(IndexError):
        answer_logits(model, model.lm_head, parts)
    assert not model.lm_head._forward_pre_hooks


def test_a_forward_that_never_calls_the_head(llama):
    """Some models multiply by the head's weight themselves: the rows are then cut out of full logits."""
    model, parts = llama(), _parts()
    expected = answer_logits(model, model.lm_head, parts)
    stray = torch.nn.Linear(1, 1)
    found = answer_logits(model, stray, parts)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.logits, b.logits)
